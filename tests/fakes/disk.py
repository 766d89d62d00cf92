"""Entries for a disk tier, from made-up prefixes, and what a store must keep true at any instant."""

from __future__ import annotations

import errno
import hashlib
import os
import random
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pyllamacache.store import disk_check
from pyllamacache.store.disk import DiskEntry, DiskStore
from tests.fakes.clock import FakeClock

SCOPE = "5c" * 16
FACTS = {"model": "tiny", "type_k": "f16"}
SPAN_TOKENS = 4

FULL = OSError(errno.ENOSPC, "No space left on device")
LOCKED = sqlite3.OperationalError("database is locked")


def chain_key(namespace: str, ids: Sequence[int]) -> bytes:
    return hashlib.blake2b(f"{namespace}/{list(ids)}".encode(), digest_size=16).digest()


def spans(ids: Sequence[int], *, namespace: str = "", n_bytes: int = 1000, **facts: Any) -> list[DiskEntry]:
    """The whole spans of a prefix, from its start."""
    ends = range(SPAN_TOKENS, len(ids) + 1, SPAN_TOKENS)
    return [piece("span", ids[:end], end - SPAN_TOKENS, namespace, n_bytes, **facts) for end in ends]


def state(ids: Sequence[int], *, namespace: str = "", n_bytes: int = 1000, **facts: Any) -> DiskEntry:
    """After all of `ids`."""
    return piece("state", ids, len(ids) // SPAN_TOKENS * SPAN_TOKENS, namespace, n_bytes, **facts)


def piece(kind: str, ids: Sequence[int], start: int, namespace: str, n_bytes: int, **facts: Any) -> DiskEntry:
    return DiskEntry(
        key=chain_key(namespace, ids),
        parent=chain_key(namespace, ids[:start]),
        kind=kind,
        namespace=namespace,
        start=start,
        end=len(ids),
        ids=np.array(ids[start:], dtype=np.int32),
        n_bytes=n_bytes,
        **facts,
    )


def data_of(entry: DiskEntry) -> bytes:
    """What is stored for it: nothing else has these bytes."""
    return random.Random(entry.kind.encode() + entry.key + bytes(entry.n_bytes)).randbytes(entry.n_bytes)


def put(store: DiskStore, *entries: DiskEntry) -> list[bool]:
    return [store.write(entry, data_of(entry)) for entry in entries]


def get(store: DiskStore, entry: DiskEntry) -> bool:
    """Whether it can be read; then it is what was written."""
    into = np.zeros(entry.n_bytes, np.uint8)
    if not store.read(entry.kind, entry.key, into):
        return False
    assert into.tobytes() == data_of(entry)
    return True


def names(store: DiskStore) -> set[tuple[str, bytes]]:
    return {(entry.kind, entry.key) for entry in store.scan()[0]}


def open_store(folder: Path, limit_bytes: int = 1 << 20, **options: Any) -> DiskStore:
    chosen = {"scope": SCOPE, "facts": FACTS, "clock": FakeClock(), **options}
    return DiskStore(folder, limit_bytes=limit_bytes, **chosen)


def bytes_on_disk(folder: Path) -> int:
    """Of all files of entries, half-written ones included."""
    total = 0
    for path in folder.glob("*/*/*"):
        try:
            total += path.stat().st_size
        except FileNotFoundError:
            continue
    return total


def assert_sound(folder: Path) -> None:
    found = disk_check.check(folder)
    assert not found.problems, found.problems
    assert bytes_on_disk(folder) == found.size_bytes
    for path in folder.rglob("*"):
        assert os.stat(path).st_mode & 0o077 == 0, path
