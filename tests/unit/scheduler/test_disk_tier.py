"""The scheduler's view of a disk: entries become marks, marks become entries, and nothing is believed unseen."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from pyllamacache.config import Memory
from pyllamacache.prefix.key import chain_key, next_key, root_key
from pyllamacache.request import Source
from pyllamacache.scheduler.disk import DiskTier
from pyllamacache.scheduler.slot_files import kind_of
from pyllamacache.store.disk_format import DiskEntry
from tests.fakes import Driver, FakeBackend, make_traits
from tests.fakes.clock import FakeClock
from tests.fakes.store import FakeStore

SPAN = 4
IDS = np.arange(1, 15, dtype=np.int32)
PROMPT = list(range(1, 31))
KINDS = pytest.mark.parametrize("memory", [Memory.FULL, Memory.SLIDING, Memory.HYBRID, Memory.RECURRENT])


def entry(store: FakeStore, kind: str, end: int, *, namespace: str = "") -> DiskEntry:
    """As another process would have written it."""
    start = (end - 1) // SPAN * SPAN
    parent = chain_key(root_key(store.scope, namespace), IDS[:start], span_tokens=SPAN)
    tail = IDS[start:end].copy()
    return DiskEntry(next_key(parent, tail), parent, kind, namespace, start, end, tail, 8, label="tail")


def tier_over(store: FakeStore) -> DiskTier:
    tier = DiskTier(store, kind_of=kind_of, wall_clock=FakeClock(), clock=FakeClock())
    tier.index.span_tokens = SPAN
    return tier


def written(store: FakeStore, *entries: DiskEntry) -> DiskTier:
    tier = tier_over(store)
    for each in entries:
        store.write(each, np.zeros(each.n_bytes, dtype=np.uint8))
        tier.refresh()
    return tier


def found(tier: DiskTier, namespace: str = "") -> tuple[list[int], list[int]]:
    match = tier.index.match(namespace, IDS)
    return sorted(span.position for span in match.spans.values()), [each.position for each in match.checkpoints]


def test_entries_are_found_in_whatever_order_they_come() -> None:
    for order in ((4, 8, 10), (10, 8, 4), (8, 4, 10)):
        store = FakeStore(1000)
        tier = written(store, *(entry(store, "span", end) for end in order), entry(store, "state", 9))
        assert found(tier) == ([4, 8, 10], [9])
        tier.index.audit()


def test_a_late_loss_leaves_what_was_written_anew() -> None:
    """A read that began before an entry was removed fails after the same was written and found again."""
    store = FakeStore(1000)
    each = entry(store, "span", 4)
    tier = written(store, each)
    old = tier.index.match("", IDS).spans[0]
    tier.forget(old)
    tier._take(each)
    tier.forget(old)
    assert found(tier) == ([4], [])
    assert (tier.n_bytes, tier.n_entries) == (8, 1)


def test_an_entry_whose_key_is_not_that_of_its_ids_is_ignored() -> None:
    store = FakeStore(1000)
    right = entry(store, "span", 4)
    wrong = replace(right, ids=right.ids + 1)
    elsewhere = replace(right, namespace="other")
    tier = written(store, wrong)
    assert found(tier) == ([], [])
    assert found(written(FakeStore(1000), elsewhere), "other") == ([], [])


def test_what_the_index_has_is_not_taken_twice_and_a_longer_span_takes_the_place_of_a_shorter_one() -> None:
    store = FakeStore(1000)
    tier = written(store, entry(store, "span", 4), entry(store, "span", 6), entry(store, "span", 7))
    assert found(tier) == ([4, 7], [])
    store.entries.clear()
    store.write(entry(store, "span", 7), np.zeros(8, dtype=np.uint8))
    tier.refresh()
    assert found(tier) == ([4, 7], [])


def test_states_without_spans_are_found_by_the_keys_of_the_prompt() -> None:
    store = FakeStore(1000)
    tier = written(store, entry(store, "state", 9), entry(store, "state", 3), entry(store, "state", 9, namespace="a"))
    assert found(tier) == ([], [3])
    other = IDS.copy()
    other[1] = 99
    tier.adopt("", other)
    assert found(tier) == ([], [3])
    tier.adopt("", IDS)
    assert found(tier) == ([], [3, 9])
    assert found(tier, "a") == ([], [])


def test_a_store_that_cannot_be_asked_is_asked_again() -> None:
    store = FakeStore(1000)
    store.fails = ["scan"]
    store.write(entry(store, "span", 4), np.zeros(8, dtype=np.uint8))
    tier = tier_over(store)
    tier.refresh()
    assert found(tier) == ([], [])
    tier.refresh()
    assert found(tier) == ([4], [])


# ---- with the scheduler ------------------------------------------------------------------------------------------


def driver_with(store: FakeStore, memory: Memory, *, exact: bool = False, n_polls: int = 0) -> Driver:
    traits = make_traits(memory, n_slots=2, n_parked=0 if exact or not memory.can_park else 4, exact=exact)
    driver = Driver(FakeBackend(traits), max_checkpoints=8)
    driver.state.index.span_tokens = 8
    driver.attach_store(store, n_polls=n_polls)
    return driver


def store_all(driver: Driver) -> None:
    while driver.state.spans.save_some(64):
        pass
    assert driver.state.disk is not None
    driver.state.disk.settle()
    driver.check()


@KINDS
@pytest.mark.parametrize("n_polls", [0, 3])
def test_a_new_engine_goes_on_where_the_old_one_ended(memory: Memory, n_polls: int) -> None:
    store = FakeStore(1 << 20)
    first = driver_with(store, memory)
    reply = first.complete(PROMPT, max_tokens=4)
    store_all(first)
    second = driver_with(store, memory, n_polls=n_polls)
    prompt = [*PROMPT, *reply.token_ids[:-1], 7, 7]
    ticket = second.submit(prompt)
    second.run()
    second.check_answers()
    assert ticket.completion.cache.source is Source.DISK
    assert ticket.completion.usage.cached_tokens == len(prompt) - 2
    assert second.state.disk is not None
    assert second.state.disk.n_read > 0


@KINDS
@pytest.mark.parametrize("trouble", ["read", "corrupt", "lost"])
def test_what_cannot_be_read_is_computed_and_said(memory: Memory, trouble: str) -> None:
    store = FakeStore(1 << 20)
    first = driver_with(store, memory)
    first.complete(PROMPT, max_tokens=4)
    store_all(first)
    second = driver_with(store, memory)
    assert second.state.disk is not None
    second.state.disk.refresh()
    if trouble == "lost":
        store.entries.clear()
    else:
        store.fails = [trouble] * 2
    ticket = second.submit([*PROMPT, 9])
    second.run()
    second.check_answers()
    cache = ticket.completion.cache
    assert cache.reason.value == "lost"
    assert cache.position == cache.resumed_tokens < len(PROMPT)
    assert second.state.disk.n_lost + second.state.disk.n_failed > 0


def test_a_write_that_fails_costs_nothing_but_the_copy() -> None:
    store = FakeStore(1 << 20)
    driver = driver_with(store, Memory.FULL)
    store.fails = ["write"] * 2
    driver.complete(PROMPT, max_tokens=4)
    store_all(driver)
    assert driver.state.disk is not None
    assert driver.state.disk.n_failed == 2
    assert driver.complete([*PROMPT, 8]).usage.cached_tokens == len(PROMPT)


def test_another_job_that_reads_the_same_does_not_read_it_twice_into_the_index() -> None:
    store = FakeStore(1 << 20)
    first = driver_with(store, Memory.FULL)
    first.complete(PROMPT, max_tokens=4)
    store_all(first)
    second = driver_with(store, Memory.FULL, n_polls=2)
    tickets = [second.submit([*PROMPT, 40 + i]) for i in range(2)]
    second.run()
    second.check_answers()
    assert [ticket.completion.usage.cached_tokens for ticket in tickets] == [len(PROMPT)] * 2
    second.state.audit()


def test_a_request_that_is_cancelled_while_it_is_read_leaves_no_lease() -> None:
    store = FakeStore(1 << 20)
    for memory in (Memory.FULL, Memory.HYBRID):
        first = driver_with(store, memory)
        first.complete(PROMPT, max_tokens=4)
        store_all(first)
        second = driver_with(store, memory, n_polls=10**6)
        ticket = second.submit([*PROMPT, 9])
        second._admit()
        assert second.state.running[0].restore is not None
        ticket.cancel()
        second.run()
        second.state.audit()
        assert ticket.completion.finish_reason == "cancelled"
        assert ticket.completion.usage.cached_tokens == ticket.completion.usage.prompt_tokens
        store.entries.clear()
