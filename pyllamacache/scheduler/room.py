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
        self.is_over = False
        """A lower limit does not hold yet: what is left was in use."""
        self._clock = clock
        self._holdings = holdings
        self.give_up: GiveUp | None = None
        """Takes a mark out of the index and lets go of its bytes."""

    def set_namespace_bytes(self, limit_bytes: int) -> None:
        """What one namespace may have; those over it give up the longest unused."""
        self._namespace_bytes = limit_bytes
        for namespace in list(self._used):
            self._fit(namespace, 0, _ANYTHING)

    def charge(self, namespace: str, n_bytes: int) -> None:
        """A mark has got its bytes, or (below zero) lost them."""
        self._used[namespace] = self._used.get(namespace, 0) + n_bytes
        if not self._used[namespace]:
            del self._used[namespace]

    def _fit(self, namespace: str, n_bytes: int, newcomer: Newcomer) -> bool:
        """Have the namespace give up what is over its share, whatever others have. Only where shares were asked for."""
        while self._used.get(namespace, 0) + n_bytes > self._namespace_bytes:
            index = self._index
            free: list[Checkpoint | Span] = [span for span in index.spans if not span.n_children]
            free += index.checkpoints
            free = [
                mark for mark in free if mark.namespace == namespace and mark.is_free and _gives_way(mark, newcomer)
            ]
            if not free or self.give_up is None:
                return False
            chosen = min(free, key=lambda mark: (mark.priority, mark.last_used, -mark.position))
            self.give_up(chosen, Eviction.OUTVALUED)
        return True

    def allocate(self, n_bytes: int, newcomer: Newcomer, namespace: str = "") -> Block | None:
        """A block, for which others may have had to go. None: only better ones are left."""
        if not self._fit(namespace, n_bytes, newcomer):
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

    def fit_limit(self) -> None:
        """After a lower limit: the least valuable goes, pinned ones last. What is in use goes when it no longer is."""
        while self.pool.resident_bytes > self.pool.limit_bytes and self._give_up_one():
            pass
        self.is_over = self.pool.resident_bytes > self.pool.limit_bytes

    def _give_up_one(self) -> bool:
        if self.give_up is None:
            return False
        chosen = self.retention.victim(_ANYTHING, now_s=self._clock(), holdings=self._holdings())
        if chosen is not None:
            self.give_up(chosen[0], Eviction.CLEARED)
            return True
        pinned: list[Checkpoint | Span] = [span for span in self._index.spans if not (span.n_users or span.n_children)]
        pinned += [node for node in self._index.checkpoints if not node.n_users]
        if pinned:
            self.give_up(min(pinned, key=lambda mark: (mark.priority, mark.last_used)), Eviction.CLEARED)
        return bool(pinned)


def _gives_way(mark: Checkpoint | Span, newcomer: Newcomer) -> bool:
    """Within one namespace: never to a lower priority, and to the second class only what is of it."""
    is_second_class = isinstance(mark, Checkpoint) and mark.is_second_class
    return mark.priority <= newcomer.priority and (is_second_class or not newcomer.is_optional)
