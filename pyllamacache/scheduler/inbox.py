"""Both directions of the border between user threads and the scheduler thread, and the only locks of this room.

`Inbox` carries requests and calls in. `Outbox` carries one request's chunks and outcome out; putting something in
never waits for whoever reads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar

from ..errors import ClosedError, InternalError, PyLlamaCacheError, ResultTimeoutError, WrongThreadError

if TYPE_CHECKING:
    from ..request import Chunk, Completion, Request

T = TypeVar("T")


class Outbox:
    """One request's way back.

    The scheduler calls `push`, `finish` and `fail`; any other thread may call the rest. `prefilled_tokens` is written
    by the scheduler and read for progress bars; a torn read is impossible and a stale one harmless. Chunks go through
    a C queue, not a condition: one is put per token and slot, between two native calls.
    """

    __slots__ = (
        "_chunks",
        "_completion",
        "_done",
        "_error",
        "_listeners",
        "_listening",
        "is_cancelled",
        "keeps_chunks",
        "prefilled_tokens",
    )

    def __init__(self, *, keeps_chunks: bool) -> None:
        self._chunks: SimpleQueue[Chunk | None] = SimpleQueue()  # None: no more will come
        self._done = threading.Event()
        self._completion: Completion | None = None
        self._error: BaseException | None = None
        self._listeners: tuple[Callable[[], None], ...] = ()
        self._listening = threading.Lock()
        self.keeps_chunks = keeps_chunks
        self.is_cancelled = False
        self.prefilled_tokens = 0

    # -- scheduler thread --

    def push(self, chunk: Chunk) -> None:
        if not self.keeps_chunks:
            return
        self._chunks.put(chunk)
        for listener in self._listeners:
            listener()

    def finish(self, completion: Completion) -> None:
        self._close(completion, None)

    def fail(self, error: BaseException) -> None:
        self._close(None, error)

    def _close(self, completion: Completion | None, error: BaseException | None) -> None:
        if self.is_done:
            return
        self._completion, self._error = completion, error
        self._chunks.put(None)
        self._done.set()
        for listener in self._listeners:
            listener()

    # -- any thread --

    @property
    def is_done(self) -> bool:
        return self._completion is not None or self._error is not None

    def cancel(self) -> None:
        """Ask for the end; seen at the next step. No effect on a finished request."""
        self.is_cancelled = True

    def listen(self, listener: Callable[[], None]) -> None:
        """Call `listener` after each chunk and at the end, on the scheduler's thread: it must not block or raise.

        What came before is not announced: poll after listening.
        """
        with self._listening:
            self._listeners += (listener,)

    def unlisten(self, listener: Callable[[], None]) -> None:
        """Take one back; it may still be called once."""
        with self._listening:
            self._listeners = tuple(each for each in self._listeners if each is not listener)

    def wait(self, timeout_s: float | None) -> bool:
        """Wait for the end. False: not within `timeout_s`."""
        return self._done.wait(None if timeout_s is None else min(timeout_s, threading.TIMEOUT_MAX))

    def result(self, timeout_s: float | None = None) -> Completion:
        """The outcome, or the error raised. Raises ResultTimeoutError when `timeout_s` passes first."""
        if not self.is_done and not self.wait(timeout_s):
            raise ResultTimeoutError(timeout_s or 0.0)
        if self._error is not None:
            raise self._error.with_traceback(None)  # one object for every caller: no frames pile up on it
        if self._completion is None:
            raise InternalError("a request ended without an outcome")
        return self._completion

    def poll(self) -> Chunk | None:
        """The next chunk if there is one now."""
        try:
            return self._unless_last(self._chunks.get_nowait())
        except Empty:
            return None

    def next_chunk(self) -> Chunk | None:
        """The next chunk, waiting for it; None after the last. Raises the request's error where one ended it."""
        chunk = self._unless_last(self._chunks.get())
        if chunk is None and self._error is not None:
            raise self._error.with_traceback(None)
        return chunk

    def _unless_last(self, item: Chunk | None) -> Chunk | None:
        if item is None:
            self._chunks.put(None)  # for whoever else reads, and for the next call
        return item


@dataclass(slots=True)
class Call:
    """A function to run on the scheduler thread between two steps."""

    function: Callable[[], Any]
    _done: threading.Event = field(default_factory=threading.Event)
    _value: Any = None
    _error: BaseException | None = None

    def run(self) -> None:
        """Scheduler thread. Errors of the tree go to the caller; anything else also stops the loop."""
        try:
            self._value = self.function()
        except PyLlamaCacheError as error:
            self._error = error
        except BaseException as error:
            self._error = error
            raise
        finally:
            self._done.set()

    def fail(self, error: BaseException) -> None:
        self._error = error
        self._done.set()

    def wait(self) -> Any:
        self._done.wait()
        if self._error is not None:
            raise self._error.with_traceback(None)
        return self._value


@dataclass(frozen=True, slots=True)
class Submission:
    """A request on its way in."""

    request: Request
    outbox: Outbox
    submitted_s: float


class Inbox:
    """Requests and calls for the scheduler thread, in the order they came.

    Without a lock: the collector may end an engine on any thread between any two instructions, also on one that is
    just putting or taking. `SimpleQueue.put` may be interrupted by another `put` of its own thread; a lock may not.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._items: SimpleQueue[Submission | Call | None] = SimpleQueue()  # None wakes a loop that is to stop
        self._closed_by: BaseException | None = None
        self._stopping = False
        self._owner_id = 0

    def own(self) -> None:
        """The calling thread is the scheduler's from now on."""
        self._owner_id = threading.get_ident()

    def submit(self, submission: Submission) -> None:
        """Thread: any. Raises ClosedError, or the error that ended the loop."""
        self._put(submission)

    def call(self, function: Callable[[], T]) -> T:
        """Run `function` on the scheduler thread and return what it returns.

        Raises:
            WrongThreadError: this is the scheduler thread, which would wait for itself.
        """
        if threading.get_ident() == self._owner_id:
            raise WrongThreadError
        call = Call(function)
        self._put(call)
        value: T = call.wait()
        return value

    def _put(self, item: Submission | Call) -> None:
        if self._closed_by is None:
            self._items.put(item)
        # looked at again after the put: who sees it open here is found by `close`, everybody else is told here
        if self._closed_by is not None:
            raise self._closed_by.with_traceback(None)

    def stop(self) -> None:
        """Ask the loop to end. Thread: any; repeatable."""
        self._stopping = True
        if self._closed_by is None:
            self._closed_by = ClosedError(self._what)
        self._items.put(None)

    @property
    def is_stopping(self) -> bool:
        return self._stopping

    @property
    def has_items(self) -> bool:
        """Whether `take` would return something; cheap enough for every step."""
        return self._stopping or not self._items.empty()

    def wake(self) -> None:
        """Have `take` return, though nothing has come. Thread: any."""
        self._items.put(None)

    def take(self, *, wait: bool) -> Iterator[Submission | Call]:
        """Everything that has come, or, with `wait`, at least one item unless the loop is to stop. Scheduler thread.

        What the caller does not get to stays here, for `close` to find.
        """
        if wait and not self._stopping and (item := self._items.get()) is not None:
            yield item
        for _ in range(self._items.qsize()):  # no more, however fast they come
            if (item := self._items.get_nowait()) is not None:
                yield item

    def close(self, error: BaseException) -> list[Submission | Call]:
        """Refuse everything from now on with `error`; returns what had not been taken. Scheduler thread."""
        self._stopping = True
        self._closed_by = error
        return list(self.take(wait=False))
