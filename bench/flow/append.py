"""Time to first token of a 40-token append on 6,000 tokens, against what llama_decode itself needs for those tokens.

The floor is a native step of the same 40 tokens at the same depth in a context of the same shape: fill the batch,
decode, sample; no scheduler, no thread, no Python objects. The cold prefill of the whole prompt runs in the same
loop, less often.
"""

from __future__ import annotations

import time

from bench.harness import arguments, interleave, load_model, on_engine_thread, print_table, summarize, write_json
from bench.workloads import random_ids
from pyllamacache import Engine
from pyllamacache.config import EngineSettings
from pyllamacache.native.context import NativeContext
from pyllamacache.request import SamplingParams
from pyllamacache.scheduler.backend import Feed

DEPTH = 6000
APPEND = 40


def main() -> None:
    args = arguments(__doc__ or "", repeats=15)
    model = load_model(args.model)
    ids = random_ids(DEPTH + APPEND, model.n_vocab, 1)
    with Engine(model, n_ctx=8192, n_slots=1, n_threads=args.threads, progress=False) as engine:
        bare = NativeContext(
            model._native,
            EngineSettings(**{name: getattr(engine._settings, name) for name in EngineSettings.__dataclass_fields__}),
        )
        sampler = bare.new_sampler(SamplingParams(), ids)
        for start in range(0, DEPTH, 512):
            chunk = Feed(0, start, ids[start : min(DEPTH, start + 512)])
            on_engine_thread(engine, lambda chunk=chunk: bare.step([[chunk]]))
        engine.complete(ids[:DEPTH], max_tokens=0)

        def timed_step() -> float:
            started_s = time.perf_counter()
            result = bare.step([[Feed(0, DEPTH, ids[DEPTH:], sampler)]])
            elapsed_s = time.perf_counter() - started_s
            assert result.code == 0, result
            assert bare.trim(0, DEPTH)
            return elapsed_s

        def floor() -> float:
            return float(on_engine_thread(engine, timed_step))

        def append() -> float:
            reply = engine.complete(ids, max_tokens=1)
            assert reply.usage.cached_tokens == DEPTH, reply
            engine.complete(ids[: DEPTH + 1], max_tokens=0)  # drops the appended tokens, keeps the prefix
            engine.complete(ids[:DEPTH], max_tokens=0)
            return reply.timings.ttft_s

        samples = interleave({"bare llama_decode": floor, "append": append}, repeats=args.repeats)
        cold = [engine.complete(ids, max_tokens=1, cache_prompt=False).timings.ttft_s for _ in range(2)]
        sampler.close()
        bare.close()
    floor_s, append_s, cold_s = summarize(samples["bare llama_decode"]), summarize(samples["append"]), summarize(cold)
    print_table(
        f"40 tokens on {DEPTH}: {model.name}",
        ["case", "median ms", "p95 ms", "n"],
        [
            [name, f"{s.median * 1e3:.2f}", f"{s.p95 * 1e3:.2f}", str(s.n)]
            for name, s in (("bare llama_decode", floor_s), ("append, ttft", append_s), ("cold, ttft", cold_s))
        ],
    )
    results = {
        "floor_s": floor_s,
        "append_ttft_s": append_s,
        "cold_ttft_s": cold_s,
        "append_over_floor": append_s.median / floor_s.median,
        "cold_over_append": cold_s.median / append_s.median,
    }
    print(f"append / floor {results['append_over_floor']:.3f}   cold / append {results['cold_over_append']:.1f}")
    if args.json:
        write_json("append", model, results)


if __name__ == "__main__":
    main()
