"""Reading a GGUF file piece by piece: bounded memory, and every length checked against the file before it is used.

Knows the encoding of numbers and strings, not what they mean.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from io import FileIO
from typing import NoReturn

import numpy as np
import numpy.typing as npt

from ..errors import ModelFormatError

WINDOW_BYTES = 64 << 10
"""What is held of the file at a time. Larger windows are slower: fresh memory costs more than the scan."""

MAX_ITEM_BYTES = WINDOW_BYTES - 8
"""The longest string of an array."""

_N_STEPS = 1024
"""Strings read one by one before the fast scan is tried again, so that a file made to defeat it costs little more."""

_N_FAST = 64
"""Fewer strings than this are not worth a scan of the whole window."""

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class Strings:
    """Consecutive strings of an array. The string at `starts[i]` is 8 bytes of length and `n_bytes[i]` of text."""

    data: npt.NDArray[np.uint8]
    """Valid until the cursor is used again."""
    starts: npt.NDArray[np.int64]
    n_bytes: npt.NDArray[np.int64]

    def text(self, index: int) -> bytes:
        start = int(self.starts[index]) + 8
        return self.data[start : start + int(self.n_bytes[index])].tobytes()


class Cursor:
    """A position in an open file, and a window of bytes after it."""

    def __init__(self, file: FileIO, path: str, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self._file = file
        self._path = path
        self._buffer = bytearray(WINDOW_BYTES)
        self._array = np.frombuffer(self._buffer, dtype=np.uint8)
        self._first = 0
        self._n_held = 0
        self._offset = 0

    @property
    def position(self) -> int:
        return self._first + self._offset

    @property
    def n_left(self) -> int:
        return self.size_bytes - self.position

    def move_to(self, position: int) -> None:
        self._first = position
        self._offset = self._n_held = 0

    def fail(self, what: str) -> NoReturn:
        """For what is wrong at this place."""
        raise ModelFormatError(self._path, f"{what} (at byte {self.position})")

    def refuse(self, what: str) -> NoReturn:
        """For what is wrong whatever the place."""
        raise ModelFormatError(self._path, what)

    def u32(self, what: str) -> int:
        return int(_U32.unpack_from(self._buffer, self._take(4, what))[0])

    def u64(self, what: str) -> int:
        return int(_U64.unpack_from(self._buffer, self._take(8, what))[0])

    def unpack(self, form: struct.Struct, what: str) -> tuple[int | float | bool, ...]:
        """The numbers of `form`, which is shorter than a window."""
        return form.unpack_from(self._buffer, self._take(form.size, what))

    def string(self, what: str, max_bytes: int) -> bytes:
        """A string of at most `max_bytes`, which is less than a window."""
        n_bytes = self.u64(what)
        if n_bytes > max_bytes:
            self.fail(f"{what} is {n_bytes} bytes long, more than {max_bytes}")
        start = self._take(n_bytes, what)
        return bytes(self._buffer[start : start + n_bytes])

    def name(self, what: str, max_bytes: int) -> str:
        """A string that means the same to llama.cpp, which stops at a zero byte, and that can be shown."""
        text = self.string(what, max_bytes).decode("utf-8", "backslashreplace")
        if not text or not text.isprintable():
            self.fail(f"{what} is empty or holds control characters")
        return text

    def start_of_string(self, what: str, max_bytes: int) -> tuple[bytes, int]:
        """The first `max_bytes` of a string of any length, and its length."""
        n_bytes = self.u64(what)
        self._require(n_bytes, what)
        n_kept = min(n_bytes, max_bytes)
        start = self._take(n_kept, what)
        text = bytes(self._buffer[start : start + n_kept])
        self.skip(n_bytes - n_kept, what)
        return text, n_bytes

    def skip(self, n_bytes: int, what: str) -> None:
        self._require(n_bytes, what)
        self._offset += n_bytes

    def distinct(self, n_items: int, form: struct.Struct, what: str) -> frozenset[int | float | bool]:
        """The different numbers of an array of any length."""
        self._require(n_items * form.size, what)
        found: set[int | float | bool] = set()
        while n_items:
            n_now = min(n_items, WINDOW_BYTES // form.size)
            start = self._take(n_now * form.size, what)
            numbers = self._array[start : start + n_now * form.size].view(form.format)
            found.update(np.unique(numbers).tolist())
            n_items -= n_now
        return frozenset(found)

    def strings(self, n_strings: int, what: str) -> Iterator[Strings]:
        """Walk over an array of strings, some thousands at a time."""
        while n_strings:
            self._fill()
            batch = self._many_strings(n_strings) or self._few_strings(min(n_strings, _N_STEPS), what)
            n_strings -= len(batch.starts)
            end = int(batch.starts[-1] + batch.n_bytes[-1]) + 8
            yield batch
            self._offset += end

    def _many_strings(self, n_strings: int) -> Strings | None:
        """The strings shorter than 256 bytes that follow, found without a loop; None if there is no such.

        The length of such a string is one byte and seven zeros. Text may look like that, too: a place is believed only
        if the string before it, and so every string before it, ends there.
        """
        data = self._array[: self._n_held]
        if min(n_strings, len(data) - 8) < _N_FAST:
            return None
        zero = data == 0
        two = zero[:-1] & zero[1:]
        four = two[:-2] & two[2:]
        starts = np.flatnonzero(four[1:-3] & four[4:])[:n_strings]
        n_bytes = data[starts].astype(np.int64)
        ends = starts + n_bytes + 8
        n_good = 0
        if len(starts) and starts[0] == 0:
            breaks = np.flatnonzero(starts[1:] != ends[:-1])
            n_good = int(breaks[0]) + 1 if len(breaks) else len(starts)
            n_good -= bool(ends[n_good - 1] > len(data))
        return Strings(data, starts[:n_good], n_bytes[:n_good]) if n_good >= _N_FAST else None

    def _few_strings(self, n_strings: int, what: str) -> Strings:
        """At least one of the strings that follow."""
        starts: list[int] = []
        lengths: list[int] = []
        start = 0
        while len(starts) < n_strings and start + 8 <= self._n_held:
            n_bytes = _U64.unpack_from(self._buffer, start)[0]
            if n_bytes > MAX_ITEM_BYTES:
                self.fail(f"{what} has a string of {n_bytes} bytes, more than {MAX_ITEM_BYTES}")
            if start + 8 + n_bytes > self._n_held:
                break
            starts.append(start)
            lengths.append(n_bytes)
            start += 8 + n_bytes
        if not starts:
            self.fail(f"the file ends inside {what}")
        return Strings(self._array[: self._n_held], np.array(starts), np.array(lengths))

    def _require(self, n_bytes: int, what: str) -> None:
        if n_bytes > self.n_left:
            self.fail(f"the file ends inside {what}: {n_bytes} bytes needed, {self.n_left} left")

    def _take(self, n_bytes: int, what: str) -> int:
        """Where in the buffer the next bytes lie; moves past them."""
        if self._offset + n_bytes > self._n_held:
            self._require(n_bytes, what)
            self._fill()
            if n_bytes > self._n_held:
                self.fail(f"the file ends inside {what}: it became shorter while it was read")
        start = self._offset
        self._offset += n_bytes
        return start

    def _fill(self) -> None:
        """Hold the window that starts here."""
        if self._offset == 0 and self._n_held:
            return
        self._first = self.position
        self._offset = self._n_held = 0
        self._file.seek(self._first)
        while self._n_held < WINDOW_BYTES and (n_read := self._file.readinto(self._array[self._n_held :].data)):
            self._n_held += n_read
