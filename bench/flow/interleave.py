"""The largest gap between two reply tokens while another request prefills 2,000 tokens, against one n_ubatch's prefill.

The reference is the time one native prefill of n_ubatch tokens takes at the depth where the gap can be largest, the
end of the 2,000-token prompt, measured in the same loop.
"""

from __future__ import annotations

import itertools
import threading
import time

from bench.harness import arguments, interleave, load_model, on_engine_thread, print_table, summarize, write_json
from bench.workloads import random_ids
from pyllamacache import Engine
from pyllamacache.native.context import NativeContext
from pyllamacache.scheduler.backend import Feed

PREFILL = 2000


def main() -> None:
    args = arguments(__doc__ or "", repeats=7)
    model = load_model(args.model)
    with Engine(model, n_ctx=4096, n_slots=2, n_threads=args.threads, kv_tokens=8192, progress=False) as engine:
        n_ubatch = engine._traits.n_ubatch
        bare = NativeContext(model._native, engine._settings)
        ids = random_ids(PREFILL, model.n_vocab, 3)
        last = PREFILL - n_ubatch
        for start in range(0, last, n_ubatch):
            chunk = Feed(0, start, ids[start : min(last, start + n_ubatch)])
            on_engine_thread(engine, lambda chunk=chunk: bare.step([[chunk]]))
        banned = {token: float("-inf") for token in model.eog_ids}
        seeds = iter(range(1000, 10**6))

        def timed_step() -> float:
            started_s = time.perf_counter()
            assert bare.step([[Feed(0, last, ids[last:])]]).code == 0
            elapsed_s = time.perf_counter() - started_s
            assert bare.trim(0, last)
            return elapsed_s

        def one_ubatch() -> float:
            return float(on_engine_thread(engine, timed_step))

        def largest_gap() -> float:
            stamps: list[float] = []
            handle = engine.submit(random_ids(32, model.n_vocab, next(seeds)), max_tokens=400, logit_bias=banned)
            prefill_done = threading.Event()

            def prefill() -> None:
                engine.complete(random_ids(PREFILL, model.n_vocab, next(seeds)), max_tokens=1, cache_prompt=False)
                prefill_done.set()

            worker = threading.Thread(target=prefill)
            for chunk in handle:
                if chunk.token_ids:
                    stamps.append(time.perf_counter())
                if len(stamps) == 8:
                    worker.start()
                if prefill_done.is_set() and len(stamps) > 16:
                    break
            worker.join()
            return max(later - earlier for earlier, later in itertools.pairwise(stamps[8:]))

        samples = interleave({"one n_ubatch": one_ubatch, "largest gap": largest_gap}, repeats=args.repeats)
        bare.close()
    reference, gap = summarize(samples["one n_ubatch"]), summarize(samples["largest gap"])
    print_table(
        f"beside a {PREFILL}-token prefill, n_ubatch {n_ubatch}: {model.name}",
        ["case", "median ms", "max ms", "n"],
        [
            [n, f"{s.median * 1e3:.1f}", f"{s.maximum * 1e3:.1f}", str(s.n)]
            for n, s in (("one n_ubatch", reference), ("largest gap", gap))
        ],
    )
    results = {"one_ubatch_s": reference, "largest_gap_s": gap, "gap_over_ubatch": gap.median / reference.median}
    print(f"largest gap / one n_ubatch: {results['gap_over_ubatch']:.3f}")
    if args.json:
        write_json("interleave", model, results)


if __name__ == "__main__":
    main()
