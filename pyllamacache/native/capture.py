"""A state on its way out of the context. Begun, asked and ended on the scheduler's thread."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


class NativeCapture:
    """Owns a `plc_capture *`, and keeps the memory it writes to alive. `finish` or `cancel` ends it, once."""

    def __init__(self, lib: Any, pointer: Any, data: npt.NDArray[np.uint8]) -> None:
        self._lib = lib
        self._pointer: Any = pointer
        self._data = data

    @property
    def is_ready(self) -> bool:
        return self._pointer is not None and bool(self._lib.plc_capture_ready(self._pointer))

    def finish(self) -> bool:
        pointer, self._pointer = self._pointer, None
        n_bytes = len(self._data)
        del self._data
        return pointer is not None and int(self._lib.plc_capture_finish(pointer)) == n_bytes

    def cancel(self) -> None:
        pointer, self._pointer = self._pointer, None
        if pointer is not None:
            self._lib.plc_capture_cancel(pointer)
