"""The backend over llama.cpp: positions, cuts, sharing, state, and what it refuses."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pyllamacache.errors import GrammarError, NativeError
from pyllamacache.native.context import NativeContext
from pyllamacache.request import SamplingParams
from pyllamacache.scheduler.backend import Feed, Outcome
from tests.native.contexts import IDS, KINDS, NewContext, feed


@pytest.mark.parametrize("kind", KINDS)
def test_a_sequence_grows_and_is_forgotten(kind: str, new_context: NewContext) -> None:
    context = new_context(kind)
    assert context.length(0) == 0
    assert feed(context, 0, 0, 40).outcome is Outcome.DONE
    assert (context.length(0), context.length(1)) == (40, 0)
    context.erase(0)
    assert context.length(0) == 0
    context.erase(0)


@pytest.mark.parametrize("start", [0, 39, 41, 100])
@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_that_does_not_continue_every_part_is_refused(kind: str, start: int, new_context: NewContext) -> None:
    """On the hybrid tiny model (M-RoPE) libllama itself would accept a jump."""
    context = new_context(kind)
    feed(context, 0, 0, 40)
    result = feed(context, 0, start, start + 5)
    assert (result.outcome, result.n_groups_done) == (Outcome.REFUSED, 0)
    assert context.length(0) == 40
    assert feed(context, 0, 40, 45).outcome is Outcome.DONE


@pytest.mark.parametrize("kind", KINDS)
def test_rows_out_of_order_twice_in_a_batch_or_out_of_range_are_refused(kind: str, new_context: NewContext) -> None:
    context = new_context(kind)
    for group in (
        [Feed(1, 0, IDS[:4]), Feed(0, 0, IDS[:4])],
        [Feed(0, 0, IDS[:4]), Feed(0, 4, IDS[4:8])],
        [Feed(7, 0, IDS[:4])],
        [Feed(-1, 0, IDS[:4])],
        [Feed(0, 0, IDS[:129])],
        [Feed(0, 0, np.full(3, 10**6, dtype=np.int32))],
        [Feed(0, 0, np.full(3, -5, dtype=np.int32))],
    ):
        assert context.step([group]).outcome is Outcome.REFUSED
    assert (context.length(0), context.length(1)) == (0, 0)


def test_a_failing_group_stops_the_step_and_keeps_what_was_done(new_context: NewContext) -> None:
    context = new_context("full")
    result = context.step([[Feed(0, 0, IDS[:10])], [Feed(1, 5, IDS[5:10])], [Feed(0, 10, IDS[10:12])]])
    assert (result.outcome, result.n_groups_done, context.length(0)) == (Outcome.REFUSED, 1, 10)


@pytest.mark.parametrize("kind", KINDS)
def test_cutting_is_allowed_where_the_floor_says_and_nowhere_else(kind: str, new_context: NewContext) -> None:
    """480 tokens: the window part (256 cells here) has lost its beginning."""

    def filled() -> NativeContext:
        context = new_context(kind)
        for start in range(0, 480, 120):
            feed(context, 0, start, start + 120)
        return context

    context = filled()
    floor = context.rewind_floor(0)
    assert floor == {"full": 1, "hybrid": 480, "recurrent": 480}.get(kind, floor)
    if kind == "sliding":
        assert 200 < floor < 480
    assert context.trim(0, 480)
    assert context.trim(0, floor)
    assert context.length(0) == floor
    if floor > 1:
        assert not filled().trim(0, floor - 1)


@pytest.mark.parametrize("seed", [0, 4, 11, 17])
def test_a_window_is_whole_however_the_cells_lie(seed: int, new_context: NewContext) -> None:
    """Old bug: planning a batch of several ubatches dropped window cells that its first ubatch needed."""
    rng = random.Random(seed)
    whole, parts = new_context("sliding"), new_context("sliding")
    lengths = [0, 0]
    for _ in range(30):
        seq_id = rng.randrange(2)
        length = lengths[seq_id]
        if length > 300 or rng.random() < 0.25:
            floor = max(whole.rewind_floor(seq_id), parts.rewind_floor(seq_id)) if length else 0
            cut = rng.randint(floor, length) if length and rng.random() < 0.6 and floor < length else 0
            for context in (whole, parts):
                if cut:
                    assert context.trim(seq_id, cut)
                else:
                    context.erase(seq_id)
            lengths[seq_id] = cut
            continue
        end = length + rng.randint(1, 100)
        result = feed(whole, seq_id, length, end, want_logits=True)
        for start in range(length, end, 32):
            expected = feed(parts, seq_id, start, min(start + 32, end), want_logits=True)
        assert np.abs(result.logits[0] - expected.logits[0]).max() < 1e-3
        lengths[seq_id] = end


@pytest.mark.parametrize("exact", [False, True])
def test_a_shared_prefix_outlives_its_donor(exact: bool, new_context: NewContext) -> None:
    context = new_context("full", exact=exact)
    feed(context, 0, 0, 64)
    context.share(0, 1, 32)
    assert context.length(1) == 32
    feed(context, 1, 32, 64)
    sampler = context.new_sampler(SamplingParams(), IDS[:64])
    context.erase(0)
    shared = context.step([[Feed(1, 64, IDS[64:65], sampler, True)]])
    plain = new_context("full", exact=exact)
    feed(plain, 0, 0, 64)
    alone = plain.step([[Feed(0, 64, IDS[64:65], sampler, True)]])
    assert np.abs(shared.logits[0] - alone.logits[0]).max() < 1e-3
    sampler.close()


@pytest.mark.parametrize(("donor", "target", "n"), [(0, 0, 4), (0, 1, 0), (0, 1, 100), (0, 5, 4), (5, 0, 4)])
def test_a_share_that_makes_no_sense_raises_and_changes_nothing(
    donor: int, target: int, n: int, new_context: NewContext
) -> None:
    context = new_context("full")
    feed(context, 0, 0, 40)
    with pytest.raises(NativeError):
        context.share(donor, target, n)
    assert (context.length(0), context.length(1)) == (40, 0)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_state_goes_out_and_in_bit_for_bit(kind: str, exact: bool, new_context: NewContext) -> None:
    context = new_context(kind, exact=exact)
    feed(context, 0, 0, 64)
    state = context.save_state(0)
    other = new_context(kind, exact=exact, n_slots=3)
    other.load_state(2, state, 64)
    assert other.length(2) == 64
    back = new_context(kind, exact=exact)
    back.load_state(0, other.save_state(2), 64)
    assert back.save_state(0) == state  # cells carry their sequence's id, so only the round trip is equal


@pytest.mark.parametrize("kind", KINDS)
def test_a_refused_state_leaves_the_sequence_bit_equal(kind: str, new_context: NewContext) -> None:
    context = new_context(kind)
    feed(context, 0, 0, 64)
    state = context.save_state(0)
    for bad, n_tokens in (
        (state[: len(state) // 2], 64),
        (state + b"x", 64),
        (state, 63),
        (b"", 64),
        (b"\0" * 100, 64),
    ):
        with pytest.raises(NativeError):
            context.load_state(0, bytes(bad), n_tokens)
        assert context.save_state(0) == state
    with pytest.raises(NativeError):
        context.load_state(1, bytes(state[:50]), 64)
    assert context.length(1) == 0


def test_a_grammar_that_does_not_parse_is_named(new_context: NewContext) -> None:
    with pytest.raises(GrammarError):
        new_context("full").new_sampler(SamplingParams(grammar="root ::= ("), IDS)
    with pytest.raises(GrammarError):
        new_context("full").new_sampler(SamplingParams(grammar='other ::= "x"'), IDS)


def test_a_dropped_context_is_freed_and_its_model_can_close(tiny_path: Callable[..., Any]) -> None:
    from pyllamacache import Engine, Model

    model = Model(tiny_path("full"), progress=False)
    native = model._native
    engine = Engine(model, n_ctx=256, n_threads=1, progress=False)
    assert native.guard._n_users == 1
    del engine
    gc.collect()
    assert native.guard._n_users == 0
    model.close()
    assert native.is_closed
