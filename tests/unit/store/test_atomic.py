"""A save that fails, however, leaves the old file as it was and nothing beside it."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pyllamacache.store import atomic
from pyllamacache.store.atomic import replace_file

OLD = b"the old file" * 10
NEW = [b"head", bytes(1000), b"tail" * 50]

CHILD_ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_bytes(OLD)
    return path


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that every user may enter and read."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        yield Path(name)


def run_child(code: str, *arguments: object) -> str:
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, env=CHILD_ENVIRONMENT, check=True, capture_output=True, text=True, timeout=20).stdout


def lowest_free_descriptor() -> int:
    descriptor = os.open(os.devnull, os.O_RDONLY)
    os.close(descriptor)
    return descriptor


def assert_untouched(path: Path) -> None:
    assert path.read_bytes() == OLD
    assert os.listdir(path.parent) == [path.name]


def test_the_new_file_replaces_the_old(path: Path) -> None:
    assert replace_file(str(path), NEW) == len(b"".join(NEW))
    assert path.read_bytes() == b"".join(NEW)
    assert os.listdir(path.parent) == [path.name]


@pytest.mark.parametrize("call", ["open", "fchmod", "write", "fsync", "replace"])
@pytest.mark.parametrize("problem", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
def test_a_failing_call_changes_nothing(
    path: Path, call: str, problem: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = getattr(os, call)
    n_calls = 0

    def fail(*args: Any, **kwargs: Any) -> Any:
        nonlocal n_calls
        n_calls += 1
        # The second `open` makes the temporary file; the second `write` is half way.
        if n_calls == 2 or call in ("fchmod", "fsync", "replace"):
            raise problem
        return original(*args, **kwargs)

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(type(problem)):
        replace_file(str(path), NEW)
    monkeypatch.undo()
    assert_untouched(path)


def test_an_interrupt_right_after_the_temporary_was_made_leaves_nothing(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = os.open

    def interrupted(name: str, flags: int, *args: Any, **kwargs: Any) -> int:
        fd = original(name, flags, *args, **kwargs)
        if flags & os.O_EXCL:
            os.close(fd)
            raise KeyboardInterrupt
        return fd

    monkeypatch.setattr(os, "open", interrupted)
    with pytest.raises(KeyboardInterrupt):
        replace_file(str(path), NEW)
    monkeypatch.undo()
    assert_untouched(path)


def test_pieces_that_raise_leave_nothing(path: Path) -> None:
    def pieces() -> Iterator[bytes]:
        yield b"first"
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        replace_file(str(path), pieces())
    assert_untouched(path)


def test_short_writes_are_continued(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: original(fd, data[:7]))
    replace_file(str(path), NEW)
    assert path.read_bytes() == b"".join(NEW)


def test_a_folder_that_cannot_be_flushed_is_no_failure(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = os.fsync

    def flush(fd: int) -> None:
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")
        original(fd)

    monkeypatch.setattr(os, "fsync", flush)
    replace_file(str(path), NEW)
    assert path.read_bytes() == b"".join(NEW)


def test_no_descriptor_is_leaked(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = lowest_free_descriptor()
    replace_file(str(path), NEW)
    monkeypatch.setattr(os, "fsync", lambda fd: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        replace_file(str(path), NEW)
    assert lowest_free_descriptor() == before


DISK_FULL = """
import resource, sys
from pyllamacache.errors import CacheFileError
from pyllamacache.store.atomic import replace_file
resource.setrlimit(resource.RLIMIT_FSIZE, (600, 600))
try:
    replace_file(sys.argv[1], [b"head", bytes(1000)])
except OSError as error:
    print(error.strerror)
"""


def test_a_size_limit_reached_half_way(path: Path) -> None:
    assert run_child(DISK_FULL, path) == "File too large\n"
    assert_untouched(path)


NO_PERMISSION = """
import os, sys
from pyllamacache.errors import CacheFileError
from pyllamacache.store import slotfile
from pyllamacache.store.atomic import replace_file
if os.geteuid() == 0:
    os.setgid(65534), os.setuid(65534)
try:
    slotfile.read_header(sys.argv[1])
except CacheFileError as error:
    print(error)
try:
    replace_file(sys.argv[1], [b"new"])
except OSError as error:
    print(error.strerror)
"""


def test_no_permission(open_folder: Path) -> None:
    path = open_folder / "file"
    path.write_bytes(OLD)
    path.chmod(0)
    open_folder.chmod(0o555)
    try:
        assert run_child(NO_PERMISSION, path) == f"cannot read {path}: Permission denied\nPermission denied\n"
    finally:
        open_folder.chmod(0o755)
        path.chmod(0o600)
    assert_untouched(path)


STOP_AT = """
import os, sys
from pyllamacache.store import atomic
n_calls, stop_at = 0, int(sys.argv[2])
def count(name):
    original = getattr(os, name)
    def call(*args, **kwargs):
        global n_calls
        n_calls += 1
        if n_calls == stop_at:
            print(name, flush=True)
            sys.stdin.read()
        return original(*args, **kwargs)
    setattr(os, name, call)
for name in ("write", "fsync", "replace"):
    count(name)
atomic.PIECE_BYTES = 400
atomic.replace_file(sys.argv[1], [b"head", bytes(1000), b"tail" * 50])
print("done", flush=True)
"""


@pytest.mark.parametrize(
    ("stop_at", "before"),
    [(1, "write"), (2, "write"), (4, "write"), (5, "write"), (6, "fsync"), (7, "replace"), (8, "fsync"), (9, "done")],
)
def test_kill_9_leaves_the_old_file_or_the_new(path: Path, stop_at: int, before: str) -> None:
    command = [sys.executable, "-c", STOP_AT, str(path), str(stop_at)]
    with subprocess.Popen(
        command, env=CHILD_ENVIRONMENT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline().strip() == before
        child.kill()
    assert path.read_bytes() == (OLD if stop_at <= 7 else b"".join(NEW))
    # The next writer removes what the killed one left, unless it is empty.
    replace_file(str(path.parent / "other"), [b"x"])
    left = set(os.listdir(path.parent)) - {"file", "other"}
    assert all((path.parent / name).stat().st_size == 0 for name in left)
    assert bool(left) == (stop_at == 1)


def test_the_temporary_file_of_a_live_writer_stays(path: Path) -> None:
    alive = path.parent / f"{atomic._PREFIX}0123{atomic._SUFFIX}"
    alive.write_bytes(b"half")
    with open(alive, "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        replace_file(str(path), NEW)
        assert alive.exists()
    replace_file(str(path), NEW)
    assert not alive.exists()


def test_foreign_files_that_look_similar_stay(path: Path) -> None:
    for name in (".pyllamacache-", "pyllamacache-1.tmp", ".pyllamacache-1.tmp.bak"):
        (path.parent / name).write_bytes(b"x")
    link = path.parent / ".pyllamacache-link.tmp"
    link.symlink_to(path)
    replace_file(str(path), NEW)
    assert len(os.listdir(path.parent)) == 5
