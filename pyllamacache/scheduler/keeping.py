"""What callers say about keeping: pins, and times to live."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..prefix.match import common_prefix_len
from ..prefix.retention import Eviction

if TYPE_CHECKING:
    from ..prefix.index import Checkpoint, Parked, Span
    from ..request import Ids
    from .slots import SlotState
    from .state import SchedulerState


@dataclass(slots=True)
class _Pin:
    """A prefix that somebody wants kept."""

    namespace: str
    ids: Ids
    n_times: int = 0
    parked: Parked | None = None
    """A sequence of exactly this prefix, which shares its cells with whoever else holds it."""
    marks: list[Checkpoint | Span] = field(default_factory=list)
    disk_marks: list[Checkpoint | Span] = field(default_factory=list)


class Pins:
    """Pinned prefixes, found again whenever what is stored of them changes. Scheduler thread only."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self._pins: dict[tuple[str, bytes], _Pin] = {}

    def __len__(self) -> int:
        return len(self._pins)

    def pin(self, namespace: str, ids: Ids) -> int:
        """Keep what is held of a prefix. Returns how many of its tokens a longer prompt can resume at."""
        pin = self._pins.setdefault((namespace, ids.tobytes()), _Pin(namespace, ids.copy()))
        pin.n_times += 1
        self._hold_cells(pin)
        return self._apply(pin)

    def unpin(self, namespace: str, ids: Ids) -> bool:
        """Take back one `pin`. False: there was none of exactly this prefix."""
        key = (namespace, ids.tobytes())
        pin = self._pins.get(key)
        if pin is None:
            return self._unpin_stored(namespace, ids)
        pin.n_times -= 1
        if not pin.n_times:
            del self._pins[key]
            self._release(pin)
            if pin.parked is not None and pin.parked.node is not None:
                pin.parked.n_pins -= 1
        return True

    def _unpin_stored(self, namespace: str, ids: Ids) -> bool:
        """What an engine that ended without `close` left pinned on disk."""
        disk = self._state.disk
        if disk is None:
            return False
        match = disk.index.match(namespace, ids)
        marks: list[Checkpoint | Span] = [*match.chain(0, match.n_tokens), *match.checkpoints]
        in_use = {id(mark) for pin in self._pins.values() for mark in pin.disk_marks}
        left = [mark for mark in marks if mark.n_pins and id(mark) not in in_use]
        if left:
            disk.set_pinned(left, is_pinned=False)
        return bool(left)

    def clear(self, namespace: str | None) -> None:
        """Forget the pins of a namespace, or (None) all."""
        for key in [key for key in self._pins if namespace in (None, key[0])]:
            self._pins[key].n_times = 1
            self.unpin(key[0], self._pins[key].ids)

    def renew(self, namespace: str) -> None:
        """Something of the namespace was stored, or put in the place of something else."""
        for pin in self._pins.values():
            if pin.namespace == namespace:
                self._apply(pin)

    def renew_on_disk(self) -> None:
        """Something that was written is there now."""
        for pin in self._pins.values():
            self._pin_on_disk(pin)

    def _hold_cells(self, pin: _Pin) -> None:
        if pin.parked is not None and pin.parked.node is not None:
            return
        holder = self._holder(pin)
        if holder is None:
            return
        slot, n_tokens = holder
        pin.parked = self._state.parking.park_prefix(slot, n_tokens)
        if pin.parked is not None:
            pin.parked.n_pins += 1

    def _holder(self, pin: _Pin) -> tuple[SlotState, int] | None:
        """The slot that holds most of it."""
        lengths = [
            (common_prefix_len(slot.tokens.ids, pin.ids), slot)
            for slot in self._state.slots
            if slot.namespace == pin.namespace and (slot.job is None or slot.job.request.store)
        ]
        n_tokens, slot = max(lengths, key=lambda item: item[0], default=(0, None))
        return (slot, n_tokens) if slot is not None and n_tokens else None

    def _release(self, pin: _Pin) -> None:
        for mark in pin.marks:
            mark.n_pins -= 1
        pin.marks = []
        others = {id(mark) for other in self._pins.values() if other is not pin for mark in other.disk_marks}
        mine = [mark for mark in pin.disk_marks if id(mark) not in others]
        if mine and self._state.disk is not None:
            self._state.disk.set_pinned(mine, is_pinned=False)
        pin.disk_marks = []

    def _apply(self, pin: _Pin) -> int:
        """Pin what is there of it now."""
        state = self._state
        stored = state.stored(pin.namespace, pin.ids)
        held = state.index.match(pin.namespace, pin.ids).parked_tokens
        holder = self._holder(pin)
        if holder is not None:
            held = max(held, holder[1])
        chain = stored.chain(0)
        reach = max(held, stored.usable_end(chain[-1])) if chain else held
        marks: list[Checkpoint | Span] = [*chain]
        if state.rules.has_state:
            if not state.rules.has_cells:
                reach = len(pin.ids)
            deepest = max((position for position in stored.checkpoints() if position <= reach), default=0)
            reach = deepest
            marks += [stored.checkpoints()[deepest]] if deepest else []
        host = [mark for mark in marks if mark in state.spans.blocks or state.checkpoints.has(mark)]  # type: ignore[arg-type]
        for mark in host:
            mark.n_pins += 1
        for mark in pin.marks:
            mark.n_pins -= 1
        pin.marks = host
        self._pin_on_disk(pin)
        return reach

    def _pin_on_disk(self, pin: _Pin) -> None:
        disk = self._state.disk
        if disk is None:
            return
        match = disk.index.match(pin.namespace, pin.ids)
        marks: list[Checkpoint | Span] = [*match.chain(0, match.n_tokens), *match.checkpoints[-1:]]
        new = [mark for mark in marks if not mark.n_pins]
        if new:
            disk.set_pinned(new, is_pinned=True)
        pin.disk_marks = marks


class Expiry:
    """Gives up what has outlived its time: before anything is planned, so that nothing is reused after it."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self._next_s: float | None = None
        """When the first thing expires, at the earliest."""

    def note(self, expires_s: float | None) -> None:
        """Something has this end."""
        if expires_s is not None and (self._next_s is None or expires_s < self._next_s):
            self._next_s = expires_s

    def sweep(self) -> None:
        """Between two steps. No cost before the first end."""
        now_s = self._state.clock()
        if self._next_s is None or now_s < self._next_s:
            return
        self._next_s = None
        self._sweep_device(now_s)
        for span in [span for span in self._state.spans.blocks if self._is_over(span, now_s)]:
            self._state.spans.drop(span, Eviction.EXPIRED)
        for node in [node for node in self._state.index.checkpoints if self._is_over(node, now_s)]:
            self._state.checkpoints.drop(node, Eviction.EXPIRED)
        disk = self._state.disk
        if disk is not None:
            disk.tidy()
            marks: list[Checkpoint | Span] = [*disk.index.spans, *disk.index.checkpoints]
            for mark in [mark for mark in marks if self._is_over(mark, now_s)]:
                disk.forget(mark)

    def _sweep_device(self, now_s: float) -> None:
        state = self._state
        for parked in [each for each in state.index.parked if self._is_over(each, now_s)]:
            state.parking.cut(parked.seq_id, 0, is_outgrown=True)
        for slot in state.slots:
            if slot.expires_s is None or slot.is_busy or not len(slot):
                continue
            if slot.expires_s <= now_s:
                state.erase(slot)
            else:
                self.note(slot.expires_s)

    def _is_over(self, mark: Checkpoint | Span | Parked, now_s: float) -> bool:
        """Pinned ones stay; later ones are noted. Of leased ones the bytes stay as long as somebody reads them."""
        if mark.expires_s is None:
            return False
        if mark.n_pins or mark.expires_s > now_s:
            self.note(mark.expires_s)
            return False
        return True
