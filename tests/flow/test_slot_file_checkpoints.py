"""Checkpoints in slot files: used after a restore, in this process and in another, under a smaller budget, damaged."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyllamacache import CacheConfig
from pyllamacache.errors import CacheCorruptError
from pyllamacache.store import slotfile
from pyllamacache.store.host import region_bytes
from tests.flow.checkpoints import STATE_BYTES, check_budget, positions, state_at
from tests.flow.law import Ids, Pair, joined, random_ids

WITH_STATE = ["sliding", "hybrid", "recurrent"]
LONG = random_ids(1, 1200)
K = 4

NewPair = Callable[..., Pair]


def _saved(pair: Pair, path: Path) -> tuple[int, ...]:
    """T(1200) + 8, the last message of 50 tokens marked. Returns where its checkpoints are."""
    reply = pair.warm.complete(LONG, max_tokens=8, slot=0, boundaries=[1150])
    pair.warm.slots[0].save(path)
    assert reply.usage.completion_tokens == 8
    taken: tuple[int, ...] = pair.warm.slots[0].checkpoints
    return taken


def _changed(ids: Ids, n: int) -> Ids:
    return joined(ids[:-n], random_ids(2, n))


@pytest.mark.parametrize("kind", WITH_STATE)
def test_s22_checkpoints_are_used_after_a_restore(kind: str, new_pair: NewPair, tmp_path: Path) -> None:
    pair = new_pair(kind, n_ctx=1280, n_slots=3)
    saved = _saved(pair, tmp_path / "slot")
    states = {position: state_at(pair.warm, position) for position in saved}
    spoken = pair.warm.slots[0].token_ids[1200:]
    fresh = new_pair(kind, n_ctx=1280, n_slots=2)
    assert fresh.warm.slots[1].restore(tmp_path / "slot") == 1207
    assert fresh.warm.slots[1].checkpoints == saved
    assert {position: state_at(fresh.warm, position) for position in saved} == states
    check_budget(fresh.warm)
    appended = fresh.ask(joined(LONG, spoken, random_ids(3, 20)))
    assert appended.cache.prefilled_tokens <= 20 + K
    changed = fresh.ask(_changed(LONG, 50))
    assert changed.cache.prefilled_tokens <= 50 + K
    assert changed.cache.source.value == "checkpoint"
    unmarked = fresh.ask(_changed(LONG, 300))
    assert unmarked.cache.prefilled_tokens <= 300 + 128


@pytest.mark.parametrize("kind", WITH_STATE)
def test_s22_checkpoints_are_used_in_another_process(
    kind: str, new_engine: Callable[..., Any], tiny_path: Callable[..., Path], tmp_path: Path
) -> None:
    engine = new_engine(kind, n_ctx=1280, type_k="f16", type_v="f16")
    reply = engine.complete(LONG, max_tokens=8, slot=0, boundaries=[1150])
    engine.slots[0].save(tmp_path / "slot")
    appended = joined(LONG, reply.token_ids, random_ids(3, 20))
    np.savez(tmp_path / "prompts", appended=appended, changed=_changed(LONG, 50))
    script = (
        "import sys, numpy as np, pyllamacache as plc\n"
        "model, folder = sys.argv[1:]\n"
        "engine = plc.Engine(plc.Model(model, progress=False), n_ctx=1280, n_slots=2, n_threads=1,"
        " flash_attention='off', progress=False)\n"
        "engine.slots[1].restore(folder + '/slot')\n"
        "print(*engine.slots[1].checkpoints)\n"
        "for name, ids in np.load(folder + '/prompts.npz').items():\n"
        "    print(name, engine.complete(ids, max_tokens=2).cache.prefilled_tokens)\n"
    )
    command = [sys.executable, "-W", "error", "-c", script, str(tiny_path(kind)), str(tmp_path)]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=200).stdout.splitlines()
    assert printed[0].split() == [str(position) for position in engine.slots[0].checkpoints]
    assert printed[1:] == ["appended 21", "changed 50"]


@pytest.mark.parametrize("kind", ["hybrid", "recurrent"])
def test_exact_mode_resumes_from_restored_checkpoints_bit_for_bit(kind: str, new_pair: NewPair, tmp_path: Path) -> None:
    pair = new_pair(kind, n_ctx=640, exact=True)
    ids = random_ids(4, 600)
    pair.warm.complete(ids, max_tokens=3, slot=0)
    pair.warm.slots[0].save(tmp_path / "slot")
    fresh = new_pair(kind, n_ctx=640, exact=True)
    fresh.warm.slots[1].restore(tmp_path / "slot")
    for n_kept, n_cached in ((580, 576), (300, 256), (600, 576)):
        reply = fresh.ask(joined(ids[:n_kept], random_ids(5, 30)))
        assert reply.usage.cached_tokens == n_cached


@pytest.mark.parametrize("kind", WITH_STATE)
def test_under_a_smaller_budget_the_deepest_are_kept(kind: str, new_pair: NewPair, tmp_path: Path) -> None:
    pair = new_pair(kind, n_ctx=1280)
    saved = _saved(pair, tmp_path / "slot")
    answers: dict[tuple[bytes, int], Any] = {}
    for n_kept, budget in (
        (0, CacheConfig(max_checkpoints=0)),
        (1, CacheConfig(max_checkpoints=1)),
        (2, CacheConfig(checkpoint_bytes=int(2.5 * STATE_BYTES[kind]))),
        (3, CacheConfig(max_checkpoints=3)),
    ):
        fresh = new_pair(kind, n_ctx=1280, cache=budget, answers=answers)
        fresh.warm.slots[0].restore(tmp_path / "slot")
        assert fresh.warm.slots[0].checkpoints == (saved[-n_kept:] if n_kept else ())
        check_budget(fresh.warm)
        if n_kept > 1:
            reply = fresh.ask(joined(LONG, random_ids(6, 20)))
            assert reply.cache.prefilled_tokens <= 20 + K
            check_budget(fresh.warm)


@pytest.mark.parametrize("kind", WITH_STATE)
def test_a_restore_gives_the_same_prefix_no_second_checkpoint(kind: str, new_pair: NewPair, tmp_path: Path) -> None:
    pair = new_pair(kind, n_ctx=1280, n_slots=2)
    saved = _saved(pair, tmp_path / "slot")
    resident = pair.warm.cache.size_bytes
    pair.warm.slots[1].restore(tmp_path / "slot")
    assert pair.warm.slots[0].checkpoints == pair.warm.slots[1].checkpoints == saved
    assert pair.warm.cache.size_bytes == resident
    assert all(entry.slots == (0, 1) for entry in pair.warm.cache.entries())
    check_budget(pair.warm)


@pytest.mark.parametrize("kind", WITH_STATE)
def test_damaged_checkpoint_bytes_refuse_the_file_and_keep_the_slot(
    kind: str, new_pair: NewPair, tmp_path: Path
) -> None:
    """One flipped bit in any of them: error, the slot and its checkpoints as they were, no memory lost."""
    pair = new_pair(kind, n_ctx=1280)
    saved = _saved(pair, tmp_path / "good")
    data = (tmp_path / "good").read_bytes()
    fresh = new_pair(kind, n_ctx=1280)
    ids = random_ids(7, 300)
    fresh.warm.complete(ids, max_tokens=2, slot=0)
    before, states = positions(fresh.warm), {each: state_at(fresh.warm, each) for each in positions(fresh.warm)}
    for position in saved:
        at = data.rindex(state_at(pair.warm, position)) + 999
        bad = tmp_path / "bad"
        bad.write_bytes(data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :])
        with pytest.raises(CacheCorruptError, match=f"checkpoint.{position}."):
            fresh.warm.slots[0].restore(bad)
    assert fresh.warm.slots[0].token_ids[:300] == ids.tolist()
    assert positions(fresh.warm) == before
    assert {position: state_at(fresh.warm, position) for position in before} == states
    assert fresh.warm._pool.used_bytes == sum(region_bytes(len(state)) for state in states.values())
    check_budget(fresh.warm)
    assert fresh.ask(joined(ids, [3])).cache.prefilled_tokens <= 1 + K


def test_a_file_with_and_an_engine_without_checkpoints_go_together(new_pair: NewPair, tmp_path: Path) -> None:
    with_none = new_pair("hybrid", n_ctx=1280, cache=CacheConfig(max_checkpoints=0))
    assert _saved(with_none, tmp_path / "none") == ()
    taking = new_pair("hybrid", n_ctx=1280)
    assert taking.warm.slots[0].restore(tmp_path / "none") == 1207
    assert taking.warm.slots[0].checkpoints == ()
    reply = taking.ask(_changed(LONG, 50))
    assert (reply.usage.cached_tokens, reply.cache.reason.value) == (0, "no_checkpoint")


def test_a_damaged_file_costs_no_checkpoint_of_another_slot(new_pair: NewPair, tmp_path: Path) -> None:
    pair = new_pair("hybrid", n_ctx=1280, cache=CacheConfig(max_checkpoints=4))
    _saved(pair, tmp_path / "slot")
    data = bytearray((tmp_path / "slot").read_bytes())
    data[-5000] ^= 1
    (tmp_path / "slot").write_bytes(data)
    pair.warm.cache.clear()
    pair.warm.complete(random_ids(8, 300), max_tokens=2, slot=1)
    before = positions(pair.warm)
    with pytest.raises(CacheCorruptError):
        pair.warm.slots[0].restore(tmp_path / "slot")
    assert positions(pair.warm) == before


def test_a_request_beside_a_restore_keeps_the_budget(
    new_pair: NewPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = new_pair("hybrid", n_ctx=1280)
    _saved(pair, tmp_path / "slot")
    fresh = new_pair("hybrid", n_ctx=1280, cache=CacheConfig(max_checkpoints=4))
    read = slotfile.read

    def read_beside_a_request(*arguments: Any, **options: Any) -> slotfile.SlotRecord:
        record = read(*arguments, **options)
        fresh.warm.complete(random_ids(9, 300), max_tokens=2, slot=1)
        return record

    monkeypatch.setattr(slotfile, "read", read_beside_a_request)
    fresh.warm.slots[0].restore(tmp_path / "slot")
    check_budget(fresh.warm)
