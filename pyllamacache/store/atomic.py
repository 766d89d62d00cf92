"""Putting bytes at a path so that at every instant the old file or the new one is there, whole.

Knows nothing of what the bytes mean. Raises plain `OSError`s; callers say what they were doing.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import stat
from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

PIECE_BYTES = 16 << 20
"""Longest single write, so that Ctrl-C is noticed between two of them."""

_PREFIX, _SUFFIX = ".pyllamacache-", ".tmp"


def replace_file(path: str, pieces: Iterable[bytes | bytearray | npt.NDArray[np.uint8]]) -> int:
    """Make `pieces`, flat and of bytes, the content of `path`, readable by its owner only.

    Returns: bytes written.
    Raises:
        OSError: nothing was changed and no temporary file is left. A target that is not a regular file is refused;
            a symbolic link is not followed.
    Effects: temporary files that killed writers left in the folder are removed.
    Thread: any; of several writers to one path the last one wins.
    """
    folder, name = os.path.split(path)
    folder_fd = os.open(folder or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _refuse_special(name, folder_fd)
        _sweep(folder_fd)
        size = _write_and_rename(name, folder_fd, pieces)
        # After a power cut the old or the new file is there, whole: not worth an error that says nothing was changed.
        with suppress(OSError):
            os.fsync(folder_fd)
        return size
    finally:
        os.close(folder_fd)


def open_regular(path: str) -> int:
    """A descriptor to read `path` with. Links are not followed, and nothing that could block is opened.

    Raises:
        OSError: also when it is a link, a folder or a device.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.ELOOP and os.path.islink(path):
            raise _link_error() from None
        raise
    try:
        _require_regular(os.fstat(fd).st_mode)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _write_and_rename(name: str, folder_fd: int, pieces: Iterable[bytes | bytearray | npt.NDArray[np.uint8]]) -> int:
    temporary = f"{_PREFIX}{secrets.token_hex(8)}{_SUFFIX}"
    fd = -1
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(temporary, flags, 0o600, dir_fd=folder_fd)
        # Held until after the rename: it tells `_sweep` of other writers that this one is alive.
        with suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_EX)
        os.fchmod(fd, 0o600)
        size = sum(_write_all(fd, piece) for piece in pieces)
        os.fsync(fd)
        os.replace(temporary, name, src_dir_fd=folder_fd, dst_dir_fd=folder_fd)
        return size
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary, dir_fd=folder_fd)
        raise
    finally:
        if fd >= 0:
            os.close(fd)


def _write_all(fd: int, piece: bytes | bytearray | npt.NDArray[np.uint8]) -> int:
    done = 0
    if len(piece):
        # An array, because slicing one copies nothing; no memoryview, see slotfile.py.
        data = np.frombuffer(piece, dtype=np.uint8)
        while done < len(data):
            done += os.write(fd, data[done : done + PIECE_BYTES].data)
    return done


def _sweep(folder_fd: int) -> None:
    """Remove what killed writers left. An empty one may belong to a writer that has not locked it yet."""
    for name in os.listdir(folder_fd):
        if name.startswith(_PREFIX) and name.endswith(_SUFFIX):
            with suppress(OSError):
                _remove_if_abandoned(name, folder_fd)


def _remove_if_abandoned(name: str, folder_fd: int) -> None:
    fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder_fd)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(fd).st_size:
            os.unlink(name, dir_fd=folder_fd)
    finally:
        os.close(fd)


def _refuse_special(name: str, folder_fd: int) -> None:
    if name in ("", ".", ".."):
        raise IsADirectoryError(errno.EISDIR, "it is a directory")
    with suppress(FileNotFoundError):
        _require_regular(os.stat(name, dir_fd=folder_fd, follow_symlinks=False).st_mode)


def _require_regular(mode: int) -> None:
    if stat.S_ISLNK(mode):
        raise _link_error()
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, "it is a directory")
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "it is not a regular file")


def _link_error() -> OSError:
    return OSError(errno.ELOOP, "it is a symbolic link, and links are not followed")
