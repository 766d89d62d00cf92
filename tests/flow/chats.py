"""Agent conversations to send, and what a cache has to prefill of them."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pyllamacache import Engine
from pyllamacache.request import RenderedChat

TEMPLATES = Path(__file__).resolve().parents[2] / "vendor" / "llama.cpp" / "source" / "models" / "templates"

WORDS = (
    "the",
    "fare",
    "of",
    "a",
    "seat",
    "to",
    "an",
    "island",
    "was",
    "paid",
    "in",
    "cash",
    "and",
    "is",
    "on",
    "hold",
    "until",
    "the",
    "agent",
    "has",
    "seen",
    "it",
)

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "find_flight",
            "description": "Find a flight.",
            "parameters": {
                "type": "object",
                "properties": {"origin": {"type": "string"}, "nonstop": {"type": "boolean"}},
                "required": ["origin"],
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "book",
            "description": "Book a seat.",
            "parameters": {"type": "object", "properties": {"seats": {"type": "integer"}}, "required": ["seats"]},
        },
    },
]


def template_source(name: str) -> str:
    return (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")


class Agent:
    """Ten turns of a scripted agent: a question, one or two rounds of parallel calls, an answer, with reasoning."""

    def __init__(self, seed: int, *, with_tools: bool = True, with_reasoning: bool = True, n_calls: int = 2) -> None:
        self._random = random.Random(seed)
        self._with_tools = with_tools
        self._with_reasoning = with_reasoning
        self.messages: list[dict[str, Any]] = [{"role": "system", "content": self._text(40)}]
        self._n_calls = 0
        self._n_parallel = n_calls

    def requests(self, n_turns: int = 10) -> Iterator[list[dict[str, Any]]]:
        """The messages of each request; what is yielded is not changed later."""
        for _ in range(n_turns):
            self.messages.append({"role": "user", "content": self._text(12)})
            for _ in range(self._random.randint(1, 2) if self._with_tools else 0):
                yield list(self.messages)
                self._call()
            yield list(self.messages)
            self._answer({"content": self._text(20)})

    def _call(self) -> None:
        calls: list[dict[str, Any]] = []
        wanted = ("find_flight", {"origin": self._text(2), "nonstop": True}), ("book", {"seats": 3})
        for name, arguments in wanted[: self._n_parallel]:
            self._n_calls += 1
            function = {"name": name, "arguments": json.dumps(arguments)}
            calls.append({"id": f"call{self._n_calls:05d}", "type": "function", "function": function})
        self._answer({"content": "", "tool_calls": calls})
        for call in calls:
            self.messages.append(
                {
                    "role": "tool",
                    "tool_call_id": call["id"],
                    "name": call["function"]["name"],
                    "content": self._text(15),
                }
            )

    def _answer(self, message: dict[str, Any]) -> None:
        if self._with_reasoning:
            message["reasoning_content"] = self._text(10)
        self.messages.append({"role": "assistant", **message})

    def _text(self, n_words: int) -> str:
        return " ".join(self._random.choices(WORDS, k=n_words)).capitalize() + "."


def ids_of(engine: Engine, prompt: RenderedChat) -> list[int]:
    """As the engine spells it."""
    return list(engine.complete(prompt, max_tokens=0, store=False).prompt_token_ids)


def n_common(a: list[int], b: list[int]) -> int:
    n = 0
    while n < min(len(a), len(b)) and a[n] == b[n]:
        n += 1
    return n
