"""From the queue to a slot: order, slot choice, what is reserved. The choice itself is tested in unit/prefix."""

from __future__ import annotations

import pytest

from pyllamacache.config import Memory
from pyllamacache.errors import RequestTimeoutError
from pyllamacache.request import Source
from tests.fakes import Driver, Ticket, make_traits

ALL_KINDS = pytest.mark.parametrize("memory", list(Memory))
HEADER = list(range(50, 62))


def order_of_end(driver: Driver, tickets: list[Ticket]) -> list[int]:
    """Indexes of `tickets` as they end."""
    order: list[int] = []
    while len(order) < len(tickets):
        driver.turn()
        order += [index for index, ticket in enumerate(tickets) if ticket.is_done and index not in order]
    return order


def test_requests_beyond_the_slots_are_served_in_the_order_they_came() -> None:
    driver = Driver(make_traits(n_slots=1))
    tickets = [driver.submit([n, n, n], max_tokens=3) for n in (4, 3, 2, 1)]
    assert order_of_end(driver, tickets) == [0, 1, 2, 3]
    driver.check_answers()


@ALL_KINDS
def test_a_busy_slot_is_never_touched(memory: Memory) -> None:
    driver = Driver(make_traits(memory, n_slots=2, kv_tokens=128))
    long = driver.submit(HEADER, max_tokens=20)
    driver.run_until(long, 2)
    for n in range(5):
        short = driver.submit([*HEADER, n, n], max_tokens=2)
        while not short.is_done:
            driver.turn()
            assert driver.held(0)[: len(HEADER)] == HEADER
        assert short.completion.slot_id == 1
    driver.run()
    driver.check_answers()


def test_one_that_waits_for_its_slot_is_stepped_over() -> None:
    driver = Driver(make_traits(n_slots=2))
    driver.submit([1, 2, 3], max_tokens=20, slot=0)
    driver.turn()
    waiting = driver.submit([4, 5], slot=0)
    other = driver.submit([6, 7])
    driver.turn()
    assert [job.outbox for job in driver.state.running][1] is other.outbox
    assert not waiting.is_done
    driver.run()
    assert waiting.completion.slot_id == 0
    driver.check_answers()


def test_one_that_waits_for_its_slot_is_not_starved_by_later_ones() -> None:
    driver = Driver(make_traits(n_slots=2))
    driver.submit([1, 2, 3], max_tokens=5, slot=0)
    driver.turn()
    waiting = driver.submit([4, 5], slot=0, max_tokens=3)
    later = [driver.submit([9, n], max_tokens=3) for n in range(8)]
    driver.run_until(waiting, 1)
    assert sum(ticket.is_done for ticket in later) <= 2
    driver.run()
    driver.check_answers()


def test_two_that_wait_for_one_slot_keep_their_order() -> None:
    driver = Driver(make_traits(n_slots=2))
    driver.submit([1, 2, 3], max_tokens=4, slot=1)
    driver.turn()
    tickets = [driver.submit([n, n], slot=1, max_tokens=2) for n in (5, 4, 3)]
    assert order_of_end(driver, tickets) == [0, 1, 2]


def test_admission_reserves_prompt_and_reply() -> None:
    driver = Driver(make_traits(n_slots=3, n_ctx=40))
    driver.submit(range(1, 21), max_tokens=10)
    too_much = driver.submit([7] * 5, max_tokens=6)
    overtaker = driver.submit([8], max_tokens=1)
    driver.turn()
    assert len(driver.state.running) == 1
    assert [each.outbox for each in driver.state.queue] == [too_much.outbox, overtaker.outbox]
    driver.run()
    driver.check_answers()
    assert driver.statistics.n_preempted == 0


def test_admission_fills_the_cells_to_the_last() -> None:
    driver = Driver(make_traits(n_slots=2, n_ctx=40))
    driver.submit(range(1, 21), max_tokens=10)
    driver.submit([7] * 4, max_tokens=6)
    driver.turn()
    assert len(driver.state.running) == 2
    driver.run()
    assert driver.statistics.n_preempted == 0


def test_admission_counts_a_shared_prefix_once() -> None:
    driver = Driver(make_traits(n_slots=2, n_ctx=40))
    first = driver.submit(range(1, 25), max_tokens=6)
    driver.run_until(first, 1)
    second = driver.submit([*range(1, 25), 99], max_tokens=5)
    driver.turn()
    assert len(driver.state.running) == 2
    driver.run()
    assert second.completion.cache.source is Source.SHARED
    assert second.completion.cache.resumed_tokens == 24
    driver.check_answers()


@pytest.mark.parametrize("memory", [Memory.RECURRENT])
def test_memory_without_cells_admits_whatever_the_lengths(memory: Memory) -> None:
    driver = Driver(make_traits(memory, n_slots=2, n_ctx=40))
    driver.submit(range(1, 31), max_tokens=10)
    driver.submit(range(31, 61), max_tokens=10)
    driver.turn()
    assert len(driver.state.running) == 2
    driver.run()
    driver.check_answers()


@ALL_KINDS
def test_exact_mode_has_cells_of_its_own_for_each_slot(memory: Memory) -> None:
    driver = Driver(make_traits(memory, exact=True, n_slots=2, n_ctx=40))
    driver.submit(range(1, 31), max_tokens=10)
    driver.submit(range(31, 61), max_tokens=10)
    driver.turn()
    assert len(driver.state.running) == 2
    driver.run()
    driver.check_answers()


def test_a_newcomer_takes_the_free_slot_while_another_that_waited_for_a_busy_one_expires() -> None:
    """Queue length and slots were what they had been, so nobody planned again."""
    driver = Driver(make_traits(n_slots=2))
    long = driver.submit([1, 2], max_tokens=20, slot=0)
    waiting = driver.submit([3, 4], slot=0)
    driver.turn()
    driver.turn()
    waiting.cancel()
    newcomer = driver.submit([5, 6], max_tokens=1)
    driver.turn()
    driver.turn()
    assert newcomer.is_done
    assert not long.is_done


def test_a_queued_request_can_be_cancelled() -> None:
    driver = Driver(make_traits(n_slots=1))
    driver.submit([1, 2], max_tokens=20)
    queued = driver.submit([3, 4], max_tokens=20)
    driver.turn()
    queued.cancel()
    driver.turn()
    result = queued.completion
    assert (result.finish_reason, result.token_ids, result.usage.prompt_tokens) == ("cancelled", (), 0)
    assert [chunk.finish_reason for chunk in queued.chunks] == ["cancelled"]
    assert driver.statistics.requests_by_reason == {}
    assert driver.statistics.n_cancelled == 1
    driver.run()


def test_a_request_times_out_while_it_is_queued() -> None:
    driver = Driver(make_traits(n_slots=1))
    driver.submit([1, 2], max_tokens=20)
    queued = driver.submit([3, 4], timeout_s=5.0)
    driver.turn()
    driver.clock.advance(4.9)
    driver.turn()
    assert not queued.is_done
    driver.clock.advance(0.1)
    driver.turn()
    assert isinstance(queued.error, RequestTimeoutError)
    assert driver.statistics.n_failed == 1


def test_a_request_that_waits_says_how_long() -> None:
    driver = Driver(make_traits(n_slots=1))
    driver.submit([1, 2], max_tokens=3)
    queued = driver.submit([3, 4], max_tokens=1)
    for _ in range(3):
        driver.turn()
        driver.clock.advance(2.0)
    driver.run()
    assert queued.completion.timings.queue_s == 6.0


def test_simultaneous_branches_share_the_first_ones_prefix_while_it_runs() -> None:
    """A busy donor costs nothing: S41."""
    driver = Driver(make_traits(n_slots=4, n_ctx=60))
    first = driver.submit([*HEADER, 1], max_tokens=10)
    driver.run_until(first, 1)
    branches = [driver.submit([*HEADER, n], max_tokens=2) for n in (2, 3, 4)]
    driver.run()
    for branch in branches:
        cache = branch.completion.cache
        assert (cache.source, cache.resumed_tokens) == (Source.SHARED, len(HEADER))
    driver.check_answers()


def test_a_side_request_does_not_take_the_main_conversations_tail() -> None:
    """S40: the subagent goes to the empty slot and the main conversation loses nothing."""
    driver = Driver(make_traits(n_slots=2, n_ctx=60))
    main = driver.complete([*HEADER, *range(20)], max_tokens=2)
    side = driver.complete([*HEADER, 99, 98], max_tokens=2)
    again = driver.complete([*HEADER, *range(20), *main.token_ids, 5], max_tokens=2)
    assert side.slot_id != main.slot_id
    assert side.cache.resumed_tokens == len(HEADER)
    assert again.cache.prefilled_tokens == 2  # the last sampled token, and the new one
