"""What checkpoints of a state as large as Qwen3.5-27B's (149.62 MiB) cost on the CPU.

Captures and restores are those of real requests, timed on the scheduler's thread; beside each, on the same thread, a
memcpy of as many bytes into memory used before. Prefill runs with a checkpoint every n_ubatch and without any, in turn,
on one engine. The weights are random and the embedding small, so what is computed per token is mostly the state's.
"""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from bench.harness import arguments, interleave, print_table, summarize, write_json
from bench.workloads import random_ids
from pyllamacache import CacheConfig, Engine, Model

N_HELD = 32
SMALL_UBATCH = 64
"""Of the engine that fills the budget: a state is as large after 64 tokens as after 512."""
N_UBATCH = 512
STRETCH = 1024
"""Tokens of a prefill that is timed."""


def state_model(folder: str) -> Model:
    from tests.models import ModelCache, hybrid_27b_state

    return Model(ModelCache(Path(folder)).path(hybrid_27b_state(n_ctx_train=32768)), progress=False)


def resident_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Stopwatch:
    """Times the scheduler's captures and restores, and a memcpy after each of them."""

    def __init__(self, engine: Engine) -> None:
        self.captures: list[float] = []
        self.restores: list[float] = []
        self.copies: list[float] = []
        self._source: Any = None
        self._target: Any = None
        backend = engine._state.backend
        begin, resume = backend.begin_capture, backend.resume

        def timed_begin(seq_id: int, data: Any) -> Any:
            started_s = time.perf_counter()
            capture = begin(seq_id, data)
            self.captures.append(time.perf_counter() - started_s)
            self._copy(len(data))
            return capture

        def timed_resume(donor_id: int | None, seq_id: int, n_tokens: int, state: Any) -> None:
            started_s = time.perf_counter()
            resume(donor_id, seq_id, n_tokens, state)
            self.restores.append(time.perf_counter() - started_s)
            self._copy(len(state))

        backend.begin_capture, backend.resume = timed_begin, timed_resume  # type: ignore[method-assign]

    def _copy(self, n_bytes: int) -> None:
        if self._source is None:
            self._source, self._target = np.ones(n_bytes, np.uint8), np.ones(n_bytes, np.uint8)
        started_s = time.perf_counter()
        np.copyto(self._target, self._source)
        self.copies.append(time.perf_counter() - started_s)


def main() -> None:
    args = arguments(__doc__ or "", repeats=3)
    with tempfile.TemporaryDirectory() as folder:
        model = state_model(folder)
        options: dict[str, Any] = {"n_ctx": 4096, "n_slots": 2, "n_threads": args.threads, "progress": False}
        cache = CacheConfig(max_checkpoints=N_HELD, host_bytes="8GiB")
        with Engine(model, cache=cache, n_ubatch=SMALL_UBATCH, **options) as engine:
            results = measure_moves(engine)
        show(results)
        with Engine(model, cache=cache, n_ubatch=N_UBATCH, **options) as engine:
            results |= measure_prefill(engine, args.repeats)
        show(results)
        if args.json:
            write_json("checkpoints", model, results)
        model.close()


def measure_moves(engine: Engine) -> dict[str, Any]:
    """Fill the budget with one prompt, then go back to places in it."""
    n_vocab = engine.model.n_vocab
    engine.complete(random_ids(16, n_vocab, 1), max_tokens=1, store=False)
    before_bytes = resident_bytes()
    watch = Stopwatch(engine)
    long = random_ids((N_HELD + 2) * SMALL_UBATCH, n_vocab, 2)
    engine.complete(long, max_tokens=1, slot=0)
    captures, state_bytes, n_held = list(watch.captures), engine.cache.entries()[0].n_bytes, len(engine.cache)
    grown_bytes = resident_bytes() - before_bytes - 2 * state_bytes  # what the stopwatch copies between
    for seed in range(20):
        ids = long[: (4 + 7 * (seed % 4)) * SMALL_UBATCH + 20].copy()
        ids[-10:] = random_ids(10, n_vocab, 100 + seed)
        engine.complete(ids, max_tokens=1, store=False, slot=1)
    copy, capture, restore = summarize(watch.copies), summarize(captures), summarize(watch.restores)
    return {
        "state_bytes": state_bytes,
        "n_held": n_held,
        "memcpy_s": copy,
        "capture_s": capture,
        "restore_s": restore,
        "capture_over_memcpy": capture.median / copy.median,
        "capture_p95_over_memcpy": capture.p95 / copy.median,
        "restore_over_memcpy": restore.median / copy.median,
        "resident_over_states": grown_bytes / (n_held * state_bytes),
    }


def measure_prefill(engine: Engine, repeats: int) -> dict[str, Any]:
    """The same number of tokens with a checkpoint at every n_ubatch and without any, in turn."""
    seeds = iter(range(1000, 10**6))
    n_taken = 0

    def prefill(n_checkpoints: int) -> float:
        nonlocal n_taken
        engine.cache.clear()
        engine.cache.limit(CacheConfig(max_checkpoints=n_checkpoints, host_bytes="8GiB"))
        before = sum(engine.statistics().checkpoints.captured.values())
        reply = engine.complete(random_ids(STRETCH, engine.model.n_vocab, next(seeds)), max_tokens=1, slot=0)
        assert reply.cache.prefilled_tokens == STRETCH
        n_taken = sum(engine.statistics().checkpoints.captured.values()) - before or n_taken
        return reply.timings.prefill_s

    samples = interleave({"without": lambda: prefill(0), "with": lambda: prefill(N_HELD)}, repeats=repeats)
    without, with_ = summarize(samples["without"]), summarize(samples["with"])
    return {
        "prefill_without_s": without,
        "prefill_with_s": with_,
        "prefill_with_over_without": without.median / with_.median,
        "checkpoints_per_prefill": n_taken,
    }


def show(results: dict[str, Any]) -> None:
    cases = [name for name in results if name.endswith("_s")]
    rows = [
        [name, f"{results[name].median * 1e3:.1f}", f"{results[name].p95 * 1e3:.1f}", str(results[name].n)]
        for name in cases
    ]
    print_table(f"a state of {results['state_bytes'] / 2**20:.2f} MiB", ["", "median ms", "p95 ms", "n"], rows)
    for name, value in results.items():
        if "_over_" in name:
            print(f"{name}: {value:.3f}")
    print({name: value for name, value in results.items() if isinstance(value, int)})


if __name__ == "__main__":
    main()
