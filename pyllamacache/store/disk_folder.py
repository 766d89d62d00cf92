"""One process's hold on the folder of a disk tier: index, files and a lock that says it is alive.

Sweeps what ended processes left, and makes a new index from the files when the old one is broken or gone. Knows nothing
of budgets or of what an entry is for.
"""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from typing import TypeVar

from ..errors import CacheCorruptError, CacheDataError, CacheFileError
from . import disk_index, disk_rows
from .disk_files import (
    BROKEN_INDEX,
    INDEX,
    TEMPORARY,
    BeforeStep,
    EntryFiles,
    WriterLock,
    folder_lock,
    live_writers,
    make_folder,
    nothing,
)
from .disk_format import StoredFile, decode

T = TypeVar("T")


class OpenFolder:
    """Opens with the first `call`. Thread: any."""

    def __init__(self, root: str, before_step: BeforeStep = nothing) -> None:
        self.root = root
        self.files = EntryFiles(root, before_step)
        self._before_step = before_step
        self._index: disk_index.DiskIndex | None = None
        self._lock: WriterLock | None = None
        self._is_closed = False

    @property
    def writer(self) -> str:
        assert self._lock is not None
        return self._lock.writer

    def call(self, what: str, function: Callable[[disk_index.DiskIndex], T]) -> T:
        """`function` with the index; once again if that turns out to be broken, with a new one.

        Raises:
            CacheFileError: could not `what` the folder: the system or the database refused. Other errors pass.
        """
        index = self._index
        try:
            if index is None or disk_index.identity(self.root) != index.identity:
                index = self._open(index)
            try:
                return function(index)
            except sqlite3.DatabaseError as error:
                if not disk_index.is_broken(error):
                    raise
                return function(self._open(index, is_broken=True))
        except CacheDataError:
            raise
        except OSError as error:
            raise CacheFileError(self.root, what, error.strerror or str(error)) from error
        except sqlite3.Error as error:
            raise CacheFileError(self.root, what, f"its index says: {error}") from error

    def renew(self) -> None:
        """Make a new index from the files."""
        self.call("repair", lambda index: self._open(index, is_broken=True))

    def close(self) -> None:
        """Repeatable."""
        self._is_closed = True
        index, self._index = self._index, None
        if index is not None:
            index.close()
        if self._lock is not None:
            self._lock.release()

    # -- opening --

    def _open(self, old: disk_index.DiskIndex | None, *, is_broken: bool = False) -> disk_index.DiskIndex:
        if self._is_closed:
            raise CacheFileError(self.root, "use", "it was closed")
        make_folder(self.root)
        with folder_lock(self.root):
            if self._index is not old and self._index is not None:
                return self._index  # another thread was quicker
            self._index = None
            if old is not None:
                old.close()
            self._renew_lock()
            is_other = old is not None and disk_index.identity(self.root) != old.identity
            index = self._new_index() if is_broken and not is_other else self._old_or_new_index()
            self._index = self._swept(index)
            return self._index

    def _swept(self, index: disk_index.DiskIndex) -> disk_index.DiskIndex:
        try:
            try:
                self._sweep(index)
            except sqlite3.DatabaseError as error:
                if not disk_index.is_broken(error):
                    raise
                index.close()
                index = self._new_index()
                self._sweep(index)
        except BaseException:
            index.close()
            raise
        return index

    def _renew_lock(self) -> None:
        if self._lock is None or not self._lock.is_there:
            if self._lock is not None:
                self._lock.release()
            self._lock = WriterLock(self.root)

    def _old_or_new_index(self) -> disk_index.DiskIndex:
        if disk_index.identity(self.root) is None:
            return self._new_index()
        try:
            return self._made_index()
        except (sqlite3.DatabaseError, OSError) as error:
            if isinstance(error, CacheDataError) or not (disk_index.is_broken(error) or self._is_no_file()):
                raise
            return self._new_index()

    def _is_no_file(self) -> bool:
        path = os.path.join(self.root, INDEX)
        return os.path.islink(path) or not os.path.isfile(path)

    def _new_index(self) -> disk_index.DiskIndex:
        disk_index.set_aside(self.root)
        return self._made_index()

    def _made_index(self) -> disk_index.DiskIndex:
        return disk_index.DiskIndex(self.root, self._adopt_files, self._before_step)

    def _adopt_files(self, c: sqlite3.Connection) -> None:
        """What cannot be adopted is unknown to the index, and swept."""
        for name, size in self.files.walk():
            if name.endswith(TEMPORARY):
                continue
            stored = self._stored(name)
            if stored is not None and stored.size_bytes == size:
                _adopt(c, name, stored, self._used_s(name))

    def _stored(self, name: str) -> StoredFile | None:
        try:
            fd = self.files.open(name)
        except OSError:
            return None
        try:
            stored = decode(fd, name)
        except CacheCorruptError:
            return None
        finally:
            os.close(fd)
        entry = stored.entry
        is_named_so = name.startswith(f"{stored.scope}/{entry.key.hex()[:2]}/{entry.key.hex()}.{entry.kind}.")
        return stored if is_named_so else None

    def _used_s(self, name: str) -> float:
        return os.stat(self.files.path(name), follow_symlinks=False).st_mtime

    # -- sweeping --

    def _sweep(self, index: disk_index.DiskIndex) -> None:
        """With the folder's lock held, so that nobody opens meanwhile."""
        names = [name for name, _ in self.files.walk()]  # first: a row is there before its file
        alive = live_writers(self.root)
        with index.transaction("sweep") as c:
            disk_rows.drop_writers(c, alive)
            known = disk_rows.all_names(c)
        for name in names:
            if name.removesuffix(TEMPORARY) not in known:
                with suppress(OSError):
                    self.files.remove(name)
        self.remove_doomed(index)
        if len(alive) == 1:
            self.files.remove_empty_folders()

    def bury_dead(self, index: disk_index.DiskIndex) -> bool:
        """Give up what ended processes were writing. False: there is nothing."""
        with index.transaction("look") as c:
            if not disk_rows.has_other_writers(c, self.writer):
                return False
        with folder_lock(self.root):
            alive = live_writers(self.root)
            with index.transaction("bury") as c:
                n_rows = disk_rows.drop_writers(c, alive)
        self.remove_doomed(index)
        return n_rows > 0

    def remove_doomed(self, index: disk_index.DiskIndex) -> None:
        with index.transaction("look") as c:
            names = disk_rows.doomed(c)
        if names:
            stuck = self.remove_files(names)
            with index.transaction("forget") as c:
                disk_rows.forget_doomed(c, set(names) - set(stuck))
                disk_rows.keep_doomed(c, stuck)

    def remove_files(self, names: Iterable[str]) -> list[str]:
        """Returns those that the system refused to remove."""
        stuck = []
        for name in names:
            try:
                self.files.remove(name)
            except OSError:
                stuck.append(name)
        return stuck

    def clear(self, index: disk_index.DiskIndex, namespace: str | None, scope: str | None) -> int:
        with index.transaction("clear") as c:
            n_entries = disk_rows.clear(c, namespace, scope)
        self.remove_doomed(index)
        is_everything = namespace is None and scope is None
        index.forget(shrink=is_everything)
        if is_everything:
            with suppress(OSError):
                os.unlink(os.path.join(self.root, BROKEN_INDEX))
        return n_entries


def _adopt(c: sqlite3.Connection, name: str, stored: StoredFile, used_s: float) -> None:
    scope = disk_rows.scope_id(c, stored.scope, json.dumps(dict(stored.facts), sort_keys=True))
    entry = replace(stored.entry, used_s=used_s)
    with suppress(sqlite3.IntegrityError):  # two files for one key: one of them was about to be removed
        row_id, _ = disk_rows.insert(c, scope, entry, name, stored.size_bytes, None)
        disk_rows.publish(c, row_id, name, None)
