"""Where the fields of llama.cpp's sequence states lie, for tests that damage them."""

from __future__ import annotations

import itertools
import random
import struct
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

HEADER = 8
"""magic u32, sequence id i32"""

EDGES = {
    "i": (-(2**31), -1, 0, 1, 2**31 - 1),
    "I": (0, 1, 2, 2**31, 2**32 - 1),
    "Q": (0, 1, 2**32, 2**64 - 1),
}


class Field(NamedTuple):
    name: str
    offset: int
    code: str
    """of `struct`"""


class _Walk:
    def __init__(self, state: bytes | bytearray, offset: int) -> None:
        self._state = state
        self.offset = offset
        self.fields: list[Field] = []

    def read(self, name: str, code: str) -> Any:
        (value,) = struct.unpack_from("<" + code, self._state, self.offset)
        self.fields.append(Field(name, self.offset, code))
        self.offset += struct.calcsize("<" + code)
        return value

    def rows(self, name: str, n_cells: int) -> None:
        self.read(f"{name} type", "i")
        size = self.read(f"{name} row size", "Q") * n_cells
        self.offset += size

    def cells(self, *, with_ext: bool) -> int:
        n_cells = int(self.read("cell count", "I"))
        for _ in range(n_cells):
            self.read("position", "i")
            for _ in range(self.read("number of ids", "I")):
                if with_ext:
                    self.read("x", "i")
                    self.read("y", "i")
                    self.read("token", "i")
                self.read("id", "i")
        return n_cells

    def span_data(self, n_cells: int) -> None:
        transposed = self.read("v_trans", "I")
        n_layer = self.read("layer count", "I")
        self.read("key rotation", "I")
        self.read("value rotation", "I")
        for _ in range(n_layer):
            self.rows("key", n_cells)
        for _ in range(n_layer):
            if transposed:
                self.read("value type", "i")
                size = self.read("element size", "I") * self.read("embedding size", "I") * n_cells
                self.offset += size
            else:
                self.rows("value", n_cells)

    def kv(self, *, with_ext: bool) -> None:
        assert self.read("stream count", "I") == 1
        n_cells = self.cells(with_ext=with_ext)
        if n_cells:
            self.span_data(n_cells)

    def recurrent(self, n_layers: int) -> None:
        n_cells = self.cells(with_ext=False)
        self.read("s_trans", "I")
        self.read("layer count", "I")
        for name in ("r", "s"):
            for _ in range(n_layers):
                self.rows(name, n_cells)


def fields_of(state: bytes | bytearray, kind: str, spec: Any, *, partial: bool) -> list[Field]:
    """Every structural field; fails where the state is not laid out as this module believes."""
    walk = _Walk(state, 0)
    walk.read("magic", "I")
    walk.read("sequence id", "i")
    if kind == "full" or (kind in ("sliding", "hybrid") and not partial):
        walk.kv(with_ext=kind == "hybrid")
    if kind == "sliding":
        walk.kv(with_ext=False)
    if kind == "hybrid":
        walk.recurrent(len(spec.recurrent_layers))
    if kind == "recurrent":
        walk.recurrent(spec.n_layer)
    assert walk.offset == len(state)
    return walk.fields


def span_fields(data: bytes | bytearray, n_cells: int, *, with_ext: bool) -> list[Field]:
    """The same for a range of cells: magic, range, cell extensions, data."""
    walk = _Walk(data, 0)
    walk.read("magic", "I")
    walk.read("start", "i")
    walk.read("end", "i")
    for _ in range(n_cells if with_ext else 0):
        walk.read("x", "i")
        walk.read("y", "i")
        walk.read("token", "i")
    walk.span_data(n_cells)
    assert walk.offset == len(data)
    return walk.fields


def some_of_each(fields: Sequence[Field]) -> list[Field]:
    """The first and the last of the fields with one name."""
    chosen: dict[Field, None] = {}
    for name in dict.fromkeys(field.name for field in fields):
        same = [field for field in fields if field.name == name]
        chosen.update({same[0]: None, same[-1]: None})
    return list(chosen)


def replaced(state: bytes | bytearray, field: Field, value: int) -> bytes:
    changed = bytearray(state)
    struct.pack_into("<" + field.code, changed, field.offset, value)
    return bytes(changed)


def value_of(state: bytes | bytearray, field: Field) -> int:
    return int(struct.unpack_from("<" + field.code, state, field.offset)[0])


def damaged(state: bytes | bytearray, fields: Sequence[Field], seed: int) -> Iterator[tuple[str, bytes]]:
    """Every kind of damage by name: edge values, cuts at every field, bytes too many, seeded random bytes."""
    for field in some_of_each(fields):
        old = value_of(state, field)
        for value in dict.fromkeys((*EDGES[field.code], old + 1, old - 1)):
            low, high = (-(2**31), 2**31) if field.code == "i" else (0, 2 ** (8 * struct.calcsize("<" + field.code)))
            if value != old and low <= value < high:
                yield f"{field.name} at {field.offset}: {value}", replaced(state, field, value)
        yield f"cut before {field.name} at {field.offset}", bytes(state[: field.offset])
    positions = [field for field in fields if field.name == "position"]
    for one, other in itertools.pairwise(positions):
        yield f"position twice, at {one.offset}", replaced(state, other, value_of(state, one))
    yield "nothing", b""
    yield "one byte short", bytes(state[:-1])
    yield "one byte long", bytes(state) + b"\0"
    yield "twice", bytes(state) * 2
    rng = random.Random(seed)
    structural = [field.offset + byte for field in fields for byte in range(struct.calcsize("<" + field.code))]
    for _ in range(20):
        changed = bytearray(state)
        for offset in rng.sample(structural, 3):
            changed[offset] = rng.randrange(256)
        yield "random bytes", bytes(changed)
