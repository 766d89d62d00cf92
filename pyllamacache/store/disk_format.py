"""The file of one entry of the disk tier: a safetensors file in which any damage shows.

    8 bytes  length of the header, little-endian
    header   JSON, padded with spaces; its metadata carries everything the index knows of the entry
    ids      I32, the token ids of [start, end)
    data     U8, up to the end of the file

A digest covers the length and every byte of the header, its own hex digits counted as zeros; a checksum per tensor
covers the rest. Knows bytes and digests; ids are stored and compared, never interpreted.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import CacheCorruptError, InternalError

if TYPE_CHECKING:
    import numpy.typing as npt

    from ..request import Ids

    Bytes = npt.NDArray[np.uint8]

FORMAT_VERSION = 1
MAX_IDS = 256
MAX_HEADER_BYTES = 1 << 20
KEY_BYTES = 16
KINDS = ("span", "state")

_FORMAT = "pyllamacache.disk"
_NO_DIGEST = "0" * 64
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, eq=False)
class DiskEntry:
    """One stored piece of a prefix: the KV span of [start, end), or the state after `end` tokens."""

    key: bytes
    """Chain digest of the prefix [0, end), scope and namespace included."""
    parent: bytes
    """Chain digest of the prefix [0, start)."""
    kind: str
    """"span" or "state"."""
    namespace: str
    start: int
    end: int
    ids: Ids = field(repr=False)
    """Of [start, end), at most 256."""
    n_bytes: int
    label: str = ""
    """Why a checkpoint was taken; letters and underscores, opaque here."""
    priority: int = 0
    """Higher is kept longer."""
    expires_s: float | None = None
    """Wall clock; None: never."""
    tokens: int = 0
    """Tokens whose prefill it saves; 0: `end - start`."""
    hits: int = 0
    used_s: float = 0.0
    """Wall clock of the last use."""
    is_pinned: bool = False

    @property
    def saved_tokens(self) -> int:
        return self.tokens or max(1, self.end - self.start)


@dataclass(frozen=True, slots=True)
class StoredFile:
    """What a file says about itself, digest and ids verified, `data` not."""

    entry: DiskEntry
    scope: str
    facts: Mapping[str, str]
    data_sha256: str
    data_start: int

    @property
    def size_bytes(self) -> int:
        return self.data_start + self.entry.n_bytes


def check_entry(entry: DiskEntry, data: Bytes) -> None:
    """What no caller may get wrong.

    Raises:
        InternalError: it did.
    """
    if not _is_sound(entry) or len(entry.ids) != entry.end - entry.start or data.nbytes != entry.n_bytes:
        what = f"{len(entry.ids)} ids from {entry.start} to {entry.end} and {data.nbytes} bytes"
        raise InternalError(f"a {entry.kind} of {what} that cannot be stored on disk")


def flat(data: bytes | bytearray | Bytes) -> Bytes:
    """`data` as bytes, without a copy. No memoryview, see slotfile.py."""
    if isinstance(data, np.ndarray):
        return data.reshape(-1).view(np.uint8)
    return np.frombuffer(data, dtype=np.uint8)


def ids_bytes(ids: Ids) -> bytes:
    """As they are stored."""
    return np.asarray(ids, dtype="<i4").tobytes()


def ids_of(raw: bytes) -> Ids:
    """Read-only."""
    ids = np.frombuffer(raw, dtype="<i4").astype(np.int32, copy=False)
    ids.setflags(write=False)
    return ids


def encode(entry: DiskEntry, scope: str, facts: Mapping[str, str], data_sha256: str) -> bytes:
    """The bytes before the tensors."""
    ids = ids_bytes(entry.ids)
    metadata = {
        "format": _FORMAT,
        "format_version": str(FORMAT_VERSION),
        "kind": entry.kind,
        "scope": scope,
        "key": entry.key.hex(),
        "parent": entry.parent.hex(),
        "namespace": entry.namespace,
        "start": str(entry.start),
        "end": str(entry.end),
        "tokens": str(entry.tokens),
        "label": entry.label,
        "priority": str(entry.priority),
        "expires_s": "" if entry.expires_s is None else repr(float(entry.expires_s)),
        "sha256.ids": hashlib.sha256(ids).hexdigest(),
        "sha256.data": data_sha256,
        "digest": _NO_DIGEST,
    }
    metadata |= {f"fact.{name}": value for name, value in facts.items()}
    end = len(ids) + entry.n_bytes
    places = {
        "ids": {"dtype": "I32", "shape": [len(entry.ids)], "data_offsets": [0, len(ids)]},
        "data": {"dtype": "U8", "shape": [entry.n_bytes], "data_offsets": [len(ids), end]},
    }
    text = json.dumps({"__metadata__": metadata, **places}, separators=(",", ":"))
    text += " " * (-len(text) % 8)
    unsigned = len(text).to_bytes(8, "little") + text.encode("ascii")
    return _with_digest(unsigned, _NO_DIGEST, hashlib.sha256(unsigned).hexdigest())


def decode(fd: int, where: str) -> StoredFile:
    """What the open file says about itself; reads nothing but the header and the ids.

    Raises:
        CacheCorruptError: a byte of these is not what was written, or the file has another length.
    """
    size_bytes = os.fstat(fd).st_size
    n_header = int.from_bytes(os.pread(fd, 8, 0), "little")
    if size_bytes < 8 or n_header > min(MAX_HEADER_BYTES, size_bytes - 8):
        raise CacheCorruptError(where, f"no header of a safetensors file in its {size_bytes} bytes")
    raw = os.pread(fd, 8 + n_header, 0)
    metadata = _metadata(raw, where)
    stored = _stored(fd, metadata, len(raw), where)
    # Made again from what was understood: covers the ids, the length, and what JSON allows to be written in two ways.
    if encode(stored.entry, stored.scope, stored.facts, stored.data_sha256) != raw:
        raise CacheCorruptError(where, "its header, its ids or its length are not what was written")
    return stored


def load(fd: int, stored: StoredFile, into: Bytes, where: str) -> None:
    """Fill `into`, flat and of `n_bytes`, with the data. After an error its content is undefined.

    Raises:
        CacheCorruptError: the checksum does not hold.
    """
    checksum = hashlib.sha256()
    done = 0
    while done < len(into):
        n_read = os.preadv(fd, [into[done : done + _CHUNK_BYTES].data], stored.data_start + done)
        if not n_read:
            raise CacheCorruptError(where, "it ends inside its data")
        checksum.update(into[done : done + n_read].data)
        done += n_read
    if checksum.hexdigest() != stored.data_sha256:
        raise CacheCorruptError(where, "the checksum of its data does not hold")


def verify(fd: int, stored: StoredFile, where: str) -> None:
    """As `load`, keeping nothing."""
    checksum = hashlib.sha256()
    position = stored.data_start
    while piece := os.pread(fd, _CHUNK_BYTES, position):
        checksum.update(piece)
        position += len(piece)
    if checksum.hexdigest() != stored.data_sha256:
        raise CacheCorruptError(where, "the checksum of its data does not hold")


def _with_digest(header: bytes, old: str, new: str) -> bytes:
    # In a value the quotes would be escaped: this text is found at the key only.
    return header.replace(f'"digest":"{old}"'.encode(), f'"digest":"{new}"'.encode(), 1)


def _metadata(raw: bytes, where: str) -> dict[str, Any]:
    try:
        metadata = json.loads(raw[8:].decode("ascii"))["__metadata__"]
        if metadata["format"] != _FORMAT or metadata["format_version"] != str(FORMAT_VERSION):
            raise CacheCorruptError(where, "it is a file of another kind or version")
    except (ValueError, LookupError, TypeError, RecursionError):
        raise CacheCorruptError(where, "its header is not that of an entry") from None
    else:
        found: dict[str, Any] = metadata
        return found


def _stored(fd: int, metadata: Mapping[str, Any], n_header: int, where: str) -> StoredFile:
    try:
        start, end = int(metadata["start"]), int(metadata["end"])
        if not 0 <= end - start <= MAX_IDS:
            raise CacheCorruptError(where, f"its header speaks of the tokens {start} to {end}")
        n_id_bytes = 4 * (end - start)
        raw_ids = os.pread(fd, n_id_bytes, n_header)
        if len(raw_ids) != n_id_bytes:
            raise CacheCorruptError(where, "it ends inside its ids")
        places = metadata["sha256.data"], n_header + n_id_bytes
        entry = DiskEntry(
            key=bytes.fromhex(metadata["key"]),
            parent=bytes.fromhex(metadata["parent"]),
            kind=metadata["kind"],
            namespace=metadata["namespace"],
            start=start,
            end=end,
            ids=ids_of(raw_ids),
            n_bytes=os.fstat(fd).st_size - places[1],
            label=metadata["label"],
            priority=int(metadata["priority"]),
            expires_s=float(metadata["expires_s"]) if metadata["expires_s"] else None,
            tokens=int(metadata["tokens"]),
        )
        if not _is_sound(entry):
            raise CacheCorruptError(where, "its header contradicts itself")
        facts = {name[5:]: value for name, value in metadata.items() if name.startswith("fact.")}
        return StoredFile(entry, metadata["scope"], facts, *places)
    except (ValueError, LookupError, TypeError, AttributeError):
        raise CacheCorruptError(where, "its header is not that of an entry") from None


def _is_sound(entry: DiskEntry) -> bool:
    return (
        entry.kind in KINDS
        and len(entry.key) == len(entry.parent) == KEY_BYTES
        and 0 <= entry.start <= entry.end < 1 << 31
        and entry.end - entry.start <= MAX_IDS
        and 0 <= entry.tokens < 1 << 31
        and abs(entry.priority) < 1 << 31
        and (entry.expires_s is None or math.isfinite(entry.expires_s))
        and re.fullmatch("[A-Za-z_]*", entry.label) is not None
        and entry.n_bytes > 0
    )
