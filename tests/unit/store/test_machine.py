"""The memory a process may use, from files as the kernel writes them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pyllamacache.store.machine import memory_bytes


def measured(tmp_path: Path, membership: str, files: dict[str, str]) -> int:
    (tmp_path / "cgroup").write_text(membership)
    for name, content in files.items():
        path = tmp_path / "groups" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return memory_bytes(membership=str(tmp_path / "cgroup"), groups=str(tmp_path / "groups"))


PHYSICAL = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize(
    ("membership", "files", "expected"),
    [
        ("", {}, PHYSICAL),
        ("0::/\n", {"memory.max": "1000000\n"}, 1_000_000),
        ("0::/a/b\n", {"a/b/memory.max": "max\n", "a/memory.max": "2000000\n"}, 2_000_000),
        ("0::/a/b\n", {"a/b/memory.max": "max\n", "memory.max": "max\n"}, PHYSICAL),
        ("0::/of/the/host\n", {"memory.max": "3000000\n"}, 3_000_000),
        ("0::/../above\n", {"memory.max": "3000000\n"}, 3_000_000),
        ("5:cpu,memory:/a\n1:pids:/\n", {"memory/a/memory.limit_in_bytes": "4000000\n"}, 4_000_000),
        ("5:memory:/a\n", {"memory/memory.limit_in_bytes": "9223372036854771712\n"}, PHYSICAL),
        ("nonsense\n0::\n0::relative\n", {"memory.max": "5\n"}, PHYSICAL),
    ],
    ids=range(9),
)
def test_the_lowest_limit_counts(tmp_path: Path, membership: str, files: dict[str, str], expected: int) -> None:
    assert measured(tmp_path, membership, files) == expected


def test_this_machine_has_memory() -> None:
    assert 0 < memory_bytes() <= PHYSICAL


def test_a_system_that_does_not_say_is_unknown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(name: str) -> int:
        raise ValueError(name)

    monkeypatch.setattr(os, "sysconf", refuse)
    assert measured(tmp_path, "", {}) == 0
