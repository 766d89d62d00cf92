"""The index of a disk tier: an SQLite database that several processes write to, a row for each file.

A row is made before its file, and its file is named in `doomed` by whoever deletes the row; triggers see to that, to
the sum of all sizes and to the number of children. So every file is in one of the tables at every instant, and counted.
What is asked and changed in a transaction is in disk_rows.py, which row to give up in disk_evict.py.
"""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from urllib.parse import quote

from ..errors import CacheMismatchError
from . import disk_evict, disk_rows
from .atomic import open_regular
from .disk_files import BROKEN_INDEX, INDEX, BeforeStep, nothing
from .disk_format import DiskEntry

BUSY_S = 10.0
"""How long a transaction waits for those of other processes, each of which takes milliseconds."""
READ_BUSY_S = 0.05
"""Where there is no write-ahead log, a writer keeps readers out: they find nothing rather than wait."""

_APPLICATION_ID = 0x706C6364
_SCHEMA_VERSION = 1

# seq is NULL while the file is being written. rank is the priority, or lower than any where the chain below is gone.
_SCHEMA = """
CREATE TABLE meta (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE scopes (id INTEGER PRIMARY KEY, scope TEXT NOT NULL UNIQUE, facts TEXT NOT NULL);
CREATE TABLE doomed (name TEXT PRIMARY KEY, size INTEGER NOT NULL, stuck INTEGER NOT NULL DEFAULT 0) WITHOUT ROWID;
CREATE TABLE entries (
    id INTEGER PRIMARY KEY, scope INTEGER NOT NULL, kind TEXT NOT NULL, key BLOB NOT NULL, parent BLOB NOT NULL,
    namespace TEXT NOT NULL, start INTEGER NOT NULL, end INTEGER NOT NULL, n_bytes INTEGER NOT NULL,
    size INTEGER NOT NULL, label TEXT NOT NULL, priority INTEGER NOT NULL, tokens INTEGER NOT NULL, expires_s REAL,
    hits INTEGER NOT NULL, used_s REAL NOT NULL, pinned INTEGER NOT NULL, rank INTEGER NOT NULL,
    bucket INTEGER NOT NULL, children INTEGER NOT NULL DEFAULT 0, seq INTEGER, writer TEXT, name TEXT NOT NULL UNIQUE,
    ids BLOB NOT NULL, UNIQUE (scope, kind, key));
CREATE INDEX by_parent ON entries (scope, parent);
CREATE INDEX by_seq ON entries (scope, seq);
CREATE INDEX by_writer ON entries (writer) WHERE seq IS NULL;
CREATE INDEX by_expiry ON entries (expires_s) WHERE expires_s IS NOT NULL;
CREATE INDEX leaves ON entries (rank, bucket, used_s) WHERE seq IS NOT NULL AND pinned = 0 AND children = 0;
CREATE TRIGGER entry_comes AFTER INSERT ON entries BEGIN
    UPDATE meta SET value = value + NEW.size WHERE name = 'total';
    UPDATE entries SET children = children + 1 WHERE scope = NEW.scope AND kind = 'span' AND id <> NEW.id
        AND key IN (NEW.parent, CASE NEW.kind WHEN 'state' THEN NEW.key ELSE NEW.parent END);
    UPDATE entries SET children =
        (SELECT count(*) FROM entries c WHERE c.scope = NEW.scope AND c.parent = NEW.key AND c.id <> NEW.id)
        + (SELECT count(*) FROM entries c WHERE c.scope = NEW.scope AND c.kind = 'state' AND c.key = NEW.key
           AND c.parent <> NEW.key)
        WHERE id = NEW.id AND NEW.kind = 'span';
END;
CREATE TRIGGER entry_goes AFTER DELETE ON entries BEGIN
    INSERT OR REPLACE INTO doomed (name, size) VALUES (OLD.name, OLD.size);
    UPDATE entries SET children = children - 1 WHERE scope = OLD.scope AND kind = 'span'
        AND key IN (OLD.parent, CASE OLD.kind WHEN 'state' THEN OLD.key ELSE OLD.parent END);
END;
CREATE TRIGGER file_goes AFTER DELETE ON doomed BEGIN
    UPDATE meta SET value = value - OLD.size WHERE name = 'total';
END;
"""
_TABLES = frozenset({"meta", "scopes", "doomed", "entries", "entry_comes", "entry_goes", "file_goes"})


def is_broken(error: BaseException) -> bool:
    """Whether the file is no database any more, as against full, locked or refused."""
    return type(error) is sqlite3.DatabaseError


def identity(root: str) -> tuple[int, int] | None:
    """Of the database file that lies there now; another one is another index."""
    try:
        found = os.stat(os.path.join(root, INDEX), follow_symlinks=False)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def connect(root: str, busy_s: float) -> sqlite3.Connection:
    """To the index that is there."""
    path = quote(os.path.join(root, INDEX))
    connection = sqlite3.connect(
        f"file:{path}?mode=rw", uri=True, timeout=busy_s, isolation_level=None, check_same_thread=False
    )
    try:
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute("PRAGMA temp_store = MEMORY")
    except BaseException:
        connection.close()
        raise
    return connection


# ---- writing ---------------------------------------------------------------------------------------------------


class DiskIndex:
    """The connection that writes. Thread: any; `transaction` is held by one at a time.

    Made, and replaced, with the folder's lock held.
    """

    def __init__(
        self, root: str, fill: Callable[[sqlite3.Connection], None], before_step: BeforeStep = nothing
    ) -> None:
        """Open the index, made if it is not there.

        Args:
            fill: adds rows for the files that are there to a new index, before anybody sees it.

        Raises:
            sqlite3.DatabaseError: see `is_broken`.
            CacheMismatchError: a newer version wrote it.
            OSError: also when it is a link.
        """
        self.root = root
        self._before_step = before_step
        self._lock = threading.Lock()
        before_step("index.open")
        _make_file(os.path.join(root, INDEX))
        self.identity = identity(root)
        self._connection = connect(root, BUSY_S)
        try:
            self._prepare(fill)
        except BaseException:
            self._connection.close()
            raise

    def _prepare(self, fill: Callable[[sqlite3.Connection], None]) -> None:
        c = self._connection
        c.create_function("bucket_of", 3, disk_evict.bucket_of, deterministic=True)
        version = c.execute("PRAGMA user_version").fetchone()[0]
        if version > _SCHEMA_VERSION:
            raise CacheMismatchError(self.root, "format_version", f"at most {_SCHEMA_VERSION}", version)
        c.execute("PRAGMA secure_delete = ON")  # a deleted row held ids
        c.execute("PRAGMA journal_mode = WAL")  # where it does not work, SQLite stays with a rollback journal
        c.execute("PRAGMA wal_autocheckpoint = 100")  # pages: the log stays far smaller than the entries
        c.execute("PRAGMA journal_size_limit = 1048576")
        if version == 0:
            with self.transaction("create"):
                for statement in _statements(_SCHEMA):
                    c.execute(statement)
                # Beyond what any index before this one gave out: whoever asks for newer rows gets all of this one.
                c.execute("INSERT INTO meta VALUES ('total', 0), ('seq', ?)", (time.time_ns() // 1000,))
                fill(c)
                c.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
                c.execute(f"PRAGMA user_version = {_SCHEMA_VERSION}")
        found = {name for (name,) in c.execute("SELECT name FROM sqlite_master")}
        if not found >= _TABLES or c.execute("PRAGMA application_id").fetchone()[0] != _APPLICATION_ID:
            raise sqlite3.DatabaseError("it is a database of another kind")

    def close(self) -> None:
        """Repeatable."""
        with self._lock:
            self._connection.close()

    def forget(self, *, shrink: bool = False) -> None:
        """Leave nothing of deleted rows in the log either, as far as nobody is reading it just now."""
        with self._lock, suppress(sqlite3.OperationalError):
            if shrink:
                self._connection.execute("VACUUM")
            self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

    @contextmanager
    def transaction(self, step: str) -> Iterator[sqlite3.Connection]:
        """All of it is kept, or nothing."""
        with self._lock:
            c = self._connection
            self._before_step(f"index.{step}")
            c.execute("BEGIN IMMEDIATE")
            try:
                yield c
                self._before_step(f"index.{step}.commit")
                c.execute("COMMIT")
            except BaseException:
                with suppress(sqlite3.Error):
                    if c.in_transaction:
                        c.execute("ROLLBACK")
                raise


def _make_file(path: str) -> None:
    with suppress(FileExistsError):
        # SQLite gives its log the same mode.
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
    os.close(open_regular(path))


def _statements(script: str) -> Iterator[str]:
    # `executescript` would commit first.
    pending = ""
    for line in script.splitlines():
        pending += line + "\n"
        if sqlite3.complete_statement(pending):
            yield pending
            pending = ""


def set_aside(root: str) -> None:
    """Make room for a new index. With the folder's lock held."""
    path = os.path.join(root, INDEX)
    with suppress(FileNotFoundError):
        os.replace(path, os.path.join(root, BROKEN_INDEX))
    for suffix in ("-wal", "-shm", "-journal"):  # of the old one: the new one must not take it for its own
        with suppress(FileNotFoundError):
            os.unlink(path + suffix)


# ---- reading ---------------------------------------------------------------------------------------------------


class IndexReader:
    """A connection that reads, beside the one that writes and never waiting for it. Thread: any, one at a time.

    Follows the index when another one takes its place, and finds nothing while there is none.
    """

    def __init__(self, root: str) -> None:
        self._root = root
        self._lock = threading.Lock()
        self._connection: sqlite3.Connection | None = None
        self._identity: tuple[int, int] | None = None
        self._is_closed = False
        self._seen = (-1, -1)
        """SQLite's count of changes by others when there was nothing newer than this token."""

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            self._drop()

    def entries_since(self, scope: str, token: int, now_s: float) -> tuple[list[DiskEntry], int]:
        with self._lock, self._reading() as c:
            if c is None:
                return [], token
            version = c.execute("PRAGMA data_version").fetchone()[0]
            if self._seen[0] == version and token >= self._seen[1]:
                return [], token
            rows = c.execute(
                f"SELECT seq, {disk_rows.COLUMNS} FROM entries WHERE scope = (SELECT id FROM scopes WHERE scope = ?) "  # noqa: S608
                "AND seq > ? ORDER BY seq",
                (scope, token),
            ).fetchall()
            token = rows[-1][0] if rows else token
            self._seen = (version, token)
            entries = (disk_rows.entry_of(row[1:]) for row in rows)
            return [each for each in entries if disk_rows.is_valid(each, now_s)], token
        return [], token

    def find(self, scope: str, kind: str, key: bytes, now_s: float) -> tuple[str, DiskEntry] | None:
        """The name of the file and what is in it."""
        with self._lock, self._reading() as c:
            if c is None:
                return None
            row = c.execute(
                f"SELECT name, {disk_rows.COLUMNS} FROM entries WHERE scope = (SELECT id FROM scopes WHERE scope = ?) "  # noqa: S608
                "AND kind = ? AND key = ? AND seq IS NOT NULL",
                (scope, kind, key),
            ).fetchone()
            if row is None:
                return None
            entry = disk_rows.entry_of(row[1:])
            return (row[0], entry) if disk_rows.is_valid(entry, now_s) else None
        return None

    def size_bytes(self) -> int:
        with self._lock, self._reading() as c:
            return 0 if c is None else disk_rows.size_bytes(c)
        return 0

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection | None]:
        """A broken or locked index reads as an empty one: the next write mends it, or says what is wrong."""
        try:
            self._follow()
        except sqlite3.Error:
            self._drop()
        try:
            yield self._connection
        except sqlite3.Error:
            self._drop()

    def _follow(self) -> None:
        there = None if self._is_closed else identity(self._root)
        if there != self._identity:
            self._drop()
            self._connection = None if there is None else connect(self._root, READ_BUSY_S)
            self._identity = there

    def _drop(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._connection = self._identity = None
        self._seen = (-1, -1)
