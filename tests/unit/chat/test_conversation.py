"""The rules of a conversation, over an engine that only remembers what it was sent."""

from __future__ import annotations

import gc
import itertools
import json
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pyllamacache.chat.conversation import Conversation
from pyllamacache.chat.shapes import ChatMessage, FunctionCall, ToolCall
from pyllamacache.errors import (
    CacheCorruptError,
    CacheFileError,
    CacheMismatchError,
    ChatTemplateError,
    ConversationError,
    InvalidRequestError,
    UnknownOptionError,
)
from pyllamacache.request import Outline, Reason, RenderedChat, ReusePlan, Source

TOOLS = [{"type": "function", "function": {"name": "book", "parameters": {"type": "object"}}}]
SECRET = "the hidden words"


def n_alike(a: str, b: str) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


class FakeEngine:
    """A token is a character. `replies` are given in order, then "fine"."""

    def __init__(self, *replies: ChatMessage, alternates: bool = False) -> None:
        self.replies = list(replies)
        self.alternates = alternates
        self.sent: list[tuple[list[dict[str, Any]], dict[str, Any]]] = []
        self.held: list[str] = []
        self.planned: list[dict[str, Any]] = []
        self.n_closed = 0
        self.fails = False

    def chat(self, messages: list[dict[str, Any]], *, stream: bool = False, **options: Any) -> Any:
        if self.fails:
            raise InvalidRequestError("messages", "refused")
        self.sent.append((messages, options))
        message = self.replies.pop(0) if self.replies else ChatMessage("fine")
        names = ("tools", "chat_template_kwargs", "now_s")
        self.held.append(self.render(messages, **{name: options.get(name) for name in names}).text)
        answer = SimpleNamespace(message=message)
        return self._chunks(answer) if stream else answer

    def _chunks(self, answer: Any) -> Iterator[Any]:
        try:
            for letter in answer.message.content:
                yield SimpleNamespace(text=letter, completion=None)
            yield SimpleNamespace(text="", completion=answer)
        finally:
            self.n_closed += 1

    def render(self, messages: list[dict[str, Any]], **choices: Any) -> RenderedChat:
        roles = [message["role"] for message in messages]
        if self.alternates and any(pair == ("user", "user") for pair in itertools.pairwise(roles)):
            raise ChatTemplateError("roles must alternate")
        kwargs = choices.get("chat_template_kwargs") or {}
        head = json.dumps([choices.get("tools"), kwargs.get("date"), choices.get("now_s")])
        n_head = 1 if roles[:1] == ["system"] else 0
        head += json.dumps(messages[:n_head])
        text = head + "".join(map(json.dumps, messages[n_head:])) + f"<think {kwargs.get('enable_thinking')}>"
        return RenderedChat(text, Outline(starts=(), header_end=len(head), generation_start=len(text)))

    def plan(self, prompt: RenderedChat, **options: Any) -> ReusePlan:
        self.planned.append(options)
        n = max((n_alike(prompt.text, each) for each in self.held), default=0)
        return ReusePlan(n, n, len(prompt.text) - n, Source.NONE, Reason.COLD, n, 0, 0.5, must_wait=False)


def call(*ids: str, arguments: str = "{}") -> ChatMessage:
    return ChatMessage(None, "thought", tuple(ToolCall(each, FunctionCall("book", arguments)) for each in ids))


def roles(conversation: Conversation) -> str:
    return "".join(message["role"][0] for message in conversation.messages)


# ---- history ---------------------------------------------------------------------------------------------------


def test_a_reply_is_kept_as_generated_and_what_was_sent_stays() -> None:
    engine = FakeEngine(call("c1"), ChatMessage("done"))
    talk = Conversation(engine, system="rules", tools=TOOLS, max_tokens=9)
    talk.user("book a seat", volatile="12:00").send(seed=3)
    talk.tool("c1", "ok").send()
    assert talk.messages[1]["content"] == "book a seat\n\n12:00"
    assert talk.messages[2] == call("c1").to_dict()
    assert talk.messages[3] == {"role": "tool", "tool_call_id": "c1", "name": "book", "content": "ok"}
    (first, options), (second, later) = engine.sent
    assert second[: len(first)] == first
    assert (options["seed"], options["max_tokens"], options["tools"]) == (3, 9, TOOLS)
    assert options["now_s"] == later["now_s"] == talk.fork()._options["now_s"] > 0


def test_what_is_handed_out_or_taken_in_is_a_copy() -> None:
    tools = json.loads(json.dumps(TOOLS))
    kwargs = {"date": "today"}
    engine = FakeEngine()
    talk = Conversation(engine, system="rules", tools=tools, chat_template_kwargs=kwargs)
    tools.clear()
    kwargs.clear()
    talk.messages[0]["content"] = "other"
    talk.tools[0].clear()
    talk.ask("hello")
    assert (talk.system, talk.tools, talk._options["chat_template_kwargs"]) == ("rules", (*TOOLS,), {"date": "today"})
    with pytest.raises(AttributeError):
        talk.system = "other"  # type: ignore[misc]
    with pytest.raises(AttributeError):
        talk.tools = ()  # type: ignore[misc]


def test_sending_needs_something_to_answer() -> None:
    talk = Conversation(FakeEngine(), system="rules")
    for _ in range(2):
        with pytest.raises(ConversationError, match="nothing to answer"):
            talk.send()
        with pytest.raises(ConversationError, match="nothing to answer"):
            talk.stream()
        talk.user("hello").send()


def test_open_calls_are_named() -> None:
    talk = Conversation(FakeEngine(call("c1", "c2")), tools=TOOLS)
    talk.ask("book")
    talk.tool("c2", "ok", name="other")
    assert talk.messages[-1]["name"] == "other"
    acts: tuple[Callable[[], object], ...] = (talk.send, talk.stream, lambda: talk.user("and?"))
    for act in acts:
        with pytest.raises(ConversationError, match="1 tool calls have no result yet: c1;"):
            act()
    for wrong in ("c2", "c3"):
        with pytest.raises(ConversationError, match="no open call has this id; open are 1: c1"):
            talk.tool(wrong, "ok")
    talk.tool("c1", "ok").send()
    assert roles(talk) == "uatta"


def test_what_is_no_text_is_refused_and_not_kept() -> None:
    talk = Conversation(FakeEngine())
    for wrong in (3, None, "\ud800"):
        with pytest.raises(InvalidRequestError):
            talk.user(wrong)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match="volatile"):
        talk.user("now", volatile=3)  # type: ignore[arg-type]
    assert talk.messages == ()
    with pytest.raises(InvalidRequestError, match="tools"):
        Conversation(FakeEngine(), tools=[{"function": {}}])
    with pytest.raises(UnknownOptionError, match="max_tokens"):
        Conversation(FakeEngine(), max_token=3)


def test_a_question_that_could_not_be_sent_is_taken_back() -> None:
    engine = FakeEngine()
    talk = Conversation(engine)
    talk.ask("one")
    engine.fails = True
    with pytest.raises(InvalidRequestError):
        talk.ask("two")
    assert roles(talk) == "ua"


def test_a_request_without_a_reply_or_with_half_a_call_appends_nothing() -> None:
    talk = Conversation(FakeEngine(ChatMessage(""), ChatMessage(""), call("c1", arguments='{"seats": ')), tools=TOOLS)
    talk.user("book")
    talk.send(max_tokens=0)
    list(talk.stream(max_completion_tokens=0))
    talk.send(max_tokens=4)
    assert roles(talk) == "u"
    talk.send()
    assert roles(talk) == "ua"


# ---- streams ---------------------------------------------------------------------------------------------------


def test_a_stream_appends_at_its_end_and_nothing_comes_between() -> None:
    engine = FakeEngine()
    talk = Conversation(engine).user("hello")
    stream = talk.stream()
    assert len(engine.sent) == 1  # at once
    next(stream)
    acts: tuple[Callable[[], object], ...] = (
        talk.send,
        talk.stream,
        lambda: talk.user("more"),
        lambda: talk.compact("s"),
        lambda: talk.replace_head(system="other"),
    )
    for act in acts:
        with pytest.raises(ConversationError, match="being streamed"):
            act()
    assert "".join(chunk.text for chunk in stream) == "ine"
    assert roles(talk) == "ua"
    assert talk.messages[-1]["content"] == "fine"
    talk.ask("more")


@pytest.mark.parametrize("closes", [True, False])
def test_a_stream_that_is_left_appends_nothing_and_blocks_nothing(closes: bool) -> None:
    engine = FakeEngine()
    talk = Conversation(engine).user("hello")
    stream = talk.stream()
    next(stream)
    if closes:
        stream.close()
        assert list(stream) == []
    del stream
    gc.collect()
    assert engine.n_closed == 1
    assert roles(talk) == "u"
    talk.send()


# ---- head ------------------------------------------------------------------------------------------------------


def test_an_option_of_one_request_may_not_change_the_head() -> None:
    talk = Conversation(FakeEngine(), tools=TOOLS, namespace="a").user("hello")
    for name, value in (("tools", []), ("now_s", 1), ("namespace", "b"), ("cache_salt", "b")):
        with pytest.raises(ConversationError, match=f"{name} stays"):
            talk.send(**{name: value})
    with pytest.raises(ConversationError, match="chat_template_kwargs would change the head"):
        talk.send(chat_template_kwargs={"date": "today"})
    with pytest.raises(InvalidRequestError, match="stream"):
        talk.send(stream=True)
    with pytest.raises(UnknownOptionError):
        talk.send(temprature=0)
    assert roles(talk) == "u"
    talk.send(tools=TOOLS, namespace="a", chat_template_kwargs={"enable_thinking": False})
    assert roles(talk) == "ua"


def test_a_new_head_says_its_cost_and_is_taken_when_asked_for() -> None:
    engine = FakeEngine()
    talk = Conversation(engine, system="rules", cache_salt="salt", priority=3)
    talk.replace_head(system="new rules")  # nothing below it yet
    talk.ask("hello")
    otherwise = talk.plan().prefill_tokens
    changed = talk.fork()
    changed.replace_head(system=SECRET, allow_miss=True)
    cost = changed.plan().prefill_tokens
    assert cost > otherwise
    with pytest.raises(ConversationError, match=f"{cost} tokens prefilled again, and {otherwise} without") as caught:
        talk.replace_head(system=SECRET)
    assert SECRET not in str(caught.value)
    assert engine.planned[-1] == {"namespace": "salt", "priority": 3}
    assert talk.system == "new rules"
    talk.replace_head(system="new rules", tools=[])  # the same
    talk.replace_head(tools=TOOLS, allow_miss=True)
    assert (talk.system, talk.tools, roles(talk)) == ("new rules", (*TOOLS,), "sua")
    with pytest.raises(InvalidRequestError):
        talk.replace_head(tools=[3], allow_miss=True)


# ---- branches --------------------------------------------------------------------------------------------------


def test_a_fork_goes_its_own_way() -> None:
    talk = Conversation(FakeEngine(), system="rules", max_tokens=3)
    talk.ask("hello")
    fork = talk.fork()
    fork.ask("more")
    assert (roles(talk), roles(fork)) == ("sua", "suaua")
    assert fork._options == talk._options


def test_compaction_does_what_was_announced() -> None:
    engine = FakeEngine()
    talk = Conversation(engine, system="rules")
    for turn in range(3):
        talk.ask(f"question {turn}")
    talk.user("last")
    announced = talk.plan_compaction("in short")
    assert roles(talk) == "suauauau"
    report = talk.compact("in short")
    assert roles(talk) == "suau"
    assert talk.messages[1] == {"role": "user", "content": "in short"}
    assert (report.n_messages_before, report.n_messages_after, report.expected_s) == (8, 4, 0.5)
    assert report.tokens_after < report.tokens_before
    assert report.prefill_tokens == announced.prefill_tokens == talk.plan().prefill_tokens
    assert roles(report.before) == "suauauau"
    assert SECRET not in repr(report)


@pytest.mark.parametrize(("keep_last", "left"), [(0, "uat"), (1, "uat"), (2, "uat"), (3, "uatat")])
def test_a_cut_parts_no_call_from_its_result(keep_last: int, left: str) -> None:
    talk = Conversation(FakeEngine(call("c1"), call("c2", "c3")), tools=TOOLS)
    talk.ask("book")
    talk.tool("c1", "ok").send()
    talk.tool("c2", "ok")
    talk.compact("in short", keep_last=keep_last)
    assert roles(talk) == left
    talk.tool("c3", "ok").send()


def test_a_template_that_wants_turns_gets_them() -> None:
    talk = Conversation(FakeEngine(alternates=True))
    for _ in range(3):
        talk.ask("question")
    talk.compact("in short", keep_last=2)
    assert roles(talk) == "uaua"
    with pytest.raises(ConversationError, match="no message would go"):
        talk.compact("in short", keep_last=4)
    for wrong in (-1, True, "2"):
        with pytest.raises(ConversationError, match="keep_last"):
            talk.compact("in short", keep_last=wrong)  # type: ignore[arg-type]


# ---- files -----------------------------------------------------------------------------------------------------


def test_a_file_carries_everything(tmp_path: Path) -> None:
    path = tmp_path / "talk.json"
    path.write_text("old")
    talk = Conversation(
        FakeEngine(call("c1")), system="règles", tools=TOOLS, now_s=5, logit_bias={"3": 1.5}, stop=["x"]
    )
    talk.ask("hello")
    talk.save(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    loaded = Conversation.load(path, FakeEngine())
    assert (loaded.messages, loaded.tools, loaded._options) == (talk.messages, talk.tools, talk._options)
    loaded.tool("c1", "ok").send()
    assert [each.name for each in tmp_path.iterdir()] == ["talk.json"]


def test_any_damage_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "talk.json"
    talk = Conversation(FakeEngine(), system="rules")
    talk.ask(SECRET)
    talk.save(path)
    sound = path.read_bytes()
    for damaged in (b"", sound[:-9], sound.replace(b"rules", b"ruled"), b"\xff", b"[" * 100_000, b"null", b"[]", b"{}"):
        path.write_bytes(damaged)
        with pytest.raises(CacheCorruptError) as caught:
            Conversation.load(path, FakeEngine())
        assert SECRET not in str(caught.value)
    path.write_bytes(sound.replace(b'conversation": 1', b'conversation": 2'))
    with pytest.raises(CacheMismatchError, match="format is 2 in the file, 1 here"):
        Conversation.load(path, FakeEngine())


def test_what_cannot_be_read_or_written_says_so(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name in ("none", "pipe", ""):
        with pytest.raises(CacheFileError):
            Conversation.load(tmp_path / name, FakeEngine())
    talk = Conversation(FakeEngine(), metadata={"what": object})
    with pytest.raises(ConversationError, match="JSON"):
        talk.save(tmp_path / "talk.json")
    with pytest.raises(CacheFileError):
        Conversation(FakeEngine()).save(tmp_path / "no" / "talk.json")
    with pytest.raises(CacheFileError):
        Conversation(FakeEngine()).save(tmp_path)
    assert [each.name for each in tmp_path.iterdir()] == ["pipe"]


def test_nothing_shows_text() -> None:
    talk = Conversation(FakeEngine(), system=SECRET)
    talk.ask(SECRET)
    assert SECRET not in repr(talk)
