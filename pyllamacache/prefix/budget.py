"""Which mark goes when spans and checkpoints share one budget of bytes and there is no room for another.

    1. expired
    2. stranded: a checkpoint without the KV cells before it; where there is a state, a span that no checkpoint needs
    3. lower priority
    4. second class (periodic, rolling), unless it was of use
    5. the first class; in 3 to 5 by worth

    worth   (tokens to prefill again / bytes given back) ** 2 * use
    use     1 + hits; of a checkpoint that others follow max(1/2, hits): it was the first of them that it was kept for
    key     worth + the key of the last one that went by worth before its latest use

The smallest key goes next: what is not used stays where it is while the bar rises, so worth decides among what was used
equally long ago, and age in the end. Nothing has a share. A span that a checkpoint needs has no worth of its own: it
goes with the last such checkpoint, whose bytes include it, so the border between KV and states is where worth puts it.
The square makes an order of magnitude of worth outweigh two of age.

Never: pinned, leased, not ready, or a span that others continue. What slots hold first and last goes after the rest.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import count
from typing import TYPE_CHECKING, TypeAlias

from .index import Checkpoint, Span
from .retention import Eviction

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from ..request import SlotId
    from .index import Mark, PrefixIndex
    from .retention import Holdings

Stored: TypeAlias = "Checkpoint | Span"
_Entry: TypeAlias = "tuple[float, int, int, Stored]"
"""Key, minus the position, a number that makes it unique, mark. The deepest goes first among equals."""
_Group: TypeAlias = "tuple[int, bool]"
"""Priority, first class. Groups go in ascending order."""

_MAX_SHIELD = 2


@dataclass(frozen=True, slots=True)
class Newcomer:
    """What needs room."""

    gap: int
    """Tokens between it and its nearest ancestor."""
    is_optional: bool = False
    """Of the second class: it displaces nothing of the first, and only what covers less than it would."""
    priority: int = 0
    """It displaces nothing of a higher one."""
    path: Sequence[Checkpoint] = ()
    """The checkpoints above it, the shallowest first."""
    taker: SlotId | None = None
    """The slot it is taken from."""


class Retention:
    """Watches an index, and names what it should give up. Thread: scheduler. Effects on the index: none.

    Marks change in place. What makes one worth more (hits, leases, pins, a longer gap) is noticed when it comes up;
    `used` and `changed` have to be called for the rest. Cost: O(log n) for each call and each mark that changed, beside
    the marks that may not go and come up all the same.
    """

    def __init__(self, index: PrefixIndex, *, needs_span: bool, needs_state: bool) -> None:
        """What the memory demands of a prefix that is to be resumed.

        Args:
            needs_span: KV cells (not for purely recurrent memory).
            needs_state: a checkpoint at its end (not for full attention).
        """
        self._index = index
        self._needs_span = needs_span
        self._needs_state = needs_state
        self._numbers = count()
        self._bar = 0.0
        """Key of the last one that went by worth."""
        self._base: dict[Stored, float] = {}
        """The bar at the latest use, of those that have a worth of their own."""
        self._valid: dict[Stored, int] = {}
        """Number of the entry that counts; older ones are dropped when they come up."""
        self._groups: dict[_Group, list[_Entry]] = {}
        self._expiring: list[tuple[float, int, Stored]] = []
        self._idle: list[tuple[int, int, int, Span]] = []
        """Spans that nothing needs: latest use, minus the position, a number."""
        self._uncovered: dict[Checkpoint, None] = {}
        """Checkpoints without a span that holds the last token before them."""
        self._cover: dict[Checkpoint, Span] = {}
        """The span that does or, until it is there, the last one before."""
        self._covered: dict[Span, dict[Checkpoint, None]] = {}
        self._kv_bytes_per_token = 0.0
        index.watcher = self
        for span in index.spans:
            self.added(span)
        for checkpoint in index.checkpoints:
            self.added(checkpoint)

    @property
    def bar(self) -> float:
        """Key of the last one that went by worth; it only rises."""
        return self._bar

    # ---- told by the index -------------------------------------------------------------------------------------

    def added(self, mark: Stored) -> None:
        if isinstance(mark, Checkpoint):
            self._rate(mark)
            for child in mark.children:
                self._enter(child)
            if mark.parent is not None and mark.parent in self._valid:
                self._enter(mark.parent)
            if self._needs_span:
                self._seek_cover(mark)
        else:
            self._kv_bytes_per_token = mark.n_bytes / mark.n_tokens
            self._settle(mark)
            if self._uncovered:
                self._cover_with(mark)
        self._watch_expiry(mark)

    def removed(self, mark: Stored) -> None:
        base = self._base.pop(mark, 0.0)
        self._valid.pop(mark, None)
        if isinstance(mark, Checkpoint):
            self._uncovered.pop(mark, None)
            span = self._cover.pop(mark, None)
            if span is not None:
                self._uncover(span, mark)
            return
        for checkpoint in self._covered.pop(mark, ()):
            del self._cover[checkpoint]
            self._seek_cover(checkpoint)
        if mark.parent is not None and mark.parent.node is not None:
            if not self._needs_state:  # whoever used the one behind it used it too
                self._base[mark.parent] = max(base, self._base.get(mark.parent, 0.0))
            self._settle(mark.parent)

    # ---- told by the owner -------------------------------------------------------------------------------------

    def used(self, mark: Stored) -> None:
        """A request resumes from it, or from it and the spans before it."""
        if mark.node is not None and mark in self._base:
            self._rate(mark)

    def changed(self, mark: Stored) -> None:
        """Its priority or expiry is another one."""
        if mark in self._valid:
            self._enter(mark)
        self._watch_expiry(mark)

    # ---- asked by the owner ------------------------------------------------------------------------------------

    def victim(
        self, newcomer: Newcomer, *, now_s: float = 0.0, holdings: Holdings | None = None
    ) -> tuple[Stored, Eviction] | None:
        """The next one to go so that a newcomer finds room, or None: the newcomer has to do without.

        Whoever asks takes it out of the index, or gives it one reason to stay (a lease, a pin) and asks again. What is
        to stay together with the newcomer has to be leased: the checkpoint it extends, the last span of its prefix.

        Args:
            now_s: on the clock of `Mark.expires_s`.
            holdings: what the device has of the index; None: nothing.
        """
        expired = self._next_expired(now_s)
        if expired is not None:
            return expired, Eviction.EXPIRED
        stranded = self._next_stranded(holdings)
        if stranded is not None:
            return stranded, Eviction.STRANDED
        shield = {} if holdings is None else holdings.shielded(newcomer.path, newcomer.taker)
        shielded: list[Stored | None] = [None] * _MAX_SHIELD
        for group in sorted(self._groups):
            priority, is_first_class = group
            if priority > newcomer.priority:
                break
            if newcomer.is_optional and is_first_class:
                continue
            mark = self._smallest(group, shield, shielded)
            if mark is not None:
                if newcomer.is_optional and not (isinstance(mark, Checkpoint) and mark.gap < newcomer.gap):
                    continue
                return self._outvalued(mark)
        if newcomer.is_optional:
            return None
        return next((self._outvalued(mark) for mark in shielded if mark is not None), None)

    def _outvalued(self, mark: Stored) -> tuple[Stored, Eviction]:
        if isinstance(mark, Checkpoint) and mark.is_second_class:
            return mark, Eviction.THINNED
        self._bar = max(self._bar, self._key(mark))
        return mark, Eviction.OUTVALUED

    # ---- by worth ----------------------------------------------------------------------------------------------

    def _key(self, mark: Stored) -> float:
        if isinstance(mark, Checkpoint):
            gap = mark.gap
            density = gap / max(1.0, mark.n_bytes + gap * self._kv_bytes_per_token * self._needs_span)
            use = max(0.5, mark.hits) if mark.children else 1 + mark.hits
        else:
            density = mark.n_tokens / max(1, mark.n_bytes)
            use = 1 + mark.hits
        return self._base[mark] + density * density * use

    def _rate(self, mark: Stored) -> None:
        self._base[mark] = self._bar
        self._enter(mark)

    def _enter(self, mark: Stored) -> None:
        """Put it where it belongs now; where it was before does not count any more."""
        number = self._valid[mark] = next(self._numbers)
        heap = self._groups.setdefault(_group(mark), [])
        heappush(heap, (self._key(mark), -mark.position, number, mark))
        if len(heap) > 64 + 4 * len(self._valid):
            heap[:] = [entry for entry in heap if self._valid.get(entry[3]) == entry[2]]
            heapify(heap)

    def _smallest(self, group: _Group, shield: Mapping[int, int], shielded: list[Stored | None]) -> Stored | None:
        """The first one that may go. Fills `shielded`, by level, with those that go only if nothing else can."""
        heap, aside, found = self._groups[group], [], None
        while heap:
            entry = heap[0]
            key, _, number, mark = entry
            if self._valid.get(mark) != number:
                heappop(heap)
            elif isinstance(mark, Span) and mark.n_children:
                heappop(heap)  # it comes back when they are gone
                del self._valid[mark]
            elif self._key(mark) > key or _group(mark) != group:
                heappop(heap)
                self._enter(mark)
            else:
                level = shield.get(id(mark), 0)
                if _may_go(mark):
                    if not level:
                        found = mark
                        break
                    if shielded[level - 1] is None:
                        shielded[level - 1] = mark
                aside.append(heappop(heap))
        for entry in aside:
            heappush(heap, entry)
        return found

    # ---- expired -----------------------------------------------------------------------------------------------

    def _watch_expiry(self, mark: Stored) -> None:
        if mark.expires_s is not None:
            heappush(self._expiring, (mark.expires_s, next(self._numbers), mark))

    def _next_expired(self, now_s: float) -> Stored | None:
        aside, found = [], None
        while self._expiring and self._expiring[0][0] <= now_s:
            entry = self._expiring[0]
            mark = entry[2]
            if mark.node is None or mark.expires_s != entry[0]:
                heappop(self._expiring)
            elif _may_go(mark) and self._is_last(mark):
                found = mark
                break
            else:
                aside.append(heappop(self._expiring))
        for entry in aside:
            heappush(self._expiring, entry)
        return found

    # ---- stranded ----------------------------------------------------------------------------------------------

    def _is_last(self, mark: Stored) -> bool:
        """Nothing that exists becomes useless without it."""
        return isinstance(mark, Checkpoint) or not (mark.n_children or mark in self._covered)

    def _next_stranded(self, holdings: Holdings | None) -> Stored | None:
        if self._uncovered:
            resident: Collection[int] = () if holdings is None else holdings.resident()
            lost = [each for each in self._uncovered if id(each) not in resident and _may_go(each)]
            if lost:
                return min(lost, key=lambda each: (each.last_used, -each.position))
        aside, found = [], None
        while self._idle:
            entry = self._idle[0]
            span = entry[3]
            if span.node is None or not self._is_last(span):
                heappop(self._idle)
            elif _may_go(span):
                found = span
                break
            else:
                aside.append(heappop(self._idle))
        for each in aside:
            heappush(self._idle, each)
        return found

    def _settle(self, span: Span) -> None:
        """It may be one that goes by worth, or that nothing needs."""
        if span.n_children:
            return
        if not self._needs_state:
            self._base.setdefault(span, self._bar)
            self._enter(span)
        elif span not in self._covered:
            heappush(self._idle, (span.last_used, -span.position, next(self._numbers), span))

    def _seek_cover(self, checkpoint: Checkpoint) -> None:
        span = self._index.span_over(checkpoint)
        if span is None:
            self._uncovered[checkpoint] = None
            span = self._index.span_before(checkpoint)
        else:
            self._uncovered.pop(checkpoint, None)
        former = self._cover.get(checkpoint)
        if span is former:
            return
        if span is None:
            self._cover.pop(checkpoint, None)
        else:
            self._cover[checkpoint] = span
            self._covered.setdefault(span, {})[checkpoint] = None
        if former is not None:
            self._uncover(former, checkpoint)

    def _cover_with(self, span: Span) -> None:
        """A new one, which may be what checkpoints waited for, or one step on the way there."""
        waiting = self._index.checkpoints_over(span)
        if span.parent is not None:
            waiting += self._covered.get(span.parent, ())
        else:
            waiting += (each for each in self._uncovered if each not in self._cover)
        for checkpoint in waiting:
            if checkpoint in self._uncovered:
                self._seek_cover(checkpoint)

    def _uncover(self, span: Span, checkpoint: Checkpoint) -> None:
        covered = self._covered[span]
        del covered[checkpoint]
        if not covered:
            del self._covered[span]
            self._settle(span)


def _group(mark: Mark) -> _Group:
    return mark.priority, not (isinstance(mark, Checkpoint) and mark.is_second_class)


def _may_go(mark: Stored) -> bool:
    return not (mark.n_users or mark.n_pins) and (not isinstance(mark, Checkpoint) or mark.is_ready)
