"""The README says what is so: its commands are there, its example runs, its tables are complete."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from pyllamacache import __version__
from pyllamacache.request import CacheReport, Reason, Source, Timings, Usage
from tests.models import TinySpec

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)


def first_cells() -> set[str]:
    return set(re.findall(r"^\| `([^`]+)` ", README, flags=re.MULTILINE))


@pytest.mark.parametrize("command", ["pip install . && pyllamacache demo", "pip install -e '.[test]' && pytest"])
def test_each_command_stands_alone_in_a_block(command: str) -> None:
    assert f"{command}\n" in blocks("sh")


@pytest.mark.parametrize("kind", ["full", "hybrid"])
def test_the_example_runs(kind: str, tiny_path: Callable[[TinySpec | str], Path], tmp_path: Path) -> None:
    example = blocks("python")[0]
    assert sum(1 for line in example.splitlines() if line) == 10
    (tmp_path / "model.gguf").symlink_to(tiny_path(kind))
    # Not in the checkout's root, where the folder without the compiled module would be found first.
    program = [sys.executable, "-c", example]
    # Threads that spin while they wait for each other take seconds where something else needs the cores.
    environment = os.environ | {"OMP_WAIT_POLICY": "PASSIVE"}
    done = subprocess.run(
        program, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    numbers = re.search(r"^(\d+) of (\d+) tokens reused: hit$", done.stdout, flags=re.MULTILINE)
    assert numbers, done.stdout
    assert 0 < int(numbers[1]) < int(numbers[2])


@pytest.mark.parametrize("source", blocks("python"), ids=lambda source: source.splitlines()[0])
def test_every_example_is_python(source: str) -> None:
    compile(source, "README.md", "exec")


@pytest.mark.parametrize("reason", Reason, ids=str)
def test_every_reason_is_explained(reason: Reason) -> None:
    assert str(reason) in first_cells()


@pytest.mark.parametrize("value", [Usage, CacheReport, Timings], ids=lambda value: str(value.__name__))
def test_every_field_of_a_result_is_named(value: Any) -> None:
    for field in fields(value):
        assert f"`{field.name}`" in README


def test_every_source_is_named() -> None:
    for source in Source:
        assert f"`{source}`" in README


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / target).exists(), target


def test_the_numbers_have_their_place() -> None:
    assert README.count("<!-- numbers:begin -->") == README.count("<!-- numbers:end -->") == 1
    assert README.index("<!-- numbers:begin -->") < README.index("<!-- numbers:end -->")


def test_the_changelog_has_this_version() -> None:
    assert f"\n## {__version__}\n" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
