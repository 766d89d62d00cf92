"""Chat requests over anything that takes prompts: options in OpenAI's names, messages in, `ChatCompletion` out."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from ..errors import ChatTemplateError, InvalidRequestError
from .messages import check_chat
from .options import (
    NAMES,
    TEMPLATE_NAMES,
    check_names,
    includes_usage,
    request_options,
    template_options,
    wanted_function,
)
from .reply import ReplyReader, logprobs_of
from .shapes import ChatChunk, ChatCompletion, ChatUsage, Choice, ChunkChoice, CompletionTokensDetails, Delta

if TYPE_CHECKING:
    from ..request import Chunk, Completion, RenderedChat
    from .messages import ChatInput
    from .render import Renderer
    from .reply import TokenTexts
    from .template import ReplyParser, TemplateOptions


class Sent(Protocol):
    """A request on its way; `scheduler.Handle` is one."""

    def result(self) -> Completion: ...
    async def wait(self) -> Completion: ...
    def cancel(self) -> None: ...
    def __iter__(self) -> Iterator[Chunk]: ...
    def __aiter__(self) -> AsyncIterator[Chunk]: ...


Send = Callable[["RenderedChat", dict[str, Any]], Sent]
"""Prompt and options of `Engine.submit`."""


@dataclass(frozen=True, slots=True)
class _Prepared:
    chat: ChatInput
    prompt: RenderedChat
    parser: ReplyParser
    options: dict[str, Any]
    usage_chunk: bool


class ChatService:
    """Any thread. Keeps nothing of a request but what `Renderer` remembers."""

    def __init__(
        self,
        renderer: Renderer,
        texts: TokenTexts,
        *,
        model: str,
        matches_texts: bool,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._renderer = renderer
        self.texts = texts
        self.model = model
        self._matches_texts = matches_texts
        self.clock = clock

    def render(self, messages: object, choices: Mapping[str, Any], *, namespace: str = "") -> RenderedChat:
        """Raises InvalidRequestError, UnknownOptionError, ChatTemplateError."""
        check_names(choices, TEMPLATE_NAMES)
        chat = check_chat(messages, choices.get("tools"))
        options = template_options(choices, self.clock())
        return self._open(chat, options, choices, namespace, restores=self._matches_texts)[0]

    def complete(self, send: Send, messages: object, options: Mapping[str, Any]) -> ChatCompletion:
        prepared = self._prepare(messages, options)
        return self.finish(prepared, send(prepared.prompt, prepared.options).result())

    async def acomplete(self, send: Send, messages: object, options: Mapping[str, Any]) -> ChatCompletion:
        prepared = self._prepare(messages, options)
        return self.finish(prepared, await send(prepared.prompt, prepared.options).wait())

    def stream(self, send: Send, messages: object, options: Mapping[str, Any]) -> Iterator[ChatChunk]:
        """The request is sent at once; leaving the loop early cancels it."""
        prepared = self._prepare(messages, options)
        sent = send(prepared.prompt, prepared.options)
        return ChatStream(self._chunks(prepared, sent), sent)

    def astream(self, send: Send, messages: object, options: Mapping[str, Any]) -> AsyncIterator[ChatChunk]:
        prepared = self._prepare(messages, options)
        return self._achunks(prepared, send(prepared.prompt, prepared.options))

    # -- before --

    def _prepare(self, messages: object, options: Mapping[str, Any]) -> _Prepared:
        check_names(options, NAMES)
        chat = check_chat(messages, options.get("tools"))
        told = template_options(options, self.clock())
        request = request_options(options)
        namespace = request.get("namespace", "")
        restores = self._matches_texts and request.get("match_text", True) and request.get("cache_prompt", True)
        prompt, parser = self._open(chat, told, options, namespace, restores=bool(restores))
        return _Prepared(chat, prompt, parser, request, includes_usage(options))

    def _open(
        self,
        chat: ChatInput,
        options: TemplateOptions,
        choices: Mapping[str, Any],
        namespace: object,
        *,
        restores: bool,
    ) -> tuple[RenderedChat, ReplyParser]:
        only = wanted_function(choices)
        if only is not None and only not in [tool["function"]["name"] for tool in chat.tools]:
            raise InvalidRequestError("tool_choice", "names a function that is not among the tools")
        if options.tool_choice == "required" and not chat.tools:
            raise InvalidRequestError("tool_choice", "requires a call, and there are no tools")
        if not isinstance(namespace, str):
            raise InvalidRequestError("namespace", f"expected a text, got {type(namespace).__name__}")
        prompt, parser = self._renderer.open(chat, options, namespace=namespace, only=only, restores=restores)
        if options.tool_choice == "required" and prompt.constraint is None:
            raise ChatTemplateError("it has no tool calls, and tool_choice requires one")
        return prompt, parser

    # -- after --

    def finish(self, prepared: _Prepared, completion: Completion, reader: ReplyReader | None = None) -> ChatCompletion:
        """The answer, from a reader that has seen all of the text or (None) a new one."""
        if reader is None:
            reader = ReplyReader(prepared.parser)
            reader.feed(completion.text, is_last=completion.finish_reason == "stop")
        if completion.finish_reason == "stop" and prepared.options.get("store", True) and reader.is_readable:
            controls, end = self.texts.ranges(completion)
            namespace = prepared.options.get("namespace", "")
            self._renderer.remember(namespace, prepared.prompt, completion.text, reader.parsed, controls, end)
        message = reader.message
        reason: str = completion.finish_reason
        if reason == "stop" and message.tool_calls:
            reason = "tool_calls"
        thought = self.texts.n_tokens_of(completion, message.reasoning_content or "")
        return ChatCompletion(
            id=_new_id(),
            created=int(self.clock()),
            model=self.model,
            choices=(Choice(message, reason, logprobs_of(completion.logprobs, self.texts)),),
            usage=ChatUsage(completion.usage, CompletionTokensDetails(thought)),
            completion=completion,
        )

    def _chunks(self, prepared: _Prepared, sent: Sent) -> Generator[ChatChunk, None, None]:
        maker = _ChunkMaker(self, prepared)
        yield maker.first()
        for chunk in sent:
            yield from maker.take(chunk)
        yield from maker.last(sent.result())

    async def _achunks(self, prepared: _Prepared, sent: Sent) -> AsyncIterator[ChatChunk]:
        maker = _ChunkMaker(self, prepared)
        try:
            yield maker.first()
            async for chunk in sent:
                for made in maker.take(chunk):
                    yield made
            for made in maker.last(await sent.wait()):
                yield made
        finally:
            sent.cancel()


class ChatStream:
    """The chunks of one reply as they come. Closing it, or letting go of it, cancels what is still to come."""

    def __init__(self, chunks: Generator[ChatChunk, None, None], sent: Sent) -> None:
        self._sent = sent
        self._chunks = chunks

    def __iter__(self) -> ChatStream:
        return self

    def __next__(self) -> ChatChunk:
        return next(self._chunks)

    def close(self) -> None:
        """Cancel the request; repeatable."""
        self._sent.cancel()
        self._chunks.close()

    def __del__(self) -> None:
        # a generator that has not come to the reply yet would not cancel it
        if hasattr(self, "_chunks"):
            self._sent.cancel()


class _ChunkMaker:
    """From chunks of text to those of a chat. The end of a reply is read as a whole, so its chunk comes last."""

    def __init__(self, service: ChatService, prepared: _Prepared) -> None:
        self._service = service
        self._prepared = prepared
        self._reader = ReplyReader(prepared.parser)
        self._id = _new_id()
        self._created = int(service.clock())

    def first(self) -> ChatChunk:
        return self._chunk(Delta(role="assistant", content=""))

    def take(self, chunk: Chunk) -> Iterator[ChatChunk]:
        is_last = chunk.finish_reason == "stop"
        deltas = self._reader.feed(chunk.text, is_last=is_last) if chunk.text or is_last else []
        logprobs = logprobs_of(chunk.logprobs or None, self._service.texts)
        for delta in deltas or ([Delta()] if logprobs else []):
            yield self._chunk(delta, logprobs=logprobs)
            logprobs = None

    def last(self, completion: Completion) -> Iterator[ChatChunk]:
        answer = self._service.finish(self._prepared, completion, self._reader)
        answer = _renamed(answer, self._id, self._created)
        choice = ChunkChoice(Delta(), answer.choices[0].finish_reason)
        asked = self._prepared.usage_chunk
        yield ChatChunk(self._id, self._created, answer.model, (choice,), completion=None if asked else answer)
        if asked:
            yield ChatChunk(self._id, self._created, answer.model, (), answer.usage, answer)

    def _chunk(self, delta: Delta, logprobs: dict[str, Any] | None = None) -> ChatChunk:
        choice = ChunkChoice(delta, logprobs=logprobs)
        return ChatChunk(self._id, self._created, self._service.model, (choice,))


def _renamed(answer: ChatCompletion, new_id: str, created: int) -> ChatCompletion:
    return ChatCompletion(new_id, created, answer.model, answer.choices, answer.usage, answer.completion)


def _new_id() -> str:
    return f"chatcmpl-{secrets.token_hex(12)}"
