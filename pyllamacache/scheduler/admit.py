"""From the queue to a slot: match, plan, reserve, restore.

A request is admitted when a slot is free and the cells it may need (prompt + max_tokens) can be had beside what the
running ones may still need. First come, first served; stepped over are those that wait for a slot they asked for, or
for a prefix that a running request is computing.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from ..errors import GrammarError, NativeError, RequestTimeoutError
from ..prefix.plan import Plan, SlotView, Wait, plan
from ..request import CacheReport, Chunk, Completion, Reason, ReusePlan, SlotId, Source, Timings, Usage
from ..text.decode import TextStream
from . import restore
from .await_prefix import awaited, is_being_captured, look_for_capture, must_await
from .jobs import Job
from .recent import evidence_of
from .slots import TokenBuffer
from .spans import reusable

if TYPE_CHECKING:
    from ..prefix.stored import StoredPrefix
    from ..request import Request
    from .inbox import Submission
    from .state import SchedulerState


def expire(state: SchedulerState) -> None:
    """End queued requests that were cancelled or whose time is up."""
    now = state.clock()
    kept = []
    for submission in state.queue:
        request, outbox = submission.request, submission.outbox
        if outbox.is_cancelled:
            state.metrics.count("cancelled")
            outbox.push(Chunk("", finish_reason="cancelled"))
            outbox.finish(_cancelled_in_queue(submission, now))
        elif request.timeout_s is not None and now - submission.submitted_s >= request.timeout_s:
            state.metrics.count("failed")
            outbox.fail(RequestTimeoutError(request.timeout_s, 0, 0))
        else:
            kept.append(submission)
    if len(kept) < len(state.queue):
        state.n_changes += 1
    state.queue.clear()
    state.queue.extend(kept)


def _cancelled_in_queue(submission: Submission, now: float) -> Completion:
    """A request that never ran: nothing was cached, prefilled or written."""
    waited_s = now - submission.submitted_s
    return Completion(
        text="",
        token_ids=(),
        finish_reason="cancelled",
        usage=Usage(0, 0, 0, 0),
        cache=CacheReport(0, 0, 0, Source.NONE, Reason.NOT_RUN, 0),
        timings=Timings(waited_s, 0.0, 0.0, math.nan, 0.0),
        slot_id=None,
        prompt_token_ids=submission.request.prompt.ids,
    )


def admit(state: SchedulerState) -> None:
    """Start every queued request that can start now."""
    if not state.queue:
        return
    if state.room.is_over:
        state.room.fit_limit()
    if any(each.outbox.is_cancelled or each.request.timeout_s is not None for each in state.queue):
        expire(state)
    if state.capture_awaited >= 0:
        look_for_capture(state)
    if state.refused_at == (state.n_changes, len(state.queue)):
        return
    waiting: list[Submission] = []
    n_awaiting = 0
    try:
        while state.queue:
            submission = state.queue[0]
            chosen, stored = choose(state, submission.request)
            if isinstance(chosen, Plan):
                if must_await(state, submission.request, chosen):
                    n_awaiting += 1
                    waiting.append(state.queue.popleft())
                    continue
                if n_awaiting >= state.n_idle or not _fits(state, submission.request, chosen):
                    break  # a slot is kept for each of those that wait for a prefix
                _start(state, submission, chosen, stored)
                state.queue.popleft()  # not before: whatever goes wrong, the request is where its end is told
            elif chosen.slot_id is not None:
                waiting.append(state.queue.popleft())
            else:
                break
    finally:
        state.queue.extendleft(reversed(waiting))
    state.refused_at = (state.n_changes, len(state.queue))


def choose(state: SchedulerState, request: Request, *, as_if_idle: bool = False) -> tuple[Plan | Wait, StoredPrefix]:
    """What the request would reuse now, and what is stored of it. Effects: none.

    With `as_if_idle` there is one more slot, which is empty.
    """
    ids, namespace = request.prompt.ids, request.namespace
    stored = state.stored(namespace, ids)
    views = state.views(stored.matches[0], request.cache_key)
    if as_if_idle:
        views.append(SlotView(SlotId(-1), False, ids[:0], namespace, 0, 0, 0))
        request = replace(request, slot=None)
    chosen = plan(
        ids,
        views,
        rules=state.rules,
        namespace=namespace,
        checkpoints=sorted(stored.checkpoints()),
        stored=stored if state.spans.is_on else None,
        slot_id=request.slot,
        cache_prompt=request.cache_prompt,
        store=request.store,
    )
    if isinstance(chosen, Plan) and chosen.reason is Reason.NO_CHECKPOINT:
        evicted = state.index.evicted.deepest(namespace, ids, chosen.resume_tokens, chosen.position)
        if evicted:
            chosen = replace(chosen, reason=Reason.EVICTED, position=evicted)
    return chosen, stored


def forecast(state: SchedulerState, request: Request) -> ReusePlan:
    """What the request would reuse if it were admitted now. Effects: none, but what has expired is given up."""
    chosen, stored = choose(state, request)
    must_wait = isinstance(chosen, Wait)
    if isinstance(chosen, Wait):  # as if it could run in a slot of its own
        chosen, stored = choose(state, request, as_if_idle=True)
        assert isinstance(chosen, Plan)
    else:
        is_awaited = awaited(state, request, chosen) is not None or is_being_captured(state, request, chosen)
        must_wait = is_awaited or not _fits(state, request, chosen)
    source, n_bytes, load_s = restore.cost(state, chosen, stored)
    n_prefill = len(request.prompt) - chosen.resume_tokens
    per_token = state.checkpoints.rates.prefill_s_per_token
    return ReusePlan(
        matched_tokens=chosen.matched_tokens,
        resumable_tokens=chosen.resume_tokens,
        prefill_tokens=n_prefill,
        source=source,
        reason=chosen.reason,
        position=chosen.position,
        restore_bytes=n_bytes,
        expected_s=math.nan if per_token is None else n_prefill * per_token + load_s,
        must_wait=must_wait,
    )


def _fits(state: SchedulerState, request: Request, chosen: Plan) -> bool:
    """Whether the running requests and this one could all reach their full length at once."""
    if not state.counts_cells or not state.running:
        return True
    ledger = state.ledger.copy()
    kept = chosen.resume_tokens
    if chosen.source is Source.HOST:  # what is put back gets cells of its own
        kept = chosen.held_tokens // state.index.span_tokens * state.index.span_tokens
    if chosen.donor_id is None and chosen.source is not Source.NONE:
        ledger.trim(chosen.slot_id, min(kept, ledger.length(chosen.slot_id)))
    else:
        ledger.erase(chosen.slot_id)
        if chosen.donor_id is not None:
            ledger.share(chosen.donor_id, chosen.slot_id, kept)
    lengths = {job.slot.slot_id: job.total_tokens for job in state.running}
    lengths[chosen.slot_id] = len(request.prompt) + request.max_tokens
    return ledger.used_if(lengths) <= state.traits.kv_tokens


def prefill_target(state: SchedulerState, request: Request) -> int:
    """Prompt tokens to compute. A warm-up leaves a state that the same prompt, or a longer one, can resume from."""
    n = len(request.prompt)
    if request.generate or state.memory.is_shareable:
        return n
    if state.traits.exact:
        return n // state.traits.n_ubatch * state.traits.n_ubatch
    return n - 1


def _start(state: SchedulerState, submission: Submission, chosen: Plan, stored: StoredPrefix) -> None:
    request, outbox = submission.request, submission.outbox
    sampler = None
    if request.generate and request.max_tokens > 0:
        try:
            sampler = state.backend.new_sampler(request.sampling, request.prompt.ids)
        except (GrammarError, NativeError) as error:
            state.metrics.count("failed")
            outbox.fail(error)
            return
    slot = state.slots[chosen.slot_id]
    state.n_admitted += 1
    job = Job(
        request=request,
        outbox=outbox,
        slot=slot,
        plan=chosen,
        tokens=TokenBuffer(request.prompt.ids, spare=min(request.max_tokens, 4096) + 1),
        text=TextStream(request.stop),
        sampler=sampler,
        submitted_s=submission.submitted_s,
        admitted_s=state.clock(),
        evidence=evidence_of(state, request, chosen, stored),
        order=state.n_admitted,
        deadline_s=None if request.timeout_s is None else submission.submitted_s + request.timeout_s,
        prefill_target=prefill_target(state, request),
    )
    state.recents.begin(request, job.admitted_s)
    slot.job = job
    slot.cache_key = request.cache_key
    state.checkpoints.now = state.n_admitted
    state.touch(slot)
    state.running.append(job)
    job.restore_started_s = state.clock()
    state.touch_donor(chosen.donor_id, slot)
    _restore(state, job, stored)
    slot.namespace = request.namespace
    slot.priority = request.priority
    slot.expires_s = None if request.ttl_s is None else state.clock() + request.ttl_s
    state.expiry.note(slot.expires_s)
    if job.restore is None:
        restore.finish(state, job)


def _restore(state: SchedulerState, job: Job, stored: StoredPrefix) -> None:
    """Bring the slot to the planned resume position, or begin to. A refusal costs the reuse, not the request."""
    chosen, slot = job.plan, job.slot
    job.source, job.reason, job.position = chosen.source, chosen.reason, chosen.position
    leased = restore.lease(state, job, stored)
    with state.lease(chosen.donor_id):
        _park(state, job)
        try:
            if leased is not None:
                restore.begin(state, job, leased)
            elif chosen.source is Source.SHARED and chosen.donor_id is not None:
                state.share(chosen.donor_id, slot, job.request.prompt.ids[: chosen.resume_tokens])
            elif chosen.source is Source.SLOT:
                if chosen.resume_tokens < len(slot) and not state.trim(slot, chosen.resume_tokens):
                    job.source, job.reason = Source.NONE, Reason.NOT_REWINDABLE
            elif chosen.source is Source.CHECKPOINT:
                _resume_checkpoint(state, job)
            elif len(slot):
                state.erase(slot)
        except NativeError:
            restore.abandon(state, job)
            state.erase(slot)
            job.source, job.reason, job.position = Source.NONE, Reason.LOST, 0


def _park(state: SchedulerState, job: Job) -> None:
    """Keep what the slot holds and this request does not go on with, or will not leave there."""
    slot, chosen = job.slot, job.plan
    goes_on = chosen.source is Source.SLOT and chosen.resume_tokens == len(slot)
    if goes_on and (job.request.store or state.memory.is_shareable):
        return
    if state.parking.is_on:
        state.parking.park(slot)
    elif len(slot):
        kept = chosen.resume_tokens if chosen.source is Source.SLOT else 0
        state.spans.save_tail(slot.slot_id, slot, reusable(state, slot), kept)


def _resume_checkpoint(state: SchedulerState, job: Job) -> None:
    """Put the planned state back, or the next shallower one."""
    chosen, slot, request = job.plan, job.slot, job.request
    donor_id, ids = chosen.donor_id, request.prompt.ids
    for node in reversed(state.checkpoints.path(request.namespace, ids[: chosen.resume_tokens])):
        if not state.checkpoints.has(node):
            continue  # given up for what the slot waited with
        n_before = len(slot)
        try:
            state.resume(donor_id, slot, node, ids[: node.position])
        except NativeError:
            if donor_id is None and len(slot) < n_before and state.memory.has_cells:
                break  # its cells are gone with its state
            continue
        if node.position < chosen.resume_tokens:
            job.reason, job.position = Reason.LOST, node.position
        return
    state.erase(slot)
    job.source, job.reason, job.position = Source.NONE, Reason.LOST, 0
