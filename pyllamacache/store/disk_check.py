"""Looking at the folder of a disk tier from outside: what is in it, whether index and files agree, and clearing it.

Other processes may use the folder meanwhile. Tells names, sizes and counts, never ids.
"""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..errors import CacheCorruptError, CacheDataError, CacheFileError
from . import disk_index, disk_rows
from .disk_files import (
    INDEX,
    TEMPORARY,
    EntryFiles,
    folder_lock,
    is_cache_folder,
    live_writers,
    require_cache_folder,
)
from .disk_folder import OpenFolder
from .disk_format import DiskEntry, decode, ids_bytes, verify

__all__ = ["DiskCheck", "DiskGroup", "DiskProblem", "check", "clear", "groups", "is_cache_folder"]

_GROUPS = """
SELECT s.scope, s.facts, e.namespace, sum(e.kind = 'span'), sum(e.kind = 'state'),
    sum(CASE e.kind WHEN 'span' THEN e.end - e.start ELSE 0 END), sum(e.size), sum(e.pinned),
    min(e.used_s), max(e.used_s)
FROM entries e JOIN scopes s ON s.id = e.scope WHERE e.seq IS NOT NULL
GROUP BY s.scope, e.namespace ORDER BY s.scope, e.namespace
"""
_SUM = "(SELECT coalesce(sum(size), 0) FROM entries) + (SELECT coalesce(sum(size), 0) FROM doomed)"
_CHILDREN = (
    "(SELECT count(*) FROM entries c WHERE c.scope = entries.scope AND c.id <> entries.id AND (c.parent = entries.key"
    " OR (c.kind = 'state' AND c.key = entries.key)))"
)


@dataclass(frozen=True, slots=True)
class DiskGroup:
    """The entries of one namespace in one scope."""

    scope: str
    facts: Mapping[str, str]
    namespace: str
    n_spans: int
    n_states: int
    n_tokens: int
    """Of the spans."""
    size_bytes: int
    n_pinned: int
    oldest_use_s: float
    newest_use_s: float


@dataclass(frozen=True, slots=True)
class DiskProblem:
    """Something that is not as it should be."""

    kind: str
    """missing: a row without its file. damaged: a file that is not what was written, or not what its row says.
    leftover: what an ended process left. index: the index itself. total: the sum of sizes it keeps."""
    name: str
    what: str


@dataclass(frozen=True, slots=True)
class DiskCheck:
    """What a check found, and what is left of it: nothing, if it repaired all."""

    n_entries: int
    size_bytes: int
    problems: tuple[DiskProblem, ...]
    remaining: tuple[DiskProblem, ...]


def groups(folder: str | os.PathLike[str]) -> list[DiskGroup]:
    """What is stored, by scope and namespace.

    Raises:
        CacheFileError: it is not the folder of a disk cache, or cannot be read.
    """
    root = require_cache_folder(folder)
    if disk_index.identity(root) is None:
        return []
    with _errors(root, "read"), _connected(root) as c:
        return [DiskGroup(row[0], json.loads(row[1]), *row[2:]) for row in c.execute(_GROUPS)]


def clear(folder: str | os.PathLike[str], *, namespace: str | None = None, scope: str | None = None) -> int:
    """Remove what is stored, all or of a namespace, of a scope; returns how many entries.

    Raises:
        CacheFileError: it is not the folder of a disk cache, or something in it cannot be removed.
    """
    root = require_cache_folder(folder)
    opened = OpenFolder(root)
    try:
        return opened.call("clear", lambda index: opened.clear(index, namespace, scope))
    finally:
        opened.close()


def check(folder: str | os.PathLike[str], *, repair: bool = False) -> DiskCheck:
    """Read every file and compare it with its checksums and with the index.

    Args:
        repair: drop what is damaged, remove what is left over, and make a new index if the old one is broken.

    Raises:
        CacheFileError: it is not the folder of a disk cache, or cannot be read.
    """
    root = require_cache_folder(folder)
    with _errors(root, "check"):
        found = _Inspection(root)
        found.run()
        problems = remaining = tuple(found.problems)
        if repair and problems:
            _repair(root, problems)
            found = _Inspection(root)
            found.run()
            remaining = tuple(found.problems)
        return DiskCheck(found.n_entries, found.size_bytes, problems, remaining)


class _Row(NamedTuple):
    name: str
    size: int
    is_stored: bool
    writer: str | None
    scope: str
    entry: DiskEntry


@dataclass
class _Inspection:
    """One pass over a folder; changes nothing in it."""

    root: str
    n_entries: int = 0
    size_bytes: int = 0
    problems: list[DiskProblem] = field(default_factory=list)

    def run(self) -> None:
        files = EntryFiles(self.root)
        if disk_index.identity(self.root) is None:
            self.problems += [DiskProblem("leftover", name, "there is no index") for name, _ in files.walk()]
            return
        try:
            with folder_lock(self.root), _connected(self.root) as c:
                there = dict(files.walk())  # first: a row is there before its file
                alive = live_writers(self.root, keep=True)
                rows, doomed = _rows(c)
                self._check_index(c)
        except sqlite3.DatabaseError as error:
            if not disk_index.is_broken(error) and "no such" not in str(error):
                raise
            self._say("index", INDEX, str(error))
            return
        self._check_names(there, rows, doomed, alive)
        for row in rows:
            if row.is_stored:
                self._check_file(files, row)
        with _connected(self.root) as c:
            for name in set(doomed).intersection(disk_rows.doomed(c)):
                self._say("leftover", name, "it was to be removed")
            self._settle(c)

    def _check_index(self, c: sqlite3.Connection) -> None:
        for (said,) in c.execute("PRAGMA integrity_check"):
            if said != "ok":
                self._say("index", INDEX, said)
        c.execute("BEGIN")
        kept, summed = c.execute(f"SELECT value, {_SUM} FROM meta WHERE name = 'total'").fetchone()  # noqa: S608
        if kept != summed:
            self._say("total", INDEX, f"it says {kept} bytes, its rows {summed}")
        wrong = c.execute(f"SELECT count(*) FROM entries WHERE kind = 'span' AND children <> {_CHILDREN}")  # noqa: S608
        n_wrong = wrong.fetchone()[0]
        if n_wrong:
            self._say("total", INDEX, f"{n_wrong} spans with a wrong number of children")
        c.execute("COMMIT")

    def _check_names(self, there: Mapping[str, int], rows: list[_Row], doomed: list[str], alive: set[str]) -> None:
        known = {row.name for row in rows}.union(doomed)
        for name in there:
            if name.removesuffix(TEMPORARY) not in known:
                self._say("leftover", name, "the index does not know it")
        for row in rows:
            if not row.is_stored and row.writer not in alive:
                self._say("leftover", row.name, "its writer is gone")

    def _check_file(self, files: EntryFiles, row: _Row) -> None:
        what = ""
        try:
            fd = files.open(row.name)
            try:
                what = _difference(fd, row)
            finally:
                os.close(fd)
        except FileNotFoundError:
            what = "missing"
        except CacheCorruptError as error:
            what = error.what
        except OSError as error:
            what = error.strerror or str(error)
        self.n_entries += 1
        self.size_bytes += row.size
        if what:
            self.problems.append(DiskProblem("missing" if what == "missing" else "damaged", row.name, what))

    def _settle(self, c: sqlite3.Connection) -> None:
        """A row that is gone by now was evicted or dropped by another process."""
        names = disk_rows.all_names(c)
        self.problems = [
            each for each in self.problems if each.kind not in ("missing", "damaged") or each.name in names
        ]

    def _say(self, kind: str, name: str, what: str) -> None:
        self.problems.append(DiskProblem(kind, name, what))


def _rows(c: sqlite3.Connection) -> tuple[list[_Row], list[str]]:
    columns = ", ".join(f"e.{column.strip()}" for column in disk_rows.COLUMNS.split(","))
    query = f"SELECT e.name, e.size, e.seq, e.writer, s.scope, {columns} FROM entries e JOIN scopes s ON s.id = e.scope"  # noqa: S608
    c.execute("BEGIN")
    found = [
        _Row(row[0], row[1], row[2] is not None, row[3], row[4], disk_rows.entry_of(row[5:]))
        for row in c.execute(query)
    ]
    doomed = disk_rows.doomed(c)
    c.execute("COMMIT")
    return found, doomed


def _difference(fd: int, row: _Row) -> str:
    """What the file says otherwise than its row; empty: nothing."""
    stored = decode(fd, row.name)
    if _facts(stored.scope, stored.size_bytes, stored.entry) != _facts(row.scope, row.size, row.entry):
        return "it holds another entry than the index says"
    verify(fd, stored, row.name)
    return ""


def _facts(scope: str, size: int, entry: DiskEntry) -> tuple[Any, ...]:
    place = (entry.kind, entry.key, entry.parent, entry.namespace, entry.start, entry.end, ids_bytes(entry.ids))
    return (scope, size, *place, entry.n_bytes, entry.saved_tokens)


def _repair(root: str, problems: tuple[DiskProblem, ...]) -> None:
    kinds = {each.kind for each in problems}
    opened = OpenFolder(root)  # opening sweeps, and finds out whether the index is broken
    try:
        if "index" in kinds:
            opened.renew()

        def mend(index: disk_index.DiskIndex) -> None:
            with index.transaction("mend") as c:
                for each in problems:
                    if each.kind in ("missing", "damaged"):
                        disk_rows.drop(c, "name = ?", (each.name,))
                if "total" in kinds:
                    c.execute(f"UPDATE entries SET children = {_CHILDREN} WHERE kind = 'span'")  # noqa: S608
                    c.execute(f"UPDATE meta SET value = {_SUM} WHERE name = 'total'")  # noqa: S608
            opened.remove_doomed(index)

        opened.call("repair", mend)
    finally:
        opened.close()


@contextmanager
def _connected(root: str) -> Iterator[sqlite3.Connection]:
    c = disk_index.connect(root, disk_index.BUSY_S)
    try:
        yield c
    finally:
        c.close()


@contextmanager
def _errors(root: str, operation: str) -> Iterator[None]:
    try:
        yield
    except CacheDataError:
        raise
    except OSError as error:
        raise CacheFileError(root, operation, error.strerror or str(error)) from error
    except sqlite3.Error as error:
        hint = "`pyllamacache cache check --repair` makes a new one"
        raise CacheFileError(root, operation, f"its index says: {error}; {hint}") from error
