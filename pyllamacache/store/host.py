"""Host memory for cached state, in blocks that are used again, under a limit that holds at every instant.

Knows bytes, not what is in them. Memory that was written before takes a copy at full speed; new memory costs several
passes for its page faults. So released blocks wait here for the next state, and a worker prepares one ahead.
"""

from __future__ import annotations

import os
import threading
import weakref
from bisect import bisect_left, insort_left
from collections import deque
from queue import SimpleQueue
from typing import TYPE_CHECKING

from ..errors import InternalError
from .region import Region, map_region, region_bytes

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Bytes = npt.NDArray[np.uint8]

__all__ = ["Block", "HostPool", "region_bytes"]

_TOUCH_BYTES = 8 << 20
"""What the worker touches at once, and so the longest that anybody waits for it: 1 to 4 ms."""


class Block:
    """Memory that one owner holds until `release`. Made by `HostPool.allocate`.

    A block that is collected without `release` gives its memory back to the system once no view of it is left.
    """

    __slots__ = ("_data", "_pool", "_region", "size_bytes")

    def __init__(self, pool: HostPool, region: Region, n_bytes: int) -> None:
        self._pool = pool
        self._region: Region | None = region
        self._data: Bytes | None = region.data[:n_bytes]
        self.size_bytes = region.size_bytes
        """What the pool counts for it, at least the length of `data`."""

    @property
    def data(self) -> Bytes:
        """The bytes asked for, writable, first with undefined content. No view of them may outlive `release`."""
        if self._data is None:
            raise InternalError("a block of host memory was used after its release")
        return self._data

    def release(self) -> None:
        """Give the memory back to the pool; repeatable. Thread: any, but not from a finalizer."""
        self._pool._take_back(self)  # noqa: SLF001 - the other half of one thing

    def _detach(self) -> Region | None:
        region, self._region, self._data = self._region, None, None
        return region


class HostPool:
    """Blocks of host memory, of which all that is resident counts: in use, idle, the spare, and what was reserved.

    The limit is checked before memory is asked for, and memory counts until the system has it back, so a forgotten view
    of a released block makes less room, never more than the limit. In a forked child a pool is a closed one.

    Thread: any, but nothing here may be called from a finalizer.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._pid = os.getpid()
        self._limit = limit_bytes
        self._changed = threading.Condition(threading.Lock())
        self._freed: deque[int] = deque()
        """Sizes of regions that are gone; finalizers write here, without the lock."""
        self._mapped = 0
        self._reserved = 0
        self._idle: list[Region] = []
        """By size; of equal ones the newest first."""
        self._spare: Region | None = None
        self._expected: int | None = None
        self._is_working = False
        self._is_touching = False
        """The worker writes to the spare: it stays where it is until this is False."""
        self._claims = 0
        """Threads that wait for the spare; the worker starts no further piece."""
        self._worker: threading.Thread | None = None
        self._is_closed = False
        # a queue, because the finalizer may run anywhere: its `put` takes no lock that this thread could hold
        self._wake: SimpleQueue[bool] = SimpleQueue()
        weakref.finalize(self, self._wake.put, False)

    # -- what is there --

    @property
    def limit_bytes(self) -> int:
        return self._limit

    @property
    def resident_bytes(self) -> int:
        """Everything counted; at most `limit_bytes`, unless `set_limit` said that it is over."""
        with self._lock():
            return self._resident()

    @property
    def used_bytes(self) -> int:
        """Blocks out and reservations: what cannot be dropped."""
        with self._lock():
            return self._used()

    @property
    def idle_bytes(self) -> int:
        """Idle blocks and the spare: what is dropped when room is needed."""
        with self._lock():
            return self._resident() - self._used()

    # -- taking and giving --

    def allocate(self, n_bytes: int) -> Block | None:
        """A block of `n_bytes`: an idle one at most a quarter larger, the spare, or a new one.

        Returns: None if the limit leaves no room even without idle blocks, if the system has no memory, or after
            `close`.
        Effects: idle blocks of other sizes, then the spare, are dropped where that makes the room.
        """
        with self._lock():
            if self._is_closed:
                return None
            region = self._take_idle(n_bytes) or self._take_spare(n_bytes) or self._map(n_bytes)
        return None if region is None else Block(self, region, n_bytes)

    def reserve(self, n_bytes: int) -> bool:
        """Count `n_bytes` that somebody else is about to allocate. False: there is no room, nothing is counted."""
        with self._lock():
            if self._is_closed or not self._make_room(n_bytes):
                return False
            self._reserved += n_bytes
            return True

    def unreserve(self, n_bytes: int) -> None:
        """Take back what `reserve` counted, once that memory is free again."""
        with self._lock():
            if n_bytes > self._reserved:
                raise InternalError(f"{n_bytes} bytes of host memory given back, {self._reserved} are reserved")
            self._reserved -= n_bytes

    def expect(self, n_bytes: int) -> None:
        """Say that a block of `n_bytes` will be wanted soon. A worker makes one ready where the limit has room.

        Never waits for memory. There is one spare: expecting another size replaces it.
        """
        with self._lock():
            if self._is_closed:
                return
            self._expected = n_bytes
            if self._is_working:
                return
            self._is_working = True
            starting = None
            if self._worker is None:
                starting = self._worker = threading.Thread(
                    target=_serve, args=(weakref.ref(self), self._wake), name="pyllamacache-host", daemon=True
                )
        self._wake.put(True)
        if starting is not None:
            self._start(starting)

    def wait_ready(self) -> None:
        """Wait until what was expected last is there, or was given up."""
        with self._lock():
            while self._is_working:
                self._changed.wait()

    def set_limit(self, limit_bytes: int) -> int:
        """Change the limit. Lowering it gives idle blocks and the spare back to the system before this returns.

        Returns: by how many bytes blocks out and reservations are over it, for the caller to release; until then
            released blocks go to the system, and nothing is handed out.
        """
        with self._lock():
            is_lower = limit_bytes < self._limit
            self._limit = limit_bytes
            if is_lower:
                self._drop_idle()
            return max(0, self._resident() - limit_bytes)

    def close(self) -> None:
        """Give back what is idle and end the worker; repeatable. Blocks out stay valid until they are released."""
        with self._lock():
            self._is_closed = True
            self._expected = None
            self._drop_idle()
            worker = self._worker
        self._wake.put(False)
        if worker is not None and worker.ident is not None:  # else it is about to start, and will end at once
            worker.join()

    def _take_back(self, block: Block) -> None:
        with self._lock():
            region = block._detach()  # noqa: SLF001 - the other half of one thing
            if region is not None and not self._is_closed and self._resident() <= self._limit:
                insort_left(self._idle, region, key=_capacity)

    # -- with the lock held --

    def _lock(self) -> threading.Condition:
        if os.getpid() != self._pid:
            self._disown()
        return self._changed

    def _disown(self) -> None:
        # in a forked child the worker is gone, and whoever held the lock
        self._pid = os.getpid()
        self._changed = threading.Condition(threading.Lock())
        self._is_closed, self._is_working, self._is_touching = True, False, False
        self._worker = self._spare = None
        self._idle = []

    def _resident(self) -> int:
        while self._freed:
            self._mapped -= self._freed.popleft()
        return self._mapped + self._reserved

    def _used(self) -> int:
        idle = sum(region.size_bytes for region in self._idle)
        return self._resident() - idle - (self._spare.size_bytes if self._spare is not None else 0)

    def _take_idle(self, n_bytes: int) -> Region | None:
        index = self._find_idle(n_bytes)
        return None if index is None else self._idle.pop(index)

    def _find_idle(self, n_bytes: int) -> int | None:
        index = bisect_left(self._idle, n_bytes, key=_capacity)
        return index if index < len(self._idle) and _fits(self._idle[index], n_bytes) else None

    def _take_spare(self, n_bytes: int) -> Region | None:
        if self._spare is None or not _fits(self._spare, n_bytes):
            return None
        self._stop_touching()
        region: Region | None = self._spare  # another thread may have been quicker
        if region is None or not _fits(region, n_bytes):
            return None
        self._spare = None
        return region

    def _map(self, n_bytes: int) -> Region | None:
        size = region_bytes(n_bytes)
        if not self._make_room(size):
            return None
        self._mapped += size
        try:
            return map_region(n_bytes, self._freed.append)
        except MemoryError:
            self._mapped -= size
            return None

    def _make_room(self, n_bytes: int) -> bool:
        """Drop what it takes, the largest first. Nothing is dropped in vain."""
        if n_bytes > self._limit - self._used():
            return False
        while self._resident() + n_bytes > self._limit:
            if self._idle:
                self._idle.pop()
            elif self._spare is not None:
                self._stop_touching()
                self._spare = None
            else:
                return False  # another thread took what this one waited for
        return True

    def _drop_idle(self) -> None:
        self._stop_touching()
        self._spare = None
        self._idle.clear()

    def _stop_touching(self) -> None:
        """Wait until the worker has let go of the spare; the lock is free meanwhile, so anything may have changed."""
        self._claims += 1
        try:
            while self._is_touching:
                self._changed.wait()
        finally:
            self._claims -= 1

    # -- the worker --

    def _start(self, worker: threading.Thread) -> None:
        try:
            worker.start()
        except RuntimeError:  # no thread can be had, or the interpreter ends: there will be no spare
            with self._lock():
                self._worker = self._expected = None
                self._is_working = False
                self._changed.notify_all()

    def _work(self) -> None:
        # No name here holds the spare: dropping it must free it at once.
        while self._may_touch():
            if self._spare is not None:
                self._spare.touch(_TOUCH_BYTES)

    def _may_touch(self) -> bool:
        with self._lock():
            self._is_touching = False
            if self._expected is not None:
                n_bytes, self._expected = self._expected, None
                self._map_spare(n_bytes)
            has_work = self._spare is not None and not self._spare.is_touched
            self._is_touching = self._is_working = has_work and not self._claims
            if not self._is_touching:
                self._changed.notify_all()
            return self._is_touching

    def _map_spare(self, n_bytes: int) -> None:
        if self._find_idle(n_bytes) is not None or (self._spare is not None and _fits(self._spare, n_bytes)):
            return
        replaced = 0 if self._spare is None else self._spare.size_bytes
        if self._resident() - replaced + region_bytes(n_bytes) <= self._limit:
            self._spare = None
            self._spare = self._map(n_bytes)


def _serve(pool_ref: weakref.ref[HostPool], wake: SimpleQueue[bool]) -> None:
    """The worker: touches what is expected, and keeps the pool alive no longer than that takes."""
    while wake.get():
        pool = pool_ref()
        if pool is None:
            return
        pool._work()  # noqa: SLF001 - a method of a thread that must not hold `self`
        del pool


def _capacity(region: Region) -> int:
    return len(region.data)


def _fits(region: Region, n_bytes: int) -> bool:
    is_near = 4 * region.size_bytes <= 5 * n_bytes or region.size_bytes <= region_bytes(n_bytes)
    return len(region.data) >= n_bytes and is_near
