"""Content that leaves its slot without leaving the device: sequences that hold KV cells and do not run.

Parking copies nothing and takes no cells: the parked sequence marks those of the slot. It holds them until somebody
needs cells, and gives them back from its tail. It has no state: where memory has one, checkpoints go with it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import NativeError
from ..prefix.evict import Victim
from ..prefix.match import common_prefix_len
from ..request import SlotId

if TYPE_CHECKING:
    from ..prefix.index import Parked
    from .slots import SlotState
    from .state import SchedulerState


class Parking:
    """The parked sequences of one engine, which the index and the ledger know as well. Scheduler thread only."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        n_slots, n_parked = state.traits.n_slots, state.traits.n_parked
        self._free = [SlotId(n_slots + i) for i in reversed(range(n_parked))]
        self._limit = n_parked

    @property
    def is_on(self) -> bool:
        return self._limit > 0

    def set_limit(self, n_parked: int) -> None:
        """Keep no more than so many; the least valuable go."""
        self._limit = min(self._state.traits.n_parked, n_parked)
        while len(self._state.index.parked) > self._limit and self._drop_one():
            pass

    def victims(self) -> list[Victim]:
        """Whatever is not held by a lease; what is pinned goes last."""
        return [
            Victim(each.seq_id, 1, each.last_used, each.priority, is_pinned=each.n_pins > 0)
            for each in self._state.index.parked
            if not each.n_users
        ]

    def park(self, slot: SlotState) -> None:
        """Keep what the slot holds, which is about to be changed, unless somebody else holds all of it."""
        if not self.is_on or not len(slot) or self._is_held_elsewhere(slot):
            return
        state, n_tokens = self._state, len(slot)
        outgrown = state.index.parked_within(slot.namespace, slot.tokens.ids)
        if self.park_prefix(slot, n_tokens) is not None:
            for each in outgrown:
                if each.is_free and each.node is not None:
                    self.cut(each.seq_id, 0, is_outgrown=True)

    def park_prefix(self, slot: SlotState, n_tokens: int) -> Parked | None:
        """Hold the first `n_tokens` of a slot's cells by a sequence of their own. None: it could not be had."""
        seq_id = self._take_id() if self.is_on else None
        if seq_id is None:
            return None
        state = self._state
        try:
            state.backend.share_span(slot.slot_id, seq_id, n_tokens)
        except NativeError:
            self._free.append(seq_id)
            return None
        state.ledger.share(slot.slot_id, seq_id, n_tokens)
        parked = state.index.park(slot.namespace, slot.tokens.slice(0, n_tokens), seq_id)
        parked.last_used, parked.priority, parked.expires_s = slot.last_used, slot.priority, slot.expires_s
        state.n_changes += 1
        return parked

    def _is_held_elsewhere(self, slot: SlotState) -> bool:
        state, ids = self._state, slot.tokens.ids
        if state.index.is_parked(slot.namespace, ids):
            return True
        return any(
            other is not slot
            and other.namespace == slot.namespace
            and len(other) >= len(ids)
            and common_prefix_len(other.tokens.ids, ids) == len(ids)
            for other in state.slots
        )

    def _take_id(self) -> SlotId | None:
        """A sequence that holds nothing: the least valuable one has to go where all are in use."""
        if len(self._state.index.parked) >= self._limit and not self._drop_one():
            return None
        return self._free.pop()

    def _drop_one(self) -> bool:
        candidates = [each for each in self._state.index.parked if each.is_free]
        if candidates:
            given_up = min(candidates, key=lambda each: (each.priority, each.last_used))
            self._state.metrics.count("evicted_outnumbered", self.cut(given_up.seq_id, 0))
        return bool(candidates)

    def cut(self, seq_id: SlotId, n_tokens: int, *, is_outgrown: bool = False) -> int:
        """Give back the cells from `n_tokens` on; 0: all of them. Returns how many tokens it held more."""
        state = self._state
        parked = state.index.parked_by(seq_id)
        n_before = parked.position
        if state.spans.is_wanted and not is_outgrown:
            state.spans.save_tail(seq_id, parked, parked.ids(), n_tokens)
        state.backend.trim_span(seq_id, n_tokens)
        state.ledger.trim(seq_id, n_tokens)
        state.index.cut_parked(parked, n_tokens)
        state.n_changes += 1
        if not n_tokens:
            self._free.append(seq_id)
        return n_before - n_tokens

    def clear(self, namespace: str | None = None) -> int:
        """Drop what is parked of a namespace, or (None) all. Returns how many."""
        found = [each for each in self._state.index.parked if namespace in (None, each.namespace) and not each.n_users]
        for each in found:
            self.cut(each.seq_id, 0, is_outgrown=True)
        return len(found)
