"""Pairs of engines for the law."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pyllamacache import CacheConfig
from tests.flow.law import Pair


@pytest.fixture
def new_pair(new_engine: Callable[..., Any]) -> Callable[..., Pair]:
    """`new_pair("hybrid", exact=True, n_slots=2)`. Flash attention is off: on the CPU it computes in F16."""

    def make(kind: str, *, answers: dict[tuple[bytes, int], Any] | None = None, **options: Any) -> Pair:
        options = {"flash_attention": "off", **options}
        warm = new_engine(kind, **options)
        cold = new_engine(kind, **{**options, "n_slots": 1, "cache": CacheConfig(max_checkpoints=0)})
        return Pair(warm, cold, exact=options.get("exact", False), answers=answers)

    return make
