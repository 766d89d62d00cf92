"""How much memory this process may use. Knows where the system says so, nothing of what it is for."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import PurePosixPath


def memory_bytes(*, membership: str = "/proc/self/cgroup", groups: str = "/sys/fs/cgroup") -> int:
    """The machine's memory, or the lowest limit of the control groups this process is in. 0: nothing says."""
    return min([*_physical(), *_group_limits(membership, groups)], default=0)


def _physical() -> Iterator[int]:
    try:
        n_pages, page_bytes = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return
    if n_pages > 0:
        yield n_pages * page_bytes


def _group_limits(membership: str, groups: str) -> Iterator[int]:
    for line in _text(membership).splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:
            folder, name = groups, "memory.max"
        elif "memory" in controllers.split(","):
            folder, name = f"{groups}/memory", "memory.limit_in_bytes"
        else:
            continue
        # Inside a container the path may be the host's: what is not there is skipped, and the root is always asked.
        group = PurePosixPath(path)
        for each in (group, *group.parents):
            limit = _text(f"{folder}/{each.relative_to('/')}/{name}" if each.is_absolute() else "").strip()
            if limit.isdecimal():  # v2 says "max" for none
                yield int(limit)


def _text(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except (OSError, ValueError):
        return ""
