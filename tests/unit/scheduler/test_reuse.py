"""Reuse by memory kind: warm, repeat, extend, diverge, store=False, namespaces; and exact mode's grid."""

from __future__ import annotations

import pytest

from pyllamacache.config import Memory
from pyllamacache.request import Reason, Source
from tests.fakes import Driver, make_traits

ALL_KINDS = pytest.mark.parametrize("memory", list(Memory))
BOTH_MODES = pytest.mark.parametrize("exact", [False, True])
REWINDABLE = (Memory.FULL,)
PROMPT = list(range(40, 61))
GRID = 4
N_GRID = len(PROMPT) // GRID * GRID
"""20 of 21 tokens."""


@ALL_KINDS
@BOTH_MODES
def test_a_warmed_prompt_is_resumed(memory: Memory, exact: bool) -> None:
    """S11: sent again at once, and sent again with something behind it."""
    for behind in ([], [7, 8, 9]):
        driver = Driver(make_traits(memory, exact=exact))
        driver.warm(PROMPT)
        result = driver.complete([*PROMPT, *behind])
        driver.check_answers()
        expected = N_GRID if exact else len(PROMPT) - (0 if behind and memory is Memory.FULL else 1)
        assert (result.cache.resumed_tokens, result.cache.reason) == (
            expected,
            Reason.OFF_GRID if exact and behind and memory is Memory.FULL else Reason.HIT,
        )


@ALL_KINDS
@BOTH_MODES
def test_warming_generates_nothing_and_counts_what_it_wrote(memory: Memory, exact: bool) -> None:
    driver = Driver(make_traits(memory, exact=exact))
    usage = driver.warm(PROMPT).usage
    if memory is Memory.FULL:
        written, computed = (N_GRID if exact else len(PROMPT)), len(PROMPT)
    else:
        written = computed = N_GRID if exact else len(PROMPT) - 1
    assert (usage.prompt_tokens, usage.completion_tokens, usage.cache_write_tokens) == (computed, 0, written)
    assert driver.held(0) == PROMPT[:computed]


@ALL_KINDS
@BOTH_MODES
def test_warming_twice_computes_at_most_one_token_again(memory: Memory, exact: bool) -> None:
    driver = Driver(make_traits(memory, exact=exact))
    driver.warm(PROMPT)
    again = driver.warm(PROMPT)
    assert again.usage.cache_write_tokens <= 1
    assert again.cache.prefilled_tokens <= 1


@ALL_KINDS
def test_a_conversation_that_grows_prefills_only_what_is_new(memory: Memory) -> None:
    """S01: each turn computes the last sampled token and the new message, on every kind of memory."""
    driver = Driver(make_traits(memory))
    prompt = list(PROMPT)
    for turn in range(4):
        result = driver.complete(prompt, max_tokens=5)
        if turn:
            assert result.cache.prefilled_tokens == 1 + 3
            assert result.cache.reason is Reason.HIT
        prompt += [*result.token_ids, 70 + turn, 71, 72]
    driver.check_answers()


@ALL_KINDS
@BOTH_MODES
@pytest.mark.parametrize("at", [1, 7, 8, 20])
def test_an_edited_prompt_is_answered_as_from_cold(memory: Memory, exact: bool, at: int) -> None:
    """S15: a state that cannot be rewound costs a full prefill, with the reason, never an answer."""
    driver = Driver(make_traits(memory, exact=exact, n_slots=1))
    driver.complete(PROMPT)
    edited = [*PROMPT[:at], 99, *PROMPT[at + 1 :]]
    result = driver.complete(edited)
    driver.check_answers()
    assert result.cache.matched_tokens == at
    if memory is Memory.FULL:
        assert result.cache.resumed_tokens == (at // GRID * GRID if exact else at)
    if memory.splits_steps:
        no_state = Reason.NOT_REWINDABLE if memory is Memory.OTHER else Reason.NO_CHECKPOINT
        is_on_grid = memory is Memory.OTHER or not exact or at >= GRID
        expected = (no_state, at) if is_on_grid else (Reason.OFF_GRID, 0)
        assert (result.cache.resumed_tokens, result.cache.reason, result.cache.position) == (0, *expected)


def test_a_window_that_is_still_there_can_be_cut() -> None:
    driver = Driver(make_traits(Memory.SLIDING, n_slots=1), n_swa=8)
    driver.complete(PROMPT[:10], max_tokens=3)
    result = driver.complete([*PROMPT[:9], 99])
    driver.check_answers()
    assert (result.cache.resumed_tokens, result.cache.reason) == (9, Reason.DIVERGED)


def test_a_window_that_a_neighbour_overwrote_is_not_used() -> None:
    """A trim would succeed natively and decode garbage; the floor is asked at every resume."""
    driver = Driver(make_traits(Memory.SLIDING, kv_tokens=128), n_swa=6)
    driver.complete(PROMPT, slot=0)
    before = driver.state.rewind_floor(driver.slot(0))
    driver.complete(range(1, 50), slot=1, max_tokens=10)
    after = driver.state.rewind_floor(driver.slot(0))
    assert before < after == len(driver.held(0))
    result = driver.complete([*PROMPT[:before], 99], slot=0)
    driver.check_answers()
    assert (result.cache.resumed_tokens, result.cache.reason) == (0, Reason.NO_CHECKPOINT)


@ALL_KINDS
@BOTH_MODES
def test_without_cache_prompt_everything_is_computed_again(memory: Memory, exact: bool) -> None:
    driver = Driver(make_traits(memory, exact=exact))
    driver.warm(PROMPT)
    result = driver.complete(PROMPT, cache_prompt=False)
    driver.check_answers()
    assert (result.cache.resumed_tokens, result.cache.reason, result.cache.matched_tokens > 0) == (
        0,
        Reason.DISABLED,
        True,
    )


# ---- store=False -----------------------------------------------------------------------------------------------


@ALL_KINDS
@BOTH_MODES
def test_store_false_leaves_nothing_behind(memory: Memory, exact: bool) -> None:
    """S48."""
    driver = Driver(make_traits(memory, exact=exact))
    result = driver.complete(PROMPT, store=False)
    assert [driver.held(slot_id) for slot_id in range(2)] == [[], []]
    assert driver.backend.n_used_cells() == 0
    assert result.usage.cache_write_tokens == 0
    driver.check_answers()


@ALL_KINDS
@BOTH_MODES
def test_store_false_destroys_nothing_while_there_is_room(memory: Memory, exact: bool) -> None:
    driver = Driver(make_traits(memory, exact=exact, n_slots=2, kv_tokens=128))
    driver.warm(PROMPT)
    before = driver.held(0)
    side = driver.complete([*PROMPT, 1, 2], store=False)
    if memory is Memory.FULL:
        assert side.cache.resumed_tokens > 0
    assert driver.held(0) == before
    driver.check_answers()


def test_store_false_goes_back_to_the_prefix_it_resumed() -> None:
    driver = Driver(make_traits(n_slots=1))
    driver.warm(PROMPT)
    result = driver.complete([*PROMPT, 1, 2], store=False)
    assert result.cache.source is Source.SLOT
    assert driver.held(0) == PROMPT


@ALL_KINDS
def test_store_false_that_is_cancelled_leaves_nothing_either(memory: Memory) -> None:
    driver = Driver(make_traits(memory))
    ticket = driver.submit(PROMPT, store=False, max_tokens=20)
    driver.run_until(ticket, 2)
    ticket.cancel()
    driver.run()
    assert driver.backend.n_used_cells() == 0
    assert driver.held(0) == []


# ---- namespaces ------------------------------------------------------------------------------------------------


@ALL_KINDS
@BOTH_MODES
def test_another_namespace_reuses_nothing_and_hears_of_nothing(memory: Memory, exact: bool) -> None:
    """S74."""
    driver = Driver(make_traits(memory, exact=exact, kv_tokens=128))
    driver.warm(PROMPT, namespace="a")
    result = driver.complete(PROMPT, namespace="b")
    assert (result.cache.resumed_tokens, result.cache.matched_tokens, result.cache.reason) == (0, 0, Reason.COLD)
    own = driver.complete(PROMPT, namespace="a")
    assert own.cache.resumed_tokens > 0
    driver.check_answers()


def test_a_slot_changes_hands_between_namespaces_without_a_trace() -> None:
    driver = Driver(make_traits(n_slots=1), host_bytes=0)
    driver.complete(PROMPT, namespace="a")
    driver.complete(PROMPT, namespace="b", max_tokens=2)
    result = driver.complete(PROMPT, namespace="a")
    assert result.cache.matched_tokens == 0
    assert driver.state.slot_info(driver.slot(0).slot_id).namespace == "a"


@ALL_KINDS
def test_a_request_that_lost_its_slots_content_keeps_its_namespace(memory: Memory) -> None:
    from tests.fakes import GroupFault

    driver = Driver(make_traits(memory, n_slots=1))
    driver.backend.fail_group(3, GroupFault(-3, 1))
    driver.complete(PROMPT, namespace="a")
    assert driver.complete([*PROMPT, 1], namespace="b").cache.matched_tokens == 0
    driver.check_answers()


def test_an_empty_slot_belongs_to_no_namespace() -> None:
    driver = Driver()
    driver.warm(PROMPT, namespace="secret")
    driver.erase(0)
    assert driver.state.slot_info(driver.slot(0).slot_id).namespace == ""


# ---- exact mode ------------------------------------------------------------------------------------------------


@ALL_KINDS
def test_exact_mode_reuses_no_reply_where_the_memory_cannot_be_cut(memory: Memory) -> None:
    driver = Driver(make_traits(memory, exact=True, n_slots=1))
    first = driver.complete(PROMPT, max_tokens=5)
    longer = driver.complete([*PROMPT, *first.token_ids, 1, 2])
    driver.check_answers()
    expected = 0 if memory.splits_steps else N_GRID
    reason = Reason.NO_CHECKPOINT if memory in (Memory.HYBRID, Memory.RECURRENT) else Reason.OFF_GRID
    assert (longer.cache.resumed_tokens, longer.cache.reason) == (expected, reason)
    assert first.usage.cache_write_tokens == expected


@ALL_KINDS
@pytest.mark.parametrize("n_tokens", range(3, 10))
def test_exact_mode_warms_whole_chunks_only(memory: Memory, n_tokens: int) -> None:
    driver = Driver(make_traits(memory, exact=True))
    driver.warm(PROMPT[:n_tokens])
    result = driver.complete(PROMPT)
    driver.check_answers()
    assert result.cache.resumed_tokens == n_tokens // GRID * GRID


def test_the_exact_fake_tells_chunks_apart() -> None:
    """Not vacuous: another chunking of the same tokens gives another reply."""
    traits = make_traits(exact=True, n_ubatch=4)
    other = make_traits(exact=True, n_ubatch=2)
    assert Driver(traits).cold(PROMPT, 5) != Driver(other).cold(PROMPT, 5)


@ALL_KINDS
@pytest.mark.parametrize("lengths", [(2, 3), (1, 7, 5), (9, 2, 2)])
def test_exact_prompts_side_by_side_keep_to_the_grid(memory: Memory, lengths: tuple[int, ...]) -> None:
    """What was left of n_batch after one prompt's end was rounded up to the grid past the end of the next prompt, so
    that uninitialised memory was fed as tokens and the request never ended."""
    driver = Driver(make_traits(memory, exact=True, n_slots=4, n_batch=4, n_ubatch=4))
    for n_tokens in lengths:
        driver.submit(range(100, 100 + n_tokens), max_tokens=3)
    driver.run()
    driver.check_answers()


@ALL_KINDS
def test_exact_replies_do_not_depend_on_neighbours(memory: Memory) -> None:
    driver = Driver(make_traits(memory, exact=True, n_slots=4, n_batch=8))
    for n in range(4):
        driver.submit(PROMPT[n:], max_tokens=6)
        driver.turn()
    driver.run()
    driver.check_answers()
