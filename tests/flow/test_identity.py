"""State is keyed by what computed it: weights as loaded, RoPE to the last digit, the factors a context picks."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pyllamacache import Engine, Model
from pyllamacache.errors import CacheMismatchError, InternalError, ModelFormatError, WrongThreadError
from tests.flow.law import random_ids
from tests.models import FullSpec
from tests.models.image import encode, image_of

IDS = random_ids(1, 60)


def test_a_model_file_replaced_after_loading_gives_no_fingerprint(
    tiny_path: Callable[..., Path], tmp_path: Path
) -> None:
    """Old bug: the slot file of the old weights carried the new file's fingerprint, and was accepted under it."""
    path, other = tmp_path / "model.gguf", tmp_path / "other.gguf"
    path.write_bytes(tiny_path("full").read_bytes())
    other.write_bytes(tiny_path(FullSpec(seed=9)).read_bytes())
    with Model(path, progress=False) as model, Engine(model, n_ctx=256, n_threads=1, progress=False) as engine:
        engine.complete(IDS, max_tokens=1, slot=0)
        os.replace(other, path)
        with pytest.raises(ModelFormatError, match="replaced or changed"):
            engine.slots[0].save(tmp_path / "slot")
        assert engine.complete(IDS, max_tokens=1).finish_reason == "length"


def test_rope_settings_differ_to_the_last_digit(new_engine: Callable[..., Any], tmp_path: Path) -> None:
    engine = new_engine("full", rope_freq_base=1000001.0)
    engine.complete(IDS, max_tokens=0, slot=0)
    engine.slots[0].save(tmp_path / "slot")
    with pytest.raises(CacheMismatchError) as caught:
        new_engine("full", rope_freq_base=1000001.5).slots[0].restore(tmp_path / "slot")
    assert caught.value.field == "rope"


def test_a_context_that_picks_other_rope_factors_is_another_layout(tmp_path: Path) -> None:
    """LongRoPE: llama.cpp takes the long factors when a context exceeds the length of the first training."""
    from gguf import GGUFValueType

    from tests.models.metadata import Entry

    image = image_of(FullSpec())
    key = "llama.rope.scaling.original_context_length"
    entries = [*image.entries, Entry(key, 512, GGUFValueType.UINT32, None)]
    path = tmp_path / "model.gguf"
    path.write_bytes(encode(type(image)(**{**{f: getattr(image, f) for f in image.__slots__}, "entries": entries})))
    with Model(path, progress=False) as model:
        layouts = []
        for n_ctx in (256, 512, 1024):
            with Engine(model, n_ctx=n_ctx, n_threads=1, progress=False) as engine:
                layouts.append(engine.layout)
    assert layouts[0] == layouts[1] != layouts[2]


def test_a_finalizer_that_asks_the_engine_does_not_hang_it(new_engine: Callable[..., Any]) -> None:
    """Old bug: the collector may run any finalizer on the scheduler thread, which then waited for itself."""
    engine = new_engine("full")
    caught: list[BaseException] = []

    def ask() -> None:
        try:
            engine.slots[0].n_tokens  # noqa: B018
        except WrongThreadError as error:
            caught.append(error)

    engine._scheduler.inbox.call(ask)
    assert len(caught) == 1
    assert engine.complete(IDS, max_tokens=1).finish_reason == "length"


def test_a_failure_while_a_request_is_started_reaches_its_handle(
    new_engine: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Old bug: the request was in neither queue nor slot just then, and its caller waited for ever."""
    from pyllamacache.scheduler import admit

    def broken(*_: object, **__: object) -> None:
        raise MemoryError("no room for a token buffer")

    engine = new_engine("full")
    monkeypatch.setattr(admit, "TokenBuffer", broken)
    with pytest.raises(InternalError, match="MemoryError"):
        engine.submit(IDS).result(timeout=60)
    with pytest.raises(InternalError, match="MemoryError"):
        engine.complete(IDS)


def test_a_stream_that_was_never_read_is_cancelled_when_it_is_dropped(new_engine: Callable[..., Any]) -> None:
    engine = new_engine("full")
    stream = engine.stream(IDS, max_tokens=900)
    del stream
    engine.complete(IDS[:5], max_tokens=1)
    assert engine.statistics().n_cancelled == 1
