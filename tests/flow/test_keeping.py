"""Pins, priorities, times to live, what `plan` says, and what `clear` leaves: in every tier."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pyllamacache import CacheConfig
from pyllamacache.errors import ConfigError, InvalidRequestError
from tests.flow.law import Pair, joined, random_ids

NewPair = Callable[..., Pair]
NewEngine = Callable[..., Any]
EVERY_KIND = pytest.mark.parametrize("kind", ["full", "sliding", "hybrid", "recurrent"])
WITH_CELLS = pytest.mark.parametrize("kind", ["full", "sliding", "hybrid"])

HEADER, TALK = random_ids(1, 300), random_ids(2, 60)


def audit(engine: Any) -> None:
    engine._scheduler.inbox.call(engine._state.audit)


def flood(engine: Any, n: int = 6, n_tokens: int = 700) -> None:
    """Conversations that need all there is."""
    for i in range(n):
        engine.complete(random_ids(100 + i, n_tokens), max_tokens=2)
    audit(engine)


# ---- plan --------------------------------------------------------------------------------------------------------


@EVERY_KIND
@pytest.mark.parametrize("exact", [False, True], ids=["default", "exact"])
def test_a_plan_says_what_the_request_then_does(kind: str, exact: bool, new_engine: NewEngine, tmp_path: Path) -> None:
    cache = CacheConfig(disk_dir=tmp_path)
    engine = new_engine(kind, exact=exact, cache=cache)
    prompts = [joined(HEADER, TALK), joined(HEADER, TALK, TALK), joined(HEADER, TALK[::-1]), HEADER, TALK]
    for attempt in range(2):
        for ids in prompts:
            planned = engine.plan(ids, boundaries=[len(HEADER)])
            assert engine.plan(ids) == planned or math.isnan(planned.expected_s), "asking changed something"
            reply = engine.complete(ids, max_tokens=2, boundaries=[len(HEADER)] if len(ids) > len(HEADER) else ())
            assert planned.resumable_tokens == reply.usage.cached_tokens
            assert (planned.matched_tokens, planned.reason) == (reply.cache.matched_tokens, reply.cache.reason)
            assert planned.source == reply.cache.source
            assert planned.prefill_tokens + planned.resumable_tokens == len(ids)
            assert not planned.must_wait
        if not attempt:
            engine.close()
            engine = new_engine(kind, exact=exact, cache=cache)


def test_a_plan_counts_the_bytes_that_have_to_move(new_engine: NewEngine) -> None:
    engine = new_engine("hybrid", n_slots=1)
    engine.complete(joined(HEADER, TALK), max_tokens=4, boundaries=[len(HEADER)])
    live = engine.plan(joined(HEADER, TALK, TALK))
    assert live.restore_bytes == 0 or live.source != "slot"
    branch = engine.plan(joined(HEADER, TALK[::-1]))
    (state,) = [entry for entry in engine.cache.entries() if entry.position == len(HEADER)]
    assert (branch.source, branch.restore_bytes) == ("checkpoint", state.n_bytes)
    assert branch.expected_s > 0


def test_a_plan_for_a_busy_engine_says_that_it_has_to_wait(new_engine: NewEngine) -> None:
    engine = new_engine("full", n_slots=1)
    handle = engine.submit(joined(HEADER, TALK), max_tokens=600)
    chunks = iter(handle)  # which cancels the request when it is dropped
    next(chunks)
    planned = engine.plan(joined(HEADER, TALK[::-1]))
    assert planned.must_wait
    assert planned.resumable_tokens == len(HEADER)
    handle.cancel()
    handle.result()


@pytest.mark.parametrize("kind", ["full", "hybrid"])
def test_what_takes_longer_to_fetch_than_to_compute_is_computed(
    kind: str, new_engine: NewEngine, tmp_path: Path
) -> None:
    cache = CacheConfig(disk_dir=tmp_path)
    engine = new_engine(kind, cache=cache)
    engine.complete(joined(HEADER, TALK), max_tokens=2)
    engine.close()
    engine = new_engine(kind, cache=cache)
    prompt = joined(HEADER, TALK, TALK)
    assert engine.plan(prompt).source == "disk"
    rates = engine._state.checkpoints.rates
    rates.prefilled(1000, 1.0)
    rates.loaded("disk", 1000, 3600.0)
    slow = engine.plan(prompt)
    assert (slow.source, slow.resumable_tokens) == ("none", 0)
    assert slow.expected_s == pytest.approx(len(prompt) / 1000)
    for _ in range(40):
        rates.loaded("disk", 1 << 30, 1.0)
    fast = engine.plan(prompt)
    assert fast.source == "disk"
    assert fast.expected_s < slow.expected_s


def test_a_plan_refuses_what_a_request_would_refuse(new_engine: NewEngine) -> None:
    engine = new_engine("full")
    with pytest.raises(InvalidRequestError):
        engine.plan([])


# ---- pins --------------------------------------------------------------------------------------------------------


@EVERY_KIND
def test_a_pinned_prefix_outlives_a_flood_and_an_unpinned_one_does_not(kind: str, new_pair: NewPair) -> None:
    small = {"n_slots": 1, "kv_tokens": 1024, "cache": CacheConfig(max_checkpoints=6, host_bytes=2 << 20)}
    pair = new_pair(kind, **small)
    pair.warm.warm(joined(HEADER, TALK), boundaries=[len(HEADER)])
    n_pinned = pair.warm.cache.pin(HEADER)
    assert n_pinned == len(HEADER)
    flood(pair.warm)
    reply = pair.ask(joined(HEADER, TALK[::-1]), max_tokens=2)
    assert reply.usage.cached_tokens == len(HEADER), reply.cache
    assert pair.warm.cache.unpin(HEADER)
    assert not pair.warm.cache.unpin(HEADER)
    pair.warm.slots[0].erase()
    flood(pair.warm, n=8)
    audit(pair.warm)
    gone = pair.ask(joined(HEADER, TALK[::-1], TALK), max_tokens=2)
    assert gone.usage.cached_tokens < len(HEADER)


def test_pinning_what_is_not_held_says_so(new_engine: NewEngine) -> None:
    engine = new_engine("full")
    assert engine.cache.pin(HEADER) == 0
    assert engine.cache.unpin(HEADER)


@WITH_CELLS
def test_a_running_request_comes_before_a_pin_on_the_device(kind: str, new_pair: NewPair) -> None:
    pair = new_pair(kind, n_slots=1, kv_tokens=1024)
    pair.warm.warm(joined(HEADER, TALK), boundaries=[len(HEADER)])
    pair.warm.cache.pin(HEADER)
    pair.ask(random_ids(7, 1000), max_tokens=4)
    audit(pair.warm)
    reply = pair.ask(joined(HEADER, TALK[::-1]), max_tokens=2)
    assert reply.usage.cached_tokens == len(HEADER), "what it took on the device went to host memory"


# ---- priority, time to live ----------------------------------------------------------------------------------------


@EVERY_KIND
def test_what_a_request_of_low_priority_leaves_goes_first(kind: str, new_engine: NewEngine) -> None:
    engine = new_engine(kind, n_slots=1, kv_tokens=1400, cache=CacheConfig(max_checkpoints=8, host_bytes=0))
    if kind == "recurrent":
        engine = new_engine(kind, n_slots=1, cache=CacheConfig(max_checkpoints=8))
    precious, cheap = random_ids(3, 500), random_ids(4, 500)
    engine.complete(precious, max_tokens=1, priority=10)
    engine.complete(cheap, max_tokens=1, priority=-10)
    engine.complete(random_ids(5, 700), max_tokens=1)
    engine.complete(random_ids(6, 200), max_tokens=1)
    audit(engine)
    kept = {name: engine.plan(ids).resumable_tokens for name, ids in (("precious", precious), ("cheap", cheap))}
    assert kept["precious"] >= kept["cheap"]
    if kind == "full":
        assert kept["precious"] == 499


@EVERY_KIND
def test_what_has_outlived_its_time_is_gone_from_every_tier(kind: str, new_engine: NewEngine, tmp_path: Path) -> None:
    engine = new_engine(kind, cache=CacheConfig(disk_dir=tmp_path))
    now = engine._state.clock()
    engine._state.clock = lambda: now
    engine.complete(joined(HEADER, TALK), max_tokens=2, ttl_s=60.0)
    engine.complete(random_ids(9, 300), max_tokens=2)
    assert engine.plan(joined(HEADER, TALK, TALK)).resumable_tokens > 0
    engine._state.clock = lambda: now + 61.0
    gone = engine.plan(joined(HEADER, TALK, TALK))
    assert (gone.matched_tokens, gone.reason) == (0, "cold")
    assert engine.plan(random_ids(9, 300)).resumable_tokens > 0
    audit(engine)


def test_a_later_use_without_an_end_keeps_it(new_engine: NewEngine) -> None:
    engine = new_engine("hybrid")
    now = engine._state.clock()
    engine._state.clock = lambda: now
    first = engine.complete(joined(HEADER, TALK), max_tokens=2, ttl_s=60.0)
    engine.complete(joined(HEADER, TALK, first.token_ids, TALK), max_tokens=2)
    engine._state.clock = lambda: now + 61.0
    assert engine.plan(joined(HEADER, TALK, first.token_ids, TALK)).resumable_tokens > 300


@pytest.mark.parametrize(("field", "value"), [("priority", 101), ("priority", "high"), ("ttl_s", 0), ("ttl_s", -1.0)])
def test_keeping_options_out_of_range_are_refused(field: str, value: object, new_engine: NewEngine) -> None:
    with pytest.raises(InvalidRequestError, match=field):
        new_engine("full").complete(HEADER, **{field: value})


# ---- clear, limits -------------------------------------------------------------------------------------------------


@EVERY_KIND
def test_clearing_a_namespace_leaves_nothing_of_it_and_everything_of_others(
    kind: str, new_engine: NewEngine, tmp_path: Path
) -> None:
    engine = new_engine(kind, cache=CacheConfig(disk_dir=tmp_path))
    for namespace in ("a", "b"):
        for i in range(3):
            engine.complete(joined(HEADER, random_ids(i, 50)), max_tokens=2, namespace=namespace)
    engine.cache.pin(HEADER, namespace="a")
    assert engine.cache.clear("a") > 0
    for slot in engine.slots:
        slot.erase()
    audit(engine)
    prompt = joined(HEADER, random_ids(0, 50), TALK)
    assert engine.plan(prompt, namespace="a").matched_tokens == 0
    assert engine.plan(prompt, namespace="b").resumable_tokens > 0
    assert {each.namespace for each in engine.cache.prefixes()} <= {"b"}
    engine.cache.clear()
    audit(engine)
    assert engine.plan(prompt, namespace="b").matched_tokens == 0
    assert engine.cache.prefixes() == () == engine.cache.entries()


def test_a_namespace_has_no_more_than_its_share(new_engine: NewEngine) -> None:
    share = 1 << 20
    cache = CacheConfig(namespace_bytes=share, host_bytes="16MiB")
    engine = new_engine("hybrid", n_slots=1, exact=True, cache=cache)
    engine.complete(HEADER, max_tokens=1, namespace="quiet")
    engine.complete(TALK, max_tokens=1, namespace="quiet")
    before = engine.plan(joined(HEADER, TALK), namespace="quiet")
    assert before.resumable_tokens > 0
    for i in range(8):
        engine.complete(random_ids(50 + i, 700), max_tokens=1, namespace="loud")
        used = engine._scheduler.inbox.call(lambda: dict(engine._state.room._used))
        assert used.get("loud", 0) <= share
    audit(engine)
    after = engine.plan(joined(HEADER, TALK), namespace="quiet")
    assert after.resumable_tokens == before.resumable_tokens


@WITH_CELLS
def test_without_parking_what_leaves_a_slot_goes_to_host_memory(kind: str, new_pair: NewPair) -> None:
    pair = new_pair(kind, n_slots=1, cache=CacheConfig(max_parked=0))
    first = pair.ask(joined(HEADER, TALK), max_tokens=2)
    pair.ask(random_ids(8, 200), max_tokens=2)
    assert pair.warm.statistics().tiers.parked == 0
    back = pair.ask(joined(HEADER, TALK, first.token_ids[:-1], TALK), max_tokens=2)
    assert back.cache.source == "host"
    assert back.cache.prefilled_tokens == len(TALK)
    audit(pair.warm)


@WITH_CELLS
def test_fewer_may_be_parked_later_and_none_at_all(kind: str, new_pair: NewPair) -> None:
    pair = new_pair(kind, n_slots=1)
    for i in range(5):
        pair.ask(random_ids(20 + i, 100), max_tokens=1)
    assert pair.warm.statistics().tiers.parked == 4
    for limit in (2, 0):
        pair.warm.cache.limit(CacheConfig(max_parked=limit))
        assert pair.warm.statistics().tiers.parked == limit
        audit(pair.warm)
        pair.ask(random_ids(30 + limit, 100), max_tokens=1)
        assert pair.warm.statistics().tiers.parked == limit


def test_the_folder_cannot_be_changed_and_its_budget_can(new_engine: NewEngine, tmp_path: Path) -> None:
    engine = new_engine("full", cache=CacheConfig(disk_dir=tmp_path / "one"))
    with pytest.raises(ConfigError, match="disk_dir"):
        engine.cache.limit(CacheConfig(disk_dir=tmp_path / "two"))
    engine.cache.limit(CacheConfig(disk_dir=tmp_path / "one", disk_bytes=4096))
    engine.complete(random_ids(1, 600), max_tokens=1)
    engine.close()
    assert sum(path.stat().st_size for path in (tmp_path / "one").rglob("*.safetensors")) <= 4096
