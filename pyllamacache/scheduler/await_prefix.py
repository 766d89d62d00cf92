"""Requests with a common prefix that arrive together prefill it once: the others wait until the first has it.

Waiting costs nothing: what the one computes, the other would have to compute as well, on the same machine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..prefix.match import common_prefix_len
from ..prefix.placement import Placement
from ..request import CheckpointKind
from .placing import NEVER, add_placement

if TYPE_CHECKING:
    from ..prefix.plan import Plan
    from ..request import Request
    from .jobs import Job
    from .state import SchedulerState

MIN_AWAITED_TOKENS = 32
"""Less is not worth a cut in the other one's prefill."""


def must_await(state: SchedulerState, request: Request, chosen: Plan) -> bool:
    """Whether a running request is about to compute more of this prompt than the plan would reuse.

    Or has just computed it, and the state there is still being captured. Effects: that one will say when it is there,
    and on memory with a state it takes a checkpoint there.
    """
    found = awaited(state, request, chosen)
    if found is None:
        if not is_being_captured(state, request, chosen):
            return False
        if state.capture_awaited < 0:
            state.capture_awaited = state.checkpoints.n_ended
        return True
    job, position = found
    job.awaited_at = min(job.awaited_at, position)
    if state.rules.has_state:
        add_placement(state, job, Placement(position, CheckpointKind.BRANCH))
    return True


def awaited(state: SchedulerState, request: Request, chosen: Plan) -> tuple[Job, int] | None:
    """The running request to wait for, and the position. Effects: none."""
    if not _may_wait(state, request):
        return None
    found, furthest = None, chosen.resume_tokens
    for job in state.running:
        if job.slot.tokens.n >= job.n_prompt or job.request.namespace != request.namespace:
            continue
        position = _position(state, job, request)
        # where it will be cut anyway, less is worth it
        is_worth_it = position == job.awaited_at or position >= chosen.resume_tokens + MIN_AWAITED_TOKENS
        if is_worth_it and position > max(furthest, len(job.slot)):
            found, furthest = (job, position), position
    return found


def _may_wait(state: SchedulerState, request: Request) -> bool:
    can_take_over = state.rules.can_share or not state.rules.has_cells
    return request.cache_prompt and can_take_over and bool(state.running)


def is_being_captured(state: SchedulerState, request: Request, chosen: Plan) -> bool:
    """Whether a state beyond where the plan resumes is on its way, or waits for its turn. Effects: none."""
    if not (_may_wait(state, request) and state.checkpoints.is_capturing):
        return False
    path = state.index.path(request.namespace, request.prompt.ids[:-1])
    is_in_flight = any(node.position > chosen.resume_tokens and not node.is_ready for node in path)
    return is_in_flight or any(_is_held_for(job, request, chosen.resume_tokens) for job in state.running)


def _is_held_for(job: Job, request: Request, after: int) -> bool:
    n_tokens = len(job.slot)
    is_ours = job.slot.is_held and job.request.namespace == request.namespace and after < n_tokens < len(request.prompt)
    return is_ours and common_prefix_len(job.slot.tokens.ids, request.prompt.ids) == n_tokens


def look_for_capture(state: SchedulerState) -> None:
    """Somebody waits for one: have the queue planned anew if one has ended."""
    if state.running:
        state.checkpoints.poll()
    else:
        state.checkpoints.finish_all()
    if state.checkpoints.n_ended != state.capture_awaited:
        state.capture_awaited = -1
        state.n_changes += 1


def _position(state: SchedulerState, job: Job, request: Request) -> int:
    """Where the request could take over from the job; 0: nowhere."""
    common = common_prefix_len(job.request.prompt.ids, request.prompt.ids)
    position = min(common, len(request.prompt) - 1, job.prefill_target)
    position = position // state.rules.grid * state.rules.grid
    if not state.rules.has_state:
        return position
    can_capture = job.request.store and state.checkpoints.can_hold_one and position < job.prefill_target
    return position if can_capture else 0


def has_arrived(state: SchedulerState, job: Job) -> None:
    """The job is where somebody waits for it: plan again."""
    job.awaited_at = NEVER
    state.n_changes += 1
