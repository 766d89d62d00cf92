"""What a change was, and how much of the rest it left alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyllamacache.observe.difference import Change, Difference, common_length, compare, compare_spelled, overlap
from pyllamacache.request import Spelling


def tokens(seed: int, n: int, *, vocabulary: int = 1 << 17) -> Any:
    return np.random.default_rng(seed).integers(0, vocabulary, n, dtype=np.int32)


def joined(*parts: Any) -> Any:
    return np.concatenate([np.asarray(part, dtype=np.int32) for part in parts])


A, B, C, D = (tokens(30 + i, 50) for i in range(4))
FRONT, REST, TAIL, OTHER = tokens(1, 20), tokens(2, 900), tokens(3, 300), tokens(4, 400)
SYSTEM, TURNS = tokens(5, 100), [tokens(40 + i, 30) for i in range(14)]
CLOCK = tokens(6, 500)


def with_clock(position: int, clock: int) -> Any:
    ids = CLOCK.copy()
    ids[position : position + 4] = clock
    return ids


CASES = {
    # old, new: change, position, changed there before and now, identical after it, moved
    "nothing": ((REST, REST), ("identical", 900, 0, 0, 0, 0)),
    "a turn more": ((REST, joined(REST, A)), ("appended", 900, 0, 50, 0, 0)),
    "a turn less": ((joined(REST, A), REST), ("truncated", 900, 50, 0, 0, 0)),
    "S50": ((joined(FRONT, [1, 2, 3], REST), joined(FRONT, [4, 5, 6], REST)), ("changed_span", 20, 3, 3, 900, 0)),
    "S50 and a turn": (
        (joined(FRONT, [1, 2, 3], REST), joined(FRONT, [4, 5, 6], REST, A)),
        ("changed_span", 20, 3, 3, 900, 0),
    ),
    "S51 at 20": ((with_clock(20, 1), with_clock(20, 2)), ("changed_span", 20, 4, 4, 476, 0)),
    "S51 at 480": ((with_clock(480, 1), with_clock(480, 2)), ("changed_span", 480, 4, 4, 16, 0)),
    "S51 at the end": ((with_clock(496, 1), with_clock(496, 2)), ("branched", 496, 4, 4, 0, 0)),
    "S52": ((joined(A, B, C, D, TAIL), joined(A, C, B, D, TAIL)), ("reordered_blocks", 50, 50, 0, 400, 50)),
    "S52 in front": ((joined(A, B, C, TAIL), joined(C, A, B, TAIL)), ("reordered_blocks", 0, 0, 50, 400, 50)),
    "S56": (
        (joined(SYSTEM, *TURNS[:12], [7]), joined(SYSTEM, *TURNS[1:13])),
        ("removed_middle", 100, 30, 0, 330, 0),
    ),
    "a note for what was dropped": (
        (joined(SYSTEM, REST, TAIL), joined(SYSTEM, A[:8], TAIL, B)),
        ("removed_middle", 100, 900, 8, 300, 0),
    ),
    "the front cut": ((joined(SYSTEM, REST), REST), ("cut_front", 0, 100, 0, 900, 0)),
    "the front cut behind a first token": (
        (joined([1], SYSTEM, REST), joined([1], REST, A)),
        ("cut_front", 1, 100, 0, 900, 0),
    ),
    "another header": ((joined(SYSTEM, REST), joined(A, REST)), ("other_header", 0, 100, 50, 900, 0)),
    "something before all": ((REST, joined(A, REST)), ("inserted_span", 0, 0, 50, 900, 0)),
    "something between": ((joined(SYSTEM, REST), joined(SYSTEM, A, REST)), ("inserted_span", 100, 0, 50, 900, 0)),
    "another question": ((joined(SYSTEM, REST), joined(SYSTEM, OTHER)), ("branched", 100, 900, 400, 0, 0)),
    "another question before the same stub": (
        (joined(SYSTEM, REST, [1, 2, 3]), joined(SYSTEM, OTHER, [1, 2, 3])),
        ("branched", 100, 900, 400, 3, 0),
    ),
    "something else": ((REST, OTHER), ("unrelated", 0, 900, 400, 0, 0)),
    "something else after a first token": ((joined([1], REST), joined([1], OTHER)), ("unrelated", 1, 900, 400, 0, 0)),
    "two edits": (
        (joined(SYSTEM, A, REST, B, TAIL), joined(SYSTEM, C, REST, D, TAIL)),
        ("changed_span", 100, 50, 50, 1200, 0),
    ),
    "nothing before": ((REST[:0], REST), ("appended", 0, 0, 900, 0, 0)),
    "nothing now": ((REST, REST[:0]), ("truncated", 0, 900, 0, 0, 0)),
    "one token": (([1], [2]), ("unrelated", 0, 1, 1, 0, 0)),
}


def facts(found: Difference) -> tuple[Any, ...]:
    changed = (found.old_changed, found.new_changed)
    return (found.change.value, found.position, *changed, found.identical_after, found.moved)


@pytest.mark.parametrize("name", CASES)
def test_a_change_is_named_with_its_numbers(name: str) -> None:
    (old, new), expected = CASES[name]
    assert facts(compare(np.asarray(old), np.asarray(new))) == expected


def test_the_share_of_what_is_left_is_that_of_the_scenario() -> None:
    found = compare(joined(FRONT, [1, 2, 3], REST), joined(FRONT, [4, 5, 6], REST, TURNS[0][:25]))
    assert round(found.share_identical, 2) == 0.97
    assert compare(REST, REST).share_identical == 1.0


def test_bytes_take_longer_runs_to_agree() -> None:
    old, new = (
        np.frombuffer(text, dtype=np.uint8) for text in (b"x" * 30 + b"the cat sat", b"y" * 30 + b"the cat sat")
    )
    found = compare(old, new, unit="bytes")
    assert (found.unit, found.change) == ("bytes", Change.OTHER_HEADER)
    assert found.identical_after == 11


# ---- whatever the edit -----------------------------------------------------------------------------------------

seeds = st.integers(0, 1 << 30)


@given(seeds, st.integers(200, 2000), st.integers(10, 90), st.integers(1, 60), st.sampled_from(["in", "out", "other"]))
def test_one_edit_comes_out_as_what_it_was(seed: int, n: int, percent: int, size: int, edit: str) -> None:
    old, at = tokens(seed, n), n * percent // 100
    size = min(size, (n - at) // 2)
    span = tokens(seed + 1, size) if edit != "out" else []
    new = joined(old[:at], span, old[at if edit == "in" else at + size :])
    found = compare(old, new)
    change = {"in": Change.INSERTED_SPAN, "out": Change.REMOVED_MIDDLE, "other": Change.CHANGED_SPAN}[edit]
    is_end = n - at - size <= 8  # too little to tell
    assert found.change is change or is_end
    assert found.position in range(at, at + 4)  # a token that is there by chance belongs to what is common
    assert abs(found.identical_after - (n - at - (0 if edit == "in" else size))) <= 4


@given(seeds, st.lists(st.integers(20, 80), min_size=3, max_size=12), st.randoms(use_true_random=False))
def test_blocks_in_another_order_are_moved_and_nothing_is_lost(seed: int, sizes: list[int], chance: Any) -> None:
    blocks = [tokens(seed + i, size) for i, size in enumerate(sizes)]
    shuffled = list(range(len(blocks)))
    chance.shuffle(shuffled)
    new = joined(*(blocks[i] for i in shuffled))
    found = compare(joined(*blocks), new)
    if shuffled == sorted(shuffled):
        assert found.change is Change.IDENTICAL
        return
    assert found.change is Change.REORDERED_BLOCKS
    assert abs(found.position + found.identical_after + found.moved - len(new)) <= 4 * len(blocks)


@given(seeds, st.integers(1, 6), st.data())
def test_several_edits_leave_the_rest_identical(seed: int, n_edits: int, data: st.DataObject) -> None:
    old = tokens(seed, 1200)
    starts = sorted(data.draw(st.lists(st.integers(1, 39), min_size=n_edits, max_size=n_edits, unique=True)))
    new = old.copy()
    for at in starts:
        new[at * 30 : at * 30 + 5] = tokens(seed + at, 5)
    found = compare(old, new)
    assert found.change is Change.CHANGED_SPAN
    assert found.position in range(starts[0] * 30, starts[0] * 30 + 3)
    assert found.n_places >= n_edits
    assert 0 <= found.identical_after - (1200 - starts[0] * 30 - 5 * n_edits) <= 2 * n_edits


few = st.lists(st.integers(0, 3), max_size=120)


@given(few, few)
def test_counts_fit_into_the_sequences_whatever_they_are(a: list[int], b: list[int]) -> None:
    old, new = (np.array(ids, dtype=np.int32) for ids in (a, b))
    found = compare(old, new)
    assert found.position == next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )
    assert (found.change is Change.IDENTICAL) == (a == b)
    assert min(found.old_changed, found.new_changed, found.identical_after, found.moved) >= 0
    assert found.position + found.new_changed + found.identical_after <= len(new)
    assert found.position + found.old_changed <= len(old)
    assert found.position + found.identical_after + found.moved <= min(len(old), len(new))
    at_old = at_new = found.position
    for hunk in found.hunks:  # between them the two agree
        assert old[at_old : hunk.old_start].tolist() == new[at_new : hunk.new_start].tolist()
        assert hunk.n_old or hunk.n_new
        at_old, at_new = hunk.old_end, hunk.new_end
    assert old[at_old:].tolist() == new[at_new:].tolist()
    assert 0 <= overlap(old, new) <= 1


@given(few, few)
def test_what_is_common_at_the_front_is_found(a: list[int], b: list[int]) -> None:
    n = common_length(np.array(a), np.array(b))
    assert a[:n] == b[:n]
    assert a[n : n + 1] != b[n : n + 1] or n == len(a) == len(b)


@pytest.mark.parametrize(
    ("pair", "change", "n_kept"),
    [
        (lambda old: (old, np.delete(old, np.arange(100, len(old), 97))), Change.REMOVED_MIDDLE, 98_970),
        (lambda old: (old, tokens(9, len(old))), Change.UNRELATED, 0),
        (lambda old: (old % 4, tokens(9, len(old)) % 4), Change.REORDERED_BLOCKS, 0),
        (lambda old: (old * 0, joined(old[:50_000] * 0, [1], old[:40_000] * 0)), Change.REMOVED_MIDDLE, 90_000),
        (
            lambda old: (old, joined(*(old[i : i + 100] for i in range(len(old) - 100, 0, -100)))),
            Change.REORDERED_BLOCKS,
            99_900,
        ),
    ],
    ids=["many edits", "unrelated", "hardly a vocabulary", "one token", "reversed blocks"],
)
def test_a_hundred_thousand_tokens_end_in_what_is_true(pair: Any, change: Change, n_kept: int) -> None:
    """What is quadratic here runs into the time limit of every test."""
    old, new = pair(tokens(8, 100_000))
    found = compare(old, new)
    assert found.change is change
    assert n_kept <= found.position + found.identical_after + found.moved <= len(new)


# ---- the same text ---------------------------------------------------------------------------------------------


def spelled(*pieces: str) -> Spelling:
    ends = np.cumsum([len(piece.encode()) for piece in pieces], dtype=np.int32)
    return Spelling("".join(pieces).encode(), ends, np.empty(0, dtype=np.int32), add_special=False, parse_special=False)


@pytest.mark.parametrize(
    ("old", "new", "is_same_text"),
    [
        (("a", "b", "c"), ("a", "bc"), True),
        (("a", "b", "c", "d"), ("a", "bc", "e"), True),
        (("a", "b", "d"), ("a", "bc"), False),
        (("a", "x", "c"), ("a", "y", "c"), False),
        (("a", "b"), ("a", "b", "c"), False),
    ],
)
def test_other_tokens_of_the_same_text_are_told_from_another_text(
    old: tuple[str, ...], new: tuple[str, ...], is_same_text: bool
) -> None:
    ids = {piece: i for i, piece in enumerate(dict.fromkeys(old + new))}
    found = compare_spelled(
        np.array([ids[piece] for piece in old]), np.array([ids[piece] for piece in new]), spelled(*old), spelled(*new)
    )
    assert (found.change is Change.OTHER_TOKENS) is is_same_text
    assert found.position == common_length(np.array([ids[p] for p in old]), np.array([ids[p] for p in new]))


def test_without_spellings_tokens_are_all_there_is() -> None:
    assert compare_spelled(np.array([1, 2]), np.array([1, 3]), None, spelled("a", "b")).change is Change.UNRELATED
