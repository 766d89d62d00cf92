"""From messages to a prompt with its boundaries. Safe to use from any thread."""

from __future__ import annotations

import hashlib
import json
import threading
from collections import OrderedDict, deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ..request import Outline, RenderedChat
from .history import Turns, turn_of
from .learned import Shapes, shape_of
from .places import N_RECENT, Rendering, common_bytes, header_length

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from .history import Turn
    from .messages import ChatInput, Message
    from .places import Ranges
    from .template import ReplyParser, TemplateOptions, Templates

MAX_KNOWN = 32
MAX_SEARCHED = 6
"""Messages whose beginning is found by rendering, for one request; each costs one or two short renderings."""


@dataclass(frozen=True, slots=True)
class _Known:
    """A prompt rendered before."""

    header: str
    messages: tuple[Message, ...]
    data: bytes
    generation_start: int
    starts: Mapping[int, int]


class Renderer:
    """Renders with one set of templates, and remembers what it found out about conversations that grow.

    What is remembered is bounded: `MAX_KNOWN` prompts, and the replies of `history.Turns`.
    """

    def __init__(self, templates: Templates) -> None:
        self._templates = templates
        self._known: deque[_Known] = deque(maxlen=MAX_KNOWN)
        self._headers: OrderedDict[str, bytes] = OrderedDict()
        self._shapes = Shapes()
        self._turns = Turns()
        self._lock = threading.Lock()

    def open(
        self,
        chat: ChatInput,
        options: TemplateOptions,
        *,
        namespace: str = "",
        only: str | None = None,
        restores: bool = True,
    ) -> tuple[RenderedChat, ReplyParser]:
        """A prompt, and what reads the reply to it.

        Args:
            only: the one tool that may be called; the prompt has all of them.
            restores: spell replies as they were generated.
        Raises:
            ChatTemplateError: the template refuses the messages or tools.
        """
        rendered, parser = self._templates.open(options.request(chat.messages, chat.tools))
        constraint = rendered["constraint"]
        if only is not None:
            tools = tuple(tool for tool in chat.tools if tool["function"]["name"] == only)
            narrow, parser = self._templates.open(options.request(chat.messages, tools))
            constraint = narrow["constraint"]
        found = Rendering(self._templates, chat, options, rendered)
        prompt = self._place(found, chat, options, namespace if restores else None)
        return replace(
            prompt,
            stops=tuple(rendered["stops"]),
            constraint=None if constraint is None else json.dumps(constraint),
        ), parser

    def remember(
        self, namespace: str, prompt: RenderedChat, text: str, message: Mapping[str, Any], controls: Ranges, end: bytes
    ) -> None:
        """Keep a reply for when it comes back. `controls`: as in `Turn`."""
        turn: Turn = turn_of(text, message, controls, end)
        with self._lock:
            self._turns.add(namespace, prompt.text.encode(), turn)

    def clear(self, namespace: str | None = None) -> None:
        """Forget what is kept of conversations; of a namespace, only its replies."""
        with self._lock:
            self._turns.clear(namespace)
            self._known.clear()
            if namespace is None:
                self._headers.clear()
                self._shapes.clear()

    # -- places --

    def _place(
        self, found: Rendering, chat: ChatInput, options: TemplateOptions, namespace: str | None
    ) -> RenderedChat:
        n_header = header_length(chat.messages)
        header_key = _key(options, chat.messages[:n_header], chat.tools)
        starts = self._starts_known(found, chat.messages, header_key)
        header_end = self._header_end(found, header_key, n_header)
        if n_header:
            starts.setdefault(n_header, header_end)
        marks = {header_end, found.generation_start}
        rough = found.rough_starts()
        recent = found.of_recent
        header = hashlib.blake2b(header_key.encode(), digest_size=16).digest()  # shapes outlive it, and are many
        shape = (header, *map(shape_of, chat.messages[-N_RECENT:]))
        survives: tuple[int, ...] = ()
        if not self._shapes.survive(shape):
            survives = recent().survives()
            self._shapes.learn_survival(shape, survives)
        searched = _worth_searching(chat.messages)
        marks.update(survives)
        for each in survives:
            searched.insert(0, max((i for i, start in enumerate(rough) if start <= each), default=0))
        searched = list(dict.fromkeys(searched))
        for index in [each for each in searched if each not in starts][:MAX_SEARCHED]:
            pair = (header, *map(shape_of, chat.messages[max(0, index - 1) : index + 1]))
            start = self._shapes.start(pair, found.data, rough[index])
            if start is None:
                start = recent().start_of(index)
                self._shapes.learn_start(pair, found.data, rough[index], start)
            if start is not None:
                starts[index] = start
        marks.update(starts[index] for index in searched[:3] if index in starts)
        marks.update(self._cache_marks(found, chat, starts, rough))
        self._keep(found, chat.messages, header_key, starts)
        return self._made(found, chat, namespace, starts, rough, header_end, marks)

    def _made(
        self,
        found: Rendering,
        chat: ChatInput,
        namespace: str | None,
        starts: dict[int, int],
        rough: Sequence[int],
        header_end: int,
        marks: set[int],
    ) -> RenderedChat:
        places = {**starts, len(chat.messages): found.generation_start}
        with self._lock:
            restored = (Turns(0) if namespace is None else self._turns).restore(
                namespace or "",
                found.data,
                found.inputs,
                found.data[found.generation_start :],
                chat.messages,
                places.get,
            )
        offset = restored.offset
        outline = Outline(
            starts=tuple(offset(starts.get(index, start)) for index, start in enumerate(rough)),
            header_end=offset(header_end),
            generation_start=offset(found.generation_start),
            inputs=restored.inputs,
            messages=chat.messages,
            tools=chat.tools,
        )
        text = restored.data.decode()
        inside = sorted(offset(mark) for mark in marks if mark)
        return RenderedChat(text, outline, tuple(sorted({offset(each) for each in starts.values()})), tuple(inside))

    def _starts_known(self, found: Rendering, messages: Sequence[Message], header: str) -> dict[int, int]:
        """What the earlier prompt that begins with most of the same messages knows, as far as both are alike."""
        with self._lock:
            known = [each for each in self._known if each.header == header]
        best = max(known, key=lambda each: _n_same(each.messages, messages), default=None)
        if best is None:
            return {}
        n_same = _n_same(best.messages, messages)
        n_common = common_bytes(found.data, best.data[: best.generation_start])
        starts = {index: start for index, start in best.starts.items() if index <= n_same and start <= n_common}
        if n_common == best.generation_start and n_same == len(best.messages) < len(messages):
            starts[n_same] = n_common
        return starts

    def _keep(self, found: Rendering, messages: Sequence[Message], header: str, starts: Mapping[int, int]) -> None:
        new = _Known(header, tuple(messages), found.data, found.generation_start, dict(starts))
        with self._lock:
            covered = [
                each
                for each in self._known
                if each.header == header and each.messages == new.messages[: len(each.messages)]
            ]
            for each in covered:
                self._known.remove(each)
            self._known.append(new)

    def _header_end(self, found: Rendering, key: str, n_header: int) -> int:
        with self._lock:
            header = self._headers.get(key)
        if header is None or not found.data.startswith(header):
            header = found.data[: found.start_of(n_header) or 0]
            with self._lock:
                self._headers[key] = header
                if len(self._headers) > MAX_KNOWN:
                    self._headers.popitem(last=False)
        return len(header)

    def _cache_marks(self, found: Rendering, chat: ChatInput, starts: dict[int, int], rough: Sequence[int]) -> set[int]:
        marks = set()
        n_left = MAX_SEARCHED  # the last ones; the others are taken as near as their texts tell
        for mark in reversed(chat.marks):
            if mark.is_tool or mark.part is not None:
                offset = found.end_of(mark, 0 if mark.is_tool else starts.get(mark.index, rough[mark.index]))
            elif mark.index + 1 == len(chat.messages):
                offset = found.generation_start
            else:
                offset = starts.get(mark.index + 1)
                if offset is None and n_left:
                    n_left -= 1
                    offset = found.start_of(mark.index + 1)
                    if offset is not None:
                        starts[mark.index + 1] = offset
                elif offset is None:
                    offset = rough[mark.index + 1]
            if offset is not None:
                marks.add(offset)
        return marks


def _n_same(a: Sequence[Message], b: Sequence[Message]) -> int:
    n = 0
    while n < min(len(a), len(b)) and a[n] == b[n]:
        n += 1
    return n


def _key(options: TemplateOptions, header: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> str:
    """What the beginning of a prompt depends on, the date included."""
    told = {
        "kwargs": options.template_kwargs,
        "thinks": options.enable_thinking,
        "day": options.now_s // 86400,
        "schema": options.json_schema,
        "choice": options.tool_choice,
        "parallel": options.parallel_tool_calls,
    }
    return json.dumps([told, list(header), list(tools)])


def _worth_searching(messages: Sequence[Message]) -> list[int]:
    """The last message, the last question, the last reply, then backwards."""
    last = len(messages) - 1
    questions = [index for index in range(last, -1, -1) if messages[index]["role"] == "user"]
    replies = [index for index in range(last, -1, -1) if messages[index]["role"] == "assistant"]
    return list(dict.fromkeys([last, *questions[:1], *replies[:1], *range(last, 0, -1)]))
