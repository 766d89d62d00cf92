"""Looking at an engine's tiers: what is copied behind finished now, budgets that hold, books that agree."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.native.faults import on_scheduler

KINDS = ["full", "sliding", "hybrid", "recurrent"]

_SLOW = ["sliding", "recurrent"]
"""What `test_sharing_law.py` plays with in every run is enough for most of them."""
EVERY_KIND = pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.slow] if kind in _SLOW else []) for kind in KINDS]
)
WITH_CELLS = pytest.mark.parametrize("kind", ["full", pytest.param("sliding", marks=pytest.mark.slow), "hybrid"])
MODES = pytest.mark.parametrize("exact", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["default", "exact"])


def stores(kind: str, exact: bool) -> bool:
    """Window cells that are put back lie in another order of the ring: exact mode takes no states of them."""
    return not (kind == "sliding" and exact)


def always_load(engine: Any) -> None:
    """Whatever is stored is worth loading: what this machine measures is not what a test is about."""
    engine._state.checkpoints.rates.is_worth_loading = lambda *_: True


def store_behind(engine: Any, *, even_if_unwanted: bool = False) -> None:
    """Copy and write now what is copied and written while nothing runs. Nothing may be running.

    `even_if_unwanted`: also where cells are plenty and nothing outlives the engine.
    """

    def run() -> None:
        state = engine._state
        state.checkpoints.finish_all()
        while (even_if_unwanted or state.spans.is_wanted) and state.spans.save_some(1 << 20):
            if state.disk is not None:
                state.disk.settle()
        if state.disk is not None:
            state.disk.settle()

    on_scheduler(engine, run)


def forget_device(engine: Any) -> None:
    """Nothing is left on the device; what was copied is where it is."""

    def run() -> None:
        state = engine._state
        for slot in state.slots:
            state.erase(slot)
        state.parking.clear()

    on_scheduler(engine, run)


def audit(engine: Any) -> None:
    """Index, ledger, memory, leases and bytes agree, and nothing is over its limit."""
    on_scheduler(engine, engine._state.audit)


def entry_files(folder: Path) -> list[Path]:
    """Of a disk cache: what prefixes are stored in."""
    return sorted(path for path in folder.glob("*/*/*") if path.is_file())


def bytes_on_disk(folder: Path) -> int:
    """Of all of them, half-written ones included."""
    total = 0
    for path in entry_files(folder):
        try:
            total += os.stat(path).st_size
        except FileNotFoundError:
            continue
    return total


def check_limits(engine: Any, folder: Path | None = None, disk_bytes: int = 0) -> None:
    """Host memory and folder are within their budgets."""
    cache = engine.cache
    assert cache.resident_bytes <= cache.budget.host_bytes
    if folder is not None:
        assert bytes_on_disk(folder) <= disk_bytes
