"""Prefill and decode side by side: nobody starves, and every round of the loop does something."""

from __future__ import annotations

import pytest

from pyllamacache.config import Memory
from tests.fakes import Driver, FeedRecord, make_traits

ALL_KINDS = pytest.mark.parametrize("memory", list(Memory))
BOTH_MODES = pytest.mark.parametrize("exact", [False, True])


def feeds_of(driver: Driver, seq_id: int, since: int = 0) -> list[list[FeedRecord]]:
    """By step: what was fed to the sequence."""
    return [
        [feed for group in step for feed in group if feed.seq_id == seq_id] for step in driver.backend.calls[since:]
    ]


@ALL_KINDS
@BOTH_MODES
def test_a_long_prefill_never_skips_a_decoding_neighbours_turn(memory: Memory, exact: bool) -> None:
    """And costs it at most one ubatch of prefill per step, which the fake checks."""
    driver = Driver(make_traits(memory, exact=exact, kv_tokens=256, n_batch=16, n_ubatch=4))
    decoding = driver.submit([1, 2, 3], max_tokens=40, slot=0)
    driver.run_until(decoding, 1)
    since = len(driver.backend.calls)
    long = driver.submit(range(1, 51), max_tokens=2, slot=1)
    driver.run()
    for step, own in zip(driver.backend.calls[since:], feeds_of(driver, 0, since), strict=True):
        if any(feed.seq_id == 1 for group in step for feed in group):
            assert len(own) == 1
            assert own[0].decodes
    assert long.completion.usage.prompt_tokens == 50
    driver.check_answers()


@ALL_KINDS
@BOTH_MODES
def test_prompts_take_turns_beside_a_reply(memory: Memory, exact: bool) -> None:
    driver = Driver(make_traits(memory, exact=exact, n_slots=3, kv_tokens=256, n_batch=16, n_ubatch=4))
    decoding = driver.submit([1, 2, 3], max_tokens=40, slot=0)
    driver.run_until(decoding, 1)
    driver.submit(range(1, 41), max_tokens=1, slot=1)
    driver.submit(range(41, 81), max_tokens=1, slot=2)
    for _ in range(8):
        driver.turn()
    assert abs(len(driver.held(1)) - len(driver.held(2))) <= 4
    driver.run()
    driver.check_answers()


@ALL_KINDS
@BOTH_MODES
def test_a_short_prompt_does_not_wait_for_the_end_of_a_long_one(memory: Memory, exact: bool) -> None:
    driver = Driver(make_traits(memory, exact=exact, n_slots=3, n_ctx=250, kv_tokens=600, n_batch=4, n_ubatch=4))
    long = driver.submit([n % 250 for n in range(200)], max_tokens=1, slot=0)
    driver.turn()
    short = driver.submit([9, 8, 7], max_tokens=3, slot=1)
    while not short.is_done:
        driver.turn()
    assert not long.is_done
    assert len(driver.held(0)) < 60
    driver.run()
    driver.check_answers()


@ALL_KINDS
def test_a_prompt_alone_fills_the_batch(memory: Memory) -> None:
    driver = Driver(make_traits(memory, n_batch=16, n_ubatch=4))
    driver.complete(range(1, 51), max_tokens=1)
    assert [[feed.n_tokens for feed in feeds] for feeds in feeds_of(driver, 0)] == [[16], [16], [16], [2]]


@ALL_KINDS
def test_replies_are_decoded_together(memory: Memory) -> None:
    driver = Driver(make_traits(memory, n_slots=4, kv_tokens=256))
    for n in range(4):
        driver.submit([n, n], max_tokens=10)
    driver.run()
    together = [step for step in driver.backend.calls if [len(group) for group in step] == [4]]
    assert len(together) >= 6
    driver.check_answers()


@ALL_KINDS
@BOTH_MODES
def test_many_more_requests_than_slots_all_end(memory: Memory, exact: bool) -> None:
    driver = Driver(make_traits(memory, exact=exact, n_slots=3, n_ctx=40))
    for n in range(20):
        driver.submit(range(n, n + 1 + n % 13), max_tokens=n % 7, slot=n % 3 if n % 4 == 0 else None)
    driver.run(max_turns=300)
    driver.check_answers()
