"""What will change is pointed at before it is sent; what a cache can reach over a log, and what breaks it."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyllamacache import audit, audit_log
from pyllamacache.errors import ConfigError, InvalidRequestError, PyLlamaCacheError
from pyllamacache.observe.difference import common_length
from pyllamacache.observe.places import serialise

TRACES = Path(__file__).resolve().parents[4] / "shared" / "traces"
STABLE = "Look things up before you answer, be brief, be kind, and never promise what the shop cannot keep. " * 4


class ByteModel:
    """Four bytes are a token."""

    def tokenize(self, text: str, add_special: bool, parse_special: bool) -> list[int]:
        data = text.encode()
        return [int.from_bytes(data[i : i + 4], "big") >> 1 for i in range(0, len(data), 4)]


def tool(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties or {"key": {"type": "string"}}}
    function = {"name": name, "description": f"what {name} does with an order of this shop", "parameters": parameters}
    return {"type": "function", "function": function}


TOOLS = [tool("find"), tool("order"), tool("refund")]


def chat(system: str, *turns: str, tools: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    messages = [{"role": "system", "content": system}]
    messages += [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(turns)]
    return {"messages": messages, "tools": TOOLS if tools is None else tools}


# ---- one request -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("volatile", "kind"),
    [
        ("The current time is 2026-11-30 06:45:43.", "timestamp"),
        ("Today is November 30, 2026.", "date"),
        ("Session a81bc81b-dead-4e5d-abff-90865d1e13b1", "uuid"),
        ("request_id=8f3k2m9x", "id"),
        ("This is turn 7.", "counter"),
        ("tokens used: 1,234", "counter"),
    ],
)
@pytest.mark.parametrize("model", [None, ByteModel()], ids=["bytes", "tokens"])
def test_what_changes_above_stable_text_is_found_with_its_weight(volatile: str, kind: str, model: Any) -> None:
    found = audit(chat(f"{volatile}\n{STABLE}", "Where is my order?"), model=model)
    (finding,) = found.findings
    assert (finding.kind, finding.path, finding.severity) == (kind, "messages[0].content", "high")
    assert finding.position + finding.weight == found.size
    assert finding.weight * (1 if model is None else 4) > len(STABLE)
    assert found.unit == finding.unit == ("bytes" if model is None else "tokens")
    assert "into the last message" in finding.suggestion
    whole = json.dumps(found.to_dict()) + str(found) + repr(found)
    assert volatile.rsplit(maxsplit=1)[-1] not in whole


def test_the_position_is_that_of_the_serialised_prompt() -> None:
    request = chat(f"{STABLE} It is now 06:45:43.", "x")
    serial = serialise(request["messages"], request["tools"])
    (finding,) = audit(request).findings
    assert b"".join(serial.pieces)[finding.position :].startswith(b"06:45:43")
    assert audit(request["messages"], tools=request["tools"]).findings == (finding,)


def test_the_last_message_and_history_may_say_the_time() -> None:
    asked = chat(STABLE, "It is now 06:45:43. What next?")
    assert audit(asked).findings == ()
    later = chat(STABLE, "Hello", "It is now 06:45:43.", "request_id=8f3k2m9x", "ok", "and now?")
    assert audit(later).findings == ()
    early = chat(STABLE, "request_id=8f3k2m9x", "ok", "and now?")
    assert [(each.kind, each.severity) for each in audit(early).findings] == [("id", "low")]


def test_tools_are_looked_at_too() -> None:
    clocked = copy.deepcopy(TOOLS)
    clocked[1]["function"]["description"] += ", as of 2026-11-30 06:45"
    (finding,) = audit(chat(STABLE, "x", tools=clocked)).findings
    assert (finding.kind, finding.path) == ("timestamp", "tools[1].function.description")
    (finding,) = audit(chat(STABLE, "x", tools=TOOLS[::-1])).findings
    assert (finding.kind, finding.severity, finding.path) == ("tool_order", "low", "tools[1].type")


@pytest.mark.parametrize(
    ("arguments", "is_loose"),
    [
        ('{"a": 1, "b": [2, 3]}', False),
        ('{"a":1,"b":[2,3]}', False),
        ('{ "a":1 }', True),
        ('{"a": 0.30000000000000004}', True),
    ],
)
def test_json_that_is_not_written_one_way_is_found(arguments: str, is_loose: bool) -> None:
    call = {"type": "function", "id": "1", "function": {"name": "find", "arguments": arguments}}
    messages = [*chat(STABLE, "x")["messages"], {"role": "assistant", "tool_calls": [call]}]
    messages += [{"role": "tool", "tool_call_id": "1", "content": "{}"}]
    assert [each.kind for each in audit(messages, tools=TOOLS).findings] == ["json_form"] * is_loose


@pytest.mark.skipif(not TRACES.exists(), reason="the recorded prompts are not here")
def test_recorded_prompts_are_found_to_be_what_they_are() -> None:
    policy = (TRACES / "tau-bench" / "airline_system_prompt.md").read_text(encoding="utf-8")
    tools = json.loads((TRACES / "tau-bench" / "airline_tools.json").read_text(encoding="utf-8"))
    found = audit(chat(policy, "hello", tools=tools)).findings
    assert [(each.kind, each.severity) for each in found] == [("timestamp", "high")]
    many = json.loads((TRACES / "vscode-copilot-chat" / "agent_tools_69.json").read_text(encoding="utf-8"))
    assert [(each.kind, each.severity) for each in audit(chat(STABLE, "hello", tools=many)).findings] == [
        ("tool_order", "low")
    ]


# ---- a log -------------------------------------------------------------------------------------------------------

TURNS = [f"This is what is said at place {n}, at some length, so that it counts for something." for n in range(12)]


def conversation(n_requests: int, system: str = STABLE) -> list[dict[str, Any]]:
    return [chat(system, *TURNS[: 2 * n + 1]) for n in range(n_requests)]


def sizes(requests: list[dict[str, Any]]) -> list[int]:
    return [sum(map(len, serialise(each["messages"], each["tools"]).pieces)) for each in requests]


def test_a_conversation_that_grows_has_no_breaks() -> None:
    requests = conversation(5)
    found = audit_log(requests)
    n = sizes(requests)
    assert (found.n_requests, found.size, found.reachable, found.breaks) == (5, sum(n), sum(n[:-1]), ())
    assert found.hit_rate == sum(n[:-1]) / sum(n)
    assert audit_log([*requests, requests[-1]]).reachable == sum(n[:-1]) + n[-1] - 1


def test_two_conversations_with_one_header_have_no_breaks() -> None:
    other = [
        chat(STABLE, *(f"Something else entirely, number {n} of its kind." for n in range(2 * k + 1))) for k in range(4)
    ]
    mixed = [each for pair in zip(conversation(4), other, strict=True) for each in pair]
    assert audit_log(mixed).breaks == ()


BREAKS: dict[str, Any] = {
    "clock": (
        lambda requests: [chat(f"It is now 06:4{n}:00. {STABLE}", *TURNS[: 2 * n + 1]) for n in range(len(requests))],
        ("changed_span", "timestamp", "messages[0].content", "move the time"),
    ),
    "tools": (
        lambda requests: [*requests[:-1], {**requests[-1], "tools": TOOLS[::-1]}],
        ("reordered_blocks", None, "tools[0]", "sort the tools once"),
    ),
    "dropped": (
        lambda requests: [
            *requests[:-1],
            {**requests[-1], "messages": requests[-1]["messages"][:1] + requests[-1]["messages"][3:]},
        ],
        ("removed_middle", None, "messages[1]", "compact once"),
    ),
}


@pytest.mark.parametrize("name", BREAKS)
def test_a_break_is_found_after_the_request_it_goes_on_with(name: str) -> None:
    change, (kind, volatile, path, suggestion) = BREAKS[name]
    found = audit_log(change(conversation(5)))
    last = found.breaks[-1]
    assert (last.request, last.kind, last.path) == (5, kind, path)
    assert suggestion in last.suggestion
    assert volatile is None or last.volatile in ("time", "timestamp")
    assert len(found.breaks) == (4 if name == "clock" else 1)
    assert 300 < last.cost < found.size
    assert found.hit_rate + found.avoidable <= 1
    assert f"request 5 after {last.earlier}" in str(found)
    assert found.hit_rate < audit_log(conversation(5)).hit_rate


def test_json_written_otherwise_is_told_from_other_json() -> None:
    old, new, other = (
        chat(STABLE, "x", content, *TURNS)
        for content in ('{"alpha": 1, "beta": 2}', '{"alpha":1,"beta":2}', '{"alpha": 1, "beta": 7}')
    )
    assert [each.kind for each in audit_log([old, new]).breaks] == ["json_form"]
    assert [each.kind for each in audit_log([old, other]).breaks] == ["changed_span"]


@pytest.mark.parametrize(
    "wrap",
    [
        lambda body: body,
        lambda body: {"request": body},
        lambda body: {"custom_id": "a", "body": body},
        lambda body: {"body": json.dumps(body)},
        lambda body: body["messages"],
    ],
)
def test_requests_may_be_wrapped(wrap: Any, tmp_path: Path) -> None:
    requests = conversation(3)
    if wrap(requests[0]) is requests[0]["messages"]:
        requests = [{**each, "tools": []} for each in requests]
    log = tmp_path / "log.jsonl"
    log.write_text("".join(f"{json.dumps(wrap(each))}\n\n" for each in requests), encoding="utf-8")
    assert audit_log(log).to_dict() == audit_log(requests).to_dict()
    assert audit_log(str(log), model=ByteModel()).unit == "tokens"


def test_bad_lines_are_named_and_quote_nothing(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    good, secret = json.dumps(chat(STABLE, "x")), "XYZZY-plugh"
    bad = [f"{{{secret}", json.dumps({"input": secret}), json.dumps({"messages": [secret]}), json.dumps(7)]
    log.write_text("\n".join([good, *bad, good]), encoding="utf-8")
    found = audit_log(log)
    assert found.n_requests == 2
    assert [str(each).split(",")[0].split(":")[0] for each in found.skipped] == [f"line {n}" for n in (2, 3, 4, 5)]
    assert secret not in f"{found}{found!r}{found.to_dict()}"
    with pytest.raises(InvalidRequestError, match="line 2"):
        audit_log(log, strict=True)
    with pytest.raises(InvalidRequestError, match="line 1"):
        audit_log(bad)


def test_a_log_that_cannot_be_read_is_an_error_of_ours(tmp_path: Path) -> None:
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    for path in (tmp_path / "none", tmp_path, tmp_path / "bytes"):
        with pytest.raises(ConfigError) as refused:
            audit_log(path)
        assert isinstance(refused.value, PyLlamaCacheError)


def test_no_requests_are_no_error() -> None:
    found = audit_log([])
    assert (found.n_requests, found.hit_rate, found.avoidable) == (0, 0.0, 0.0)
    assert str(found)


texts = st.lists(st.text("ab", max_size=12), min_size=1, max_size=8)


@given(texts, st.booleans())
def test_what_is_reachable_is_the_longest_common_beginning_with_anything_earlier(
    parts: list[str], in_tokens: bool
) -> None:
    model = ByteModel() if in_tokens else None
    requests = [{"messages": [{"role": "user", "content": text}]} for text in parts]
    arrays = []
    for each in requests:
        serial = serialise(each["messages"])
        pieces = [piece if model is None else model.tokenize(piece.decode(), False, False) for piece in serial.pieces]
        arrays.append(np.array([unit for piece in pieces for unit in piece]))
    expected = [
        min(max((common_length(before, now) for before in arrays[:n]), default=0), len(now) - 1)
        for n, now in enumerate(arrays)
    ]
    assert audit_log(requests, model=model).reachable == sum(expected)
