"""An engine over the fake backend: the real loop on its real thread, made and ended as `Engine` makes and ends it."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from pyllamacache.config import CacheBudget
from pyllamacache.observe.metrics import Metrics, Statistics
from pyllamacache.scheduler.handle import Handle
from pyllamacache.scheduler.inbox import Outbox, Submission
from pyllamacache.scheduler.loop import Scheduler
from pyllamacache.scheduler.state import SchedulerState
from pyllamacache.store.host import HostPool

from .backend import FakeBackend, make_traits
from .driver import make_request
from .vocabulary import ByteVocab

WAIT_S = 20.0
"""Longer than anything here takes; a test that hangs fails after it."""


def until(condition: Callable[[], bool]) -> None:
    """Look again and again until it holds; for what tells nobody when it happens."""
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, "it never happened"


class Gate:
    """Stops the scheduler's thread before a step until it is let on."""

    def __init__(self) -> None:
        self._reached = threading.Semaphore(0)
        self._let_on = threading.Semaphore(0)
        self._is_open = False

    def __call__(self) -> None:
        self._reached.release()
        if not self._is_open:
            assert self._let_on.acquire(timeout=WAIT_S), "nobody let the scheduler on"

    def wait(self) -> None:
        """Until a step is about to be made."""
        assert self._reached.acquire(timeout=WAIT_S), "no step came"

    def let_on(self, n_steps: int = 1) -> None:
        self._let_on.release(n_steps)

    def open(self) -> None:
        """No step waits any more."""
        self._is_open = True
        self._let_on.release(1000)


class FakeEngine:
    """Submits requests, keeps its thread as `Engine` does, and is ended by `close` or by the collector."""

    def __init__(
        self,
        backend: FakeBackend | None = None,
        clock: Callable[[], float] = time.monotonic,
        *,
        max_checkpoints: int = 0,
    ) -> None:
        self.backend = backend or FakeBackend(make_traits())
        metrics = Metrics(self.backend.traits.kv_tokens)
        budget = CacheBudget(max_checkpoints, 1 << 24, 1 << 24)
        pool = HostPool(budget.host_bytes)
        self.state = SchedulerState(self.backend, metrics, clock, ByteVocab().piece, pool, budget)
        self.scheduler = Scheduler(self.state, "fake engine")
        self.scheduler.start()
        self._finalizer = weakref.finalize(self, self.scheduler.stop)

    def submit(self, ids: Sequence[int], **options: Any) -> Handle:
        request, outbox = make_request(ids, **options), Outbox(keeps_chunks=True)
        self.scheduler.inbox.submit(Submission(request, outbox, self.state.clock()))
        return Handle(request, outbox, self, shows_progress=False)

    def call(self, function: Callable[[], Any]) -> Any:
        return self.scheduler.inbox.call(function)

    @property
    def statistics(self) -> Statistics:
        return self.state.metrics.snapshot()

    def close(self) -> None:
        self._finalizer()
