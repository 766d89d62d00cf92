"""What renderings have shown of a template, so that the next prompt of the same shape need not ask it again.

Rendering with and without what follows takes as long as an append of some tokens takes a small model. What comes of it
hardly ever depends on what the messages say. Where it does, a checkpoint lies elsewhere; no answer depends on it.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from .messages import text_of

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from .messages import Message

MAX_SHAPES = 256
_TELLING = "<[{`"
"""Characters that begin what some templates look for in contents."""


def shape_of(message: Message) -> Hashable:
    """What of a message templates decide by."""
    text = text_of(message)
    return (
        message["role"],
        isinstance(message["content"], list),
        bool(text),
        bool(message.get("reasoning_content")),
        bool(message.get("tool_calls")),
        any(character in text for character in _TELLING),
    )


class Shapes:
    """Not thread-safe by itself; each operation is one of a dict."""

    def __init__(self) -> None:
        self._survive: OrderedDict[Hashable, None] = OrderedDict()
        self._closings: OrderedDict[Hashable, bytes] = OrderedDict()

    def clear(self) -> None:
        self._survive.clear()
        self._closings.clear()

    def survive(self, shape: Hashable) -> bool:
        """Whether all of a prompt whose last messages look so was still there when more had followed."""
        return shape in self._survive

    def learn_survival(self, shape: Hashable, lost_from: Sequence[int]) -> None:
        """`lost_from`: as `Rendering.survives` has it."""
        if not lost_from:
            self._survive[shape] = None
            _bound(self._survive)

    def start(self, pair: Hashable, data: bytes, end: int) -> int | None:
        """Where the second message of a pair begins. `end`: where the text of the first one ends."""
        closing = self._closings.get(pair)
        return end + len(closing) if closing is not None and data.startswith(closing, end) else None

    def learn_start(self, pair: Hashable, data: bytes, end: int, start: int | None) -> None:
        if start is not None and start >= end:
            self._closings[pair] = data[end:start]
            _bound(self._closings)


def _bound(known: OrderedDict[Hashable, None] | OrderedDict[Hashable, bytes]) -> None:
    while len(known) > MAX_SHAPES:
        known.popitem(last=False)
