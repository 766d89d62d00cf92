"""Which tokens go into the next step. Pure over jobs and traits: reads them, changes nothing.

The rules: decode rows first; while any sequence decodes, at most one ubatch of prefill; rows in ascending
order of sequence; on memory with a state, decode rows and each prefill chunk in calls of their own; in exact mode one
sequence per call, chunks ending on the grid, and reply tokens one at a time as they were decoded. A chunk ends
where a checkpoint is to be taken, and a slot held for one is not fed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .backend import Feed

if TYPE_CHECKING:
    from .backend import Traits
    from .jobs import Job


@dataclass(slots=True)
class Batch:
    """The groups of a step, and whose each feed is."""

    groups: list[list[Feed]] = field(default_factory=list)
    jobs: list[list[Job]] = field(default_factory=list)
    n_tokens: int = 0


def _chunk_end(job: Job, traits: Traits, budget: int) -> int:
    """Where the job's next chunk ends if it may have `budget` tokens: where it begins if that is too few for any."""
    start = len(job.slot)
    end = start + min(budget, job.n_left)
    if start < job.capture_at < end:
        end = job.capture_at
    if not traits.exact:
        return end
    if start >= job.n_prompt:
        return start + 1
    if end >= job.prefill_target:
        return job.prefill_target
    return max(start, end // traits.n_ubatch * traits.n_ubatch)


def _feed(job: Job, end: int) -> Feed:
    start = job.slot.tokens.n
    if job.generated and start == job.tokens.n - 1:  # a decode row, made for every token of every reply
        return Feed(job.slot.slot_id, start, (job.generated[-1],), job.sampler)
    is_last = end - start == job.n_left
    wants_logits = is_last and job.request.return_logits and not job.generated
    return Feed(
        int(job.slot.slot_id),
        start,
        job.tokens.slice(start, end),
        job.sampler if is_last else None,
        wants_logits,
    )


def _isolate(runs: list[list[tuple[Job, int]]]) -> list[list[tuple[Job, int]]]:
    """Whoever was in a call that failed goes alone and last until it gets on: only one of them may be the cause."""
    kept = [[item for item in run if not item[0].n_failures] for run in runs]
    return [run for run in kept if run] + [[item] for run in runs for item in run if item[0].n_failures]


def compose(jobs: Sequence[Job], traits: Traits) -> Batch:
    """The next step for `jobs`, which are running, in any order. Empty if there is nothing to feed."""
    decoding: list[Job] = []
    filling: list[Job] = []
    for job in jobs:
        if not (job.is_waiting or job.slot.is_held or job.restore is not None):
            (decoding if job.is_decoding else filling).append(job)

    if not filling and not traits.exact and not any(job.n_failures for job in decoding):
        if not decoding:
            return Batch()
        decoding.sort(key=lambda job: job.slot.slot_id)
        return Batch([[_feed(job, job.slot.tokens.n + 1) for job in decoding]], [decoding], len(decoding))

    chosen = [(job, len(job.slot) + 1) for job in decoding]
    n_decoding = len(chosen)
    if filling:
        budget = traits.n_batch
        if decoding:
            budget = traits.n_ubatch
            if not (traits.memory.splits_steps or traits.exact):
                budget = max(1, budget - n_decoding)  # so that the call is one ubatch
        filling.sort(key=lambda job: (job.last_prefill, job.order))
        for job in filling:
            if budget < 1:
                break
            end = _chunk_end(job, traits, budget)
            if end > len(job.slot):
                chosen.append((job, end))
                budget -= end - len(job.slot)

    batch = Batch()
    if traits.exact:
        runs = [[item] for item in chosen]
    elif traits.memory.splits_steps:
        runs = [chosen[:n_decoding]] if n_decoding else []
        runs += [[item] for item in chosen[n_decoding:]]
    else:
        runs = [chosen] if chosen else []
    if any(job.n_failures for job, _ in chosen):
        runs = _isolate(runs)
    for run in runs:
        run.sort(key=lambda item: item[0].slot.slot_id)
        batch.groups.append([_feed(job, end) for job, end in run])
        batch.jobs.append([job for job, _ in run])
        batch.n_tokens += sum(end - len(job.slot) for job, end in run)
    return batch
