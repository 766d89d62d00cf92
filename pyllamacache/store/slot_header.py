"""The header of a slot file: JSON that says where the tensors are and under which conditions they were written.

Knows the format, nothing of files' contents beyond the header and nothing of engines. A digest covers the length and
every byte of the header, its own hex digits counted as zeros; a checksum per tensor covers the rest of the file.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from ..config import Layout
from ..errors import CacheCorruptError, CacheMismatchError
from .slot_checkpoints import CheckpointPlace, places

FORMAT_VERSION = 1
"""Raised with every change of names or meaning, a new field of `Layout` included."""

MAX_HEADER_BYTES = 4 << 20

_FORMAT = "pyllamacache.slot"
_NO_DIGEST = "0" * 64
_TENSORS = ("token_ids", "state")


@dataclass(frozen=True, slots=True)
class SlotHeader:
    """Everything about a slot file but its tensors."""

    format_version: int
    size_bytes: int
    n_tokens: int
    state_bytes: int
    exact_tokens: int
    namespace: str
    fingerprint: str
    layout: Layout
    n_ctx: int
    extra_bytes: Mapping[str, int]
    intact: bool | None = None
    """Whether every tensor's checksum holds; None: not looked at."""
    checkpoints: tuple[CheckpointPlace, ...] = ()
    """Those among the extras, by position."""


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """Where a tensor lies in the file, and what its bytes hash to."""

    name: str
    start: int
    size_bytes: int
    sha256: str
    required: bool

    @property
    def end(self) -> int:
        return self.start + self.size_bytes

    def to_dict(self, first: int) -> dict[str, object]:
        """As safetensors writes it; positions count from the `first` byte after the header."""
        dtype, width = ("I32", 4) if self.name == "token_ids" else ("U8", 1)
        shape = [self.size_bytes // width]
        return {"dtype": dtype, "shape": shape, "data_offsets": [self.start - first, self.end - first]}


def encode(header: SlotHeader, tensors: Sequence[TensorPlace]) -> bytes:
    """The bytes before the tensors, whose places count from 0.

    Of `header`, what follows from `tensors` or from reading is not stored: `size_bytes`, `intact`, the extras.
    """
    metadata = {
        "format": _FORMAT,
        "format_version": str(header.format_version),
        "fingerprint": header.fingerprint,
        "namespace": header.namespace,
        "n_ctx": str(header.n_ctx),
        "n_tokens": str(header.n_tokens),
        "exact_tokens": str(header.exact_tokens),
        "state_bytes": str(header.state_bytes),
        "required": " ".join(tensor.name for tensor in tensors if tensor.required),
        "digest": _NO_DIGEST,
    }
    for name, value in header.layout.to_dict().items():
        metadata[f"layout.{name}"] = value if isinstance(value, str) else json.dumps(value)
    metadata |= {f"sha256.{tensor.name}": tensor.sha256 for tensor in tensors}
    places = {tensor.name: tensor.to_dict(0) for tensor in tensors}
    text = json.dumps({"__metadata__": metadata, **places}, separators=(",", ":"))
    text += " " * (-len(text) % 8)
    unsigned = len(text).to_bytes(8, "little") + text.encode("ascii")
    return _with_digest(unsigned, _NO_DIGEST, hashlib.sha256(unsigned).hexdigest())


def decode(fd: int, where: str) -> tuple[SlotHeader, list[TensorPlace]]:
    """What the open file says about itself, checked against its size; reads nothing but the header.

    Returns: the header, and the tensors in file order: token_ids, state, extras.
    Raises:
        CacheCorruptError: a byte of the header is not what was written, or the file has another length.
        CacheMismatchError: a newer version wrote it.
    """
    size_bytes = os.fstat(fd).st_size
    raw = _read_header(fd, size_bytes, where)
    places = _parse(raw[8:], where)
    metadata = places.pop("__metadata__", None)
    if not isinstance(metadata, dict) or metadata.get("format") != _FORMAT:
        raise CacheCorruptError(where, "it is a file of another kind")
    values = _Values(metadata, where)
    version = values.count("format_version")
    if version > FORMAT_VERSION:
        raise CacheMismatchError(where, "format_version", f"at most {FORMAT_VERSION}", version)
    digest = values.text("digest")
    if hashlib.sha256(_with_digest(raw, digest, _NO_DIGEST)).hexdigest() != digest:
        raise CacheCorruptError(where, "the digest of its header does not hold")
    tensors = _decode_places(places, values, len(raw), where)
    if tensors[-1].end != size_bytes:
        raise CacheCorruptError(where, f"it is {size_bytes} bytes long, its header says {tensors[-1].end}")
    return _decode_values(values, version, tensors, where), tensors


def _with_digest(header: bytes, old: str, new: str) -> bytes:
    # In a value the quotes would be escaped: this text is found at the key only.
    return header.replace(f'"digest":"{old}"'.encode(), f'"digest":"{new}"'.encode(), 1)


def _read_header(fd: int, size_bytes: int, where: str) -> bytes:
    n_header = int.from_bytes(os.pread(fd, 8, 0), "little")
    if size_bytes < 8 or n_header > min(MAX_HEADER_BYTES, size_bytes - 8):
        raise CacheCorruptError(where, f"no header of a safetensors file in its {size_bytes} bytes")
    return os.pread(fd, 8 + n_header, 0)


def _parse(raw: bytes, where: str) -> dict[str, Any]:
    try:
        parsed = json.loads(raw.decode("ascii"))
    except (ValueError, RecursionError):
        raise CacheCorruptError(where, "its header is not JSON") from None
    if not isinstance(parsed, dict):
        raise CacheCorruptError(where, "its header is not a JSON object")
    return parsed


def _decode_places(places: Mapping[str, Any], values: _Values, first: int, where: str) -> list[TensorPlace]:
    required = values.text("required").split()
    if tuple(places)[:2] != _TENSORS or not set(required) <= set(places):
        raise CacheCorruptError(where, "its header names other tensors than a slot file has")
    tensors = []
    start = first
    for name, place in places.items():
        size_bytes = _item(place, "data_offsets", 1) - _item(place, "data_offsets", 0)
        tensor = TensorPlace(name, start, size_bytes, values.text(f"sha256.{name}"), name in required)
        if size_bytes < 0 or place != tensor.to_dict(first):
            raise CacheCorruptError(where, f"its header places tensor {name!r} wrongly")
        tensors.append(tensor)
        start = tensor.end
    return tensors


def _item(place: object, name: str, index: int) -> int:
    """A number out of a tensor's place; 0 when there is none, which is then found not to match."""
    values = place.get(name) if isinstance(place, dict) else None
    return values[index] if isinstance(values, list) and len(values) > index and type(values[index]) is int else 0


def _decode_values(values: _Values, version: int, tensors: Sequence[TensorPlace], where: str) -> SlotHeader:
    extra_bytes = {tensor.name: tensor.size_bytes for tensor in tensors[len(_TENSORS) :]}
    n_tokens = values.count("n_tokens")
    header = SlotHeader(
        format_version=version,
        size_bytes=tensors[-1].end,
        n_tokens=n_tokens,
        state_bytes=values.count("state_bytes"),
        exact_tokens=values.count("exact_tokens"),
        namespace=values.text("namespace"),
        fingerprint=values.text("fingerprint"),
        layout=values.layout(),
        n_ctx=values.count("n_ctx"),
        extra_bytes=extra_bytes,
        checkpoints=places(extra_bytes, n_tokens, where),
    )
    sizes = (4 * header.n_tokens, header.state_bytes)
    if sizes != (tensors[0].size_bytes, tensors[1].size_bytes) or header.exact_tokens > header.n_tokens:
        raise CacheCorruptError(where, "the lengths in its header contradict each other")
    return header


class _Values:
    """The metadata of a file, each value checked when it is asked for."""

    def __init__(self, metadata: Mapping[str, Any], where: str) -> None:
        self._metadata = metadata
        self._where = where

    def text(self, name: str) -> str:
        value = self._metadata.get(name)
        if not isinstance(value, str):
            raise CacheCorruptError(self._where, f"its header lacks {name}")
        return value

    def count(self, name: str) -> int:
        value = self.text(name)
        if not re.fullmatch(r"0|[1-9][0-9]{0,17}", value):
            raise CacheCorruptError(self._where, f"{name} in its header is not a number")
        return int(value)

    def flag(self, name: str) -> bool:
        value = self.text(name)
        if value not in ("true", "false"):
            raise CacheCorruptError(self._where, f"{name} in its header is neither true nor false")
        return value == "true"

    def layout(self) -> Layout:
        there = {name.removeprefix("layout.") for name in self._metadata if name.startswith("layout.")}
        here = {item.name for item in fields(Layout)}
        for name in sorted(there ^ here):
            said = {True: "a field of the layout", False: "unknown"}
            raise CacheMismatchError(self._where, name, said[name in here], said[name in there])
        read: dict[str, Callable[[str], Any]] = {"str": self.text, "int": self.count, "bool": self.flag}
        return Layout(**{item.name: read[str(item.type)](f"layout.{item.name}") for item in fields(Layout)})
