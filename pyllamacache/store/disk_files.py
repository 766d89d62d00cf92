"""The folder of a disk tier and the files in it. Knows names, permissions and locks, nothing of what is in a file.

    CACHEDIR.TAG                     says whose folder it is; backups leave it out
    lock                             held while the index is opened, rebuilt or swept
    index.sqlite, -wal, -shm         the index (disk_index.py)
    writer-<id>.lock                 held as long as that store is open
    <scope>/<xx>/<key>.<kind>.<id>   one entry; with `.tmp` while it is being written

A name is used once: the last part is random. So whoever deletes a file by name cannot hit another one. Links are not
followed anywhere below the folder itself.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import numpy as np

from ..errors import CacheFileError
from .atomic import PIECE_BYTES, replace_file

if TYPE_CHECKING:
    import numpy.typing as npt

    Bytes = npt.NDArray[np.uint8]
    Piece = bytes | Bytes

BeforeStep = Callable[[str], None]
"""Called with the name of what is done next; a test lets that step fail, or the process end there."""

INDEX = "index.sqlite"
BROKEN_INDEX = "index.sqlite.broken"
TEMPORARY = ".tmp"

_TAG = "CACHEDIR.TAG"
_TAG_CONTENT = (
    b"Signature: 8a477f597d28d172789f06886806bc55\n"
    b"# A disk cache of pyllamacache, which may be deleted. It holds what transcripts hold.\n"
)
_LOCK = "lock"
_WRITER = re.compile(r"writer-([0-9a-f]{16})\.lock")
_SCOPE = re.compile(r"[0-9a-f]{16,64}")
_SHARD = re.compile(r"[0-9a-f]{2}")
_FILE = re.compile(r"[0-9a-f]{32}\.(span|state)\.[0-9a-f]{16}(\.tmp)?")
_OWN_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def nothing(_step: str) -> None:
    """Before a step: nothing."""


def is_scope(text: str) -> bool:
    """Whether `text` can be a scope's name."""
    return _SCOPE.fullmatch(text) is not None


def new_name(scope: str, key: bytes, kind: str) -> str:
    """Of a file that nobody has written before."""
    return f"{scope}/{key.hex()[:2]}/{key.hex()}.{kind}.{secrets.token_hex(8)}"


# ---- the folder ------------------------------------------------------------------------------------------------


def real_path(folder: str | os.PathLike[str]) -> str:
    """Where the folder is, links followed.

    Raises:
        CacheFileError: no folder can have this name.
    """
    where = os.fsdecode(folder)
    try:
        return os.path.realpath(where)
    except (ValueError, OSError):
        raise CacheFileError(repr(where), "use", "no folder can have this name") from None


def make_folder(root: str) -> None:
    """Make `root` a cache folder, if it is not there or empty.

    Raises:
        CacheFileError: it holds something else.
        OSError: the operating system refused.
    """
    with suppress(FileExistsError):
        os.makedirs(root, mode=0o700)
    if is_cache_folder(root):
        return
    others = [name for name in os.listdir(root) if name not in (_TAG, "lost+found") and not name.endswith(TEMPORARY)]
    if others:
        raise CacheFileError(root, "use", "it is not empty and not a disk cache; name an empty or a new folder")
    replace_file(os.path.join(root, _TAG), [_TAG_CONTENT])


def is_cache_folder(root: str) -> bool:
    """Whether `root` says that it is one of ours."""
    try:
        fd = os.open(os.path.join(root, _TAG), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return os.read(fd, len(_TAG_CONTENT) + 1) == _TAG_CONTENT
    except OSError:
        return False
    finally:
        os.close(fd)


def require_cache_folder(folder: str | os.PathLike[str]) -> str:
    """The folder's real path, if it is one of ours.

    Raises:
        CacheFileError: it is not.
    """
    root = real_path(folder)
    if not is_cache_folder(root):
        raise CacheFileError(root, "use", "it is not the folder of a disk cache")
    return root


@contextmanager
def folder_lock(root: str) -> Iterator[None]:
    """Held by one thread of one process."""
    fd = _open_lock(os.path.join(root, _LOCK), 0)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


class WriterLock:
    """Tells other processes that this store is alive. Made and looked at with the folder's lock held."""

    def __init__(self, root: str) -> None:
        self.writer = secrets.token_hex(8)
        self._path = os.path.join(root, f"writer-{self.writer}.lock")
        self._fd = _open_lock(self._path, os.O_EXCL)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX)
        except OSError:
            self.release()
            raise

    @property
    def is_there(self) -> bool:
        """False: somebody removed the file."""
        return self._fd >= 0 and os.path.exists(self._path)

    def release(self) -> None:
        """Repeatable."""
        if self._fd >= 0:
            with suppress(OSError):
                os.unlink(self._path)
            os.close(self._fd)
            self._fd = -1


def live_writers(root: str, *, keep: bool = False) -> set[str]:
    """Of all stores that are open. Locks that others left are removed unless they are to `keep`.

    With the folder's lock held.
    """
    alive = set()
    for name in os.listdir(root):
        found = _WRITER.fullmatch(name)
        if found is not None and not _is_abandoned(os.path.join(root, name), keep=keep):
            alive.add(found[1])
    return alive


def _is_abandoned(path: str, *, keep: bool) -> bool:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        return error.errno == errno.ENOENT
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not keep:
            os.unlink(path)
        return True
    except OSError:
        return False
    finally:
        os.close(fd)


def _open_lock(path: str, flags: int) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | flags, 0o600)


# ---- files of entries ------------------------------------------------------------------------------------------


class EntryFiles:
    """Reads, writes and removes files by their names below `root`. Raises plain `OSError`s. Thread: any."""

    def __init__(self, root: str, before_step: BeforeStep = nothing) -> None:
        self.root = root
        self._before_step = before_step

    def path(self, name: str) -> str:
        """For messages."""
        return os.path.join(self.root, name)

    def write(self, name: str, pieces: Iterable[Piece]) -> None:
        """A new file, whole on the disk when this returns. After an error there is nothing."""
        folder_fd, base = self._open_to_create(name)
        try:
            self._write_and_rename(folder_fd, base, pieces)
            # After a power cut the index may name a file that is not there, which reading finds.
            with suppress(OSError):
                os.fsync(folder_fd)
        finally:
            os.close(folder_fd)

    def open(self, name: str) -> int:
        """A descriptor to read from.

        Raises:
            FileNotFoundError: there is no such file.
            OSError: also when it is a link or not a regular file.
        """
        folder_fd, base = self._open_folder(name)
        try:
            fd = os.open(base, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder_fd)
        finally:
            os.close(folder_fd)
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise OSError(errno.EINVAL, "it is not a regular file")
        return fd

    def remove(self, name: str) -> None:
        """The file, or what a writer left of it; nothing if there is neither. Only the name of a link is removed."""
        self._before_step("file.remove")
        with suppress(FileNotFoundError, NotADirectoryError):
            folder_fd, base = self._open_folder(name)
            try:
                for each in (base, base + TEMPORARY):
                    with suppress(FileNotFoundError):
                        os.unlink(each, dir_fd=folder_fd)
            finally:
                os.close(folder_fd)

    def walk(self) -> Iterator[tuple[str, int]]:
        """Names and sizes of all files of entries, temporary ones included."""
        for scope in _names(self.root, _SCOPE):
            for shard in _names(os.path.join(self.root, scope), _SHARD):
                folder = os.path.join(self.root, scope, shard)
                for base in _names(folder, _FILE):
                    with suppress(OSError):
                        size = os.stat(os.path.join(folder, base), follow_symlinks=False).st_size
                        yield f"{scope}/{shard}/{base}", size

    def remove_empty_folders(self) -> None:
        for scope in _names(self.root, _SCOPE):
            for shard in _names(os.path.join(self.root, scope), _SHARD):
                with suppress(OSError):
                    os.rmdir(os.path.join(self.root, scope, shard))
            with suppress(OSError):
                os.rmdir(os.path.join(self.root, scope))

    def _write_and_rename(self, folder_fd: int, base: str, pieces: Iterable[Piece]) -> None:
        temporary = base + TEMPORARY
        self._before_step("file.create")
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(temporary, flags, 0o600, dir_fd=folder_fd)
        try:
            os.fchmod(fd, 0o600)
            for piece in pieces:
                self._write_all(fd, piece)
            self._before_step("file.sync")
            os.fsync(fd)
            self._before_step("file.rename")
            os.rename(temporary, base, src_dir_fd=folder_fd, dst_dir_fd=folder_fd)
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary, dir_fd=folder_fd)
            raise
        finally:
            os.close(fd)

    def _write_all(self, fd: int, piece: Piece) -> None:
        done = 0
        data = np.frombuffer(piece, dtype=np.uint8) if len(piece) else np.empty(0, np.uint8)
        while done < len(data):
            self._before_step("file.write")
            done += os.write(fd, data[done : done + PIECE_BYTES].data)

    def _open_to_create(self, name: str) -> tuple[int, str]:
        scope, shard, base = _parts(name)
        self._before_step("file.mkdir")
        for _ in range(3):  # another process may be removing empty folders
            with suppress(FileNotFoundError):
                _make_directory(os.path.join(self.root, scope))
                scope_fd = os.open(os.path.join(self.root, scope), _OWN_DIRECTORY)
                try:
                    _make_directory(shard, scope_fd)
                    return os.open(shard, _OWN_DIRECTORY, dir_fd=scope_fd), base
                finally:
                    os.close(scope_fd)
        raise FileNotFoundError(errno.ENOENT, "its folder cannot be made")

    def _open_folder(self, name: str) -> tuple[int, str]:
        scope, shard, base = _parts(name)
        scope_fd = os.open(os.path.join(self.root, scope), _OWN_DIRECTORY)
        try:
            return os.open(shard, _OWN_DIRECTORY, dir_fd=scope_fd), base
        finally:
            os.close(scope_fd)


def _parts(name: str) -> tuple[str, str, str]:
    # A name may come from a damaged index: it must not lead out of the folder.
    scope, _, rest = name.partition("/")
    shard, _, base = rest.partition("/")
    if not (_SCOPE.fullmatch(scope) and _SHARD.fullmatch(shard) and _FILE.fullmatch(base)):
        raise FileNotFoundError(errno.ENOENT, "no file of ours has this name")
    return scope, shard, base


def _make_directory(path: str, folder_fd: int | None = None) -> None:
    with suppress(FileExistsError):
        os.mkdir(path, 0o700, dir_fd=folder_fd)


def _names(folder: str, pattern: re.Pattern[str]) -> list[str]:
    """Of what is in `folder`, unless that is a link or gone."""
    try:
        fd = os.open(folder, _OWN_DIRECTORY)
    except OSError:
        return []
    try:
        return sorted(name for name in os.listdir(fd) if pattern.fullmatch(name))
    finally:
        os.close(fd)
