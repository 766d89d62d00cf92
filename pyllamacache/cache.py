"""`Cache`: what an engine keeps beside its slots, to look at, clear and limit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from .config import CacheConfig
from .errors import ConfigError
from .store.machine import memory_bytes
from .text.validate import check_namespace

if TYPE_CHECKING:
    from collections.abc import Callable

    from .config import CacheBudget
    from .engine import Engine
    from .request import CheckpointKind, SlotId

    _T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class CacheEntry:
    """A checkpoint, at one instant. No token ids."""

    namespace: str
    position: int
    """Tokens of the prefix it continues."""
    n_bytes: int
    kind: CheckpointKind
    age_s: float
    hits: int
    """Requests that resumed from it."""
    is_ready: bool
    """False: its capture is in flight."""
    slots: tuple[SlotId, ...]
    """Slots that hold the KV cells before it. Empty: nothing can resume from it, except on recurrent models."""


class Cache:
    """A view; asking it asks the scheduler, between two steps. Any thread."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def _call(self, function: Callable[[], _T]) -> _T:
        self._engine._check_process()

        def run() -> _T:
            try:
                return function()
            finally:
                self._engine._state.report_checkpoints()

        return self._engine._scheduler.inbox.call(run)

    def entries(self) -> tuple[CacheEntry, ...]:
        """All checkpoints, by namespace and position."""

        def read() -> list[CacheEntry]:
            state = self._engine._state
            checkpoints = state.checkpoints
            checkpoints.poll()
            held = {
                slot.slot_id: set(checkpoints.index.path(slot.namespace, slot.tokens.ids))
                for slot in state.slots
                if len(slot)
            }
            return [
                CacheEntry(
                    node.namespace,
                    node.position,
                    node.n_bytes,
                    node.kind,
                    checkpoints.age_s(node),
                    node.hits,
                    node.is_ready,
                    tuple(slot_id for slot_id, nodes in held.items() if node in nodes),
                )
                for node in checkpoints.index.checkpoints
            ]

        return tuple(sorted(self._call(read), key=lambda entry: (entry.namespace, entry.position)))

    def __len__(self) -> int:
        """Checkpoints, in flight or ready."""
        return self._call(lambda: len(self._engine._state.checkpoints.index.checkpoints))

    @property
    def size_bytes(self) -> int:
        """Bytes of all checkpoints."""
        return self._call(lambda: self._engine._state.checkpoints.used_bytes)

    @property
    def resident_bytes(self) -> int:
        """Host memory in use, at most `budget.host_bytes`.

        Checkpoints, captures in flight, staging, and blocks kept for the next ones.
        """
        return self._call(lambda: self._engine._pool.resident_bytes)

    @property
    def budget(self) -> CacheBudget:
        return self._call(lambda: self._engine._state.checkpoints.budget)

    def limit(self, config: CacheConfig) -> None:
        """Change the budget. What no longer fits is given up, least valuable first, and the memory is returned.

        Raises:
            ConfigError: not a CacheConfig.
        """
        if not isinstance(config, CacheConfig):
            raise ConfigError("config", config, "a pyllamacache.CacheConfig")
        budget = config.resolve(memory_bytes())
        self._call(lambda: self._engine._state.checkpoints.set_budget(budget))

    def clear(self, namespace: str | None = None) -> int:
        """Give up the checkpoints of a namespace, or (None) all. Slots keep what they hold. Returns how many."""
        space = None if namespace is None else check_namespace(namespace)
        return self._call(lambda: self._engine._state.checkpoints.clear(space))

    def __repr__(self) -> str:
        return f"<Cache of {self._engine!r}>"
