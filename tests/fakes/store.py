"""A disk tier without a disk: entries in a dictionary, with a limit, faults, and threads that take their time."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from pyllamacache.errors import CacheCorruptError, CacheDataError, CacheFileError
from pyllamacache.store.disk_format import DiskEntry

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

Name = tuple[str, bytes]


class FakeStore:
    """As `store.disk.DiskStore`. Evicts the oldest; another process is whoever calls `lose`."""

    def __init__(self, limit_bytes: int, scope: str = "00" * 16) -> None:
        self.scope = scope
        self.limit_bytes = limit_bytes
        self.entries: dict[Name, tuple[int, DiskEntry, bytes]] = {}
        self.fails: list[str] = []
        """Calls that fail once, when they are made next: write, read, corrupt, scan."""
        self._token = 0
        self.is_closed = False

    @property
    def size_bytes(self) -> int:
        return sum(entry.n_bytes for _, entry, _ in self.entries.values())

    def _enter(self, call: str) -> None:
        assert not self.is_closed
        if call in self.fails:
            self.fails.remove(call)
            raise CacheFileError("folder", call, "ordered by a test")

    def scan(self, since: int = 0) -> tuple[list[DiskEntry], int]:
        self._enter("scan")
        return [entry for token, entry, _ in self.entries.values() if token > since], self._token

    def write(self, entry: DiskEntry, data: npt.NDArray[np.uint8]) -> bool:
        self._enter("write")
        assert len(data) == entry.n_bytes
        if entry.n_bytes > self.limit_bytes:
            return False
        while self.size_bytes + entry.n_bytes > self.limit_bytes:
            del self.entries[next(iter(self.entries))]
        self._token += 1
        self.entries[entry.kind, entry.key] = (self._token, entry, data.tobytes())
        return True

    def read(self, kind: str, key: bytes, into: npt.NDArray[np.uint8]) -> bool:
        self._enter("read")
        found = self.entries.get((kind, key))
        if found is None or len(found[2]) != len(into):
            return False
        if "corrupt" in self.fails:
            self.fails.remove("corrupt")
            del self.entries[kind, key]
            raise CacheCorruptError("file", "ordered by a test")
        into[:] = list(found[2])
        return True

    def touch(self, items: Iterable[Name], hits: int = 0) -> None:
        list(items)

    def set_pinned(self, items: Iterable[Name], is_pinned: bool) -> None:
        list(items)

    def clear(self, namespace: str | None = None) -> int:
        gone = [name for name, (_, entry, _) in self.entries.items() if namespace in (None, entry.namespace)]
        for name in gone:
            del self.entries[name]
        return len(gone)

    def tidy(self) -> None:
        assert not self.is_closed

    def lose(self, index: int) -> None:
        """Another process evicts one."""
        if self.entries:
            del self.entries[sorted(self.entries)[index % len(self.entries)]]

    def close(self) -> None:
        self.is_closed = True


class _LazyFuture(Future[Any]):
    """Done after some looks at it, or when it is waited for."""

    def __init__(self, work: Callable[[], Any], n_polls: int) -> None:
        super().__init__()
        self._work: Callable[[], Any] | None = work
        self._n_polls = n_polls

    def _run(self) -> None:
        work, self._work = self._work, None  # whose arguments are views of somebody's memory
        if work is not None:
            try:
                self.set_result(work())
            except CacheDataError as error:
                self.set_exception(error.with_traceback(None))

    def done(self) -> bool:
        self._n_polls -= 1
        if self._n_polls < 0:
            self._run()
        return super().done()

    def result(self, timeout: float | None = None) -> Any:
        self._run()
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self._run()
        return super().exception(timeout)


class LazyExecutor(ThreadPoolExecutor):
    """Does the work on the asker's thread, late."""

    n_polls = 0

    def submit(self, function: Callable[..., Any], /, *arguments: Any, **options: Any) -> Future[Any]:
        return _LazyFuture(lambda: function(*arguments, **options), self.n_polls)
