"""Pieces of host memory whose size is known exactly and that go back to the system when they are let go.

Knows pages and alignment, nothing of budgets or of what is kept in a piece.
"""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    Bytes = npt.NDArray[np.uint8]

HUGE_PAGE_BYTES = 2 << 20

_LINE_BYTES = 64
_SMALL_BYTES = 16 * mmap.PAGESIZE
"""Below it a piece is an array of the allocator's: whole pages would waste too much."""
_ALIGNED_BYTES = 1 << 20
_WHOLE_HUGE_PAGES_BYTES = 16 << 20
_TOUCH_STEP_BYTES = 2048
"""At most a page. More than 500 writes a call, or numpy would keep the GIL while the pages are made."""


def region_bytes(n_bytes: int) -> int:
    """What a region for `n_bytes` occupies: at most 128 bytes more if small, 6.3 % more from 64 KiB on (4 KiB pages).

    From 16 MiB on it is whole huge pages, at most 12.5 % more and 0.3 % for 149.6 MiB.
    """
    if n_bytes < _SMALL_BYTES:
        return _round_up(max(n_bytes, 1), _LINE_BYTES) + _LINE_BYTES
    return _round_up(n_bytes, mmap.PAGESIZE if n_bytes < _WHOLE_HUGE_PAGES_BYTES else HUGE_PAGE_BYTES)


@dataclass(slots=True, eq=False)
class Region:
    """One piece of memory. It goes back to the system when `data` and every view of it are gone."""

    data: Bytes
    """All of it that can be used, aligned to 64 bytes, from 1 MiB on to 2 MiB."""
    size_bytes: int
    """What it occupies once it was written to."""
    touched_bytes: int = 0

    @property
    def is_touched(self) -> bool:
        return self.touched_bytes >= len(self.data)

    def touch(self, n_bytes: int) -> None:
        """Make the next `n_bytes` of pages real by writing zeros. The GIL is released meanwhile."""
        start = self.touched_bytes
        self.touched_bytes = min(start + n_bytes, len(self.data))
        with suppress(MemoryError):  # of Python's own few bytes; whoever writes next makes the pages instead
            self.data[start : self.touched_bytes : _TOUCH_STEP_BYTES] = 0


def map_region(n_bytes: int, on_freed: Callable[[int], object]) -> Region:
    """A new region of `region_bytes(n_bytes)`, its content undefined.

    `on_freed` is called with that size once the memory is gone, in whatever thread and at whatever moment that
    happens: it may do no more than note it, without a lock.

    Raises:
        MemoryError: the system refused; `on_freed` is not called.
    """
    size = region_bytes(n_bytes)
    owner: mmap.mmap | Bytes
    if n_bytes < _SMALL_BYTES:
        owner = np.empty(size, dtype=np.uint8)
        start = -_address(owner) % _LINE_BYTES
        data = owner[start : start + size - _LINE_BYTES]
    else:
        owner, data = _map_pages(size)
    region = Region(data, size)
    weakref.finalize(owner, on_freed, size).atexit = False
    return region


def _map_pages(size: int) -> tuple[mmap.mmap, Bytes]:
    # private: shared anonymous memory, Python's default, takes no huge pages and is one with a forked child's
    slack = HUGE_PAGE_BYTES if size >= _ALIGNED_BYTES else 0
    try:
        pages = mmap.mmap(-1, size + slack, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"no mapping of {size} bytes") from error
    # np.frombuffer would put a memoryview in between (see slotfile.py); so the array's base is the mapping itself
    start = -_address(np.ndarray(size, np.uint8, buffer=pages)) % slack if slack else 0
    _advise(pages, start, size)
    return pages, np.ndarray(size, np.uint8, buffer=pages, offset=start)


def _advise(pages: mmap.mmap, start: int, size: int) -> None:
    """Ask for huge pages, but only where a whole one is counted: the last pages must not grow to one."""
    whole = size // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    if whole and hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            pages.madvise(mmap.MADV_NOHUGEPAGE)
            pages.madvise(mmap.MADV_HUGEPAGE, start, whole)


def _address(array: Bytes) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
