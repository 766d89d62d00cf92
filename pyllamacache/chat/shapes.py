"""Replies in OpenAI's shape: `chat.completion` and `chat.completion.chunk`, with what this library has to say besides.

Attributes are those of the `openai` package's objects; `to_dict` gives the JSON that its models parse.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from . import usage as shapes_of_usage

if TYPE_CHECKING:
    from ..request import CacheReport, Completion, Timings, Usage


@dataclass(frozen=True, slots=True)
class FunctionCall:
    """What a tool call calls."""

    name: str
    arguments: str = field(repr=False)
    """JSON, as the model wrote it."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call the model asks for; its result goes back as a message of role "tool" with this id."""

    id: str
    function: FunctionCall
    type: str = "function"

    def to_dict(self) -> dict[str, Any]:
        function = {"name": self.function.name, "arguments": self.function.arguments}
        return {"id": self.id, "type": self.type, "function": function}


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """A reply. It can be appended to the messages of the next request as it is."""

    content: str | None = field(repr=False)
    reasoning_content: str | None = field(default=None, repr=False)
    tool_calls: tuple[ToolCall, ...] | None = None
    role: str = "assistant"

    def to_dict(self) -> dict[str, Any]:
        message: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.reasoning_content is not None:
            message["reasoning_content"] = self.reasoning_content
        if self.tool_calls:
            message["tool_calls"] = [call.to_dict() for call in self.tool_calls]
        return message


@dataclass(frozen=True, slots=True)
class Choice:
    """The one reply there is."""

    message: ChatMessage
    finish_reason: str
    """"stop", "length", "tool_calls", or "cancelled", which OpenAI does not have and `to_dict` calls "stop"."""
    logprobs: dict[str, Any] | None = field(default=None, repr=False)
    index: int = 0


@dataclass(frozen=True, slots=True)
class PromptTokensDetails:
    """Of the prompt: what was skipped, and what was newly stored."""

    cached_tokens: int
    cache_write_tokens: int


@dataclass(frozen=True, slots=True)
class CompletionTokensDetails:
    """Of the reply: tokens that wrote its reasoning."""

    reasoning_tokens: int


@dataclass(frozen=True, slots=True)
class ChatUsage:
    """Token counts. `raw` is the library's own value, from which every other shape is made."""

    raw: Usage
    completion_tokens_details: CompletionTokensDetails

    @property
    def prompt_tokens(self) -> int:
        return self.raw.prompt_tokens

    @property
    def completion_tokens(self) -> int:
        return self.raw.completion_tokens

    @property
    def total_tokens(self) -> int:
        return self.raw.total_tokens

    @property
    def prompt_tokens_details(self) -> PromptTokensDetails:
        return PromptTokensDetails(self.raw.cached_tokens, self.raw.cache_write_tokens)

    def to_dict(self) -> dict[str, Any]:
        """OpenAI's chat completions."""
        return shapes_of_usage.openai_chat(self.raw, reasoning_tokens=self._reasoning)

    def to_responses(self) -> dict[str, Any]:
        """OpenAI's responses."""
        return shapes_of_usage.openai_responses(self.raw, reasoning_tokens=self._reasoning)

    def to_anthropic(self) -> dict[str, Any]:
        """Anthropic's messages."""
        return shapes_of_usage.anthropic_messages(self.raw)

    def to_deepseek(self) -> dict[str, Any]:
        """DeepSeek's chat completions."""
        return shapes_of_usage.deepseek_chat(self.raw)

    @property
    def _reasoning(self) -> int:
        return self.completion_tokens_details.reasoning_tokens


@dataclass(frozen=True, slots=True)
class ChatCompletion:
    """The answer to a chat request. `completion` is what `Engine.complete` would have returned."""

    id: str
    created: int
    """Seconds since 1970."""
    model: str
    choices: tuple[Choice, ...]
    usage: ChatUsage
    completion: Completion = field(repr=False)
    object: str = "chat.completion"

    @property
    def message(self) -> ChatMessage:
        """That of the one choice there is."""
        return self.choices[0].message

    @property
    def text(self) -> str:
        """The content, "" if there is none."""
        return self.message.content or ""

    @property
    def cache(self) -> CacheReport:
        """What was reused, from where, and why not more."""
        return self.completion.cache

    @property
    def timings(self) -> Timings:
        return self.completion.timings

    def _repr_html_(self) -> str:
        return self.completion._repr_html_()

    def to_dict(self) -> dict[str, Any]:
        """The JSON of OpenAI's API."""
        return {
            "id": self.id,
            "object": self.object,
            "created": self.created,
            "model": self.model,
            "choices": [
                {
                    "index": choice.index,
                    "message": choice.message.to_dict(),
                    "finish_reason": _known_reason(choice.finish_reason),
                    "logprobs": choice.logprobs,
                }
                for choice in self.choices
            ],
            "usage": self.usage.to_dict(),
        }


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A piece of a call: `id` and `name` come with the first one."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = field(default="", repr=False)

    def to_dict(self) -> dict[str, Any]:
        function: dict[str, Any] = {"arguments": self.arguments}
        call: dict[str, Any] = {"index": self.index, "function": function}
        if self.name is not None:
            function["name"] = self.name
        if self.id is not None:
            call |= {"id": self.id, "type": "function"}
        return call


@dataclass(frozen=True, slots=True)
class Delta:
    """What a chunk adds to the message."""

    role: str | None = None
    content: str | None = field(default=None, repr=False)
    reasoning_content: str | None = field(default=None, repr=False)
    tool_calls: tuple[ToolCallDelta, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        fields = {"role": self.role, "content": self.content, "reasoning_content": self.reasoning_content}
        delta: dict[str, Any] = {name: value for name, value in fields.items() if value is not None}
        if self.tool_calls:
            delta["tool_calls"] = [call.to_dict() for call in self.tool_calls]
        return delta


@dataclass(frozen=True, slots=True)
class ChunkChoice:
    """What a chunk has of the one reply."""

    delta: Delta
    finish_reason: str | None = None
    logprobs: dict[str, Any] | None = field(default=None, repr=False)
    index: int = 0


@dataclass(frozen=True, slots=True)
class ChatChunk:
    """A piece of a streamed reply. The last one carries `completion`, the whole answer."""

    id: str
    created: int
    model: str
    choices: tuple[ChunkChoice, ...]
    usage: ChatUsage | None = None
    completion: ChatCompletion | None = field(default=None, repr=False)
    object: str = "chat.completion.chunk"

    @property
    def text(self) -> str:
        """The content it adds, possibly ""."""
        return (self.choices[0].delta.content or "") if self.choices else ""

    def to_dict(self) -> dict[str, Any]:
        """The JSON of OpenAI's API."""
        chunk: dict[str, Any] = {
            "id": self.id,
            "object": self.object,
            "created": self.created,
            "model": self.model,
            "choices": [
                {
                    "index": choice.index,
                    "delta": choice.delta.to_dict(),
                    "finish_reason": None if choice.finish_reason is None else _known_reason(choice.finish_reason),
                    "logprobs": choice.logprobs,
                }
                for choice in self.choices
            ],
        }
        if self.usage is not None:
            chunk["usage"] = self.usage.to_dict()
        return chunk


def _known_reason(reason: str) -> str:
    return "stop" if reason == "cancelled" else reason
