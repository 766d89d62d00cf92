"""What replies were, to the character, for when they come back as messages.

A tool call that was generated comes back as a message, and a template writes it its own way: other spaces in the JSON,
other escapes. Where a message says what was generated after the same prompt, the prompt goes on with that.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .messages import text_of

if TYPE_CHECKING:
    from .messages import Message
    from .places import Ranges

MAX_TURNS = 4096
MAX_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Turn:
    """A reply: its text with control tokens, where in it those are, and the message it was read as."""

    text: bytes
    controls: Ranges
    """Bytes of `text` that control tokens wrote; nothing else may become one."""
    end: bytes
    """How the token that ended it is written; empty if none did."""
    content: str
    reasoning: str
    calls: tuple[tuple[str, str], ...]
    """Names and arguments, as canonical JSON."""

    def says(self, message: Message) -> bool:
        """Whether a message means the same."""
        calls = tuple(_call(each["function"]) for each in message.get("tool_calls", ()))
        return (
            self.content.strip() == text_of(message).strip()
            and self.calls == calls
            and self.reasoning.strip() == message.get("reasoning_content", "").strip()
        )


def turn_of(text: str, message: Mapping[str, Any], controls: Ranges, end: bytes) -> Turn:
    """The turn of a reply; `message` is what the template's parser made of it."""
    calls = tuple(_call(each) for each in message["tool_calls"])
    return Turn(text.encode(), controls, end, message["content"], message["reasoning_content"], calls)


def _call(function: Mapping[str, Any]) -> tuple[str, str]:
    try:
        arguments = json.dumps(json.loads(function["arguments"] or "{}"), sort_keys=True)
    except ValueError:
        arguments = function["arguments"]
    return function["name"], arguments


@dataclass(frozen=True, slots=True)
class Restored:
    """A prompt in which replies are spelled as they were generated."""

    data: bytes
    inputs: Ranges
    moved: tuple[tuple[int, int], ...] = ()
    """(offset in the rendered prompt, offset in `data`): from the first on, both go on alike until the next."""

    def offset(self, rendered: int) -> int:
        """Where a place of the rendered prompt is now."""
        last = (0, 0)
        for pair in self.moved:
            if pair[0] > rendered:
                break
            last = pair
        return last[1] + rendered - last[0]


class Turns:
    """Replies by what they answered, the least recently used first. Used under its owner's lock."""

    def __init__(self, max_turns: int = MAX_TURNS, max_bytes: int = MAX_BYTES) -> None:
        self._turns: OrderedDict[tuple[str, bytes], Turn] = OrderedDict()
        self._max_turns, self._max_bytes = max_turns, max_bytes
        self._n_bytes = 0

    def __len__(self) -> int:
        return len(self._turns)

    def add(self, namespace: str, prompt: bytes, turn: Turn) -> None:
        """`prompt` is the whole prompt that was answered."""
        key = namespace, hashlib.blake2b(prompt, digest_size=16).digest()
        known = self._turns.pop(key, None)
        self._n_bytes -= 0 if known is None else len(known.text)
        self._turns[key] = turn
        self._n_bytes += len(turn.text)
        while self._turns and (self._n_bytes > self._max_bytes or len(self._turns) > self._max_turns):
            self._n_bytes -= len(self._turns.popitem(last=False)[1].text)

    def clear(self, namespace: str | None = None) -> None:
        """Forget those of a namespace, or (None) all."""
        for key in [key for key in self._turns if namespace in (None, key[0])]:
            self._n_bytes -= len(self._turns.pop(key).text)

    def restore(
        self,
        namespace: str,
        data: bytes,
        inputs: Ranges,
        stub: bytes,
        messages: Sequence[Message],
        start_of: Callable[[int], int | None],
    ) -> Restored:
        """`data` with the replies that are known in it.

        Args:
            stub: the generation prompt.
            start_of: where a message begins in `data`; None where that is not known.
        """
        out, hasher, moved, ranges = bytearray(), hashlib.blake2b(digest_size=16), [], list[tuple[int, int]]()
        done = 0

        def take(upto: int) -> None:
            nonlocal done
            shift = len(out) - done
            ranges.extend(_clipped(inputs, done, upto, shift))
            out.extend(data[done:upto])
            hasher.update(data[done:upto])
            done = upto

        for index, message in enumerate(messages):
            if message["role"] != "assistant" or not self._turns:
                continue
            start, end = start_of(index), start_of(index + 1)
            if start is None or end is None or start < done or not data.startswith(stub, start):
                continue
            take(start + len(stub))
            turn = self._turns.get((namespace, hasher.copy().digest()))
            rendered = data[done:end]
            if turn is None or not turn.says(message) or rendered.startswith(turn.text):
                continue
            at = rendered.rfind(turn.end) if turn.end else -1
            if at < 0 or turn.reasoning.strip().encode() not in rendered:
                continue
            ranges.extend(_outside(turn, len(out)))
            out.extend(turn.text)
            hasher.update(turn.text)
            done += at
            moved.append((done, len(out)))
        take(len(data))
        return Restored(bytes(out), _merged(ranges), tuple(moved))


def _clipped(ranges: Ranges, start: int, end: int, shift: int) -> list[tuple[int, int]]:
    return [(max(a, start) + shift, min(b, end) + shift) for a, b in ranges if a < end and b > start]


def _outside(turn: Turn, offset: int) -> list[tuple[int, int]]:
    found, cursor = [], 0
    for start, end in (*turn.controls, (len(turn.text), len(turn.text))):
        if cursor < start:
            found.append((offset + cursor, offset + start))
        cursor = end
    return found


def _merged(ranges: Sequence[tuple[int, int]]) -> Ranges:
    merged: list[tuple[int, int]] = []
    for start, end in ranges:
        if merged and merged[-1][1] >= start:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    return tuple(merged)
