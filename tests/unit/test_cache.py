"""`Engine.cache` over a tiny hybrid model: what it shows, what can be asked of it, and when it refuses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import FrozenInstanceError
from typing import Any

import numpy as np
import pytest

from pyllamacache import CacheConfig
from pyllamacache.cache import Cache
from pyllamacache.config import CacheBudget
from pyllamacache.errors import ClosedError, ConfigError, ForkedError, InvalidRequestError
from pyllamacache.request import CheckpointKind

NewEngine = Callable[..., Any]
IDS = np.random.default_rng(7).integers(0, 200, 300, dtype=np.int32)
PROMPT, OTHER = IDS[:100], IDS[100:200]
USES: list[Callable[[Cache], object]] = [
    lambda cache: cache.entries(),
    len,
    lambda cache: cache.size_bytes,
    lambda cache: cache.resident_bytes,
    lambda cache: cache.budget,
    lambda cache: cache.limit(CacheConfig()),
    lambda cache: cache.clear(),
    lambda cache: cache.clear("a"),
]


@pytest.fixture
def engine(new_engine: NewEngine) -> Any:
    return new_engine("hybrid", cache=CacheConfig(max_checkpoints=16, host_bytes="32MiB"))


def test_an_engine_that_did_nothing_keeps_nothing(engine: Any) -> None:
    cache = engine.cache
    assert cache.entries() == ()
    assert (len(cache), cache.size_bytes, cache.resident_bytes) == (0, 0, 0)
    assert cache.budget == CacheBudget(16, 32 << 20, 32 << 20)
    assert cache.clear() == 0


def test_entries_tell_where_each_lies_what_it_is_and_who_holds_it(engine: Any) -> None:
    engine.complete(PROMPT, max_tokens=4, slot=1, namespace="b", boundaries=[50])
    engine.complete(OTHER, max_tokens=4, slot=0, namespace="a")
    engine.complete(np.append(PROMPT[:60], 5), max_tokens=1, slot=1, namespace="b")
    entries = engine.cache.entries()
    assert [entry.namespace for entry in entries] == sorted(entry.namespace for entry in entries)
    mine = [entry for entry in entries if entry.namespace == "b"]
    assert [entry.position for entry in mine] == sorted({entry.position for entry in mine})
    by_position = {entry.position: entry for entry in mine}
    assert by_position[50].kind is CheckpointKind.BOUNDARY
    assert by_position[50].hits == 1
    assert by_position[50].slots == (1,)
    assert by_position[96].kind is CheckpointKind.TAIL
    assert by_position[96].slots == ()
    assert by_position[96].hits == 0
    assert all(entry.is_ready for entry in entries)
    assert all(0 <= entry.age_s < 1000 for entry in entries)
    assert by_position[50].age_s >= by_position[60].age_s
    assert all(entry.slots == (0,) for entry in entries if entry.namespace == "a")
    assert engine.slots[1].checkpoints == tuple(entry.position for entry in mine if entry.slots == (1,))


def test_an_entry_is_a_value_that_does_not_change(engine: Any) -> None:
    engine.complete(PROMPT, max_tokens=4)
    entry = engine.cache.entries()[0]
    with pytest.raises(FrozenInstanceError):
        entry.hits = 5
    before = entry.hits
    engine.complete(np.append(PROMPT[: entry.position], 5), max_tokens=1)
    assert entry.hits == before
    assert str(entry).count("namespace=''") == 1


def test_sizes_add_up_and_stay_within_the_budget(engine: Any) -> None:
    engine.complete(PROMPT, max_tokens=4)
    cache = engine.cache
    entries = cache.entries()
    assert len(cache) == len(entries) > 2
    assert cache.size_bytes == sum(entry.n_bytes for entry in entries)
    assert all(entry.n_bytes > 0 for entry in entries)
    assert cache.size_bytes <= cache.resident_bytes <= cache.budget.host_bytes
    counts = engine.statistics().checkpoints
    assert (counts.held, counts.held_bytes) == (len(cache), cache.size_bytes)


def test_a_lower_limit_gives_up_what_does_not_fit_and_a_higher_one_gives_room_again(engine: Any) -> None:
    engine.complete(PROMPT, max_tokens=4)
    cache = engine.cache
    one = cache.entries()[0].n_bytes
    cache.limit(CacheConfig(max_checkpoints=2))
    assert len(cache) == 2
    cache.limit(CacheConfig(max_checkpoints=16, checkpoint_bytes=one))
    assert (len(cache), cache.size_bytes) == (1, one)
    assert cache.budget.checkpoint_bytes == one
    cache.limit(CacheConfig(max_checkpoints=0))
    assert (len(cache), cache.size_bytes, cache.resident_bytes) == (0, 0, 0)
    engine.complete(OTHER, max_tokens=4)
    assert len(cache) == 0
    cache.limit(CacheConfig(max_checkpoints=16))
    engine.complete(np.append(OTHER, 1), max_tokens=4)
    assert len(cache) > 0
    assert engine.statistics().checkpoints.evicted["cleared"] >= 3


def test_memory_really_goes_back_when_the_limit_is_lowered(engine: Any) -> None:
    engine.complete(PROMPT, max_tokens=4)
    cache = engine.cache
    one = cache.entries()[0].n_bytes
    cache.limit(CacheConfig(host_bytes=2 * one + 8192))
    assert 0 < len(cache) <= 2
    assert cache.resident_bytes <= 2 * one + 8192


@pytest.mark.parametrize("config", [None, 5, {"max_checkpoints": 3}, CacheBudget(1, 1, 1), CacheConfig])
def test_a_limit_that_is_none_is_refused_and_changes_nothing(config: Any, engine: Any) -> None:
    before = engine.cache.budget
    with pytest.raises(ConfigError, match="CacheConfig") as caught:
        engine.cache.limit(config)
    assert caught.value.field == "config"
    assert engine.cache.budget == before


def test_a_namespace_is_cleared_alone_and_slots_keep_what_they_hold(engine: Any) -> None:
    engine.complete(PROMPT, max_tokens=4, namespace="a", slot=0)
    engine.complete(PROMPT, max_tokens=4, namespace="b", slot=1)
    cache, held = engine.cache, [slot.token_ids for slot in engine.slots]
    n = len(cache)
    assert cache.clear("a") == n // 2
    assert {entry.namespace for entry in cache.entries()} == {"b"}
    assert cache.clear("a") == cache.clear("nobody's") == cache.clear("") == 0
    assert [slot.token_ids for slot in engine.slots] == held
    assert cache.clear() == n - n // 2
    assert cache.entries() == ()
    assert engine.statistics().checkpoints.held == 0


@pytest.mark.parametrize("namespace", [5, b"a", "\ud800", ["a"]])
def test_a_namespace_that_is_none_is_refused(namespace: Any, engine: Any) -> None:
    engine.complete(PROMPT, max_tokens=1)
    with pytest.raises(InvalidRequestError, match="namespace"):
        engine.cache.clear(namespace)
    assert len(engine.cache) > 0


def test_a_view_says_of_what(engine: Any) -> None:
    assert repr(engine.cache) == f"<Cache of {engine!r}>"
    engine.close()
    assert "closed" in repr(engine.cache)


def test_the_cache_of_a_closed_engine_refuses(engine: Any) -> None:
    cache = engine.cache
    engine.complete(PROMPT, max_tokens=1)
    engine.close()
    for use in USES:
        with pytest.raises(ClosedError):
            use(cache)


def test_after_a_fork_the_child_is_told(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine.complete(PROMPT, max_tokens=1)
    cache = engine.cache
    with monkeypatch.context() as child:
        child.setattr(engine, "_pid", -1)
        for use in USES:
            with pytest.raises(ForkedError):
                use(cache)
    assert len(cache) > 0


def test_an_engine_takes_a_config_and_nothing_else(new_engine: NewEngine) -> None:
    with pytest.raises(ConfigError, match="cache"):
        new_engine("hybrid", cache={"max_checkpoints": 3})
    off = new_engine("hybrid", cache=CacheConfig(max_checkpoints=0))
    off.complete(PROMPT, max_tokens=2)
    assert len(off.cache) == off.cache.resident_bytes == 0


def test_memory_that_can_be_cut_anywhere_keeps_none(new_engine: NewEngine) -> None:
    engine = new_engine("full")
    engine.complete(PROMPT, max_tokens=2, boundaries=[50])
    assert (len(engine.cache), engine.cache.resident_bytes) == (0, 0)
    assert engine.slots[0].checkpoints == ()
