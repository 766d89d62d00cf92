"""The scheduler's own time per decode step, with one slot and with eight: everything around the native call.

Taken from the engine's own counters on a real model, streaming to a consumer per slot.

"""

from __future__ import annotations

import threading

from bench.harness import arguments, interleave, load_model, print_table, summarize, write_json
from bench.workloads import random_ids
from pyllamacache import Engine

N_TOKENS = 60


def _generate(engine: Engine, n_slots: int, seed: int) -> None:
    banned = {token: float("-inf") for token in engine.model.eog_ids}
    handles = [
        engine.submit(random_ids(16, engine.model.n_vocab, seed * 100 + i), max_tokens=N_TOKENS, logit_bias=banned)
        for i in range(n_slots)
    ]
    readers = [threading.Thread(target=lambda handle=handle: [None for _ in handle]) for handle in handles]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()


def main() -> None:
    args = arguments(__doc__ or "", repeats=7)
    model = load_model(args.model)
    seeds = iter(range(10**6))

    def per_step_s(n_slots: int) -> float:
        with Engine(model, n_ctx=4096, n_slots=n_slots, n_threads=args.threads, progress=False) as engine:
            _generate(engine, n_slots, next(seeds))
            statistics = engine.statistics()
            return statistics.scheduler_s / statistics.n_steps

    samples = interleave({f"{n} slots": lambda n=n: per_step_s(n) for n in (1, 8)}, repeats=args.repeats)
    summaries = {name: summarize(values) for name, values in samples.items()}
    print_table(
        f"scheduler's own time per decode step: {model.name}",
        ["case", "median ms", "p95 ms", "n"],
        [[n, f"{s.median * 1e3:.3f}", f"{s.p95 * 1e3:.3f}", str(s.n)] for n, s in summaries.items()],
    )
    if args.json:
        write_json("scheduler_step", model, {f"{name} s": summary for name, summary in summaries.items()})


if __name__ == "__main__":
    main()
