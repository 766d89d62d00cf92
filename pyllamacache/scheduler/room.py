"""Host memory for checkpoints and spans: one budget, and the least valuable goes for what is worth more."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

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
        self._clock = clock
        self._holdings = holdings
        self.give_up: GiveUp | None = None
        """Takes a mark out of the index and lets go of its bytes."""

    def allocate(self, n_bytes: int, newcomer: Newcomer) -> Block | None:
        """A block, for which others may have had to go. None: only better ones are left."""
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
