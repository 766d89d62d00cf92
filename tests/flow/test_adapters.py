"""LoRA adapters are fixed per engine and part of what stored state is keyed by."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyllamacache.errors import CacheMismatchError, ConfigError
from tests.flow.law import joined, random_ids
from tests.models import FullSpec
from tests.models.lora import write_lora

IDS = random_ids(1, 100)


def _logits(engine: Any) -> Any:
    return engine.complete(IDS, max_tokens=0, return_logits=True).logits


def test_an_adapter_changes_answers_by_its_scale(new_engine: Callable[..., Any], tmp_path: Path) -> None:
    path = write_lora(FullSpec(), tmp_path / "lora.gguf")
    plain = _logits(new_engine("full"))
    adapted = _logits(new_engine("full", adapters=[path]))
    assert np.abs(adapted - plain).max() > 0.01
    assert np.abs(_logits(new_engine("full", adapters=[(path, 0.5)])) - adapted).max() > 0.001
    np.testing.assert_allclose(_logits(new_engine("full", adapters=[(path, 0.0)])), plain, atol=1e-3)


def test_reuse_under_an_adapter_keeps_the_law(new_engine: Callable[..., Any], tmp_path: Path) -> None:
    path = write_lora(FullSpec(), tmp_path / "lora.gguf")
    warm, cold = (new_engine("full", adapters=[path], flash_attention="off") for _ in range(2))
    warm.complete(IDS, max_tokens=4)
    ids = joined(IDS, random_ids(2, 20))
    reply = warm.complete(ids, max_tokens=0, return_logits=True)
    assert reply.usage.cached_tokens == 100
    assert np.abs(reply.logits - cold.complete(ids, max_tokens=0, return_logits=True).logits).max() < 1e-3


def test_state_does_not_pass_between_adapters(new_engine: Callable[..., Any], tmp_path: Path) -> None:
    paths = [write_lora(FullSpec(), tmp_path / f"lora{seed}.gguf", seed=seed) for seed in range(2)]
    engines = [new_engine("full", adapters=adapters) for adapters in ([], paths[:1], paths[1:], [(paths[0], 0.5)])]
    for engine in engines:
        engine.complete(IDS, max_tokens=0, slot=0)
        file = tmp_path / "slot"
        engine.slots[0].save(file)
        for other in engines:
            if other is engine:
                assert other.slots[1].restore(file) == 100
                continue
            with pytest.raises(CacheMismatchError) as caught:
                other.slots[1].restore(file)
            assert caught.value.field == "adapters"


@pytest.mark.parametrize("what", ["missing", "text", "of another width", "a model"])
def test_a_file_that_is_no_adapter_of_this_model_is_a_clear_error(
    what: str, new_engine: Callable[..., Any], tiny_path: Callable[..., Path], tmp_path: Path
) -> None:
    path = tmp_path / "lora.gguf"
    if what == "text":
        path.write_text("not an adapter")
    elif what == "of another width":
        write_lora(FullSpec(n_embd=128), path)
    elif what == "a model":
        path = tiny_path("full")
    with pytest.raises(ConfigError, match="adapters"):
        new_engine("full", adapters=[path])
    assert new_engine("full").complete(IDS, max_tokens=1).finish_reason == "length"
