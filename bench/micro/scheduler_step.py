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


def _per_step_s(engine: Engine, n_slots: int, seed: int) -> float:
    before = engine.statistics()
    _generate(engine, n_slots, seed)
    after = engine.statistics()
    return (after.scheduler_s - before.scheduler_s) / (after.n_steps - before.n_steps)


def main() -> None:
    args = arguments(__doc__ or "", repeats=7)
    model = load_model(args.model)
    engines = {n: Engine(model, n_ctx=4096, n_slots=n, n_threads=args.threads, progress=False) for n in (1, 8)}
    seeds = iter(range(10**6))
    samples = interleave(
        {f"{n} slots": lambda n=n: _per_step_s(engines[n], n, next(seeds)) for n in engines}, repeats=args.repeats
    )
    summaries = {name: summarize(values) for name, values in samples.items()}
    print_table(
        f"scheduler's own time per decode step: {model.name}",
        ["case", "median ms", "p95 ms", "n"],
        [[n, f"{s.median * 1e3:.3f}", f"{s.p95 * 1e3:.3f}", str(s.n)] for n, s in summaries.items()],
    )
    if args.json:
        write_json("scheduler_step", model, {f"{name} s": summary for name, summary in summaries.items()})
    for engine in engines.values():
        engine.close()


if __name__ == "__main__":
    main()
