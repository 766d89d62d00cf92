"""Taking a slot's state out and putting one in. Files are tested in unit/store."""

from __future__ import annotations

import pytest

from pyllamacache.config import Memory
from pyllamacache.errors import CellsExhaustedError, InternalError, NativeError, SlotBusyError
from pyllamacache.request import Reason
from tests.fakes import Driver, make_traits

ALL_KINDS = pytest.mark.parametrize("memory", list(Memory))
BOTH_MODES = pytest.mark.parametrize("exact", [False, True])
PROMPT = list(range(40, 61))


@ALL_KINDS
@BOTH_MODES
@pytest.mark.parametrize("n_slots", [1, 3])
def test_a_saved_slot_is_resumed_in_another_engine(memory: Memory, exact: bool, n_slots: int) -> None:
    """S22, S33: into any slot, with any number of slots."""
    first = Driver(make_traits(memory, exact=exact, kv_tokens=128))
    first.warm(PROMPT, slot=1, namespace="mine")
    second = Driver(make_traits(memory, exact=exact, n_slots=n_slots, kv_tokens=128))
    second.restore(n_slots - 1, first.save(1))
    result = second.complete([*PROMPT, 1, 2], namespace="mine")
    second.check_answers()
    expected = 20 if exact else len(first.held(1))
    if exact and memory is Memory.SLIDING:
        expected = 0
    assert result.cache.resumed_tokens == expected


@ALL_KINDS
def test_a_restored_reply_is_not_resumed_in_exact_mode(memory: Memory) -> None:
    driver = Driver(make_traits(memory, exact=True))
    reply = driver.complete(PROMPT, slot=0).token_ids
    driver.restore(1, driver.save(0))
    longer = driver.complete([*PROMPT, *reply, 1], slot=1)
    assert longer.cache.resumed_tokens == (20 if memory is Memory.FULL else 0)
    driver.check_answers()


def test_a_restored_window_is_not_resumed_in_exact_mode() -> None:
    """Its cells lie in another order of the ring: measured on a tiny model, the logits differed in the last bits."""
    driver = Driver(make_traits(Memory.SLIDING, exact=True))
    driver.warm(PROMPT, slot=0)
    driver.restore(1, driver.save(0))
    restored = driver.complete([*PROMPT, 1], slot=1, max_tokens=1)
    assert (restored.cache.resumed_tokens, restored.cache.reason) == (0, Reason.OFF_GRID)
    assert driver.complete([*PROMPT, 1], slot=0, max_tokens=1).cache.resumed_tokens == 20
    driver.check_answers()


@ALL_KINDS
def test_a_restored_slot_belongs_to_its_namespace(memory: Memory) -> None:
    driver = Driver(make_traits(memory))
    driver.warm(PROMPT, namespace="a", slot=0)
    saved = driver.save(0)
    driver.complete([1, 2, 3], namespace="b", slot=1)
    driver.restore(1, saved)
    assert driver.complete([1, 2, 3, 4], namespace="b", slot=1).cache.matched_tokens == 0
    driver.check_answers()


def test_an_empty_slot_is_saved_and_empties_the_one_it_is_put_in() -> None:
    """S25."""
    driver = Driver()
    driver.warm(PROMPT, slot=0)
    driver.restore(0, driver.save(1))
    assert driver.held(0) == []
    assert driver.state.slot_info(driver.slot(0).slot_id).namespace == ""


@ALL_KINDS
@pytest.mark.parametrize("operation", ["erase", "save", "restore"])
def test_a_busy_slot_is_refused(memory: Memory, operation: str) -> None:
    driver = Driver(make_traits(memory, kv_tokens=128))
    driver.warm(PROMPT, slot=1)
    saved = driver.save(1)
    driver.submit(PROMPT, slot=0, max_tokens=9)
    driver.turn()
    with pytest.raises(SlotBusyError, match=f"slot 0 is busy: cannot {operation} it"):
        driver.restore(0, saved) if operation == "restore" else getattr(driver, operation)(0)
    driver.run()
    driver.check_answers()


@ALL_KINDS
@BOTH_MODES
def test_a_refused_state_leaves_the_slot_as_it_was(memory: Memory, exact: bool) -> None:
    driver = Driver(make_traits(memory, exact=exact, kv_tokens=128))
    driver.warm(PROMPT, slot=0)
    driver.warm([1, 2, 3, 4, 5], slot=1)
    saved = driver.save(1)
    driver.backend.faults.calls = ["load_state"]
    before = driver.held(0)
    with pytest.raises(NativeError):
        driver.restore(0, saved)
    driver.check()
    assert driver.held(0) == before
    result = driver.complete([*PROMPT, 1], slot=0)
    assert (result.cache.resumed_tokens > 0) == (not exact or memory is not Memory.SLIDING)
    driver.check_answers()


@pytest.mark.parametrize("memory", [Memory.FULL, Memory.HYBRID])
def test_a_state_that_is_refused_and_cannot_be_undone_empties_the_slot(memory: Memory) -> None:
    """The books went on to say that it held the old tokens."""
    driver = Driver(make_traits(memory))
    driver.warm(PROMPT, slot=0)
    saved = driver.save(0)
    driver.backend.faults.calls = ["load_state", "load_state_undo"]
    with pytest.raises(InternalError, match="not undone"):
        driver.restore(0, saved)
    driver.check()
    assert driver.held(0) == []


# ---- cells -----------------------------------------------------------------------------------------------------


def test_idle_slots_are_cut_for_a_restored_one() -> None:
    driver = Driver(make_traits(n_slots=3, n_ctx=40))
    driver.warm([1] * 15, slot=0)
    saved = driver.save(0)
    driver.warm([2] * 15, slot=1)
    driver.erase(0)
    driver.warm([3] * 20, slot=2)
    driver.restore(0, saved)
    assert [len(driver.held(slot_id)) for slot_id in range(3)] == [15, 5, 20]


def test_the_slots_own_cells_count_as_room() -> None:
    driver = Driver(make_traits(n_slots=2, n_ctx=40))
    driver.warm([1] * 30, slot=0)
    saved = driver.save(0)
    driver.warm([2] * 39, slot=1)
    driver.restore(1, saved)
    assert driver.held(1) == [1] * 30


def test_cells_shared_with_an_idle_slot_come_free_for_a_restored_one() -> None:
    """What the two slots shared was not counted as room, and the restore refused."""
    driver = Driver(make_traits(n_slots=3, n_ctx=40))
    driver.warm([1] * 38, slot=2)
    saved = driver.save(2)
    driver.erase(2)
    driver.warm([2] * 30, slot=1)
    driver.warm([2] * 31, slot=0)
    assert driver.backend.n_used_cells() == 31
    driver.restore(0, saved)
    assert driver.held(0) == [1] * 38
    driver.check()


def test_running_requests_keep_what_they_will_need() -> None:
    driver = Driver(make_traits(n_slots=2, n_ctx=40))
    driver.warm([1] * 20, slot=0)
    saved = driver.save(0)
    driver.erase(0)
    running = driver.submit([2] * 5, max_tokens=20, slot=1)
    driver.turn()
    with pytest.raises(CellsExhaustedError) as caught:
        driver.restore(0, saved)
    assert (caught.value.needed_tokens, caught.value.free_tokens) == (20, 15)
    driver.run()
    driver.check_answer(running)


def test_a_restore_needs_room_for_what_it_might_have_to_put_back() -> None:
    """A refused state is undone with cells of the slot's own, also where it shared them before."""
    driver = Driver(make_traits(n_slots=3, n_ctx=40))
    driver.warm([1] * 6, slot=2)
    saved = driver.save(2)
    driver.erase(2)
    driver.run_until(driver.submit([2] * 21, max_tokens=12, slot=1), 1)
    warming = driver.submit([2] * 20 + [3] * 5, generate=False, slot=0)
    while not warming.is_done:
        driver.turn()
    before = driver.held(0)
    assert len(before) == 25
    assert driver.state.free_cells >= len(saved.ids)
    driver.backend.faults.calls = ["load_state"]
    with pytest.raises(CellsExhaustedError):
        driver.restore(0, saved)
    assert driver.held(0) == before
    driver.run()
    driver.check_answers()


def test_a_restore_that_finds_no_room_cuts_nobody() -> None:
    driver = Driver(make_traits(n_slots=3, n_ctx=40))
    driver.warm([1] * 25, slot=0)
    saved = driver.save(0)
    driver.erase(0)
    driver.warm([3] * 10, slot=2)
    driver.submit([2] * 5, max_tokens=15, slot=1)
    driver.turn()
    with pytest.raises(CellsExhaustedError):
        driver.restore(0, saved)
    assert len(driver.held(2)) == 10


@pytest.mark.parametrize("memory", list(Memory))
def test_a_conversation_goes_on_across_engines_as_if_nothing_had_happened(memory: Memory) -> None:
    prompt, saved = list(PROMPT), None
    for turn in range(3):
        driver = Driver(make_traits(memory, n_ctx=80))
        if saved is not None:
            driver.restore(turn % 2, saved)
        result = driver.complete(prompt, max_tokens=4)
        driver.check_answers()
        if saved is not None:
            assert result.cache.prefilled_tokens == 3
        saved = driver.save(int(result.slot_id or 0))
        prompt += [*result.token_ids, 90 + turn, 91]
