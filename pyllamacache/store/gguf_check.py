"""Whether a GGUF file is sound, asked before native code sees it: llama.cpp ends the process on some that are not.

Reads the description in front of the weights, never the weights, in bounded memory and time. What the description says
about the model is checked in gguf_rules.py.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from ..errors import ModelFormatError, ModelNotFoundError
from .gguf_cursor import Cursor, Strings
from .gguf_rules import Array, Rules, Scalar
from .gguf_tensors import TensorList
from .gguf_vocabulary import find_duplicate
from .model_file import opened_model

_MAGIC = b"GGUF"
_STRING, _ARRAY, _UINT16, _UINT32 = 8, 9, 2, 4
_DEFAULT_ALIGNMENT = 32
_NUMBERS = {
    number: (name, struct.Struct(f"<{letter}"))
    for number, name, letter in (
        (0, "uint8", "B"),
        (1, "int8", "b"),
        (2, "uint16", "H"),
        (3, "int16", "h"),
        (4, "uint32", "I"),
        (5, "int32", "i"),
        (6, "float32", "f"),
        (7, "bool", "?"),
        (10, "uint64", "Q"),
        (11, "int64", "q"),
        (12, "float64", "d"),
    )
}
"""The GGUF types that have a fixed size."""

_MAX_ENTRIES = 1 << 16
_MAX_TENSORS = 1 << 17
_MAX_STRINGS = 1 << 22
_MAX_TOKENS = 1 << 20
_MAX_KEPT_ITEMS = 1024
_MAX_KEY_BYTES = 1024
_MAX_TEXT_BYTES = 200
_TOKENS = "tokenizer.ggml.tokens"
_TYPES_OF_TOKENS = "tokenizer.ggml.token_type"


@dataclass(frozen=True, slots=True)
class GgufSummary:
    """What a sound GGUF file says about its model."""

    version: int
    architecture: str
    """Empty in the second and later files of a split model."""
    name: str | None
    n_tensors: int
    n_params: int
    """In this file."""
    context_length: int | None
    split_no: int
    split_count: int
    """1: the model is not split."""
    size_bytes: int
    metadata: Mapping[str, Scalar]
    """Everything but arrays; long texts are cut and end in an ellipsis."""


def is_gguf(path: str | os.PathLike[str]) -> bool:
    """Whether the file begins as a GGUF file does. Never raises."""
    with suppress(ModelFormatError, ModelNotFoundError), opened_model(os.fsdecode(path)) as file:
        return file.read(len(_MAGIC)) == _MAGIC
    return False


def check_gguf(path: str | os.PathLike[str]) -> GgufSummary:
    """Check one file and say what is in it.

    Raises:
        ModelNotFoundError: there is no such file.
        ModelFormatError: it cannot be read, or is not sound; `what` names the key or tensor, and the place.
    """
    where = os.fsdecode(path)
    with opened_model(where) as file:
        return _Check(Cursor(file, where, os.fstat(file.fileno()).st_size)).run()


def check_model(path: str | os.PathLike[str]) -> tuple[GgufSummary, tuple[Path, ...]]:
    """Check a model's file and, of a split one whose first file this is, all others.

    Returns: the summary of the model, whose counts cover all its files, and the files in order.
    Raises: as `check_gguf`.
    """
    first = check_gguf(path)
    where = os.fsdecode(path)
    if first.split_no:
        raise ModelFormatError(where, f"it is part {first.split_no + 1} of a split model; give its first part")
    paths = _split_paths(where, first.split_count)
    parts = [first, *(check_gguf(part) for part in paths[1:])]
    for number, (part, summary) in enumerate(zip(paths, parts, strict=True)):
        if (summary.split_no, summary.split_count) != (number, first.split_count):
            raise ModelFormatError(str(part), f"it is not part {number + 1} of {first.split_count}")
    n_named = first.metadata.get("split.tensors.count", first.n_tensors)
    if n_named != sum(part.n_tensors for part in parts):
        raise ModelFormatError(where, f"its parts do not hold the {n_named} tensors it names")
    whole = replace(
        first,
        n_tensors=sum(part.n_tensors for part in parts),
        n_params=sum(part.n_params for part in parts),
        size_bytes=sum(part.size_bytes for part in parts),
    )
    return whole, paths


def _split_paths(where: str, split_count: int) -> tuple[Path, ...]:
    if split_count == 1:
        return (Path(where),)
    ending = f"-00001-of-{split_count:05d}.gguf"
    if not where.endswith(ending):
        raise ModelFormatError(where, f"the first of {split_count} parts must have a name that ends in {ending}")
    stem = where.removesuffix(ending)
    return tuple(Path(f"{stem}-{number:05d}-of-{split_count:05d}.gguf") for number in range(1, split_count + 1))


class _Check:
    """One pass over a file."""

    def __init__(self, cursor: Cursor) -> None:
        self._cursor = cursor
        self._fail = cursor.fail
        self._scalars: dict[str, Scalar] = {}
        self._kinds: dict[str, int] = {}
        self._arrays: dict[str, Array] = {}
        self._n_strings = 0

    def run(self) -> GgufSummary:
        version, n_tensors, n_entries = self._read_counts()
        for _ in range(n_entries):
            self._read_entry()
        split_no, split_count = self._split()
        self._check_architecture(split_no)
        tensors = TensorList(self._cursor, self._alignment())
        tensors.read(n_tensors)
        Rules(self._scalars, self._arrays, self._cursor.refuse).check()
        architecture = str(self._scalars.get("general.architecture", ""))
        name = self._scalars.get("general.name")
        context_length = self._scalars.get(f"{architecture}.context_length")
        return GgufSummary(
            version=version,
            architecture=architecture,
            name=name if isinstance(name, str) else None,
            n_tensors=n_tensors,
            n_params=tensors.n_params,
            context_length=context_length if isinstance(context_length, int) else None,
            split_no=split_no,
            split_count=split_count,
            size_bytes=self._cursor.size_bytes,
            metadata=self._scalars,
        )

    def _read_counts(self) -> tuple[int, int, int]:
        cursor = self._cursor
        if not cursor.size_bytes:
            cursor.refuse("it is empty")
        if cursor.u32("its first bytes").to_bytes(4, "little") != _MAGIC:
            cursor.refuse("it does not begin with GGUF")
        version = cursor.u32("its version")
        if not version & 0xFFFF:
            cursor.refuse(f"its version is {version}: written for machines of the other byte order?")
        if version not in (2, 3):
            cursor.refuse(f"its version is {version}, only 2 and 3 can be read")
        n_tensors, n_entries = cursor.u64("its number of tensors"), cursor.u64("its number of keys")
        if n_tensors > min(_MAX_TENSORS, cursor.n_left // 24):
            cursor.refuse(f"{n_tensors} tensors are too many for a file of {cursor.size_bytes} bytes")
        if n_entries > min(_MAX_ENTRIES, cursor.n_left // 13):
            cursor.refuse(f"{n_entries} keys are too many for a file of {cursor.size_bytes} bytes")
        return version, n_tensors, n_entries

    def _read_entry(self) -> None:
        cursor = self._cursor
        key = cursor.name("a key", _MAX_KEY_BYTES)
        if key in self._kinds:
            self._fail(f"key {key!r} appears twice")
        kind = self._kinds[key] = cursor.u32(f"the type of {key}")
        if kind == _STRING:
            text, n_bytes = cursor.start_of_string(key, _MAX_TEXT_BYTES)
            self._scalars[key] = text.decode("utf-8", "replace") + ("…" if n_bytes > len(text) else "")
        elif kind == _ARRAY:
            self._arrays[key] = self._read_array(key)
        elif kind in _NUMBERS:
            (self._scalars[key],) = cursor.unpack(_NUMBERS[kind][1], key)
        else:
            self._fail(f"key {key} has the unknown type {kind}")

    def _read_array(self, key: str) -> Array:
        cursor = self._cursor
        kind, n_items = cursor.u32(f"the item type of {key}"), cursor.u64(f"the length of {key}")
        if kind == _STRING:
            self._read_strings(key, n_items)
            return Array("string", n_items)
        if kind not in _NUMBERS:
            self._fail(f"array {key} has the unknown item type {kind}")
        name, form = _NUMBERS[kind]
        if key == _TYPES_OF_TOKENS:
            return Array(name, n_items, tuple(cursor.distinct(n_items, form, key)))
        if n_items > _MAX_KEPT_ITEMS:
            cursor.skip(n_items * form.size, key)
            return Array(name, n_items)
        return Array(name, n_items, cursor.unpack(struct.Struct(f"<{n_items}{form.format[1:]}"), key))

    def _read_strings(self, key: str, n_items: int) -> None:
        cursor = self._cursor
        n_possible = min(_MAX_TOKENS if key == _TOKENS else _MAX_STRINGS, cursor.n_left // 8)
        self._n_strings += n_items
        if n_items > n_possible or self._n_strings > _MAX_STRINGS:
            self._fail(f"array {key} is too long with {n_items} strings")
        if key != _TOKENS:
            for _ in cursor.strings(n_items, key):
                pass
            return
        start = cursor.position

        def from_start() -> Iterator[Strings]:
            cursor.move_to(start)
            return cursor.strings(n_items, key)

        if duplicate := find_duplicate(from_start):
            cursor.refuse(f"tokens {duplicate[0]} and {duplicate[1]} of {key} are the same")

    def _split(self) -> tuple[int, int]:
        for key in ("split.no", "split.count"):
            if self._kinds.get(key, _UINT16) != _UINT16:
                self._cursor.refuse(f"key {key} is not of type uint16")
        split_no, split_count = int(self._scalars.get("split.no", 0)), int(self._scalars.get("split.count", 0)) or 1
        if split_no >= split_count:
            self._cursor.refuse(f"it says that it is part {split_no + 1} of {split_count}")
        return split_no, split_count

    def _check_architecture(self, split_no: int) -> None:
        if split_no and "general.architecture" not in self._kinds:
            return
        architecture = self._scalars.get("general.architecture")
        if not isinstance(architecture, str) or not re.fullmatch(r"[A-Za-z0-9_.-]{1,64}", architecture):
            self._cursor.refuse(f"general.architecture is {architecture!r}, not the name of an architecture")

    def _alignment(self) -> int:
        alignment = self._scalars.get("general.alignment", _DEFAULT_ALIGNMENT)
        if self._kinds.get("general.alignment", _UINT32) != _UINT32 or not isinstance(alignment, int):
            self._cursor.refuse("key general.alignment is not of type uint32")
        if not alignment or alignment & (alignment - 1):
            self._cursor.refuse(f"general.alignment is {alignment}, not a power of two")
        return alignment
