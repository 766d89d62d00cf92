"""Conversations with real models and real text, through the templates in their files (Gemma's has none: ChatML)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pyllamacache import Conversation, Engine, Model
from tests.flow.chats import n_common

SPARE_TOKENS = 4
RULES = (
    "You are a travel agent. Answer in one short sentence. Never promise what is not in the timetable. A seat is paid "
    "for before it is held; a held seat can be given back until the evening before the journey."
)
QUESTIONS = ("Is there a boat to the island on Friday?", "What does it cost?", "Can I take my bicycle?", "Thank you.")


@pytest.fixture(params=["smollm2_path", "gemma3_path"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    path: Path = request.getfixturevalue(request.param)
    with Model(path, progress=False) as model, Engine(model, n_ctx=2048, n_slots=2, progress=False) as made:
        yield made


@pytest.mark.real
def test_each_turn_prefills_what_is_new(engine: Engine) -> None:
    conversation = Conversation(engine, system=RULES, max_tokens=24)
    known: list[int] = []
    for question in QUESTIONS:
        answer = conversation.ask(question)
        ids = answer.completion.prompt_token_ids.tolist()
        assert answer.cache.prefilled_tokens <= len(ids) - n_common(ids, known) + SPARE_TOKENS
        assert not known or answer.cache.resumed_tokens >= len(known) - SPARE_TOKENS - 1
        known = ids + list(answer.completion.token_ids)
    again = engine.plan(engine.render(conversation.messages, now_s=0))
    assert again.matched_tokens >= len(known) - SPARE_TOKENS


@pytest.mark.real
def test_a_clock_at_the_front_is_named(engine: Engine) -> None:
    def ask(clock: str) -> Callable[[], str]:
        messages = [{"role": "system", "content": f"It is {clock}. {RULES}"}, {"role": "user", "content": QUESTIONS[0]}]
        answer = engine.chat(messages, max_tokens=1)
        return lambda: str(answer.cache.explain())

    ask("09:41:07")
    told = ask("10:52:44")()
    assert "messages[0].content" in told
    assert "time" in told
    assert "09:41" not in told
