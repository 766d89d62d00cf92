"""Victims over random trees: who never goes, in which order the others go, and what use and distance change."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from hypothesis import assume, event, given
from hypothesis import strategies as st

from pyllamacache.prefix.index import Checkpoint, PrefixIndex
from pyllamacache.prefix.retention import Eviction, Holdings, choose_victim, value
from pyllamacache.request import CheckpointKind, SlotId

if TYPE_CHECKING:
    from pyllamacache.request import Ids

TRUNKS = (list(range(1, 31)), [1, 2, 3, 4, 5, *range(50, 70)], [9] * 12)
NOW = 6


def as_ids(values: list[int]) -> Ids:
    return np.array(values, dtype=np.int32)


@st.composite
def contents(draw: st.DrawFn) -> Ids:
    trunk = draw(st.sampled_from(TRUNKS))
    return as_ids(trunk[: draw(st.integers(1, len(trunk)))])


@dataclass(frozen=True)
class Case:
    tree: PrefixIndex
    holdings: Holdings
    newcomer: Ids
    is_optional: bool

    def choose(self) -> tuple[Checkpoint, Eviction] | None:
        path = self.path
        gap = len(self.newcomer) - (path[-1].position if path else 0)
        return choose_victim(
            self.tree.checkpoints, self.holdings, now=NOW, newcomer=path, is_optional=self.is_optional, gap=gap
        )

    @property
    def path(self) -> list[Checkpoint]:
        return self.tree.path("", self.newcomer)

    @property
    def free(self) -> list[Checkpoint]:
        return [node for node in self.tree.checkpoints if node.is_ready and not node.n_users]

    @property
    def stranded(self) -> list[Checkpoint]:
        resident = [node for path in self.holdings.paths.values() for node in path]
        return [node for node in self.free if self.holdings.needs_span and node not in resident]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    tree = PrefixIndex()
    for ids in draw(st.lists(contents(), max_size=10, unique_by=lambda ids: tuple(ids.tolist()))):
        node = tree.add_checkpoint("", ids, draw(st.sampled_from(CheckpointKind)), draw(st.integers(1, 3)))
        node.is_ready = draw(st.sampled_from([True, True, True, False]))
        node.n_users = draw(st.sampled_from([0, 0, 0, 1]))
        node.hits = draw(st.integers(0, 2))
        node.last_used = draw(st.integers(0, NOW))
    slots = draw(st.lists(contents(), max_size=4))
    paths = {SlotId(index): tree.path("", ids) for index, ids in enumerate(slots)}
    busy = frozenset(slot_id for slot_id in paths if draw(st.booleans()))
    return Case(tree, Holdings(paths, busy, draw(st.booleans())), draw(contents()), draw(st.booleans()))


@given(cases())
def test_a_victim_is_free_and_of_the_first_class_that_has_any(case: Case) -> None:
    chosen = case.choose()
    shield = case.holdings.shielded(case.path, None)
    event("none" if chosen is None else str(chosen[1]))
    if chosen is None:
        assert not case.stranded
        assert case.is_optional or not case.free
        return
    node, reason = chosen
    assert node in case.free
    assert (reason is Eviction.STRANDED) == (node in case.stranded) == bool(case.stranded)
    if case.stranded:
        return
    second = [each for each in case.free if each.is_second_class and not shield.get(id(each))]
    if second:
        assert reason is Eviction.THINNED
        assert node.is_second_class
    if reason is Eviction.OUTVALUED:
        levels = [shield.get(id(each), 0) for each in case.free if not each.is_second_class]
        assert shield.get(id(node), 0) == min([*levels, shield.get(id(node), 0)])


@given(cases())
def test_a_newcomer_of_the_second_class_never_displaces_one_of_the_first(case: Case) -> None:
    chosen = case.choose()
    if chosen is not None and case.is_optional:
        node, reason = chosen
        assert reason is Eviction.STRANDED or node.is_second_class
        if reason is not Eviction.STRANDED:
            assert not case.holdings.shielded(case.path, None).get(id(node))
            above = case.path[-1].position if case.path else 0
            assert node.gap < len(case.newcomer) - above


@given(cases(), st.integers(0, 9), st.integers(0, 3))
def test_using_another_one_never_makes_it_the_victim(case: Case, index: int, hits: int) -> None:
    before = case.choose()
    assume(before is not None and case.free)
    assert before is not None
    other = case.free[index % len(case.free)]
    assume(other is not before[0])
    other.hits += hits
    other.last_used = NOW
    assert case.choose() == before


@given(cases(), st.integers(0, 9))
def test_one_in_use_is_passed_over_and_the_order_of_the_others_stays(case: Case, index: int) -> None:
    before = case.choose()
    assume(before is not None and case.free)
    assert before is not None
    held = case.free[index % len(case.free)]
    held.n_users += 1
    after = case.choose()
    assert after is None or after[0] is not held
    if held is not before[0]:
        assert after == before


@given(cases())
def test_everything_free_goes_in_the_end_for_one_of_the_first_class(case: Case) -> None:
    assume(not case.is_optional)
    n_free = len(case.free)
    for _ in range(n_free):
        chosen = case.choose()
        assert chosen is not None
        case.tree.remove(chosen[0])
        paths = {
            slot_id: [node for node in path if node is not chosen[0]] for slot_id, path in case.holdings.paths.items()
        }
        case = Case(case.tree, Holdings(paths, case.holdings.busy, case.holdings.needs_span), case.newcomer, False)
    assert case.choose() is None


@given(
    gap=st.integers(1, 1000),
    hits=st.integers(0, 5),
    age=st.integers(0, 9),
    n_bytes=st.integers(1, 1000),
    more=st.integers(1, 9),
)
def test_a_value_grows_with_gap_hits_and_recency_and_falls_with_bytes(
    gap: int, hits: int, age: int, n_bytes: int, more: int
) -> None:
    def worth(gap: int, hits: int, age: int, n_bytes: int) -> float:
        node = Checkpoint("", gap, kind=CheckpointKind.TAIL, n_bytes=n_bytes, hits=hits, last_used=20 - age)
        return value(node, 20)

    plain = worth(gap, hits, age, n_bytes)
    assert worth(gap + more, hits, age, n_bytes) > plain
    assert worth(gap, hits + more, age, n_bytes) > plain
    assert worth(gap, hits, age + more, n_bytes) < plain
    assert worth(gap, hits, age, n_bytes + more) < plain
    assert worth(gap, hits, -more, n_bytes) == worth(gap, hits, 0, n_bytes)
