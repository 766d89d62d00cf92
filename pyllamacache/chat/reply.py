"""A reply as it comes: text with control tokens in it, to a message with reasoning and tool calls."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ..errors import ChatTemplateError
from .shapes import ChatMessage, Delta, FunctionCall, ToolCall, ToolCallDelta

if TYPE_CHECKING:
    from ..request import Completion, TokenLogprob
    from .places import Ranges
    from .template import ReplyParser


class ReplyReader:
    """One reply. What its template's parser cannot read is content, as it was generated: no reply is lost for it."""

    def __init__(self, parser: ReplyParser) -> None:
        self._parser = parser
        self._text = ""
        self._content = ""
        self._reasoning = ""
        self._calls: list[dict[str, str]] = []
        self.is_readable = True
        """False once the parser gave up."""

    def feed(self, text: str, *, is_last: bool = False) -> list[Delta]:
        """What `text` brings."""
        self._text += text
        if not self.is_readable:
            return [self._add_content(text)] if text else []
        try:
            read = self._parser.feed(text, is_last=is_last)
        except ChatTemplateError:
            self.is_readable = False
            # what was read so far stands; where it was content alone, it is known how far that came
            is_prefix = not (self._reasoning or self._calls) and self._text.startswith(self._content)
            rest = self._text[len(self._content) :] if is_prefix else text
            return [self._add_content(rest)] if rest else []
        return [self._delta(each) for each in read["deltas"]]

    def _add_content(self, text: str) -> Delta:
        self._content += text
        return Delta(content=text)

    def _delta(self, given: dict[str, Any]) -> Delta:
        self._content += given["content"]
        self._reasoning += given["reasoning_content"]
        calls: tuple[ToolCallDelta, ...] = ()
        if call := given.get("tool_call"):
            calls = (self._call_delta(call),)
        return Delta(
            content=given["content"] or None, reasoning_content=given["reasoning_content"] or None, tool_calls=calls
        )

    def _call_delta(self, call: dict[str, Any]) -> ToolCallDelta:
        index = call["index"]
        while len(self._calls) <= index:
            self._calls.append({"id": "", "name": "", "arguments": ""})
        known = self._calls[index]
        is_new = not known["name"] and bool(call["name"])
        if call["name"]:
            known["name"] = call["name"]
            known["id"] = known["id"] or call["id"] or f"call_{secrets.token_hex(12)}"
        known["arguments"] += call["arguments"]
        return ToolCallDelta(
            index, known["id"] if is_new else None, call["name"] if is_new else None, call["arguments"]
        )

    @property
    def message(self) -> ChatMessage:
        """So far."""
        calls = tuple(
            ToolCall(each["id"], FunctionCall(each["name"], each["arguments"] or "{}"))
            for each in self._calls
            if each["name"]
        )
        has_content = bool(self._content) or not calls
        return ChatMessage(self._content if has_content else None, self._reasoning or None, calls or None)

    @property
    def parsed(self) -> dict[str, Any]:
        """The same in the parser's form."""
        return {
            "content": self._content,
            "reasoning_content": self._reasoning,
            "tool_calls": [{"name": each["name"], "arguments": each["arguments"]} for each in self._calls],
        }


class TokenTexts:
    """How tokens are written, control tokens included."""

    def __init__(self, piece: Callable[[int], bytes], control_text: Callable[[int], bytes]) -> None:
        self._piece = piece
        self._control_text = control_text

    def text(self, token: int) -> bytes:
        return self._piece(token) or self._control_text(token)

    def is_control(self, token: int) -> bool:
        return not self._piece(token)

    def ranges(self, completion: Completion) -> tuple[Ranges, bytes]:
        """Where in the reply's text control tokens are, in bytes, and how the one that ended it is written."""
        n_text = len(completion.text.encode())
        offset, found = 0, list[tuple[int, int]]()
        for token in completion.token_ids:
            data = self.text(token)
            if offset >= n_text:
                return tuple(found), data if self.is_control(token) else b""
            if self.is_control(token):
                found.append((offset, offset + len(data)))
            offset += len(data)
        return tuple(found), b""

    def n_tokens_of(self, completion: Completion, part: str) -> int:
        """Tokens of the reply that have a byte of `part`, which is a piece of its text."""
        start = completion.text.find(part) if part else -1
        if start < 0:
            return 0
        first = len(completion.text[:start].encode())
        last = first + len(part.encode())
        n_tokens = offset = 0
        for token in completion.token_ids:
            end = offset + len(self.text(token))
            n_tokens += offset < last and end > first
            offset = end
        return n_tokens


def logprobs_of(logprobs: Sequence[TokenLogprob] | None, texts: TokenTexts) -> dict[str, Any] | None:
    """OpenAI's `logprobs` of a choice."""
    if logprobs is None:
        return None

    def entry(token: int, logprob: float) -> dict[str, Any]:
        data = texts.text(token)
        return {"token": data.decode(errors="replace"), "logprob": logprob, "bytes": list(data)}

    content = [
        {**entry(each.token_id, each.logprob), "top_logprobs": [entry(*pair) for pair in each.top]} for each in logprobs
    ]
    return {"content": content, "refusal": None}
