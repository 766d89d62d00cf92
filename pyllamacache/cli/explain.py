"""`pyllamacache explain A B`: what of prompt B a prefix cache that has seen A cannot reuse, and why."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError
from .command import Command
from .lines import Say, printable

if TYPE_CHECKING:
    from ..model import Model


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = "JSON of a request, of messages or of token ids, or any text"
    parser.add_argument("old", metavar="A", help=f"the earlier prompt: {kinds}")
    parser.add_argument("new", metavar="B", help="the prompt that was prefilled again")
    parser.add_argument("--show-text", action="store_true", help="print what was there and what is there now")
    add_common_arguments(parser)


def add_common_arguments(parser: argparse.ArgumentParser) -> None:
    """Those of the commands that read prompts."""
    parser.add_argument("--model", metavar="FILE", type=Path, help="count in tokens of this GGUF model, not in bytes")
    parser.add_argument("--json", action="store_true", help="print JSON")


def _run(arguments: argparse.Namespace, say: Say) -> int:
    from ..observe.explain import explain

    old, new = read_prompt(arguments.old), read_prompt(arguments.new)
    with tokenizer(arguments.model) as model:
        explained = explain(old, new, model=model, show_text=arguments.show_text)
    if arguments.json:
        say(json.dumps(explained.to_dict(), indent=2))
    else:
        for line in str(explained).splitlines():
            say(printable(line))
    return 0


def read_prompt(path: str) -> Any:
    """What `explain` takes. Raises ConfigError where the file cannot be read."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError("file", os.fspath(path), f"a readable file of JSON or text; {why}") from None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    for _ in range(2):
        if isinstance(value, Mapping) and "messages" not in value:
            value = value.get("request", value.get("body", value))
    is_prompt = isinstance(value, list) or (isinstance(value, Mapping) and "messages" in value)
    return value if is_prompt else text


@contextmanager
def tokenizer(path: Path | None) -> Iterator[Model | None]:
    """The model's vocabulary; None without a model."""
    if path is None:
        yield None
        return
    from ..model import Model

    with Model(path, n_gpu_layers=0) as model:
        yield model


COMMAND = Command("explain", "say what of a prompt cannot be reused after another one, and why", _add_arguments, _run)
