"""The stand-in is held to what was measured of llama.cpp, or the law would be tested on a fairy tale."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from pyllamacache.config import Memory
from pyllamacache.errors import NativeError
from pyllamacache.request import SamplingParams
from pyllamacache.scheduler.backend import Feed, Outcome
from tests.fakes import FakeBackend, GroupFault, cold_run, make_traits
from tests.fakes.memory import Window
from tests.fakes.sampler import FakeSampler

ALL_KINDS = pytest.mark.parametrize("memory", list(Memory))
GREEDY = SamplingParams()


def new_backend(memory: Memory = Memory.FULL, *, n_swa: int = 4, **options: int | bool) -> FakeBackend:
    traits = make_traits(memory, **{"n_slots": 4, "n_batch": 64, "n_ubatch": 64, **options})  # type: ignore[arg-type]
    return FakeBackend(traits, n_swa=n_swa)


def feed(backend: FakeBackend, seq_id: int, tokens: Sequence[int], start: int | None = None) -> Outcome:
    length = backend.length(seq_id) if start is None else start
    assert length is not None
    return backend.step([[Feed(seq_id, length, tokens)]]).outcome


# ---- cells -----------------------------------------------------------------------------------------------------


def test_shared_cells_count_once_until_nobody_holds_them() -> None:
    backend = new_backend()
    feed(backend, 0, [1, 2, 3, 4])
    backend.share(0, 1, 3)
    assert (backend.content(1), backend.n_used_cells()) == ([1, 2, 3], 4)
    backend.erase(0)
    assert backend.n_used_cells() == 3
    backend.erase(1)
    assert backend.n_used_cells() == 0


def test_without_a_unified_cache_sharing_copies() -> None:
    backend = new_backend(exact=True, n_ubatch=4)
    feed(backend, 0, [1, 2, 3, 4])
    backend.share(0, 1, 4)
    assert backend.n_used_cells() == 8


@pytest.mark.parametrize("memory", [kind for kind in Memory if kind.has_cells])
def test_a_group_that_finds_no_cells_changes_nothing(memory: Memory) -> None:
    backend = new_backend(memory, n_ctx=10)
    feed(backend, 0, [1] * 6)
    assert feed(backend, 1, [2] * 5) is Outcome.NO_CELLS
    assert (backend.length(0), backend.length(1), backend.n_used_cells()) == (6, 0, 6)
    assert feed(backend, 1, [2] * 4) is Outcome.DONE


@ALL_KINDS
def test_a_batch_that_does_not_begin_where_the_memory_ends_is_refused(memory: Memory) -> None:
    backend = new_backend(memory)
    feed(backend, 0, [1, 2, 3])
    assert feed(backend, 0, [4], start=4) is Outcome.REFUSED
    assert feed(backend, 0, [4], start=2) is Outcome.REFUSED
    assert feed(backend, 0, [4], start=3) is Outcome.DONE


# ---- what cannot be rewound ------------------------------------------------------------------------------------


@pytest.mark.parametrize("memory", [Memory.HYBRID, Memory.RECURRENT, Memory.OTHER])
def test_a_state_is_not_rewound(memory: Memory) -> None:
    backend = new_backend(memory)
    feed(backend, 0, [1, 2, 3])
    assert backend.trim(0, 3)
    assert not backend.trim(0, 2)
    assert backend.rewind_floor(0) == 3
    backend.erase(0)
    assert backend.length(0) == 0


def test_a_failed_ubatch_leaves_a_state_that_only_looks_right() -> None:
    """libllama refuses its own seq_rm there: positions agree, the state is garbage."""
    backend = new_backend(Memory.HYBRID, n_ubatch=2)
    backend.fail_group(1, GroupFault(-3, 2))
    assert feed(backend, 0, [1, 2, 3, 4, 5]) is Outcome.LOST
    assert backend.length(0) == 4


def test_a_failed_ubatch_is_removed_from_cells() -> None:
    backend = new_backend(Memory.FULL, n_ubatch=2)
    backend.fail_group(1, GroupFault(-3, 2))
    assert feed(backend, 0, [1, 2, 3, 4, 5]) is Outcome.LOST
    assert backend.content(0) == [1, 2]


# ---- the window -------------------------------------------------------------------------------------------------


def test_a_window_keeps_what_nobody_else_needs_and_cuts_where_enough_is_left() -> None:
    backend = new_backend(Memory.SLIDING, n_swa=4, n_ctx=64, n_ubatch=8)
    feed(backend, 0, range(1, 21))
    assert backend.rewind_floor(0) == 1
    assert backend.trim(0, 9)
    assert feed(backend, 0, [7]) is Outcome.DONE


def test_others_overwrite_what_an_idle_sequence_will_not_see_again() -> None:
    backend = new_backend(Memory.SLIDING, n_swa=4, n_ctx=64, kv_tokens=200, n_ubatch=8)
    feed(backend, 0, range(1, 21))
    feed(backend, 1, range(1, 41))
    windows = backend.sequences.windows
    assert windows is not None
    assert (windows[0].first(0), windows[0].last(0)) == (17, 19)  # 20 tokens: position 20 sees 17, 18 and 19
    assert backend.rewind_floor(0) == 20
    assert not backend.trim(0, 19)


def test_the_floor_is_the_smallest_length_that_can_go_on() -> None:
    backend = new_backend(Memory.SLIDING, n_swa=4, n_ctx=64, kv_tokens=200, n_ubatch=8)
    feed(backend, 0, range(1, 41))
    floor = backend.rewind_floor(0)
    assert 1 < floor < 40
    saved = backend.save_state(0)
    assert not backend.trim(0, floor - 1)
    backend.erase(0)
    backend.load_state(0, saved, 40)
    assert backend.rewind_floor(0) == 40, "a saved state holds what the next token sees, no more"


def test_a_window_takes_the_first_free_place_after_the_last() -> None:
    window = Window(2, 6, 3)
    window.put([(0, position) for position in range(6)])
    window.put([(1, 0), (1, 1)])  # takes the places of positions 0 and 1
    assert [cell.position for cell in window.cells(0)] == [2, 3, 4, 5]
    window.put([(1, 2), (1, 3)])  # 4 and 5 are still seen by position 6, so this needs 2 and 3
    assert [cell.position for cell in window.cells(0)] == [4, 5]


def test_a_window_without_a_place_is_a_bug_in_the_fake() -> None:
    window = Window(2, 4, 3)
    window.put([(0, 0), (0, 1), (1, 0), (1, 1)])
    with pytest.raises(AssertionError, match="no place"):
        window.put([(0, 2)])


# ---- states ----------------------------------------------------------------------------------------------------


@ALL_KINDS
@pytest.mark.parametrize("exact", [False, True])
def test_a_state_goes_into_another_sequence(memory: Memory, exact: bool) -> None:
    backend = new_backend(memory, exact=exact, n_ubatch=4)
    feed(backend, 0, range(1, 9))
    backend.load_state(1, backend.save_state(0), 8)
    assert backend.length(1) == 8
    assert backend.content(1) == backend.content(0)


@ALL_KINDS
@pytest.mark.parametrize("damage", [b"", b"garbage"])
def test_a_state_that_does_not_fit_leaves_what_was_there(memory: Memory, damage: bytes) -> None:
    backend = new_backend(memory)
    feed(backend, 0, [1, 2, 3])
    before = backend.save_state(0)
    with pytest.raises(NativeError):
        backend.load_state(0, damage or backend.save_state(1), 3)
    assert backend.save_state(0) == before
    assert feed(backend, 0, [4]) is Outcome.DONE


# ---- the rules -------------------------------------------------------------------------------------------------


def sampler(*tokens: int) -> FakeSampler:
    made = FakeSampler(GREEDY, np.array([1], dtype=np.int32), frozenset())
    made.tokens = list(tokens)
    return made


@pytest.mark.parametrize(
    ("memory", "exact", "groups", "rule"),
    [
        (Memory.FULL, False, [], "a step of nothing"),
        (Memory.FULL, False, [[]], "an empty group"),
        (Memory.FULL, False, [[Feed(1, 0, [1]), Feed(0, 0, [1])]], "ascend"),
        (Memory.FULL, False, [[Feed(0, 0, [1])], [Feed(0, 1, [1])]], "fed twice"),
        (Memory.FULL, False, [[Feed(0, 0, [1, 2]), Feed(1, 4, [9], sampler(9))], [Feed(2, 0, [1] * 3)]], "of prefill"),
        (Memory.FULL, False, [[Feed(0, 0, [1] * 9)]], "native batch"),
        (Memory.HYBRID, False, [[Feed(0, 0, [1, 2]), Feed(1, 4, [9], sampler(9))]], "memory with a state"),
        (Memory.FULL, True, [[Feed(0, 0, [1]), Feed(1, 0, [1])]], "one sequence at a time"),
        (Memory.FULL, True, [[Feed(0, 2, [1, 2])]], "off the grid"),
    ],
)
def test_a_step_that_breaks_a_rule_is_refused(memory: Memory, exact: bool, groups: list[list[Feed]], rule: str) -> None:
    backend = FakeBackend(make_traits(memory, exact=exact, n_slots=4, n_batch=8, n_ubatch=4))
    with pytest.raises(AssertionError, match=rule):
        backend.step(groups)


# ---- the oracle ------------------------------------------------------------------------------------------------


@ALL_KINDS
def test_a_reply_depends_on_every_token_before_it(memory: Memory) -> None:
    traits, prompt = make_traits(memory), list(range(1, 20))
    replies = {cold_run(traits, prompt, 3)}
    for at in range(19):
        replies.add(cold_run(traits, [*prompt[:at], 99, *prompt[at + 1 :]], 3))
    assert len(replies) == 20


@ALL_KINDS
def test_a_reply_does_not_depend_on_chunking_but_in_exact_mode(memory: Memory) -> None:
    prompt = list(range(1, 20))
    replies = {
        exact: {cold_run(make_traits(memory, exact=exact, n_ubatch=n), prompt, 3) for n in (1, 2, 4)}
        for exact in (False, True)
    }
    assert (len(replies[False]), len(replies[True])) == (1, 3)
