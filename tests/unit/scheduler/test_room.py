"""KV cells: idle slots give theirs up, running requests take turns, and who cannot be served fails alone."""

from __future__ import annotations

import pytest

from pyllamacache.config import Memory
from pyllamacache.errors import CellsExhaustedError
from pyllamacache.request import Reason
from tests.fakes import NO_CELLS, Culprit, Driver, GroupFault, make_traits

HEADER = list(range(50, 70))


def test_the_least_recently_used_slot_is_cut_first_and_from_its_tail() -> None:
    driver = Driver(make_traits(n_slots=3, n_ctx=40))
    driver.warm([1] * 14, slot=0)
    driver.warm([2] * 14, slot=1)
    driver.warm([3] * 20, slot=2)
    assert [len(driver.held(slot_id)) for slot_id in range(3)] == [6, 14, 20]
    assert driver.statistics.n_evicted_tokens == 8


def test_use_makes_a_slot_recent() -> None:
    driver = Driver(make_traits(n_slots=3, n_ctx=40))
    driver.warm([1] * 14, slot=0)
    driver.warm([2] * 14, slot=1)
    driver.warm([1] * 15, slot=0)
    driver.warm([3] * 20, slot=2)
    assert [len(driver.held(slot_id)) for slot_id in range(3)] == [15, 5, 20]


@pytest.mark.parametrize("memory", [Memory.HYBRID, Memory.OTHER])
def test_memory_that_cannot_be_cut_is_given_up_whole(memory: Memory) -> None:
    driver = Driver(make_traits(memory, n_slots=3, n_ctx=40))
    driver.warm([1] * 15, slot=0)
    driver.warm([2] * 15, slot=1)
    driver.warm([3] * 20, slot=2)
    assert [len(driver.held(slot_id)) for slot_id in range(3)] == [0, 14, 19]
    assert driver.statistics.n_evicted_tokens == 14


def test_a_sliding_window_is_cut_only_where_it_can_go_on() -> None:
    driver = Driver(make_traits(Memory.SLIDING, n_slots=2, n_ctx=40), n_swa=4)
    driver.warm([1] * 31, slot=0)
    floor = driver.state.rewind_floor(driver.slot(0))
    assert 1 < floor < 30, "the case: some of the tail can be cut, not all of it"
    driver.warm([2] * (41 - floor + 1), slot=1)
    assert driver.held(0) == []
    driver.check_answers()


def test_an_idle_donors_cells_come_free_only_with_its_heirs() -> None:
    driver = Driver(make_traits(n_slots=3, n_ctx=40))
    driver.warm(HEADER, slot=0)
    driver.warm([*HEADER, 1, 2], slot=1)
    assert driver.backend.n_used_cells() == 22
    driver.warm([7] * 30, slot=2)
    slack = driver.traits.n_ubatch
    assert len(driver.held(0)) == len(driver.held(1)) >= 10 - slack
    assert driver.backend.n_used_cells() == 30 + len(driver.held(0))


def test_a_cut_that_the_memory_refuses_counts_all_that_was_lost() -> None:
    driver = Driver(make_traits(n_slots=2, n_ctx=40))
    driver.warm([1] * 14, slot=0)
    driver.backend.faults.calls = ["trim"]
    driver.warm([2] * 30, slot=1)
    assert driver.held(0) == []
    assert driver.statistics.n_evicted_tokens == 14


# ---- running requests collide ----------------------------------------------------------------------------------


def collision(lost: int, older_tokens: int, header: list[int] = HEADER) -> tuple[Driver, list[int]]:
    """Two running requests that fit together while they share a header, until slot `lost` loses its share of it.

    Returns the driver when all is done, and the slots whose requests waited, turn by turn.
    """
    driver = Driver(make_traits(n_slots=2, n_ctx=40))
    older = driver.submit([*header, 1, 2], max_tokens=older_tokens)
    driver.run_until(older, 1)
    younger = driver.submit([*header, 3, 4], max_tokens=6)
    driver.run_until(younger, 1)
    driver.backend.fail_group(1, GroupFault(-2))
    trim = driver.backend.trim
    driver.backend.trim = lambda seq_id, n_tokens: seq_id != lost and trim(seq_id, n_tokens)  # type: ignore[method-assign]
    waited: list[int] = []
    while driver.state.running:
        driver.turn()
        waited += [int(job.slot.slot_id) for job in driver.state.running if job.is_waiting]
    driver.check_answers()
    return driver, waited


def test_when_running_requests_collide_the_youngest_waits() -> None:
    driver, waited = collision(lost=1, older_tokens=9, header=HEADER[:18])
    assert set(waited) == {1}
    older, younger = (ticket.completion for ticket in driver.tickets)
    assert older.cache.reason is Reason.COLD
    assert (younger.cache.reason, younger.cache.resumed_tokens) == (Reason.LOST, 0)
    assert driver.statistics.n_preempted == 0


def test_a_waiting_request_gives_its_cells_back_when_the_older_ones_need_them() -> None:
    driver, waited = collision(lost=0, older_tokens=10)
    assert set(waited) == {1}
    older, younger = (ticket.completion for ticket in driver.tickets)
    assert (older.cache.reason, older.cache.resumed_tokens) == (Reason.LOST, 0)
    assert (younger.cache.reason, younger.cache.resumed_tokens) == (Reason.PREEMPTED, 0)
    assert driver.statistics.n_preempted == 1


@pytest.mark.parametrize("memory", list(Memory))
def test_the_youngest_waits_first_and_is_the_first_to_give_its_cells_back(memory: Memory) -> None:
    driver = Driver(make_traits(memory, n_slots=3, kv_tokens=200))
    tickets = [driver.submit([n, n, n], max_tokens=20) for n in (1, 2, 3)]
    driver.run_until(tickets[2], 2)
    waiting = []
    for _ in range(3):
        driver.backend.fail_group(1, GroupFault(NO_CELLS))
        driver.turn()
        waiting.append([job.request.request_id for job in driver.state.running if job.is_waiting])
    _, second, third = (ticket.request.request_id for ticket in tickets)
    assert waiting == [[third], [second, third], [second, third]]
    assert (len(driver.held(1)) > 0, len(driver.held(2))) == (True, 0)
    driver.run()
    driver.check_answers()
    assert [ticket.completion.cache.reason for ticket in tickets] == [Reason.COLD, Reason.COLD, Reason.PREEMPTED]


# ---- llama.cpp finds no cells though the books had some --------------------------------------------------------


@pytest.mark.parametrize("memory", list(Memory))
def test_idle_content_is_given_up_before_anyone_waits(memory: Memory) -> None:
    driver = Driver(make_traits(memory, n_slots=3, kv_tokens=128))
    driver.warm([1] * 9, slot=0)
    driver.warm([2] * 9, slot=1)
    driver.backend.fail_group(1, GroupFault(NO_CELLS))
    ticket = driver.submit([3] * 4, slot=2)
    driver.turn()
    assert driver.held(0) == []
    assert driver.held(1) != []
    driver.run()
    driver.check_answer(ticket)


@pytest.mark.parametrize("memory", list(Memory))
def test_a_lone_request_that_gets_no_cells_fails_alone_with_the_numbers(memory: Memory) -> None:
    driver = Driver(make_traits(memory, n_slots=2, kv_tokens=128))
    ticket = driver.submit(range(1, 20), slot=0)
    driver.backend.faults.culprit = Culprit(0, GroupFault(NO_CELLS), from_position=8)
    driver.run()
    assert isinstance(ticket.error, CellsExhaustedError)
    assert ticket.error.kv_tokens == 128
    assert 0 < ticket.error.needed_tokens <= 11
    assert driver.held(0) == list(range(1, 9))
    assert driver.statistics.n_failed == 1


@pytest.mark.parametrize("memory", list(Memory))
def test_neighbours_of_one_that_gets_no_cells_are_answered(memory: Memory) -> None:
    driver = Driver(make_traits(memory, n_slots=3, kv_tokens=200))
    driver.backend.faults.culprit = Culprit(1, GroupFault(NO_CELLS), from_position=4)
    before = driver.submit([1, 2, 3], slot=0, max_tokens=9)
    driver.turn()
    stuck = driver.submit(range(1, 20), slot=1)
    after = driver.submit([7, 8, 9], slot=2, max_tokens=9)
    driver.run()
    driver.check_answer(before)
    driver.check_answer(after)
    assert isinstance(stuck.error, CellsExhaustedError)
