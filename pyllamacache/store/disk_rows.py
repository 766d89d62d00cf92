"""What is asked of the index and changed in it, inside of a transaction that the caller holds."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from . import disk_evict
from .disk_format import DiskEntry, ids_bytes, ids_of

COLUMNS = (
    "key, parent, kind, namespace, start, end, ids, n_bytes, label, priority, expires_s, tokens, hits, used_s, pinned"
)
"""What `entry_of` takes."""


def entry_of(row: Sequence[Any]) -> DiskEntry:
    """From `COLUMNS`."""
    key, parent, kind, namespace, start, end, ids, *rest, pinned = row
    n_bytes, label, priority, expires_s, tokens, hits, used_s = rest
    return DiskEntry(
        key,
        parent,
        kind,
        namespace,
        start,
        end,
        ids_of(ids),
        n_bytes,
        label,
        priority,
        expires_s,
        tokens,
        hits,
        used_s,
        bool(pinned),
    )


def is_valid(entry: DiskEntry, now_s: float) -> bool:
    """Whether its time has not run out; what is pinned has no end."""
    return entry.is_pinned or entry.expires_s is None or entry.expires_s > now_s


def scope_id(c: sqlite3.Connection, scope: str, facts: str) -> int:
    """The number of a scope, given to it if it has none."""
    c.execute("INSERT OR IGNORE INTO scopes (scope, facts) VALUES (?, ?)", (scope, facts))
    found: int = c.execute("SELECT id FROM scopes WHERE scope = ?", (scope,)).fetchone()[0]
    return found


def insert(
    c: sqlite3.Connection, scope: int, entry: DiskEntry, name: str, size: int, writer: str | None
) -> tuple[int, int]:
    """A row whose file is not there yet; it counts, and nobody finds it.

    Returns: the row's id, and its rank: a span is stranded as long as the one before it is not there.
    """
    rank = entry.priority if _has_ground(c, scope, entry) else disk_evict.STRANDED
    row = {
        "scope": scope, "kind": entry.kind, "key": entry.key, "parent": entry.parent, "namespace": entry.namespace,
        "start": entry.start, "end": entry.end, "n_bytes": entry.n_bytes, "size": size, "label": entry.label,
        "priority": entry.priority, "tokens": entry.saved_tokens, "expires_s": entry.expires_s, "hits": entry.hits,
        "used_s": entry.used_s, "pinned": int(entry.is_pinned), "rank": rank,
        "bucket": disk_evict.bucket_of(entry.saved_tokens, entry.hits, size), "writer": writer, "name": name,
        "ids": ids_bytes(entry.ids),
    }  # fmt: skip
    columns, values = ", ".join(row), ", ".join(f":{column}" for column in row)
    made = c.execute(f"INSERT INTO entries ({columns}) VALUES ({values})", row).lastrowid  # noqa: S608 - own names
    assert made is not None
    return made, rank


def _has_ground(c: sqlite3.Connection, scope: int, entry: DiskEntry) -> bool:
    # Of a state nobody knows: where there are states only, it stands alone.
    if entry.kind != "span" or entry.start == 0:
        return True
    return _rank_of(c, scope, entry.parent) not in (None, disk_evict.STRANDED)


def _rank_of(c: sqlite3.Connection, scope: int, key: bytes) -> int | None:
    """Of a span; None: it is not there."""
    query = "SELECT rank FROM entries WHERE scope = ? AND kind = 'span' AND key = ?"
    found = c.execute(query, (scope, key)).fetchone()
    return None if found is None else int(found[0])


def publish(c: sqlite3.Connection, row_id: int, name: str, writer: str | None) -> bool:
    """Let everybody find a row whose file is there. False: the row is gone."""
    c.execute("UPDATE meta SET value = value + 1 WHERE name = 'seq'")
    done = c.execute(
        "UPDATE entries SET writer = NULL, seq = (SELECT value FROM meta WHERE name = 'seq') "
        "WHERE id = ? AND name = ? AND writer IS ? AND seq IS NULL",
        (row_id, name, writer),
    ).rowcount
    if done:
        _rejoin(c, row_id)
        return True
    # An index that was made anew from the files may have found this one.
    return c.execute("SELECT 1 FROM entries WHERE name = ? AND seq IS NOT NULL", (name,)).fetchone() is not None


def _rejoin(c: sqlite3.Connection, row_id: int) -> None:
    """If this is the span that stranded entries were missing, they are stranded no more."""
    scope, kind, key, parent, start, children = c.execute(
        "SELECT scope, kind, key, parent, start, children FROM entries WHERE id = ?", (row_id,)
    ).fetchone()
    if kind != "span" or not children:
        return
    if start == 0 or _rank_of(c, scope, parent) not in (None, disk_evict.STRANDED):
        disk_evict.rejoin(c, scope, key)


def touch(c: sqlite3.Connection, scope: int, uses: Mapping[tuple[str, bytes], tuple[float, int]]) -> None:
    """By kind and key: when it was used last, and how many hits to add."""
    c.executemany(
        "UPDATE entries SET used_s = max(used_s, ?), hits = hits + ?, bucket = bucket_of(tokens, hits + ?, size) "
        "WHERE scope = ? AND kind = ? AND key = ?",
        [(used_s, hits, hits, scope, kind, key) for (kind, key), (used_s, hits) in uses.items()],
    )


def drop(c: sqlite3.Connection, condition: str, parameters: Sequence[object]) -> int:
    """Delete the rows that meet the condition; what is left above them is stranded. Returns how many."""
    gone = c.execute(
        f"SELECT scope, key FROM entries WHERE ({condition}) AND kind = 'span' AND children > 0",  # noqa: S608 - own text
        parameters,
    ).fetchall()
    n_rows = c.execute(f"DELETE FROM entries WHERE {condition}", parameters).rowcount  # noqa: S608 - own text
    for scope, key in gone:
        disk_evict.strand(c, scope, key)
    return n_rows


def is_there(c: sqlite3.Connection, scope: int, entry: DiskEntry) -> bool:
    """Or being written. What expired is not: it is dropped."""
    drop(c, "scope = ? AND kind = ? AND key = ? AND seq IS NOT NULL AND pinned = 0 AND expires_s <= ?",
         (scope, entry.kind, entry.key, entry.used_s))  # fmt: skip
    found = c.execute(
        "SELECT 1 FROM entries WHERE scope = ? AND kind = ? AND key = ?", (scope, entry.kind, entry.key)
    ).fetchone()
    return found is not None


def drop_expired(c: sqlite3.Connection, now_s: float) -> int:
    """Of all scopes. Returns how many rows."""
    return drop(c, "seq IS NOT NULL AND pinned = 0 AND expires_s <= ?", (now_s,))


def pin(c: sqlite3.Connection, scope: int, items: Iterable[tuple[str, bytes]], is_pinned: bool) -> None:
    """Those of the items that are there."""
    c.executemany(
        "UPDATE entries SET pinned = ? WHERE scope = ? AND kind = ? AND key = ?",
        [(int(is_pinned), scope, kind, key) for kind, key in items],
    )


def clear(c: sqlite3.Connection, namespace: str | None, scope: str | None) -> int:
    """Delete what is stored, all of it or of a namespace or scope; what is being written stays. Returns how many."""
    conditions = {"scope = (SELECT id FROM scopes WHERE scope = ?)": scope, "namespace = ?": namespace}
    chosen = {condition: value for condition, value in conditions.items() if value is not None}
    where = " AND ".join(["seq IS NOT NULL", *chosen])
    # Chains end at the borders of both, so nothing is stranded.
    n_rows = c.execute(f"DELETE FROM entries WHERE {where}", tuple(chosen.values())).rowcount  # noqa: S608 - own text
    c.execute("DELETE FROM scopes WHERE id NOT IN (SELECT scope FROM entries)")
    return n_rows


def drop_writers(c: sqlite3.Connection, alive: Iterable[str]) -> int:
    """Give up what writers that are gone were writing; returns how many rows."""
    marks = ", ".join("?" for _ in alive)
    return c.execute(
        f"DELETE FROM entries WHERE seq IS NULL AND writer NOT IN ({marks})",  # noqa: S608 - marks only
        tuple(alive),
    ).rowcount


def has_other_writers(c: sqlite3.Connection, writer: str) -> bool:
    """Whether somebody else, alive or not, has reserved room."""
    found = c.execute("SELECT 1 FROM entries WHERE seq IS NULL AND writer <> ? LIMIT 1", (writer,)).fetchone()
    return found is not None


def all_names(c: sqlite3.Connection) -> set[str]:
    """Of all files that may be there."""
    return {name for (name,) in c.execute("SELECT name FROM entries UNION ALL SELECT name FROM doomed")}


def size_bytes(c: sqlite3.Connection) -> int:
    """Of all files that are there or being written; without those that are being removed, which nobody waits for."""
    # One statement: between two, another process could have finished removing.
    n_bytes: int = c.execute(
        "SELECT value - (SELECT coalesce(sum(size), 0) FROM doomed WHERE NOT stuck) FROM meta WHERE name = 'total'"
    ).fetchone()[0]
    return n_bytes


def doomed(c: sqlite3.Connection) -> list[str]:
    """Names of files to remove."""
    return [name for (name,) in c.execute("SELECT name FROM doomed")]


def forget_doomed(c: sqlite3.Connection, names: Iterable[str]) -> None:
    """These are removed."""
    c.executemany("DELETE FROM doomed WHERE name = ?", [(name,) for name in names])


def keep_doomed(c: sqlite3.Connection, names: Iterable[str]) -> None:
    """These could not be removed, and count as what is there."""
    c.executemany("UPDATE doomed SET stuck = 1 WHERE name = ?", [(name,) for name in names])
