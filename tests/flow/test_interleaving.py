"""Requests beside each other: a long prefill starves nobody, cells are shared out before anyone fails."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest

from pyllamacache import CacheConfig
from pyllamacache.errors import RequestTooLongError
from tests.flow.hold import before_step, finish_order, held, on_chunk
from tests.flow.law import Ids, check_numbers, joined, random_ids

KINDS = ["full", "sliding", "hybrid", "recurrent"]
WITH_CELLS = KINDS[:3]
LONG, SHORT = random_ids(1, 900), random_ids(2, 20)

NewEngine = Callable[..., Any]


@pytest.fixture
def make(new_engine: NewEngine) -> NewEngine:
    """Flash attention computes in F16 on the CPU: without it, a neighbour cannot turn a close decision."""
    return functools.partial(new_engine, n_threads=1, flash_attention="off")


def alone(engine: Any, ids: Ids, max_tokens: int) -> tuple[int, ...]:
    """What the request gives when nothing is reused and nobody is beside it."""
    reply: tuple[int, ...] = engine.complete(ids, max_tokens=max_tokens, cache_prompt=False, store=False).token_ids
    return reply


# ---- nobody starves --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("exact", [False, True], ids=["default", "exact"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_generation_goes_on_beside_a_long_prefill(kind: str, exact: bool, make: NewEngine) -> None:
    """Between two tokens of the neighbour at most n_ubatch = 32 prompt tokens are computed, from its first one on."""
    engine = make(kind, exact=exact)
    filled: list[int] = []
    with held(engine):
        neighbour = engine.submit(SHORT, max_tokens=60, slot=0)
        long = engine.submit(LONG, max_tokens=2, slot=1)
        on_chunk(neighbour, lambda: filled.append(long.prefilled_tokens))
        order = finish_order([long])
    replies = [neighbour.result(), long.result()]
    during = [n for n in filled if n < len(LONG)][1:]  # the first step takes a whole n_batch of prompts
    assert len(during) >= (len(LONG) - 128) // 32
    assert all(0 < after - before <= 32 for before, after in itertools.pairwise(during))
    assert order == [0]
    for ids, max_tokens, reply in ((SHORT, 60, replies[0]), (LONG, 2, replies[1])):
        check_numbers(ids, reply)
        assert reply.token_ids == alone(engine, ids, max_tokens)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("max_checkpoints", [0, 32])
def test_two_long_prefills_take_turns(kind: str, max_checkpoints: int, make: NewEngine) -> None:
    """With a generation beside them a step has room for one chunk: whoever waited longest gets it.

    A chunk cut short by a checkpoint leaves its rest of the step to the other one.
    """
    engine = make(kind, n_slots=3, cache=CacheConfig(max_checkpoints=max_checkpoints))
    filled: list[tuple[int, int]] = []
    with held(engine):
        neighbour = engine.submit(SHORT, max_tokens=90)
        long = [engine.submit(random_ids(seed, 900), max_tokens=1) for seed in (5, 6)]
        on_chunk(neighbour, lambda: filled.append((long[0].prefilled_tokens, long[1].prefilled_tokens)))
    replies = [neighbour.result(), *(handle.result() for handle in long)]
    during = [pair for pair in filled if max(pair) < 900][1:]  # as above
    assert len(during) > 40
    if kind == "full" or not max_checkpoints:
        apart = [one - other for one, other in during]
        assert all(abs(difference - apart[0]) <= 32 for difference in apart)
    for before, after in zip(during, during[2:], strict=False):
        assert before[0] < after[0], "the first sat out two steps"
        assert before[1] < after[1], "the second sat out two steps"
    assert replies[0].token_ids == alone(engine, SHORT, 90)


@pytest.mark.parametrize("kind", KINDS)
def test_every_generation_gets_a_token_at_every_step(kind: str, make: NewEngine) -> None:
    engine = make(kind, n_slots=4)
    prompts = [random_ids(seed, 10 + seed) for seed in range(4)]
    counts: dict[int, list[int]] = {}
    with held(engine):
        handles = [engine.submit(ids, max_tokens=40) for ids in prompts]
        for index, handle in enumerate(handles):
            counts[index] = []
            on_chunk(handle, lambda index=index: counts[index].append(engine._state.n_steps))  # type: ignore[misc]
    replies = [handle.result() for handle in handles]
    for index, steps in counts.items():
        tokens = steps[:40]
        assert tokens == list(range(tokens[0], tokens[0] + 40)), f"request {index} sat out a step"
    for ids, reply in zip(prompts, replies, strict=True):
        assert reply.token_ids == alone(engine, ids, 40)


# ---- cells -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", WITH_CELLS)
def test_idle_slots_are_cut_before_a_request_fails_for_want_of_cells(kind: str, make: NewEngine) -> None:
    """Least recently used first, from the tail; memory that cannot be cut goes whole."""
    engine = make(kind, n_ctx=256, kv_tokens=256, n_slots=3)
    old, recent, new = random_ids(1, 90), random_ids(2, 90), random_ids(3, 130)
    engine.complete(old, max_tokens=0, slot=0)
    engine.complete(recent, max_tokens=0, slot=1)
    before_step(engine, 2, lambda: held_at_once.append(engine._state.ledger.used()))
    held_at_once: list[int] = []
    reply = engine.complete(new, max_tokens=20, slot=2)
    check_numbers(new, reply)
    assert held_at_once[0] <= 256
    assert engine.slots[1].token_ids == recent.tolist(), "the recently used one was not needed"
    left = engine.slots[0].token_ids
    assert left == old[: len(left)].tolist()
    assert 256 - 32 < sum(slot.n_tokens for slot in engine.slots) <= 256 or kind != "full"
    assert engine.statistics().n_evicted_tokens == 90 - len(left) > 0
    assert engine.statistics().kv_tokens_used <= 256
    if left:
        resumed = engine.complete(joined(old[: len(left)], [1]), max_tokens=0, slot=0)
        assert resumed.usage.cached_tokens == len(left)
    assert reply.token_ids == make(kind, n_slots=1).complete(new, max_tokens=20).token_ids


@pytest.mark.parametrize("kind", WITH_CELLS)
def test_a_request_waits_for_cells_that_running_ones_may_still_need(kind: str, make: NewEngine) -> None:
    engine = make(kind, n_ctx=256, kv_tokens=256, n_slots=3)
    prompts = [random_ids(seed, 60) for seed in range(4)]
    seen: list[int] = []
    with held(engine):
        handles = [engine.submit(ids, max_tokens=90) for ids in prompts]  # 150 each: one at a time
        on_chunk(handles[0], lambda: seen.extend(handle.prefilled_tokens for handle in handles[1:]))
        order = finish_order(handles[1:])
    replies = [handle.result() for handle in handles]
    assert set(seen) == {0}, "none of the others had begun"
    assert order == [0, 1, 2]
    for ids, reply in zip(prompts, replies, strict=True):
        check_numbers(ids, reply)
        assert reply.token_ids == make(kind, n_slots=1).complete(ids, max_tokens=90).token_ids
    assert engine.statistics().n_failed == engine.statistics().n_preempted == 0


@pytest.mark.parametrize("kind", WITH_CELLS)
def test_requests_that_fit_together_run_together(kind: str, make: NewEngine) -> None:
    engine = make(kind, n_ctx=256, kv_tokens=256, n_slots=4)
    running: list[int] = []
    with held(engine):
        handles = [engine.submit(random_ids(seed, 30), max_tokens=34) for seed in range(5)]  # 64 each: four at once
        on_chunk(handles[0], lambda: running.append(len(engine._state.running)))
    replies = [handle.result() for handle in handles]
    assert max(running) == 4
    for seed, reply in enumerate(replies):
        assert reply.token_ids == make(kind, n_slots=1).complete(random_ids(seed, 30), max_tokens=34).token_ids


def test_a_shared_prefix_needs_its_cells_once(make: NewEngine) -> None:
    """Dense memory: four requests of 200 + 10 tokens over one trunk fit into 256 cells together."""
    engine = make(n_ctx=256, kv_tokens=256, n_slots=4)
    trunk = random_ids(7, 200)
    engine.warm(trunk)
    running: list[int] = []
    prompts = [joined(trunk, [seed, seed + 9]) for seed in range(4)]
    with held(engine):
        handles = [engine.submit(ids, max_tokens=8) for ids in prompts]
        on_chunk(handles[0], lambda: running.append(len(engine._state.running)))
    replies = [handle.result() for handle in handles]
    assert max(running) == 4
    assert [reply.usage.cached_tokens for reply in replies] == [200] * 4
    for ids, reply in zip(prompts, replies, strict=True):
        assert reply.token_ids == make(n_slots=1).complete(ids, max_tokens=8).token_ids


@pytest.mark.parametrize("kind", KINDS)
def test_a_request_that_can_never_fit_fails_alone_and_at_once(kind: str, make: NewEngine) -> None:
    engine = make(kind, n_ctx=256, kv_tokens=256)
    handle = engine.submit(SHORT, max_tokens=100)
    with pytest.raises(RequestTooLongError) as caught:
        engine.submit(random_ids(3, 200), max_tokens=57)
    assert (caught.value.prompt_tokens, caught.value.max_tokens, caught.value.limit_tokens) == (200, 57, 256)
    assert "raise n_ctx" in str(caught.value)
    assert len(handle.result().token_ids) == 100


@pytest.mark.parametrize("kind", KINDS)
def test_many_requests_on_few_cells_are_all_answered_as_if_alone(kind: str, make: NewEngine) -> None:
    """Scenario S37 in small: more conversations than slots, more tokens than cells, three rounds."""
    engine = make(kind, n_ctx=300, kv_tokens=300, n_slots=3)
    conversations = [random_ids(seed, 40 + 20 * seed) for seed in range(5)]
    expected = [make(kind, n_slots=1).complete(ids, max_tokens=12).token_ids for ids in conversations]
    for _ in range(3):
        with held(engine):
            handles = [engine.submit(ids, max_tokens=12) for ids in conversations]
        for ids, handle, tokens in zip(conversations, handles, expected, strict=True):
            reply = handle.result()
            check_numbers(ids, reply)
            assert reply.token_ids == tokens
    assert engine.statistics().n_requests == 15
    assert engine.statistics().kv_tokens_used <= 300
