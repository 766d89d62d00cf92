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

    Or has just computed it, and its state is still being captured. Effects: that one will say when it is there, and on
    memory with a state it takes a checkpoint there.
    """
    if not (request.cache_prompt and (state.rules.can_share or not state.rules.has_cells) and state.running):
        return False
    best: Job | None = None
    furthest = chosen.resume_tokens + MIN_AWAITED_TOKENS - 1
    for job in state.running:
        if job.slot.tokens.n >= job.n_prompt or job.request.namespace != request.namespace:
            continue
        position = _position(state, job, request)
        if position > furthest and len(job.slot) < position:
            best, furthest = job, position
    if best is None:
        return _is_being_captured(state, request, furthest)
    best.awaited_at = min(best.awaited_at, furthest)
    if state.rules.has_state:
        add_placement(state, best, Placement(furthest, CheckpointKind.BRANCH))
    return True


def _is_being_captured(state: SchedulerState, request: Request, after: int) -> bool:
    """Where the memory has a state: whether one beyond `after` is on its way. Its arrival has the queue planned anew."""
    if not state.checkpoints.is_capturing:
        return False
    path = state.index.path(request.namespace, request.prompt.ids[:-1])
    return any(node.position > after and not node.is_ready for node in path)


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
