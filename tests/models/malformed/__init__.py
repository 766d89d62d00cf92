"""Model files that must be refused: what each is, what llama.cpp b11549 does with it, and what would catch it.

`native` was measured in a forked child: load, a context of 256 tokens, tokenize, decode 17 tokens. Files marked
`aborts`, `crashes`, `hangs` or `throws` must never reach native code: `check` says what to look at in the parsed
header. Files marked `refuses` get a null pointer and a log line, which the library turns into an exception.
"""

from __future__ import annotations

from .container import container_files
from .file import MalformedFile, Native, Stage
from .header import header_files
from .tensors import tensor_files

__all__ = ["MalformedFile", "Native", "Stage", "malformed_files"]


def malformed_files() -> tuple[MalformedFile, ...]:
    """All of them. Building is lazy; each is at most some 60 kB."""
    return (*container_files(), *header_files(), *tensor_files())
