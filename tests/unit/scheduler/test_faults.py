"""Failing native calls: what each return code means, on every kind of memory, for the victim and for its neighbours."""

from __future__ import annotations

import pytest

from pyllamacache.config import Memory
from pyllamacache.errors import GrammarError, NativeError
from pyllamacache.request import Reason, Source
from pyllamacache.scheduler.step import MAX_FAILURES
from tests.fakes import NO_CELLS, POSITION, REFUSED, Culprit, Driver, GroupFault, every_fault, make_traits

ALL_KINDS = pytest.mark.parametrize("memory", list(Memory))
BOTH_MODES = pytest.mark.parametrize("exact", [False, True])
ANY_FAULT = pytest.mark.parametrize("fault", every_fault(), ids=str)
PROMPT = list(range(40, 61))
PARKED = list(range(100, 112))


def busy_driver(memory: Memory, *, exact: bool = False) -> Driver:
    """Two requests that run side by side, a third that comes later, and an idle slot that holds something."""
    driver = Driver(make_traits(memory, exact=exact, n_slots=4, kv_tokens=256))
    driver.warm(PARKED, slot=3)
    driver.submit(PROMPT, max_tokens=6, slot=0)
    driver.submit(PROMPT[3:], max_tokens=6, slot=1)
    return driver


@ALL_KINDS
@BOTH_MODES
@ANY_FAULT
def test_one_failure_anywhere_changes_no_answer(memory: Memory, exact: bool, fault: GroupFault) -> None:
    """Victims are fed again, bystanders in the batch and outside notice nothing, parked content survives."""
    n_groups = 1
    while True:
        driver = busy_driver(memory, exact=exact)
        parked = driver.held(3)
        driver.backend.fail_group(n_groups, fault)
        for _ in range(3):
            driver.turn()
        driver.submit([*PROMPT, 1, 2, 3], max_tokens=3, slot=2)
        driver.run()
        driver.check_answers()
        if driver.backend.faults.by_group:
            break
        assert driver.held(3) == parked or fault.code == NO_CELLS  # which gives up idle content
        again = driver.submit([*PARKED, 7], slot=3)
        driver.run()
        driver.check_answer(again)
        n_groups += 3
    assert n_groups > 9


@ALL_KINDS
@BOTH_MODES
@pytest.mark.parametrize("fault", [fault for fault in every_fault() if fault.code != NO_CELLS], ids=str)
def test_a_request_whose_calls_always_fail_fails_alone(memory: Memory, exact: bool, fault: GroupFault) -> None:
    """In the prefill or in the reply. On memory that cannot be rewound it was prefilled and failed again for ever, and
    whoever shared its batch failed with it."""
    for position in (0, 10, 23):
        driver = busy_driver(memory, exact=exact)
        victim, neighbour = driver.tickets[-2:]
        driver.backend.faults.culprit = Culprit(0, fault, from_position=position)
        driver.run(max_turns=100)
        assert isinstance(victim.error, NativeError)
        assert (victim.error.call, victim.error.code) == ("llama_decode", fault.code)
        driver.check_answer(neighbour)
        assert neighbour.completion.cache.reason in (Reason.COLD, Reason.LOST)
        assert driver.held(3) != []


@ALL_KINDS
def test_a_call_may_fail_a_few_times_in_a_row(memory: Memory) -> None:
    driver = busy_driver(memory)
    for nth in range(4, 4 + MAX_FAILURES):
        driver.backend.fail_group(nth, GroupFault(-3, 1))
    driver.run()
    driver.check_answers()


@ALL_KINDS
def test_failures_far_apart_do_not_add_up(memory: Memory) -> None:
    driver = Driver(make_traits(memory, n_slots=1))
    for nth in range(2, 60, 12):
        driver.backend.fail_group(nth, GroupFault(-3, 1))
    driver.submit(PROMPT, max_tokens=30)
    driver.run()
    driver.check_answers()
    assert driver.statistics.n_lost_steps >= 3


@pytest.mark.parametrize("memory", [kind for kind in Memory if kind is not Memory.FULL])
def test_memory_that_cannot_be_rewound_is_erased_and_fed_again(memory: Memory) -> None:
    driver = Driver(make_traits(memory, n_slots=1))
    driver.warm(PROMPT)
    driver.backend.fail_group(1, GroupFault(-2))
    result = driver.complete([*PROMPT, 1, 2])
    assert (result.cache.resumed_tokens, result.cache.source, result.cache.reason, result.cache.position) == (
        0,
        Source.NONE,
        Reason.LOST,
        0,
    )
    assert result.usage.prompt_tokens == len(PROMPT) + 2
    driver.check_answers()


def test_memory_that_can_be_rewound_keeps_what_it_resumed() -> None:
    driver = Driver(make_traits(Memory.FULL, n_slots=1))
    driver.warm(PROMPT)
    driver.backend.fail_group(1, GroupFault(-2, None))
    result = driver.complete([*PROMPT, 1, 2])
    assert (result.cache.resumed_tokens, result.cache.reason) == (len(PROMPT), Reason.HIT)
    driver.check_answers()


@ALL_KINDS
@pytest.mark.parametrize("code", [REFUSED, POSITION])
def test_a_refused_batch_is_tried_again_as_it_is(memory: Memory, code: int) -> None:
    driver = Driver(make_traits(memory, n_slots=1))
    driver.warm(PROMPT)
    driver.backend.fail_group(1, GroupFault(code))
    result = driver.complete([*PROMPT, 1, 2])
    assert result.cache.resumed_tokens > 0
    driver.check_answers()


@ALL_KINDS
def test_books_that_differ_from_the_memory_are_found_and_put_right(memory: Memory) -> None:
    """The memory is what counts: what an idle slot lost behind our back is prefilled again."""
    driver = Driver(make_traits(memory, n_slots=1, kv_tokens=128))
    driver.warm(PROMPT)
    driver.backend.erase(0)
    driver.submit([*PROMPT, 1, 2])
    driver.run()
    driver.check_answers()
    assert driver.tickets[-1].completion.cache.reason is Reason.LOST


@ALL_KINDS
@ANY_FAULT
def test_a_request_that_keeps_nothing_keeps_nothing_after_a_failure(memory: Memory, fault: GroupFault) -> None:
    driver = busy_driver(memory)
    victim = driver.submit(PROMPT[1:], store=False, slot=2)
    driver.turn()
    driver.backend.fail_group(2, fault)
    driver.run()
    driver.check_answer(victim)
    assert driver.held(2) == []


# ---- other calls -----------------------------------------------------------------------------------------------


@ALL_KINDS
@pytest.mark.parametrize("call", ["trim", "trim_raises", "share"])
@BOTH_MODES
def test_a_restore_that_fails_costs_the_reuse_and_nothing_else(memory: Memory, exact: bool, call: str) -> None:
    """A trim that raised ended the whole engine."""
    driver = Driver(make_traits(memory, exact=exact, kv_tokens=128))
    driver.warm(PROMPT, slot=0)
    driver.backend.faults.calls = [call]  # type: ignore[list-item]
    ticket = driver.submit([*PROMPT[:9], 99], slot=1 if call == "share" else 0)
    driver.run()
    driver.check_answer(ticket)
    if not driver.backend.faults.calls:
        cache = ticket.completion.cache
        assert (cache.resumed_tokens, cache.source) == (0, Source.NONE)
        assert (cache.reason, cache.position) in (
            (Reason.NOT_REWINDABLE, 9),
            (Reason.NOT_REWINDABLE, 8),
            (Reason.LOST, 0),
        )
    else:
        assert memory is not Memory.FULL


@pytest.mark.parametrize("call", ["trim", "trim_raises"])
def test_a_cut_for_room_that_fails_costs_the_idle_slot_only(call: str) -> None:
    driver = Driver(make_traits(n_slots=2, n_ctx=40))
    driver.warm([1] * 20, slot=0)
    driver.backend.faults.calls = [call]  # type: ignore[list-item]
    driver.submit([2] * 25, slot=1)
    driver.run()
    driver.check_answers()
    assert driver.held(0) == []


@pytest.mark.parametrize("call", ["trim", "trim_raises"])
def test_a_lost_call_after_which_the_cut_fails_too_is_fed_from_the_start(call: str) -> None:
    driver = Driver()
    driver.warm(PROMPT)
    driver.backend.fail_group(1, GroupFault(-3, 1))
    driver.backend.faults.calls = [call]  # type: ignore[list-item]
    assert driver.complete([*PROMPT, 1]).cache.reason is Reason.LOST
    driver.check_answers()


@ALL_KINDS
@pytest.mark.parametrize(("grammar", "error"), [("unparsable", GrammarError), (None, NativeError)])
def test_a_sampler_that_cannot_be_made_touches_no_slot(
    memory: Memory, grammar: str | None, error: type[Exception]
) -> None:
    driver = busy_driver(memory)
    before = driver.held(3)
    if grammar is None:
        driver.turn()
        driver.backend.faults.calls = ["new_sampler"]
    bad = driver.submit([*PARKED, 1], grammar=grammar, slot=3)
    driver.turn()
    assert isinstance(bad.error, error)
    assert driver.held(3) == before
    driver.run()
    for ticket in driver.tickets[:-1]:
        driver.check_answer(ticket)
    assert driver.statistics.n_failed == 1


def test_one_bad_sampler_does_not_hold_up_the_queue() -> None:
    driver = Driver(make_traits(n_slots=1))
    bad = [driver.submit(PROMPT, grammar="unparsable") for _ in range(3)]
    good = driver.submit(PROMPT)
    driver.turn()
    assert all(ticket.is_done for ticket in bad)
    driver.run()
    driver.check_answer(good)
