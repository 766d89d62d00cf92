"""Requests that wait for a prefix which a running one computes, also while its state is still on its way out."""

from __future__ import annotations

import pytest

from pyllamacache.config import Memory
from tests.fakes.backend import FakeBackend, make_traits
from tests.fakes.driver import Driver

HEADER = [n % 250 for n in range(100)]
WITH_STATE = [Memory.SLIDING, Memory.HYBRID, Memory.RECURRENT]


def make(memory: Memory, *, capture_polls: int = 0, max_checkpoints: int = 32) -> Driver:
    backend = FakeBackend(make_traits(memory, n_slots=4, n_ctx=300, kv_tokens=2000))
    backend.capture_polls = capture_polls
    return Driver(backend, max_checkpoints=max_checkpoints)


@pytest.mark.parametrize("capture_polls", [0, 5, 50])
@pytest.mark.parametrize("memory", [Memory.FULL, *WITH_STATE])
def test_what_arrives_together_is_computed_once_however_long_a_capture_takes(
    memory: Memory, capture_polls: int
) -> None:
    driver = make(memory, capture_polls=capture_polls)
    tickets = [driver.submit([*HEADER, 3, n, n], max_tokens=4) for n in range(4)]
    driver.run()
    new = 2
    assert [each.completion.cache.prefilled_tokens for each in tickets] == [103, new, new, new]
    driver.check_answers()


@pytest.mark.parametrize("memory", WITH_STATE)
def test_a_capture_that_is_still_on_its_way_when_nothing_runs_is_waited_for(memory: Memory) -> None:
    """The one that took it ends at once, and the other is all there is to do."""
    driver = make(memory, capture_polls=10_000)
    first = driver.submit([*HEADER, 1], max_tokens=0)
    second = driver.submit([*HEADER, 2, 3], max_tokens=4)
    driver.run()
    assert first.completion.cache.prefilled_tokens == 101
    assert second.completion.cache.prefilled_tokens == 2
    driver.check_answers()


@pytest.mark.parametrize("memory", WITH_STATE)
def test_a_capture_that_fails_is_not_waited_for_again(memory: Memory) -> None:
    driver = make(memory, capture_polls=5)
    driver.backend.faults.calls = ["capture"] * 40
    tickets = [driver.submit([*HEADER, 3, n, n], max_tokens=4) for n in range(4)]
    driver.run()
    driver.check_answers()
    assert all(each.is_done for each in tickets)


@pytest.mark.parametrize("memory", WITH_STATE)
def test_without_room_for_a_state_nobody_waits(memory: Memory) -> None:
    driver = make(memory, max_checkpoints=0)
    tickets = [driver.submit([*HEADER, 3, n, n], max_tokens=4) for n in range(4)]
    driver.turn()
    assert len(driver.state.running) == 4
    driver.run()
    assert [each.completion.cache.prefilled_tokens for each in tickets] == [103] * 4
    driver.check_answers()
