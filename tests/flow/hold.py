"""Deciding what happens in which order without sleeping: the scheduler held between two steps, hooks at its steps."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from pyllamacache import Handle
from pyllamacache.scheduler.inbox import Call

LIMIT_S = 50.0
"""A safety net for waits that take milliseconds; never what a test measures."""


@contextmanager
def held(engine: Any) -> Iterator[None]:
    """The scheduler stands between two steps; what is sent meanwhile arrives at once, in the order it was sent."""
    entered, released = threading.Event(), threading.Event()

    def stand() -> None:
        entered.set()
        released.wait(LIMIT_S)

    call = Call(stand)
    engine._scheduler.inbox._put(call)
    assert entered.wait(LIMIT_S)
    try:
        yield
    finally:
        released.set()
        call.wait()


def before_step(engine: Any, nth: int, function: Callable[[], object]) -> None:
    """Run `function` on the scheduler's thread before the nth native step from now."""
    backend = engine._state.backend
    native_step, left = backend.step, iter(range(nth - 1, -1, -1))

    def step(groups: Any) -> Any:
        if next(left, -1) == 0:
            function()
        return native_step(groups)

    backend.step = step


def on_chunk(handle: Handle, function: Callable[[], None]) -> None:
    """Run `function` on the scheduler's thread after each chunk of the request and at its end."""
    handle._outbox.listen(function)


def finish_order(handles: list[Handle]) -> list[int]:
    """A list that fills with the indices of `handles` as they finish. To be called while the scheduler is held."""
    order: list[int] = []

    def listener(index: int) -> Callable[[], None]:
        def note() -> None:
            if handles[index].done and index not in order:
                order.append(index)

        return note

    for index, handle in enumerate(handles):
        on_chunk(handle, listener(index))
    return order


def wait_for_chunk(handle: Handle) -> None:
    """Until the request has sampled its first token. The chunk is taken."""
    assert handle._outbox.next_chunk() is not None
