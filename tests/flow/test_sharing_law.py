"""The law under sharing: requests side by side, tiny budgets in every tier, cancellations, a disk that fails.

Each answer is that of an engine which never reuses anything; between rounds, index, ledger, memory, leases and bytes
are recomputed and have to agree; budgets are looked at before every native call. With more than one slot there are two
engines that share a folder.
"""

from __future__ import annotations

import os
import random
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.flow.sharing_law import Client, Faults, law_pair
from tests.flow.tiers import KINDS, stores

NewEngine = Callable[..., Any]


def play(
    kind: str,
    exact: bool,
    n_slots: int,
    n_rounds: int,
    seed: int,
    *,
    monkeypatch: Any,
    new_engine: NewEngine,
    folder: Path,
) -> Client:
    print(f"LAW_SEED={seed}")  # noqa: T201  # pytest shows it when the test fails
    faults = Faults(seed)
    with law_pair(monkeypatch, new_engine, kind, exact=exact, n_slots=n_slots, folder=folder, faults=faults) as (
        pair,
        reopen,
    ):
        client = Client(pair, seed, faults, folder=folder, reopen=reopen)
        if n_slots > 1:
            client.add_engine()
        for n in range(n_rounds):
            faults.disk_chance, faults.call_chance = (0.3, 0.1) if n % 3 == 2 else (0.0, 0.0)
            client.play()
        print(pair.sources, pair.n_reused, faults.happened, client.n_cancelled)  # noqa: T201
    return client


@pytest.mark.parametrize(
    "n_slots", [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(4, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("exact", [False, True], ids=["default", "exact"])
@pytest.mark.parametrize("kind", KINDS)
def test_nobody_is_changed_by_another_whatever_fails(
    kind: str, exact: bool, n_slots: int, new_engine: NewEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seed = zlib.crc32(f"{kind} {exact} {n_slots}".encode())
    client = play(
        kind, exact, n_slots, 10, seed, monkeypatch=monkeypatch, new_engine=new_engine, folder=tmp_path / "cache"
    )
    assert client.pair.n_reused > 0 or not stores(kind, exact), "nothing was ever reused: vacuous"


@pytest.mark.stress
@pytest.mark.timeout(600)
@pytest.mark.parametrize("n_slots", [1, 2, 4])
@pytest.mark.parametrize("exact", [False, True], ids=["default", "exact"])
@pytest.mark.parametrize("kind", KINDS)
def test_nobody_is_changed_by_another_over_many_rounds(
    kind: str, exact: bool, n_slots: int, new_engine: NewEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seed = int(os.environ.get("LAW_SEED") or random.randrange(1 << 30))
    n_rounds = int(os.environ.get("LAW_ROUNDS") or 100)
    client = play(
        kind, exact, n_slots, n_rounds, seed, monkeypatch=monkeypatch, new_engine=new_engine, folder=tmp_path / "cache"
    )
    if stores(kind, exact):
        assert "disk" in client.pair.sources
