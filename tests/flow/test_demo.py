"""The demo, end to end: what it prints adds up, on every kind of memory, and on the model that it fetches."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from pyllamacache import __main__ as command_line
from pyllamacache.cli import demo
from tests.models import FullSpec, TinySpec

ROW = re.compile(r"\s+(\d) +([\d,]+) +([\d,]+) +([\d,]+) +[\d.]+ m?s +[\d.]+ m?s +[\d.]+x")


def table(output: str) -> list[tuple[int, ...]]:
    """(turn, prompt, cached, prefilled) of each row."""
    rows = [ROW.fullmatch(line) for line in output.splitlines()]
    return [tuple(int(number.replace(",", "")) for number in row.groups()) for row in rows if row]


def check(output: str) -> None:
    rows = table(output)
    assert [turn for turn, *_ in rows] == [1, 2, 3, 4], output
    for _, prompt, cached, prefilled in rows:
        assert cached + prefilled == prompt
    assert rows[0][2] == 0
    for (_, before, *_), (_, prompt, cached, prefilled) in pairwise(rows):
        # The last sampled token is not in the KV cache; a reply may end before its limit.
        assert before <= cached <= before + demo.REPLY_TOKENS - 1
        assert prefilled < prompt / 2
    sent, computed = sum(row[1] for row in rows), sum(row[3] for row in rows)
    assert f"The 4 prompts had {sent:,} tokens together; {computed:,} of them were computed" in output


@pytest.mark.parametrize("kind", ["full", "sliding", "hybrid", "recurrent"])
def test_every_kind_of_memory_resumes_each_turn(
    kind: str, tiny_path: Callable[[TinySpec | str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["demo", "--model", str(tiny_path(kind)), "--n-ctx", "2048", "--threads", "1"]
    assert command_line.main(arguments) == 0
    output = capsys.readouterr().out
    assert "is cut to" in output  # a token per byte or two: the whole prompt would not fit
    assert f" {kind} memory" in output
    check(output)


def test_a_context_without_room_is_refused_with_the_number(
    tiny_path: Callable[[TinySpec | str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(tiny_path("full"))
    assert command_line.main(["demo", "--model", model, "--n-ctx", "64"]) == 1
    refused = re.search(r"--n-ctx=64: expected at least (\d+) tokens", capsys.readouterr().err)
    assert refused
    assert command_line.main(["demo", "--model", model, "--n-ctx", refused[1], "--threads", "1"]) == 0
    assert len(table(capsys.readouterr().out)) == 4


def test_a_context_beyond_the_trained_one_is_refused(
    tiny_path: Callable[[TinySpec | str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert command_line.main(["demo", "--model", str(tiny_path("full")), "--n-ctx", "999999"]) == 1
    assert "n_ctx=999999" in capsys.readouterr().err


def test_a_model_without_a_vocabulary_is_refused(
    tiny_path: Callable[[TinySpec | str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert command_line.main(["demo", "--model", str(tiny_path(FullSpec(vocabulary="none")))]) == 1
    assert "vocabulary" in capsys.readouterr().err


@pytest.mark.slow
def test_replies_do_not_change_with_the_run(tiny_path: Callable[[TinySpec | str], Path], capsys: Any) -> None:
    runs = []
    for _ in range(2):
        command_line.main(["demo", "--model", str(tiny_path("full")), "--n-ctx", "2048", "--threads", "1"])
        runs.append(table(capsys.readouterr().out))
    assert runs[0] == runs[1]


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_smollm2(smollm2_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With a short context, which cuts the system prompt: how long it takes is for the benchmarks."""
    assert command_line.main(["demo", "--model", str(smollm2_path), "--n-ctx", "640"]) == 0
    output = capsys.readouterr().out
    assert "full memory" in output
    check(output)
