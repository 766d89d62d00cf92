"""Explanations: the right change at the right place, one suggestion that fits, and no text unless asked for."""

from __future__ import annotations

import copy
import json
from typing import Any

import numpy as np
import pytest

import pyllamacache
from pyllamacache import CacheReport, Change, Explanation, Reason, Source, explain
from pyllamacache.errors import InvalidRequestError
from pyllamacache.observe.places import locate, serialise
from pyllamacache.request import Outline

SYSTEM = (
    "You are the agent of a bookshop. It is now 2026-11-30 06:45:12. Look things up before you answer, and be kind."
)
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": SYSTEM},
    {"role": "user", "content": "Where is the order that I sent you last week?"},
    {"role": "assistant", "content": "It left our warehouse this morning, and will be there tomorrow."},
    {"role": "user", "content": "And the one before? It had three books on Roman roads in it."},
    {"role": "assistant", "content": "That one was delivered in October, to the neighbour on the left."},
    {"role": "user", "content": "Thank you, I will ask him."},
]


def tool(name: str, description: str = "of a book or an order, as the shop's own database has it") -> dict[str, Any]:
    properties = {"the_key": {"type": "string", "description": f"what {name} looks for"}}
    parameters = {"type": "object", "properties": properties, "required": ["the_key"]}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


TOOLS = [tool(name) for name in ("find_book", "order_book", "refund_order", "track_order")]


class ByteModel:
    """Tokenizes four bytes at a time."""

    def tokenize(self, text: str, add_special: bool, parse_special: bool) -> list[int]:
        data = text.encode()
        return [1] * add_special + [int.from_bytes(data[i : i + 4], "big") for i in range(0, len(data), 4)]


def edited(**contents: str) -> list[dict[str, Any]]:
    messages = copy.deepcopy(MESSAGES)
    for key, content in contents.items():
        messages[int(key[1:])]["content"] = content
    return messages


MORE = [{"role": "assistant", "content": "Do that."}, {"role": "user", "content": "He has it!"}]
OTHER_DESCRIPTION = [*TOOLS[:2], tool("refund_order", "of what was sent back"), TOOLS[3]]

BREAKS = {
    # messages, tools: change, path, role, suggestion
    "clock": (
        (edited(m0=SYSTEM.replace("45:12", "47:03")), TOOLS),
        ("changed_span", "messages[0].content", "system", "move the time out of messages[0].content"),
    ),
    "clock with more behind": (
        (edited(m0=SYSTEM.replace("45:12", "47:03")) + MORE, TOOLS),
        ("changed_span", "messages[0].content", "system", "move the time"),
    ),
    "tools reordered": (
        (MESSAGES, [TOOLS[0], TOOLS[2], TOOLS[1], TOOLS[3]]),
        ("reordered_blocks", "tools[1]", None, "sort the tools once"),
    ),
    "a tool's words": (
        (MESSAGES, OTHER_DESCRIPTION),
        ("changed_span", "tools[2].function.description", None, "send the same tools every time"),
    ),
    "a tool less": ((MESSAGES, TOOLS[1:]), ("cut_front", "tools[0]", None, "send the same tools")),
    "a tool more": (
        (MESSAGES, [*TOOLS[:2], tool("pay"), *TOOLS[2:]]),
        ("inserted_span", "tools[2]", None, "send the same tools"),
    ),
    "the oldest turn dropped": (
        (MESSAGES[:1] + MESSAGES[3:] + MORE, TOOLS),
        ("removed_middle", "messages[1]", "user", "compact once"),
    ),
    "history edited": (
        (edited(m2="It left our warehouse this noon, and will be there tomorrow."), TOOLS),
        ("changed_span", "messages[2].content", "assistant", "send assistant messages back as they came"),
    ),
    "a question edited": (
        (edited(m1="Where is the parcel that I sent you last week?"), TOOLS),
        ("changed_span", "messages[1].content", "user", "put what changes behind what stays"),
    ),
    "messages put in between": (
        (MESSAGES[:3] + MORE + MESSAGES[3:], TOOLS),
        ("inserted_span", "messages[3]", "assistant", "append what is new at the end"),
    ),
    "appended": ((MESSAGES + MORE, TOOLS), ("appended", "messages[6]", "assistant", "nothing to do")),
    "again": ((MESSAGES, TOOLS), ("identical", "", None, "nothing to do")),
}


@pytest.mark.parametrize("model", [None, ByteModel()], ids=["bytes", "tokens"])
@pytest.mark.parametrize("name", BREAKS)
def test_a_break_is_named_with_its_field_and_a_remedy(name: str, model: Any) -> None:
    (messages, tools), (change, path, role, suggestion) = BREAKS[name]
    found = explain(MESSAGES, messages, tools=tools, old_tools=TOOLS, model=model)
    assert (found.change, found.place.path, found.place.role) == (change, path, role)
    assert suggestion in found.suggestion
    assert found.unit == ("bytes" if model is None else "tokens")
    assert found.difference is not None
    assert found.cost == found.difference.n_new - found.position
    assert json.loads(json.dumps(found.to_dict()))["change"] == change


def test_request_bodies_bring_their_tools() -> None:
    old, new = ({"messages": MESSAGES, "tools": tools} for tools in (TOOLS, TOOLS[::-1]))
    assert explain(old, new).to_dict() == explain(MESSAGES, MESSAGES, old_tools=TOOLS, tools=TOOLS[::-1]).to_dict()


def test_ids_are_compared_as_they_are() -> None:
    old, new = list(range(100)), [*range(50), 7, *range(51, 100)]
    for a, b in ((old, new), (np.array(old, dtype=np.int32), np.array(new, dtype=np.int32)), (tuple(old), tuple(new))):
        found = explain(a, b)
        assert (found.unit, found.change, found.position, found.cost) == ("tokens", Change.CHANGED_SPAN, 50, 50)
        assert found.token_ids() == ((50,), (7,))
        assert found.text() is None
        assert "was: (50,)" in str(explain(a, b, show_text=True))
        assert explain(a, b, show_text=True).to_dict()["new"] == (7,)


def test_texts_are_compared_as_bytes_or_tokens() -> None:
    old, new = ("A long preface. " * 9 + f"It is now {clock}. " + "A long rest. " * 20 for clock in ("12:01", "12:02"))
    found = explain(old, new)
    assert (found.unit, found.volatile, found.position) == ("bytes", "time", 158)
    assert found.text() == ("12:01.", "12:02.")
    in_tokens = explain(old, new, model=ByteModel())
    assert (in_tokens.unit, in_tokens.volatile, in_tokens.position) == ("tokens", "time", 1 + 158 // 4)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ([1, 2], "text"),
        ("text", [1, 2]),
        ({"prompt": "x"}, "text"),
        (3.5, [1]),
        ([[1], [2]], [1]),
        ([1.5], [1]),
        ([1], None),
    ],
)
def test_what_cannot_be_compared_is_refused(old: Any, new: Any) -> None:
    with pytest.raises(InvalidRequestError):
        explain(old, new)


# ---- text --------------------------------------------------------------------------------------------------------

MARKER = "XYZZY-plugh-1729"
MARKED = [
    ({"role": "system", "content": f"{MARKER} is the word"}, {"role": "system", "content": f"The word is {MARKER}"}),
    ({"role": "user", "name": MARKER, "content": "a"}, {"role": "user", "name": MARKER * 2, "content": "a"}),
    ({"role": MARKER, "content": "a"}, {"role": MARKER, "content": "b"}),
    (
        {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {MARKER: 1}}}]},
        {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {MARKER: 2}}}]},
    ),
]


@pytest.mark.parametrize(("old", "new"), MARKED, ids=["content", "name", "role", "key"])
def test_s75_no_text_unless_it_is_asked_for(old: dict[str, Any], new: dict[str, Any]) -> None:
    hidden, shown = (explain([old], [new], show_text=show) for show in (False, True))
    for said in (repr(hidden), str(hidden), json.dumps(hidden.to_dict()), repr(shown)):
        assert MARKER not in said
    assert hidden.text() is not None
    assert "was: " in str(shown)
    if old["role"] == "system":
        assert MARKER in str(shown)
        assert MARKER in json.dumps(shown.to_dict())


def test_s75_names_of_parameters_are_text_too() -> None:
    old, new = (tool("f") for _ in range(2))
    for each, kind in ((old, "string"), (new, "number")):
        each["function"]["parameters"]["properties"] = {MARKER: {"type": kind}}
    found = explain([], [], old_tools=[old], tools=[new])
    assert found.place.path == "tools[0].function.parameters.properties[0].type"
    assert MARKER not in f"{found}{found!r}{found.to_dict()}"


def test_errors_quote_nothing() -> None:
    with pytest.raises(InvalidRequestError) as refused:
        explain([MARKER], [{"role": "user", "content": MARKER}])
    assert MARKER not in str(refused.value)


def test_nothing_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(0)
    explain(MESSAGES, edited(m0=MARKER), tools=TOOLS, show_text=True)
    assert caplog.records == []


# ---- reports without an engine ---------------------------------------------------------------------------------


@pytest.mark.parametrize("reason", list(Reason))
def test_a_report_alone_is_explained_by_its_numbers(reason: Reason) -> None:
    report = CacheReport(80, 40, 60, Source.SLOT, reason, 80)
    found = report.explain()
    assert isinstance(found, Explanation)
    assert (found.change, found.cost, found.position) == (None, 60, 80)
    assert str(reason) in str(found)
    assert found.suggestion
    assert explain(report).to_dict() == found.to_dict()


def test_reports_are_equal_whatever_is_known_of_them() -> None:
    assert CacheReport(0, 0, 1, Source.NONE, Reason.COLD, 0) == CacheReport(0, 0, 1, Source.NONE, Reason.COLD, 0)
    assert "evidence" not in repr(CacheReport(0, 0, 1, Source.NONE, Reason.COLD, 0))


def test_the_package_has_the_function_and_not_a_module() -> None:
    assert callable(pyllamacache.explain)


# ---- places in a rendered chat ---------------------------------------------------------------------------------


def rendered() -> tuple[Outline, bytes]:
    """As templates write: tools as JSON behind the system message, then the conversation."""
    head = f"<|im_start|>system\n{SYSTEM}\n# Tools\n" + "\n".join(map(json.dumps, TOOLS)) + "<|im_end|>\n"
    starts, text = [0], head
    for message in MESSAGES[1:]:
        starts.append(len(text))
        text += f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>\n"
    outline = Outline(tuple(starts), len(head), len(text), messages=tuple(MESSAGES), tools=tuple(TOOLS))
    return outline, (text + "<|im_start|>assistant\n").encode()


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("2026-11-30", "messages[0].content"),
        ("order_book", "tools[1].function.name"),
        ("what refund_order looks", "tools[2].function.parameters.properties[0].description"),
        ("in October", "messages[4].content"),
        ("Roman roads", "messages[3].content"),
        ("# Tools", "template"),
    ],
)
def test_a_byte_of_a_rendered_chat_is_found_in_its_message(text: str, path: str) -> None:
    outline, data = rendered()
    assert locate(outline, data, data.index(text.encode())).path == path


def test_what_a_template_adds_belongs_to_no_message() -> None:
    outline, data = rendered()
    assert locate(outline, data, len(data) - 1).path == "template"
    between = locate(outline, data, outline.starts[2] + 2)
    assert (between.path, between.message, between.role) == ("template", 2, "assistant")
    assert "messages[2]" in str(between)


def test_the_serialisation_follows_the_order_of_a_prompt() -> None:
    paths = [leaf.place.path for leaf in serialise(MESSAGES, TOOLS).leaves]
    assert paths.index("tools[3].function.name") < paths.index("messages[0].content") < paths.index("messages[1].role")
    assert len(set(paths)) == len(paths)
