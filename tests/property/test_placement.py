"""What every placement has to keep to, and what it costs in native calls."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from hypothesis import event, given
from hypothesis import strategies as st

from pyllamacache.prefix.placement import TAIL_TOKENS, Placement, place
from pyllamacache.request import CheckpointKind

PERIODIC = CheckpointKind.PERIODIC


@dataclass(frozen=True)
class Case:
    resume: int
    target: int
    n_prompt: int
    matched: int
    boundaries: tuple[int, ...]
    known: frozenset[int]
    n_ubatch: int
    n_batch: int
    grid: int
    min_gap: int
    n_free: int

    def place(self) -> tuple[Placement, ...]:
        return place(
            resume=self.resume,
            target=self.target,
            n_prompt=self.n_prompt,
            matched=self.matched,
            boundaries=self.boundaries,
            known=self.known,
            n_ubatch=self.n_ubatch,
            n_batch=self.n_batch,
            grid=self.grid,
            min_gap=self.min_gap,
            n_free=self.n_free,
        )

    def n_calls(self, cuts: Collection[int]) -> int:
        """As `compose` chunks a prefill that is alone: `n_batch` at most, cut at placements, on the grid."""
        start, n_calls = self.resume, 0
        while start < self.target:
            end = min([start + self.n_batch, self.target, *(cut for cut in cuts if cut > start)])
            if end < self.target:
                end = end // self.grid * self.grid
            assert end > start
            start, n_calls = end, n_calls + 1
        return n_calls


@st.composite
def cases(draw: st.DrawFn) -> Case:
    n_ubatch = draw(st.sampled_from([1, 2, 4, 8, 16]))
    n_batch = n_ubatch * draw(st.sampled_from([1, 1, 2, 4]))
    n_prompt = draw(st.integers(1, 200))
    grid = draw(st.sampled_from([1, 1, n_ubatch]))
    resume = draw(st.integers(0, n_prompt - 1)) // grid * grid
    positions = st.integers(1, max(1, n_prompt - 1))
    return Case(
        resume=resume,
        target=draw(st.sampled_from([n_prompt, n_prompt, n_prompt - 1, n_prompt // grid * grid])),
        n_prompt=n_prompt,
        matched=draw(st.sampled_from([resume, n_prompt]) | st.integers(resume, n_prompt)),
        boundaries=tuple(sorted(draw(st.sets(positions, max_size=12)))),
        known=frozenset(position // grid * grid for position in draw(st.sets(positions, max_size=8))) - {0},
        n_ubatch=n_ubatch,
        n_batch=n_batch,
        grid=grid,
        min_gap=draw(st.sampled_from([0, 0, 3, 20, 64])),
        n_free=draw(st.sampled_from([0, 1, 3, 8, 99])),
    )


def semantic(placed: Sequence[Placement]) -> list[Placement]:
    return [each for each in placed if each.kind is not PERIODIC]


@given(cases())
def test_positions_are_new_ascending_inside_and_on_the_grid(case: Case) -> None:
    positions = [each.position for each in case.place()]
    assert positions == sorted(set(positions))
    assert all(case.resume < position < case.target for position in positions)
    assert not case.known & set(positions)
    assert all(position % case.grid == 0 for position in positions)
    assert all(each.position % case.n_ubatch == 0 for each in case.place() if each.kind is PERIODIC)


@given(cases())
def test_each_costs_at_most_one_call_and_periodic_ones_none(case: Case) -> None:
    placed = case.place()
    wanted = [each.position for each in semantic(placed)]
    n_without, n_wanted = case.n_calls(()), case.n_calls(wanted)
    assert n_wanted <= n_without + len(wanted)
    assert case.n_calls([each.position for each in placed]) == n_wanted
    event(f"periodic: {len(placed) > len(wanted)}")


@given(cases())
def test_every_one_has_its_reason(case: Case) -> None:
    grid = case.grid
    for each in case.place():
        match each.kind:
            case CheckpointKind.BOUNDARY:
                assert each.position in {position // grid * grid for position in case.boundaries}
            case CheckpointKind.BRANCH:
                assert each.position == case.matched // grid * grid
                assert case.resume < case.matched < case.n_prompt
            case CheckpointKind.TAIL:
                assert each.position == (case.n_prompt - (TAIL_TOKENS if grid == 1 else 1)) // grid * grid
            case CheckpointKind.ANCHOR:
                assert each.position == case.n_prompt // case.n_ubatch * case.n_ubatch - case.n_ubatch
            case CheckpointKind.PERIODIC:
                assert each.position % case.n_batch == 0
            case _:
                raise AssertionError(each.kind)


@given(cases())
def test_what_saves_too_little_is_left_out_and_nothing_else(case: Case) -> None:
    placed = semantic(case.place())
    before = set(case.known)
    for each in placed:
        gap = each.position - max((position for position in before if position < each.position), default=0)
        assert gap >= case.min_gap or each.kind is CheckpointKind.BOUNDARY
        before.add(each.position)
    assert set(placed) <= set(semantic(replace(case, min_gap=0).place()))
    left_out = set(semantic(replace(case, min_gap=0).place())) - set(placed)
    for each in left_out:
        assert (
            each.position - max((position for position in before if position < each.position), default=0) < case.min_gap
        )


@given(cases())
def test_the_first_and_the_last_boundary_are_always_taken(case: Case) -> None:
    taken = {each.position for each in case.place()}
    for position in (*case.boundaries[:1], *case.boundaries[-1:]):
        place_of_it = position // case.grid * case.grid
        assert place_of_it in taken | case.known or not case.resume < place_of_it < case.target
    kept = [each.position for each in case.place() if each.kind is CheckpointKind.BOUNDARY]
    inner = kept[:-1] if case.grid == 1 else []
    assert all(after - before >= case.n_ubatch for before, after in pairwise(inner))


@given(cases())
def test_periodic_ones_leave_room_and_are_the_deepest(case: Case) -> None:
    placed = case.place()
    wanted = semantic(placed)
    periodic = [each for each in placed if each.kind is PERIODIC]
    assert len(periodic) <= max(0, case.n_free - len(wanted) - 1)
    every = [each for each in replace(case, n_free=1000).place() if each.kind is PERIODIC]
    assert periodic == every[len(every) - len(periodic) :]
    assert semantic(replace(case, n_free=1000).place()) == wanted


@given(cases())
def test_a_prompt_that_was_placed_once_places_nothing_semantic_again(case: Case) -> None:
    """The same prompt from the same place, with everything taken that was placed."""
    taken = case.known | {each.position for each in case.place()}
    again = replace(case, known=taken).place()
    assert semantic(again) == []
