"""The numbers: of a request, and of an engine."""

from __future__ import annotations

import pytest

from pyllamacache.config import Memory
from pyllamacache.request import Reason, Source
from tests.fakes import Driver, GroupFault, make_traits

PROMPT = list(range(40, 61))


@pytest.mark.parametrize("memory", list(Memory))
@pytest.mark.parametrize("exact", [False, True])
def test_totals_are_the_sums_of_the_answers(memory: Memory, exact: bool) -> None:
    driver = Driver(make_traits(memory, exact=exact, n_slots=2, kv_tokens=80))
    for n in (0, 3, 1, 3):
        driver.complete([*PROMPT, *range(n)], max_tokens=3)
        driver.warm([*PROMPT[:10], n], namespace="b")
    cancelled = driver.submit(PROMPT, max_tokens=30)
    driver.run_until(cancelled, 2)
    cancelled.cancel()
    driver.submit(PROMPT, grammar="unparsable")
    driver.run()
    answers = [ticket.completion for ticket in driver.tickets if ticket.error is None]
    total = driver.statistics
    assert (total.n_requests, total.n_cancelled, total.n_failed) == (8, 1, 1)
    assert total.prompt_tokens == sum(each.usage.prompt_tokens for each in answers)
    assert total.cached_tokens == sum(each.usage.cached_tokens for each in answers)
    assert total.prefilled_tokens == sum(each.cache.prefilled_tokens for each in answers)
    assert total.completion_tokens == sum(each.usage.completion_tokens for each in answers)
    assert total.cached_tokens + total.prefilled_tokens == total.prompt_tokens
    assert sum(total.requests_by_reason.values()) == sum(total.requests_by_source.values()) == len(answers)
    assert sum(total.cached_tokens_by_source.values()) == total.cached_tokens
    assert total.hit_rate == total.cached_tokens / total.prompt_tokens


def test_by_reason_and_by_source() -> None:
    driver = Driver(make_traits(n_slots=2, kv_tokens=128))
    driver.warm(PROMPT, slot=0)
    driver.complete([*PROMPT, 1], slot=1)
    driver.complete([*PROMPT, 2], slot=1)
    driver.complete(PROMPT, cache_prompt=False, slot=0)
    total = driver.statistics
    assert total.requests_by_reason == {Reason.COLD: 1, Reason.HIT: 2, Reason.DISABLED: 1}
    assert total.requests_by_source == {Source.NONE: 2, Source.SHARED: 1, Source.SLOT: 1}
    assert total.cached_tokens_by_source == {Source.NONE: 0, Source.SHARED: 21, Source.SLOT: 21}


def test_nothing_done_is_zero() -> None:
    total = Driver().statistics
    assert (total.n_requests, total.n_steps, total.hit_rate, total.kv_tokens_used) == (0, 0, 0.0, 0)


@pytest.mark.parametrize("memory", list(Memory))
@pytest.mark.parametrize("exact", [False, True])
def test_cells_in_use_are_those_of_the_memory(memory: Memory, exact: bool) -> None:
    """Exact mode reported none."""
    driver = Driver(make_traits(memory, exact=exact))
    driver.submit(PROMPT, max_tokens=9)
    driver.submit(PROMPT[1:], max_tokens=5)
    for _ in range(6):
        driver.turn()
        assert driver.statistics.kv_tokens_used == driver.backend.n_used_cells()
    driver.run()
    assert driver.statistics.kv_tokens_used == driver.backend.n_used_cells()


def test_lost_calls_are_counted() -> None:
    driver = Driver()
    driver.backend.fail_group(1, GroupFault(-2))
    driver.backend.fail_group(2, GroupFault(-1))
    driver.complete(PROMPT)
    assert driver.statistics.n_lost_steps == 1


def test_a_step_is_split_into_native_time_and_our_own() -> None:
    driver = Driver()
    driver.backend.before_step = lambda: driver.clock.advance(2.0)
    driver.complete(PROMPT, max_tokens=3)
    total = driver.statistics
    assert total.n_steps == len(driver.backend.calls) == 5
    assert total.native_s == 10.0
    assert total.scheduler_s == 0.0


@pytest.mark.parametrize("memory", list(Memory))
def test_what_was_written_counts_the_prompt_only(memory: Memory) -> None:
    driver = Driver(make_traits(memory, n_slots=1))
    first = driver.complete(PROMPT, max_tokens=5)
    assert first.usage.cache_write_tokens == len(PROMPT)
    longer = driver.complete([*PROMPT, *first.token_ids, 1, 2], max_tokens=5)
    assert longer.usage.cache_write_tokens == longer.cache.prefilled_tokens == 3


def test_a_request_that_went_in_circles_reports_what_is_there() -> None:
    """Prompt tokens are cached or prefilled once in the report, however often they were fed."""
    driver = Driver(make_traits(Memory.HYBRID, n_slots=1))
    for nth in (3, 8):
        driver.backend.fail_group(nth, GroupFault(-3, 1))
    result = driver.complete(PROMPT, max_tokens=4)
    assert result.usage.prompt_tokens == len(PROMPT) == result.cache.prefilled_tokens
    assert driver.statistics.n_lost_steps == 2
