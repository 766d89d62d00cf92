"""A GGUF file as a value that can be bent out of shape: no check stands between a test and a wrong byte.

`image_of(spec)` gives a small well-formed file; the edits return changed copies; `encode` writes whatever is there.
"""

from __future__ import annotations

import dataclasses
import struct
from dataclasses import dataclass
from typing import Any

from gguf import GGMLQuantizationType, GGUFValueType

from .metadata import Entry, metadata
from .spec import FullSpec, HybridSpec, RecurrentSpec, SlidingSpec, TinySpec
from .tensors import tensors

ALIGNMENT = 32
_FORMATS = {
    GGUFValueType.UINT8: "<B",
    GGUFValueType.INT8: "<b",
    GGUFValueType.UINT16: "<H",
    GGUFValueType.INT16: "<h",
    GGUFValueType.UINT32: "<I",
    GGUFValueType.INT32: "<i",
    GGUFValueType.FLOAT32: "<f",
    GGUFValueType.BOOL: "<?",
    GGUFValueType.UINT64: "<Q",
    GGUFValueType.INT64: "<q",
    GGUFValueType.FLOAT64: "<d",
}


@dataclass(frozen=True, slots=True)
class RawTensor:
    """A tensor record: dimensions in file order (innermost first), a type number, and bytes that need not fit them."""

    name: str
    dims: tuple[int, ...]
    data: bytes
    type: int = int(GGMLQuantizationType.F32)
    offset: int | None = None
    """Where the record says the data is; None: where it is."""


@dataclass(frozen=True, slots=True)
class Image:
    """The parts of a GGUF file. Counts are right unless given."""

    entries: tuple[Entry, ...]
    tensors: tuple[RawTensor, ...]
    magic: bytes = b"GGUF"
    version: int = 3
    n_entries: int | None = None
    n_tensors: int | None = None

    def setting(self, key: str, value: Any, type_: GGUFValueType | None = None) -> Image:
        """With one key's value changed (and its type, if given)."""
        old = self.entry(key)
        item_type = old.item_type if type_ is None or type_ == GGUFValueType.ARRAY else None
        return self._replacing(key, dataclasses.replace(old, value=value, type=type_ or old.type, item_type=item_type))

    def setting_array(self, key: str, value: list[Any], item_type: GGUFValueType) -> Image:
        """With one key turned into an array."""
        return self._replacing(key, Entry(key, value, GGUFValueType.ARRAY, item_type))

    def adding(self, *entries: Entry) -> Image:
        return dataclasses.replace(self, entries=(*self.entries, *entries))

    def dropping(self, key: str) -> Image:
        self.entry(key)
        return dataclasses.replace(self, entries=tuple(e for e in self.entries if e.key != key))

    def changing_tensor(self, name: str, /, **changes: Any) -> Image:
        self.tensor(name)
        changed = tuple(dataclasses.replace(t, **changes) if t.name == name else t for t in self.tensors)
        return dataclasses.replace(self, tensors=changed)

    def dropping_tensor(self, name: str) -> Image:
        return dataclasses.replace(self, tensors=tuple(t for t in self.tensors if t.name != name))

    def entry(self, key: str) -> Entry:
        return next(e for e in self.entries if e.key == key)

    def tensor(self, name: str) -> RawTensor:
        return next(t for t in self.tensors if t.name == name)

    def _replacing(self, key: str, new: Entry) -> Image:
        return dataclasses.replace(self, entries=tuple(new if e.key == key else e for e in self.entries))


def encode_string(text: str | bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def _encode_value(value: Any, type_: GGUFValueType, item_type: GGUFValueType | None) -> bytes:
    if type_ == GGUFValueType.STRING:
        return encode_string(value)
    if type_ == GGUFValueType.ARRAY:
        if item_type is None:
            raise ValueError("an array needs an item type")
        items = b"".join(_encode_value(item, item_type, None) for item in value)
        return struct.pack("<IQ", item_type, len(value)) + items
    return struct.pack(_FORMATS[type_], value)


def encode_entry(entry: Entry) -> bytes:
    return (
        encode_string(entry.key)
        + struct.pack("<I", entry.type)
        + _encode_value(entry.value, entry.type, entry.item_type)
    )


def encode_tensor_record(tensor: RawTensor, offset: int) -> bytes:
    dims = b"".join(struct.pack("<Q", dim & 0xFFFFFFFFFFFFFFFF) for dim in tensor.dims)
    return (
        encode_string(tensor.name)
        + struct.pack("<I", len(tensor.dims))
        + dims
        + struct.pack("<IQ", tensor.type & 0xFFFFFFFF, offset & 0xFFFFFFFFFFFFFFFF)
    )


def encode_header(image: Image) -> bytes:
    n_tensors = len(image.tensors) if image.n_tensors is None else image.n_tensors
    n_entries = len(image.entries) if image.n_entries is None else image.n_entries
    return image.magic + struct.pack("<IQQ", image.version, n_tensors, n_entries)


def encode(image: Image) -> bytes:
    """The file's bytes."""
    out = bytearray(encode_header(image))
    for entry in image.entries:
        out += encode_entry(entry)
    data = bytearray()
    for tensor in image.tensors:
        out += encode_tensor_record(tensor, len(data) if tensor.offset is None else tensor.offset)
        data += tensor.data + bytes(-len(tensor.data) % ALIGNMENT)
    out += bytes(-len(out) % ALIGNMENT)
    return bytes(out + data)


def image_of(spec: TinySpec) -> Image:
    """The well-formed file of a spec, in parts."""
    return Image(
        entries=tuple(metadata(spec)),
        tensors=tuple(RawTensor(t.name, t.shape[::-1], t.values(spec.seed).tobytes()) for t in tensors(spec)),
    )


def small_images() -> dict[str, Image]:
    """Well-formed files of some 40 kB, one per memory kind: what the malformed files are bent from."""
    shape: dict[str, Any] = {"n_embd": 16, "n_ff": 16, "n_head": 2, "n_head_kv": 1, "head_dim": 8, "n_ctx_train": 512}
    specs: tuple[TinySpec, ...] = (
        FullSpec(n_layer=1, **shape),
        SlidingSpec(n_layer=2, **shape),
        HybridSpec(n_layer=2, value_heads=2, key_heads=1, state_size=16, **(shape | {"head_dim": 16})),
        RecurrentSpec(n_layer=1, state_heads=2, state_head_dim=8, state_size=16, **shape),
    )
    return {spec.kind: image_of(spec).dropping_tensor("output.weight") for spec in specs}
