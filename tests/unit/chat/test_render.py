"""Places and replies in rendered prompts, with templates written here: no native code."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from pyllamacache.chat.messages import check_chat
from pyllamacache.chat.render import MAX_SEARCHED, Renderer
from pyllamacache.chat.template import ReplyParser, TemplateOptions
from pyllamacache.request import RenderedChat

STUB = "<a>"


class Parser:
    def feed(self, text: str, *, is_last: bool) -> dict[str, Any]:
        return {"message": {}, "deltas": []}


class Templates:
    """`<role>content</>`; reasoning only behind the last question if `drops`; calls as `[name arguments]`."""

    def __init__(self, *, drops: bool = False) -> None:
        self._drops = drops
        self.n_renders = 0

    def render(self, request: Mapping[str, Any]) -> dict[str, Any]:
        self.n_renders += 1
        parts: list[tuple[bool, str]] = []
        if request["tools"]:
            parts += [
                (False, "<t>"),
                (True, str([tool["function"]["name"] for tool in request["tools"]])),
                (False, "</>"),
            ]
        questions = [n for n, message in enumerate(request["messages"]) if message["role"] == "user"]
        for n, message in enumerate(request["messages"]):
            parts.append((False, f"<{message['role'][0]}>"))
            if "reasoning_content" in message and not (self._drops and n < questions[-1]):
                parts += [(False, "<think>"), (True, message["reasoning_content"]), (False, "</think>")]
            content = message["content"] or ""
            for each in [content] if isinstance(content, str) else [part["text"] for part in content]:
                parts.append((True, each))
            for call in message.get("tool_calls", ()):
                function = call["function"]
                parts += [(False, "["), (True, f"{function['name']} {function['arguments']}"), (False, "]")]
            parts.append((False, "</>"))
        if request["add_generation_prompt"]:
            parts.append((False, STUB))
        return {
            "prompt": "".join(text for _, text in parts),
            "parts": [[is_input, len(text.encode())] for is_input, text in parts if text],
        }

    def open(self, request: Mapping[str, Any]) -> tuple[dict[str, Any], ReplyParser]:
        extra: dict[str, Any] = {"generation_prompt": STUB, "stops": [], "constraint": None}
        return {**self.render(request), **extra}, Parser()


def opened(renderer: Renderer, messages: list[Any], tools: list[Any] | None = None, **choices: Any) -> RenderedChat:
    return renderer.open(check_chat(messages, tools), TemplateOptions(), **choices)[0]


def talk(n_turns: int, *, reasoning: bool = False) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = [{"role": "system", "content": "rules"}]
    for turn in range(n_turns):
        messages.append({"role": "user", "content": f"question {turn}"})
        reply = {"role": "assistant", "content": f"answer {turn}"}
        messages.append({**reply, "reasoning_content": f"thought {turn}"} if reasoning else reply)
    return [*messages, {"role": "user", "content": "last"}]


@pytest.mark.parametrize("n_turns", [0, 1, 3, 20])
def test_starts_are_where_messages_begin(n_turns: int) -> None:
    prompt = opened(Renderer(Templates()), talk(n_turns))
    outline = prompt.outline
    assert prompt.text[: outline.header_end] == "<s>rules</>"
    assert prompt.text[outline.generation_start :] == STUB
    assert prompt.text[outline.starts[-1] : outline.generation_start] == "<u>last</>"
    assert all(prompt.text.startswith("<", start) for start in prompt.boundaries)
    assert {outline.header_end, outline.starts[-1], outline.generation_start} <= set(prompt.marks)


def test_a_conversation_that_grows_is_not_searched_again() -> None:
    templates = Templates()
    renderer = Renderer(templates)
    counts = []
    for n_turns in range(1, 30):
        before = templates.n_renders
        prompt = opened(renderer, talk(n_turns))
        counts.append(templates.n_renders - before)
        assert len(prompt.boundaries) >= min(n_turns, 6)
    assert max(counts[5:]) <= 8
    assert counts[-1] == counts[5]


def test_dropped_reasoning_marks_what_survives() -> None:
    messages = [*talk(1, reasoning=True), {"role": "assistant", "content": "call", "reasoning_content": "thinking"}]
    messages.append({"role": "tool", "content": "result"})
    prompt = opened(Renderer(Templates(drops=True)), messages)
    at = prompt.text.index("<think>thinking")
    assert at in prompt.marks
    assert at not in opened(Renderer(Templates()), messages).marks


def test_marks_of_the_caller_cost_a_bounded_number_of_renderings() -> None:
    marked = [{**message, "cache_control": {"type": "ephemeral"}} for message in talk(30)]
    templates = Templates()
    prompt = opened(Renderer(templates), marked)
    assert templates.n_renders <= 4 * MAX_SEARCHED + 8
    assert len(prompt.marks) > 50


def test_a_reply_is_known_only_where_it_was_given() -> None:
    tools = [{"function": {"name": "book"}}]
    renderer = Renderer(Templates())
    messages: list[Any] = [{"role": "user", "content": "go"}]
    prompt = opened(renderer, messages, tools, namespace="a")
    said = {"content": "", "reasoning_content": "", "tool_calls": [{"name": "book", "arguments": '{"seats":3}'}]}
    renderer.remember("a", prompt, '[book {"seats":3}]', said, ((0, 1), (17, 18)), b"</>")
    call = {"id": "c", "function": {"name": "book", "arguments": '{"seats": 3}'}}
    messages += [{"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "content": "done"}]
    mine = opened(renderer, messages, tools, namespace="a")
    assert '[book {"seats":3}]</><t>done' in mine.text
    start, end = mine.text.index('book {"s'), mine.text.index("]</><t>done")
    assert (start, end) in mine.outline.inputs
    assert mine.text[mine.outline.starts[-1] :].startswith("<t>done")
    for other in (
        opened(renderer, messages, tools, namespace="b"),
        opened(renderer, messages, tools, namespace="a", restores=False),
    ):
        assert '[book {"seats": 3}]</><t>done' in other.text
    renderer.clear("a")
    assert '[book {"seats": 3}]' in opened(renderer, messages, tools, namespace="a").text


def test_what_was_learned_of_a_template_gives_the_places_that_rendering_gives() -> None:
    """Once a shape is known, the prompt itself is the only rendering."""
    templates = Templates()
    learned = Renderer(templates)
    for n_turns in range(1, 9):
        before = templates.n_renders
        found = opened(learned, talk(n_turns))
        n_renders = templates.n_renders - before
        fresh = opened(Renderer(Templates()), talk(n_turns))
        assert (found.text, found.marks) == (fresh.text, fresh.marks)
        assert n_turns <= 5 or n_renders == 1


def test_a_shape_that_loses_something_is_asked_every_time() -> None:
    renderer = Renderer(Templates(drops=True))
    for n_turns in range(1, 6):
        reply = {"role": "assistant", "content": "call", "reasoning_content": "thinking"}
        prompt = opened(renderer, [*talk(n_turns, reasoning=True), reply, {"role": "tool", "content": "result"}])
        assert prompt.text.index("<think>thinking") in prompt.marks
