"""KV cells in host memory: what idle sequences hold is copied there behind the requests' backs, and put back.

slot or parked sequence --save_some--> block of the pool --+--> put back by `restore`
^             `--> written to disk
`-- read from disk
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from ..errors import NativeError
from ..prefix.budget import Newcomer
from ..prefix.retention import Eviction

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, ValuesView

    from ..prefix.index import Parked, Span
    from ..request import Ids, SlotId
    from ..store.host import Block
    from .slots import SlotState
    from .state import SchedulerState


def reusable(state: SchedulerState, slot: SlotState) -> Ids:
    """What a request could resume from: in exact mode, what was computed on the grid."""
    if not state.traits.exact:
        return slot.tokens.ids
    grid = state.rules.grid
    return slot.tokens.slice(0, slot.exact_tokens // grid * grid)


class Spans:
    """The spans of one engine that are in host memory. Scheduler thread only."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        traits = state.traits
        # window cells that are put back lie in another order of the ring: exact mode restores nothing of such models
        keeps_window = traits.exact and traits.memory.has_state and not traits.has_state
        self.is_possible = traits.memory.can_park and not keeps_window
        self.blocks: dict[Span, Block] = {}
        self.used_bytes = 0
        self._orphans: dict[Span, Block] = {}
        """Of spans that were given up while somebody read them."""
        self._seen: dict[SlotId, tuple[int, int]] = {}
        """By sequence: length and latest use when everything that is worth it was found stored."""
        self._todo: tuple[int, tuple[int, int], list[tuple[int, int]]] = (-1, (0, 0), [])
        """What is being saved: sequence, its length and latest use, and what is left of it, the next one last."""
        self.on_saved: Callable[[Span], None] | None = None
        self.on_stored: Callable[[str, Ids], None] | None = None
        """Is told when all that is worth it of a sequence has been stored, as far as there was room."""
        self.credit_tokens = 0
        """Cells used up since something was last copied under load."""
        self.n_saved = self.n_refused = 0
        self.evicted: Counter[str] = Counter()
        """Given up, by `Eviction`."""

    @property
    def orphans(self) -> ValuesView[Block]:
        """Memory of spans that were given up and are still being read."""
        return self._orphans.values()

    @property
    def n_evicted(self) -> int:
        """But for those that the caller cleared."""
        return self.evicted.total() - self.evicted[Eviction.CLEARED.value]

    @property
    def is_on(self) -> bool:
        return self.is_possible and self._state.room.pool.limit_bytes > 0

    # ---- saving ----

    @property
    def is_wanted(self) -> bool:
        """Whether copies are worth making now: something will be lost soon, or is to outlive the process."""
        state = self._state
        if not self.is_on:
            return False
        is_scarce = not state.counts_cells or 2 * state.ledger.used() > state.traits.kv_tokens
        return is_scarce or self.on_saved is not None

    def save_some(self, n_tokens: int) -> bool:
        """Copy about so many tokens' cells of what is idle. False: there is nothing to do."""
        left = n_tokens if self.is_on else 0
        if not left:
            return False
        for seq_id, holder, ids in self._idle():
            namespace, version = holder.namespace, (len(ids), holder.last_used)
            if self._seen.get(seq_id) == version:
                continue
            if self._todo[:2] != (seq_id, version):
                self._todo = (seq_id, version, self._missing(namespace, ids)[::-1])
            missing = self._todo[2]
            while missing:
                start, end = missing.pop()
                if not self._save(seq_id, holder, ids, start, end):
                    missing.clear()  # no room: nor is there for what comes after it
                    break
                left -= end - start
                if left <= 0:
                    return True
            self._seen[seq_id] = version
            if self.on_stored is not None:
                self.on_stored(namespace, ids)
        return left < n_tokens

    def look_again(self) -> None:
        """More is worth saving than when the sequences were last looked at: a state has become whole."""
        self._seen.clear()
        self._todo = (-1, (0, 0), [])

    def save_tail(self, seq_id: SlotId, holder: Parked | SlotState, ids: Ids, start: int) -> None:
        """What lies beyond `start` is about to go: copy what is not stored yet and finds room."""
        if self.is_on:
            for span_start, end in self._missing(holder.namespace, ids):
                if end > start and not self._save(seq_id, holder, ids, span_start, end):
                    return

    def _idle(self) -> Iterator[tuple[SlotId, Parked | SlotState, Ids]]:
        """Sequences that do not run, and what can be reused of them; those first that will be cut first."""
        state = self._state
        for parked in sorted(state.index.parked, key=lambda each: each.last_used):
            if self._seen.get(parked.seq_id) != (parked.position, parked.last_used):
                yield parked.seq_id, parked, parked.ids()
        for slot in sorted(state.slots, key=lambda slot: slot.last_used):
            if len(slot) and not slot.is_busy:
                yield slot.slot_id, slot, reusable(state, slot)

    def _missing(self, namespace: str, ids: Ids) -> list[tuple[int, int]]:
        """Spans of what is worth it that are in none of the tiers, from the start."""
        state = self._state
        upto = len(ids)
        if state.rules.has_state:  # cells beyond the last checkpoint would have to be computed again all the same
            upto = max((node.position for node in state.checkpoints.path(namespace, ids)), default=0)
        match, n_span = state.index.match(namespace, ids), state.index.span_tokens
        found = []
        for start in range(0, upto, n_span):
            span = match.spans.get(start)
            if span is None or match.usable_end(span) < min(start + n_span, upto):
                found.append((start, min(start + n_span, len(ids))))
        return found

    def _save(self, seq_id: SlotId, holder: Parked | SlotState, ids: Ids, start: int, end: int) -> bool:
        state, namespace = self._state, holder.namespace
        match = state.index.match(namespace, ids[:end])
        there = match.spans.get(start)
        if there is not None and match.usable_end(there) >= end:  # since it was found missing
            return True
        above = match.spans.get(start - state.index.span_tokens)
        if above is not None:
            above.n_users += 1
        block = None
        try:
            n_bytes = state.backend.span_size(seq_id, start, end)
            block = state.room.allocate(n_bytes, Newcomer(end - start, priority=holder.priority), namespace)
            if block is None:
                self.n_refused += 1
                return False
            state.backend.save_span(seq_id, start, end, block.data)
        except NativeError:
            if block is not None:
                block.release()
            self.n_refused += 1
            return False
        finally:
            if above is not None:
                self.let_go(above)
        span = self.put(namespace, ids[:end], block)
        span.priority, span.expires_s = holder.priority, holder.expires_s
        state.room.retention.changed(span)
        self.n_saved += 1
        if self.on_saved is not None:
            self.on_saved(span)
        return True

    def put(self, namespace: str, ids: Ids, block: Block) -> Span:
        """Take over a block with the cells of the last span of `ids`."""
        state = self._state
        span, shorter = state.index.add_span(namespace, ids, len(block.data))
        self.blocks[span] = block
        self.used_bytes += span.n_bytes
        state.room.charge(namespace, span.n_bytes)
        span.last_used = state.checkpoints.now
        for each in shorter:
            self.drop(each, None)
        if len(state.pins):
            state.pins.renew(namespace)
        return span

    # ---- giving up ----

    def drop(self, span: Span, reason: Eviction | None) -> None:
        """Give one up; its bytes stay as long as somebody reads them."""
        state = self._state
        # where there is a state, the checkpoint that needed it is remembered
        is_missed = reason is Eviction.OUTVALUED and not state.rules.has_state
        state.index.remove(span, is_evicted=is_missed)
        block = self.blocks.pop(span)
        self.used_bytes -= span.n_bytes
        state.room.charge(span.namespace, -span.n_bytes)
        if span.n_users:
            self._orphans[span] = block
        else:
            block.release()
        if reason is not None:
            self.evicted[reason.value] += 1

    def hold(self, span: Span) -> Block:
        """Its bytes stay where they are until it is let go."""
        span.n_users += 1
        return self.blocks[span]

    def let_go(self, span: Span) -> None:
        span.n_users -= 1
        if not span.n_users and span in self._orphans:
            self._orphans.pop(span).release()

    def clear(self, namespace: str | None = None) -> int:
        """Give up all of a namespace, or (None) all. Returns how many."""
        found = [span for span in self.blocks if namespace in (None, span.namespace)]
        for span in found:
            self.drop(span, Eviction.CLEARED)
        self._seen.clear()
        return len(found)
