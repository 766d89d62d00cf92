"""When a running request takes checkpoints: where its placement says during prefill, every so often during its reply.

Between the native calls of a step; the positions are cut into the prefill by `compose`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..prefix.placement import ROLLING_TOKENS, TAIL_TOKENS, Placement, place
from ..prefix.retention import Eviction
from ..request import CheckpointKind

if TYPE_CHECKING:
    from .jobs import Job
    from .state import SchedulerState

NEVER = 1 << 62
"""A position no sequence gets to."""

MAX_ROLLING = 2


def plan_captures(state: SchedulerState, job: Job) -> None:
    """Decide where the job's prefill takes checkpoints, from where its slot is now."""
    checkpoints, request, slot = state.checkpoints, job.request, job.slot
    job.capture_at = NEVER
    if not (checkpoints.can_hold_one and request.store):
        return
    traits = state.traits
    on_the_way = checkpoints.index.path(request.namespace, request.prompt.ids)
    wanted = (*request.boundaries, *request.marks)
    if request.marks:
        slot.marks = frozenset((*request.marks, job.n_prompt - TAIL_TOKENS))
    else:
        slot.marks = frozenset()
    checkpoints.touch(on_the_way, wanted, priority=slot.priority, expires_s=slot.expires_s)
    job.placements = list(
        place(
            resume=len(slot),
            target=job.prefill_target,
            n_prompt=job.n_prompt,
            matched=job.plan.matched_tokens,
            boundaries=request.boundaries,
            marks=request.marks,
            known={node.position for node in on_the_way},
            n_ubatch=traits.n_ubatch,
            n_batch=traits.n_batch,
            grid=state.rules.grid,
            min_gap=checkpoints.min_gap_tokens,
            n_free=checkpoints.n_free,
        )
    )
    job.placements.reverse()
    _set_next(state, job)


def _set_next(state: SchedulerState, job: Job) -> None:
    if job.placements:
        job.capture_at = job.placements[-1].position
    elif state.traits.exact:
        job.capture_at = NEVER  # reply tokens are not reused there
    else:
        job.capture_at = max(job.n_prompt, job.slot.tokens.n) + ROLLING_TOKENS


def add_placement(state: SchedulerState, job: Job, placement: Placement) -> None:
    """One more, ahead of where the job is."""
    at = [each.position for each in job.placements]
    if placement.position in at:
        return
    job.placements.append(placement)
    job.placements.sort(key=lambda each: -each.position)
    _set_next(state, job)


def capture(state: SchedulerState, job: Job) -> None:
    """The slot is at `job.capture_at`: take what was to be taken there."""
    if job.placements:
        state.checkpoints.take(job.slot, job.placements.pop().kind)
    else:
        node = state.checkpoints.take(job.slot, CheckpointKind.ROLLING)
        if node is not None and node.kind is CheckpointKind.ROLLING and node not in job.rolling:
            job.rolling.append(node)
            drop_rolling(state, job, keep=MAX_ROLLING)
    _set_next(state, job)


def drop_rolling(state: SchedulerState, job: Job, *, keep: int) -> None:
    """Older rolling checkpoints of a reply make room for newer ones."""
    while len(job.rolling) > keep:
        node = job.rolling.pop(0)
        if state.checkpoints.has(node) and not node.n_users and node.is_second_class:
            state.checkpoints.drop(node, Eviction.REPLACED)


def capture_end(state: SchedulerState, job: Job) -> None:
    """The job is over: what its slot holds is worth one. A rolling one before it stays, for a trimmed reply."""
    checkpoints, slot, request = state.checkpoints, job.slot, job.request
    if not (checkpoints.is_on and request.store and len(slot)):
        return
    is_near = bool(job.rolling) and len(slot) - job.rolling[-1].position < TAIL_TOKENS
    drop_rolling(state, job, keep=2 if is_near else 1)
    if state.traits.exact and (slot.exact_tokens < len(slot) or len(slot) % state.rules.grid):
        return
    checkpoints.take(slot, CheckpointKind.END)
