"""What stands at a change: where in the request, what kind of text, and the text itself."""

from __future__ import annotations

from dataclasses import dataclass

from .explanation import Windows
from .places import Place
from .volatile import Volatile, find_volatile

_MAX_VOLATILE_BYTES = 160
"""A longer change is more than a clock."""
_MAX_SHOWN_BYTES = 400
MAX_SHOWN_IDS = 64
_CONTEXT_BYTES = 40


@dataclass(frozen=True, slots=True)
class Seen:
    """Of a change: its place in both prompts, and what is there."""

    place: Place
    old_place: Place
    volatile: Volatile | None
    windows: Windows


def shown(data: bytes, span: tuple[int, int]) -> str:
    """`data[start:end]`, made whole words and cut to what can be shown."""
    start, end = span
    end = min(end, start + _MAX_SHOWN_BYTES)
    before = max(data.rfind(sign, max(0, start - _CONTEXT_BYTES), start) for sign in (b" ", b"\n"))
    behind = [data.find(sign, end, end + _CONTEXT_BYTES) for sign in (b" ", b"\n")]
    start = before + 1 if before >= 0 else start
    if end == span[1]:
        end = min((at for at in behind if at >= 0), default=end)
    return data[start:end].decode(errors="replace")


def volatile_at(old: bytes, old_span: tuple[int, int], new: bytes, new_span: tuple[int, int]) -> Volatile | None:
    """What kind of changing text a change is part of."""
    if max(old_span[1] - old_span[0], new_span[1] - new_span[0]) > _MAX_VOLATILE_BYTES:
        return None
    for data, (start, end) in ((new, new_span), (old, old_span)):
        first, last = max(0, start - _MAX_VOLATILE_BYTES), min(len(data), end + _MAX_VOLATILE_BYTES)
        text = data[first:last].decode("latin-1")  # a character a byte
        for each in find_volatile(text):
            if first + each.start <= end and start <= first + each.end:
                return each.kind
    return None
