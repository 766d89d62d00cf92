"""Which rows of the index go when there is no room: inside of the transaction that needs the room.

In this order: what has expired; what is stranded; the lowest priority; the least value, which is the tokens saved per
byte, times uses, over age. Only leaves go, so a chain is given up from its end. Never: what is pinned.

Value changes with time, so no index has its order. Rows of one priority are kept in buckets, half an octave of tokens
per byte and uses wide and ordered by last use, and only the oldest of each bucket is looked at: of two rows, one that
is worth less by a factor of at most 1.42 may stay. A bucket's number is at most 80 or so, whatever the folder holds.
"""

from __future__ import annotations

import math
import sqlite3
from dataclasses import dataclass

STRANDED = -(1 << 40)
"""The rank of what cannot be used: below any priority."""

_IS_LEAF = "seq IS NOT NULL AND pinned = 0 AND children = 0"
_HEAD = (
    "SELECT id, size, tokens, hits, used_s, parent, scope, kind, key FROM entries INDEXED BY leaves "  # noqa: S608
    f"WHERE rank = ? AND bucket = ? AND {_IS_LEAF} ORDER BY used_s LIMIT 1"
)
_NEXT_RANK = f"SELECT rank FROM entries INDEXED BY leaves WHERE rank > ? AND {_IS_LEAF} ORDER BY rank LIMIT 1"  # noqa: S608
_NEXT_BUCKET = (
    "SELECT bucket FROM entries INDEXED BY leaves "  # noqa: S608
    f"WHERE rank = ? AND bucket > ? AND {_IS_LEAF} ORDER BY bucket LIMIT 1"
)
_PARENTS = f"SELECT rank, bucket FROM entries WHERE scope = ? AND kind = 'span' AND key IN (?, ?) AND {_IS_LEAF}"  # noqa: S608
_EXPIRED = (
    "SELECT id, size, scope, kind, key, children FROM entries INDEXED BY by_expiry "
    "WHERE expires_s <= ? AND seq IS NOT NULL AND pinned = 0 ORDER BY expires_s LIMIT 64"
)
_DESCENDANTS = """
WITH RECURSIVE down (key) AS (
    VALUES (:key) UNION
    SELECT e.key FROM entries e JOIN down ON e.scope = :scope AND e.parent = down.key WHERE e.kind = 'span')
SELECT e.id FROM down JOIN entries e ON e.scope = :scope AND e.parent = down.key UNION
SELECT e.id FROM down JOIN entries e ON e.scope = :scope AND e.kind = 'state' AND e.key = down.key
"""


@dataclass(frozen=True, slots=True)
class Bid:
    """What the newcomer is worth: nothing better than it makes room for it."""

    rank: float
    value: float


ANY = Bid(math.inf, math.inf)


@dataclass(slots=True)
class Evicted:
    """What went, and whether that was enough."""

    n_entries: int = 0
    n_bytes: int = 0
    is_enough: bool = True


def weight_of(tokens: int, hits: int, size: int) -> float:
    """Tokens per byte, times uses."""
    return tokens * (1 + hits) / max(1, size)


def bucket_of(tokens: int, hits: int, size: int) -> int:
    """Which of the buckets a row belongs to."""
    return math.floor(2 * math.log2(max(weight_of(tokens, hits, size), 1e-30)))


def bid_of(rank: int, tokens: int, hits: int, size: int) -> Bid:
    """For what is used now."""
    return Bid(rank, weight_of(tokens, hits, size))


@dataclass(frozen=True, slots=True)
class _Leaf:
    row_id: int
    size: int
    value: float
    scope: int
    kind: str
    key: bytes
    parent: bytes


def evict(c: sqlite3.Connection, needed_bytes: int, bid: Bid, now_s: float) -> Evicted:
    """Delete rows until their files free `needed_bytes`. If it is not enough, the caller rolls back."""
    gone = Evicted()
    while gone.n_bytes < needed_bytes:
        expired = c.execute(_EXPIRED, (now_s,)).fetchall()
        if not expired:
            break
        for row_id, size, scope, kind, key, children in expired:
            _delete(c, row_id, size, gone)
            if kind == "span" and children:
                strand(c, scope, key)
    if gone.n_bytes < needed_bytes:
        _evict_leaves(c, needed_bytes, bid, now_s, gone)
    gone.is_enough = gone.n_bytes >= needed_bytes
    return gone


def _evict_leaves(c: sqlite3.Connection, needed_bytes: int, bid: Bid, now_s: float, gone: Evicted) -> None:
    rank = float(STRANDED - 1)
    while gone.n_bytes < needed_bytes:
        found = c.execute(_NEXT_RANK, (rank,)).fetchone()
        if found is None or found[0] > bid.rank:
            return
        rank = found[0]
        limit = bid.value if rank == bid.rank else math.inf
        lower = _evict_rank(c, found[0], needed_bytes, limit, now_s, gone)
        # A parent that has just become a leaf may rank below its children.
        rank = rank if lower is None else lower - 1


def _evict_rank(
    c: sqlite3.Connection, rank: int, needed_bytes: int, max_value: float, now_s: float, gone: Evicted
) -> int | None:
    """Returns the rank of a new leaf that comes before all of this one's, if there is one."""
    heads: dict[int, _Leaf] = {}
    for bucket in _buckets(c, rank):
        _look(c, heads, rank, bucket, now_s)
    while heads and gone.n_bytes < needed_bytes:
        bucket = min(heads, key=lambda each: heads[each].value)
        leaf = heads[bucket]
        if leaf.value > max_value:
            return None
        _delete(c, leaf.row_id, leaf.size, gone)
        _look(c, heads, rank, bucket, now_s)
        also = leaf.key if leaf.kind == "state" else leaf.parent
        for parent_rank, parent_bucket in c.execute(_PARENTS, (leaf.scope, leaf.parent, also)).fetchall():
            if parent_rank < rank:
                return int(parent_rank)
            if parent_rank == rank:
                _look(c, heads, rank, parent_bucket, now_s)
    return None


def _buckets(c: sqlite3.Connection, rank: int) -> list[int]:
    buckets: list[int] = []
    last = -(1 << 30)
    while (found := c.execute(_NEXT_BUCKET, (rank, last)).fetchone()) is not None:
        last = found[0]
        buckets.append(last)
    return buckets


def _look(c: sqlite3.Connection, heads: dict[int, _Leaf], rank: int, bucket: int, now_s: float) -> None:
    row = c.execute(_HEAD, (rank, bucket)).fetchone()
    if row is None:
        heads.pop(bucket, None)
        return
    row_id, size, tokens, hits, used_s, parent, scope, kind, key = row
    value = weight_of(tokens, hits, size) / (1 + max(0.0, now_s - used_s))
    heads[bucket] = _Leaf(row_id, size, value, scope, kind, key, parent)


def _delete(c: sqlite3.Connection, row_id: int, size: int, gone: Evicted) -> None:
    c.execute("DELETE FROM entries WHERE id = ?", (row_id,))
    gone.n_entries += 1
    gone.n_bytes += size


def strand(c: sqlite3.Connection, scope: int, key: bytes) -> None:
    """The span with this key is gone: nothing above it can be used."""
    ids = [(STRANDED, each) for (each,) in c.execute(_DESCENDANTS, {"scope": scope, "key": key})]
    c.executemany("UPDATE entries SET rank = ? WHERE id = ?", ids)


def rejoin(c: sqlite3.Connection, scope: int, key: bytes) -> None:
    """The span with this key is there again."""
    ids = c.execute(_DESCENDANTS, {"scope": scope, "key": key}).fetchall()
    c.executemany("UPDATE entries SET rank = priority WHERE id = ? AND rank <> priority", ids)
