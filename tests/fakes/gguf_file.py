"""GGUF files put together by hand, so that any part of one can be wrong."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

LETTERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
U8, U16, U32, I32, F32, BOOL, STRING, ARRAY, U64 = 0, 2, 4, 5, 6, 7, 8, 9, 10


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def items(kind: int, values: Sequence[Any]) -> bytes:
    if kind == STRING:
        return b"".join(text(value) for value in values)
    return struct.pack(f"<{len(values)}{LETTERS[kind]}", *values)


def array(kind: int, values: Sequence[Any], n_items: int | None = None) -> bytes:
    return struct.pack("<IQ", kind, len(values) if n_items is None else n_items) + items(kind, values)


@dataclass(frozen=True)
class Entry:
    key: str | bytes
    kind: int
    raw: bytes

    @classmethod
    def of(cls, key: str | bytes, kind: int, value: Any) -> Entry:
        return cls(key, kind, text(value) if kind == STRING else items(kind, [value]))


@dataclass(frozen=True)
class Tensor:
    name: str | bytes
    shape: tuple[int, ...]
    kind: int = 0
    n_bytes: int | None = None
    offset: int | None = None

    @property
    def size_bytes(self) -> int:
        n_items = 1
        for length in self.shape:
            n_items *= length
        return 4 * n_items if self.n_bytes is None else self.n_bytes


@dataclass(frozen=True)
class GgufFile:
    entries: tuple[Entry, ...] = ()
    tensors: tuple[Tensor, ...] = ()
    version: int = 3
    alignment: int = 32
    magic: bytes = b"GGUF"
    n_entries: int | None = None
    n_tensors: int | None = None
    tail: bytes = field(default=b"", repr=False)

    def with_entry(self, key: str | bytes, kind: int, value: Any) -> GgufFile:
        """The file with this key set, in its place if it is there."""
        return self.with_raw(Entry.of(key, kind, value))

    def with_raw(self, new: Entry) -> GgufFile:
        if any(entry.key == new.key for entry in self.entries):
            return replace(self, entries=tuple(new if entry.key == new.key else entry for entry in self.entries))
        return replace(self, entries=(*self.entries, new))

    def without(self, key: str) -> GgufFile:
        return replace(self, entries=tuple(entry for entry in self.entries if entry.key != key))

    def with_tensor(self, tensor: Tensor) -> GgufFile:
        return replace(self, tensors=(*self.tensors, tensor))

    def to_bytes(self) -> bytes:
        n_entries = len(self.entries) if self.n_entries is None else self.n_entries
        n_tensors = len(self.tensors) if self.n_tensors is None else self.n_tensors
        head = self.magic + struct.pack("<IQQ", self.version, n_tensors, n_entries)
        for entry in self.entries:
            head += text(entry.key) + struct.pack("<I", entry.kind) + entry.raw
        end = 0
        for tensor in self.tensors:
            offset = end if tensor.offset is None else tensor.offset
            head += text(tensor.name) + struct.pack("<I", len(tensor.shape))
            head += struct.pack(f"<{len(tensor.shape)}QIQ", *tensor.shape, tensor.kind, offset)
            end = self._padded(end + tensor.size_bytes)
        if not self.tensors:
            return head + self.tail
        return head.ljust(self._padded(len(head)), b"\0") + bytes(end) + self.tail

    def _padded(self, n_bytes: int) -> int:
        return -(-n_bytes // self.alignment) * self.alignment


def small_model() -> GgufFile:
    """A sound description of a model, with every kind of value in it; nothing could be computed with its tensors."""
    tokens = ["<unk>", "<s>", "</s>", *(f"token {number}" for number in range(97))]
    return GgufFile(
        entries=(
            Entry.of("general.architecture", STRING, "llama"),
            Entry.of("general.name", STRING, "Small \u00e4"),
            Entry.of("llama.block_count", U32, 2),
            Entry.of("llama.context_length", U32, 512),
            Entry.of("llama.embedding_length", U32, 64),
            Entry.of("llama.feed_forward_length", U32, 96),
            Entry.of("llama.attention.head_count", U32, 4),
            Entry("llama.attention.head_count_kv", ARRAY, array(I32, [2, 1])),
            Entry.of("llama.attention.layer_norm_rms_epsilon", F32, 1e-5),
            Entry.of("llama.rope.dimension_count", U32, 16),
            Entry.of("llama.some.flag", BOOL, True),
            Entry.of("llama.some.long", U64, 2**63),
            Entry.of("tokenizer.ggml.model", STRING, "llama"),
            Entry("tokenizer.ggml.tokens", ARRAY, array(STRING, tokens)),
            Entry("tokenizer.ggml.scores", ARRAY, array(F32, [0.0] * 100)),
            Entry("tokenizer.ggml.token_type", ARRAY, array(I32, [1] * 100)),
            Entry.of("tokenizer.ggml.bos_token_id", U32, 1),
            Entry.of("tokenizer.chat_template", STRING, "x" * 5000),
        ),
        tensors=(
            Tensor("token_embd.weight", (64, 100)),
            Tensor("blk.0.attn_norm.weight", (64,)),
            Tensor("blk.0.attn_q.weight", (64, 64), 8, n_bytes=64 * 64 // 32 * 34),
            Tensor("output_norm.weight", (64,)),
        ),
    )
