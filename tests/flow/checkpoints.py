"""Looking at an engine's checkpoints: budgets that hold at every instant, bytes to tamper with, decodes to count."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from pyllamacache import CacheConfig
from tests.native.faults import on_scheduler

STATE_BYTES = {"full": 0, "sliding": 66_000, "hybrid": 38_988, "recurrent": 210_532}
"""Size of a tiny model's checkpoint with F32 cells; a sliding one's whole window."""

BUDGETS = ("0", "1", "4", "32", "bytes")


def budget_of(name: str, kind: str) -> CacheConfig:
    """A count, or room for two states in bytes and three in memory."""
    if name != "bytes":
        return CacheConfig(max_checkpoints=int(name))
    size = STATE_BYTES[kind]
    return CacheConfig(checkpoint_bytes=int(2.5 * size), host_bytes=int(3.5 * size))


def check_budget(engine: Any) -> None:
    """Count and bytes are within their limits, and the views agree with each other.

    An engine that has nothing to do copies cells behind, which may cost it a checkpoint between two questions.
    """
    cache = engine.cache
    for _ in range(1000):
        entries, budget = cache.entries(), cache.budget
        held, size_bytes, counts = len(cache), cache.size_bytes, engine.statistics().checkpoints
        if [each.position for each in cache.entries()] == [each.position for each in entries]:
            break
    assert len(entries) == held == counts.held <= budget.max_checkpoints
    assert sum(entry.n_bytes for entry in entries) == size_bytes == counts.held_bytes <= budget.checkpoint_bytes
    assert size_bytes <= cache.resident_bytes <= budget.host_bytes


@dataclass
class Peaks:
    """The most that was held while states were being copied, either way."""

    n_checkpoints: int = 0
    checkpoint_bytes: int = 0
    resident_bytes: int = 0


def watch_peaks(engine: Any) -> Peaks:
    """Look whenever the backend captures or resumes, from now on."""
    state, peaks = engine._state, Peaks()
    backend, checkpoints = state.backend, state.checkpoints
    begin_capture, resume = backend.begin_capture, backend.resume

    def look(n_more: int, more_bytes: int) -> None:
        peaks.n_checkpoints = max(peaks.n_checkpoints, len(checkpoints.index.checkpoints) + n_more)
        peaks.checkpoint_bytes = max(peaks.checkpoint_bytes, checkpoints.used_bytes + more_bytes)
        peaks.resident_bytes = max(peaks.resident_bytes, engine._pool.resident_bytes)

    def watched_capture(seq_id: int, data: Any) -> Any:
        look(1, len(data))
        return begin_capture(seq_id, data)

    def watched_resume(*arguments: Any) -> None:
        look(0, 0)
        resume(*arguments)
        look(0, 0)

    backend.begin_capture, backend.resume = watched_capture, watched_resume
    return peaks


@contextmanager
def native_calls(engine: Any) -> Iterator[list[int]]:
    """The tokens of each native decode while the block runs."""
    backend = engine._state.backend
    calls: list[int] = []
    step = backend.step

    def counted(groups: Any) -> Any:
        calls.extend(sum(len(feed.tokens) for feed in group) for group in groups)
        return step(groups)

    backend.step = counted
    try:
        yield calls
    finally:
        backend.step = step


def positions(engine: Any) -> list[int]:
    return [entry.position for entry in engine.cache.entries()]


def by_kind(engine: Any) -> dict[str, list[int]]:
    """Positions by the kind of checkpoint."""
    found: dict[str, list[int]] = {}
    for entry in engine.cache.entries():
        found.setdefault(entry.kind.value, []).append(entry.position)
    return found


def node_at(engine: Any, position: int) -> Any:
    """The one checkpoint at a position. On the scheduler's thread."""
    engine._state.checkpoints.poll()
    (node,) = [node for node in engine._state.checkpoints.index.checkpoints if node.position == position]
    return node


def state_at(engine: Any, position: int) -> bytes:
    """A copy of a checkpoint's bytes."""

    def read() -> bytes:
        return bytes(engine._state.checkpoints.data(node_at(engine, position)).data.tobytes())

    return bytes(on_scheduler(engine, read))


def tamper(engine: Any, position: int, change: Callable[[bytes], bytes | bytearray]) -> None:
    """Replace a checkpoint's bytes by as many others."""

    def replace() -> None:
        data = engine._state.checkpoints.data(node_at(engine, position)).data
        changed = change(data.tobytes())
        assert len(changed) == len(data)
        data[:] = bytearray(changed)

    on_scheduler(engine, replace)
