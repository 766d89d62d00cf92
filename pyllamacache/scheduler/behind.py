"""Storing behind the requests' backs: when nothing runs, and under load as fast as cells are used up."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .state import SchedulerState

IDLE_TOKENS = 2048
"""Copied between two looks at the inbox while nothing runs: some milliseconds."""


def store_when_idle(state: SchedulerState) -> bool:
    """Copy some of what is idle to host memory, and pass on what is for the disk. False: there is nothing to copy."""
    if state.room.is_over:
        state.room.fit_limit()
    did_something = state.spans.is_wanted and state.spans.save_some(IDLE_TOKENS)
    if state.disk is not None:
        state.disk.pump()
    return did_something


def store_under_load(state: SchedulerState, n_tokens: int) -> None:
    """A step has used up cells for `n_tokens`: copy as much of what will have to go for the next ones.

    A copy takes about a thousandth of what computing the same tokens does, on a CPU.
    """
    spans = state.spans
    spans.credit_tokens += n_tokens
    if spans.credit_tokens >= state.index.span_tokens:
        if spans.is_wanted:
            spans.save_some(spans.credit_tokens)
        spans.credit_tokens = 0
        if state.disk is not None:
            state.disk.pump()
