"""Where an engine takes checkpoints, and what is to be seen of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pyllamacache import CacheConfig
from pyllamacache.errors import InvalidRequestError
from tests.flow.checkpoints import by_kind, check_budget, positions
from tests.flow.law import Pair, joined, random_ids

STATEFUL = ["hybrid", "recurrent"]
WITH_STATE = ["sliding", *STATEFUL]

NewPair = Callable[..., Pair]
NewEngine = Callable[..., Any]


# ---- where -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", WITH_STATE)
def test_a_prompt_gets_an_anchor_a_tail_an_end_and_free_periodic_ones(kind: str, new_engine: NewEngine) -> None:
    engine = new_engine(kind)
    engine.complete(random_ids(1, 300), max_tokens=8)
    assert by_kind(engine) == {"periodic": [128], "anchor": [256], "tail": [296], "end": [307]}
    assert engine.slots[0].checkpoints == (128, 256, 296, 307)


@pytest.mark.parametrize("kind", STATEFUL)
def test_exact_mode_takes_them_on_the_grid_and_none_of_replies(kind: str, new_engine: NewEngine) -> None:
    engine = new_engine(kind, exact=True)
    engine.complete(random_ids(2, 300), max_tokens=100, boundaries=[70, 250])
    assert positions(engine) == [64, 128, 224, 256, 288]
    assert not {"end", "rolling"} & by_kind(engine).keys()


def test_exact_mode_takes_none_of_a_window(new_engine: NewEngine) -> None:
    """It keeps the whole window instead; put back, window cells would lie in another order."""
    engine = new_engine("sliding", exact=True)
    engine.complete(random_ids(3, 300), max_tokens=8, boundaries=[100])
    assert positions(engine) == []
    assert engine.statistics().checkpoints.captured == {}


@pytest.mark.parametrize("kind", ["full", *WITH_STATE])
def test_without_store_or_budget_none_are_taken(kind: str, new_engine: NewEngine) -> None:
    for cache, store in ((None, False), (CacheConfig(max_checkpoints=0), True)):
        engine = new_engine(kind, cache=cache)
        engine.complete(random_ids(4, 300), max_tokens=100, boundaries=[100], store=store)
        assert (len(engine.cache), engine.cache.size_bytes) == (0, 0)
        assert engine.statistics().checkpoints.captured == {}
        assert store is False or engine.cache.resident_bytes == 0


def test_dense_memory_needs_none(new_engine: NewEngine) -> None:
    engine = new_engine("full")
    engine.complete(random_ids(5, 300), max_tokens=8, boundaries=[100])
    assert positions(engine) == []


@pytest.mark.parametrize("kind", WITH_STATE)
@pytest.mark.parametrize("max_tokens", [0, 8])
def test_an_identical_prompt_takes_no_second_capture(kind: str, max_tokens: int, new_pair: NewPair) -> None:
    pair = new_pair(kind, n_slots=1)
    ids = random_ids(6, 300)
    pair.ask(ids, max_tokens=max_tokens, boundaries=[150])
    captured, kinds = pair.warm.statistics().checkpoints.captured, by_kind(pair.warm)
    for _ in range(2):
        pair.ask(ids, max_tokens=max_tokens, boundaries=[150])
        assert pair.warm.statistics().checkpoints.captured == captured
        assert by_kind(pair.warm) == kinds


@pytest.mark.parametrize("kind", WITH_STATE)
def test_where_a_prompt_leaves_another_one_is_taken_in_the_prefill_that_finds_it(kind: str, new_pair: NewPair) -> None:
    pair = new_pair(kind, n_slots=4)
    header = random_ids(7, 200)
    pair.ask(joined(header, random_ids(8, 300)))
    first = pair.ask(joined(header, random_ids(9, 60)))
    assert first.usage.cached_tokens == (200 if kind == "sliding" else 128) or first.cache.source.value == "checkpoint"
    assert by_kind(pair.warm)["branch"] == [200]
    second = pair.ask(joined(header, random_ids(10, 60)))
    assert (second.usage.cached_tokens, second.cache.reason.value) == (200, "diverged")
    assert by_kind(pair.warm)["branch"] == [200]


# ---- boundaries ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", WITH_STATE)
def test_boundaries_are_token_offsets(kind: str, new_pair: NewPair) -> None:
    pair = new_pair(kind)
    ids = random_ids(11, 300)
    pair.ask(ids, boundaries=[10, 150, 150, 299])
    assert by_kind(pair.warm)["boundary"] == [10, 150, 299]
    for position in (150, 10):
        reply = pair.ask(joined(ids[:position], random_ids(12, 20)), slot=1)
        assert (reply.usage.cached_tokens, reply.cache.source.value) == (position, "checkpoint")


@pytest.mark.parametrize("kind", WITH_STATE)
def test_boundaries_are_texts_before_which_a_message_begins(kind: str, new_engine: NewEngine) -> None:
    engine = new_engine(kind, n_ubatch=16)
    system = "You are helpful. " * 5
    text = system + "<user>What is this about?" + "<bot>It is about nothing much." * 3 + "<user>Is it?"
    marks = [system, text[: text.rindex("<user>")]]
    engine.complete(text, max_tokens=2, boundaries=["<user>"])
    expected = []
    tokens = engine.model.tokenize(text)
    for head in marks:
        n = len(engine.model.tokenize(head))
        while tokens[:n] != engine.model.tokenize(head)[:n]:
            n -= 1
        expected.append(n)
    assert by_kind(engine)["boundary"] == expected
    other = system + "<user>Something else entirely."
    reply = engine.complete(other, max_tokens=2, slot=1)
    assert reply.usage.cached_tokens == expected[0]


@pytest.mark.parametrize("boundaries", [[-1], [2.5], [True], [b"x"], [None], "<user>", 7, [""]])
def test_other_boundaries_are_refused(boundaries: Any, new_engine: NewEngine) -> None:
    with pytest.raises(InvalidRequestError, match="boundaries"):
        new_engine("hybrid").complete("Some text", boundaries=boundaries)


def test_a_text_marks_no_place_in_token_ids(new_engine: NewEngine) -> None:
    with pytest.raises(InvalidRequestError, match="boundaries"):
        new_engine("hybrid").complete([1, 2, 3], boundaries=["<user>"])


# ---- replies ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", STATEFUL)
@pytest.mark.parametrize("n_reply", [190, 200, 250])
def test_a_long_reply_trimmed_by_a_token_costs_no_more_than_its_last_part(
    kind: str, n_reply: int, new_pair: NewPair
) -> None:
    pair = new_pair(kind)
    ids = random_ids(13, 100)
    reply = pair.warm.complete(ids, max_tokens=n_reply)
    trimmed = pair.ask(joined(ids, reply.token_ids[:-2], random_ids(14, 10)))
    assert trimmed.cache.prefilled_tokens <= 10 + 64
    assert trimmed.usage.cached_tokens > 100
    assert len(by_kind(pair.warm).get("rolling", [])) <= 2
    check_budget(pair.warm)


@pytest.mark.parametrize("kind", STATEFUL)
def test_a_reply_that_ends_on_its_rolling_checkpoint_can_be_trimmed_too(kind: str, new_pair: NewPair) -> None:
    pair = new_pair(kind)
    ids = random_ids(15, 100)
    reply = pair.warm.complete(ids, max_tokens=193)
    trimmed = pair.ask(joined(ids, reply.token_ids[:-2], random_ids(16, 10)))
    assert trimmed.cache.prefilled_tokens <= 10 + 64 + 4


@pytest.mark.parametrize("kind", STATEFUL)
def test_a_cancelled_reply_leaves_an_end_to_go_on_from(kind: str, new_pair: NewPair) -> None:
    pair = new_pair(kind)
    ids = random_ids(17, 100)
    tokens = []
    for chunk in pair.warm.stream(ids, max_tokens=300):
        tokens += chunk.token_ids
        if len(tokens) == 20:
            break
    n_held = pair.warm.slots[0].n_tokens
    assert by_kind(pair.warm)["end"] == [n_held]
    assert pair.ask(joined(ids, tokens, [3])).usage.cached_tokens >= 100 - 4


# ---- what is to be seen ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", WITH_STATE)
def test_entries_statistics_and_slots_tell_the_same(kind: str, new_engine: NewEngine) -> None:
    engine = new_engine(kind)
    ids = random_ids(18, 300)
    engine.complete(ids, max_tokens=8, namespace="a")
    engine.complete(random_ids(19, 200), max_tokens=8, namespace="b")
    engine.complete(joined(ids[:256], [5, 6]), max_tokens=0, namespace="a", slot=1)
    entries, counts = engine.cache.entries(), engine.statistics().checkpoints
    assert counts.held == len(entries) == sum(counts.captured.values())
    assert counts.restored == sum(entry.hits for entry in entries) == 1
    (used,) = [entry for entry in entries if entry.hits]
    assert (used.namespace, used.position, used.slots) == ("a", 256, (0, 1))
    assert all(entry.is_ready and entry.age_s >= 0 and entry.n_bytes > 0 for entry in entries)
    assert {entry.slots for entry in entries if entry.namespace == "b"} <= {(), (1,)}
    for slot in engine.slots:
        held = [entry.position for entry in entries if slot.id in entry.slots]
        assert list(slot.checkpoints) == held
    assert engine.cache.clear("a") == sum(entry.namespace == "a" for entry in entries)
    assert {entry.namespace for entry in engine.cache.entries()} == {"b"}
    check_budget(engine)


@pytest.mark.parametrize("kind", STATEFUL)
def test_a_namespace_resumes_from_no_checkpoint_of_another(kind: str, new_pair: NewPair) -> None:
    pair = new_pair(kind, n_slots=3)
    ids = random_ids(20, 300)
    pair.ask(ids, namespace="a")
    stranger = pair.ask(joined(ids[:290], [1, 2]), namespace="b")
    assert (stranger.usage.cached_tokens, stranger.cache.reason.value) == (0, "cold")
    assert pair.ask(joined(ids[:260], [1, 2]), namespace="a").usage.cached_tokens == 256


@pytest.mark.parametrize("kind", STATEFUL)
def test_a_miss_says_that_the_checkpoint_was_evicted_and_where(kind: str, new_pair: NewPair) -> None:
    pair = new_pair(kind, n_slots=1, cache=CacheConfig(max_checkpoints=2))
    ids = random_ids(21, 300)
    pair.ask(ids, boundaries=[200])
    assert positions(pair.warm) == [200, 303]  # the first and the newest
    reply = pair.ask(joined(ids[:298], [1, 2]))
    assert (reply.usage.cached_tokens, reply.cache.matched_tokens) == (200, 298)
    assert (reply.cache.reason.value, reply.cache.position) == ("evicted", 296)


def test_whatever_goes_wrong_with_the_last_checkpoint_the_caller_hears_of_it(new_engine: NewEngine) -> None:
    engine = new_engine("hybrid")

    def fail(*_: Any) -> None:
        raise RuntimeError("planted")

    engine._state.checkpoints.take = fail
    with pytest.raises(Exception, match="planted"):
        engine.submit(random_ids(22, 3), max_tokens=2).result(timeout=1.0)
