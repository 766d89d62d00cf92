"""Exact mode across slot files, bit for bit, on the real memory of every kind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from tests.models import FullSpec, HybridSpec, RecurrentSpec, SlidingSpec, TinySpec

# A window that is no multiple of n_ubatch: with one that is, restored cells happen to be summed in the old order.
SPECS = [FullSpec(), SlidingSpec(), SlidingSpec(seed=5, window=40), HybridSpec(), RecurrentSpec()]


@pytest.mark.parametrize(
    "spec", SPECS, ids=lambda spec: spec.kind if spec.kind != "sliding" else f"window{spec.window}"
)
@pytest.mark.parametrize("flash_attention", ["off", "on"])
def test_a_restored_slot_answers_with_the_bits_of_a_cold_run(
    new_engine: Callable[..., Any], tmp_path: Path, spec: TinySpec, flash_attention: str
) -> None:
    """A restored window was resumed though its cells lay in another order: the logits differed by 1e-6."""
    random = Random(3)
    prompt = [random.randrange(3, 200) for _ in range(608)]
    longer = prompt + [random.randrange(3, 200) for _ in range(75)]
    engine = new_engine(spec, exact=True, flash_attention=flash_attention)
    cold = engine.complete(longer, max_tokens=4, return_logits=True, store=False)
    engine.warm(prompt, slot=0)
    engine.slots[0].save(tmp_path / "slot")
    engine.slots[1].restore(tmp_path / "slot")
    restored = engine.complete(longer, max_tokens=4, return_logits=True, slot=1)
    assert restored.cache.resumed_tokens == (0 if engine.model.memory == "sliding" else 608)
    assert np.array_equal(cold.logits, restored.logits)
    assert cold.token_ids == restored.token_ids
