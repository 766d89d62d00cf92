"""Slot files: one sequence's tokens and state on disk, as a safetensors file in which any damage shows.

    8 bytes  length of the header, little-endian
    header   JSON, padded with spaces (slot_header.py)
    data     token_ids (I32), state (U8), extras (U8), without gaps up to the end of the file;
             checkpoints are extras (slot_checkpoints.py)

Knows nothing of engines: whether a sound file fits one is asked with `check_fits`.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from ..errors import (
    CacheCorruptError,
    CacheFileError,
    CacheMismatchError,
    InternalError,
)
from . import slot_checkpoints
from .atomic import open_regular, replace_file
from .slot_checkpoints import CheckpointPlace, StoredCheckpoint
from .slot_header import (
    FORMAT_VERSION,
    MAX_HEADER_BYTES,
    SlotHeader,
    TensorPlace,
    decode,
    encode,
)

if TYPE_CHECKING:
    import numpy.typing as npt

    from ..config import Layout
    from ..request import Ids

    Bytes = npt.NDArray[np.uint8]
    # No variable holds a memoryview in this room: before 3.12.4, CPython crashes when one is part of a reference cycle
    # that the garbage collector breaks (gh-77894), and an exception that is kept makes a cycle of every local on its
    # way. `array.data` as an argument is fine.
    Blob = bytes | bytearray | Bytes

__all__ = [
    "FORMAT_VERSION",
    "CheckpointPlace",
    "Extra",
    "SlotHeader",
    "SlotRecord",
    "StoredCheckpoint",
    "check_fits",
    "checkpoint_extras",
    "read",
    "read_header",
    "write",
]

KNOWN_EXTRAS = frozenset({slot_checkpoints.EXTRA_KIND})
"""Kinds of extra tensors this version understands: the part of their name before the first dot."""

_CHUNK_BYTES = 1 << 20
_EXTRA_NAME = re.compile(r"[a-z0-9_]+(\.[a-z0-9_]+)*")


@dataclass(frozen=True, slots=True)
class Extra:
    """Bytes stored beside the state. A reader that does not know the kind refuses the file if they are `required`."""

    data: Blob = field(repr=False)
    required: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class SlotRecord:
    """What a slot file holds.

    `read` returns `ids` read-only, and `state` as a writable array over memory that nobody else has. Ids are whatever
    the file says: compare them with the vocabulary before use.
    """

    ids: Ids = field(repr=False)
    state: Blob = field(repr=False)
    """The whole sequence in llama.cpp's own format."""
    exact_tokens: int
    """How many of the first ids were computed as exact mode demands: as prompt, in whole chunks."""
    namespace: str
    fingerprint: str
    layout: Layout
    n_ctx: int
    """The engine's when it saved; for information."""
    extras: Mapping[str, Extra] = field(default_factory=dict, repr=False)

    @property
    def n_tokens(self) -> int:
        return len(self.ids)

    @property
    def checkpoints(self) -> tuple[StoredCheckpoint, ...]:
        """The checkpoints among the extras, by position; their data is the extras' own."""
        sizes = dict.fromkeys(self.extras, 0)
        found = slot_checkpoints.places(sizes, self.n_tokens, "a slot record")
        return tuple(StoredCheckpoint(each.position, each.kind, self.extras[each.name].data) for each in found)


def checkpoint_extras(checkpoints: Iterable[StoredCheckpoint], *, n_tokens: int) -> dict[str, Extra]:
    """Checkpoints of a sequence of `n_tokens` as extras of its record, by position and without a copy.

    Raises:
        InternalError: a position is not in 1 to `n_tokens` or is there twice, or a kind is not letters and underscores.
    """
    named = slot_checkpoints.names(checkpoints, n_tokens)
    return {name: Extra(each.data) for name, each in named.items()}


def write(path: str | os.PathLike[str], record: SlotRecord) -> int:
    """Replace the file at `path` by `record`.

    Returns: the file's size in bytes.
    Raises:
        CacheFileError: the operating system refused, or the target is a link or a folder; what was there is unchanged.
    Thread: any. The GIL is released while hashing and writing; `record` must not change meanwhile.
    """
    where = _checked_path(path, "write")
    views = _views(record)
    head = encode(_header_of(record, views), _places(record, views))
    if len(head) > MAX_HEADER_BYTES:
        raise CacheFileError(where, "write", f"its header of {len(head)} bytes is longer than {MAX_HEADER_BYTES}")
    with _file_errors(where, "write"):
        return replace_file(where, [head, *views.values()])


def read(
    path: str | os.PathLike[str],
    *,
    max_tokens: int,
    room_for: Callable[[CheckpointPlace], Bytes | None] | None = None,
) -> SlotRecord:
    """The record at `path`, exactly as it was written. Nothing is allocated before all sizes are checked.

    Args:
        room_for: gives the memory for a checkpoint, exactly its `size_bytes`, flat and writable; None leaves that one
            out, unread. It is asked from the last position down, after everything else was read. When an error is
            raised, what was in that memory is undefined. Without it each checkpoint gets memory of its own.

    Raises:
        CacheFileError: it cannot be opened or read, or is a link, a folder or a device.
        CacheCorruptError: any byte differs from what was written.
        CacheMismatchError: more than `max_tokens` tokens, or written by a newer version.
    """
    where = _checked_path(path, "read")
    with _opened(where) as fd:
        header, tensors = decode(fd, where)
        if header.n_tokens > max_tokens:
            raise CacheMismatchError(where, "n_tokens", f"at most {max_tokens}", header.n_tokens)
        _refuse_unknown(tensors, where)
        views = _load_all(fd, tensors, header.checkpoints, room_for, where)
    ids = views["token_ids"].view("<i4").astype(np.int32, copy=False)
    ids.setflags(write=False)
    return SlotRecord(
        ids=ids,
        state=views["state"],
        exact_tokens=header.exact_tokens,
        namespace=header.namespace,
        fingerprint=header.fingerprint,
        layout=header.layout,
        n_ctx=header.n_ctx,
        extras={each.name: Extra(views[each.name], each.required) for each in tensors[2:] if each.name in views},
    )


def read_header(path: str | os.PathLike[str], *, verify: bool = False) -> SlotHeader:
    """What the file says about itself; with `verify`, also whether its tensors are what was written.

    Raises: as `read`, but damage in the tensors is told by `intact`.
    """
    where = _checked_path(path, "read")
    with _opened(where) as fd:
        header, tensors = decode(fd, where)
        return replace(header, intact=all(_is_intact(fd, tensor) for tensor in tensors)) if verify else header


def check_fits(
    found: SlotHeader | SlotRecord, *, path: str | os.PathLike[str], fingerprint: str, layout: Layout, n_ctx: int
) -> None:
    """Whether an engine with this model, layout and context can take the state.

    Raises:
        CacheMismatchError: naming the first field that differs: fingerprint, then the layout's in order, then n_tokens.
    """
    where = os.fsdecode(path)
    if found.fingerprint != fingerprint:
        raise CacheMismatchError(where, "fingerprint", fingerprint, found.fingerprint)
    for name, here, there in layout.differences(found.layout.to_dict()):
        raise CacheMismatchError(where, name, here, there)
    if found.n_tokens > n_ctx:
        raise CacheMismatchError(where, "n_tokens", f"at most {n_ctx}", found.n_tokens)


def _views(record: SlotRecord) -> dict[str, Bytes]:
    """The tensors in file order, as bytes and without a copy of the state."""
    if not 0 <= record.exact_tokens <= record.n_tokens or record.n_ctx < 0:
        raise InternalError(f"a slot record of {record.n_tokens} tokens with exact_tokens={record.exact_tokens}")
    ids = np.asarray(record.ids, dtype="<i4").tobytes()
    views = {"token_ids": _flat(ids), "state": _flat(record.state)}
    for name, extra in record.extras.items():
        if name in views or not _EXTRA_NAME.fullmatch(name):
            raise InternalError(f"a slot record with an extra tensor named {name!r}")
        views[name] = _flat(extra.data)
    try:
        slot_checkpoints.places(dict.fromkeys(record.extras, 0), record.n_tokens, "a slot record")
    except CacheCorruptError as error:
        raise InternalError(f"a slot record that could not be read: {error.what}") from None
    return views


def _flat(data: Blob) -> Bytes:
    if isinstance(data, np.ndarray):
        return data.reshape(-1).view(np.uint8)
    return np.frombuffer(data, dtype=np.uint8) if len(data) else np.empty(0, dtype=np.uint8)


def _header_of(record: SlotRecord, views: Mapping[str, Bytes]) -> SlotHeader:
    return SlotHeader(
        format_version=FORMAT_VERSION,
        size_bytes=0,
        n_tokens=record.n_tokens,
        state_bytes=len(views["state"]),
        exact_tokens=record.exact_tokens,
        namespace=record.namespace,
        fingerprint=record.fingerprint,
        layout=record.layout,
        n_ctx=record.n_ctx,
        extra_bytes={},
    )


def _places(record: SlotRecord, views: Mapping[str, Bytes]) -> list[TensorPlace]:
    places = []
    start = 0
    for name, view in views.items():
        required = name in record.extras and record.extras[name].required
        places.append(TensorPlace(name, start, len(view), hashlib.sha256(view.data).hexdigest(), required))
        start += len(view)
    return places


def _refuse_unknown(tensors: list[TensorPlace], where: str) -> None:
    for tensor in tensors:
        if tensor.required and tensor.name.split(".")[0] not in KNOWN_EXTRAS:
            raise CacheMismatchError(where, f"tensor {tensor.name}", "not needed", "needed to use the file")


def _load_all(
    fd: int,
    tensors: list[TensorPlace],
    checkpoints: tuple[CheckpointPlace, ...],
    room_for: Callable[[CheckpointPlace], Bytes | None] | None,
    where: str,
) -> dict[str, Bytes]:
    apart = set() if room_for is None else {each.name for each in checkpoints}
    views = {each.name: _load(fd, each, _new(each, where), where) for each in tensors if each.name not in apart}
    if room_for is not None:
        by_name = {each.name: each for each in tensors}
        for place in reversed(checkpoints):
            view = room_for(place)
            if view is not None:
                views[place.name] = _load(fd, by_name[place.name], view, where)
    return views


def _new(tensor: TensorPlace, where: str) -> Bytes:
    # np.empty costs a pass over the memory less than bytearray, which zeroes it first.
    try:
        return np.empty(tensor.size_bytes, dtype=np.uint8)
    except MemoryError:
        raise CacheFileError(where, "read", f"no memory for the {tensor.size_bytes} bytes of {tensor.name}") from None


def _load(fd: int, tensor: TensorPlace, view: Bytes, where: str) -> Bytes:
    if view.nbytes != tensor.size_bytes:
        raise InternalError(f"{view.nbytes} bytes of memory for the {tensor.size_bytes} of {tensor.name}")
    checksum = hashlib.sha256()
    done = 0
    while done < len(view):
        n_read = os.preadv(fd, [view[done : done + _CHUNK_BYTES].data], tensor.start + done)
        if not n_read:
            raise CacheCorruptError(where, f"it ends at byte {tensor.start + done}, inside {tensor.name}")
        checksum.update(view[done : done + n_read].data)
        done += n_read
    if checksum.hexdigest() != tensor.sha256:
        what = f"the checksum of {tensor.name} (bytes {tensor.start} to {tensor.end}) does not hold"
        raise CacheCorruptError(where, what)
    return view


def _is_intact(fd: int, tensor: TensorPlace) -> bool:
    checksum = hashlib.sha256()
    position = tensor.start
    while piece := os.pread(fd, min(_CHUNK_BYTES, tensor.end - position), position):
        checksum.update(piece)
        position += len(piece)
    return checksum.hexdigest() == tensor.sha256


def _checked_path(path: str | os.PathLike[str], operation: str) -> str:
    where = os.fsdecode(path)
    try:
        if b"\0" not in os.fsencode(where):
            return where
    except UnicodeEncodeError:
        pass
    raise CacheFileError(repr(where), operation, "no file can have this name")


@contextmanager
def _opened(where: str) -> Iterator[int]:
    with _file_errors(where, "read"):
        fd = open_regular(where)
        try:
            yield fd
        finally:
            os.close(fd)


@contextmanager
def _file_errors(where: str, operation: str) -> Iterator[None]:
    try:
        yield
    except CacheFileError:
        raise
    except OSError as error:
        raise CacheFileError(where, operation, error.strerror or str(error)) from error
