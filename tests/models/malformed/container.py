"""Files whose container is broken: not GGUF, cut short, or with counts, lengths and types that lie."""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Callable, Iterator
from functools import lru_cache

from gguf import GGUFValueType

from ..image import Image, encode, encode_entry, encode_header, encode_string, small_images
from ..metadata import Entry
from .file import MalformedFile

_HUGE = 2**63 - 1
_U32 = GGUFValueType.UINT32


@lru_cache(maxsize=1)
def _image() -> Image:
    return small_images()["full"]


def _changed(**changes: object) -> Callable[[], bytes]:
    return lambda: encode(dataclasses.replace(_image(), **changes))  # type: ignore[arg-type]


def _header_then(raw: bytes, *, n_tensors: int = 0, n_entries: int = 1) -> Callable[[], bytes]:
    """A header, then these bytes where the first entry should be."""
    return lambda: encode_header(dataclasses.replace(_image(), n_tensors=n_tensors, n_entries=n_entries)) + raw


def _entry_head(type_: int) -> bytes:
    return encode_string("general.architecture") + struct.pack("<I", type_)


def container_files() -> Iterator[MalformedFile]:
    yield MalformedFile("missing", lambda: None)
    yield MalformedFile("empty", lambda: b"")
    yield MalformedFile("text", lambda: b"This is not a model.\n" * 50)
    yield MalformedFile("html-error-page", lambda: b"<!DOCTYPE html><title>404</title>" + b" " * 200)
    yield MalformedFile("zeros", lambda: bytes(4096))
    yield MalformedFile("magic-lower-case", _changed(magic=b"gguf"))
    yield MalformedFile("magic-ggml", _changed(magic=b"ggml"))
    yield MalformedFile("magic-big-endian", _changed(magic=b"FUGG"))
    for version in (0, 1, 4, 0x03000000, 0xFFFFFFFF):
        yield MalformedFile(f"version-{version:#x}", _changed(version=version))
    yield from _truncated()
    yield from _lying_counts()
    yield from _lying_entries()


def _truncated() -> Iterator[MalformedFile]:
    def cut_at(find: Callable[[bytes], int]) -> Callable[[], bytes]:
        def build() -> bytes:
            whole = encode(_image())
            return whole[: find(whole)]

        return build

    for length in (1, 3, 4, 7, 8, 15, 16, 23, 24):
        yield MalformedFile(f"cut-at-{length}", cut_at(lambda _, length=length: length))  # type: ignore[misc]
    places: dict[str, Callable[[bytes], int]] = {
        "in-key-length": lambda whole: 28,
        "in-key": lambda whole: whole.index(b"general.architecture") + 5,
        "before-value-type": lambda whole: whole.index(b"general.architecture") + 20,
        "in-value": lambda whole: whole.index(b"llama.context_length") + 26,
        "in-string-value": lambda whole: whole.index(b"tiny full") + 3,
        "in-array": lambda whole: whole.index(b"tokenizer.ggml.tokens") + 900,
        "after-entries": lambda whole: whole.index(b"token_embd.weight") - 8,
        "in-tensor-name": lambda whole: whole.index(b"token_embd.weight") + 4,
        "in-tensor-dims": lambda whole: whole.index(b"token_embd.weight") + 17 + 10,
        "in-tensor-offset": lambda whole: whole.index(b"token_embd.weight") + 17 + 4 + 16 + 4 + 3,
        "in-last-tensor-record": lambda whole: whole.index(b"blk.0.ffn_down.weight") + 25,
        "half-of-data": lambda whole: len(whole) - 10_000,
        "one-byte-of-data": lambda whole: len(whole) - 1,
    }
    for place, find in places.items():
        yield MalformedFile(f"cut-{place}", cut_at(find))


def _lying_counts() -> Iterator[MalformedFile]:
    for name, count in (("huge", _HUGE), ("negative", 2**64 - 1), ("one-more", None)):
        entries = len(_image().entries) + 1 if count is None else count
        tensors = len(_image().tensors) + 1 if count is None else count
        yield MalformedFile(f"n-entries-{name}", _changed(n_entries=entries))
        yield MalformedFile(f"n-tensors-{name}", _changed(n_tensors=tensors))
    yield MalformedFile("n-entries-zero", _changed(n_entries=0))
    yield MalformedFile("n-entries-one-less", _changed(n_entries=len(_image().entries) - 1))
    yield MalformedFile("n-tensors-zero", _changed(n_tensors=0))


def _lying_entries() -> Iterator[MalformedFile]:
    yield MalformedFile("key-length-huge", _header_then(struct.pack("<Q", _HUGE) + b"general.architecture"))
    yield MalformedFile("key-length-past-end", _header_then(struct.pack("<Q", 5000) + b"general.architecture"))
    yield MalformedFile("key-empty", _header_then(encode_string("") + struct.pack("<II", 4, 1)))
    for length in (5000, 2**32, _HUGE, 2**64 - 1):
        raw = _entry_head(GGUFValueType.STRING) + struct.pack("<Q", length) + b"llama"
        yield MalformedFile(f"string-length-{length:#x}", _header_then(raw))
    for type_ in (13, 99, 0xFFFFFFFF):
        yield MalformedFile(f"value-type-{type_:#x}", _header_then(_entry_head(type_) + bytes(64)))
    for item_type in (GGUFValueType.ARRAY, 13, 0xFFFFFFFF):
        raw = _entry_head(GGUFValueType.ARRAY) + struct.pack("<IQ", item_type, 2) + bytes(64)
        yield MalformedFile(f"array-type-{int(item_type):#x}", _header_then(raw))
    for name, item_type in (("bytes", GGUFValueType.UINT8), ("strings", GGUFValueType.STRING)):
        for length in (2**20, 2**40, 2**64 - 1):
            raw = _entry_head(GGUFValueType.ARRAY) + struct.pack("<IQ", item_type, length) + bytes(64)
            yield MalformedFile(f"array-of-{name}-length-{length:#x}", _header_then(raw))
    yield MalformedFile("key-twice", lambda: encode(_image().adding(_image().entries[1])))
    yield MalformedFile("key-twice-other-type", lambda: encode(_image().adding(Entry("general.name", 1, _U32))))
    yield MalformedFile("alignment-zero", lambda: _aligned(0))
    yield MalformedFile("alignment-not-a-power-of-two", lambda: _aligned(48))
    yield MalformedFile("alignment-huge", lambda: _aligned(2**31))
    yield MalformedFile("alignment-other-than-layout", lambda: _aligned(64))
    yield MalformedFile(
        "alignment-one",
        lambda: encode(_image().adding(Entry("general.alignment", 1, _U32), Entry("general.version", "x", _STRING))),
        "aborts",
        check="general.alignment is a multiple of 32: mapped tensors must lie on 32-byte boundaries",
    )
    yield MalformedFile(
        "only-entries", lambda: encode_header(dataclasses.replace(_image(), tensors=())) + _all_entries(_image())
    )


_STRING = GGUFValueType.STRING


def _all_entries(image: Image) -> bytes:
    return b"".join(encode_entry(entry) for entry in image.entries)


def _aligned(alignment: int) -> bytes:
    return encode(_image().adding(Entry("general.alignment", alignment, _U32)))
