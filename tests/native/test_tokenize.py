"""Tokenizing what nobody expects: long runs, bytes that are no characters, everything back again."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyllamacache.errors import InvalidRequestError


def test_a_long_run_of_equal_characters_does_not_overflow_the_stack(
    tiny_path: Callable[..., Path], tmp_path: Path
) -> None:
    """Old bug: pre-tokenizers on std::regex recurse once per character; 26,000 spaces ended the process."""
    data = tiny_path("full").read_bytes()
    marker = b"tokenizer.ggml.pre" + (8).to_bytes(4, "little") + (5).to_bytes(8, "little")
    assert data.count(marker + b"qwen2") == 1
    path = tmp_path / "bloom.gguf"
    path.write_bytes(data.replace(marker + b"qwen2", marker + b"bloom"))
    script = (
        "import sys, pyllamacache as plc\n"
        "model = plc.Model(sys.argv[1], progress=False)\n"
        "for character in ' a1.é':\n"
        "    text = character * 150_000\n"
        "    assert model.detokenize(model.tokenize(text, add_special=False)) == text\n"
        "print('alive')\n"
    )
    run = subprocess.run([sys.executable, "-c", script, str(path)], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout) == (0, "alive\n"), run.stderr


def test_a_text_with_a_lone_surrogate_is_refused(tiny_models: Callable[..., Any]) -> None:
    with pytest.raises(InvalidRequestError):
        tiny_models("full").tokenize("abc\ud800")


def test_any_text_comes_back_from_its_tokens(tiny_models: Callable[..., Any]) -> None:
    model = tiny_models("full")

    @settings(max_examples=50)
    @given(st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=200), st.integers(1, 40))
    def check(text: str, n: int) -> None:
        assert model.detokenize(model.tokenize(text * n, add_special=False)) == text * n

    check()
