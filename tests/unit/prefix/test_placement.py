from __future__ import annotations

from typing import Any

import pytest

from pyllamacache.prefix.placement import TAIL_TOKENS, Placement, place
from pyllamacache.request import CheckpointKind

BOUNDARY, BRANCH, TAIL, ANCHOR, PERIODIC = (
    CheckpointKind.BOUNDARY,
    CheckpointKind.BRANCH,
    CheckpointKind.TAIL,
    CheckpointKind.ANCHOR,
    CheckpointKind.PERIODIC,
)


def placed(n_prompt: int, **changed: Any) -> list[tuple[int, CheckpointKind]]:
    """A cold prompt, n_ubatch 100 in batches of 200, no room for periodic ones."""
    options: dict[str, Any] = {
        "resume": 0,
        "target": n_prompt,
        "n_prompt": n_prompt,
        "matched": 0,
        "boundaries": (),
        "known": (),
        "n_ubatch": 100,
        "n_batch": 200,
    }
    return [(each.position, each.kind) for each in place(**{**options, **changed})]


# ---- the tail and the anchor -----------------------------------------------------------------------------------


def test_a_cold_prompt_gets_a_tail_and_an_anchor() -> None:
    assert placed(1000) == [(900, ANCHOR), (996, TAIL)]
    assert placed(1049) == [(900, ANCHOR), (1045, TAIL)]


@pytest.mark.parametrize(("n_prompt", "anchor"), [(199, []), (200, [100]), (299, [100]), (300, [200])])
def test_the_anchor_is_the_last_multiple_that_leaves_a_whole_ubatch(n_prompt: int, anchor: list[int]) -> None:
    assert [position for position, kind in placed(n_prompt) if kind is ANCHOR] == anchor


@pytest.mark.parametrize("n_prompt", range(1, 10))
@pytest.mark.parametrize("n_ubatch", [1, 2, 4, 512])
def test_a_tiny_prompt_gets_what_fits_in_it(n_prompt: int, n_ubatch: int) -> None:
    result = placed(n_prompt, n_ubatch=n_ubatch, n_batch=n_ubatch, n_free=99)
    assert all(0 < position < n_prompt for position, _ in result)
    assert ((n_prompt - TAIL_TOKENS, TAIL) in result) == (n_prompt > TAIL_TOKENS)


def test_nothing_is_placed_where_nothing_is_computed() -> None:
    assert placed(1000, resume=996) == []
    assert placed(1000, resume=1000, target=1000) == []
    assert placed(1000, target=0) == []


def test_a_warm_up_that_stops_short_places_nothing_at_its_end() -> None:
    assert placed(1000, target=999) == [(900, ANCHOR), (996, TAIL)]
    assert placed(1000, target=996) == [(900, ANCHOR)]


# ---- what is known ---------------------------------------------------------------------------------------------


def test_where_there_is_one_no_second_is_taken() -> None:
    assert placed(1000, known={900, 996}) == []
    assert placed(1000, known={996}, resume=500) == [(900, ANCHOR)]


def test_the_same_prompt_again_takes_none() -> None:
    """It leaves nothing that is known: it resumes at its tail, and the three tokens behind that are worth none."""
    assert placed(1000, resume=996, matched=1000, known={900, 996}) == []
    assert placed(1000, resume=900, matched=1000, known={900, 996}) == []


def test_a_prefix_of_what_is_known_gets_a_tail_and_an_anchor_and_no_branch() -> None:
    assert placed(1000, matched=1000) == [(900, ANCHOR), (996, TAIL)]


# ---- branches --------------------------------------------------------------------------------------------------


def test_where_a_prompt_leaves_what_is_known_is_a_branch() -> None:
    assert placed(1000, resume=100, matched=640) == [(640, BRANCH), (900, ANCHOR), (996, TAIL)]


def test_a_prompt_that_resumes_where_it_leaves_needs_no_branch() -> None:
    assert placed(1000, resume=640, matched=640) == [(900, ANCHOR), (996, TAIL)]


def test_a_branch_at_a_place_that_was_wanted_anyway_is_one_checkpoint() -> None:
    assert placed(1000, matched=996) == [(900, ANCHOR), (996, BRANCH)]
    assert placed(1000, matched=640, boundaries=(640,)) == [(640, BOUNDARY), (900, ANCHOR), (996, TAIL)]


# ---- boundaries ------------------------------------------------------------------------------------------------


def test_boundaries_are_taken_where_they_lie() -> None:
    assert placed(1000, boundaries=(333, 777)) == [(333, BOUNDARY), (777, BOUNDARY), (900, ANCHOR), (996, TAIL)]


def test_boundaries_before_the_resume_position_or_known_are_done() -> None:
    assert placed(1000, resume=400, boundaries=(333, 777), known={777}) == [(900, ANCHOR), (996, TAIL)]


def test_the_first_and_the_last_boundary_are_taken_and_between_them_those_a_ubatch_apart() -> None:
    boundaries = (10, 60, 109, 110, 150, 209, 210, 300, 305)
    found = [position for position, kind in placed(1000, boundaries=boundaries) if kind is BOUNDARY]
    assert found == [10, 110, 210, 305]


def test_one_and_two_boundaries_are_all_taken() -> None:
    assert (5, BOUNDARY) in placed(1000, boundaries=(5,))
    assert placed(1000, boundaries=(5, 6))[:2] == [(5, BOUNDARY), (6, BOUNDARY)]


def test_sixty_short_messages_do_not_become_sixty_native_calls() -> None:
    boundaries = tuple(range(25, 1525, 25))
    assert len(boundaries) == 60
    result = placed(1530, boundaries=boundaries, n_ubatch=512, n_batch=512)
    assert [position for position, kind in result if kind is BOUNDARY] == [25, 550, 1075, 1500]
    assert len(result) == 6


def test_a_conversation_that_grows_keeps_its_boundaries() -> None:
    """Those kept of 40 messages are kept of 41, so that what was taken is what is looked for."""
    kept: set[int] = set()
    for n_messages in range(2, 60):
        boundaries = tuple(range(25, 25 * n_messages + 1, 25))
        now = {position for position, kind in placed(5000, boundaries=boundaries) if kind is BOUNDARY}
        assert kept - {25 * (n_messages - 1)} <= now
        kept = now


# ---- exact mode ------------------------------------------------------------------------------------------------


def test_exact_mode_takes_them_on_the_grid_only() -> None:
    result = placed(1049, grid=100, matched=640, boundaries=(333, 777))
    assert result == [(300, BOUNDARY), (600, BRANCH), (700, BOUNDARY), (900, ANCHOR), (1000, TAIL)]


def test_exact_mode_leaves_a_token_to_compute() -> None:
    assert placed(1000, grid=100, resume=900) == []
    assert placed(1001, grid=100, resume=900) == [(1000, TAIL)]


def test_what_falls_together_on_the_grid_is_one_checkpoint() -> None:
    assert placed(450, grid=100, boundaries=(210, 290), matched=250) == [
        (200, BOUNDARY),
        (300, ANCHOR),
        (400, TAIL),
    ]


# ---- what is not worth it --------------------------------------------------------------------------------------


def test_one_too_close_to_the_one_before_saves_less_than_it_costs() -> None:
    assert placed(1000, min_gap=64, known={940}, matched=500) == [(500, BRANCH), (900, ANCHOR)]
    assert placed(1000, min_gap=56, known={940}) == [(900, ANCHOR), (996, TAIL)]
    assert placed(960, min_gap=64, boundaries=()) == [(800, ANCHOR), (956, TAIL)]


def test_a_short_prompt_is_computed_again_sooner_than_restored() -> None:
    assert placed(60, min_gap=64) == []
    assert placed(68, min_gap=64) == [(64, TAIL)]


def test_the_gap_counts_from_the_last_one_that_was_placed() -> None:
    """One that is dropped does not shield the next."""
    assert placed(1000, min_gap=64, boundaries=(850,)) == [(850, BOUNDARY), (996, TAIL)]


def test_the_callers_boundaries_are_taken_whatever_they_save() -> None:
    assert placed(60, min_gap=64, boundaries=(5, 7)) == [(5, BOUNDARY), (7, BOUNDARY)]


# ---- periodic ones ---------------------------------------------------------------------------------------------


def test_calls_that_end_anyway_are_used_for_periodic_ones() -> None:
    assert placed(1000, n_free=32) == [
        (200, PERIODIC),
        (400, PERIODIC),
        (600, PERIODIC),
        (800, PERIODIC),
        (900, ANCHOR),
        (996, TAIL),
    ]


def test_a_prefill_that_starts_between_multiples_is_aligned_where_that_costs_no_call() -> None:
    """10 tokens to the first multiple: one call is short anyway, and it may be the first."""
    aligned = placed(1190, resume=190, n_free=32)
    assert [position for position, kind in aligned if kind is PERIODIC] == [200, 400, 600, 800]


def test_a_prefill_whose_alignment_would_cost_a_call_gets_none() -> None:
    assert placed(600, resume=190, target=590, known={500, 596}, n_free=32) == []
    assert placed(600, resume=190, target=591, known={500, 596}, n_free=32) == [(200, PERIODIC), (400, PERIODIC)]


@pytest.mark.parametrize(
    ("n_free", "expected"), [(0, []), (3, []), (4, [800]), (5, [600, 800]), (7, [200, 400, 600, 800])]
)
def test_periodic_ones_take_what_the_others_and_the_end_leave(n_free: int, expected: list[int]) -> None:
    """The deepest first: edits near the end are the usual ones."""
    assert [position for position, kind in placed(1000, n_free=n_free) if kind is PERIODIC] == expected


def test_a_periodic_one_that_is_known_is_not_taken_again() -> None:
    found = [position for position, kind in placed(1000, n_free=32, known={400, 900, 996}) if kind is PERIODIC]
    assert found == [200, 600, 800]


def test_placements_are_values() -> None:
    assert Placement(3, TAIL) == Placement(3, TAIL)
    assert len({Placement(3, TAIL), Placement(3, TAIL), Placement(3, BRANCH)}) == 2
