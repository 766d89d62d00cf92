"""What llama_decode's return codes cost, on every memory kind, with a bystander in the batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pyllamacache import CacheConfig
from pyllamacache.errors import NativeError
from tests.flow.law import check_numbers, joined, random_ids
from tests.native.faults import damage, on_scheduler

KINDS = ["full", "sliding", "hybrid", "recurrent"]
CODES = [(1, False), (-1, False), (2, False), (-2, False), (-3, False), (2, True), (-3, True), (-100, True)]
"""(code, whether the decode was really done before it was reported as failed)."""

VICTIM, BYSTANDER, OUTSIDE = random_ids(1, 80), random_ids(2, 50), random_ids(3, 60)


def _submit_both(engine: Any) -> list[Any]:
    handles: list[Any] = []
    on_scheduler(engine, lambda: None)
    handles.append(engine.submit(BYSTANDER, max_tokens=40, slot=0))
    handles.append(engine.submit(VICTIM, max_tokens=12, slot=1))
    return handles


@pytest.mark.parametrize("nth", [1, 2, 3, 5])
@pytest.mark.parametrize(("code", "after"), CODES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_failed_call_costs_time_and_never_an_answer(
    kind: str, code: int, after: bool, nth: int, new_engine: Callable[..., Any]
) -> None:
    """The nth native decode fails once; every reply is what it is without the failure, an idle slot is unchanged."""
    engine = new_engine(kind, n_slots=3, flash_attention="off")
    expected = [handle.result() for handle in _submit_both(new_engine(kind, n_slots=3, flash_attention="off"))]
    outside = engine.complete(OUTSIDE, max_tokens=4, slot=2)
    held = engine.slots[2].token_ids
    on_scheduler(engine, lambda: damage(engine).fail_decode(nth, code, after_decode=after))
    replies = [handle.result() for handle in _submit_both(engine)]
    for ids, reply, wanted in zip((BYSTANDER, VICTIM), replies, expected, strict=True):
        check_numbers(ids, reply)
        assert reply.token_ids == wanted.token_ids
        assert reply.text == wanted.text
    if code != 1:  # no cells: idle content is what is given up for them
        assert engine.slots[2].token_ids == held
        again = engine.complete(joined(OUTSIDE, outside.token_ids), max_tokens=1, slot=2)
        assert again.usage.cached_tokens == len(held)


@pytest.mark.parametrize("kind", KINDS)
def test_a_call_that_keeps_failing_fails_its_request_and_the_engine_goes_on(
    kind: str, new_engine: Callable[..., Any]
) -> None:
    engine = new_engine(kind, n_slots=1, flash_attention="off")
    expected = engine.complete(VICTIM, max_tokens=4, cache_prompt=False)
    step = engine._state.backend.step

    def failing(groups: Any) -> Any:
        damage(engine).fail_decode(1, -3)
        return step(groups)

    engine._state.backend.step = failing
    with pytest.raises(NativeError, match="llama_decode returned -3"):
        engine.complete(VICTIM, max_tokens=4, cache_prompt=False)
    engine._state.backend.step = step
    assert engine.statistics().n_failed == 1
    assert engine.statistics().n_lost_steps == 3
    assert engine.complete(VICTIM, max_tokens=4).token_ids == expected.token_ids


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("max_checkpoints", [0, 32])
def test_memory_that_does_not_end_where_the_books_say_is_refused_and_prefilled_again(
    kind: str, max_checkpoints: int, new_engine: Callable[..., Any]
) -> None:
    """A tail cut behind the engine's back: libllama's own check is off on M-RoPE models, ours is not.

    Purely recurrent memory needs nothing but the checkpoint of the first request, and never looks at what is gone.
    """
    engine = new_engine(kind, n_slots=1, flash_attention="off", cache=CacheConfig(max_checkpoints=max_checkpoints))
    ids = joined(VICTIM, random_ids(9, 20))
    expected = engine.complete(ids, max_tokens=4, return_logits=True, cache_prompt=False)
    engine.slots[0].erase()
    engine.complete(VICTIM, max_tokens=0)
    on_scheduler(engine, lambda: engine._state.backend.erase(0))
    reply = engine.complete(ids, max_tokens=4, return_logits=True)
    assert reply.token_ids == expected.token_ids
    assert np.abs(reply.logits - expected.logits).max() < 1e-3
    if kind == "recurrent" and max_checkpoints:
        assert (reply.usage.cached_tokens, reply.cache.source.value) == (len(ids) - 4, "checkpoint")
    else:
        assert (reply.usage.cached_tokens, reply.cache.reason.value) == (0, "lost")
