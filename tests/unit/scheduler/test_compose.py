"""What goes into a step, from jobs in any state. The rules themselves are checked by the fake on every step."""

from __future__ import annotations

import numpy as np
import pytest

from pyllamacache.config import Memory
from pyllamacache.prefix.plan import Plan
from pyllamacache.request import Reason, SlotId, Source
from pyllamacache.scheduler.backend import Traits
from pyllamacache.scheduler.compose import compose
from pyllamacache.scheduler.inbox import Outbox
from pyllamacache.scheduler.jobs import Job
from pyllamacache.scheduler.slots import SlotState, TokenBuffer
from pyllamacache.text.decode import TextStream
from tests.fakes import make_request, make_traits
from tests.fakes.sampler import FakeSampler

STATELESS = (Memory.FULL, Memory.SLIDING)


def job(slot_id: int, n_prompt: int, n_held: int = 0, n_generated: int = 0, *, order: int = 0, last: int = 0) -> Job:
    """A job whose slot holds `n_held` of its prompt and reply."""
    request = make_request(range(1, n_prompt + 1), max_tokens=30)
    tokens = TokenBuffer(request.prompt.ids)
    for token in range(n_generated):
        tokens.append(200 + token)
    slot = SlotState(SlotId(slot_id))
    slot.tokens.extend(tokens.slice(0, n_held))
    return Job(
        request=request,
        outbox=Outbox(keeps_chunks=False),
        slot=slot,
        plan=Plan(slot.slot_id, Source.NONE, None, 0, 0, 0, Reason.COLD, 0, 0),
        tokens=tokens,
        text=TextStream(),
        sampler=FakeSampler(request.sampling, request.prompt.ids, frozenset()),
        submitted_s=0.0,
        admitted_s=0.0,
        order=order or slot_id,
        deadline_s=None,
        prefill_target=n_prompt,
        generated=[200 + token for token in range(n_generated)],
        last_prefill=last,
    )


def decoding(slot_id: int, n_prompt: int = 5) -> Job:
    return job(slot_id, n_prompt, n_prompt, 1)


def shape(jobs: list[Job], traits: Traits) -> list[list[tuple[int, int, int]]]:
    """(sequence, start, end) of each feed of each group."""
    batch = compose(jobs, traits)
    assert batch.n_tokens == sum(len(feed.tokens) for group in batch.groups for feed in group)
    return [[(feed.seq_id, feed.start, feed.start + len(feed.tokens)) for feed in group] for group in batch.groups]


def test_nothing_running_makes_no_step() -> None:
    assert shape([], make_traits()) == []


@pytest.mark.parametrize("memory", list(Memory))
def test_jobs_set_aside_are_left_out(memory: Memory) -> None:
    aside = decoding(0)
    aside.is_waiting = True
    assert shape([aside, decoding(1)], make_traits(memory)) == [[(1, 5, 6)]]


@pytest.mark.parametrize("memory", STATELESS)
def test_rows_ascend_by_sequence_in_one_group(memory: Memory) -> None:
    jobs = [decoding(3), job(2, 30), decoding(0)]
    assert shape(jobs, make_traits(memory, n_slots=4, n_ubatch=4)) == [[(0, 5, 6), (2, 0, 2), (3, 5, 6)]]


@pytest.mark.parametrize("memory", [Memory.HYBRID, Memory.RECURRENT, Memory.OTHER])
def test_memory_with_a_state_gets_decode_rows_and_each_chunk_apart(memory: Memory) -> None:
    jobs = [decoding(3), job(2, 30), decoding(0), job(1, 3)]
    assert shape(jobs, make_traits(memory, n_slots=4, n_ubatch=4)) == [
        [(0, 5, 6), (3, 5, 6)],
        [(1, 0, 3)],
        [(2, 0, 1)],
    ]


@pytest.mark.parametrize("memory", list(Memory))
def test_while_nothing_decodes_a_step_fills_the_batch(memory: Memory) -> None:
    traits = make_traits(memory, n_slots=2, n_batch=16, n_ubatch=4)
    groups = shape([job(0, 10), job(1, 30)], traits)
    assert sorted(feed for group in groups for feed in group) == [(0, 0, 10), (1, 0, 6)]


@pytest.mark.parametrize("memory", list(Memory))
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("n_decoding", [1, 3, 6])
def test_while_anything_decodes_a_step_prefills_at_most_one_ubatch(
    memory: Memory, exact: bool, n_decoding: int
) -> None:
    traits = make_traits(memory, exact=exact, n_slots=8, n_batch=16, n_ubatch=4)
    jobs = [decoding(slot_id) for slot_id in range(n_decoding)] + [job(6, 30), job(7, 3)]
    feeds = [feed for group in shape(jobs, traits) for feed in group]
    n_prefill = sum(end - start for seq_id, start, end in feeds if seq_id >= 6)
    assert 0 < n_prefill <= 4


@pytest.mark.parametrize("memory", STATELESS)
def test_decode_rows_and_prefill_fit_one_ubatch_together(memory: Memory) -> None:
    jobs = [decoding(0), decoding(1), job(2, 30)]
    assert shape(jobs, make_traits(memory, n_slots=4, n_ubatch=4)) == [[(0, 5, 6), (1, 5, 6), (2, 0, 2)]]


@pytest.mark.parametrize("memory", STATELESS)
def test_a_prefill_goes_on_beside_more_decoders_than_a_ubatch_has_rows(memory: Memory) -> None:
    jobs = [*map(decoding, range(6)), job(6, 30)]
    assert (6, 0, 1) in shape(jobs, make_traits(memory, n_slots=8, n_ubatch=4))[0]


def test_whoever_waited_longest_is_prefilled_first() -> None:
    jobs = [job(0, 30, 8, order=1, last=7), job(1, 30, 8, order=2, last=5), decoding(2)]
    assert shape(jobs, make_traits(n_slots=4, n_ubatch=4))[0] == [(1, 8, 11), (2, 5, 6)]


def test_the_oldest_is_prefilled_first_among_those_that_waited_alike() -> None:
    jobs = [job(0, 30, order=2), job(1, 30, order=1), decoding(2)]
    assert shape(jobs, make_traits(n_slots=4, n_ubatch=4))[0] == [(1, 0, 3), (2, 5, 6)]


def test_only_the_feed_that_ends_at_the_next_token_samples() -> None:
    traits = make_traits(n_slots=2, n_batch=8)
    jobs = [job(0, 5), job(1, 30)]
    feeds = {feed.seq_id: feed for feed in compose(jobs, traits).groups[0]}
    assert feeds[0].sampler is jobs[0].sampler
    assert feeds[1].sampler is None


def test_a_reply_that_is_fed_again_is_fed_as_a_prompt_is() -> None:
    again = job(0, 5, 0, 6)
    feed = compose([again], make_traits(n_batch=16)).groups[0][0]
    assert list(feed.tokens) == [1, 2, 3, 4, 5, 200, 201, 202, 203, 204, 205]
    assert feed.sampler is again.sampler
    assert np.shares_memory(feed.tokens, again.tokens.ids)


# ---- exact mode ------------------------------------------------------------------------------------------------


def exact_traits(n_batch: int = 8) -> Traits:
    return make_traits(exact=True, n_slots=4, n_batch=n_batch, n_ubatch=4)


def test_exact_chunks_end_on_the_grid_or_with_the_prompt() -> None:
    assert shape([job(0, 11)], exact_traits()) == [[(0, 0, 8)]]
    assert shape([job(0, 11, 8)], exact_traits()) == [[(0, 8, 11)]]


def test_exact_sequences_are_decoded_one_at_a_time() -> None:
    assert shape([decoding(1), decoding(0)], exact_traits()) == [[(1, 5, 6)], [(0, 5, 6)]]


def test_an_exact_reply_is_fed_again_token_by_token() -> None:
    assert shape([job(0, 5, 5, 4)], exact_traits()) == [[(0, 5, 6)]]


def test_an_exact_chunk_that_does_not_fit_the_budget_waits_for_the_next_step() -> None:
    """It was rounded up past what n_batch had left, and past the end of a prompt that is shorter than a chunk."""
    assert shape([job(0, 2), job(1, 3)], exact_traits(n_batch=4)) == [[(0, 0, 2)]]
    assert shape([decoding(0), job(1, 2), job(2, 9)], exact_traits()) == [[(0, 5, 6)], [(1, 0, 2)]]


# ---- after failures --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("memory", list(Memory))
def test_those_of_a_failed_call_go_alone_and_last(memory: Memory) -> None:
    jobs = [decoding(0), decoding(1), decoding(2), decoding(3)]
    jobs[0].n_failures = jobs[2].n_failures = 1
    groups = shape(jobs, make_traits(memory, n_slots=4))
    assert groups == [[(1, 5, 6), (3, 5, 6)], [(0, 5, 6)], [(2, 5, 6)]]
