"""Ten turns of an agent, rendered by the templates people use: each turn prefills what is new in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pyllamacache import CacheConfig, Engine
from tests.flow.chats import TOOLS, Agent, n_common, template_source

NewEngine = Callable[..., Engine]

TEMPLATES = (
    "Qwen-Qwen3-0.6B",
    "Qwen3.5-4B",
    "Qwen3-Coder",
    "google-gemma-4-31B-it",
    "meta-llama-Llama-3.1-8B-Instruct",
    "mistralai-Mistral-Nemo-Instruct-2407",
    "openai-gpt-oss-120b",
    "moonshotai-Kimi-K2",
    "Kimi-K2-Thinking",
)
ONE_CALL_A_TURN = {"meta-llama-Llama-3.1-8B-Instruct"}
SPARE_TOKENS = 4


def prefilled_beyond_new(engine: Engine, agent: Agent, n_turns: int, **options: Any) -> list[int]:
    """Per request, the tokens prefilled beyond what no earlier prompt began with."""
    seen: list[list[int]] = []
    beyond = []
    for messages in agent.requests(n_turns):
        reply = engine.chat(messages, max_tokens=3, now_s=1_700_000_000, **options)
        ids = reply.completion.prompt_token_ids.tolist()
        known = max((n_common(ids, each) for each in seen), default=0)
        assert reply.usage.prompt_tokens == len(ids) == reply.cache.resumed_tokens + reply.cache.prefilled_tokens
        beyond.append(reply.cache.prefilled_tokens - (len(ids) - known))
        seen.append(ids + list(reply.completion.token_ids))
    return beyond


def one_conversation(new_engine: NewEngine, kind: str, name: str, n_turns: int, *, keeps_reasoning: bool) -> list[int]:
    source = template_source(name)
    engine = new_engine(kind, n_ctx=8192, kv_tokens=8192, n_slots=1, n_ubatch=128, chat_template=source)
    agent = Agent(seed=5, n_calls=1 if name in ONE_CALL_A_TURN else 2)
    kwargs = {"preserve_reasoning": keeps_reasoning}
    return prefilled_beyond_new(engine, agent, n_turns, tools=TOOLS, chat_template_kwargs=kwargs)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["full", "hybrid"])
@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("keeps_reasoning", [True, False])
def test_a_turn_prefills_what_is_new(new_engine: NewEngine, kind: str, name: str, keeps_reasoning: bool) -> None:
    beyond = one_conversation(new_engine, kind, name, 10, keeps_reasoning=keeps_reasoning)
    assert max(beyond) <= SPARE_TOKENS, beyond


@pytest.mark.parametrize("name", ["Qwen-Qwen3-0.6B", "mistralai-Mistral-Nemo-Instruct-2407", "openai-gpt-oss-120b"])
def test_the_first_turns_prefill_what_is_new(new_engine: NewEngine, name: str) -> None:
    beyond = one_conversation(new_engine, "hybrid", name, 3, keeps_reasoning=False)
    assert max(beyond) <= SPARE_TOKENS, beyond


def test_without_checkpoints_a_turn_prefills_everything(new_engine: NewEngine) -> None:
    engine = new_engine(
        "hybrid",
        n_ctx=8192,
        kv_tokens=8192,
        n_slots=1,
        chat_template=template_source("Qwen-Qwen3-0.6B"),
        cache=CacheConfig(max_checkpoints=0),
    )
    beyond = prefilled_beyond_new(engine, Agent(seed=5), 2, tools=TOOLS)
    assert max(beyond) > 100, beyond
