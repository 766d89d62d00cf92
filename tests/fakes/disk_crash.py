"""A program that ends, at each step in turn, while it changes a disk cache: `python -m tests.fakes.disk_crash FOLDER`.

It forks, so nothing but it may run in its process. Prints how many ends it looked at.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from pyllamacache.errors import ForkedError
from pyllamacache.store import disk_check
from pyllamacache.store.disk import DiskStore
from pyllamacache.store.disk_files import INDEX
from tests.fakes.clock import FakeClock
from tests.fakes.disk import SPAN_TOKENS, assert_sound, bytes_on_disk, get, names, open_store, put, spans, state

LIMIT_BYTES = 9_000
OLD = [spans(range(n, n + SPAN_TOKENS))[0] for n in range(0, 60, 10)]
NEW = [*spans(range(100, 108)), state(range(100, 108), n_bytes=2500)]
ALL = {(entry.kind, entry.key): entry for entry in [*OLD, *NEW]}


class EndAt:
    """Ends the process, as by a power cut, before the n-th step."""

    def __init__(self, n_steps: int) -> None:
        self.left = n_steps

    def __call__(self, step: str) -> None:
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        self.left -= 1


def write(folder: Path, end: EndAt) -> None:
    store = open_store(folder, LIMIT_BYTES, before_step=end, clock=FakeClock(2000.0))
    put(store, *NEW)
    store.close()


def remove(folder: Path, end: EndAt) -> None:
    store = open_store(folder, LIMIT_BYTES, before_step=end)
    store.remove([(entry.kind, entry.key) for entry in OLD[:3]])
    store.touch([(entry.kind, entry.key) for entry in OLD[3:]])
    store.clear()
    store.close()


def mend(folder: Path, end: EndAt) -> None:
    (folder / INDEX).write_bytes(b"no database" * 1000)
    write(folder, end)


def shrink(folder: Path, end: EndAt) -> None:
    open_store(folder, LIMIT_BYTES // 3, before_step=end).close()


def begin(folder: Path, end: EndAt) -> None:
    shutil.rmtree(folder)
    write(folder, end)


def look(folder: Path, may_lose_all: bool) -> None:
    """What another process finds afterwards."""
    store = open_store(folder, LIMIT_BYTES)
    found = names(store)
    assert found <= set(ALL)
    assert all(get(store, ALL[name]) for name in found)
    assert bytes_on_disk(folder) == store.size_bytes <= LIMIT_BYTES
    assert may_lose_all or found
    assert put(store, NEW[0]) == [True]
    assert get(store, NEW[0])
    store.close()
    assert_sound(folder)


def every_end(folder: Path, change: Callable[[Path, EndAt], None]) -> int:
    n_steps = 0
    while True:
        shutil.rmtree(folder, ignore_errors=True)
        store = open_store(folder, LIMIT_BYTES)
        put(store, *OLD)
        store.close()
        child = os.fork()
        if child == 0:
            try:
                change(folder, EndAt(n_steps))
                os._exit(0)
            finally:
                os._exit(1)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert status in (0, -signal.SIGKILL), (change.__name__, n_steps)
        if disk_check.is_cache_folder(str(folder)):  # a check by itself changes nothing and never fails
            disk_check.check(folder)
        look(folder, may_lose_all=change in (remove, begin))
        if status == 0:
            return n_steps
        n_steps += 1


def forked(folder: Path) -> None:
    """A store belongs to the process that opened it."""
    store: DiskStore = open_store(folder)
    child = os.fork()
    if child == 0:
        try:
            store.scan()
        except ForkedError:
            store.close()
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    assert put(store, NEW[0]) == [True]
    store.close()


def main() -> None:
    folder = Path(sys.argv[1])
    counts = {change.__name__: every_end(folder, change) for change in (write, remove, mend, shrink, begin)}
    forked(folder)
    sys.stdout.write(" ".join(f"{name}={count}" for name, count in counts.items()))


if __name__ == "__main__":
    main()
