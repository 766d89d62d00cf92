"""Where messages lie in a rendered prompt. Offsets are bytes.

A boundary is found by rendering with and without what is behind it, since templates rewrite history: they drop old
reasoning, or put the tools before the last question. What is common to two renderings is what a later prompt keeps.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..errors import ChatTemplateError
from .messages import text_of

if TYPE_CHECKING:
    from .messages import CacheMark, ChatInput, Message
    from .template import TemplateOptions, Templates

Ranges = tuple[tuple[int, int], ...]

_BLOCK = 1 << 12


def input_ranges(parts: Sequence[Sequence[Any]]) -> Ranges:
    """The parts that came from the request."""
    ranges, offset = [], 0
    for is_input, n_bytes in parts:
        if is_input and n_bytes:
            ranges.append((offset, offset + n_bytes))
        offset += n_bytes
    return tuple(ranges)


def common_bytes(a: bytes, b: bytes) -> int:
    """Length of the common beginning, cut to whole characters."""
    n_bytes, start, step = min(len(a), len(b)), 0, _BLOCK
    while step and start < n_bytes:
        if start + step <= n_bytes and a[start : start + step] == b[start : start + step]:
            start += step
        else:
            step //= 2
    while start and start < len(a) and a[start] & 0xC0 == 0x80:
        start -= 1
    return start


class Rendering:
    """One prompt and what it takes to find places in it."""

    def __init__(
        self, templates: Templates, chat: ChatInput, options: TemplateOptions, rendered: Mapping[str, Any]
    ) -> None:
        self._templates = templates
        self._chat = chat
        self._options = options
        self.data: bytes = rendered["prompt"].encode()
        self.inputs = input_ranges(rendered["parts"])
        self.stub = stub = str(rendered.get("generation_prompt", "")).encode()
        self.generation_start = len(self.data) - len(stub) if stub and self.data.endswith(stub) else len(self.data)
        self._input_ends = [end for _, end in self.inputs]
        self._recent: Recent | None = None

    def of_recent(self) -> Recent:
        """The same of the header and the last messages, which end alike and take a fraction of the time to render."""
        if self._recent is None:
            self._recent = self._made_recent()
        return self._recent

    def _made_recent(self) -> Recent:
        kept = _recent_indices(self._chat.messages)
        if len(kept) == len(self._chat.messages):
            return Recent(self, self, tuple(kept))
        chat = replace(self._chat, messages=tuple(self._chat.messages[index] for index in kept), marks=())
        try:
            out = self._templates.render(self._options.request(chat.messages, chat.tools))
        except ChatTemplateError:
            return Recent(self, self, tuple(range(len(self._chat.messages))))
        short = Rendering(self._templates, chat, self._options, {**out, "generation_prompt": self.stub.decode()})
        return Recent(self, short, tuple(kept))

    def start_of(self, index: int) -> int | None:
        """Where the message `index`, or (one past the last) what follows them, begins; None: it cannot be found."""
        messages = self._chat.messages[:index]
        alone = self._render(messages) if messages else None
        if alone is not None and self.data.startswith(alone[0]):
            return len(alone[0])
        other = _stand_in(self._chat.messages[index]) if index < len(self._chat.messages) else _user("x")
        both = self._render((*messages, other))
        if both is None:
            return None
        n_common = common_bytes(self.data, both[0])
        if alone is not None:
            # how the message before was closed: what comes after its last part
            closing = alone[0][max((end for _, end in alone[1]), default=0) :]
            end = self._last_input_end(n_common)
            if closing and self.data.startswith(closing, end):
                return end + len(closing)
        return n_common or None

    def survives(self) -> tuple[int, ...]:
        """How much of the prompt is there when a reply and a question have followed, or a tool call and its result.

        Only what is less than all, up to the generation prompt, ascending.
        """
        followed: list[tuple[Message, ...]] = [({"role": "assistant", "content": "x"}, _user("y"))]
        if self._chat.tools:
            name = self._chat.tools[0]["function"]["name"]
            call = {"id": "call00000", "type": "function", "function": {"name": name, "arguments": "{}"}}
            result = {"role": "tool", "tool_call_id": "call00000", "name": name, "content": "y"}
            followed.append(({"role": "assistant", "content": "", "tool_calls": [call]}, result))
        found = set()
        for messages in followed:
            later = self._render((*self._chat.messages, *messages))
            if later is not None:
                found.add(common_bytes(self.data, later[0]))
        return tuple(sorted(each for each in found if each < self.generation_start))

    def _last_input_end(self, limit: int) -> int:
        found = bisect_right(self._input_ends, limit)
        return self._input_ends[found - 1] if found else 0

    def _render(self, messages: Sequence[Message]) -> tuple[bytes, Ranges] | None:
        try:
            out = self._templates.render(self._options.request(tuple(messages), self._chat.tools, generates=False))
        except ChatTemplateError:
            return None  # templates refuse conversations that they think cannot be
        return out["prompt"].encode(), input_ranges(out["parts"])

    # -- without rendering --

    def rough_starts(self) -> list[int]:
        """Where each message begins, by looking for its texts in order; as near as the ends of other parts are."""
        found: list[int | None] = []
        cursor = 0
        for message in self._chat.messages:
            place = self._find(_texts(message), cursor)
            if place is None:
                found.append(None)
                continue
            found.append(self._last_input_end(place[0]) if cursor else 0)
            cursor = place[1]
        starts: list[int] = []
        following = self.generation_start
        for start in reversed(found):
            following = min(following, start) if start is not None else following
            starts.append(following)
        return starts[::-1]

    def end_of(self, mark: CacheMark, start: int) -> int | None:
        """Where the marked part of a message, or the marked tool, ends; `start` is where to look from."""
        if mark.is_tool:
            names = [json.dumps(self._chat.tools[mark.index]["function"]["name"])[1:-1]]
            place = self._find(names, 0)
            return None if place is None else self._end_of_input(place[0])
        message = self._chat.messages[mark.index]
        cursor, end = start, None
        for part in message["content"][: (mark.part or 0) + 1]:
            place = self._find([part["text"]], cursor)
            if place is not None:
                cursor = end = place[1]
        return end

    def _find(self, texts: Sequence[str], cursor: int) -> tuple[int, int] | None:
        """The first of `texts` that occurs in a part from the request, from `cursor` on."""
        for text in texts:
            data = text.strip().encode()
            at = self.data.find(data, cursor) if data else -1
            while at >= 0:
                if self._is_input(at):
                    return at, at + len(data)
                at = self.data.find(data, at + 1)
        return None

    def _is_input(self, offset: int) -> bool:
        index = bisect_right(self._input_ends, offset)
        return index < len(self.inputs) and self.inputs[index][0] <= offset

    def _end_of_input(self, offset: int) -> int | None:
        index = bisect_right(self._input_ends, offset)
        return self._input_ends[index] if index < len(self._input_ends) else None


class Recent:
    """Places near the end of a prompt, found in a shorter one. Equal ends are what carries them over."""

    def __init__(self, whole: Rendering, short: Rendering, kept: tuple[int, ...]) -> None:
        self._whole = whole
        self._short = short
        self._position_of = {index: position for position, index in enumerate(kept)}
        self._n_alike = len(whole.data) if whole is short else _common_end(whole.data, short.data)

    def start_of(self, index: int) -> int | None:
        """As `Rendering.start_of`; None also for what is not among the last messages."""
        position = self._position_of.get(index)
        start = None if position is None else self._short.start_of(position)
        return None if start is None else self._carried(start)

    def survives(self) -> tuple[int, ...]:
        """As `Rendering.survives`, which is asked where the end of the prompt does not say it."""
        found = [self._carried(each) for each in self._short.survives()]
        if None in found:
            return self._whole.survives()
        return tuple(each for each in found if each is not None)

    def _carried(self, offset: int) -> int | None:
        from_end = len(self._short.data) - offset
        return len(self._whole.data) - from_end if from_end <= self._n_alike else None


def header_length(messages: Sequence[Message]) -> int:
    """How many messages at the front are the header's."""
    n = 0
    while n < len(messages) and messages[n]["role"] in ("system", "developer"):
        n += 1
    return n


N_RECENT = 8


def _recent_indices(messages: Sequence[Message]) -> list[int]:
    """Header, last question, and the last messages from a reply on."""
    n_header = header_length(messages)
    questions = [index for index, message in enumerate(messages) if message["role"] == "user"]
    first = max(0, len(messages) - N_RECENT)
    while first > 0 and messages[first]["role"] == "tool":
        first -= 1
    question = questions[-1:] if questions and questions[-1] < first else []
    return sorted({*range(n_header), *question, *range(first, len(messages))})


def _common_end(a: bytes, b: bytes) -> int:
    n_bytes, n = min(len(a), len(b)), 0
    step = _BLOCK
    while step and n < n_bytes:
        if n + step <= n_bytes and a[len(a) - n - step : len(a) - n] == b[len(b) - n - step : len(b) - n]:
            n += step
        else:
            step //= 2
    return n


def _texts(message: Message) -> list[str]:
    """What of a message a template writes as it is, the surest first."""
    texts = [part["text"] for part in message["content"]] if isinstance(message["content"], list) else []
    texts = [text_of(message), *texts, message.get("reasoning_content", "")]
    for call in message.get("tool_calls", ()):
        texts += [call["function"]["name"], call["function"]["arguments"]]
    return [text for text in texts if text.strip()]


def _stand_in(message: Message) -> Message:
    """A user's message that differs from this one at its first character."""
    return _user("y" if text_of(message).lstrip().startswith("x") else "x")


def _user(text: str) -> Message:
    return {"role": "user", "content": text}
