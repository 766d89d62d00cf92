"""Where in messages and tools a byte of a prompt comes from.

Two ways to know: a canonical serialisation, in the order in which templates write (tools, then messages, field by
field), and the outline of a rendered chat. A path names fields by OpenAI's words only: what callers name themselves,
such as a tool's parameters, is counted, for it is text of theirs.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ..chat.messages import as_dict
from ..errors import InvalidRequestError

if TYPE_CHECKING:
    from ..request import Outline

_ROLES = frozenset(("system", "developer", "user", "assistant", "tool"))
_MESSAGE_FIELDS = ("name", "reasoning_content", "reasoning", "content", "refusal", "tool_calls", "tool_call_id")
"""In the order in which templates write them. Others are not for the model."""
_FIELD_WORDS = (
    "content",
    "enum",
    "id",
    "name",
    "reasoning",
    "reasoning_content",
    "refusal",
    "role",
    "text",
    "tool_call_id",
)
_TOOL_WORDS = ("arguments", "description", "function", "input_schema", "parameters", "strict", "tool_calls", "type")
_SCHEMA_WORDS = ("additionalProperties", "anyOf", "default", "format", "items", "oneOf", "properties", "required")
_WORDS = frozenset((*_FIELD_WORDS, *_TOOL_WORDS, *_SCHEMA_WORDS, "title"))
TEMPLATE = "template"
"""Path of what no message and no tool says."""


@dataclass(frozen=True, slots=True)
class Place:
    """A field of a request. `path` is "messages[3].content", "tools[2].function.description", "template" or ""."""

    path: str = ""
    message: int | None = None
    role: str | None = None
    tool: int | None = None

    @property
    def is_header(self) -> bool:
        """Before the conversation."""
        return self.tool is not None or self.role in ("system", "developer")

    def whole(self) -> Place:
        """The message or tool that the field is of."""
        if self.message is not None:
            return replace(self, path=f"messages[{self.message}]")
        return self if self.tool is None else replace(self, path=f"tools[{self.tool}]")

    def __str__(self) -> str:
        if self.path == TEMPLATE and self.message is not None:
            return f"what the template writes for messages[{self.message}] ({self.role})"
        return f"{self.path} ({self.role})" if self.role is not None else self.path


@dataclass(frozen=True, slots=True)
class Leaf:
    """A text, number or flag of a message or tool."""

    place: Place
    text: str = field(repr=False)
    key: str = field(default="", repr=False)
    """The caller's own word for it, where the prompt says it."""


def message_leaves(message: Mapping[str, Any], index: int) -> Iterator[Leaf]:
    """Its role, and then what a template writes of it."""
    role = message.get("role")
    known = role if role in _ROLES else "other"
    start = f"messages[{index}]"
    yield Leaf(Place(f"{start}.role", index, known), str(role))
    for name in _MESSAGE_FIELDS:
        value = message.get(name)
        if value is not None:
            for path, _, text in _walk(value, f"{start}.{name}"):
                yield Leaf(Place(path, index, known), text)


def tool_leaves(tool: Mapping[str, Any], index: int) -> Iterator[Leaf]:
    """All of it, in the order given."""
    for path, key, text in _walk(tool, f"tools[{index}]"):
        yield Leaf(Place(path, tool=index), text, key)


def _walk(value: Any, path: str, key: str = "") -> Iterator[tuple[str, str, str]]:
    if isinstance(value, Mapping):
        if not value:
            yield path, key, "{}"
        for n, (name, item) in enumerate(value.items()):
            yield from _walk(item, f"{path}.{name}" if name in _WORDS else f"{path}[{n}]", str(name))
    elif isinstance(value, (list, tuple)):
        if not value:
            yield path, key, "[]"
        for n, item in enumerate(value):
            yield from _walk(item, f"{path}[{n}]")
    else:
        yield path, key, value if isinstance(value, str) else json.dumps(value, default=repr)


# ---- a request as bytes ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Serialised:
    """Messages and tools as one sequence of leaves, each with a line break behind it."""

    leaves: tuple[Leaf, ...] = field(repr=False)
    messages: tuple[Mapping[str, Any], ...] = field(repr=False)
    tools: tuple[Mapping[str, Any], ...] = field(repr=False)

    @cached_property
    def pieces(self) -> list[bytes]:
        return [_written(leaf).encode(errors="replace") for leaf in self.leaves]

    @cached_property
    def items(self) -> list[tuple[Place, bytes]]:
        """Each tool and each message, and all it says."""
        found: dict[tuple[int | None, int | None], tuple[Place, list[bytes]]] = {}
        for leaf, piece in zip(self.leaves, self.pieces, strict=True):
            place = leaf.place
            found.setdefault((place.tool, place.message), (place.whole(), []))[1].append(piece)
        return [(place, b"".join(pieces)) for place, pieces in found.values()]


def _written(leaf: Leaf) -> str:
    return f"{leaf.key}: {leaf.text}\n" if leaf.key else f"{leaf.text}\n"


def serialise(messages: object, tools: object = None) -> Serialised:
    """Raises InvalidRequestError, which names the message or tool."""
    checked, checked_tools = _objects(messages, "messages"), _objects(tools or (), "tools")
    leaves = [leaf for index, tool in enumerate(checked_tools) for leaf in tool_leaves(tool, index)]
    leaves += [leaf for index, message in enumerate(checked) for leaf in message_leaves(message, index)]
    return Serialised(tuple(leaves), checked, checked_tools)


def _objects(value: object, name: str) -> tuple[Mapping[str, Any], ...]:
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Sequence):
        raise InvalidRequestError(name, f"expected a list of objects, got {type(value).__name__}")
    return tuple(as_dict(each, f"{name}[{index}]") for index, each in enumerate(value))


# ---- a rendered chat -------------------------------------------------------------------------------------------


def locate(outline: Outline, data: bytes, offset: int) -> Place:
    """What of a rendered chat the byte at `offset` of its text comes from."""
    if not outline.messages or offset >= outline.generation_start:
        return Place(TEMPLATE)
    if offset < outline.header_end:
        return _in_header(outline, data, offset)
    index = min(max(0, bisect_right(outline.starts, offset) - 1), len(outline.messages) - 1)
    role = outline.messages[index].get("role")
    known = role if role in _ROLES else "other"
    found = _leaf_at(message_leaves(outline.messages[index], index), data, offset, outline.starts[index])
    if found is not None:
        return found
    return Place(f"messages[{index}]" if _is_input(outline.inputs, offset) else TEMPLATE, index, known)


def _in_header(outline: Outline, data: bytes, offset: int) -> Place:
    candidates = [leaf for n, each in enumerate(outline.messages) for leaf in message_leaves(each, n)]
    tool = _tool_before(outline, data, offset)
    if tool is not None:
        candidates += tool_leaves(outline.tools[tool], tool)
    found = _leaf_at([leaf for leaf in candidates if leaf.place.is_header], data, offset, 0)
    if found is not None:
        return found
    return Place(TEMPLATE) if tool is None else Place(f"tools[{tool}]", tool=tool)


def _tool_before(outline: Outline, data: bytes, offset: int) -> int | None:
    """The last one whose name begins at or before `offset`."""
    cursor, found = 0, None
    for index, tool in enumerate(outline.tools):
        name = json.dumps(tool.get("function", tool).get("name", ""), ensure_ascii=False).encode(errors="replace")
        at = data.find(name, cursor, outline.header_end)
        at = data.find(name[1:-1], cursor, outline.header_end) if at < 0 else at
        if not 0 <= at <= offset:
            break
        cursor, found = at + len(name), index
    return found


def _is_input(inputs: Sequence[tuple[int, int]], offset: int) -> bool:
    at = bisect_right(inputs, (offset, 1 << 62)) - 1
    return at >= 0 and inputs[at][0] <= offset < inputs[at][1]


def _leaf_at(leaves: Iterable[Leaf], data: bytes, offset: int, start: int) -> Place | None:
    """The leaf whose text the offset lies in; of several, the longest.

    Templates write texts as they are, or as JSON. A text may stand at several places, so each is looked at.
    """
    best: tuple[int, Place] | None = None
    for leaf in leaves:
        if leaf.place.path.endswith(".role"):
            continue
        for written in {
            leaf.text.strip(),
            json.dumps(leaf.text)[1:-1],
            json.dumps(leaf.text, ensure_ascii=False)[1:-1],
        }:
            text = written.encode(errors="replace")
            if not text or (best is not None and len(text) <= best[0]):
                continue
            at = data.find(text, max(start, offset - len(text) + 1), offset + len(text))
            if 0 <= at <= offset:
                best = (len(text), leaf.place)
    return None if best is None else best[1]
