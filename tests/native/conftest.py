"""Contexts that are closed at the end of the test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from pyllamacache.native.context import NativeContext
from tests.native.contexts import NewContext, make_context


@pytest.fixture
def new_context(tiny_models: Callable[..., Any]) -> Iterator[NewContext]:
    """`new_context("hybrid", exact=True)`; the options of `make_context`."""
    made: list[NativeContext] = []

    def make(kind: str, **options: Any) -> NativeContext:
        made.append(make_context(tiny_models(kind), **options))
        return made[-1]

    yield make
    for context in made:
        context.close()
