"""The numbers: of a request, and of an engine."""

from __future__ import annotations

from typing import Any

import pytest

from pyllamacache.config import Memory
from pyllamacache.observe.histogram import SECONDS_BOUNDS, Histogram, Recorder
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
    assert sum(total.prefilled_tokens_by_reason.values()) == total.prefilled_tokens
    assert total.prefill.count == total.restore.count == len(answers)
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


# ---- durations and evictions -----------------------------------------------------------------------------------


def test_a_duration_falls_into_the_first_bucket_that_reaches_it() -> None:
    recorder = Recorder()
    for seconds in (0.0, -1.0, 0.0001, 0.00011, 100.0, 100.1, 1e9):
        recorder.add(seconds)
    value = recorder.value()
    assert value.counts == (3, 1, *[0] * 16, 1, 2)
    assert len(value.counts) == len(value.bounds) + 1
    assert value.count == 7
    assert value.sum_s == pytest.approx(1e9 + 200.1 + 0.00021)
    assert value.bounds is SECONDS_BOUNDS
    assert tuple(sorted(SECONDS_BOUNDS)) == SECONDS_BOUNDS


def test_a_value_does_not_change_with_its_recorder() -> None:
    recorder = Recorder()
    before = recorder.value()
    recorder.add(1.0)
    assert before == Histogram()
    assert before.mean_s == 0.0
    assert recorder.value().mean_s == 1.0


def test_prefill_seconds_are_those_of_the_answers() -> None:
    driver = Driver()
    driver.backend.before_step = lambda: driver.clock.advance(0.3)
    answers = [driver.complete([*PROMPT, n], max_tokens=2) for n in range(3)]
    total = driver.statistics
    assert total.prefill.sum_s == pytest.approx(sum(each.timings.prefill_s for each in answers))
    assert total.restore.sum_s == pytest.approx(sum(each.timings.restore_s for each in answers))
    assert total.prefill.count == total.restore.count == 3


def test_evicted_tokens_have_a_cause() -> None:
    driver = Driver(make_traits(n_slots=3, kv_tokens=40))
    for n in range(4):
        driver.complete([n * 50 + each for each in range(18)], max_tokens=2)
    total = driver.statistics
    assert total.n_evicted_tokens > 0
    assert set(total.evicted_tokens_by_cause) == {"slot", "parked", "outnumbered"}
    assert total.n_evicted_tokens == total.evicted_tokens_by_cause["slot"] + total.evicted_tokens_by_cause["parked"]


def test_each_capture_that_became_ready_is_timed() -> None:
    """In flight while steps of a second go by, of which the thread spends none on it."""
    driver = Driver(make_traits(Memory.HYBRID, n_slots=1), max_checkpoints=8)
    driver.backend.before_step = lambda: driver.clock.advance(1.0)
    driver.backend.capture_polls = 3
    driver.complete(PROMPT, max_tokens=6, boundaries=[8])
    driver.state.checkpoints.finish_all()
    driver.state.report_checkpoints()
    checkpoints = driver.statistics.checkpoints
    n_captured = sum(checkpoints.captured.values())
    assert n_captured > 0
    assert checkpoints.capture.count == checkpoints.stall.count == n_captured
    assert checkpoints.capture.sum_s >= 1.0
    assert checkpoints.stall.sum_s == 0.0


def test_a_stall_is_what_the_thread_spent_on_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a second to begin, two to wait for it at the end."""
    driver = Driver(make_traits(Memory.HYBRID, n_slots=1), max_checkpoints=8)
    driver.backend.capture_polls = 10**9
    begin = driver.backend.begin_capture

    def slow_begin(seq_id: int, data: Any) -> Any:
        driver.clock.advance(0.5)
        capture = begin(seq_id, data)
        if capture is not None:
            end = capture.finish

            def slow_finish() -> bool:
                driver.clock.advance(2.0)
                return end()

            monkeypatch.setattr(capture, "finish", slow_finish)
        return capture

    monkeypatch.setattr(driver.backend, "begin_capture", slow_begin)
    driver.warm(PROMPT)
    driver.state.checkpoints.finish_all()
    driver.state.report_checkpoints()
    checkpoints = driver.statistics.checkpoints
    assert checkpoints.stall.count == sum(checkpoints.captured.values()) > 0
    assert checkpoints.stall.sum_s == checkpoints.stall_s == 2.5 * checkpoints.stall.count
    assert checkpoints.max_held == 8


def test_a_memory_without_a_state_has_no_limits_for_checkpoints() -> None:
    driver = Driver(max_checkpoints=8)
    driver.complete(PROMPT)
    assert (driver.statistics.checkpoints.max_held, driver.statistics.checkpoints.limit_bytes) == (0, 0)
