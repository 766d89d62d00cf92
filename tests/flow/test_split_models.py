"""A model in several files is one model: loaded by its first part, identified by all of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pyllamacache import Engine, Model
from pyllamacache.errors import ModelFormatError, ModelNotFoundError
from tests.flow.law import random_ids
from tests.models import FullSpec, write_split_model

IDS = random_ids(1, 60)


def _reply(path: Path) -> tuple[int, ...]:
    with Model(path, progress=False) as model, Engine(model, n_ctx=256, n_threads=1, progress=False) as engine:
        return tuple(engine.complete(IDS, max_tokens=8).token_ids)


def test_a_split_model_answers_like_the_whole_one(tiny_path: Callable[..., Path], tmp_path: Path) -> None:
    parts = write_split_model(FullSpec(), tmp_path)
    assert len(parts) > 2
    assert _reply(parts[0]) == _reply(tiny_path("full"))


def test_a_change_in_any_part_is_another_fingerprint(tmp_path: Path) -> None:
    parts = write_split_model(FullSpec(), tmp_path)
    seen = set()
    for part in (None, *parts):
        if part is not None:
            data = bytearray(part.read_bytes())
            data[-3] ^= 1
            part.write_bytes(data)
        with Model(parts[0], progress=False) as model:
            seen.add(model.fingerprint)
    assert len(seen) == len(parts) + 1


@pytest.mark.parametrize("what", ["missing", "of another model", "named second"])
def test_an_incomplete_split_model_is_refused_by_name(what: str, tmp_path: Path) -> None:
    parts = write_split_model(FullSpec(), tmp_path)
    first: Any = parts[0]
    if what == "missing":
        parts[1].unlink()
    elif what == "of another model":
        parts[1].write_bytes(parts[0].read_bytes())
    else:
        first = parts[1]
    with pytest.raises((ModelFormatError, ModelNotFoundError), match=r"part|00002"):
        Model(first, progress=False)
