"""`Conversation`: a history that only grows, so that each turn prefills what is new.

What is stable comes first (tools, system) and stays as it is; what changes all the time, such as a clock, goes to the
end of the newest message and stays in the history, where it was.
"""

from __future__ import annotations

import copy
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from ..errors import CacheCorruptError, CacheFileError, ConversationError
from .messages import check_chat
from .options import TemplateChoices

if TYPE_CHECKING:
    from ..request import RenderedChat, ReusePlan
    from .shapes import ChatChunk, ChatCompletion

FORMAT = 1


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
    prefill_tokens: int
    """Of the next request, before its question."""
    expected_s: float
    """As in `ReusePlan`."""
    before: Conversation = field(repr=False)
    """The old branch, which can be gone on with; its cells are given up no sooner than others as old."""


class Conversation:
    """Messages over one engine. Not for several threads at once.

    Args:
        engine: an `Engine`.
        options: of every request, as in `ChatOptions`; those of `send` come on top. `now_s` is the time of making
            unless given: templates that write a date write the same one tomorrow.
    """

    def __init__(
        self, engine: Engine, *, system: str | None = None, tools: Sequence[Any] | None = None, **options: Any
    ) -> None:
        self._engine = engine
        self._tools = copy.deepcopy(list(tools)) if tools else []
        self._options = {"now_s": int(time.time()), **options}
        self._messages: list[dict[str, Any]] = []
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
        """Add a question. `volatile` is put behind it, and stays there: what was sent is not rewritten."""
        self._require_no_open_calls("ask")
        self._append({"role": "user", "content": text if volatile is None else f"{text}\n\n{volatile}"})
        return self

    def tool(self, tool_call_id: str, content: str) -> Conversation:
        """Add the result of a call. Raises ConversationError if no such call is open."""
        names = self._open_calls()
        if tool_call_id not in names:
            raise ConversationError(f"no open call has this id; open are {len(names)}")
        self._append({"role": "tool", "tool_call_id": tool_call_id, "name": names[tool_call_id], "content": content})
        return self

    def _append(self, message: dict[str, Any]) -> None:
        check_chat([message])
        self._messages.append(message)

    def _open_calls(self) -> dict[str, str]:
        """Names of functions that were called and have no result, by id."""
        opened: dict[str, str] = {}
        for message in self._messages:
            for call in message.get("tool_calls", ()):
                opened[call["id"]] = call["function"]["name"]
            if message["role"] == "tool":
                opened.pop(message["tool_call_id"], None)
        return opened

    def _require_no_open_calls(self, what: str) -> None:
        opened = self._open_calls()
        if opened:
            raise ConversationError(f"{len(opened)} tool calls have no result yet; give them with tool() to {what}")

    # -- requests --

    def send(self, **options: Any) -> ChatCompletion:
        """Answer what was added; the reply is appended. Raises ConversationError and what `Engine.chat` does."""
        answer: ChatCompletion = self._engine.chat(self._to_send(), tools=self._tools or None, **self._merged(options))
        self._messages.append(answer.message.to_dict())
        return answer

    def ask(self, text: str, **options: Any) -> ChatCompletion:
        """`user` and `send`; a question that could not be sent is taken back."""
        self.user(text)
        try:
            return self.send(**options)
        except BaseException:
            self._messages.pop()
            raise

    def stream(self, **options: Any) -> Iterator[ChatChunk]:
        """`send`, with chunks. The reply is appended when its last chunk has come."""
        chunks: Iterator[ChatChunk] = self._engine.chat(
            self._to_send(), stream=True, tools=self._tools or None, **self._merged(options)
        )
        for chunk in chunks:
            if chunk.completion is not None:
                self._messages.append(chunk.completion.message.to_dict())
            yield chunk

    def _to_send(self) -> list[dict[str, Any]]:
        self._require_no_open_calls("send")
        if not self._messages or self._messages[-1]["role"] not in ("user", "tool"):
            raise ConversationError("there is nothing to answer; add a question with user()")
        return copy.deepcopy(self._messages)

    def _merged(self, options: Mapping[str, Any]) -> dict[str, Any]:
        return {**self._options, **options}

    def plan(self) -> ReusePlan:
        """What sending the history as it is would reuse. Raises what `Engine.plan` does."""
        choices = {name: value for name, value in self._options.items() if name in TemplateChoices.__annotations__}
        spaces = [self._options[name] for name in ("namespace", "cache_salt") if self._options.get(name)]
        return self._engine.plan(
            self._engine.render(self._messages, tools=self._tools or None, **choices),
            **({"namespace": spaces[0]} if spaces else {}),
        )

    # -- branches --

    def fork(self) -> Conversation:
        """Another with the same history, which goes its own way."""
        other = Conversation(self._engine, tools=self._tools, **self._options)
        other._messages = copy.deepcopy(self._messages)
        return other

    def replace_head(
        self, *, system: str | None = None, tools: Sequence[Any] | None = None, allow_miss: bool = False
    ) -> None:
        """Change the system message or the tools (None: as they are), on which everything after them depends.

        Raises:
            ConversationError: what it would cost, unless `allow_miss`.
        """
        changed = self.fork()
        if tools is not None:
            check_chat([{"role": "user", "content": ""}], tools)
            changed._tools = copy.deepcopy(list(tools))
        if system is not None:
            body = changed._messages[1:] if self.system is not None else changed._messages
            changed._messages = [{"role": "system", "content": system}, *body]
            check_chat(changed._messages)
        if not allow_miss and len(self._messages) > 1:
            cost = changed.plan().prefill_tokens
            raise ConversationError(f"a new head has {cost} tokens prefilled again; allow_miss=True does it anyway")
        self._messages, self._tools = changed._messages, changed._tools

    def plan_compaction(self, summary: str, *, keep_last: int = 2) -> Compaction:
        """What `compact` would cost. Changes nothing."""
        return self._compacted(summary, keep_last)[1]

    def compact(self, summary: str, *, keep_last: int = 2) -> Compaction:
        """Put a summary in place of all messages but the head and the last ones.

        The cut is moved back to where no call is parted from its result.
        """
        messages, report = self._compacted(summary, keep_last)
        self._messages = messages
        return report

    def _compacted(self, summary: str, keep_last: int) -> tuple[list[dict[str, Any]], Compaction]:
        if isinstance(keep_last, bool) or not isinstance(keep_last, int) or keep_last < 0:
            raise ConversationError("keep_last: expected a number of messages, 0 or more")
        n_head = 0 if self.system is None else 1
        cut = max(n_head, len(self._messages) - keep_last)
        while n_head < cut < len(self._messages) and self._messages[cut]["role"] == "tool":
            cut -= 1
        told = {"role": "user", "content": summary}
        check_chat([told])
        after = self.fork()
        after._messages = [*after._messages[:n_head], told, *after._messages[cut:]]
        plan = after.plan()
        before, n_after = self.fork(), len(after._messages)
        report = Compaction(len(self._messages), n_after, plan.prefill_tokens, plan.expected_s, before)
        return after._messages, report

    # -- files --

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write history, tools and options as JSON, mode 0600, in place of what was there.

        Raises:
            CacheFileError: the operating system refused; what was there stays.
            ConversationError: an option is nothing that JSON can say.
        """
        told = {"pyllamacache_conversation": FORMAT, "messages": self._messages, "tools": self._tools}
        try:
            text = json.dumps({**told, "options": self._options}, ensure_ascii=False, allow_nan=False)
        except (TypeError, ValueError):
            raise ConversationError("tools or options hold something that JSON cannot say") from None
        where = os.fspath(path)
        try:
            descriptor, name = tempfile.mkstemp(dir=os.path.dirname(os.path.abspath(where)), prefix=".conversation-")
            try:
                with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                    file.write(text)
                    file.flush()
                    os.fsync(descriptor)
                os.replace(name, where)
            except BaseException:
                os.unlink(name)
                raise
        except OSError as error:
            raise CacheFileError(where, "write", error.strerror or type(error).__name__) from None

    @classmethod
    def load(cls, path: str | os.PathLike[str], engine: Engine) -> Conversation:
        """Raises CacheFileError; CacheCorruptError for what `save` did not write."""
        where = os.fspath(path)
        try:
            with open(where, encoding="utf-8") as file:
                found = json.load(file)
        except OSError as error:
            raise CacheFileError(where, "read", error.strerror or type(error).__name__) from None
        except (ValueError, RecursionError):
            raise CacheCorruptError(where, "it is not JSON") from None
        if not isinstance(found, dict) or found.get("pyllamacache_conversation") != FORMAT:
            raise CacheCorruptError(where, "it is no conversation of a format this version reads")
        messages, tools, options = (found.get(name) for name in ("messages", "tools", "options"))
        if not (isinstance(messages, list) and isinstance(tools, list) and isinstance(options, dict)):
            raise CacheCorruptError(where, "messages, tools or options are missing")
        try:
            if messages:
                check_chat(messages, tools)
        except ValueError as error:
            raise CacheCorruptError(where, str(error)) from None
        made = cls(engine, tools=tools, **options)
        made._messages = messages
        return made

    def __repr__(self) -> str:
        return f"<Conversation {len(self._messages)} messages, {len(self._tools)} tools>"
