"""What is kept of recent requests, for explanations, and what is not."""

from __future__ import annotations

import pytest

from pyllamacache.config import Memory
from pyllamacache.prefix.retention import Eviction
from pyllamacache.request import Reason
from pyllamacache.scheduler.recent import MAX_RECENT, Recents
from tests.fakes import Driver, make_traits

PROMPT = list(range(40, 61))


def test_a_request_is_there_while_it_runs_and_with_its_reply_afterwards() -> None:
    driver = Driver(make_traits(n_slots=2))
    ticket = driver.submit(PROMPT, max_tokens=6)
    driver.run_until(ticket, 2)
    (running,) = driver.state.recents.of("")
    assert (running.ids.tolist(), running.n_prompt) == (PROMPT, 21)
    beside = driver.complete_beside([*PROMPT, 7], max_tokens=1)
    assert beside.cache.evidence is not None
    assert [each.ids.tolist() for each in beside.cache.evidence.recent] == [PROMPT]
    driver.run()
    latest = driver.state.recents.of("")[-1]
    assert latest.ids.tolist() == [*PROMPT, *ticket.completion.token_ids]
    assert running.ids.tolist() == PROMPT  # what was handed out stays as it was


@pytest.mark.parametrize("memory", list(Memory))
def test_evidence_is_of_the_namespace_and_before_the_request(memory: Memory) -> None:
    driver = Driver(make_traits(memory, n_slots=2))
    driver.complete(PROMPT, namespace="a")
    driver.complete(PROMPT, namespace="b")
    driver.complete(PROMPT, namespace="a", store=False)
    evidence = driver.complete(PROMPT, namespace="a").cache.evidence
    assert evidence is not None
    assert [each.namespace for each in evidence.recent] == ["a"]
    assert len(driver.state.recents) == 3
    driver.state.recents.clear("a")
    assert [len(driver.state.recents.of(name)) for name in "ab"] == [0, 1]


def test_count_and_bytes_are_limits() -> None:
    driver = Driver(make_traits(n_slots=1))
    for n in range(MAX_RECENT + 3):
        driver.complete([*PROMPT, n], max_tokens=1)
    kept = driver.state.recents.of("")
    assert len(kept) == len(driver.state.recents) == MAX_RECENT
    assert [each.ids[21] for each in kept] == list(range(3, MAX_RECENT + 3))
    assert driver.state.recents.size_bytes == sum(each.size_bytes for each in kept)
    small = Driver(make_traits(n_slots=1))
    small.state.recents = Recents(max_bytes=130)
    for n in range(9):
        small.complete([*PROMPT, n], max_tokens=1)
        assert small.state.recents.size_bytes <= 130
    assert len(small.state.recents) == 1
    small.complete(list(range(40)), max_tokens=1)
    assert len(small.state.recents) == 0


def test_a_checkpoint_given_up_for_another_reason_than_room_is_told_but_is_no_eviction() -> None:
    driver = Driver(make_traits(Memory.HYBRID, n_slots=1, n_ubatch=4), max_checkpoints=8)
    driver.complete([*PROMPT, 1], max_tokens=1, boundaries=(21,))
    state = driver.state
    for node in list(state.checkpoints.index.checkpoints):
        state.checkpoints.drop(node, Eviction.BROKEN)
    result = driver.complete([*PROMPT, 2], max_tokens=1)
    assert result.cache.reason is Reason.NO_CHECKPOINT
    assert result.cache.evidence is not None
    lost = result.cache.evidence.lost
    assert lost is not None
    assert (lost.position, lost.reason) == (21, "broken")
