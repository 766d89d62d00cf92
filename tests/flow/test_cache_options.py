"""What a request may say about reuse: warm, store, namespace, slot, cache_prompt; and who waits for whom."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

from pyllamacache import CacheConfig
from pyllamacache.errors import InvalidRequestError, UnknownOptionError
from tests.flow.hold import before_step, finish_order, held, wait_for_chunk
from tests.flow.law import check_numbers, joined, random_ids

KINDS = ["full", "sliding", "hybrid", "recurrent"]
MODES = [False, True]
HEADER = random_ids(1, 96)  # three times n_ubatch
MORE = random_ids(2, 24)

NewEngine = Callable[..., Any]


@pytest.fixture
def make(new_engine: NewEngine) -> NewEngine:
    return functools.partial(new_engine, n_threads=1)


def contents(engine: Any) -> list[list[int]]:
    return [slot.token_ids for slot in engine.slots]


# ---- warm ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_warmed_prompt_is_resumed_one_token_before_its_end(kind: str, make: NewEngine) -> None:
    """Memory that cannot be rewound is left one token short, so that the same prompt need not start over."""
    engine = make(kind)
    usage = engine.warm(HEADER)
    held_tokens = 96 if kind == "full" else 95
    assert (usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens) == (held_tokens, 0, 0)
    assert usage.cache_write_tokens == held_tokens
    assert engine.slots[0].token_ids == HEADER[:held_tokens].tolist()
    reply = engine.complete(HEADER, max_tokens=1, slot=0)
    check_numbers(HEADER, reply)
    assert (reply.usage.cached_tokens, reply.cache.prefilled_tokens) == (95, 1)
    assert (reply.cache.source.value, reply.cache.reason.value) == ("slot", "hit")


@pytest.mark.parametrize("kind", KINDS)
def test_warming_twice_computes_nothing_new(kind: str, make: NewEngine) -> None:
    engine = make(kind)
    engine.warm(HEADER)
    again = engine.warm(HEADER)
    assert again.cached_tokens == 95
    assert again.cache_write_tokens == 0
    longer = engine.warm(joined(HEADER, MORE))
    assert longer.cached_tokens == (96 if kind == "full" else 95)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [1, 31, 32, 70, 96])
def test_a_warm_up_in_exact_mode_leaves_what_exact_mode_can_resume(kind: str, length: int, make: NewEngine) -> None:
    """Reuse ends on the grid of n_ubatch = 32; memory that cannot be rewound is left there."""
    engine = make(kind, exact=True)
    ids, on_grid = HEADER[:length], length // 32 * 32
    usage = engine.warm(ids)
    assert usage.cache_write_tokens == on_grid
    assert usage.prompt_tokens == engine.slots[0].n_tokens == (length if kind == "full" else on_grid)
    longer = joined(ids, MORE)
    reply = engine.complete(longer, max_tokens=1)
    check_numbers(longer, reply)
    assert reply.usage.cached_tokens == on_grid


@pytest.mark.parametrize("kind", KINDS)
def test_a_warm_up_of_one_token_is_no_error(kind: str, make: NewEngine) -> None:
    engine = make(kind)
    assert engine.warm([7]).prompt_tokens == (1 if kind == "full" else 0)
    assert engine.complete([7], max_tokens=2).usage.cached_tokens == 0


def test_warm_takes_no_option_that_only_a_reply_could_follow(make: NewEngine) -> None:
    with pytest.raises(UnknownOptionError, match="max_tokens"):
        make().warm(HEADER, max_tokens=5)


# ---- the same prompt again -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("exact", MODES, ids=["default", "exact"])
@pytest.mark.parametrize("max_tokens", [0, 8])
@pytest.mark.parametrize("max_checkpoints", [0, 32])
def test_the_same_prompt_again_gives_the_same_answer(
    kind: str, exact: bool, max_tokens: int, max_checkpoints: int, make: NewEngine
) -> None:
    """Scenario S11: an exact match backed off one token, the memory refused, the process died."""
    engine = make(kind, exact=exact, cache=CacheConfig(max_checkpoints=max_checkpoints))
    replies = [engine.complete(HEADER, max_tokens=max_tokens) for _ in range(3)]
    assert len({reply.token_ids for reply in replies}) == 1
    for reply in replies:
        check_numbers(HEADER, reply)
    if kind == "full":
        assert replies[1].usage.cached_tokens == (64 if exact else 95)
    elif exact and kind != "sliding":
        assert replies[1].usage.cached_tokens == (64 if max_checkpoints else 0)
    elif not exact and kind != "sliding":
        assert (replies[1].usage.cached_tokens, replies[1].cache.matched_tokens) == (92 if max_checkpoints else 0, 96)
        assert replies[1].cache.reason.value == "no_checkpoint"
        assert replies[1].cache.position == 95


@pytest.mark.parametrize("kind", KINDS)
def test_a_cancelled_request_sent_again_resumes(kind: str, make: NewEngine) -> None:
    """Scenarios S09 and S11: what was prefilled before the cancel is not prefilled again."""
    engine = make(kind)
    ids = random_ids(5, 600)
    with held(engine):
        handle = engine.submit(ids, max_tokens=4)
        before_step(engine, 3, handle.cancel)
    cancelled = handle.result()
    assert (cancelled.finish_reason, cancelled.token_ids, cancelled.text) == ("cancelled", (), "")
    assert cancelled.usage.prompt_tokens == cancelled.cache.prefilled_tokens == 3 * 128, "it stops between two steps"
    again = engine.complete(ids, max_tokens=4)
    assert again.usage.cached_tokens == 3 * 128
    assert again.token_ids == engine.complete(ids, max_tokens=4, cache_prompt=False).token_ids


@pytest.mark.parametrize("kind", KINDS)
def test_without_cache_prompt_everything_is_computed(kind: str, make: NewEngine) -> None:
    engine = make(kind)
    engine.complete(HEADER, max_tokens=0)
    longer = joined(HEADER, MORE)
    reply = engine.complete(longer, max_tokens=1, cache_prompt=False)
    check_numbers(longer, reply)
    assert reply.usage.cached_tokens == 0
    assert (reply.cache.source.value, reply.cache.reason.value, reply.cache.position) == ("none", "disabled", 0)
    assert reply.usage.cache_write_tokens == len(longer), "it is stored all the same"


# ---- store -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("exact", MODES, ids=["default", "exact"])
def test_a_request_that_stores_nothing_leaves_the_slots_as_they_were(kind: str, exact: bool, make: NewEngine) -> None:
    """With an empty slot to work in, whatever the request and the held prompt have in common."""
    engine = make(kind, n_slots=2, exact=exact)
    engine.warm(HEADER, slot=0)
    before = contents(engine)
    for ids in (joined(HEADER, MORE), joined(HEADER[:50], MORE), HEADER, HEADER[:40], MORE):
        reply = engine.complete(ids, max_tokens=6, store=False)
        check_numbers(ids, reply)
        assert reply.usage.cache_write_tokens == 0
        assert contents(engine) == before
    assert engine.statistics().kv_tokens_used in (0, len(before[0]))


@pytest.mark.parametrize("kind", KINDS)
def test_a_failing_request_that_stores_nothing_leaves_nothing(kind: str, make: NewEngine) -> None:
    engine = make(kind, n_slots=2)
    engine.warm(HEADER, slot=0)
    before = contents(engine)
    handle = engine.submit(random_ids(3, 300), max_tokens=500, store=False)
    wait_for_chunk(handle)
    handle.cancel()
    assert handle.result().usage.cache_write_tokens == 0
    assert contents(engine) == before


# ---- namespaces ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n_slots", [1, 3])
def test_a_namespace_cannot_tell_what_another_one_holds(kind: str, n_slots: int, make: NewEngine) -> None:
    """Scenario S74: the same numbers beside the same prefix of a stranger as beside other tokens of equal length."""
    ids = joined(HEADER, MORE)
    seen = []
    for stranger in (HEADER, random_ids(77, 96)):
        engine = make(kind, n_slots=n_slots)
        engine.complete(stranger, max_tokens=4, namespace="a")
        replies = [engine.complete(ids, max_tokens=4, namespace="b", return_logits=True) for _ in range(2)]
        seen.append([(r.usage, r.cache, r.slot_id, r.token_ids, r.logits.tobytes()) for r in replies])
        assert replies[0].cache.matched_tokens == 0
        assert replies[0].cache.reason.value == "cold"
    assert seen[0] == seen[1]


def test_a_namespace_reuses_its_own(make: NewEngine) -> None:
    engine = make(n_slots=2)
    for name in ("a", "b", ""):
        assert engine.complete(HEADER, max_tokens=0, namespace=name).usage.cached_tokens == 0
    for name in ("b", ""):  # the two slots hold what came last
        assert engine.complete(joined(HEADER, MORE), max_tokens=0, namespace=name).usage.cached_tokens == 96
    assert sorted(slot.namespace for slot in engine.slots) == ["", "b"]


# ---- slots -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("max_checkpoints", [0, 32])
def test_a_chosen_slot_is_used(kind: str, max_checkpoints: int, make: NewEngine) -> None:
    """What another one holds comes along: cells alone on dense memory, elsewhere with a checkpoint."""
    engine = make(kind, n_slots=3, cache=CacheConfig(max_checkpoints=max_checkpoints))
    engine.complete(HEADER, max_tokens=0, slot=2)
    reply = engine.complete(joined(HEADER, MORE), max_tokens=0, slot=1)
    assert reply.slot_id == 1
    if kind == "full":
        assert (reply.cache.source.value, reply.usage.cached_tokens) == ("shared", 96)
    elif max_checkpoints:
        assert (reply.cache.source.value, reply.usage.cached_tokens) == ("checkpoint", 96)
        assert (reply.cache.reason.value, reply.cache.position) == ("hit", 96)
    else:
        assert (reply.cache.reason.value, reply.cache.position, reply.usage.cached_tokens) == ("other_slot", 96, 0)
    assert engine.slots[2].token_ids == HEADER.tolist()


@pytest.mark.parametrize("slot", [-1, 2, 2**40, True, 1.0, "0"])
def test_a_slot_that_is_not_there_is_refused(slot: Any, make: NewEngine) -> None:
    with pytest.raises(InvalidRequestError, match="slot"):
        make(n_slots=2).complete(HEADER, slot=slot)


def test_a_request_waits_for_its_slot_and_others_pass_it(make: NewEngine) -> None:
    engine = make(n_slots=2)
    with held(engine):
        handles = [
            engine.submit(HEADER, max_tokens=60, slot=0),
            engine.submit(MORE, max_tokens=4, slot=0),  # waits for the first
            engine.submit(MORE, max_tokens=4),  # does not wait
        ]
        order = finish_order(handles)
    replies = [handle.result() for handle in handles]
    assert [reply.slot_id for reply in replies] == [0, 0, 1]
    assert order == [2, 0, 1]
    assert replies[1].token_ids == replies[2].token_ids


@pytest.mark.parametrize("n_slots", [1, 2, 3])
def test_more_requests_than_slots_are_answered_in_the_order_they_came(n_slots: int, make: NewEngine) -> None:
    engine = make(n_slots=n_slots)
    prompts = [random_ids(seed, 20) for seed in range(9)]
    with held(engine):
        handles = [engine.submit(ids, max_tokens=5) for ids in prompts]
        order = finish_order(handles)
    replies = [handle.result() for handle in handles]
    assert order == list(range(9))
    for ids, reply in zip(prompts, replies, strict=True):
        check_numbers(ids, reply)
        assert reply.token_ids == engine.complete(ids, max_tokens=5, cache_prompt=False).token_ids
    assert engine.statistics().n_queued == engine.statistics().n_running == 0


def test_a_queued_request_can_be_cancelled(make: NewEngine) -> None:
    engine = make(n_slots=1)
    with held(engine):
        running, queued = (engine.submit(HEADER, max_tokens=20) for _ in range(2))
        queued.cancel()
    reply = queued.result()
    assert (reply.finish_reason, reply.usage.prompt_tokens, reply.text) == ("cancelled", 0, "")
    assert running.result().finish_reason == "length"
    assert [(chunk.text, chunk.finish_reason) for chunk in queued] == [("", "cancelled")]
