"""How a request ends: tokens, stop strings, end of generation, cancel and timeout at every step."""

from __future__ import annotations

from itertools import count

import pytest

from pyllamacache.config import Memory
from pyllamacache.errors import RequestTimeoutError
from pyllamacache.request import Completion, Reason, SamplingParams
from tests.fakes import ByteVocab, Driver, Ticket, make_traits

ALL_KINDS = pytest.mark.parametrize("memory", list(Memory))
BOTH_MODES = pytest.mark.parametrize("exact", [False, True])
PROMPT = list(range(40, 61))


def text_of(tokens: tuple[int, ...]) -> str:
    return b"".join(map(ByteVocab().piece, tokens)).decode(errors="replace")


def check_stream(ticket: Ticket) -> None:
    """The chunks together are the answer, and the last one alone says why it ended."""
    chunks, result = ticket.chunks, ticket.completion
    assert "".join(chunk.text for chunk in chunks) == result.text
    assert tuple(token for chunk in chunks for token in chunk.token_ids) == result.token_ids
    assert [chunk.finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].finish_reason == result.finish_reason


# ---- by itself -------------------------------------------------------------------------------------------------


@ALL_KINDS
@BOTH_MODES
def test_the_reply_has_max_tokens_tokens(memory: Memory, exact: bool) -> None:
    driver = Driver(make_traits(memory, exact=exact))
    ticket = driver.submit(PROMPT, max_tokens=7)
    driver.run()
    assert (ticket.completion.finish_reason, len(ticket.completion.token_ids)) == ("length", 7)
    assert ticket.completion.text == text_of(driver.cold(PROMPT, 7))
    check_stream(ticket)
    driver.check_answers()


@ALL_KINDS
def test_the_last_sampled_token_is_not_in_the_slot(memory: Memory) -> None:
    driver = Driver(make_traits(memory))
    result = driver.complete(PROMPT, max_tokens=5)
    assert driver.held(int(result.slot_id or 0)) == PROMPT + list(result.token_ids[:-1])


@ALL_KINDS
@BOTH_MODES
def test_max_tokens_0_computes_the_prompt_and_its_logits(memory: Memory, exact: bool) -> None:
    driver = Driver(make_traits(memory, exact=exact))
    ticket = driver.submit(PROMPT, max_tokens=0, return_logits=True)
    driver.run()
    assert (ticket.completion.finish_reason, ticket.completion.token_ids, ticket.completion.text) == ("length", (), "")
    assert ticket.completion.logits is not None
    assert driver.held(0) == PROMPT
    check_stream(ticket)
    driver.check_answers()


def eog_after(n_tokens: int, memory: Memory, exact: bool) -> Driver:
    """A driver whose model ends the reply to PROMPT with its token number `n_tokens`."""
    reply = Driver(make_traits(memory, exact=exact)).cold(PROMPT, n_tokens)
    assert reply[-1] not in reply[:-1]
    return Driver(make_traits(memory, exact=exact, eog_ids=frozenset({reply[-1]})))


@ALL_KINDS
@BOTH_MODES
@pytest.mark.parametrize("n_tokens", [1, 2, 5])
def test_an_end_of_generation_token_ends_the_reply_and_has_no_text(memory: Memory, exact: bool, n_tokens: int) -> None:
    driver = eog_after(n_tokens, memory, exact)
    ticket = driver.submit(PROMPT, max_tokens=9)
    driver.run()
    result = ticket.completion
    assert (result.finish_reason, len(result.token_ids)) == ("stop", n_tokens)
    assert result.text == text_of(result.token_ids[:-1])
    check_stream(ticket)
    driver.check_answers()


def test_an_end_of_generation_token_in_the_last_place_is_a_stop() -> None:
    driver = eog_after(3, Memory.FULL, exact=False)
    assert driver.complete(PROMPT, max_tokens=3).finish_reason == "stop"


def test_a_reply_before_min_tokens_has_no_end() -> None:
    driver = eog_after(2, Memory.FULL, exact=False)
    ticket = driver.submit(PROMPT, max_tokens=9, min_tokens=5)
    driver.run()
    assert len(ticket.completion.token_ids) >= 5
    driver.check_answers()


LETTERS = {token: -100.0 for token in range(257) if not 97 <= token <= 122}
"""A bias that leaves lower-case letters."""


@BOTH_MODES
@pytest.mark.parametrize("length", [1, 2, 5])
def test_a_stop_string_ends_the_reply_before_it_however_many_tokens_it_spans(exact: bool, length: int) -> None:
    driver = Driver(make_traits(exact=exact))
    text = text_of(driver.cold(PROMPT, 12, SamplingParams(logit_bias=LETTERS)))
    assert text.isalpha()
    stop = text[3 : 3 + length]
    at = text.index(stop)
    ticket = driver.submit(PROMPT, max_tokens=12, stop=("never", stop), logit_bias=LETTERS)
    driver.run()
    result = ticket.completion
    assert (result.finish_reason, result.text) == ("stop", text[:at])
    assert len(result.token_ids) == at + length
    check_stream(ticket)
    driver.check_answers()


def test_text_that_might_have_become_a_stop_string_comes_with_the_end() -> None:
    driver = Driver()
    text = text_of(driver.cold(PROMPT, 6, SamplingParams(logit_bias=LETTERS)))
    ticket = driver.submit(PROMPT, max_tokens=6, stop=(text[-2:] + "!",), logit_bias=LETTERS)
    driver.run()
    assert ticket.completion.text == text
    check_stream(ticket)


# ---- from outside ----------------------------------------------------------------------------------------------


def end_after(driver: Driver, n_turns: int, how: str) -> Ticket | None:
    """Run a request for `n_turns`, end it, and return it; None if it was over by then. A neighbour runs beside it."""
    neighbour = driver.submit([9, 8, 7], max_tokens=12, slot=1)
    ticket = driver.submit(PROMPT, max_tokens=5, slot=0, timeout_s=60.0)
    for _ in range(n_turns):
        driver.turn()
    if ticket.is_done:
        return None
    if how == "cancel":
        ticket.cancel()
    else:
        driver.clock.advance(60.0)
    driver.turn()
    assert ticket.is_done
    driver.run()
    driver.check_answer(neighbour)
    return ticket


def check_partial(ticket: Ticket, how: str, driver: Driver) -> None:
    if how == "cancel":
        assert ticket.completion.finish_reason == "cancelled"
        assert ticket.completion.usage.prompt_tokens == min(len(driver.held(0)), len(PROMPT))
        driver.check_answer(ticket)
        check_stream(ticket)
    else:
        assert isinstance(ticket.error, RequestTimeoutError)


@ALL_KINDS
@BOTH_MODES
@pytest.mark.parametrize("how", ["cancel", "timeout"])
def test_a_request_ended_at_any_step_leaves_a_slot_that_can_be_extended(memory: Memory, exact: bool, how: str) -> None:
    for n_turns in count():
        driver = Driver(make_traits(memory, exact=exact, kv_tokens=128))
        ticket = end_after(driver, n_turns, how)
        if ticket is None:
            break
        check_partial(ticket, how, driver)
        held = driver.held(0)
        assert held[: len(PROMPT)] == PROMPT[: len(held)]
        longer = driver.submit([*held, 1, 2], slot=0)
        driver.run()
        driver.check_answer(longer)
        if not exact:
            assert longer.completion.cache.resumed_tokens == len(held)
    assert n_turns > 5


@ALL_KINDS
@pytest.mark.parametrize("how", ["cancel", "timeout"])
def test_an_identical_request_resumes_where_the_prefill_was_ended(memory: Memory, how: str) -> None:
    n_resumed = set()
    for n_turns in count():
        driver = Driver(make_traits(memory, kv_tokens=128))
        ticket = end_after(driver, n_turns, how)
        if ticket is None:
            break
        held = driver.held(0)
        again = driver.submit(PROMPT, slot=0, max_tokens=5)
        driver.run()
        driver.check_answer(again)
        if len(held) < len(PROMPT) or memory is Memory.FULL:
            assert again.completion.cache.resumed_tokens == min(len(held), len(PROMPT) - 1)
        n_resumed.add(again.completion.cache.resumed_tokens)
    assert len(n_resumed) > 4


def test_a_cancelled_reply_keeps_the_text_that_was_held_back() -> None:
    driver = Driver()
    text = text_of(driver.cold(PROMPT, 4, SamplingParams(logit_bias=LETTERS)))
    ticket = driver.submit(PROMPT, max_tokens=20, stop=(text[2:4] + "!",), logit_bias=LETTERS)
    driver.run_until(ticket, 4)
    ticket.cancel()
    driver.run()
    assert ticket.completion.text == text
    check_stream(ticket)


def test_cancelling_what_is_done_changes_nothing() -> None:
    driver = Driver()
    ticket = driver.submit(PROMPT)
    driver.run()
    ticket.cancel()
    driver.complete([1, 2, 3])
    assert ticket.completion.finish_reason == "length"


def test_a_timeout_counts_from_submission() -> None:
    driver = Driver(make_traits(n_slots=1))
    driver.submit([1], max_tokens=5)
    late = driver.submit(PROMPT, timeout_s=10.0, max_tokens=30)
    driver.turn()
    driver.clock.advance(6.0)
    driver.run_until(late, 2)
    driver.clock.advance(4.0)
    driver.turn()
    assert isinstance(late.error, RequestTimeoutError)
    assert str(late.error).startswith("not finished after 10 s: 21 tokens prefilled, 2 generated")


def test_timings_add_up() -> None:
    driver = Driver()
    driver.clock.tick_s = 0.5
    result: Completion = driver.complete(PROMPT, max_tokens=3)
    timings = result.timings
    assert 0 < timings.queue_s < timings.ttft_s
    assert timings.ttft_s >= timings.queue_s + timings.restore_s + timings.prefill_s
    assert timings.decode_s > 0


def test_the_reason_of_a_cancelled_request_is_that_of_its_plan() -> None:
    driver = Driver()
    driver.complete(PROMPT)
    ticket = driver.submit([*PROMPT[:5], 99], max_tokens=20)
    driver.run_until(ticket, 1)
    ticket.cancel()
    driver.run()
    assert (ticket.completion.cache.reason, ticket.completion.cache.position) == (Reason.DIVERGED, 5)
