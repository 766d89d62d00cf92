"""Pins, priorities, times to live, what `plan` says, and what `clear` leaves: in every tier."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pyllamacache import CacheConfig
from pyllamacache.errors import ConfigError, InvalidRequestError, RequestTimeoutError, UnknownOptionError
from pyllamacache.prefix.budget import Retention
from tests.flow.law import Pair, joined, random_ids
from tests.flow.tiers import entry_files, store_behind

NewPair = Callable[..., Pair]
NewEngine = Callable[..., Any]
EVERY_KIND = pytest.mark.parametrize("kind", ["full", "sliding", "hybrid", "recurrent"])
WITH_CELLS = pytest.mark.parametrize("kind", ["full", "sliding", "hybrid"])

HEADER, TALK = random_ids(1, 300), random_ids(2, 60)


def audit(engine: Any) -> None:
    engine._scheduler.inbox.call(engine._state.audit)


def flood(engine: Any, n: int = 4, n_tokens: int = 700) -> None:
    """Conversations that need all there is."""
    for i in range(n):
        engine.complete(random_ids(100 + i, n_tokens), max_tokens=2)
    audit(engine)


def written(engine: Any) -> None:
    """Everything that is on its way to the disk is there."""
    store_behind(engine)
    engine._state.disk._writer.submit(lambda: None).result()


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
    flood(pair.warm, n=6)
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
    assert sum(path.stat().st_size for path in entry_files(tmp_path / "one")) <= 4096


# ---- what an outsider found ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["full", "hybrid"])
def test_one_namespace_gives_up_by_worth_and_nothing_of_a_higher_priority(
    kind: str, new_engine: NewEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    choose = Retention.victim

    def counted(self: Retention, *args: Any, **options: Any) -> Any:
        asked.append(1)
        return choose(self, *args, **options)

    monkeypatch.setattr(Retention, "victim", counted)
    cache = CacheConfig(max_parked=0, max_checkpoints=64, host_bytes="6MiB")
    engine = new_engine(kind, n_slots=1, cache=cache)
    precious = random_ids(3, 500)
    engine.complete(precious, max_tokens=1, priority=50)
    flood(engine, n=10)
    assert asked
    assert engine.plan(joined(precious, TALK)).resumable_tokens >= 496


@EVERY_KIND
def test_what_has_outlived_its_time_leaves_no_file(kind: str, new_engine: NewEngine, tmp_path: Path) -> None:
    now = [1000.0]
    cache = CacheConfig(disk_dir=tmp_path / "cache")
    engine = new_engine(kind, cache=cache)
    engine._store._clock = engine._state.clock = lambda: now[0]
    engine._state.disk._clock = engine._state.disk._wall_clock = lambda: now[0]
    engine.complete(joined(HEADER, TALK), max_tokens=2, ttl_s=60.0, namespace="secret")
    engine.complete(joined(HEADER, TALK), max_tokens=2)
    written(engine)
    stored = engine._store.scan()[0]
    assert {entry.namespace for entry in stored} == {"", "secret"}
    n_kept = sum(entry.namespace == "" for entry in stored)
    now[0] += 61.0
    engine.plan(TALK)
    engine.close()
    assert len(entry_files(tmp_path / "cache")) == n_kept


@WITH_CELLS
def test_a_pin_reaches_the_disk_and_goes_with_the_engine(kind: str, new_engine: NewEngine, tmp_path: Path) -> None:
    cache = CacheConfig(disk_dir=tmp_path / "cache")
    engine = new_engine(kind, cache=cache)
    engine.cache.pin(HEADER)
    engine.warm(joined(HEADER, TALK), boundaries=[len(HEADER)])
    engine.cache.pin(HEADER)
    written(engine)
    assert any(each.is_pinned for each in engine.cache.prefixes() if each.tier == "disk")
    assert any(entry.is_pinned for entry in engine._store.scan()[0])
    assert engine.cache.unpin(HEADER)
    assert engine.cache.unpin(HEADER)
    written(engine)
    assert not any(entry.is_pinned for entry in engine._store.scan()[0])
    engine.cache.pin(HEADER)
    engine.close()
    again = new_engine(kind, cache=cache)
    assert not any(entry.is_pinned for entry in again._store.scan()[0])


def test_a_pin_that_nobody_took_back_can_be_taken_back_later(new_engine: NewEngine, tmp_path: Path) -> None:
    """As after a process that was killed."""
    cache = CacheConfig(disk_dir=tmp_path / "cache")
    engine = new_engine("full", cache=cache)
    engine.warm(HEADER)
    engine.close()
    engine = new_engine("full", cache=cache)
    names = [(entry.kind, entry.key) for entry in engine._store.scan()[0]]
    engine._store.set_pinned(names, True)
    engine.close()
    engine = new_engine("full", cache=cache)
    assert engine.cache.unpin(HEADER)
    assert not engine.cache.unpin(HEADER)
    written(engine)
    assert not any(entry.is_pinned for entry in engine._store.scan()[0])


@EVERY_KIND
def test_a_lower_limit_takes_pinned_memory_too(kind: str, new_engine: NewEngine) -> None:
    engine = new_engine(kind, cache=CacheConfig(max_parked=0))
    engine.warm(joined(HEADER, TALK), boundaries=[len(HEADER)])
    store_behind(engine, even_if_unwanted=True)
    engine.cache.pin(HEADER)
    engine.cache.limit(CacheConfig(host_bytes=0))
    assert engine.cache.resident_bytes == 0
    audit(engine)


def test_a_lower_limit_of_the_disk_holds_at_once(new_engine: NewEngine, tmp_path: Path) -> None:
    engine = new_engine("full", cache=CacheConfig(disk_dir=tmp_path / "cache"))
    engine.complete(random_ids(1, 600), max_tokens=1)
    written(engine)
    assert engine._store.size_bytes > 1000
    engine.cache.limit(CacheConfig(disk_bytes=1000))
    engine.close()
    assert sum(path.stat().st_size for path in entry_files(tmp_path / "cache")) <= 1000


def test_tokens_of_failed_requests_are_counted_by_source_too(new_engine: NewEngine) -> None:
    engine = new_engine("full")
    engine.warm(HEADER)
    with pytest.raises(RequestTimeoutError):
        engine.complete(joined(HEADER, TALK), max_tokens=600, timeout_s=1e-9 + 0.02)
    statistics = engine.statistics()
    assert sum(statistics.cached_tokens_by_source.values()) == statistics.cached_tokens


def test_options_that_say_nothing_about_a_prefix_are_refused(new_engine: NewEngine) -> None:
    engine = new_engine("full")
    for call in (engine.cache.pin, engine.cache.unpin):
        with pytest.raises(UnknownOptionError):
            call(HEADER, priority=3)
    assert bool(engine.cache)
    with pytest.raises(ConfigError, match="no disk"):
        engine.cache.limit(CacheConfig(disk_dir="elsewhere"))
