"""The list of tensors of a GGUF file: shapes, types and places, and types that llama.cpp's operations do not take.

Converters write vectors, norms and whatever is not named `.weight` as float32, and llama.cpp ends the process, or reads
past a table, when it meets another type there.
"""

from __future__ import annotations

import re
import struct

from .gguf_cursor import Cursor

_F32 = 0
_BLOCKS = (
    {0: (1, 4), 1: (1, 2), 2: (32, 18), 3: (32, 20), 6: (32, 22), 7: (32, 24), 8: (32, 34), 9: (32, 40)}
    | {10: (256, 84), 11: (256, 110), 12: (256, 144), 13: (256, 176), 14: (256, 210), 15: (256, 292)}
    | {16: (256, 66), 17: (256, 74), 18: (256, 98), 19: (256, 50), 20: (32, 18), 21: (256, 110), 22: (256, 82)}
    | {23: (256, 136), 24: (1, 1), 25: (1, 2), 26: (1, 4), 27: (1, 8), 28: (1, 8), 29: (256, 56), 30: (1, 2)}
    | {34: (256, 54), 35: (256, 66), 39: (32, 17), 40: (64, 36), 41: (128, 18), 42: (64, 18)}
)
"""ggml types: items per block, bytes per block. Source: ggml.c and ggml-common.h @ b11549."""

_NO_WEIGHTS = frozenset({9, 15, 24, 25, 26, 27, 28})
"""Types that no matrix of weights has: intermediate ones, integers, float64."""

_ONLY_F32 = re.compile(r"(_norm|ssm_conv1d(_[qkv])?|shortconv\.conv|time_mix_(first|lerp\w*))\.weight$")
_ANY_TYPE = re.compile(r"d2t|t2d|tid2eid|\.lora_[ab]$")
"""Tables of numbers, and the parts of adapters."""

_TAKEN_FOR_OPTIONAL = ("attn_qkv.weight", "attn_gate.weight")
"""What llama.cpp does not ask for in a gated delta layer, which is one with `ssm_alpha`, and uses all the same."""

_SHAPES = tuple(struct.Struct(f"<{n_dims}QIQ") for n_dims in range(5))
_MAX_NAME_BYTES = 63
_HOST_ALIGNMENT = 32
"""llama.cpp maps weights where they lie, and ends the process if that is no multiple of this."""


class TensorList:
    """Reads the list and adds up what is in it."""

    def __init__(self, cursor: Cursor, alignment: int) -> None:
        self.n_params = 0
        self._cursor = cursor
        self._fail = cursor.fail
        self._alignment = alignment
        self._names: set[str] = set()
        self._next_offset = 0
        self._n_needed = 0
        self._is_aligned = True

    def read(self, n_tensors: int) -> None:
        for _ in range(n_tensors):
            self._read_one()
        if n_tensors:
            self._check_data()
        self._check_layers()

    def _read_one(self) -> None:
        cursor = self._cursor
        name = cursor.name("the name of a tensor", _MAX_NAME_BYTES)
        if name in self._names:
            self._fail(f"tensor {name!r} appears twice")
        self._names.add(name)
        n_dims = cursor.u32(f"the shape of {name}")
        if n_dims >= len(_SHAPES):
            self._fail(f"tensor {name} has {n_dims} dimensions")
        *shape, kind, offset = (int(value) for value in cursor.unpack(_SHAPES[n_dims], f"the shape of {name}"))
        size_bytes = self._size_bytes(name, shape, kind)
        self._check_type(name, n_dims, kind)
        if offset != self._next_offset:
            self._fail(f"tensor {name} is said to start at byte {offset} of the data instead of {self._next_offset}")
        self._is_aligned = self._is_aligned and not offset % _HOST_ALIGNMENT
        self._n_needed = offset + size_bytes
        self._next_offset = _padded(self._n_needed, self._alignment)

    def _size_bytes(self, name: str, shape: list[int], kind: int) -> int:
        n_items = 1
        for length in shape:
            n_items *= length
            if not 0 < n_items < 1 << 63:
                self._fail(f"tensor {name} has the impossible shape {shape}")
        if kind not in _BLOCKS:
            self._fail(f"tensor {name} has the unknown type {kind}")
        n_block_items, n_block_bytes = _BLOCKS[kind]
        n_row_items = shape[0] if shape else 1
        if n_row_items % n_block_items:
            self._fail(f"tensor {name} has rows of {n_row_items}, no multiple of its type's {n_block_items}")
        self.n_params += n_items
        return n_items // n_block_items * n_block_bytes

    def _check_type(self, name: str, n_dims: int, kind: int) -> None:
        if kind == _F32 or _ANY_TYPE.search(name):
            return
        if n_dims <= 1 or kind in _NO_WEIGHTS or not name.endswith(".weight") or _ONLY_F32.search(name):
            self._fail(f"tensor {name} has the type {kind}, which nothing can use there")

    def _check_layers(self) -> None:
        for name in self._names:
            if name.endswith(".ssm_alpha.weight"):
                layer = name.removesuffix("ssm_alpha.weight")
                for other in _TAKEN_FOR_OPTIONAL:
                    if layer + other not in self._names:
                        self._cursor.refuse(f"tensor {layer}{other} is missing")

    def _check_data(self) -> None:
        cursor = self._cursor
        start = _padded(cursor.position, self._alignment)
        if start + self._n_needed > cursor.size_bytes:
            self._cursor.refuse(
                f"it is {cursor.size_bytes} bytes long, its tensors end at {start + self._n_needed}: cut off?"
            )
        if not self._is_aligned or start % _HOST_ALIGNMENT:
            self._cursor.refuse(
                f"general.alignment={self._alignment} puts tensors at places that cannot be mapped to memory"
            )


def _padded(n_bytes: int, alignment: int) -> int:
    return -(-n_bytes // alignment) * alignment
