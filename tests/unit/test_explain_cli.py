"""`pyllamacache explain` and `pyllamacache audit`."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pyllamacache import __main__ as command_line

SYSTEM = (
    "You are the agent of a bookshop. It is now 2026-11-30 06:45:12. Look things up before you answer, and be kind."
)
OLD = {"messages": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "Where is my order 1729?" * 4}]}
NEW = copy.deepcopy(OLD)
NEW["messages"][0]["content"] = SYSTEM.replace("45:12", "47:03")
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Run:
    def run(*arguments: object) -> tuple[int, str, str]:
        try:
            code = command_line.main([str(each) for each in arguments])
        except SystemExit as ended:  # argparse
            code = int(ended.code or 0)
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def save(tmp_path: Path) -> Callable[[str, Any], Path]:
    def write(name: str, value: Any) -> Path:
        text = value if isinstance(value, str) else json.dumps(value)
        (tmp_path / name).write_text(text, encoding="utf-8")
        return tmp_path / name

    return write


@pytest.mark.parametrize("wrap", [lambda body: body, lambda body: {"body": body}, lambda body: body["messages"]])
def test_two_requests_are_explained(wrap: Any, command: Run, save: Any) -> None:
    code, out, err = command("explain", save("a", wrap(OLD)), save("b", wrap(NEW)))
    assert (code, err) == (0, "")
    assert "changed_span" in out
    assert "messages[0].content (system), which looks like a timestamp" in out
    assert "move the time out of messages[0].content" in out
    assert "06:45:12" not in out


def test_text_is_shown_on_request_only(command: Run, save: Any) -> None:
    _, out, _ = command("explain", save("a", OLD), save("b", NEW), "--show-text")
    assert "was: '06:45:12.'" in out
    assert "now: '06:47:03.'" in out


def test_an_explanation_as_json(command: Run, save: Any) -> None:
    code, out, _ = command("explain", save("a", OLD), save("b", NEW), "--json")
    told = json.loads(out)
    assert (code, told["change"], told["path"], told["unit"]) == (0, "changed_span", "messages[0].content", "bytes")
    assert "old" not in told


def test_texts_and_ids_are_explained_too(command: Run, save: Any) -> None:
    assert "byte 60" in command("explain", save("a", "x" * 60 + "abc" * 9), save("b", "x" * 60 + "q" + "abc" * 9))[1]
    ids = list(range(90))
    assert "token 40" in command("explain", save("c", ids), save("d", [*ids[:40], 7, *ids[41:]]))[1]


def test_tokens_are_those_of_a_model(command: Run, save: Any, tiny_path: Callable[[str], Path]) -> None:
    code, out, err = command("explain", save("a", OLD), save("b", NEW), "--model", tiny_path("full"))
    assert (code, err) == (0, "")
    assert "first difference at token" in out


def test_what_a_terminal_would_obey_is_written_out(command: Run, save: Any) -> None:
    old, new = (save(name, f"{'x' * 60}\x1b[2J{end} and so on") for name, end in (("a", "one"), ("b", "two")))
    assert "\x1b" not in command("explain", old, new, "--show-text")[1]


def test_a_log_is_audited(command: Run, save: Any) -> None:
    log = save("log", "\n".join([json.dumps(OLD), "not JSON", json.dumps(NEW), json.dumps(NEW)]))
    code, out, err = command("audit", log)
    assert (code, err) == (0, "")
    assert "3 requests" in out
    assert "request 3 after 1: changed_span (timestamp) in messages[0].content" in out
    assert "skipped: line 2" in out
    assert "in the latest request: high: timestamp" in out
    told = json.loads(command("audit", log, "--json")[1])
    assert f"hit rate of {told['hit_rate']:.1%}"[:15] in out
    assert [each["request"] for each in told["breaks"]] == [3]
    assert command("audit", log, "--strict")[0] == 1


def test_a_low_hit_rate_can_fail_a_build(command: Run, save: Any) -> None:
    log = save("log", "\n".join(map(json.dumps, [OLD, OLD, OLD])))
    rate = json.loads(command("audit", log, "--json")[1])["hit_rate"]
    assert command("audit", log, "--fail-under", rate - 0.01)[0] == 0
    code, out, _ = command("audit", log, "--fail-under", rate + 0.01)
    assert code == 1
    assert "below" in out
    code, out, _ = command("audit", log, "--fail-under", rate + 0.01, "--json")
    assert (code, json.loads(out)["n_requests"]) == (1, 3)


def test_errors_are_one_line_and_quote_nothing(command: Run, save: Any) -> None:
    secret = save("bad", {"messages": ["XYZZY"]})
    for arguments in (
        ("explain", "/no/a", "/no/b"),
        ("audit", "/no/log"),
        ("audit", secret),
        ("explain", secret, secret),
    ):
        code, out, err = command(*arguments)
        assert (code, out, err.count("\n")) == (1, "", 1)
        assert "XYZZY" not in err


@pytest.mark.parametrize("arguments", [["explain", "a"], ["audit"], ["audit", "log", "--fail-under", "2"]])
def test_wrong_arguments_exit_with_2(command: Run, arguments: list[str]) -> None:
    assert command(*arguments)[0] == 2
