"""A conversation only grows, and what would break its prefix says what it costs."""

from __future__ import annotations

import json
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pyllamacache import Conversation, Engine
from pyllamacache.errors import (
    CacheCorruptError,
    CacheFileError,
    CacheMismatchError,
    ConversationError,
    InvalidRequestError,
)
from tests.flow.chats import TOOLS, template_source

NewEngine = Callable[..., Engine]

RULES = "the fare of a seat to an island is paid in cash " * 6
SPARE_TOKENS = 4


@pytest.fixture(params=["full", "hybrid"])
def engine(request: pytest.FixtureRequest, new_engine: NewEngine) -> Engine:
    return new_engine(request.param, n_ctx=4096, n_slots=2, chat_template=template_source("Qwen-Qwen3-0.6B"))


def talk(engine: Engine, **options: Any) -> Conversation:
    return Conversation(engine, system=RULES, max_tokens=5, **options)


def new_tokens(before: list[int], after: list[int]) -> int:
    n = 0
    while n < min(len(before), len(after)) and before[n] == after[n]:
        n += 1
    return len(after) - n


def test_each_turn_prefills_what_is_new(engine: Engine) -> None:
    conversation = talk(engine, tools=TOOLS)
    known: list[int] = []
    for turn in range(4):
        answer = conversation.user(f"question {turn}", volatile=f"It is 12:0{turn}:00.").send()
        ids = answer.completion.prompt_token_ids.tolist()
        assert not known or answer.cache.prefilled_tokens <= new_tokens(known, ids) + SPARE_TOKENS
        known = ids + list(answer.completion.token_ids)
    assert [message["role"] for message in conversation.messages] == ["system"] + ["user", "assistant"] * 4
    assert RULES not in repr(conversation)


def test_a_stream_appends_its_reply(engine: Engine) -> None:
    conversation = talk(engine).user("hello")
    text = "".join(chunk.text for chunk in conversation.stream())
    assert conversation.messages[-1]["content"] == text


def test_forks_share_the_trunk(engine: Engine) -> None:
    trunk = talk(engine)
    trunk.ask("first")
    fork = trunk.fork()
    one = trunk.ask("one way")
    other = fork.ask("and another")
    ids = [answer.completion.prompt_token_ids.tolist() for answer in (one, other)]
    assert other.cache.prefilled_tokens <= new_tokens(*ids) + SPARE_TOKENS
    assert len(trunk.messages) == len(fork.messages) == 5
    assert trunk.messages[-2] != fork.messages[-2]


def test_compaction_costs_what_was_announced_and_the_old_branch_goes_on(engine: Engine) -> None:
    conversation = talk(engine)
    for turn in range(4):
        last = conversation.ask(f"question {turn} " + "about a seat " * 8)
    known = last.completion.prompt_token_ids.tolist() + list(last.completion.token_ids)
    announced = conversation.plan_compaction("Four questions were answered.", keep_last=2)
    assert len(conversation.messages) == 9
    report = conversation.compact("Four questions were answered.", keep_last=2)
    assert (report.prefill_tokens, report.n_messages_after) == (announced.prefill_tokens, 4)
    assert report.n_messages_before == 9
    plan = conversation.plan()
    assert plan.prefill_tokens == report.prefill_tokens
    answer = conversation.ask("next")
    assert 0 < answer.cache.prefilled_tokens < len(known) / 2
    back = report.before.ask("and back")
    ids = back.completion.prompt_token_ids.tolist()
    assert back.cache.prefilled_tokens <= new_tokens(known, ids) + SPARE_TOKENS


def test_a_call_is_not_parted_from_its_result(engine: Engine) -> None:
    conversation = talk(engine, tools=TOOLS)
    conversation.user("book")
    call = {"id": "call00001", "type": "function", "function": {"name": "book", "arguments": '{"seats": 3}'}}
    conversation._messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
    with pytest.raises(ConversationError, match="1 tool calls"):
        conversation.send()
    with pytest.raises(ConversationError, match="no open call"):
        conversation.tool("call00002", "done")
    conversation.tool("call00001", "done").send()
    conversation.compact("Seats were booked.", keep_last=2)
    assert [message["role"] for message in conversation.messages] == [
        "system",
        "user",
        "assistant",
        "tool",
        "assistant",
    ]


def test_the_head_changes_only_when_asked_for(engine: Engine) -> None:
    conversation = talk(engine)
    conversation.ask("first")
    with pytest.raises(ConversationError, match=r"a new head has \d+ tokens"):
        conversation.replace_head(system="other rules")
    assert conversation.system == RULES
    conversation.replace_head(system="other rules", tools=TOOLS, allow_miss=True)
    assert conversation.system == "other rules"
    assert len(conversation.tools) == len(TOOLS)
    with pytest.raises(ConversationError, match="nothing to answer"):
        conversation.send()
    with pytest.raises(InvalidRequestError):
        conversation.user(3)  # type: ignore[arg-type]


def test_files_carry_everything_and_refuse_the_rest(engine: Engine, tmp_path: Path) -> None:
    conversation = talk(engine, tools=TOOLS)
    conversation.ask("first")
    path = tmp_path / "talk.json"
    conversation.save(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    loaded = Conversation.load(path, engine)
    assert loaded.messages == conversation.messages
    assert loaded.tools == conversation.tools
    assert engine.render(loaded.messages, tools=TOOLS, now_s=1) == engine.render(
        conversation.messages, tools=TOOLS, now_s=1
    )
    assert loaded.ask("second").cache.resumed_tokens > 0
    for text in ("", "[]", "{", "{}", '{"pyllamacache_conversation": 1}'):
        path.write_text(text)
        with pytest.raises(CacheCorruptError):
            Conversation.load(path, engine)
    path.write_text(json.dumps({"pyllamacache_conversation": 9}))
    with pytest.raises(CacheMismatchError, match="format is 9"):
        Conversation.load(path, engine)
    with pytest.raises(CacheFileError):
        Conversation.load(tmp_path / "none.json", engine)
    with pytest.raises(CacheFileError):
        conversation.save(tmp_path / "no" / "folder.json")
    assert [each.name for each in tmp_path.iterdir()] == ["talk.json"]


def test_a_pending_question_is_part_of_what_compaction_announces(engine: Engine) -> None:
    conversation = talk(engine, tools=TOOLS, now_s=1_700_000_000)
    for turn in range(4):
        last = conversation.ask(f"question {turn} " + "about a seat " * 8)
    known = last.completion.prompt_token_ids.tolist() + list(last.completion.token_ids)
    conversation.user("the last one")
    announced = conversation.plan_compaction("Four questions were answered.", keep_last=3)
    report = conversation.compact("Four questions were answered.", keep_last=3)
    answer = conversation.send()
    assert answer.cache.prefilled_tokens == report.prefill_tokens == announced.prefill_tokens
    assert answer.usage.prompt_tokens == report.tokens_after < report.tokens_before
    back = report.before.send()
    assert back.usage.prompt_tokens == report.tokens_before
    ids = back.completion.prompt_token_ids.tolist()
    assert back.cache.prefilled_tokens <= new_tokens(known, ids) + SPARE_TOKENS


@pytest.mark.parametrize("kind", ["full", "hybrid"])
def test_another_engine_goes_on_from_a_file_with_the_same_bytes(
    new_engine: NewEngine, tmp_path: Path, kind: str
) -> None:
    first, second = (
        new_engine(kind, n_ctx=4096, chat_template=template_source("meta-llama-Llama-3.1-8B-Instruct"))
        for _ in range(2)
    )
    conversation = talk(first, tools=TOOLS, now_s=1_700_000_000)
    conversation.ask("first")
    conversation.save(tmp_path / "talk.json")
    loaded = Conversation.load(tmp_path / "talk.json", second)
    for each in (conversation, loaded):
        each.user("second")
    here, there = (each._render(each._options).text for each in (conversation, loaded))
    assert here.encode() == there.encode()
    answer = loaded.send()
    ids = answer.completion.prompt_token_ids.tolist()
    again = loaded.ask("third")
    known = ids + list(answer.completion.token_ids)
    grown = again.completion.prompt_token_ids.tolist()
    assert again.cache.prefilled_tokens <= new_tokens(known, grown) + SPARE_TOKENS


def test_a_template_that_wants_turns_can_be_compacted(new_engine: NewEngine) -> None:
    source = template_source("mistralai-Mistral-Nemo-Instruct-2407")
    conversation = talk(new_engine("full", n_ctx=4096, chat_template=source))
    for turn in range(3):
        conversation.ask(f"question {turn}")
    conversation.compact("Questions were answered.", keep_last=2)
    assert [message["role"][0] for message in conversation.messages] == list("suaua")
    conversation.ask("next")
