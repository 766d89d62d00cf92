"""The disk tier: entries of prefixes in a folder that several processes share, under a budget that always holds.

Room is reserved in the index before a file is begun, and what has to go for it is gone from the disk by then. An entry
can be found once its file is whole and synced; it cannot be found any more before its file is removed. So a process can
end at any instant, and what it leaves is swept when the next one opens the folder.

The files hold what transcripts hold: their mode is 0600.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import sqlite3
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ..errors import (
    CacheCorruptError,
    CacheDataError,
    CacheFileError,
    ClosedError,
    ConfigError,
    ForkedError,
)
from . import disk_evict, disk_index, disk_rows
from .disk_files import BeforeStep, is_scope, new_name, nothing, real_path
from .disk_folder import OpenFolder
from .disk_format import MAX_HEADER_BYTES, DiskEntry, check_entry, decode, encode, flat, ids_bytes, load

if TYPE_CHECKING:
    from .disk_format import Bytes

__all__ = ["DiskEntry", "DiskStatistics", "DiskStore"]

_NOT_A_FILE = {errno.ELOOP, errno.EINVAL, errno.ENXIO}


@dataclass(frozen=True, slots=True)
class DiskStatistics:
    """What one store did since it was opened."""

    written: int = 0
    written_bytes: int = 0
    present: int = 0
    """Writes of what was there already."""
    refused: int = 0
    """Writes of what is larger than the budget, or worth less than all that could go for it."""
    failed: int = 0
    """Writes that an error ended."""
    read: int = 0
    read_bytes: int = 0
    gone: int = 0
    """Reads of what was not there any more."""
    corrupt: int = 0
    evicted: int = 0
    """By this store, for room."""
    evicted_bytes: int = 0


@dataclass(frozen=True, slots=True)
class _Reserved:
    """A row whose file may be written once the doomed ones are removed."""

    row_id: int
    name: str
    doomed: list[str]
    evicted: disk_evict.Evicted


class DiskStore:
    """Entries of one scope in a folder. The budget is the folder's: entries of all scopes and processes count.

    Thread: any. `scan`, `read`, `touch` and the properties never wait for another process, nor for `write`; everything
    else waits for the transactions of others, milliseconds each. In a forked child every call raises ForkedError.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        limit_bytes: int,
        scope: str,
        facts: Mapping[str, str],
        clock: Callable[[], float] = time.time,
        before_step: BeforeStep = nothing,
    ) -> None:
        """Open the folder, made if it is not there, sweep what ended processes left, and evict down to the limit.

        Args:
            scope: hexadecimal, 16 to 64 digits; what must be the same for an entry to be usable.
            facts: `scope` for people; stored in every file.
            before_step: for tests, see disk_files.py.

        Raises:
            CacheFileError: the operating system refused, or the folder holds something else.
            CacheMismatchError: a newer version wrote it.
        """
        if not is_scope(scope):
            raise ConfigError("scope", scope, "16 to 64 lower-case hexadecimal digits")
        self.limit_bytes = limit_bytes
        self.scope = scope
        self._facts = dict(facts)
        self._clock = clock
        self._pid = os.getpid()
        self._is_closed = False
        self._counts: Counter[str] = Counter()
        self._counting = threading.Lock()
        # What waits for the next transaction: uses, and files that were not there. A deque needs no lock.
        self._uses: deque[tuple[str, bytes, float, int]] = deque()
        self._lost: deque[str] = deque()
        root = real_path(folder)
        self._folder = OpenFolder(root, before_step)
        self._files = self._folder.files
        self._reader = disk_index.IndexReader(root)
        weakref.finalize(self, _close, self._folder, self._reader, self._pid)
        self._open()

    # -- looking --

    @property
    def folder(self) -> str:
        return self._folder.root

    @property
    def size_bytes(self) -> int:
        """Of all files in the folder, those being written included; the index comes on top."""
        self._check_usable()
        return self._reader.size_bytes()

    @property
    def statistics(self) -> DiskStatistics:
        with self._counting:
            return DiskStatistics(**self._counts)

    def scan(self, since: int = 0) -> tuple[list[DiskEntry], int]:
        """Entries that came after token `since` was given out, 0: all; and the token for the next call.

        An entry that went and came again comes again. What goes is not told: `read` finds out.
        """
        self._check_usable()
        return self._reader.entries_since(self.scope, since, self._clock())

    def read(self, kind: str, key: bytes, into: Bytes) -> bool:
        """Fill `into`, writable and of the entry's `n_bytes`. Unless this returns True, its content is undefined.

        Returns: False if there is no such entry any more.
        Raises:
            CacheCorruptError: the file is damaged; the entry was dropped.
            CacheFileError: the operating system refused to read it.
        """
        self._check_usable()
        into = flat(into)
        found = self._reader.find(self.scope, kind, key, self._clock())
        if found is None or found[1].n_bytes != len(into):
            self._count(gone=1)
            return False
        name, entry = found
        try:
            self._fill(name, entry, into)
        except FileNotFoundError:
            self._lost.append(name)
            self._count(gone=1)
            return False
        except CacheCorruptError:
            self._count(corrupt=1)
            self._lost.append(name)
            with suppress(CacheDataError):  # what cannot be dropped now waits for the next transaction
                self.flush()
            raise
        except OSError as error:
            raise CacheFileError(self._files.path(name), "read", error.strerror or str(error)) from error
        self._count(read=1, read_bytes=len(into))
        return True

    def _fill(self, name: str, entry: DiskEntry, into: Bytes) -> None:
        where = self._files.path(name)
        try:
            fd = self._files.open(name)
        except OSError as error:
            if error.errno in _NOT_A_FILE:
                raise CacheCorruptError(where, "it is not a regular file") from None
            raise
        try:
            stored = decode(fd, where)
            there = stored.entry
            is_it = (stored.scope, there.kind, there.key, there.n_bytes) == (
                self.scope, entry.kind, entry.key, entry.n_bytes,
            ) and ids_bytes(there.ids) == ids_bytes(entry.ids)  # fmt: skip
            if not is_it:
                raise CacheCorruptError(where, "it holds another entry than the index says")
            load(fd, stored, into, where)
        finally:
            os.close(fd)

    # -- changing --

    def write(self, entry: DiskEntry, data: bytes | bytearray | Bytes) -> bool:
        """Store `data`, which must not change meanwhile; what was there under the same key stays.

        `hits` is taken over, `used_s` is now.

        Returns: whether it is there, or another process is writing it. False: it is larger than the budget, or only
            better things are there.
        Raises:
            CacheFileError: the operating system refused; nothing of it is left.
        """
        self._check_usable()
        data = flat(data)
        check_entry(entry, data)
        try:
            return self._write(replace(entry, used_s=self._clock()), data)
        except CacheDataError:
            self._count(failed=1)
            raise

    def _write(self, entry: DiskEntry, data: Bytes) -> bool:
        if self._reader.find(self.scope, entry.kind, entry.key, entry.used_s) is not None:
            self.touch([(entry.kind, entry.key)])
            self._count(present=1)
            return True
        head = encode(entry, self.scope, self._facts, hashlib.sha256(data.data).hexdigest())
        if len(head) > MAX_HEADER_BYTES:
            raise CacheFileError(self.folder, "write to", f"a header of {len(head)} bytes is too long")
        ids = ids_bytes(entry.ids)
        size = len(head) + len(ids) + len(data)
        reserved = self._reserve(entry, size)
        if isinstance(reserved, bool):
            self._count(**{"present" if reserved else "refused": 1})
            return reserved
        self._count(evicted=reserved.evicted.n_entries, evicted_bytes=reserved.evicted.n_bytes)
        is_there = self._fill_reserved(reserved, [head, ids, data])
        if is_there:
            self._count(written=1, written_bytes=size)
        return is_there

    def _reserve(self, entry: DiskEntry, size: int) -> _Reserved | bool:
        """True: it is there. False: there is no room for it."""
        if size > self.limit_bytes:
            return False
        if entry.expires_s is not None and entry.expires_s <= entry.used_s:
            return False

        def reserve(index: disk_index.DiskIndex) -> _Reserved | bool:
            reserved = self._try_reserve(index, entry, size)
            if isinstance(reserved, bool) and self._folder.bury_dead(index):
                return self._try_reserve(index, entry, size)
            return reserved

        return self._folder.call("write to", reserve)

    def _try_reserve(self, index: disk_index.DiskIndex, entry: DiskEntry, size: int) -> _Reserved | bool:
        try:
            with self._transaction(index, "reserve") as (c, scope):
                return self._reserve_row(c, scope, entry, size)
        except _NoRoomError:
            return False

    def _reserve_row(self, c: sqlite3.Connection, scope: int, entry: DiskEntry, size: int) -> _Reserved | bool:
        if disk_rows.is_there(c, scope, entry):
            return True
        name = new_name(self.scope, entry.key, entry.kind)
        # First, so that nothing below it in its own chain is a leaf.
        row_id, rank = disk_rows.insert(c, scope, entry, name, size, self._folder.writer)
        evicted = self._make_room(c, disk_evict.bid_of(rank, entry.saved_tokens, entry.hits, size))
        if not evicted.is_enough:
            raise _NoRoomError
        return _Reserved(row_id, name, disk_rows.doomed(c), evicted)

    def _make_room(self, c: sqlite3.Connection, bid: disk_evict.Bid) -> disk_evict.Evicted:
        over = disk_rows.size_bytes(c) - self.limit_bytes
        return disk_evict.evict(c, over, bid, self._clock()) if over > 0 else disk_evict.Evicted()

    def _fill_reserved(self, reserved: _Reserved, pieces: list[bytes | Bytes]) -> bool:
        try:
            self._write_file(reserved, pieces)
            return self._folder.call("write to", lambda index: self._publish(index, reserved))
        except BaseException:
            self._lost.append(reserved.name)
            with suppress(Exception):  # the row counts until the next transaction, and nobody finds it
                self.flush()
            raise

    def _write_file(self, reserved: _Reserved, pieces: list[bytes | Bytes]) -> None:
        stuck = self._folder.remove_files(reserved.doomed)
        if stuck:
            raise CacheFileError(self._files.path(stuck[0]), "remove", "the operating system refused")
        try:
            self._files.write(reserved.name, pieces)
        except OSError as error:
            raise CacheFileError(self._files.path(reserved.name), "write", error.strerror or str(error)) from error

    def _publish(self, index: disk_index.DiskIndex, reserved: _Reserved) -> bool:
        with index.transaction("publish") as c:
            disk_rows.forget_doomed(c, reserved.doomed)
            is_there = disk_rows.publish(c, reserved.row_id, reserved.name, self._folder.writer)
        if not is_there:  # the index was made anew meanwhile
            self._files.remove(reserved.name)
        return is_there

    def touch(self, items: Iterable[tuple[str, bytes]], hits: int = 0) -> None:
        """The entries of these kinds and keys were used now. Written with the next `write` or `flush`."""
        self._check_usable()
        now_s = self._clock()
        self._uses.extend((kind, key, now_s, hits) for kind, key in items)

    def flush(self) -> None:
        """Write down what waits for a transaction, and remove files of entries that were dropped."""
        self._check_usable()
        if self._uses or self._lost:
            self._folder.call("write to", self._flush)

    def set_pinned(self, items: Iterable[tuple[str, bytes]], is_pinned: bool) -> None:
        """What is pinned is neither evicted nor expires, restarts included, until it is unpinned or removed."""
        self._check_usable()
        chosen = list(items)

        def pin(index: disk_index.DiskIndex) -> None:
            with self._transaction(index, "pin") as (c, scope):
                disk_rows.pin(c, scope, chosen, is_pinned)

        self._folder.call("write to", pin)

    def remove(self, items: Iterable[tuple[str, bytes]]) -> None:
        self._check_usable()
        chosen = list(items)

        def drop(index: disk_index.DiskIndex) -> None:
            with self._transaction(index, "remove") as (c, scope):
                for kind, key in chosen:
                    condition = "scope = ? AND kind = ? AND key = ? AND seq IS NOT NULL"
                    disk_rows.drop(c, condition, (scope, kind, key))
            self._folder.remove_doomed(index)

        self._folder.call("write to", drop)

    def tidy(self) -> None:
        """Remove what has expired, of all scopes, and what is over `limit_bytes`."""
        self._check_usable()
        self._folder.call("write to", self._shrink)

    def clear(self, namespace: str | None = None) -> int:
        """Remove what is stored in this scope, pinned or not; returns how many entries."""
        self._check_usable()
        return self._folder.call("clear", lambda index: self._folder.clear(index, namespace, self.scope))

    def close(self) -> None:
        """Repeatable. Nothing is awaited but the end of a transaction."""
        if self._is_closed or os.getpid() != self._pid:
            return
        with suppress(CacheDataError):
            self.flush()
        self._is_closed = True
        _close(self._folder, self._reader, self._pid)

    def _open(self) -> None:
        try:
            self._folder.call("open", self._shrink)
        except BaseException:
            self.close()
            raise

    def _shrink(self, index: disk_index.DiskIndex) -> None:
        with index.transaction("shrink") as c:
            disk_rows.drop_expired(c, self._clock())
            evicted = self._make_room(c, disk_evict.ANY)
        self._count(evicted=evicted.n_entries, evicted_bytes=evicted.n_bytes)
        self._folder.remove_doomed(index)

    def _flush(self, index: disk_index.DiskIndex) -> None:
        with self._transaction(index, "flush"):
            pass
        self._folder.remove_doomed(index)

    @contextmanager
    def _transaction(self, index: disk_index.DiskIndex, step: str) -> Iterator[tuple[sqlite3.Connection, int]]:
        """With the scope's number. What waited for a transaction is written down, and waits on if this one fails."""
        uses: dict[tuple[str, bytes], tuple[float, int]] = {}
        with suppress(IndexError):
            while True:
                kind, key, used_s, hits = self._uses.popleft()
                uses[kind, key] = used_s, hits + uses.get((kind, key), (0.0, 0))[1]
        lost = list(self._lost)
        try:
            with index.transaction(step) as c:
                scope = disk_rows.scope_id(c, self.scope, json.dumps(self._facts, sort_keys=True))
                disk_rows.touch(c, scope, uses)
                for name in lost:
                    disk_rows.drop(c, "name = ?", (name,))
                yield c, scope
        except BaseException:
            self._uses.extendleft((*item, *use) for item, use in uses.items())
            raise
        for name in lost:
            with suppress(ValueError):
                self._lost.remove(name)

    def _count(self, **more: int) -> None:
        with self._counting:
            self._counts.update(more)

    def _check_usable(self) -> None:
        if os.getpid() != self._pid:
            raise ForkedError("the disk cache")
        if self._is_closed:
            raise ClosedError("the disk cache")


class _NoRoomError(Exception):
    """Ends a transaction without a trace."""


def _close(folder: OpenFolder, reader: disk_index.IndexReader, pid: int) -> None:
    if os.getpid() == pid:
        reader.close()
        folder.close()
