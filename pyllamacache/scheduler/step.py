"""One step: make room, one native call, and what its result means for each job.

`llama_decode` says done (0), nothing changed (1: no cells, -1: refused) or may have changed every sequence of the
batch (anything else). After the last, a sequence of memory that can be cut goes back to where it was; any other is
erased and fed again: its request goes on, its neighbours outside the batch notice nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import CellsExhaustedError, GrammarError, NativeError
from ..prefix.evict import Cut, plan_cuts
from ..request import Reason, Source
from . import restore
from .await_prefix import has_arrived
from .backend import Outcome
from .behind import store_under_load
from .compose import Batch, compose
from .placing import capture, plan_captures
from .publish import fail, finish, take_token

if TYPE_CHECKING:
    from .backend import Feed, StepResult
    from .jobs import Job
    from .state import SchedulerState

MAX_FAILURES = 2
"""Native calls that may fail under one request at one point before the request fails."""


def run_step(state: SchedulerState) -> None:
    """Feed the running jobs once. Ends those that have nothing left to feed."""
    started_s = state.clock()
    if state.checkpoints.is_waiting:
        state.checkpoints.serve()
    if any(job.restore is not None for job in state.running):
        restore.advance_all(state)
    _finish_fed(state)
    batch = _make_room(state)
    native_s = 0.0
    if batch.groups:
        state.n_steps += 1
        native_started_s = state.clock()
        result = state.backend.step(batch.groups)
        native_s = state.clock() - native_started_s
        if state.checkpoints.is_unprepared and result.n_groups_done:
            state.checkpoints.prepare(batch.jobs[0][0].slot)
        _learn(state, batch, native_s, result)
        _take_result(state, batch, result)
        _finish_fed(state)
        store_under_load(state, batch.n_tokens)
    elif state.checkpoints.is_waiting:
        state.checkpoints.wait()
    else:
        restore.wait(state)
    state.report_checkpoints()
    state.metrics.step(native_s, state.clock() - started_s - native_s, state.used_cells)


def _learn(state: SchedulerState, batch: Batch, seconds: float, result: StepResult) -> None:
    """What a prefilled token costs, from steps that were nothing else."""
    if batch.n_tokens >= state.traits.n_ubatch and len(batch.groups) == 1 and result.outcome is Outcome.DONE:
        state.checkpoints.rates.prefilled(batch.n_tokens, seconds)


def _finish_fed(state: SchedulerState) -> None:
    """Warm-ups and requests of no tokens end when their prompt is in."""
    if any(job.sampler is None for job in state.running):
        for job in [job for job in state.running if job.sampler is None and job.n_left <= 0 and not job.restore]:
            finish(state, job, "length")


# ---- room ------------------------------------------------------------------------------------------------------


def _make_room(state: SchedulerState) -> Batch:
    """The next batch, after idle slots were cut for its cells and, where that is not enough, the youngest set aside."""
    while True:
        batch = compose(state.running, state.traits)
        if not state.counts_cells or batch.n_tokens <= state.free_cells:
            return batch
        slack = state.traits.n_ubatch  # or every token of every reply would come here again
        cuts = plan_cuts(batch.n_tokens, state.free_cells, state.victims(), state.ledger, slack=slack)
        state.apply_cuts(cuts)
        if batch.n_tokens <= state.free_cells:
            return batch
        if not _yield_cells(state, batch.n_tokens):
            return Batch()


def _yield_cells(state: SchedulerState, needed_cells: int) -> bool:
    """Running jobs collide: the youngest waits; if it already does, it gives its cells back. False: nothing to run."""
    active = sorted((job for job in state.running if not job.is_waiting), key=lambda job: job.order)
    if len(active) > 1:
        active[-1].is_waiting = True
        return True
    holders = [job for job in state.running if job.is_waiting and len(job.slot)]
    if active and holders:
        _preempt(state, max(holders, key=lambda job: job.order))
        return True
    for job in active:
        fail(
            state,
            job,
            CellsExhaustedError(needed_cells, max(0, state.free_cells), state.traits.kv_tokens),
        )
    return bool(state.running)


def _preempt(state: SchedulerState, job: Job) -> None:
    state.metrics.count("preempted")
    restore.abandon(state, job)
    state.erase(job.slot)
    _restart(state, job, Reason.PREEMPTED)


def _restart(state: SchedulerState, job: Job, reason: Reason) -> None:
    """The job's slot lost tokens, all or some: it is fed from there again, reply included, and says so."""
    if not len(job.slot) or len(job.slot) < job.resumed_tokens:
        job.resumed_tokens = len(job.slot)
        job.source = Source.CHECKPOINT if len(job.slot) else Source.NONE
        job.reason, job.position = reason, len(job.slot)
    plan_captures(state, job)


# ---- results ---------------------------------------------------------------------------------------------------


def _take_result(state: SchedulerState, batch: Batch, result: StepResult) -> None:
    index = 0
    for group, jobs in zip(batch.groups[: result.n_groups_done], batch.jobs, strict=False):
        for feed, job in zip(group, jobs, strict=True):
            _take_fed(state, job, feed, result, index)
            index += 1
    if result.outcome is not Outcome.DONE:
        _take_failure(state, batch, result)


def _take_fed(state: SchedulerState, job: Job, feed: Feed, result: StepResult, index: int) -> None:
    slot = job.slot
    end = feed.start + len(feed.tokens)
    if end - feed.start == 1:
        slot.tokens.append(feed.tokens[0])
    else:
        slot.tokens.extend(job.tokens.slice(feed.start, end))
    state.grown(slot)
    if job.n_failures and end >= job.failed_end:
        job.n_failures = 0
    if end <= job.n_prompt:
        job.last_prefill = state.n_steps
        job.outbox.prefilled_tokens = end
        grid = state.traits.n_ubatch
        slot.exact_tokens = end // grid * grid if state.traits.exact else end
    if end == job.capture_at:
        capture(state, job)
    if end >= job.awaited_at:
        has_arrived(state, job)
    if feed.want_logits:
        job.logits = result.logits[index]
    if feed.sampler is None:
        return
    if index in result.sampler_errors:
        fail(state, job, _sampling_error(job, result.sampler_errors[index]))
    else:
        take_token(state, job, result.tokens[index], result.logprobs.get(index))


def _sampling_error(job: Job, log: str) -> Exception:
    sampling = job.request.sampling
    if sampling.grammar is not None or sampling.constraint is not None:
        return GrammarError(log)
    return NativeError("llama_sampler_sample", -1, log)


def _take_failure(state: SchedulerState, batch: Batch, result: StepResult) -> None:
    """The group after the last done one failed; later groups were not tried and come again with the next step."""
    jobs = batch.jobs[result.n_groups_done]
    feeds = batch.groups[result.n_groups_done]
    if result.outcome is Outcome.NO_CELLS:
        _take_no_cells(state, feeds)
        return
    if result.outcome is Outcome.LOST:
        state.metrics.count("lost_steps")
    for job, feed in zip(jobs, feeds, strict=True):
        job.n_failures += 1
        job.failed_end = max(job.failed_end, feed.start + len(feed.tokens))
        if result.outcome is Outcome.LOST:
            state.resynchronize(job.slot, feed.start)
        elif state.backend.length(job.slot.slot_id) != feed.start:
            state.erase(job.slot)  # our books and the memory disagree: the memory is what counts
        if len(job.slot) < feed.start:
            _restart(state, job, Reason.LOST)
        if job.n_failures > MAX_FAILURES:
            fail(state, job, NativeError("llama_decode", result.code, result.log))


def _take_no_cells(state: SchedulerState, feeds: list[Feed]) -> None:
    """llama.cpp found no place although the books had one: give up idle content, then let the youngest wait."""
    victims = state.victims()
    if victims:
        state.apply_cuts((Cut(min(victims, key=lambda each: each.rank).slot_id, 0),))
        return
    _yield_cells(state, sum(len(feed.tokens) for feed in feeds))
