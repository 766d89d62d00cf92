"""Taking and putting back states beside other work, and within a budget: theme 6 of the project's scenario list."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pyllamacache import CacheConfig
from tests.flow.checkpoints import STATE_BYTES, by_kind, check_budget, native_calls, positions, watch_peaks
from tests.flow.hold import held, on_chunk
from tests.flow.law import Pair, check_numbers, joined, random_ids
from tests.native.faults import damage, on_scheduler

STATEFUL = ["hybrid", "recurrent"]
WITH_STATE = ["sliding", *STATEFUL]
NONE = CacheConfig(max_checkpoints=0)

NewPair = Callable[..., Pair]
NewEngine = Callable[..., Any]


# ---- S59: native calls -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "exact"),
    [("sliding", False), ("hybrid", False), ("recurrent", False), ("hybrid", True)],
    ids=["sliding", "hybrid", "recurrent", "exact"],
)
def test_s59_sixty_messages_are_not_sixty_native_calls(kind: str, exact: bool, new_engine: NewEngine) -> None:
    """1500 tokens, a boundary before each message: at most one call more for each checkpoint that was taken."""
    ids, boundaries = random_ids(1, 1500), range(0, 1500, 25)
    options = {"n_ctx": 2048, "n_batch": 512, "n_ubatch": 512, "n_slots": 1, "exact": exact}
    plain, taking = new_engine(kind, cache=NONE, **options), new_engine(kind, **options)
    with native_calls(plain) as calls_off:
        plain.complete(ids, max_tokens=4)
    with native_calls(taking) as calls_on:
        taking.complete(ids, max_tokens=4, boundaries=boundaries)
    n_taken = len(taking.cache)
    assert len(calls_on) <= len(calls_off) + n_taken
    assert n_taken <= 10, by_kind(taking)
    if not exact:
        assert n_taken >= 4
    assert sum(calls_on) == sum(calls_off) == 1503
    with native_calls(taking) as calls_again:  # what is known is not cut for again
        taking.complete(ids, max_tokens=1, boundaries=boundaries)
    assert len(calls_again) <= 2


@pytest.mark.parametrize("kind", WITH_STATE)
def test_s59_periodic_checkpoints_cost_no_call_at_all(kind: str, new_engine: NewEngine) -> None:
    ids = random_ids(2, 900)
    plain, taking = new_engine(kind, cache=NONE), new_engine(kind)
    with native_calls(plain) as calls_off:
        plain.complete(ids, max_tokens=0)
    with native_calls(taking) as calls_on:
        taking.complete(ids, max_tokens=0)
    kinds = by_kind(taking)
    assert kinds["periodic"] == [128, 256, 384, 512, 640, 768]
    assert len(calls_on) <= len(calls_off) + len(kinds["anchor"]) + len(kinds["tail"])


# ---- S61: bytes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", WITH_STATE)
def test_s61_a_hundred_captures_and_restores_at_one_position_keep_every_byte(kind: str, new_engine: NewEngine) -> None:
    """A capture's bytes are those of a synchronous read at the same moment; a restored state gives the same again."""
    engine = new_engine(kind, n_slots=1)
    engine.complete(random_ids(3, 300), max_tokens=0)
    backend = engine._state.backend

    def pairs() -> None:
        size = backend.state_bytes(0)
        first = None
        for _ in range(100):
            data = np.full(size, 0xA5, dtype=np.uint8)
            capture = backend.begin_capture(0, data)
            assert capture.finish()
            assert data.tobytes() == bytes(damage(engine).read_state(0))
            first = data.copy() if first is None else first
            if kind != "sliding":  # window cells come back in another order of their ring
                assert np.array_equal(data, first)
            backend.resume(None, 0, 300, data)
            assert backend.length(0) == 300

    on_scheduler(engine, pairs)
    reply = engine.complete(joined(random_ids(3, 300), [5]), max_tokens=0, return_logits=True)
    assert reply.usage.cached_tokens == 300
    cold = new_engine(kind, n_slots=1, cache=NONE).complete(
        joined(random_ids(3, 300), [5]), max_tokens=0, return_logits=True
    )
    assert np.abs(reply.logits - cold.logits).max() < 1e-3


@pytest.mark.parametrize("kind", WITH_STATE)
def test_s61_a_hundred_requests_resume_from_one_checkpoint(kind: str, new_engine: NewEngine) -> None:
    engine = new_engine(kind, n_slots=1, cache=CacheConfig(max_checkpoints=4))
    ids = random_ids(4, 100)
    engine.complete(joined(ids, random_ids(5, 400)), max_tokens=0, boundaries=[100])
    answers = set()
    for number in range(50):
        asked = joined(ids, [number % 2, 3])
        reply = engine.complete(asked, max_tokens=2, store=number >= 48)
        check_numbers(asked, reply)
        answers.add((number % 2, reply.token_ids))
    assert len(answers) == 2
    check_budget(engine)


# ---- S62: beside other work ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", WITH_STATE)
def test_s62_other_slots_generate_while_states_come_and_go(kind: str, new_engine: NewEngine) -> None:
    """Two conversations take turns beside a long reply, which gets a token at every step and is what it is alone."""
    options = {"flash_attention": "off", "n_ctx": 2048}
    engine = new_engine(kind, n_slots=3, **options)
    alone = new_engine(kind, n_slots=1, cache=NONE, **options)
    long = random_ids(6, 30)
    talks = [random_ids(7, 300), random_ids(8, 300)]
    for ids in talks:
        engine.complete(ids, max_tokens=0)
    steps: list[int] = []
    with held(engine):
        neighbour = engine.submit(long, max_tokens=400)
        on_chunk(neighbour, lambda: steps.append(engine._state.n_steps))
        first = [engine.submit(joined(ids[:200], [1, 2]), max_tokens=2) for ids in talks]
    for handle in first:
        handle.result()
    n_restored = 0
    for number in range(6):
        asked = joined(talks[number % 2][: 290 - number], random_ids(20 + number, 8))
        reply = engine.complete(asked, max_tokens=2)
        check_numbers(asked, reply)
        n_restored += reply.cache.source.value == "checkpoint"
    assert not neighbour.done, "it ended too early to show anything"
    assert n_restored >= (2 if kind == "sliding" else 4)  # a window goes back by itself while it can
    neighbour.cancel()
    tokens = neighbour.result().token_ids
    assert tokens == alone.complete(long, max_tokens=400).token_ids[: len(tokens)]
    assert all(after - before == 1 for before, after in itertools.pairwise(steps[: len(tokens)]))
    assert engine.statistics().checkpoints.restored >= n_restored


# ---- S64: budgets ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["complete", "stream", "submit", "acomplete"])
@pytest.mark.parametrize("kind", STATEFUL)
def test_s64_an_entry_of_most_of_the_budget_is_used_without_a_second_one(
    kind: str, way: str, new_engine: NewEngine
) -> None:
    """60 % of the budget: fetch, use, return. What replaces it goes into its memory."""
    size = -(-STATE_BYTES[kind] // 4096) * 4096
    limit = int(size / 0.6)
    engine = new_engine(kind, n_slots=2, cache=CacheConfig(host_bytes=limit))
    peaks = watch_peaks(engine)

    def ask(ids: Any, slot: int) -> None:
        if way == "complete":
            engine.complete(ids, max_tokens=3, slot=slot)
        elif way == "stream":
            assert sum(len(chunk.token_ids) for chunk in engine.stream(ids, max_tokens=3, slot=slot)) == 3
        elif way == "submit":
            engine.submit(ids, max_tokens=3, slot=slot).result()
        else:
            asyncio.run(engine.acomplete(ids, max_tokens=3, slot=slot))

    ask(random_ids(9, 200), 0)
    for number in range(6):  # to the other slot and back: what is there is all that the slots hold
        held_ids = engine.slots[number % 2].token_ids
        assert positions(engine) == [len(held_ids)]
        ask([*held_ids, number, 7], 1 - number % 2)
        check_budget(engine)
        assert len(engine.cache) == 1
    assert engine.statistics().checkpoints.restored == 6
    assert 0 < peaks.resident_bytes <= limit
    assert peaks.checkpoint_bytes <= limit
    assert peaks.n_checkpoints == 1


@pytest.mark.parametrize("field", ["checkpoint_bytes", "host_bytes"])
@pytest.mark.parametrize("kind", WITH_STATE)
def test_a_checkpoint_larger_than_the_budget_is_refused_and_requests_go_on(
    kind: str, field: str, new_pair: NewPair
) -> None:
    pair = new_pair(kind, cache=replace(CacheConfig(), **{field: STATE_BYTES[kind] // 8}))  # type: ignore[arg-type]
    ids = random_ids(30, 300)
    for number in range(3):
        pair.ask(joined(ids, random_ids(31 + number, 20)), boundaries=[250])
    counts = pair.warm.statistics().checkpoints
    assert counts.refused["larger_than_budget"] >= 3
    assert set(counts.refused) == {"larger_than_budget"}
    assert (counts.captured, counts.held, counts.held_bytes) == ({}, 0, 0)
    assert len(pair.warm.cache) == pair.warm.cache.resident_bytes == 0


@pytest.mark.parametrize("kind", WITH_STATE)
def test_lowering_the_budget_gives_up_what_no_longer_fits_at_once(kind: str, new_pair: NewPair) -> None:
    pair = new_pair(kind)
    ids = random_ids(40, 600)
    pair.ask(ids)
    assert len(pair.warm.cache) >= 5
    pair.warm.cache.limit(CacheConfig(max_checkpoints=2))
    assert len(pair.warm.cache) == 2
    check_budget(pair.warm)
    pair.ask(joined(ids[:580], random_ids(41, 20)))
    pair.warm.cache.limit(CacheConfig(host_bytes=0))
    assert len(pair.warm.cache) == pair.warm.cache.resident_bytes == 0
    pair.ask(joined(ids[:500], random_ids(42, 20)))
    check_budget(pair.warm)
    pair.warm.cache.limit(CacheConfig())
    pair.ask(joined(ids, random_ids(43, 20)))
    assert len(pair.warm.cache) > 0
