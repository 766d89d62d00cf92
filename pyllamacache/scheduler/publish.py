"""From sampled tokens to chunks, and from a finished job to its answer and an idle slot."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from ..errors import RequestTimeoutError
from ..request import (
    CacheReport,
    Chunk,
    Completion,
    FinishReason,
    Source,
    Timings,
    Usage,
)
from ..text.transcripts import transcribe
from .placing import capture_end
from .restore import abandon

if TYPE_CHECKING:
    from ..request import TokenLogprob
    from .jobs import Job
    from .state import SchedulerState


def take_token(state: SchedulerState, job: Job, token: int, logprob: TokenLogprob | None) -> None:
    """A token was sampled for the job: pass its text on, and end the job where it ends."""
    if not job.generated:
        job.first_token_s = state.clock()
    job.generated.append(token)
    job.tokens.append(token)
    if logprob is not None:
        job.logprobs.append(logprob)
    reason: FinishReason | None = None
    if token in state.traits.eog_ids:
        text, reason = "", "stop"
    else:
        piece = state.piece(token)
        if not piece and job.request.spells_controls:
            piece = state.control_text(token)
        text = job.text.push(piece)
        if job.text.stopped:
            reason = "stop"
        elif len(job.generated) >= job.request.max_tokens:
            reason = "length"
    if reason is not None and not job.text.stopped:
        text += job.text.finish()
    if text:
        job.pieces.append(text)
    if job.outbox.keeps_chunks:
        job.outbox.push(Chunk(text, (token,), () if logprob is None else (logprob,), reason))
        if len(job.generated) == 1:
            time.sleep(0)  # lets go of the GIL: the reader gets the first token now, not some steps later
    if reason is not None:
        finish(state, job, reason)


def finish(state: SchedulerState, job: Job, reason: FinishReason) -> None:
    """Answer the request and leave the slot idle, holding what was computed unless it was not to be stored."""
    now = state.clock()
    abandon(state, job)
    if reason == "cancelled" or not job.generated:  # otherwise the last token's chunk has said so
        rest = "" if job.text.stopped else job.text.finish()
        if rest:
            job.pieces.append(rest)
        if job.outbox.keeps_chunks:
            job.outbox.push(Chunk(rest, (), (), reason))
    usage, timings = _usage(state, job), _timings(job, now)
    report = _report(state, job, timings.prefill_s)
    capture_end(state, job)  # while the job still counts as running, which whoever ends it in an emergency relies on
    state.report_checkpoints()
    _release(state, job)
    state.report_tiers()
    completion = Completion(
        text="".join(job.pieces),
        token_ids=tuple(job.generated),
        finish_reason=reason,
        usage=usage,
        cache=report,
        timings=timings,
        slot_id=job.slot.slot_id,
        logprobs=tuple(job.logprobs) if job.request.sampling.logprobs else None,
        logits=job.logits,
        prompt_token_ids=job.request.prompt.ids,
    )
    _remember(state, job)
    state.metrics.finished(completion)
    job.outbox.finish(completion)


def fail(state: SchedulerState, job: Job, error: BaseException) -> None:
    """End one request with an error. What it computed stays in its slot."""
    abandon(state, job)
    state.metrics.failed(
        job.source,
        job.reason,
        prompt=_prompt_tokens_held(job),
        cached=job.resumed_tokens,
        completion=len(job.generated),
    )
    _release(state, job)
    job.outbox.fail(error)


def end_overdue(state: SchedulerState) -> None:
    """End running requests that were cancelled or whose time is up."""
    now: float | None = None
    for job in list(state.running):
        if job.outbox.is_cancelled:
            finish(state, job, "cancelled")
        elif job.deadline_s is not None:
            now = state.clock() if now is None else now
            if now >= job.deadline_s:
                prefilled = _prompt_tokens_held(job) - job.resumed_tokens
                timeout_s = job.request.timeout_s or 0.0
                fail(
                    state,
                    job,
                    RequestTimeoutError(timeout_s, prefilled, len(job.generated)),
                )


def _remember(state: SchedulerState, job: Job) -> None:
    """Keep what a text prompt and its reply were spelled with; before the answer, which may be sent back at once."""
    request, spelled = job.request, None
    if request.store and request.prompt.spelling is not None:
        transcript = transcribe(
            request.namespace,
            request.prompt,
            job.generated,
            state.piece,
            state.control_text,
            state.traits.eog_ids,
        )
        if transcript is not None:
            state.transcripts.add(transcript)
            spelled = (transcript.ids, transcript.spelling)
    state.recents.end(request, job.generated, spelled)


def _release(state: SchedulerState, job: Job) -> None:
    slot = job.slot
    if job.sampler is not None:
        job.sampler.close()
    slot.job = None
    state.running.remove(job)
    for other in state.running:
        other.is_waiting = False
    state.touch(slot)
    if not job.request.store and len(slot):
        keep = job.resumed_tokens if job.source is Source.SLOT else 0
        if keep < len(slot):
            state.trim(slot, keep if keep >= state.rewind_floor(slot) else 0)


def _prompt_tokens_held(job: Job) -> int:
    return min(len(job.slot), job.n_prompt)


def _usage(state: SchedulerState, job: Job) -> Usage:
    held = _prompt_tokens_held(job)
    if state.traits.exact:
        held = min(held, job.slot.exact_tokens)
        if not state.memory.is_shareable and state.rewind_floor(job.slot) > max(held, 1):
            # the state lies behind tokens that exact mode does not reuse
            held = max(
                (node.position for node in state.checkpoints.held_by(job.slot) if node.position <= held), default=0
            )
    known = job.resumed_tokens
    if job.source is not Source.NONE and not state.traits.exact:
        known = max(known, job.plan.matched_tokens)  # computed again, but not new
    written = max(0, held - known) if job.request.store else 0
    return Usage(_prompt_tokens_held(job), job.resumed_tokens, len(job.generated), written)


def _report(state: SchedulerState, job: Job, prefill_s: float) -> CacheReport:
    evidence, per_token = job.evidence, state.checkpoints.rates.prefill_s_per_token
    if evidence is not None:
        evidence = replace(evidence, prefill_s_per_token=per_token, prefill_s=prefill_s)
    return CacheReport(
        matched_tokens=job.plan.matched_tokens,
        resumed_tokens=job.resumed_tokens,
        prefilled_tokens=_prompt_tokens_held(job) - job.resumed_tokens,
        source=job.source,
        reason=job.reason,
        position=job.position,
        retokenized_at=job.request.prompt.retokenized_at,
        evidence=evidence,
    )


def _timings(job: Job, now: float) -> Timings:
    first = job.first_token_s
    return Timings(
        queue_s=job.admitted_s - job.submitted_s,
        restore_s=job.restored_s,
        prefill_s=(first or now) - job.prefill_started_s,
        ttft_s=first - job.submitted_s if first else math.nan,
        decode_s=now - first if first else 0.0,
    )
