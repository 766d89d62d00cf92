"""The floor: `llama_decode` of just the new tokens, at their depth, and the sampling of one token. No engine.

One sequence is filled once, in ascending order of depth; at each depth a second one takes its cells over, computes the
new tokens and is emptied again. So hybrid memory, which cannot be cut, is measured as dense memory is.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
from worker import Event, Say, serve

from pyllamacache import Engine, Model
from pyllamacache.config import EngineSettings, Memory
from pyllamacache.native.context import NativeContext
from pyllamacache.request import SamplingParams
from pyllamacache.scheduler.backend import Feed

N_UBATCH = 512


def floors(command: Event) -> list[float]:
    """Seconds for each `(depth, new)` of `command["cases"]`, in their order."""
    model = Model(command["model"], progress=False)
    shape = {name: command[name] for name in ("n_ctx", "kv_tokens", "n_threads")}
    with Engine(model, n_slots=2, progress=False, **shape) as engine:
        settings = EngineSettings(
            **{name: getattr(engine._settings, name) for name in EngineSettings.__dataclass_fields__}
        )
    context = NativeContext(model._native, settings)
    ids = np.random.default_rng(1).integers(1, model.n_vocab // 2, command["n_ctx"], dtype=np.int32)
    try:
        return _measured(context, ids, command["cases"])
    finally:
        context.close()
        model.close()


def _measured(context: NativeContext, ids: Any, cases: Sequence[Sequence[int]]) -> list[float]:
    sampler = context.new_sampler(SamplingParams(), ids[:1])
    results = [0.0] * len(cases)
    depth = 0
    for i in sorted(range(len(cases)), key=lambda i: tuple(cases[i])):
        wanted, n_new = cases[i]
        while depth < wanted:
            end = min(wanted, depth + N_UBATCH)
            _step(context, Feed(0, depth, ids[depth:end]))
            depth = end
        repeats = 3 if n_new <= N_UBATCH else 1
        results[i] = sorted(_timed(context, ids, depth, n_new, sampler) for _ in range(repeats))[repeats // 2]
    sampler.close()
    return results


def _timed(context: NativeContext, ids: Any, depth: int, n_new: int, sampler: Any) -> float:
    if depth:
        _take_over(context, depth)
    start_s = time.perf_counter()
    for begin in range(depth, depth + n_new, N_UBATCH):
        end = min(begin + N_UBATCH, depth + n_new)
        _step(context, Feed(1, begin, ids[begin:end], sampler if end == depth + n_new else None))
    elapsed_s = time.perf_counter() - start_s
    context.erase(1)
    return elapsed_s


def _take_over(context: NativeContext, depth: int) -> None:
    """Sequence 1 gets all of sequence 0."""
    if context.traits.memory is Memory.FULL:
        context.share(0, 1, depth)
        return
    state = np.empty(context.state_bytes(0), dtype=np.uint8)
    capture = context.begin_capture(0, state)
    if capture is None or not capture.finish():
        raise RuntimeError("the state of the filled sequence was not captured")
    context.resume(0, 1, depth, state)


def _step(context: NativeContext, feed: Feed) -> None:
    result = context.step([[feed]])
    if result.code:
        raise RuntimeError(f"llama_decode: {result}")


def handle(command: Event, say: Say) -> Any:
    return floors(command)


if __name__ == "__main__":
    serve(handle, at_end=lambda: None, threads=False)
