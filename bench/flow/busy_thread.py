"""Four slots generating beside one busy Python thread, against the same without it.

The busy thread computes in pure Python and never yields the GIL by itself. It occupies a core, so the engine gets the
others (at least one) in both cases: what is measured is the GIL, not the core.
"""

from __future__ import annotations

import threading

from bench.flow.decode import _ours
from bench.harness import arguments, interleave, load_model, print_table, summarize, write_json
from pyllamacache import Engine
from pyllamacache.config import usable_cores


def main() -> None:
    args = arguments(__doc__ or "", repeats=7)
    model = load_model(args.model)
    threads = args.threads or max(1, usable_cores() - 1)
    stop = threading.Event()

    def spin() -> None:
        n = 0
        while not stop.is_set():
            for _ in range(1000):
                n += 1

    with Engine(model, n_ctx=2048, n_slots=4, n_threads=threads, progress=False) as engine:
        seeds = iter(range(10**6))

        def beside() -> float:
            stop.clear()
            spinner = threading.Thread(target=spin)
            spinner.start()
            try:
                return _ours(engine, 4, next(seeds))
            finally:
                stop.set()
                spinner.join()

        samples = interleave({"alone": lambda: _ours(engine, 4, next(seeds)), "beside": beside}, repeats=args.repeats)
    alone, busy = summarize(samples["alone"]), summarize(samples["beside"])
    print_table(
        f"four slots, {threads} threads, tokens/s: {model.name}",
        ["case", "median", "p05", "p95", "n"],
        [
            [n, f"{s.median:.1f}", f"{s.p05:.1f}", f"{s.p95:.1f}", str(s.n)]
            for n, s in (("alone", alone), ("beside a busy thread", busy))
        ],
    )
    results = {"alone tokens/s": alone, "beside tokens/s": busy, "beside_over_alone": busy.median / alone.median}
    print(f"beside / alone: {results['beside_over_alone']:.3f}")
    if args.json:
        write_json("busy_thread", model, results)


if __name__ == "__main__":
    main()
