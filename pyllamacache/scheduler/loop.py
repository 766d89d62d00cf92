"""The thread: take what came, admit, step, again. It ends when told to, and takes everything with it when it fails.

The loop holds no reference to the engine or to anything of the user's but outboxes, so an engine that nobody holds
any more can be collected, and its finalizer stops the loop.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

from ..errors import ClosedError, InternalError, PyLlamaCacheError
from .admit import admit
from .behind import store_when_idle
from .inbox import Call, Inbox
from .publish import end_overdue
from .restore import abandon
from .step import run_step

if TYPE_CHECKING:
    from .state import SchedulerState

logger = logging.getLogger("pyllamacache.scheduler")


class Scheduler:
    """One thread over one `SchedulerState`. `start` once, `stop` any number of times."""

    def __init__(self, state: SchedulerState, what: str) -> None:
        self._what = what
        self.inbox = Inbox(what)
        self._thread = threading.Thread(
            target=_run,
            args=(state, self.inbox, what),
            name=f"pyllamacache {what}",
            daemon=True,
        )

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the loop: what runs fails with ClosedError, the backend is closed, the thread joined."""
        self.inbox.stop()
        if self._thread is not threading.current_thread() and self._thread.is_alive():
            self._thread.join()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()


def _run(state: SchedulerState, inbox: Inbox, what: str) -> None:
    error: PyLlamaCacheError = ClosedError(what)
    inbox.own()
    try:
        _loop(state, inbox)
    except PyLlamaCacheError as problem:
        error = problem
    except BaseException as problem:  # noqa: BLE001  # whatever it was, every handle must hear of it
        error = InternalError(f"the scheduler of {what} failed: {type(problem).__name__}: {problem}")
        error.__cause__ = problem
    if not isinstance(error, ClosedError):
        logger.error("%s", error, exc_info=error)
    _end(state, inbox, error)


def _loop(state: SchedulerState, inbox: Inbox) -> None:
    load = (0, 0)
    while True:
        is_idle = not state.running and not state.queue
        if is_idle:
            load = (0, 0)
            state.checkpoints.finish_all()
            state.report_checkpoints()
            state.report_tiers()
            state.metrics.load(*load, state.used_cells)
        if is_idle or inbox.has_items:
            has_more = is_idle and not inbox.has_items and store_when_idle(state)
            _take(state, inbox, wait=is_idle and not has_more)
        if inbox.is_stopping:
            return
        end_overdue(state)
        admit(state)
        if state.running:
            if load != (load := (len(state.queue), len(state.running))):
                state.metrics.load(*load, state.used_cells)
            run_step(state)


def _store_everything(state: SchedulerState) -> None:
    """What is idle outlives the engine where there is a disk for it."""
    disk = state.disk
    if disk is None:
        return
    try:
        for job in state.running:
            abandon(state, job)
            job.slot.job = None
        state.pins.clear(None)
        while state.spans.save_some(1 << 20):
            disk.settle()  # which makes room in host memory for the next
        disk.close()
    except Exception as problem:  # noqa: BLE001  # the engine ends; what is not stored is prefilled again
        logger.warning("the disk cache could not be completed: %s", problem)


def _take(state: SchedulerState, inbox: Inbox, *, wait: bool) -> None:
    for item in inbox.take(wait=wait):
        if isinstance(item, Call):
            item.run()
        else:
            state.queue.append(item)


def _end(state: SchedulerState, inbox: Inbox, error: PyLlamaCacheError) -> None:
    """Every handle hears of it; what comes later is refused with the same error."""
    left = inbox.close(error)
    for job in state.running:
        if job.sampler is not None:
            job.sampler.close()
        job.outbox.fail(error)
    for submission in state.queue:
        submission.outbox.fail(error)
    for item in left:
        if isinstance(item, Call):
            item.fail(error)
        else:
            item.outbox.fail(error)
    state.metrics.count("failed", len(state.running) + len(state.queue))
    state.metrics.load(0, 0, 0)
    _store_everything(state)
    state.running.clear()
    state.queue.clear()
    state.checkpoints.close()
    state.backend.close()
