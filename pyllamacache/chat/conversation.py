"""`Conversation`: a history that only grows, so that each turn prefills what is new.

What is stable comes first (tools, system) and stays as it is; what changes all the time, such as a clock, goes to the
end of the newest message and stays in the history, where it was.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from ..errors import (
    CacheCorruptError,
    CacheFileError,
    CacheMismatchError,
    ChatTemplateError,
    ConversationError,
    InvalidRequestError,
)
from ..store.atomic import open_regular, replace_file
from .messages import check_chat
from .options import NAMES, TEMPLATE_NAMES, check_names, request_options

if TYPE_CHECKING:
    from ..request import RenderedChat, ReusePlan
    from .shapes import ChatChunk, ChatCompletion, ChatMessage

FORMAT = 1
_MARK = "pyllamacache_conversation"
_FIXED = ("tools", "now_s", "namespace", "cache_salt")
"""With another value of these, nothing of the conversation would be found again."""


class Engine(Protocol):
    """What a conversation needs of an engine."""

    @property
    def chat(self) -> Callable[..., Any]: ...
    @property
    def render(self) -> Callable[..., RenderedChat]: ...
    @property
    def plan(self) -> Callable[..., ReusePlan]: ...


@dataclass(frozen=True, slots=True)
class Compaction:
    """What a shorter history costs: one prefill, once."""

    n_messages_before: int
    n_messages_after: int
    tokens_before: int
    """Of the next prompt, as `Conversation.plan` renders it."""
    tokens_after: int
    prefill_tokens: int
    """Of the next request; where it asks a question that is not in the history yet, without that question."""
    expected_s: float
    """As in `ReusePlan`."""
    before: Conversation = field(repr=False)
    """The old branch, which can be gone on with; its cells are given up no sooner than others as old."""


class ConversationStream:
    """The chunks of a reply. Closing it, or letting go of it, cancels what is to come; then nothing is appended."""

    def __init__(self, chunks: Iterator[ChatChunk], keep: Callable[[ChatMessage], None]) -> None:
        self._chunks = chunks
        self._keep = keep
        self.is_open = True

    def __iter__(self) -> ConversationStream:
        return self

    def __next__(self) -> ChatChunk:
        try:
            chunk = next(self._chunks)
        except BaseException:
            self.is_open = False
            raise
        if chunk.completion is not None and self.is_open:
            self.is_open = False
            self._keep(chunk.completion.message)
        return chunk

    def close(self) -> None:
        """Repeatable."""
        self.is_open = False
        close = getattr(self._chunks, "close", None)
        if close is not None:
            close()


class Conversation:
    """Messages over one engine. Not for several threads at once.

    Args:
        engine: an `Engine`.
        options: of every request, as in `ChatOptions`; those of `send` come on top. `now_s` is the time of making
            unless given: templates that write a date write the same one tomorrow.
    Raises:
        InvalidRequestError, UnknownOptionError.
    """

    def __init__(
        self, engine: Engine, *, system: str | None = None, tools: Sequence[Any] | None = None, **options: Any
    ) -> None:
        check_names(options, NAMES)
        check_chat([{"role": "user", "content": ""}], tools)
        self._engine = engine
        self._tools = copy.deepcopy(list(tools)) if tools else []
        self._options = {name: copy.deepcopy(value) for name, value in options.items() if value is not None}
        self._options.setdefault("now_s", int(time.time()))
        self._messages: list[dict[str, Any]] = []
        self._stream: weakref.ref[ConversationStream] | None = None
        if system is not None:
            self._append({"role": "system", "content": system})

    # -- history --

    @property
    def messages(self) -> tuple[dict[str, Any], ...]:
        """Copies, in OpenAI's shape."""
        return tuple(copy.deepcopy(self._messages))

    @property
    def system(self) -> str | None:
        """Change it with `replace_head`."""
        first = self._messages[0] if self._messages else None
        return first["content"] if first is not None and first["role"] == "system" else None

    @property
    def tools(self) -> tuple[Any, ...]:
        """Copies. Change them with `replace_head`."""
        return tuple(copy.deepcopy(self._tools))

    def user(self, text: str, *, volatile: str | None = None) -> Conversation:
        """Add a question. `volatile` is put behind it, and stays there: what was sent is not rewritten.

        Raises:
            ConversationError: calls are open, or a reply is being streamed.
            InvalidRequestError: no text.
        """
        self._require_no_open_calls("ask")
        for name, value in (("text", text), ("volatile", "" if volatile is None else volatile)):
            if not isinstance(value, str):
                raise InvalidRequestError(name, f"expected a text, got {type(value).__name__}")
        self._append({"role": "user", "content": text if volatile is None else f"{text}\n\n{volatile}"})
        return self

    def tool(self, tool_call_id: str, content: str, name: str | None = None) -> Conversation:
        """Add the result of a call; `name` is that of the function called, unless given.

        Raises:
            ConversationError: no such call is open.
        """
        opened = _open_calls(self._messages)
        if tool_call_id not in opened:
            raise ConversationError(f"no open call has this id; open are {len(opened)}{_listed(opened)}")
        called = opened[tool_call_id] if name is None else name
        self._append({"role": "tool", "tool_call_id": tool_call_id, "name": called, "content": content})
        return self

    def _append(self, message: dict[str, Any]) -> None:
        self._require_no_stream()
        check_chat([message])
        self._messages.append(message)

    def _keep_reply(self, message: ChatMessage) -> None:
        reply = message.to_dict()
        with suppress(InvalidRequestError):  # cut off inside a call, it could not be sent back
            check_chat([reply])
            self._messages.append(reply)

    def _require_no_open_calls(self, what: str) -> None:
        opened = _open_calls(self._messages)
        if opened:
            told = f"{len(opened)} tool calls have no result yet{_listed(opened)}"
            raise ConversationError(f"{told}; give them with tool() to {what}")

    def _require_no_stream(self) -> None:
        stream = None if self._stream is None else self._stream()
        if stream is not None and stream.is_open:
            raise ConversationError("a reply is being streamed; read it to its end, or close it")

    # -- requests --

    def send(self, **options: Any) -> ChatCompletion:
        """Answer what was added; the reply is appended.

        It is not where there is none (`max_tokens=0`), or where it was cut off inside a tool call.

        Raises:
            ConversationError: there is nothing to answer, calls are open, or an option would change the head.
            What `Engine.chat` does.
        """
        given = self._to_send(options)
        answer: ChatCompletion = self._engine.chat(copy.deepcopy(self._messages), **given)
        if _wants_reply(given):
            self._keep_reply(answer.message)
        return answer

    def ask(self, text: str, *, volatile: str | None = None, **options: Any) -> ChatCompletion:
        """`user` and `send`; a question that could not be sent is taken back."""
        n_before = len(self._messages)
        self.user(text, volatile=volatile)
        try:
            return self.send(**options)
        except BaseException:
            del self._messages[n_before:]
            raise

    def stream(self, **options: Any) -> ConversationStream:
        """`send`, with chunks: sent at once, and the reply is appended when its last chunk has come."""
        given = self._to_send(options)
        chunks: Iterator[ChatChunk] = self._engine.chat(copy.deepcopy(self._messages), stream=True, **given)
        stream = ConversationStream(chunks, self._keep_reply if _wants_reply(given) else _keep_nothing)
        self._stream = weakref.ref(stream)
        return stream

    def plan(self) -> ReusePlan:
        """What the next request would reuse. A question, or results, that have to come before it count as empty.

        Raises what `Engine.plan` does.
        """
        options = request_options(self._options)
        return self._engine.plan(self._render(self._options), **options)

    def _to_send(self, options: Mapping[str, Any]) -> dict[str, Any]:
        self._require_no_stream()
        self._require_no_open_calls("send")
        if not self._messages or self._messages[-1]["role"] not in ("user", "tool"):
            raise ConversationError("there is nothing to answer; add a question with user()")
        if "stream" in options:
            raise InvalidRequestError("stream", "use stream() in place of send()")
        check_names(options, NAMES)
        for name in _FIXED:
            if options.get(name) not in (None, self._tools if name == "tools" else self._options.get(name)):
                raise ConversationError(f"{name} stays what it was made with, or all of it would be prefilled again")
        merged = {**self._options, **{name: value for name, value in options.items() if name not in _FIXED}}
        changed = [name for name in sorted(TEMPLATE_NAMES) if merged.get(name) != self._options.get(name)]
        if changed and _head(self._render(merged)) != _head(self._render(self._options)):
            raise ConversationError(f"{', '.join(changed)} would change the head; give it to all requests or to none")
        return {**merged, "tools": copy.deepcopy(self._tools) or None}

    def _render(self, options: Mapping[str, Any]) -> RenderedChat:
        choices = {name: value for name, value in options.items() if name in TEMPLATE_NAMES}
        missing: list[dict[str, Any]] = [
            {"role": "tool", "tool_call_id": call_id, "name": name, "content": ""}
            for call_id, name in _open_calls(self._messages).items()
        ]
        if not missing and (not self._messages or self._messages[-1]["role"] not in ("user", "tool")):
            missing = [{"role": "user", "content": ""}]
        namespace = request_options(options).get("namespace", "")
        told = {**choices, "tools": self._tools or None, "namespace": namespace}
        return self._engine.render([*self._messages, *missing], **told)

    # -- branches --

    def fork(self) -> Conversation:
        """Another with the same history, which goes its own way. A reply that is being streamed is not in it."""
        other = Conversation(self._engine, tools=self._tools, **self._options)
        other._messages = copy.deepcopy(self._messages)
        return other

    def replace_head(
        self, *, system: str | None = None, tools: Sequence[Any] | None = None, allow_miss: bool = False
    ) -> None:
        """Change the system message or the tools (None: as they are), on which everything after them depends.

        Raises:
            ConversationError: what it would cost, unless `allow_miss` or nothing stands below the head yet.
        """
        self._require_no_stream()
        changed = self.fork()
        if tools is not None:
            check_chat([{"role": "user", "content": ""}], tools)
            changed._tools = copy.deepcopy(list(tools))
        if system is not None:
            head = {"role": "system", "content": system}
            check_chat([head])
            changed._messages = [head, *changed._messages[self._n_head :]]
        if (changed._messages, changed._tools) == (self._messages, self._tools):
            return
        if not allow_miss and len(self._messages) > self._n_head:
            cost, otherwise = changed.plan().prefill_tokens, self.plan().prefill_tokens
            told = f"a new head has {cost} tokens prefilled again, and {otherwise} without it"
            raise ConversationError(f"{told}; allow_miss=True does it anyway")
        self._messages, self._tools = changed._messages, changed._tools

    def plan_compaction(self, summary: str, *, keep_last: int = 2) -> Compaction:
        """What `compact` would cost. Changes nothing."""
        return self._compacted(summary, keep_last)[1]

    def compact(self, summary: str, *, keep_last: int = 2) -> Compaction:
        """Put a summary, as a question, in place of all messages but the head and the last ones.

        The cut is moved back to where no call is parted from its result, and, where the template refuses two questions
        in a row, to a reply.

        Raises:
            ConversationError: no message would go.
            What `plan` does.
        """
        self._require_no_stream()
        messages, report = self._compacted(summary, keep_last)
        self._messages = messages
        return report

    @property
    def _n_head(self) -> int:
        return 0 if self.system is None else 1

    def _compacted(self, summary: str, keep_last: int) -> tuple[list[dict[str, Any]], Compaction]:
        if isinstance(keep_last, bool) or not isinstance(keep_last, int) or keep_last < 0:
            raise ConversationError("keep_last: expected a number of messages, 0 or more")
        told = {"role": "user", "content": summary}
        check_chat([told])
        before, after = self.fork(), self.fork()
        cut = self._cut(len(self._messages) - keep_last)
        while True:
            if cut <= self._n_head:
                raise ConversationError("no message would go; keep fewer with keep_last")
            after._messages = [*before._messages[: self._n_head], told, *copy.deepcopy(before._messages[cut:])]
            try:
                plan = after.plan()
                break
            except ChatTemplateError:
                if cut == len(self._messages) or self._messages[cut]["role"] != "user":
                    raise
                cut = self._cut(cut - 1)
        report = Compaction(
            n_messages_before=len(self._messages),
            n_messages_after=len(after._messages),
            tokens_before=_n_tokens(before.plan()),
            tokens_after=_n_tokens(plan),
            prefill_tokens=plan.prefill_tokens,
            expected_s=plan.expected_s,
            before=before,
        )
        return after._messages, report

    def _cut(self, wanted: int) -> int:
        """The last place, not behind `wanted`, that parts no call from its result, given or still to come."""
        cut = wanted
        while cut > self._n_head and (
            _open_calls(self._messages[:cut]) or (cut < len(self._messages) and self._messages[cut]["role"] == "tool")
        ):
            cut -= 1
        return cut

    # -- files --

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write history, tools and options as JSON, mode 0600, in place of what was there.

        Raises:
            CacheFileError: the operating system refused; what was there stays.
            ConversationError: tools or an option are nothing that JSON can say.
        """
        body = {"messages": self._messages, "tools": self._tools, "options": self._options}
        try:
            told = {_MARK: FORMAT, "sha256": _digest(body), **body}
            data = json.dumps(told, ensure_ascii=False, allow_nan=False).encode()
        except (TypeError, ValueError, RecursionError):
            raise ConversationError("tools or options hold something that JSON cannot say") from None
        where = os.fspath(path)
        try:
            replace_file(where, [data])
        except OSError as error:
            raise CacheFileError(where, "write", error.strerror or type(error).__name__) from None

    @classmethod
    def load(cls, path: str | os.PathLike[str], engine: Engine) -> Conversation:
        """What `save` wrote, over any engine.

        Raises:
            CacheFileError: the operating system refused.
            CacheMismatchError: another version of this library wrote it.
            CacheCorruptError: it is damaged, or `save` did not write it.
        """
        where = os.fspath(path)
        body = _read(where)
        messages, tools, options = body["messages"], body["tools"], body["options"]
        if not (isinstance(messages, list) and isinstance(tools, list) and isinstance(options, dict)):
            raise CacheCorruptError(where, "messages, tools or options are missing")
        try:
            if messages:
                check_chat(messages)
            check_names(options, NAMES)
            made = cls(engine, **{**options, "tools": tools})
        except InvalidRequestError as error:
            raise CacheCorruptError(where, str(error)) from None
        made._messages = messages
        return made

    def __repr__(self) -> str:
        return f"<Conversation {len(self._messages)} messages, {len(self._tools)} tools>"


def _open_calls(messages: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Names of functions that were called and have no result, by id."""
    opened: dict[str, str] = {}
    for message in messages:
        for call in message.get("tool_calls", ()):
            opened[call.get("id", "")] = call["function"]["name"]
        if message["role"] == "tool":
            opened.pop(message.get("tool_call_id", ""), None)
    return opened


def _listed(ids: Mapping[str, str]) -> str:
    return f": {', '.join(ids)}" if ids else ""


def _wants_reply(options: Mapping[str, Any]) -> bool:
    return all(options.get(name) != 0 for name in ("max_tokens", "max_completion_tokens"))


def _keep_nothing(message: ChatMessage) -> None:
    """For a request that was to generate nothing."""


def _head(prompt: RenderedChat) -> bytes:
    return prompt.text.encode()[: prompt.outline.header_end]


def _n_tokens(plan: ReusePlan) -> int:
    return plan.resumable_tokens + plan.prefill_tokens


def _digest(body: Mapping[str, object]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True, allow_nan=False).encode()).hexdigest()


def _read(where: str) -> dict[str, Any]:
    """The checked content of a file."""
    try:
        with os.fdopen(open_regular(where), "rb") as file:
            data = file.read()
    except OSError as error:
        raise CacheFileError(where, "read", error.strerror or type(error).__name__) from None
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        raise CacheCorruptError(where, "it is not JSON") from None
    version = found.get(_MARK) if isinstance(found, dict) else None
    if isinstance(version, bool) or not isinstance(version, int):
        raise CacheCorruptError(where, "it is no conversation")
    if version != FORMAT:
        raise CacheMismatchError(where, "format", FORMAT, version)
    body = {name: found.get(name) for name in ("messages", "tools", "options")}
    try:
        is_sound = found.get("sha256") == _digest(body)
    except (ValueError, RecursionError):
        is_sound = False
    if not is_sound:
        raise CacheCorruptError(where, "its checksum does not fit")
    return body
