"""Whatever bytes a model's file holds, the check ends soon, in little memory, and with the one error it may raise."""

from __future__ import annotations

import contextlib
import os
import struct
import tempfile
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyllamacache.errors import ModelFormatError
from pyllamacache.store.gguf_check import check_gguf
from tests.fakes.gguf_file import ARRAY, STRING, Entry, array, small_model

SMALL = small_model().to_bytes()
HEADER = SMALL.index(b"output_norm.weight") + 40
NUMBERS = st.sampled_from([0, 1, 2, 8, 9, 13, 255, 2**16, 2**31, 2**32 - 1, 2**40, 2**61, 2**62, 2**63, 2**64 - 1])


@pytest.fixture(scope="module")
def path() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder) / "model.gguf"


def assert_ends_well(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    start = time.process_time()
    with contextlib.suppress(ModelFormatError):
        assert check_gguf(path).size_bytes == len(content)
    assert time.process_time() - start < 1


@st.composite
def mutations(draw: st.DrawFn) -> bytes:
    content = bytearray(SMALL)
    for _ in range(draw(st.integers(1, 4))):
        position = draw(st.integers(0, HEADER))
        kind = draw(st.sampled_from(["flip", "u32", "u64", "cut", "insert", "splice", "end"]))
        if kind == "flip":
            content[min(position, len(content) - 1)] ^= draw(st.integers(1, 255))
        elif kind in ("u32", "u64"):
            width = 4 if kind == "u32" else 8
            number = struct.pack("<Q", draw(NUMBERS))[:width]
            content[position : position + width] = number
        elif kind == "cut":
            del content[position : position + draw(st.integers(1, 64))]
        elif kind == "insert":
            content[position:position] = draw(st.binary(min_size=1, max_size=64))
        elif kind == "splice":
            start = draw(st.integers(0, HEADER))
            content[position:position] = content[start : start + draw(st.integers(1, 200))]
        else:
            del content[draw(st.integers(0, len(content))) :]
        content = content or bytearray(b"G")
    return bytes(content)


@settings(deadline=None)
@given(content=mutations())
def test_a_mutated_file(path: Path, content: bytes) -> None:
    assert_ends_well(path, content)


@settings(deadline=None)
@given(content=st.binary(max_size=400))
def test_random_bytes_after_the_magic(path: Path, content: bytes) -> None:
    assert_ends_well(path, b"GGUF" + struct.pack("<I", 3) + content)


def test_every_number_of_the_header_overwritten(path: Path) -> None:
    """Every place, with the numbers that overflow something: the fuzz above might miss a place."""
    path.write_bytes(SMALL)
    with open(path, "r+b", buffering=0) as file:
        for position in range(4, HEADER, 7):
            for number in (2**32 - 1, 2**63, 2**64 - 1):
                os.pwrite(file.fileno(), struct.pack("<Q", number), position)
                with contextlib.suppress(ModelFormatError):
                    check_gguf(path)
            os.pwrite(file.fileno(), SMALL[position : position + 8], position)


def test_memory_stays_small(path: Path) -> None:
    tokens = [f"token {number}" for number in range(200_000)]
    path.write_bytes(small_model().with_raw(Entry("some.words", ARRAY, array(STRING, tokens))).to_bytes())
    check_gguf(path)
    tracemalloc.start()
    try:
        check_gguf(path)
        assert tracemalloc.get_traced_memory()[1] < 5_000_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("token", [b"", b"\x01" + bytes(7), bytes(9), b"x" * 300])
def test_a_vocabulary_made_to_be_slow(path: Path, token: bytes) -> None:
    """The fast scan finds nothing in these, and every token has to be looked at."""
    tokens = [token + (b"%d" % number if token else b"") for number in range(100_000)]
    file = small_model().without("tokenizer.ggml.scores").without("tokenizer.ggml.token_type")
    content = file.with_raw(Entry("tokenizer.ggml.tokens", ARRAY, array(STRING, tokens))).to_bytes()
    assert_ends_well(path, content)
