"""Victims over spans and states against a slow twin that scans everything, and the laws of who never goes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from hypothesis import event, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from pyllamacache.prefix.budget import Newcomer, Retention, Stored
from pyllamacache.prefix.index import Checkpoint, PrefixIndex, Span
from pyllamacache.prefix.retention import Eviction
from pyllamacache.request import CheckpointKind

if TYPE_CHECKING:
    from pyllamacache.request import Ids

SPAN_TOKENS, STATE_BYTES = 3, 12
TRUNKS = ([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12], [1, 2, 3, 9, 9, 9, 9, 9], [2, 2, 2, 2])
BUDGET = 36
Prefix = tuple[int, ...]


@st.composite
def prefixes(draw: st.DrawFn) -> Prefix:
    trunk = draw(st.sampled_from(TRUNKS))
    return (*trunk[: draw(st.integers(1, len(trunk)))], *draw(st.lists(st.integers(1, 2), max_size=3)))


def as_ids(values: Prefix) -> Ids:
    return np.array(values, dtype=np.int32)


class Twin:
    """The rules of the module, over everything, each time."""

    def __init__(self, index: PrefixIndex, *, needs_span: bool, needs_state: bool) -> None:
        self.index, self.needs_span, self.needs_state = index, needs_span, needs_state
        self.base: dict[Stored, float] = {}
        self.bar = 0.0

    def covers(self, span: Span, checkpoint: Checkpoint) -> bool:
        """It holds the last token before the checkpoint, whatever follows in it."""
        prefix = tuple(checkpoint.ids().tolist())
        return span.start < len(prefix) <= span.position and tuple(span.ids().tolist())[: len(prefix)] == prefix

    def key(self, mark: Stored) -> float:
        if isinstance(mark, Checkpoint):
            kv = mark.gap if self.needs_span and self.index.spans else 0
            density = mark.gap / (mark.n_bytes + kv)
        else:
            density = mark.n_tokens / mark.n_bytes
        is_followed = isinstance(mark, Checkpoint) and mark.children
        return self.base[mark] + density * density * (max(0.5, mark.hits) if is_followed else 1 + mark.hits)

    def candidates(self, newcomer: Newcomer, now_s: float, needed: set[Span]) -> tuple[list[Stored], set[Eviction]]:
        """Those that may go next, as far as the rules say."""
        checkpoints = [each for each in self.index.checkpoints if each.is_ready and not each.n_users + each.n_pins]
        spans = [
            each
            for each in self.index.spans
            if not (each.n_users or each.n_pins or each.n_children or (self.needs_state and each in needed))
        ]
        free: list[Stored] = [*checkpoints, *spans]
        expired = [
            mark for mark in free if mark.expires_s is not None and mark.expires_s <= now_s and mark not in needed
        ]
        if expired:
            return expired, {Eviction.EXPIRED}
        if self.needs_span:
            bare = [each for each in checkpoints if not any(self.covers(span, each) for span in self.index.spans)]
            if bare:
                return [*bare], {Eviction.STRANDED}
        if self.needs_state and spans:
            return [*spans], {Eviction.STRANDED}
        free = [mark for mark in free if mark.priority <= newcomer.priority]

        def is_second(mark: Stored) -> bool:
            return isinstance(mark, Checkpoint) and mark.is_second_class

        if newcomer.is_optional:
            free = [mark for mark in free if is_second(mark)]
        if not free:
            return [], set()
        rank = min((mark.priority, not is_second(mark)) for mark in free)
        group = [mark for mark in free if (mark.priority, not is_second(mark)) == rank]
        least = min((self.key(mark), -mark.position) for mark in group)
        tied = [mark for mark in group if (self.key(mark), -mark.position) == least]
        return tied, {Eviction.OUTVALUED, Eviction.THINNED}


class BudgetMachine(RuleBasedStateMachine):
    @initialize(memory=st.sampled_from([(True, True), (True, False), (False, True)]))
    def start(self, memory: tuple[bool, bool]) -> None:
        needs_span, self.needs_state = memory
        self.has_spans = needs_span
        self.index = PrefixIndex(span_tokens=SPAN_TOKENS)
        self.retention = Retention(self.index, needs_span=needs_span, needs_state=self.needs_state)
        self.twin = Twin(self.index, needs_span=needs_span, needs_state=self.needs_state)
        self.now_s = 0.0

    @property
    def used_bytes(self) -> int:
        marks: list[Stored] = [*self.index.checkpoints, *self.index.spans]
        return sum(mark.n_bytes for mark in marks)

    def needed(self) -> set[Span]:
        """By a checkpoint. Of several that could serve it, the class relies on one."""
        found: set[Span] = set()
        for checkpoint in self.index.checkpoints:
            over = [span for span in self.index.spans if self.twin.covers(span, checkpoint)]
            if len(over) == 1:
                found.add(over[0])
            if not over:
                prefix = tuple(checkpoint.ids().tolist())
                before = [span for span in self.index.spans if tuple(span.ids().tolist()) == prefix[: span.position]]
                found.update(sorted(before, key=lambda span: span.position)[-1:])
        return found

    def make_room(self, n_bytes: int, newcomer: Newcomer) -> bool:
        while self.used_bytes + n_bytes > BUDGET:
            chosen = self.retention.victim(newcomer, now_s=self.now_s)
            allowed, reasons = self.twin.candidates(newcomer, self.now_s, self.needed())
            event("none" if chosen is None else str(chosen[1]))
            if chosen is None:
                assert (
                    not allowed
                    or newcomer.is_optional
                    or Eviction.STRANDED in reasons
                    or self.only_doubly_covered(allowed)
                )
                return False
            self.check(chosen, allowed, reasons, newcomer)
            self.take(chosen[0], is_by_worth=chosen[1] is Eviction.OUTVALUED)
        return True

    def only_doubly_covered(self, allowed: list[Stored]) -> bool:
        """Spans that the twin cannot tell to be needed."""
        return all(isinstance(mark, Span) for mark in allowed)

    def check(
        self, chosen: tuple[Stored, Eviction], allowed: list[Stored], reasons: set[Eviction], newcomer: Newcomer
    ) -> None:
        mark, reason = chosen
        assert not mark.n_users
        assert not mark.n_pins
        if isinstance(mark, Span):
            assert not mark.n_children
            assert not (self.needs_state and mark in self.needed())
        else:
            assert mark.is_ready
        if reason not in reasons:  # a span that one of two branches relies on
            assert self.only_doubly_covered(allowed)
            return
        assert mark in allowed
        if reason is Eviction.STRANDED and isinstance(mark, Checkpoint):
            assert mark.last_used == min(each.last_used for each in allowed)
        if newcomer.is_optional and reason is Eviction.THINNED:
            assert isinstance(mark, Checkpoint)
            assert mark.gap < newcomer.gap

    def take(self, mark: Stored, *, is_by_worth: bool) -> None:
        if is_by_worth:
            self.twin.bar = max(self.twin.bar, self.twin.key(mark))
        base = self.twin.base.pop(mark, 0.0)
        self.index.remove(mark)
        if isinstance(mark, Span) and mark.parent is not None and not self.needs_state:
            self.twin.base[mark.parent] = max(base, self.twin.base[mark.parent])

    # -- changes --

    @rule(ids=prefixes())
    def store_spans(self, ids: Prefix) -> None:
        if not self.has_spans:
            return
        match = self.index.match("", as_ids(ids))
        chain = match.chain(0, len(ids))
        for span in chain[-1:]:
            span.n_users += 1
        if self.make_room(len(ids), Newcomer(len(ids))):
            for span in self.index.add_spans("", as_ids(ids), SPAN_TOKENS):
                self.twin.base[span] = self.twin.bar
        for span in chain[-1:]:
            span.n_users -= 1

    @rule(ids=prefixes(), kind=st.sampled_from(CheckpointKind), ready=st.sampled_from([True, True, True, False]))
    def store_state(self, ids: Prefix, kind: CheckpointKind, ready: bool) -> None:
        path = self.index.path("", as_ids(ids))
        gap = len(ids) - (path[-1].position if path else 0)
        if not self.needs_state or not gap or not self.make_room(STATE_BYTES, Newcomer(gap, kind.is_optional)):
            return
        checkpoint = self.index.add_checkpoint("", as_ids(ids), kind, STATE_BYTES)
        checkpoint.is_ready = ready
        self.twin.base[checkpoint] = self.twin.bar

    @rule(at=st.integers(0, 99), hits=st.integers(0, 2), now=st.integers(0, 9))
    def use(self, at: int, hits: int, now: int) -> None:
        marks: list[Stored] = [*self.index.checkpoints, *(span for span in self.index.spans if not span.n_children)]
        if marks:
            mark = marks[at % len(marks)]
            mark.hits += hits
            mark.last_used = max(now, mark.last_used)
            self.retention.used(mark)
            self.twin.base[mark] = self.twin.bar

    @rule(at=st.integers(0, 99), priority=st.integers(-1, 1), expires_s=st.sampled_from([None, 1.0, 2.0]))
    def change(self, at: int, priority: int, expires_s: float | None) -> None:
        marks: list[Stored] = [*self.index.checkpoints, *self.index.spans]
        if marks:
            mark = marks[at % len(marks)]
            mark.priority, mark.expires_s = priority, expires_s
            self.retention.changed(mark)

    @rule(at=st.integers(0, 99), pins=st.integers(0, 1))
    def pin(self, at: int, pins: int) -> None:
        marks: list[Stored] = [*self.index.checkpoints, *self.index.spans]
        if marks:
            marks[at % len(marks)].n_pins = pins

    @rule(at=st.integers(0, 99))
    def clear(self, at: int) -> None:
        """Out of turn, as a caller may."""
        marks: list[Stored] = [*self.index.checkpoints, *self.index.spans]
        if marks:
            self.take(marks[at % len(marks)], is_by_worth=False)

    @rule()
    def wait(self) -> None:
        self.now_s += 0.5

    # -- laws --

    @invariant()
    def the_budget_holds(self) -> None:
        if hasattr(self, "index"):
            self.index.audit()
            assert self.used_bytes <= BUDGET
            assert self.retention.bar == self.twin.bar


TestBudget = BudgetMachine.TestCase
TestBudget.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)
