"""`Handle`: a submitted request as its caller sees it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Generator
from numbers import Real
from typing import TYPE_CHECKING

from ..errors import ForkedError, InvalidRequestError
from ..observe.progress import watch_prefill

if TYPE_CHECKING:
    from ..request import Chunk, Completion, Request
    from .inbox import Outbox


class ChunkStream:
    """The chunks of one reply as they come. Closing it, or letting go of it, cancels what is still to come."""

    def __init__(self, handle: Handle) -> None:
        self._handle = handle
        self._chunks = iter(handle)

    def __iter__(self) -> ChunkStream:
        return self

    def __next__(self) -> Chunk:
        return next(self._chunks)

    def close(self) -> None:
        """Cancel the request; repeatable."""
        self._handle.cancel()
        self._chunks.close()

    def __del__(self) -> None:
        # a generator that was never started runs no `finally` of its own
        if hasattr(self, "_chunks"):
            self._handle.cancel()


class Handle:
    """One request on its way. Any thread may use it; iterate it once for the chunks of the reply.

    It keeps its engine alive. Dropping it does not cancel the request.
    """

    def __init__(self, request: Request, outbox: Outbox, owner: object, *, shows_progress: bool) -> None:
        self._request = request
        self._outbox = outbox
        self._owner = owner  # so that the engine lives as long as somebody waits for its answer
        self._shows_progress = shows_progress
        self._pid = os.getpid()

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise ForkedError("request handle")

    @property
    def done(self) -> bool:
        """Whether `result` returns or raises at once."""
        return self._outbox.is_done

    @property
    def prefilled_tokens(self) -> int:
        """Prompt tokens in memory so far, reused ones included."""
        return self._outbox.prefilled_tokens

    def cancel(self) -> None:
        """End the request at the next step; its result then says "cancelled". Repeatable."""
        self._outbox.cancel()

    def result(self, timeout: float | None = None) -> Completion:
        """Wait for the answer.

        Ctrl-C while waiting cancels the request. What was computed stays in the slot.

        Raises:
            ResultTimeoutError: not done within `timeout` seconds; the request goes on.
            RequestError, CapacityError, ClosedError, NativeError: the request failed.
        """
        self._check_process()
        if timeout is not None and (not isinstance(timeout, Real) or not timeout >= 0):
            raise InvalidRequestError("timeout", f"{timeout!r}: expected None or seconds >= 0")
        try:
            if self._shows_progress and timeout is None:
                watch_prefill(
                    self._outbox.wait,
                    lambda: self.prefilled_tokens,
                    len(self._request.prompt),
                )
            return self._outbox.result(timeout)
        except KeyboardInterrupt:
            self.cancel()
            raise

    def __iter__(self) -> Generator[Chunk, None, None]:
        """The chunks as they come. Leaving the loop early cancels the request."""
        try:
            while True:
                self._check_process()  # each time: an iterator that crossed a fork would wait for ever
                if (chunk := self._outbox.next_chunk()) is None:
                    return
                yield chunk
        finally:
            self.cancel()

    def _notify(self, loop: asyncio.AbstractEventLoop, event: asyncio.Event) -> Callable[[], None]:
        def listener() -> None:
            try:
                loop.call_soon_threadsafe(event.set)
            except RuntimeError:  # the event loop was closed while the request ran: nobody is waiting any more
                self._outbox.cancel()

        return listener

    async def wait(self) -> Completion:
        """`result` for asyncio. A cancelled task cancels the request."""
        self._check_process()
        event = asyncio.Event()
        listener = self._notify(asyncio.get_running_loop(), event)
        self._outbox.listen(listener)
        try:
            while not self.done:
                await event.wait()
                event.clear()
        except asyncio.CancelledError:
            self.cancel()
            raise
        finally:
            self._outbox.unlisten(listener)
        return self._outbox.result(0)

    async def __aiter__(self) -> AsyncIterator[Chunk]:
        """The chunks as they come, for asyncio. Leaving the loop or a cancelled task cancels the request."""
        self._check_process()
        event = asyncio.Event()
        listener = self._notify(asyncio.get_running_loop(), event)
        self._outbox.listen(listener)
        try:
            while True:
                chunk = self._outbox.poll()
                if chunk is not None:
                    yield chunk
                elif self.done:
                    if (chunk := self._outbox.poll()) is not None:
                        yield chunk
                        continue
                    self._outbox.result(0)
                    return
                else:
                    await event.wait()
                    event.clear()
        finally:
            self._outbox.unlisten(listener)
            self.cancel()
