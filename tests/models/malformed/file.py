"""What is known about one malformed file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Native = Literal["refuses", "aborts", "crashes", "hangs", "throws"]
Stage = Literal["load", "context", "tokenize", "decode"]


@dataclass(frozen=True, slots=True)
class MalformedFile:
    """One file. `build` gives its bytes; None means that there is no file under the name."""

    name: str
    build: Callable[[], bytes | None]
    native: Native = "refuses"
    stage: Stage = "load"
    check: str = ""

    @property
    def must_be_caught_first(self) -> bool:
        """Whether handing this file to native code ends or blocks the process, or throws through C."""
        return self.native != "refuses"

    def write(self, folder: Path) -> Path:
        """Put the file into the folder; gives the path it has, or would have."""
        path = folder / f"{self.name}.gguf"
        data = self.build()
        if data is not None:
            path.write_bytes(data)
        return path
