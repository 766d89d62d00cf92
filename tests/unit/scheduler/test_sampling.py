"""Sampled tokens: failures that hit one request alone, log-probabilities, and the logits of the last prompt token."""

from __future__ import annotations

import numpy as np
import pytest

from pyllamacache.config import Memory
from pyllamacache.errors import GrammarError, NativeError
from tests.fakes import Driver, GroupFault, cold_logits, make_traits

ALL_KINDS = pytest.mark.parametrize("memory", list(Memory))
BOTH_MODES = pytest.mark.parametrize("exact", [False, True])
PROMPT = list(range(40, 61))


@ALL_KINDS
@BOTH_MODES
@pytest.mark.parametrize("nth", [0, 1, 3])
def test_a_grammar_that_allows_nothing_fails_its_request_alone(memory: Memory, exact: bool, nth: int) -> None:
    driver = Driver(make_traits(memory, exact=exact, kv_tokens=128))
    good = driver.submit([1, 2, 3], max_tokens=9)
    bad = driver.submit(PROMPT, grammar=f"fail at {nth}", max_tokens=9)
    driver.run()
    assert isinstance(bad.error, GrammarError)
    driver.check_answer(good)
    longer = driver.submit([*driver.held(1), 5], slot=1)
    assert driver.held(1)[: len(PROMPT)] == PROMPT
    driver.run()
    driver.check_answer(longer)


@ALL_KINDS
def test_a_sampler_that_fails_without_a_grammar_is_a_native_error(memory: Memory) -> None:
    driver = Driver(make_traits(memory))
    bad = driver.submit(PROMPT)
    good = driver.submit([1, 2, 3])
    driver.turn()
    driver.backend.fail_sampling(2)
    driver.run()
    errors = [ticket.error for ticket in (bad, good) if ticket.error is not None]
    assert [type(error) for error in errors] == [NativeError]
    for ticket in (bad, good):
        if ticket.error is None:
            driver.check_answer(ticket)


@ALL_KINDS
def test_no_token_is_offered_to_the_sampler_twice_when_a_reply_is_fed_again(memory: Memory) -> None:
    """Penalties and grammars count what they see."""
    driver = Driver(make_traits(memory, n_slots=1))
    ticket = driver.submit(PROMPT, max_tokens=9)
    driver.run_until(ticket, 5)
    driver.backend.fail_group(1, GroupFault(-3, 1))
    driver.run()
    assert driver.backend.samplers[0].tokens == list(ticket.completion.token_ids)
    driver.check_answers()


def test_a_sampler_sees_the_prompt() -> None:
    driver = Driver()
    driver.complete(PROMPT)
    assert list(driver.backend.samplers[0].prompt) == PROMPT


@ALL_KINDS
@BOTH_MODES
@pytest.mark.parametrize("warmed", [False, True])
def test_the_logits_are_those_of_the_last_prompt_token(memory: Memory, exact: bool, warmed: bool) -> None:
    driver = Driver(make_traits(memory, exact=exact))
    if warmed:
        driver.warm(PROMPT)
    result = driver.complete(PROMPT, return_logits=True, max_tokens=3)
    assert result.logits is not None
    assert np.array_equal(result.logits, cold_logits(driver.traits, PROMPT))
    assert result.logits.argmax() == result.token_ids[0]


@ALL_KINDS
@pytest.mark.parametrize("nth", range(1, 6))
def test_the_logits_survive_a_lost_call(memory: Memory, nth: int) -> None:
    driver = Driver(make_traits(memory, n_slots=1))
    driver.backend.fail_group(nth, GroupFault(-3, 1))
    driver.complete(PROMPT, return_logits=True, max_tokens=3)
    driver.check_answers()


def test_logits_are_computed_for_those_who_asked() -> None:
    driver = Driver()
    driver.submit(PROMPT, return_logits=True)
    driver.submit([1, 2])
    driver.run()
    wanting = [feed for step in driver.backend.calls for group in step for feed in group if feed.want_logits]
    assert [(feed.seq_id, feed.end) for feed in wanting] == [(0, len(PROMPT))]
    assert driver.tickets[1].completion.logits is None


def test_each_token_has_its_logprob_and_those_of_the_best() -> None:
    driver = Driver()
    ticket = driver.submit(PROMPT, max_tokens=4, logprobs=True, top_logprobs=3)
    driver.submit([1, 2], max_tokens=4)
    driver.run()
    logprobs = ticket.completion.logprobs
    assert logprobs is not None
    assert tuple(each.token_id for each in logprobs) == ticket.completion.token_ids
    assert all(each.top[0] == (each.token_id, each.logprob) and len(each.top) == 3 for each in logprobs)
    assert [chunk.logprobs for chunk in ticket.chunks] == [(each,) for each in logprobs]
    assert driver.tickets[1].completion.logprobs is None
