"""Messages and tools as callers send them, checked and brought into one form.

Taken: OpenAI's chat messages as dicts, and whatever has `to_dict` or `model_dump`, such as our own replies and those of
the `openai` package. What is None counts as absent. Errors name a path and never quote.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import InvalidRequestError

ROLES = ("system", "developer", "user", "assistant", "tool")
MARK_KEYS = ("cache_control", "prompt_cache_breakpoint")
MAX_CACHE_MARKS = 80
"""The most that a provider considers (OpenAI; Anthropic: 4)."""

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class CacheMark:
    """A place at which the caller wants a checkpoint: the end of a message, of one of its text parts, or of a tool."""

    index: int
    part: int | None = None
    is_tool: bool = False


@dataclass(frozen=True, slots=True)
class ChatInput:
    """One form of it: contents are texts, lists of text parts or None; arguments of tool calls are JSON texts."""

    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] = ()
    marks: tuple[CacheMark, ...] = ()


def check_chat(messages: object, tools: object = None) -> ChatInput:
    """Raises InvalidRequestError, which names the message and the field."""
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise InvalidRequestError("messages", f"expected a list of messages, got {type(messages).__name__}")
    if not messages:
        raise InvalidRequestError("messages", "there is none")
    marks: list[CacheMark] = []
    checked = tuple(_message(each, index, marks) for index, each in enumerate(messages))
    checked_tools = _tools(tools, marks)
    _check_json(checked, "messages")
    _check_json(checked_tools, "tools")
    if len(marks) > MAX_CACHE_MARKS:
        raise InvalidRequestError("messages", f"{len(marks)} cache marks; at most {MAX_CACHE_MARKS} are taken")
    return ChatInput(checked, checked_tools, tuple(marks))


def text_of(message: Mapping[str, Any]) -> str:
    """All text of a message's content, parts joined by a line break."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    return "\n".join(part["text"] for part in content or ())


def as_dict(value: object, path: str) -> dict[str, Any]:
    """A dict, or what has `to_dict` or `model_dump`; without what is None. Raises InvalidRequestError."""
    for method in ("to_dict", "model_dump"):
        make = getattr(value, method, None)
        if callable(make) and not isinstance(value, Mapping):
            value = make()
            break
    if not isinstance(value, Mapping):
        raise InvalidRequestError(path, f"expected an object, got {type(value).__name__}")
    return {key: item for key, item in value.items() if item is not None}


def _message(value: object, index: int, marks: list[CacheMark]) -> Message:
    path = f"messages[{index}]"
    given = as_dict(value, path)
    role = given.get("role")
    if role not in ROLES:
        raise InvalidRequestError(f"{path}.role", f"expected one of {', '.join(ROLES)}")
    message: Message = {"role": role, "content": _content(given.get("content"), index, marks)}
    calls = given.get("tool_calls")
    if calls:
        if role != "assistant":
            raise InvalidRequestError(f"{path}.tool_calls", "only an assistant calls tools")
        message["tool_calls"] = [_tool_call(call, f"{path}.tool_calls[{n}]") for n, call in enumerate(calls)]
    if message["content"] is None and not calls:
        if role != "assistant":
            raise InvalidRequestError(f"{path}.content", "is missing")
        message["content"] = ""
    for key in ("name", "tool_call_id"):
        if key in given:
            message[key] = _text(given[key], f"{path}.{key}")
    reasoning = given.get("reasoning_content", given.get("reasoning"))
    if reasoning:
        message["reasoning_content"] = _text(reasoning, f"{path}.reasoning_content")
    if _is_marked(given, path):
        marks.append(CacheMark(index))
    return message


def _content(content: object, index: int, marks: list[CacheMark]) -> str | list[dict[str, str]] | None:
    path = f"messages[{index}].content"
    if content is None or isinstance(content, str):
        return None if content is None else _text(content, path)
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise InvalidRequestError(path, f"expected a text or a list of parts, got {type(content).__name__}")
    parts = []
    for number, each in enumerate(content):
        where = f"{path}[{number}]"
        part = as_dict(each, where)
        if part.get("type") not in ("text", "input_text", "output_text"):
            raise InvalidRequestError(f"{where}.type", "only text parts are supported")
        parts.append({"type": "text", "text": _text(part.get("text"), f"{where}.text")})
        if _is_marked(part, where):
            marks.append(CacheMark(index, None if number == len(content) - 1 else number))
    return parts


def _tool_call(value: object, path: str) -> dict[str, Any]:
    call = as_dict(value, path)
    function = as_dict(call.get("function"), f"{path}.function")
    if call.get("type", "function") != "function":
        raise InvalidRequestError(f"{path}.type", "only function calls are supported")
    name = _text(function.get("name"), f"{path}.function.name")
    arguments = function.get("arguments", "{}")
    where = f"{path}.function.arguments"
    if isinstance(arguments, Mapping):
        arguments = json.dumps(arguments, ensure_ascii=False)
    text = _text(arguments, where) or "{}"
    try:
        json.loads(text)
    except (ValueError, RecursionError) as error:
        problem = f"not JSON at character {error.pos}" if isinstance(error, json.JSONDecodeError) else "not JSON"
        raise InvalidRequestError(where, problem) from None
    made: dict[str, Any] = {"type": "function", "function": {"name": name, "arguments": text}}
    if "id" in call:
        made["id"] = _text(call["id"], f"{path}.id")
    return made


def _tools(tools: object, marks: list[CacheMark]) -> tuple[dict[str, Any], ...]:
    if tools is None:
        return ()
    if isinstance(tools, (str, bytes, Mapping)) or not isinstance(tools, Sequence):
        raise InvalidRequestError("tools", f"expected a list of tools, got {type(tools).__name__}")
    made = []
    for index, each in enumerate(tools):
        path = f"tools[{index}]"
        tool = as_dict(each, path)
        if tool.get("type", "function") != "function":
            raise InvalidRequestError(f"{path}.type", "only functions are supported")
        function = as_dict(tool.get("function", tool), f"{path}.function")
        name = _text(function.get("name"), f"{path}.function.name")
        if not name:
            raise InvalidRequestError(f"{path}.function.name", "is empty")
        parameters = function.get("parameters", function.get("input_schema", {}))
        if not isinstance(parameters, Mapping):
            raise InvalidRequestError(f"{path}.function.parameters", "expected a JSON schema")
        description = _text(function.get("description", ""), f"{path}.function.description")
        made.append(
            {
                "type": "function",
                "function": {"name": name, "description": description, "parameters": dict(parameters)},
            }
        )
        if _is_marked(tool, path) or _is_marked(function, path):
            marks.append(CacheMark(index, is_tool=True))
    return tuple(made)


def _is_marked(value: Mapping[str, Any], path: str) -> bool:
    for key in MARK_KEYS:
        if key in value:
            mark = value[key]
            if mark is not True and not isinstance(mark, Mapping):
                raise InvalidRequestError(f"{path}.{key}", 'expected an object such as {"type": "ephemeral"}')
            return True
    return False


def _text(value: object, path: str) -> str:
    if not isinstance(value, str):
        raise InvalidRequestError(path, f"expected a text, got {type(value).__name__}")
    return value


def _check_json(value: object, field: str) -> None:
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError(field, f"not valid Unicode: {error.reason}") from None
    except RecursionError:
        raise InvalidRequestError(field, "nested too deep") from None
    except (TypeError, ValueError):
        raise InvalidRequestError(field, "holds something that JSON cannot say") from None
