"""What will change is found, and what prompts say for good is not."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from pyllamacache.observe.volatile import Volatile, find_volatile

TRACES = Path(__file__).resolve().parents[4] / "shared" / "traces"

CHANGING = {
    "The current time is 2024-05-15 15:00:00 EST.": "timestamp",
    "now: 2026-11-30T06:45:43.123Z": "timestamp",
    "2026-11-30T06:45:43+01:00 session begins": "timestamp",
    "Today is Monday, November 30, 2026 at 14:05": "timestamp",
    '{"timestamp": 1764485143}': "timestamp",
    "Current time (ms): 1764485143123": "timestamp",
    "It is now 14:35:02 in Berlin.": "time",
    "Current time: 2:35 pm": "time",
    "Today's date: 2026-11-30": "date",
    "Today Date: 26 Jul 2026": "date",
    "Today is November 30, 2026.": "date",
    "Date: 30/11/2026": "date",
    "session 0b5f2c1e-93a4-4d6e-8f77-5c2f7f1e9a10": "uuid",
    "Request-ID: 8f3k2m9x": "id",
    "session_id=abc123def": "id",
    "trace req_8f3k2m9xq1": "id",
    "cch=3f9a1;": "hash",
    "HEAD is 9fceb02d0ae598e95dc970b74767f19372d61af8": "hash",
    "md5 9e107d9d372bb6826bd81d3542a419d6": "hash",
    "This is turn 7.": "counter",
    "message 12 of 40": "counter",
    "tokens used: 1,234": "counter",
    "You have 4,096 tokens left": "counter",
    "Budget remaining: $3.20": "counter",
}

CONSTANT = [
    "Use Python 3.11.4 and numpy 1.26.",
    "The API version is 2023-06-01.",
    "Knowledge cutoff: 2024-06-30",
    "Dates are written like 2024-05-15, times like 14:00.",
    "Use ISO 8601, e.g. 2024-01-01T00:00:00Z.",
    "Open from 09:00 to 17:00 on weekdays.",
    "The battle of 1916-07-01 lasted until November 18, 1916.",
    "Step 1: read the file. Step 2: edit it.",
    "Call 555-0100 or 1800123456 for help.",
    "An id such as 123e4567-e89b-12d3-a456-426614174000 names a user.",
    "Each user has a profile containing user id, email and reservation id.",
    "Colours are #ff00aa and #00ff7f.",
    "def f(x, y=10):\n    return x[3:10] + 0xdeadbeef",
    "In the example, 3 tokens are used for the header.",
    "The session id is returned by create_session.",
    "2 free checked bags for each economy passenger, within 24 hours of booking.",
    "A ratio of 16:9 and the verse John 3:16.",
    "Copyright 2024 The Authors. Licensed under the Apache License, Version 2.0",
]


@pytest.mark.parametrize("text", CHANGING)
def test_what_changes_is_found(text: str) -> None:
    assert [str(each.kind) for each in find_volatile(text)] == [CHANGING[text]]


@pytest.mark.parametrize("text", CONSTANT)
def test_what_stays_is_left_alone(text: str) -> None:
    assert [text[each.start : each.end] for each in find_volatile(text)] == []


def test_places_are_in_order_and_apart() -> None:
    text = "\n".join(CHANGING)
    found = find_volatile(text)
    assert len(found) == len(CHANGING)
    assert all(a.end <= b.start for a, b in itertools.pairwise(found))


@pytest.mark.skipif(not TRACES.exists(), reason="the recorded prompts are not here")
def test_recorded_prompts_have_one_clock_and_nothing_else() -> None:
    policy = (TRACES / "tau-bench" / "airline_system_prompt.md").read_text(encoding="utf-8")
    assert [(str(each.kind), each.is_sure) for each in find_volatile(policy)] == [("timestamp", True)]
    tools = json.loads((TRACES / "vscode-copilot-chat" / "agent_tools_69.json").read_text(encoding="utf-8"))
    assert find_volatile(json.dumps(tools)) == []


def test_a_clock_needs_no_word_beside_it_where_it_has_seconds() -> None:

    for text in ("It is 09:41:52. Be brief.", "[09:41:52] Be brief.", "It's 9:41. Be brief."):
        assert [each.kind for each in find_volatile(text)] == [Volatile.TIME], text
