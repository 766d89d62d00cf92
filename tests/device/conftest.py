"""Drivers by flavour, built once a session. What a machine lacks is a skip, or a failure where CI asks for it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.device.builds import Flavour, Unavailable, build


@pytest.fixture(scope="session")
def driver() -> Callable[[Flavour], Path]:
    """The driver of a flavour. With PYLLAMACACHE_DEVICE_TESTS=required a machine that cannot have it fails the test."""
    built: dict[Flavour, Path | Unavailable] = {}

    def get(flavour: Flavour) -> Path:
        if flavour not in built:
            try:
                built[flavour] = build(flavour)
            except Unavailable as reason:
                built[flavour] = reason
        found = built[flavour]
        if isinstance(found, Unavailable):
            if os.environ.get("PYLLAMACACHE_DEVICE_TESTS") == "required":
                pytest.fail(str(found))
            pytest.skip(str(found))
        return found

    return get
