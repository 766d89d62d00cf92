"""The scheduler's books: slots, cells, queue and running jobs, and the changes that keep them equal to the backend.

Every change to a sequence goes through `trim`, `erase`, `share` or `grown` here, so that backend, ledger and token
buffers cannot drift apart. Scheduler thread only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from ..errors import InternalError, NativeError
from ..observe.metrics import TierCounts
from ..prefix.cells import CellLedger
from ..prefix.evict import Cut, Victim
from ..prefix.index import Checkpoint, Match, PrefixIndex, Span
from ..prefix.plan import Rules, SlotView
from ..prefix.retention import Eviction, Holdings
from ..prefix.stored import StoredPrefix
from ..request import SlotId
from ..text.transcripts import Transcripts
from .audit import audit
from .checkpoints import Checkpoints
from .keeping import Expiry, Pins
from .parking import Parking
from .recent import Recents
from .room import Room
from .slots import SlotInfo, SlotState
from .spans import Spans, reusable

if TYPE_CHECKING:
    from ..config import CacheBudget, Memory
    from ..observe.metrics import Metrics
    from ..request import Ids
    from ..store.host import Block, HostPool
    from .backend import Backend, Traits
    from .disk import DiskTier
    from .inbox import Submission
    from .jobs import Job


class SchedulerState:
    """What the loop and its stages share. `clock` is monotonic seconds."""

    def __init__(
        self,
        backend: Backend,
        metrics: Metrics,
        clock: Callable[[], float],
        piece: Callable[[int], bytes],
        pool: HostPool,
        budget: CacheBudget,
        control_text: Callable[[int], bytes] = lambda _: b"",
    ) -> None:
        self.backend = backend
        self.traits: Traits = backend.traits
        self.memory: Memory = self.traits.memory
        self.metrics = metrics
        self.clock = clock
        self.piece = piece
        self.control_text = control_text
        self.rules = self._rules(budget)
        self.slots = [SlotState(SlotId(i)) for i in range(self.traits.n_slots)]
        self.index = PrefixIndex()
        self.room = Room(pool, self.index, self.traits, clock, self._holdings)
        self.checkpoints = Checkpoints(backend, self.slots, self.room, budget, clock, self.index)
        self.spans = Spans(self)
        self.room.give_up = self._give_up
        self.room.set_namespace_bytes(budget.namespace_bytes)
        self.pins = Pins(self)
        self.expiry = Expiry(self)
        self.checkpoints.on_ready = self._checkpoint_is_ready
        self.disk: DiskTier | None = None
        self.parking = Parking(self)
        self.parking.set_limit(budget.max_parked)
        self.counts_cells = self.memory.has_cells and not self.traits.exact
        self.ledger = CellLedger()
        self.transcripts = Transcripts()
        self.recents = Recents()
        self.queue: deque[Submission] = deque()
        self.running: list[Job] = []
        self.n_steps = 0
        self.n_admitted = 0
        self._n_touched = 0
        self.n_changes = 0
        """Grows when a slot is taken, left, cut or filled: what a plan depends on besides the queue."""
        self.refused_at = (-1, 0)
        """`n_changes` and queue length when the queue's head last had to wait; planning again would say the same."""
        self.capture_awaited = -1
        """`checkpoints.n_ended` when a queued request began to wait for a capture; -1: none does."""

    def _rules(self, budget: CacheBudget) -> Rules:
        n_parked = min(self.traits.n_parked, budget.max_parked)
        return Rules(
            can_share=(self.memory.is_shareable or (self.memory.has_cells and self.traits.has_state))
            and self.traits.n_slots + n_parked > 1,
            has_state=self.traits.has_state,
            has_cells=self.memory.has_cells,
            grid=self.traits.n_ubatch if self.traits.exact else 1,
            can_park=n_parked > 0,
        )

    def set_budget(self, budget: CacheBudget) -> None:
        """Give up what no longer fits, the least valuable first."""
        self.parking.set_limit(budget.max_parked)
        self.checkpoints.set_budget(budget)
        self.rules = self._rules(budget)

    def attach_disk(self, disk: DiskTier) -> None:
        """From now on what is stored in host memory is written to disk as well, behind it."""
        self.disk = disk
        disk.on_expires = self.expiry.note
        disk.on_found = self.pins.renew_on_disk
        for mark in (*disk.index.spans, *disk.index.checkpoints):
            self.expiry.note(mark.expires_s)
        self.spans.on_saved = self._offer_span
        self.spans.on_stored = self._offer_checkpoints

    def _holdings(self) -> Holdings:
        return self.checkpoints.holdings()

    def _give_up(self, mark: Checkpoint | Span, reason: Eviction) -> None:
        if isinstance(mark, Span):
            self.spans.drop(mark, reason)
        else:
            self.checkpoints.drop(mark, reason)

    def _offer_span(self, span: Span) -> None:
        def hold() -> Block | None:
            return self.spans.hold(span) if span in self.spans.blocks else None

        if self.disk is not None:
            self.disk.offer(span, span.ids(), hold, lambda: self.spans.let_go(span))

    def _checkpoint_is_ready(self, node: Checkpoint) -> None:
        if self.disk is not None and not self.memory.has_cells:
            self._offer_checkpoint(node)
        self.spans.look_again()
        if len(self.pins):
            self.pins.renew(node.namespace)

    def _offer_checkpoints(self, namespace: str, ids: Ids) -> None:
        """After the spans before them: without those a state on disk is of no use, and only takes their room."""
        reach = self.stored(namespace, ids).reach(0)
        for node in self.checkpoints.path(namespace, ids):
            if node.position <= reach and not node.key:
                self._offer_checkpoint(node)

    def _offer_checkpoint(self, node: Checkpoint) -> None:
        def hold() -> Block | None:
            if not self.checkpoints.has(node):
                return None
            self.checkpoints.hold(node)
            return self.checkpoints.data(node)

        if self.disk is not None and not node.kind.is_optional:
            self.disk.offer(node, node.ids(), hold, lambda: self.checkpoints.let_go(node))

    # -- views --

    def rewind_floor(self, slot: SlotState) -> int:
        """Backend.rewind_floor; asked only where its answer depends on more than the length."""
        if not len(slot):
            return 0
        if self.memory.is_shareable:
            return 1
        if self.memory.splits_steps:
            return len(slot)
        return self.backend.rewind_floor(slot.slot_id)

    def stored(self, namespace: str, ids: Ids) -> StoredPrefix:
        """What host memory and disk have of a prompt."""
        self.checkpoints.poll()
        if self.disk is not None:
            self.disk.refresh()
            self.disk.adopt(namespace, ids)
        self.expiry.sweep()
        matches = [self.index.match(namespace, ids)]
        if self.disk is not None:
            matches.append(self.disk.index.match(namespace, ids))
        return StoredPrefix(tuple(matches), self._is_worth_loading)

    def _is_worth_loading(self, mark: Span | Checkpoint, n_tokens: int) -> bool:
        is_here = mark in self.spans.blocks if isinstance(mark, Span) else self.checkpoints.has(mark)
        if isinstance(mark, Checkpoint) and is_here:
            return True  # placing has seen to that
        if not is_here and mark.n_bytes > self.room.pool.limit_bytes:
            return False  # there is no way around host memory
        tier = "host" if is_here else "disk"
        return self.checkpoints.rates.is_worth_loading(tier, mark.n_bytes, n_tokens)

    def views(self, match: Match, cache_key: str | None = None) -> list[SlotView]:
        """Every slot, and of what is parked the one that holds most of a prompt. Slots of `cache_key` are preferred."""
        views = [
            SlotView(
                slot.slot_id,
                slot.is_busy,
                slot.tokens.ids,
                slot.namespace,
                len(slot) if slot.is_busy else self.rewind_floor(slot),
                slot.exact_tokens if self.traits.exact else len(slot),
                slot.last_used,
                is_preferred=cache_key is not None and slot.cache_key == cache_key,
            )
            for slot in self.slots
        ]
        parked = match.parked
        if parked is not None:
            held = parked.ids()
            seq_id, namespace, used = parked.seq_id, parked.namespace, parked.last_used
            views.append(SlotView(seq_id, False, held, namespace, 1, len(held), used, is_parked=True))
        return views

    def touch_donor(self, donor_id: SlotId | None, slot: SlotState) -> None:
        """What a parked sequence holds was of use to what runs in `slot` now."""
        if donor_id is not None and donor_id >= len(self.slots):
            parked = self.index.parked_by(donor_id)
            parked.last_used = slot.last_used
            parked.hits += 1
            parked.refresh(slot.priority, slot.expires_s)

    @contextmanager
    def lease(self, seq_id: SlotId | None) -> Iterator[None]:
        """Meanwhile nothing is taken from what the sequence holds, if it is a parked one."""
        if seq_id is None or seq_id < len(self.slots):
            yield
            return
        parked = self.index.parked_by(seq_id)
        parked.n_users += 1
        try:
            yield
        finally:
            parked.n_users -= 1

    def victims(self) -> list[Victim]:
        """Idle slots that hold something, and what is parked."""
        idle = [
            Victim(slot.slot_id, self.rewind_floor(slot), slot.last_used)
            for slot in self.slots
            if len(slot) and not slot.is_busy
        ]
        return idle + self.parking.victims()

    @property
    def n_idle(self) -> int:
        """Slots that could take a request."""
        return sum(not slot.is_busy for slot in self.slots)

    @property
    def free_cells(self) -> int:
        return self.traits.kv_tokens - self.ledger.used()

    @property
    def used_cells(self) -> int:
        """KV cells in use, for the statistics."""
        if self.counts_cells or not self.memory.has_cells:
            return self.ledger.used()
        return sum(map(len, self.slots))

    def slot_info(self, slot_id: SlotId) -> SlotInfo:
        slot = self.slots[slot_id]
        namespace = slot.namespace if len(slot) or slot.is_busy else ""
        positions = tuple(node.position for node in self.checkpoints.held_by(slot))
        return SlotInfo(slot_id, slot.is_busy, namespace, slot.tokens.ids.copy(), positions)

    def report_tiers(self) -> None:
        """Tell the statistics what is kept outside the slots."""
        parked, spans, disk = self.index.parked, self.spans, self.disk
        counts = TierCounts(
            slots=sum(len(slot) > 0 for slot in self.slots),
            slot_tokens=sum(map(len, self.slots)),
            parked=len(parked),
            parked_tokens=sum(each.position for each in parked),
            spans=len(spans.blocks),
            span_bytes=spans.used_bytes,
            host_bytes=self.room.pool.resident_bytes,
            host_limit_bytes=self.room.pool.limit_bytes,
            spans_saved=spans.n_saved,
            spans_refused=spans.n_refused,
            spans_evicted=spans.n_evicted,
            evicted=dict(spans.evicted),
        )
        if disk is not None:
            counts = replace(
                counts,
                disk_entries=disk.n_entries,
                disk_bytes=disk.n_bytes,
                disk_limit_bytes=disk.limit_bytes,
                disk_waiting=disk.n_waiting,
                disk_written=disk.n_written,
                disk_refused=disk.n_refused,
                disk_failed=disk.n_failed,
                disk_read=disk.n_read,
                disk_lost=disk.n_lost,
            )
        self.metrics.tiers(counts)

    def report_checkpoints(self) -> None:
        """Tell the statistics, if there is anything to tell."""
        if self.checkpoints.has_changed:
            self.checkpoints.has_changed = False
            self.metrics.checkpoints(self.checkpoints.counts())

    def audit(self) -> None:
        """Recompute what the books say. Raises InternalError."""
        audit(self)

    # -- changes --

    def touch(self, slot: SlotState) -> None:
        """The slot is taken or left now."""
        self.n_changes += 1
        self._n_touched += 1
        slot.last_used = self._n_touched

    def erase(self, slot: SlotState) -> None:
        self.checkpoints.settle(slot)
        self.n_changes += 1
        self.backend.erase(slot.slot_id)
        self.ledger.erase(slot.slot_id)
        slot.truncate(0)

    def trim(self, slot: SlotState, n_tokens: int) -> bool:
        """Cut to [0, n_tokens). False: the memory could not, and the slot was erased."""
        if n_tokens == 0:
            self.erase(slot)
            return True
        self.checkpoints.settle(slot)
        self.n_changes += 1
        if not self._cut(slot, n_tokens):
            self.erase(slot)
            return False
        if self.counts_cells:
            self.ledger.trim(slot.slot_id, n_tokens)
        slot.truncate(n_tokens)
        return True

    def _cut(self, slot: SlotState, n_tokens: int) -> bool:
        try:
            return self.backend.trim(slot.slot_id, n_tokens)
        except NativeError:
            return False  # what is left is unknown, so it costs this slot its content and nobody else anything

    def share(self, donor_id: SlotId, slot: SlotState, ids: Ids) -> None:
        """Make `ids`, the start of what the donor holds, the content of `slot`, whatever it held."""
        n_tokens = len(ids)
        self.erase(slot)
        self.backend.share(donor_id, slot.slot_id, n_tokens)
        if self.counts_cells:
            self.ledger.share(donor_id, slot.slot_id, n_tokens)
        slot.tokens.extend(ids)
        slot.exact_tokens = n_tokens
        if donor_id < len(self.slots):
            slot.exact_tokens = min(self.slots[donor_id].exact_tokens, n_tokens)

    def resume(self, donor_id: SlotId | None, slot: SlotState, node: Checkpoint, ids: Ids) -> None:
        """Bring `slot` to a checkpoint, whose prefix is `ids`, over its own cells or (it is emptied first) the donor's.

        Raises:
            NativeError: refused; the slot holds what it held, or nothing.
        """
        n_tokens = node.position
        ids = ids.copy()
        self.checkpoints.hold(node)
        try:
            self.checkpoints.settle(slot)  # which may take one, and give up others for it
            if donor_id is not None:
                self.erase(slot)
            self.n_changes += 1
            self.checkpoints.resume(donor_id, slot, node)
        except NativeError:
            if self.backend.length(slot.slot_id) != len(slot):
                self.erase(slot)
            raise
        finally:
            self.checkpoints.let_go(node)
        if self.counts_cells and donor_id is not None:
            self.ledger.share(donor_id, slot.slot_id, n_tokens)
        elif self.counts_cells:
            self.ledger.trim(slot.slot_id, n_tokens)
        slot.truncate(0)
        slot.tokens.extend(ids)
        slot.exact_tokens = n_tokens

    def cut_span(self, slot: SlotState, n_tokens: int) -> None:
        """Cut the slot's cells anywhere; a state it has is then stale, and is put back before the slot is used."""
        if n_tokens == 0:
            self.erase(slot)
            return
        self.checkpoints.settle(slot)
        self.n_changes += 1
        self.backend.trim_span(slot.slot_id, n_tokens)
        if self.counts_cells:
            self.ledger.trim(slot.slot_id, n_tokens)
        slot.truncate(n_tokens)

    def share_span(self, donor_id: SlotId, slot: SlotState, ids: Ids) -> None:
        """Make the cells of `ids`, the start of what the donor holds, those of `slot`, without a state.

        Raises:
            NativeError: the slot is empty.
        """
        self.erase(slot)
        if not len(ids):
            return
        self.backend.share_span(donor_id, slot.slot_id, len(ids))
        if self.counts_cells:
            self.ledger.share(donor_id, slot.slot_id, len(ids))
        slot.tokens.extend(ids)
        slot.exact_tokens = len(ids)

    def resume_before(self, slot: SlotState, namespace: str, ids: Ids) -> bool:
        """Put back the deepest state at a prefix of `ids`, of which the slot holds the cells. False: there is none."""
        for node in reversed(self.checkpoints.path(namespace, ids)):
            try:
                self.resume(None, slot, node, ids[: node.position])
            except NativeError:
                if self.memory.has_cells and not len(slot):
                    return False
                continue
            return True
        return False

    def recover(self, slot: SlotState, n_tokens: int) -> None:
        """After its state was lost: back to the deepest checkpoint at or before `n_tokens`, else empty."""
        for node in reversed(self.checkpoints.held_by(slot)):
            if node.position <= n_tokens:
                try:
                    self.resume(None, slot, node, slot.tokens.slice(0, node.position))
                except NativeError:
                    if self.memory.has_cells and not len(slot):
                        break  # its cells are gone with its state
                    continue
                return
        self.erase(slot)

    def grown(self, slot: SlotState) -> None:
        """Its `tokens` have just been extended by what a native call decoded."""
        if self.counts_cells:
            self.ledger.grow(slot.slot_id, len(slot))

    def resynchronize(self, slot: SlotState, n_before: int) -> None:
        """After a lost native call: back to `n_before` tokens where that can be proven, else empty."""
        if not (
            self.memory.is_shareable
            and n_before
            and self._cut(slot, n_before)
            and self.backend.length(slot.slot_id) == n_before
        ):
            self.recover(slot, n_before)

    def apply_cuts(self, cuts: tuple[Cut, ...]) -> None:
        for cut in cuts:
            if cut.slot_id >= len(self.slots):
                self.metrics.count("evicted_parked", self.parking.cut(cut.slot_id, cut.n_tokens))
                continue
            slot = self.slots[cut.slot_id]
            if slot.is_busy:
                raise InternalError(f"cut of busy slot {cut.slot_id}")
            n_before = len(slot)
            self.spans.save_tail(slot.slot_id, slot, reusable(self, slot), cut.n_tokens)
            self.trim(slot, cut.n_tokens)
            self.metrics.count("evicted_slot", n_before - len(slot))
