"""Host memory for checkpoints and spans: one budget, and the least valuable goes for what is worth more."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ..config import MAX_BYTES
from ..prefix.budget import Newcomer, Retention
from ..prefix.index import Checkpoint, PrefixIndex, Span
from ..prefix.retention import Eviction, Holdings

if TYPE_CHECKING:
    from ..store.host import Block, HostPool
    from .backend import Traits

_ANYTHING = Newcomer(0, priority=1 << 30)
GiveUp = Callable[[Checkpoint | Span, Eviction], None]


class Room:
    """Blocks of the pool for marks of the index. Scheduler thread only."""

    def __init__(
        self,
        pool: HostPool,
        index: PrefixIndex,
        traits: Traits,
        clock: Callable[[], float],
        holdings: Callable[[], Holdings],
    ) -> None:
        self.pool = pool
        self.retention = Retention(index, needs_span=traits.memory.has_cells, needs_state=traits.has_state)
        self._index = index
        self._namespace_bytes = MAX_BYTES
        self._used: dict[str, int] = {}
        """Bytes of marks, by namespace."""
        self._clock = clock
        self._holdings = holdings
        self.give_up: GiveUp | None = None
        """Takes a mark out of the index and lets go of its bytes."""

    def set_namespace_bytes(self, limit_bytes: int) -> None:
        """What one namespace may have; those over it give up the longest unused."""
        self._namespace_bytes = limit_bytes
        for namespace in list(self._used):
            self._fit(namespace, 0)

    def charge(self, namespace: str, n_bytes: int) -> None:
        """A mark has got its bytes, or (below zero) lost them."""
        self._used[namespace] = self._used.get(namespace, 0) + n_bytes
        if not self._used[namespace]:
            del self._used[namespace]

    def _fit(self, namespace: str, n_bytes: int) -> bool:
        """Have the namespace give up what is over its share, whatever others have."""
        while self._used.get(namespace, 0) + n_bytes > self._namespace_bytes:
            index = self._index
            free: list[Checkpoint | Span] = [
                mark for mark in index.spans if mark.namespace == namespace and mark.is_free and not mark.n_children
            ]
            free += [mark for mark in index.checkpoints if mark.namespace == namespace and mark.is_free]
            if not free or self.give_up is None:
                return False
            self.give_up(
                min(free, key=lambda mark: (mark.priority, mark.last_used, -mark.position)), Eviction.OUTVALUED
            )
        return True

    def allocate(self, n_bytes: int, newcomer: Newcomer, namespace: str = "") -> Block | None:
        """A block, for which others may have had to go. None: only better ones are left."""
        if not self._fit(namespace, n_bytes):
            return None
        block = self.pool.allocate(n_bytes)
        if block is not None or n_bytes > self.pool.limit_bytes:
            return block
        holdings = self._holdings()
        while block is None:
            chosen = self.retention.victim(newcomer, now_s=self._clock(), holdings=holdings)
            if chosen is None or self.give_up is None:
                return None
            self.give_up(*chosen)
            block = self.pool.allocate(n_bytes)
        return block

    def give_up_one(self) -> bool:
        """The least valuable of all goes, for a lower limit. False: what is left is pinned or in use."""
        chosen = self.retention.victim(_ANYTHING, now_s=self._clock(), holdings=self._holdings())
        if chosen is None or self.give_up is None:
            return False
        self.give_up(chosen[0], Eviction.CLEARED)
        return True
