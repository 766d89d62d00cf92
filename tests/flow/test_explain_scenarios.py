"""Why was it prefilled again? Themes 5 and 9 of the scenario list, asked of real engines."""

from __future__ import annotations

import copy
import gc
import json
import logging
import math
import re
from collections.abc import Callable
from typing import Any

import pytest

from pyllamacache import CacheConfig, Change, Explanation, Reason
from tests.flow.law import joined, random_ids
from tests.models import TOKENS

KINDS = ["full", "hybrid"]
NewEngine = Callable[..., Any]
EOS = TOKENS.id_of("<|eos|>")


def explained(reply: Any) -> Explanation:
    """With what must hold of every explanation."""
    report = getattr(reply, "completion", reply).cache
    found: Explanation = report.explain()
    engine, evidence = found.engine, report.evidence
    assert engine is not None
    assert (engine.matched_tokens, engine.resumed_tokens) == (report.matched_tokens, report.resumed_tokens)
    assert found.cost == report.prefilled_tokens
    if evidence.prefill_s_per_token is None:
        assert found.cost_s == evidence.prefill_s
    else:
        assert found.cost_s == pytest.approx(report.prefilled_tokens * evidence.prefill_s_per_token)
    assert found.cost_s is not None
    assert found.cost_s > 0
    assert found.position >= report.matched_tokens or found.difference is None
    return found


# ---- theme 5: clients that break the prefix --------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_s50_a_header_that_changes_is_three_tokens_at_twenty(kind: str, new_engine: NewEngine) -> None:
    engine = new_engine(kind, n_slots=1)
    front, rest = random_ids(20, 20), random_ids(21, 900)
    engine.complete(joined(front, [1, 2, 3], rest), max_tokens=4)
    found = explained(engine.complete(joined(front, [4, 5, 6], rest, random_ids(22, 25)), max_tokens=4))
    difference = found.difference
    assert difference is not None
    assert (found.change, found.position) == (Change.CHANGED_SPAN, 20)
    assert (difference.old_changed, difference.new_changed, difference.identical_after) == (3, 3, 900)
    assert round(difference.share_identical, 2) == 0.97
    assert found.cost == (928 if kind == "full" else 948)
    assert found.token_ids() == ((1, 2, 3), (4, 5, 6))
    assert "put what changes behind what stays" in found.suggestion


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("position", [20, 480, 496])
def test_s51_a_clock_is_named_where_it_stands_with_both_windows(
    position: int, kind: str, new_engine: NewEngine
) -> None:
    engine = new_engine(kind, n_slots=1)
    system = random_ids(22, 500)
    for clock in range(2):
        ids = system.copy()
        ids[position : position + 4] = clock
        reply = engine.complete(ids, max_tokens=1)
    found = explained(reply)
    assert found.change is (Change.BRANCHED if position == 496 else Change.CHANGED_SPAN)
    assert found.position == position
    assert found.token_ids()[1] == (1, 1, 1, 1)
    assert found.token_ids()[0][:4] == (0, 0, 0, 0)
    if kind == "full":
        assert found.cost == 500 - position
    else:
        assert found.engine is not None
        assert found.cost == 500 - reply.cache.resumed_tokens
        assert found.engine.checkpoint == (reply.cache.resumed_tokens or None)
        assert "nearest checkpoint" in str(found) or reply.cache.resumed_tokens == position


@pytest.mark.parametrize("kind", KINDS)
def test_s52_blocks_in_another_order_are_reordered_and_only_the_first_is_reused(
    kind: str, new_engine: NewEngine
) -> None:
    engine = new_engine(kind, n_slots=1)
    a, b, c, d = (random_ids(30 + i, 50) for i in range(4))
    tail = random_ids(34, 300)
    engine.complete(joined(a, b, c, d, tail), max_tokens=1)
    reply = engine.complete(joined(a, c, b, d, tail), max_tokens=1)
    found = explained(reply)
    assert found.difference is not None
    assert (found.change, found.position) == (Change.REORDERED_BLOCKS, 50)
    assert (found.difference.moved, found.difference.identical_after) == (50, 400)
    assert reply.cache.matched_tokens == 50
    assert found.cost == (450 if kind == "full" else 500)
    assert "keep the order" in found.suggestion


@pytest.mark.parametrize("kind", KINDS)
def test_s54_the_same_text_in_other_tokens_is_told_from_another_text(kind: str, new_engine: NewEngine) -> None:
    engine = new_engine(kind, n_slots=1)
    head, said = "What did the fox do? It ", "ran in the other direction and then it is on the hill"
    merged = {token: -math.inf for token in range(256, len(TOKENS)) if token != EOS}
    grammar = f"root ::= {json.dumps(said)}"
    first = engine.complete(head, max_tokens=len(said) + 1, grammar=grammar, logit_bias=merged)
    assert first.text == said
    found = explained(engine.complete(f"{head}{said}, where it waits.", max_tokens=1, match_text=False))
    assert found.change is Change.OTHER_TOKENS
    assert found.position >= len(first.prompt_token_ids)
    assert "send the ids of replies back" in found.suggestion
    other = explained(engine.complete(f"{head}slept.", max_tokens=1, match_text=False))
    assert other.change is not Change.OTHER_TOKENS


@pytest.mark.parametrize("kind", KINDS)
def test_s56_a_dropped_oldest_turn_is_a_removed_middle(kind: str, new_engine: NewEngine) -> None:
    engine = new_engine(kind, n_ctx=512, n_slots=1)
    system, turns = random_ids(36, 100), [random_ids(40 + i, 30) for i in range(14)]
    for first in range(3):
        reply = engine.complete(joined(system, *turns[first : 11 + first]), max_tokens=1)
        found = explained(reply)
        if first:
            assert found.difference is not None
            assert (found.change, found.position) == (Change.REMOVED_MIDDLE, 100)
            assert (found.difference.old_changed, found.difference.identical_after) == (30, 300)
            assert "compact once" in found.suggestion
            assert found.cost == 430 - reply.cache.resumed_tokens


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_that_goes_on_is_nothing_to_worry_about(kind: str, new_engine: NewEngine) -> None:
    engine = new_engine(kind)
    ids = random_ids(50, 300)
    assert explained(engine.complete(ids, max_tokens=4)).difference is None
    reply = engine.complete(joined(ids, engine.complete(ids, max_tokens=4).token_ids, random_ids(51, 9)), max_tokens=1)
    found = explained(reply)
    assert (found.change, found.position, found.cost) == (Change.APPENDED, 304, 10)
    assert found.suggestion.startswith("nothing to do")


# ---- what the engine had ---------------------------------------------------------------------------------------


def test_a_checkpoint_that_was_given_up_is_named_with_when_and_why(new_engine: NewEngine) -> None:
    engine = new_engine("hybrid", cache=CacheConfig(max_checkpoints=2))
    header = random_ids(60, 200)
    engine.complete(joined(header, random_ids(61, 200)), max_tokens=1, boundaries=[200])
    for seed in (62, 63):
        engine.complete(joined(header[:100], random_ids(seed, 300)), max_tokens=1)
    reply = engine.complete(joined(header, [3], random_ids(67, 200)), max_tokens=1)
    assert (reply.cache.reason, reply.cache.position) == (Reason.EVICTED, 200)
    found = explained(reply)
    assert found.engine is not None
    assert found.engine.lost is not None
    assert (found.engine.lost.position, found.engine.lost.reason) == (200, "outvalued")
    assert 0 < found.engine.lost.age_s < 60
    assert found.engine.checkpoint == reply.cache.resumed_tokens
    assert "the one at 200 was given up" in str(found)
    assert "raise max_checkpoints" in found.suggestion


def test_another_question_without_a_checkpoint_asks_for_a_boundary(new_engine: NewEngine) -> None:
    engine = new_engine("hybrid", n_slots=1, cache=CacheConfig(max_checkpoints=8))
    header = random_ids(70, 400)
    engine.complete(joined(header, [1], random_ids(71, 40)), max_tokens=1)
    reply = engine.complete(joined(header, [2], random_ids(72, 40)), max_tokens=1)
    found = explained(reply)
    assert (found.change, found.position) == (Change.BRANCHED, 400)
    assert reply.cache.reason is Reason.NO_CHECKPOINT
    assert found.engine is not None
    assert found.engine.checkpoint == reply.cache.resumed_tokens
    assert "boundaries=[400]" in found.suggestion


def test_without_checkpoints_it_says_that_there_are_none(new_engine: NewEngine) -> None:
    engine = new_engine("hybrid", n_slots=1, cache=CacheConfig(max_checkpoints=0))
    ids = random_ids(73, 200)
    engine.complete(ids, max_tokens=1)
    found = explained(engine.complete(joined(ids[:150], random_ids(74, 9)), max_tokens=1))
    assert "max_checkpoints" in found.suggestion


def test_what_is_no_longer_held_is_told_from_what_was_changed(new_engine: NewEngine) -> None:
    engine = new_engine("full", n_slots=1, kv_tokens=512, n_ctx=512, cache=CacheConfig(host_bytes=0, max_parked=0))
    ids = random_ids(75, 300)
    engine.complete(ids, max_tokens=1)
    engine.complete(random_ids(76, 300), max_tokens=1)
    found = explained(engine.complete(joined(ids, random_ids(77, 20)), max_tokens=1))
    assert (found.change, found.position, found.cost) == (Change.BRANCHED, 300, 320)  # another reply was sampled
    assert "no longer held" in found.suggestion


# ---- chat ------------------------------------------------------------------------------------------------------

SYSTEM = "You are a helpful agent. The current time is 2026-11-30 06:45:43. Be brief and kind to everybody who asks."
QUESTION = {"role": "user", "content": "Where is my order?"}


def tool(name: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"key": {"type": "string"}}}
    function = {"name": name, "description": f"{name} of the shop, by its own key", "parameters": parameters}
    return {"type": "function", "function": function}


@pytest.mark.parametrize("kind", KINDS)
def test_a_clock_in_the_system_message_is_named_with_its_field(kind: str, new_engine: NewEngine) -> None:
    engine = new_engine(kind, n_slots=1)
    for clock in ("06:45:43", "06:47:12"):
        system = {"role": "system", "content": SYSTEM.replace("06:45:43", clock)}
        reply = engine.chat([system, QUESTION], max_tokens=4)
    found = explained(reply)
    assert (found.change, found.place.path, found.place.role) == (Change.CHANGED_SPAN, "messages[0].content", "system")
    assert (found.volatile, found.old_place.path) == ("timestamp", "messages[0].content")
    assert found.text() == ("06:45:43.", "06:47:12.")
    assert found.suggestion.startswith("move the time out of messages[0].content")


def test_a_message_that_changed_is_found_behind_a_reply(new_engine: NewEngine) -> None:
    engine = new_engine("full", n_slots=1)
    messages: list[dict[str, Any]] = [{"role": "system", "content": "Be kind."}, QUESTION]
    for turn in range(3):
        reply = engine.chat(messages, max_tokens=6)
        messages += [{"role": "assistant", "content": reply.text or "x"}, {"role": "user", "content": f"and {turn}?"}]
    changed = copy.deepcopy(messages)
    changed[3]["content"] = "and what else?"
    found = explained(engine.chat(changed, max_tokens=2))
    assert (found.place.path, found.place.role) == ("messages[3].content", "user")


# ---- theme 9: nobody else's business ---------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_s74_nothing_of_another_namespace_is_explained(kind: str, new_engine: NewEngine) -> None:
    engine = new_engine(kind)
    text = "The merger with Initech is set for May, and nobody must know. " * 3
    engine.complete(text, max_tokens=2, namespace="one")
    other = engine.complete(text, max_tokens=2, namespace="two").cache
    found = other.explain(show_text=True)
    assert (other.matched_tokens, found.change, found.text()) == (0, None, None)
    assert other.evidence is not None
    assert other.evidence.recent == ()
    changed = engine.complete(text.replace("May", "June"), max_tokens=2, namespace="two").cache.explain(show_text=True)
    assert changed.change is not None  # its own, of the same namespace
    assert [each.namespace for each in engine._state.recents._all.values()] == ["one", "two", "two"]


def test_s74_a_request_that_is_not_stored_is_not_explained_to_others(new_engine: NewEngine) -> None:
    engine = new_engine("full")
    ids = random_ids(80, 100)
    engine.complete(ids, max_tokens=2, store=False)
    assert engine.complete(ids, max_tokens=2).cache.explain().change is None
    assert len(engine._state.recents) == 1


def test_s74_what_was_cleared_is_forgotten(new_engine: NewEngine) -> None:
    engine = new_engine("full")
    for namespace in ("one", "two"):
        engine.complete(random_ids(81, 100), max_tokens=2, namespace=namespace)
    engine.cache.clear("one")
    assert [each.namespace for each in engine._state.recents._all.values()] == ["two"]
    engine.cache.clear()
    assert len(engine._state.recents) == engine._state.recents.size_bytes == 0


MARKER = "XYZZY-plugh-1729"


def test_s75_no_text_in_what_is_printed_or_logged(new_engine: NewEngine, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    engine = new_engine("full", n_slots=1)
    named = tool(MARKER)
    named["function"]["parameters"]["properties"] = {MARKER: {"type": "string", "description": MARKER}}
    for name in ("first", "second"):
        messages = [{"role": "system", "content": f"{name} {MARKER} rule"}, {"role": "user", "content": MARKER}]
        reply = engine.chat(messages, tools=[named], max_tokens=2)
    report = reply.completion.cache
    hidden = report.explain()
    for said in (repr(report), str(report), repr(report.evidence), repr(hidden), str(hidden), f"{hidden.to_dict()}"):
        assert MARKER not in said
        assert "plugh" not in said
    assert MARKER not in json.dumps(hidden.to_dict())
    assert MARKER not in repr(report.explain(show_text=True))
    assert hidden.text() is not None
    assert MARKER not in caplog.text


def test_s75_token_ids_only_on_request(new_engine: NewEngine) -> None:
    engine = new_engine("full", n_slots=1, cache=CacheConfig(host_bytes=0, max_parked=0))
    front, rest = random_ids(82, 100), random_ids(83, 50)
    engine.complete(joined(front, [211, 212, 213], rest), max_tokens=1)
    report = engine.complete(joined(front, [221, 222, 223], rest), max_tokens=1).cache
    for token in ("211", "212", "222", "223"):
        word = re.compile(rf"\b{token}\b")
        assert not word.search(f"{report.explain()}{report.explain()!r}{report!r}")
        assert word.search(str(report.explain(show_text=True)))


def test_s76_markers_in_a_message_stay_in_its_field(new_engine: NewEngine) -> None:
    engine = new_engine("full", n_slots=1)
    for end in ("one", "two"):
        content = "<|im_end|>\n<|im_start|>user\n" * 10 + end + " and the rest of what I have to say to you"
        reply = engine.chat(
            [{"role": "system", "content": "Be kind."}, {"role": "user", "content": content}], max_tokens=2
        )
    found = explained(reply)
    assert (found.place.path, found.place.role) == ("messages[1].content", "user")


def test_a_report_keeps_no_engine_alive(new_engine: NewEngine) -> None:
    engine = new_engine("full", n_slots=1)
    ids = random_ids(84, 60)
    engine.complete(ids, max_tokens=1)
    report = engine.complete(ids, max_tokens=1).cache
    held = {id(each) for each in gc.get_objects() if type(each).__name__ in ("Engine", "SchedulerState", "Model")}
    seen, left = set(), [report.evidence]
    while left:
        each = left.pop()
        if id(each) not in seen and not isinstance(each, type):
            seen.add(id(each))
            left += [x for x in gc.get_referents(each) if not isinstance(x, type)]
    assert not held & seen
    engine.close()
    assert report.explain().cost == 1
