from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from pyllamacache.prefix.budget import Newcomer, Retention
from pyllamacache.prefix.index import Checkpoint, PrefixIndex, Span
from pyllamacache.prefix.retention import Eviction, Holdings
from pyllamacache.request import CheckpointKind, SlotId

if TYPE_CHECKING:
    from pyllamacache.request import Ids

TAIL, PERIODIC = CheckpointKind.TAIL, CheckpointKind.PERIODIC
SPAN = 10
STATE_BYTES, SPAN_BYTES = 100, 10
TRUNK = np.arange(1, 501, dtype=np.int32)
ANY = Newcomer(gap=1)


def branch(at: int, token: int, length: int) -> Ids:
    """Leaves the trunk at `at`."""
    ids = TRUNK[:length].copy()
    ids[at:] = 5000 + token
    return ids


class Host:
    """An index with a retention: hybrid memory unless said otherwise."""

    def __init__(self, *, needs_span: bool = True, needs_state: bool = True) -> None:
        self.index = PrefixIndex(span_tokens=SPAN)
        self.retention = Retention(self.index, needs_span=needs_span, needs_state=needs_state)

    def spans(self, ids: Ids | int) -> list[Span]:
        return self.index.add_spans("", TRUNK[:ids] if isinstance(ids, int) else ids, SPAN_BYTES)

    def state(
        self, ids: Ids | int, kind: CheckpointKind = TAIL, *, n_bytes: int = STATE_BYTES, ready: bool = True
    ) -> Checkpoint:
        ids = TRUNK[:ids] if isinstance(ids, int) else ids
        checkpoint = self.index.add_checkpoint("", ids, kind, n_bytes)
        checkpoint.is_ready = ready
        return checkpoint

    def raise_bar(self) -> None:
        """Something else goes by its worth."""
        others = list(self.index.spans)
        for span in others:
            span.n_pins += 1
        self.spans(branch(0, 99, SPAN))
        self.drain()
        for span in others:
            span.n_pins -= 1
        assert self.retention.bar > 0

    def drain(self, newcomer: Newcomer = ANY, now_s: float = 0.0) -> list[tuple[int, str]]:
        """Positions and reasons, until nothing goes any more."""
        gone = []
        while (chosen := self.retention.victim(newcomer, now_s=now_s)) is not None:
            gone.append((chosen[0].position, str(chosen[1])))
            self.index.remove(chosen[0])
            self.index.audit()
        return gone


# ---- memory with KV cells and a state --------------------------------------------------------------------------------


def test_a_state_goes_before_the_spans_that_only_it_needs_and_those_tail_first() -> None:
    host = Host()
    host.spans(40)
    host.state(30)
    assert host.drain() == [
        (40, "stranded"),
        (30, "outvalued"),
        (30, "stranded"),
        (20, "stranded"),
        (10, "stranded"),
    ]


def test_spans_stay_for_as_long_as_a_branch_needs_them() -> None:
    host = Host()
    host.spans(40)
    host.state(40)
    host.spans(branch(20, 1, 60))
    kept = host.state(branch(20, 1, 60))
    kept.n_pins = 1
    assert host.drain() == [(40, "outvalued"), (40, "stranded"), (30, "stranded")]


def test_a_state_within_a_span_keeps_it() -> None:
    host = Host()
    host.spans(30)
    host.state(15).n_pins = 1
    assert host.drain() == [(30, "stranded")]


def test_a_state_below_a_fork_is_held_by_the_span_of_the_other_branch() -> None:
    host = Host()
    host.spans(20)
    host.spans(branch(15, 1, 20))
    host.state(15).n_pins = 1
    gone = host.drain()
    assert gone == [(20, "stranded")]
    assert len(host.index.spans) == 2


def test_a_state_without_cells_goes_first_unless_the_device_has_them() -> None:
    host = Host()
    host.spans(20)
    covered, bare = host.state(20), host.state(branch(0, 1, 25))
    bare.hits = 9
    held = Holdings({SlotId(0): [bare]}, frozenset(), needs_span=True)
    assert host.retention.victim(ANY) == (bare, Eviction.STRANDED)
    assert host.retention.victim(ANY, holdings=held) == (covered, Eviction.OUTVALUED)
    host.spans(branch(0, 1, 30))
    assert host.retention.victim(ANY)[0] is not bare  # type: ignore[index]


def test_spans_on_their_way_to_a_state_that_the_device_can_resume_are_kept() -> None:
    host = Host()
    state = host.state(30)
    held = Holdings({SlotId(0): [state]}, frozenset({SlotId(0)}), needs_span=True)
    state.n_users = 1
    for end in (10, 20, 30):
        host.spans(end)
        assert host.retention.victim(ANY, holdings=held) is None
    state.n_users = 0
    host.index.remove(state)
    assert host.drain() == [(30, "stranded"), (20, "stranded"), (10, "stranded")]


def test_removing_a_span_out_of_turn_strands_what_needs_it() -> None:
    host = Host()
    spans = host.spans(30)
    state = host.state(30)
    host.index.remove(spans[2])
    assert host.retention.victim(ANY) == (state, Eviction.STRANDED)


def test_what_saves_more_for_its_bytes_stays() -> None:
    host = Host()
    for length, token in ((40, 1), (400, 2), (100, 3)):
        host.spans(branch(0, token, length))
        host.state(branch(0, token, length))
    assert [position for position, reason in host.drain() if reason == "outvalued"] == [40, 100, 400]


def test_one_that_was_of_use_stays_longer() -> None:
    host = Host()
    states = []
    for token in range(3):
        host.spans(branch(0, token, 50))
        states.append(host.state(branch(0, token, 50)))
    states[0].hits = 1
    host.retention.used(states[0])
    order = []
    while (chosen := host.retention.victim(ANY)) is not None:
        order += [states.index(chosen[0])] if isinstance(chosen[0], Checkpoint) else []
        host.index.remove(chosen[0])
    assert order == [1, 2, 0]


def test_age_decides_in_the_end() -> None:
    """One that is worth twice as much goes, too, once the bar has risen past it."""
    host = Host()
    old = host.state(branch(0, 0, 150), n_bytes=100)
    host.spans(branch(0, 0, 150))
    for token in range(1, 40):
        host.spans(branch(0, token, 100))
        host.state(branch(0, token, 100))
        if token < 3:
            continue
        while (chosen := host.retention.victim(ANY)) is not None:
            host.index.remove(chosen[0])
            if isinstance(chosen[0], Checkpoint):
                break
    assert old.node is None
    assert host.retention.bar > 0


def test_the_gap_of_a_state_ends_where_the_next_one_is() -> None:
    host = Host()
    host.spans(200)
    host.state(100)
    deep = host.state(200)
    near = host.state(190)  # leaves `deep` a gap of 10
    assert host.retention.victim(ANY) == (deep, Eviction.OUTVALUED)
    host.index.remove(near)
    assert deep.gap == 100
    assert host.retention.victim(ANY) != (deep, Eviction.OUTVALUED)


def test_one_that_others_follow_counts_half_until_it_was_of_use() -> None:
    host = Host()
    host.spans(200)
    first, last = host.state(100), host.state(200)
    assert host.retention.victim(ANY) == (first, Eviction.OUTVALUED)
    first.hits = 2
    assert host.retention.victim(ANY) == (last, Eviction.OUTVALUED)


# ---- one kind only ---------------------------------------------------------------------------------------------------


def test_without_a_state_spans_go_tail_first_and_the_longest_unused() -> None:
    host = Host(needs_state=False)
    first = host.spans(30)
    host.raise_bar()
    host.spans(branch(10, 1, 30))
    assert host.drain() == [
        (30, "outvalued"),
        (20, "outvalued"),
        (30, "outvalued"),
        (20, "outvalued"),
        (10, "outvalued"),
    ]
    assert first[1].node is None


def test_using_the_last_span_uses_those_before_it() -> None:
    host = Host(needs_state=False)
    used = host.spans(20)
    host.spans(branch(0, 1, 20))
    host.raise_bar()
    host.retention.used(used[-1])
    order = []
    while (chosen := host.retention.victim(ANY)) is not None:
        order.append(chosen[0])
        host.index.remove(chosen[0])
    assert order[2:] == used[::-1]


def test_without_cells_every_state_stands_for_itself() -> None:
    host = Host(needs_span=False)
    host.state(30)
    host.state(100)
    assert host.drain() == [(30, "outvalued"), (100, "outvalued")]


# ---- order -----------------------------------------------------------------------------------------------------------


def test_expired_stranded_lower_priority_second_class_worth() -> None:
    host = Host()
    host.spans(400)
    kinds = {50: TAIL, 130: PERIODIC, 210: TAIL, 290: TAIL, 400: TAIL}
    important, _, low, expired, _ = (host.state(position, kind) for position, kind in kinds.items())
    important.priority, low.priority, expired.expires_s = 1, -1, 7.0
    for mark in (important, low, expired):
        host.retention.changed(mark)
    host.spans(branch(0, 1, 10))
    assert host.retention.victim(ANY, now_s=6.9) != (expired, Eviction.EXPIRED)
    assert host.drain(now_s=7.0)[:5] == [
        (290, "expired"),
        (10, "stranded"),
        (210, "outvalued"),
        (130, "thinned"),
        (400, "outvalued"),
    ]
    assert important.node is not None


def test_a_newcomer_displaces_nothing_of_a_higher_priority() -> None:
    host = Host()
    host.spans(20)
    state = host.state(20)
    state.priority = 3
    host.retention.changed(state)
    assert host.retention.victim(Newcomer(1, priority=2)) is None
    assert host.retention.victim(Newcomer(1, priority=3)) == (state, Eviction.OUTVALUED)


def test_the_second_class_goes_before_the_first_and_by_its_gaps() -> None:
    host = Host()
    host.spans(300)
    for position, kind in ((20, TAIL), (120, PERIODIC), (150, PERIODIC), (300, TAIL)):
        host.state(position, kind)
    reasons = [each for each in host.drain() if each[1] != "stranded"]
    assert reasons == [(150, "thinned"), (120, "thinned"), (20, "outvalued"), (300, "outvalued")]


def test_an_optional_newcomer_takes_only_what_covers_less() -> None:
    host = Host()
    host.spans(300)
    host.state(20)
    host.state(300)
    assert host.retention.victim(Newcomer(900, is_optional=True)) is None
    periodic = host.state(120, PERIODIC)
    assert host.retention.victim(Newcomer(100, is_optional=True)) is None
    assert host.retention.victim(Newcomer(101, is_optional=True)) == (periodic, Eviction.THINNED)
    periodic.hits = 1  # of use: it is of the first class now
    assert host.retention.victim(Newcomer(101, is_optional=True)) is None


@pytest.mark.parametrize("keep", ["n_users", "n_pins", "is_ready"])
def test_leased_pinned_or_unfinished_ones_never_go(keep: str) -> None:
    host = Host()
    host.spans(20)
    state = host.state(20)
    setattr(state, keep, keep != "is_ready")
    assert host.drain() == []
    setattr(state, keep, keep == "is_ready")
    assert len(host.drain()) == 3


def test_what_slots_hold_first_and_last_goes_after_the_rest() -> None:
    host = Host()
    host.spans(400)
    path = [host.state(n) for n in (20, 200, 400)]
    held = Holdings({SlotId(0): path}, frozenset(), needs_span=True)
    assert host.retention.victim(ANY, holdings=held) == (path[1], Eviction.OUTVALUED)
    host.index.remove(path[1])
    held = Holdings({SlotId(0): path[::2]}, frozenset(), needs_span=True)
    assert host.retention.victim(ANY, holdings=held) == (path[0], Eviction.OUTVALUED)
    assert host.retention.victim(Newcomer(500, is_optional=True), holdings=held) is None


def test_it_takes_over_an_index_that_holds_something() -> None:
    index = PrefixIndex(span_tokens=SPAN)
    index.add_spans("", TRUNK[:20], SPAN_BYTES)
    index.add_checkpoint("", TRUNK[:20], TAIL, STATE_BYTES).is_ready = True
    retention = Retention(index, needs_span=True, needs_state=True)
    chosen = retention.victim(ANY)
    assert chosen is not None
    assert isinstance(chosen[0], Checkpoint)
