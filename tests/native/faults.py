"""Ways to damage a native context behind the engine's back, for tests that must notice. On the scheduler's thread."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

from pyllamacache.native.context import NativeContext
from pyllamacache.native.library import load

SPAN, STATE = 0, 1
PARTIAL_ONLY, ON_DEVICE = 1, 2


class Damage:
    """Handles a context's private pointer; every method changes memory without telling the engine's books."""

    def __init__(self, context: NativeContext) -> None:
        self._context = context
        module = load()
        self._ffi, self._lib = module.ffi, module.lib

    def remove(self, seq_id: int, start: int, end: int, part: int = SPAN) -> bool:
        """Drop cells [start, end) of one part."""
        return bool(self._lib.plc_test_part_rm(self._context._ctx, part, seq_id, start, end) == 1)

    def read_state(self, seq_id: int, flags: int = PARTIAL_ONLY) -> bytearray:
        size = self._lib.plc_test_state_get(self._context._ctx, seq_id, self._ffi.NULL, 0, flags)
        state = bytearray(size)
        n = self._lib.plc_test_state_get(self._context._ctx, seq_id, self._ffi.from_buffer(state), size, flags)
        assert n == size
        return state

    def write_state(self, seq_id: int, state: bytes | bytearray, flags: int = PARTIAL_ONLY) -> int:
        return int(
            self._lib.plc_test_state_set(self._context._ctx, seq_id, self._ffi.from_buffer(state), len(state), flags)
        )

    def save_file(self, seq_id: int, path: Path) -> int:
        return int(self._lib.plc_test_state_file(self._context._ctx, seq_id, bytes(path), 1))

    def load_file(self, seq_id: int, path: Path) -> int:
        return int(self._lib.plc_test_state_file(self._context._ctx, seq_id, bytes(path), 0))

    def read_all(self) -> bytearray:
        """The state of all sequences."""
        state = bytearray(self._lib.plc_test_all_get(self._context._ctx, self._ffi.NULL, 0))
        n = self._lib.plc_test_all_get(self._context._ctx, self._ffi.from_buffer(state), len(state))
        assert n == len(state)
        return state

    def write_all(self, state: bytes | bytearray) -> int:
        return int(self._lib.plc_test_all_set(self._context._ctx, self._ffi.from_buffer(state), len(state)))

    def fail_decode(self, nth: int, code: int, *, after_decode: bool = False) -> None:
        """Make the nth decode from now report `code`, instead of or after decoding."""
        self._lib.plc_test_fail_decode(self._context._ctx, nth, code, after_decode)


def with_position(state: bytearray, position: int) -> bytearray:
    """A recurrent state that claims to be at another position.

    Layout: magic u32, sequence i32, cell count u32, then per cell position i32 and number of ids u32.
    """
    changed = bytearray(state)
    (count,) = struct.unpack_from("<I", changed, 8)
    assert count == 1
    struct.pack_into("<i", changed, 12, position)
    return changed


def damage(engine: Any) -> Damage:
    return Damage(engine._state.backend)


def on_scheduler(engine: Any, function: Any) -> Any:
    return engine._scheduler.inbox.call(function)
