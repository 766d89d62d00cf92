"""Reports about slots, memory, files and tenants, replayed over all tiers: themes 3, 4, 7 and 9 of the scenario list.

`K` is how much may be computed beyond what is new. Every reply goes through the law's checker.
"""

from __future__ import annotations

import functools
import logging
import os
import random
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyllamacache import CacheConfig, Engine, Model
from pyllamacache.errors import PyLlamaCacheError
from pyllamacache.store.disk import DiskStore
from tests.fakes.clock import FakeClock
from tests.flow.hold import held
from tests.flow.law import Pair, check_numbers, joined, random_ids
from tests.flow.sharing_law import Faults
from tests.flow.tiers import (
    EVERY_KIND,
    KINDS,
    MODES,
    always_load,
    audit,
    bytes_on_disk,
    check_limits,
    entry_files,
    store_behind,
    stores,
)
from tests.models import FullSpec, HybridSpec
from tests.native.faults import on_scheduler

NewPair = Callable[..., Pair]
NewEngine = Callable[..., Any]

K = 4
MIB = 1 << 20
WITH_STATE = pytest.mark.parametrize(
    "kind",
    [pytest.param("sliding", marks=pytest.mark.slow), "hybrid", pytest.param("recurrent", marks=pytest.mark.slow)],
)


def on_disk(folder: Path, **options: Any) -> CacheConfig:
    return CacheConfig(disk_dir=folder, **options)


def after_restart(pair: Pair, new_pair: NewPair, kind: str, **options: Any) -> Pair:
    """The same engine in another life."""
    pair.warm.close()
    pair = new_pair(kind, **options)
    always_load(pair.warm)
    return pair


# ---- theme 4: slots, memory, budgets -----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["full", "hybrid"])
def test_s37_five_agents_on_four_slots_are_all_warm_from_the_second_round_on(kind: str, new_pair: NewPair) -> None:
    """2,400 tokens in 1,024 cells: what the device has no room for comes back from host memory, into any slot."""
    pair = new_pair(kind, n_slots=4, kv_tokens=1024, cache=CacheConfig(max_checkpoints=64))
    always_load(pair.warm)
    talks = [random_ids(200 + n, n) for n in (60, 270, 480, 690, 900)]
    for turn in range(3):
        replies = [pair.ask(ids, max_tokens=3) for ids in talks]
        if turn:
            assert sum(reply.cache.prefilled_tokens for reply in replies) <= 5 * K
    audit(pair.warm)


@pytest.mark.parametrize("n_slots", [1, 2])
@EVERY_KIND
def test_s40_a_side_request_does_not_eat_the_main_tail(kind: str, n_slots: int, new_pair: NewPair) -> None:
    pair = new_pair(kind, n_slots=n_slots)
    system, tail = random_ids(1, 400), random_ids(2, 300)
    main = pair.ask(joined(system, tail), max_tokens=2)
    side = pair.ask(joined(system, random_ids(3, 50)), max_tokens=2)
    assert n_slots == 1 or side.slot_id != main.slot_id
    again = pair.ask(joined(system, tail, random_ids(4, 10)), max_tokens=2)
    assert again.cache.prefilled_tokens <= 10 + (0 if kind == "full" else K)
    audit(pair.warm)


@WITH_STATE
def test_s41_a_checkpoint_serves_every_slot_while_its_own_is_busy(kind: str, new_pair: NewPair) -> None:
    pair = new_pair(kind)
    prefix = random_ids(5, 500)
    with held(pair.warm):
        donor = pair.warm.submit(joined(prefix, random_ids(6, 40)), max_tokens=200, slot=0, boundaries=[500])
        ids = joined(prefix, random_ids(7, 30))
        taker = pair.warm.submit(ids, max_tokens=2, slot=1, return_logits=True)
    reply = taker.result()
    pair.check(ids, reply, 2)
    assert reply.slot_id == 1
    assert reply.cache.prefilled_tokens <= 30 + K
    assert len(donor.result().token_ids) == 200


@pytest.mark.slow
@EVERY_KIND
def test_s45_nobody_goes_on_with_the_text_of_a_stranger(kind: str, new_pair: NewPair, tmp_path: Path) -> None:
    """Six unrelated conversations fill every tier; then pairs of new prompts, each with a nonce of its own."""
    cache = on_disk(tmp_path / "cache", host_bytes=4 * MIB, disk_bytes=4 * MIB)
    pair = new_pair(kind, kv_tokens=1024, cache=cache)
    always_load(pair.warm)
    for i in range(6):
        pair.ask(random_ids(10 + i, 300), max_tokens=3)
    for i in range(5):
        prompts = [joined(random_ids(1000 + 2 * i + j, 8), random_ids(30 + j, 100)) for j in range(2)]
        with held(pair.warm):
            handles = [pair.warm.submit(ids, max_tokens=4, return_logits=True) for ids in prompts]
        for ids, handle in zip(prompts, handles, strict=True):
            reply = handle.result()
            pair.check(ids, reply, 4)
            assert reply.cache.matched_tokens <= 1
            assert reply.token_ids == pair.cold_answer(ids, 4).token_ids
    audit(pair.warm)


def watch_pool(engine: Any) -> list[int]:
    """How much host memory was in use after each change, from now on."""
    pool, seen = engine._pool, []
    allocate = pool.allocate

    def watched(n_bytes: int) -> Any:
        block = allocate(n_bytes)
        seen.append(pool.resident_bytes)
        return block

    pool.allocate = watched
    return seen


@pytest.mark.parametrize("kind", ["full", pytest.param("hybrid", marks=pytest.mark.slow)])
def test_s46_host_memory_is_never_over_its_limit(kind: str, new_pair: NewPair) -> None:
    """Entries of 1, 2, 2.9 and 3.1 MiB under a limit of 3, checkpoints included; what is lowered is given back."""
    limit = 3 * MIB
    pair = new_pair(kind, n_slots=1, n_ctx=1280, kv_tokens=1280, cache=CacheConfig(host_bytes=limit))
    always_load(pair.warm)
    seen = watch_pool(pair.warm)
    talks = [random_ids(20 + i, n) for i, n in enumerate((341, 682, 990, 1058))]
    for _ in range(2):
        for ids in talks:
            pair.ask(ids, max_tokens=2)
            store_behind(pair.warm)
            check_limits(pair.warm)
            audit(pair.warm)
    assert max(seen) <= limit
    assert pair.warm._state.spans.n_evicted > 0
    pair.warm.cache.limit(CacheConfig(host_bytes=MIB))
    assert pair.warm.cache.resident_bytes <= MIB
    pair.warm.cache.limit(CacheConfig(host_bytes=0))
    assert pair.warm.cache.resident_bytes == 0
    pair.ask(joined(talks[0], [1]), max_tokens=2)
    audit(pair.warm)


@pytest.mark.parametrize("kind", ["sliding", "recurrent"])
def test_s46_a_state_larger_than_the_budget_is_refused_with_a_reason(kind: str, new_pair: NewPair) -> None:
    pair = new_pair(kind, cache=CacheConfig(checkpoint_bytes=10_000))
    pair.ask(random_ids(24, 200), max_tokens=2)
    counts = pair.warm.statistics().checkpoints
    assert counts.refused["larger_than_budget"] > 0
    assert counts.held_bytes == 0
    audit(pair.warm)


@EVERY_KIND
def test_s48_one_shots_leave_nothing_in_any_tier(kind: str, new_pair: NewPair, tmp_path: Path) -> None:
    pair = new_pair(kind, cache=on_disk(tmp_path / "cache"))
    kept = random_ids(25, 300)
    pair.ask(kept, max_tokens=2)
    store_behind(pair.warm)
    before = (pair.warm.cache.size_bytes, entry_files(tmp_path / "cache"), pair.warm._state.spans.used_bytes)
    for i in range(10):
        pair.ask(random_ids(100 + i, 280), max_tokens=2, store=False)
    store_behind(pair.warm)
    assert before == (pair.warm.cache.size_bytes, entry_files(tmp_path / "cache"), pair.warm._state.spans.used_bytes)
    reply = pair.ask(joined(kept, [1, 2]), max_tokens=2)
    assert reply.cache.prefilled_tokens <= 2 + K
    audit(pair.warm)


# ---- theme 3: what outlives the process --------------------------------------------------------------------------


@WITH_STATE
def test_s22_after_a_restart_an_append_and_an_edit_cost_what_is_new(
    kind: str, new_pair: NewPair, tmp_path: Path
) -> None:
    options = {"n_ctx": 1536, "cache": on_disk(tmp_path / "cache")}
    pair = new_pair(kind, **options)
    ids = random_ids(30, 1200)
    sent = joined(ids, pair.ask(ids, max_tokens=8, boundaries=[1150]).token_ids)
    pair = after_restart(pair, new_pair, kind, **options)
    appended = pair.ask(joined(sent, random_ids(31, 20)), max_tokens=2)
    assert appended.cache.source.value == "disk"
    assert appended.cache.prefilled_tokens <= 20 + 1 + K
    edited = pair.ask(joined(ids[:1150], random_ids(32, 50)), max_tokens=2)
    assert edited.cache.prefilled_tokens <= 50 + K
    audit(pair.warm)


@MODES
@EVERY_KIND
def test_s34_three_conversations_are_there_again_after_a_restart(
    kind: str, exact: bool, new_pair: NewPair, tmp_path: Path
) -> None:
    options = {"exact": exact, "n_slots": 1, "cache": on_disk(tmp_path / "cache")}
    pair = new_pair(kind, **options)
    talks = [random_ids(40 + i, 160 + 64 * i) for i in range(3)]
    for ids in talks:
        pair.ask(ids, max_tokens=4)
    pair = after_restart(pair, new_pair, kind, **options)
    for ids in talks:
        reply = pair.ask(joined(ids, random_ids(50, 10)), max_tokens=2)
        if stores(kind, exact):
            assert reply.cache.prefilled_tokens <= 10 + (64 if exact else K)
            assert reply.cache.source.value == "disk"
        else:
            assert (reply.cache.source.value, reply.cache.reason.value) == ("none", "cold")
    audit(pair.warm)


@EVERY_KIND
def test_s33_the_main_conversation_survives_a_small_one_that_ran_last(
    kind: str, new_pair: NewPair, tmp_path: Path
) -> None:
    options = {"cache": on_disk(tmp_path / "cache")}
    pair = new_pair(kind, **options)
    main = random_ids(60, 800)
    pair.ask(main, max_tokens=4)
    pair.ask(random_ids(61, 60), max_tokens=4)
    pair = after_restart(pair, new_pair, kind, **options)
    reply = pair.ask(joined(main, random_ids(62, 10)), max_tokens=4)
    assert reply.cache.prefilled_tokens <= 10 + K


def test_a_request_that_runs_when_the_engine_closes_leaves_what_it_computed(new_pair: NewPair, tmp_path: Path) -> None:
    options = {"cache": on_disk(tmp_path / "cache")}
    pair = new_pair("full", **options)
    ids = random_ids(63, 600)
    handle = pair.warm.submit(ids, max_tokens=400)
    next(iter(handle))
    pair = after_restart(pair, new_pair, "full", **options)
    assert pair.ask(joined(ids, [1]), max_tokens=2).usage.cached_tokens == 600


@pytest.mark.parametrize("spec", [FullSpec, HybridSpec])
def test_s28_two_models_in_one_folder_never_meet_and_both_come_back(
    spec: Any, new_engine: NewEngine, tmp_path: Path
) -> None:
    """Same shapes, other weights: one is unloaded for the other, and later loaded again."""
    ids = random_ids(70, 500)
    options = {"flash_attention": "off", "cache": on_disk(tmp_path / "cache")}
    answers = []
    for seed, turn in ((0, 0), (9, 0), (0, 1), (9, 1)):
        engine = new_engine(spec(seed=seed), **options)
        always_load(engine)
        reply = engine.complete(joined(ids, [turn]), max_tokens=4, return_logits=True)
        check_numbers(joined(ids, [turn]), reply)
        expected = engine.complete(
            joined(ids, [turn]), max_tokens=4, return_logits=True, cache_prompt=False, store=False
        )
        assert np.abs(reply.logits - expected.logits).max() < 1e-3
        assert reply.cache.source.value == ("disk" if turn else "none")
        assert reply.cache.prefilled_tokens <= (1 + K if turn else 501)
        answers.append(reply.logits)
        engine.close()
    assert np.abs(answers[0] - answers[1]).max() > 0.1


@pytest.mark.parametrize("other", [{"type_k": "f16"}, {"exact": True}, {"flash_attention": "on"}])
def test_another_layout_in_the_same_folder_is_not_met(
    other: dict[str, Any], new_engine: NewEngine, tmp_path: Path
) -> None:
    ids = random_ids(71, 300)
    options = {"flash_attention": "off", "cache": on_disk(tmp_path / "cache")}
    one = new_engine("full", **options)
    one.complete(ids, max_tokens=1)
    one.close()
    two = new_engine("full", **{**options, **other})
    assert two.complete(joined(ids, [1]), max_tokens=1).cache.source.value == "none"


# ---- damaged and full folders ------------------------------------------------------------------------------------


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    for at in range(len(data) // 2, min(len(data) // 2 + 2000, len(data))):
        data[at] ^= 0xFF
    path.write_bytes(data)


def _to_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGE: dict[str, Callable[[Path], object]] = {
    "flipped": _flip,
    "empty": lambda path: path.write_bytes(b""),
    "half": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "gone": Path.unlink,
    "a folder": _to_folder,
    "another's": lambda path: shutil.copy(min(path.parent.parent.glob("*/*")), path),
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("kind", ["full", "hybrid"])
def test_s25_s27_damaged_files_cost_the_reuse_and_nothing_else(
    kind: str, damage: str, new_pair: NewPair, tmp_path: Path
) -> None:
    """While an engine runs that has found them: every file but one, then the answers are right and say why."""
    folder = tmp_path / "cache"
    options = {"cache": on_disk(folder)}
    pair = new_pair(kind, **options)
    ids = random_ids(80, 700)
    pair.ask(ids, max_tokens=4, boundaries=[300])
    pair = after_restart(pair, new_pair, kind, **options)
    pair.ask(random_ids(81, 20), max_tokens=2)
    store_behind(pair.warm)
    for path in entry_files(folder)[1:]:
        DAMAGE[damage](path)
    reply = pair.ask(joined(ids, [1, 2]), max_tokens=2)
    assert reply.cache.reason.value == "lost"
    assert reply.cache.position == reply.cache.resumed_tokens <= 256
    again = pair.ask(joined(ids, [3, 4]), max_tokens=2)
    assert again.cache.prefilled_tokens <= 2 + K
    audit(pair.warm)
    after_restart(pair, new_pair, kind, **options).ask(joined(ids, [5]), max_tokens=2)


@EVERY_KIND
def test_a_damaged_file_in_the_middle_keeps_what_is_before_it(kind: str, new_pair: NewPair, tmp_path: Path) -> None:
    """Also where the state to go back to is on disk as well; without cells, the deepest state is the damaged one."""
    folder = tmp_path / "cache"
    options = {"n_ctx": 1536, "cache": on_disk(folder)}
    pair = new_pair(kind, **options)
    ids = random_ids(82, 1100)
    pair.ask(ids, max_tokens=4, boundaries=[200, 500])
    store_behind(pair.warm)
    index = pair.warm._state.index
    found = [each.key.hex() for each in index.spans if each.start == 512]
    found = found or [each.key.hex() for each in index.checkpoints if each.position > 1000]
    pair = after_restart(pair, new_pair, kind, **options)
    damaged = [path for path in entry_files(folder) if path.name.partition(".")[0] in found]
    assert damaged
    for path in damaged:
        _flip(path)
    reply = pair.ask(joined(ids, [1]), max_tokens=2)
    assert (reply.cache.reason.value, reply.cache.source.value) == ("lost", "disk")
    assert reply.cache.position == reply.cache.resumed_tokens
    assert reply.cache.resumed_tokens >= (512 if kind == "full" else 500)
    audit(pair.warm)


@pytest.mark.parametrize("kind", ["full", "hybrid"])
def test_s30_a_full_disk_costs_nobody_anything_but_a_restart(
    kind: str, new_pair: NewPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, faults = tmp_path / "cache", Faults(1)
    options = {"cache": on_disk(folder)}
    pair = new_pair(kind, **options)
    old = random_ids(83, 300)
    pair.ask(old, max_tokens=4)
    pair.warm.close()
    before = {path: path.read_bytes() for path in entry_files(folder)}
    assert before
    monkeypatch.setattr(
        "pyllamacache.engine.DiskStore",
        faults.store,  # every write fails from now on, reads do not
    )
    pair = new_pair(kind, **options)
    always_load(pair.warm)
    faults.disk_chance = 1.0
    new = random_ids(84, 300)
    for ids in (old, new, joined(new, [1])):
        pair.ask(ids, max_tokens=4)
        store_behind(pair.warm)
        audit(pair.warm)
    assert "disk" in pair.sources
    assert pair.warm._state.disk.n_failed > 0
    pair.warm.close()
    faults.disk_chance = 0.0
    assert {path: path.read_bytes() for path in entry_files(folder)} == before
    pair = new_pair(kind, **options)
    always_load(pair.warm)
    assert pair.ask(joined(old, [1]), max_tokens=2).cache.source.value == "disk"


def test_a_folder_that_is_removed_while_the_engine_runs_is_made_again(new_pair: NewPair, tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    options = {"cache": on_disk(folder)}
    pair = new_pair("full", **options)
    ids = random_ids(85, 300)
    pair.ask(ids, max_tokens=2)
    store_behind(pair.warm)
    shutil.rmtree(folder)
    pair.ask(joined(ids, [1]), max_tokens=2)
    pair.ask(random_ids(86, 300), max_tokens=2)
    store_behind(pair.warm)
    audit(pair.warm)
    pair = after_restart(pair, new_pair, "full", **options)
    assert pair.ask(joined(random_ids(86, 300), [1]), max_tokens=2).cache.source.value == "disk"


def test_what_cannot_be_a_cache_folder_is_refused_when_the_engine_is_made(
    new_engine: NewEngine, tmp_path: Path
) -> None:
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "letter").write_bytes(b"dear")
    for name in ("file", "full"):
        with pytest.raises(PyLlamaCacheError):
            new_engine("full", cache=on_disk(tmp_path / name))
    assert (tmp_path / "full" / "letter").read_bytes() == b"dear"


@EVERY_KIND
def test_the_folder_stays_within_its_budget_and_the_latest_is_found(
    kind: str, new_pair: NewPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, limit, clock = tmp_path / "cache", 2 * MIB, FakeClock()
    monkeypatch.setattr("pyllamacache.engine.DiskStore", functools.partial(DiskStore, clock=clock))
    options = {"cache": on_disk(folder, disk_bytes=limit)}
    pair = new_pair(kind, **options)
    for i in range(6):
        clock.advance(600.0)
        pair.ask(random_ids(90 + i, 280), max_tokens=2)
        store_behind(pair.warm)
        check_limits(pair.warm, folder, limit)
    pair = after_restart(pair, new_pair, kind, **options)
    assert bytes_on_disk(folder) <= limit
    reply = pair.ask(joined(random_ids(95, 280), [1]), max_tokens=2)
    assert reply.cache.source.value == "disk"


# ---- branches of one trunk over the tiers ------------------------------------------------------------------------


@EVERY_KIND
def test_a_branch_read_from_disk_is_not_taken_for_the_one_in_host_memory(
    kind: str, new_pair: NewPair, tmp_path: Path
) -> None:
    """Both part from a trunk inside one span: old bug, the span of the other branch was put back."""
    options = {"n_slots": 1, "kv_tokens": 1024, "cache": on_disk(tmp_path / "cache")}
    pair = new_pair(kind, **options)
    trunk = random_ids(105, 300)
    branches = [joined(trunk, random_ids(106 + i, 300)) for i in range(2)]
    for ids in branches:
        pair.ask(ids, max_tokens=2)
    pair = after_restart(pair, new_pair, kind, **options)
    for ids in branches:
        reply = pair.ask(joined(ids, [1, 2]), max_tokens=2)
        assert (reply.cache.source.value, reply.cache.prefilled_tokens <= 2 + K) == ("disk", True)
    audit(pair.warm)


@pytest.mark.parametrize("kind", ["full", "hybrid"])
def test_what_was_stored_meanwhile_is_not_stored_twice(
    kind: str, new_pair: NewPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sequence is copied a part at a time; in between somebody else may bring the rest of it."""
    monkeypatch.setattr("pyllamacache.scheduler.loop.store_when_idle", lambda state: False)
    monkeypatch.setattr("pyllamacache.scheduler.step.store_under_load", lambda state, n_tokens: None)
    pair = new_pair(kind, n_slots=1, cache=on_disk(tmp_path / "cache"))
    pair.ask(random_ids(108, 700), max_tokens=1)

    def store() -> None:
        state = pair.warm._state
        slot = state.slots[0]
        assert state.spans.save_some(1)
        state.spans.save_tail(slot.slot_id, slot, slot.tokens.ids, 0)
        assert state.spans.n_saved == 3
        state.spans.save_some(1 << 20)
        assert state.spans.n_saved == 3

    on_scheduler(pair.warm, store)
    audit(pair.warm)


# ---- processes ---------------------------------------------------------------------------------------------------

ENGINE = """
import os, signal, sys
import numpy as np
import pyllamacache as plc

def ids_of(seed, n):
    return np.random.default_rng(seed).integers(0, 256, n, dtype=np.int32)

def engine_of(model, folder):
    engine = plc.Engine(plc.Model(model, progress=False), n_ctx=1024, n_slots=2, kv_tokens=4096, n_batch=128,
                        n_ubatch=32, n_threads=1, type_k="f32", type_v="f32", flash_attention="off", progress=False,
                        cache=plc.CacheConfig(disk_dir=folder))
    engine._state.checkpoints.rates.is_worth_loading = lambda *_: True
    return engine
"""


def run_script(script: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-W", "error", "-c", ENGINE + script, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment, check=False)


def test_two_engines_and_another_process_share_a_folder(
    new_pair: NewPair, tiny_path: Callable[..., Path], tmp_path: Path
) -> None:
    """What one has written, the others find without being opened again."""
    folder = tmp_path / "cache"
    one, two = (new_pair("hybrid", cache=on_disk(folder)) for _ in range(2))
    always_load(one.warm)
    always_load(two.warm)
    ids = random_ids(100, 400)
    one.ask(ids, max_tokens=2)
    store_behind(one.warm)
    assert two.ask(joined(ids, [1, 2]), max_tokens=2).cache.source.value == "disk"
    child = run_script(
        "e = engine_of(*sys.argv[1:3])\n"
        "r = e.complete(np.append(ids_of(100, 400), [3]).astype(np.int32), max_tokens=2)\n"
        "print(r.cache.source, r.cache.prefilled_tokens <= 5)\n"
        "e.complete(ids_of(101, 300), max_tokens=2)\n"
        "e.close()\n",
        tiny_path("hybrid"),
        folder,
    )
    assert (child.stdout, child.stderr, child.returncode) == ("disk True\n", "", 0)
    for pair in (one, two):
        assert pair.ask(joined(random_ids(101, 300), [4]), max_tokens=2).cache.source.value == "disk"
        audit(pair.warm)


KILLED = """
from pyllamacache import engine as engine_module
from pyllamacache.store.disk import DiskStore
left = int(sys.argv[4])
def before(step):
    global left
    if step == sys.argv[3]:
        left -= 1
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
engine_module.DiskStore = lambda *a, **o: DiskStore(*a, before_step=before, **o)
e = engine_of(*sys.argv[1:3])
e.complete(ids_of(110, 700), max_tokens=2, boundaries=[300])
e.close()
"""


@pytest.mark.parametrize(
    ("kind", "step"),
    [
        ("full", "file.rename"),
        ("hybrid", "index.publish.commit"),
        *(
            pytest.param(kind, step, marks=pytest.mark.slow)
            for kind in KINDS
            for step in ("index.reserve", "file.create", "file.write", "file.sync", "file.rename", "index.publish")
        ),
    ],
)
def test_s30_a_process_killed_while_it_writes_leaves_what_was_whole(
    kind: str, step: str, new_pair: NewPair, tiny_path: Callable[..., Path], tmp_path: Path
) -> None:
    folder = tmp_path / "cache"
    nth = 7 if step == "file.write" else 2  # in the third file, which is written in three pieces
    child = run_script(KILLED, tiny_path(kind), folder, step, nth)
    assert child.returncode == -9, child.stderr
    pair = new_pair(kind, cache=on_disk(folder))
    always_load(pair.warm)
    ids = random_ids(110, 700)
    reply = pair.ask(joined(ids, [1]), max_tokens=2)
    assert reply.cache.source.value in ("disk", "none")
    assert kind != "full" or reply.cache.resumed_tokens >= 256
    pair = after_restart(pair, new_pair, kind, cache=on_disk(folder))
    again = pair.ask(joined(ids, [2]), max_tokens=2)
    assert (again.cache.source.value, again.cache.prefilled_tokens <= 1 + K) == ("disk", True)
    pair.warm.close()  # which may be writing
    assert not list(folder.glob("*/*/*.tmp"))


# ---- theme 7: warm and cold --------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("type_k", ["f32", pytest.param("f16", marks=pytest.mark.slow), "q8_0"])
@pytest.mark.parametrize("kind", ["full", pytest.param("hybrid", marks=pytest.mark.slow)])
def test_s65_a_repeated_prompt_gives_equal_bits_in_exact_mode(kind: str, type_k: str, new_pair: NewPair) -> None:
    """Three times the same, cut at 1, 7 and 64 in between, on one and on two threads."""
    for n_threads in (1, 2):
        pair = new_pair(kind, exact=True, n_threads=n_threads, type_k=type_k)
        ids = random_ids(120, 300)
        said = [pair.ask(ids, max_tokens=3) for _ in range(3)]
        for cut in (1, 7, 64):
            pair.ask(joined(ids[:cut], random_ids(121 + cut, 20)), max_tokens=1)
            said.append(pair.ask(ids, max_tokens=3))
        assert {reply.logits.tobytes() for reply in said} == {said[0].logits.tobytes()}
        assert {reply.token_ids for reply in said} == {said[0].token_ids}


@pytest.mark.slow
@EVERY_KIND
def test_s68_a_probe_gives_equal_bits_whatever_ran_in_between(kind: str, new_pair: NewPair, tmp_path: Path) -> None:
    """Unrelated prompts with nonces, alone and side by side, slots saved and put back, tiers used."""
    pair = new_pair(kind, exact=True, n_slots=2, cache=on_disk(tmp_path / "cache"))
    probe = random_ids(130, 200)
    first = pair.ask(probe, max_tokens=6)
    for i in range(6):
        prompts = [joined(random_ids(1300 + 3 * i + j, 6), random_ids(131 + j, 90)) for j in range(3)]
        with held(pair.warm):
            handles = [pair.warm.submit(ids, max_tokens=4, return_logits=True) for ids in prompts]
        for ids, handle in zip(prompts, handles, strict=True):
            pair.check(ids, handle.result(), 4)
        pair.warm.slots[i % 2].save(tmp_path / "slot")
        pair.warm.slots[(i + 1) % 2].restore(tmp_path / "slot")
        again = pair.ask(probe, max_tokens=6)
        assert (again.token_ids, again.logits.tobytes()) == (first.token_ids, first.logits.tobytes())
    audit(pair.warm)


# ---- theme 9: tenants and what is shown --------------------------------------------------------------------------


@MODES
@EVERY_KIND
def test_s74_a_tenant_finds_its_own_in_every_tier_and_nothing_of_others(
    kind: str, exact: bool, new_pair: NewPair, tmp_path: Path
) -> None:
    options = {"exact": exact, "n_slots": 1, "cache": on_disk(tmp_path / "cache")}
    pair = new_pair(kind, **options)
    ids = random_ids(140, 320)
    longer = joined(ids, random_ids(141, 10))
    pair.ask(ids, max_tokens=2, namespace="one")
    for _ in range(2):
        other = pair.ask(longer, max_tokens=2, namespace="two", store=False)
        assert (other.usage.cached_tokens, other.cache.matched_tokens, other.cache.reason.value) == (0, 0, "cold")
        same = pair.ask(longer, max_tokens=2, namespace="one")
        assert same.usage.cached_tokens > 0 or not stores(kind, exact)
        pair = after_restart(pair, new_pair, kind, **options)
    same = pair.ask(longer, max_tokens=2, namespace="one")
    assert same.cache.source.value == ("disk" if stores(kind, exact) else "none")


def seen_in(engine: Any, folder: Path, namespace: str) -> list[Any]:
    """What a tenant can know of the cache after what it did: files of its own, by what they hold."""
    store_behind(engine)
    disk = engine._state.disk.index
    marks = [each for each in (*disk.spans, *disk.checkpoints) if each.namespace == namespace]
    names = {each.key.hex() for each in marks}
    files = sorted(
        (path.name.rpartition(".")[0], path.stat().st_size)
        for path in entry_files(folder)
        if path.name.partition(".")[0] in names
    )
    return [files, len(marks), engine.cache.clear(namespace)]


@pytest.mark.parametrize("n_slots", [1, pytest.param(3, marks=pytest.mark.slow)])
@MODES
@EVERY_KIND
def test_usage_plans_reasons_and_files_are_the_same_whatever_another_namespace_holds(
    kind: str, exact: bool, n_slots: int, new_engine: NewEngine, tmp_path: Path
) -> None:
    """Beside a stranger with the same prefix, and beside one with other tokens of equal length."""
    ids = random_ids(150, 300)
    seen = []
    for number, stranger in enumerate((ids, random_ids(151, 300))):
        folder = tmp_path / str(number)
        engine = new_engine(kind, exact=exact, n_slots=n_slots, flash_attention="off", cache=on_disk(folder))
        always_load(engine)
        engine.complete(stranger, max_tokens=4, namespace="a", boundaries=[100])
        store_behind(engine)
        numbers: list[Any] = []
        for turn in range(3):
            prompt = joined(ids[: 300 - 90 * turn], random_ids(160 + turn, 40))
            forecast = engine.plan(prompt, namespace="b")
            reply = engine.complete(prompt, max_tokens=4, namespace="b", return_logits=True)
            engine.complete(joined(stranger, [turn]), max_tokens=4, namespace="a")
            numbers += [reply.usage, reply.cache, reply.slot_id, reply.token_ids, reply.logits.tobytes()]
            numbers += [forecast.matched_tokens, forecast.resumable_tokens, forecast.source, forecast.reason]
            numbers += [forecast.position, forecast.restore_bytes, forecast.must_wait]
        seen.append([numbers, seen_in(engine, folder, "b")])
        audit(engine)
        engine.close()
    assert seen[0] == seen[1]
    assert seen[0][0][1].matched_tokens == 0


@pytest.fixture
def readable_by_all() -> Iterator[None]:
    """What is written without a thought could be read by everybody."""
    before = os.umask(0o022)
    yield
    os.umask(before)


@pytest.mark.usefixtures("readable_by_all")
@pytest.mark.parametrize("kind", ["full", "hybrid"])
def test_s75_no_text_of_a_prompt_is_shown_anywhere(
    kind: str, new_engine: NewEngine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Representations, logs, exceptions, statistics, plans; files are for their owner alone."""
    caplog.set_level(logging.DEBUG)
    folder = tmp_path / "cache"
    engine = new_engine(kind, n_ctx=512, kv_tokens=512, cache=on_disk(folder))
    marker = "SECRET-" + "".join(random.Random(1).choices("abcdefghij", k=12))
    text = f"{marker} " * 12
    token_ids = engine.model.tokenize(text)
    reply = engine.complete(text, max_tokens=4, namespace="tenant")
    handle = engine.submit(text, max_tokens=2)
    shown = [repr(handle), repr(handle.result()), repr(reply), str(reply), repr(engine), repr(engine.slots[0])]
    shown += [repr(engine.cache), repr(engine.cache.entries()), repr(engine.statistics()), repr(engine.plan(text))]
    refused: tuple[Callable[[], object], ...] = (
        lambda: engine.complete(text * 40),
        lambda: engine.complete(text, stop=marker, max_tokens=10**6),
        lambda: engine.complete(text, slot=99),
        lambda: engine.complete(text, grammar="no grammar", max_tokens=3),
        lambda: engine.complete(text, timeout_s=1e-9),
    )
    for bad in refused:
        with pytest.raises(PyLlamaCacheError) as caught:
            bad()
        shown += [repr(caught.value), str(caught.value)]
    engine.slots[0].save(tmp_path / "slot")
    store_behind(engine)
    shown += [repr(each) for each in (*engine._state.index.spans, *engine._state.index.checkpoints)]
    shown += [repr(each) for each in engine._state.disk.index.spans]
    shown += [repr(entry) for entry in engine._state.disk._store.scan()[0]]
    engine.close()
    shown += [record.getMessage() for record in caplog.records]
    run_of_ids = ", ".join(map(str, token_ids[:6]))
    for each in shown:
        assert marker not in each
        assert "SECRET" not in each
        assert run_of_ids not in each
    for path in (tmp_path / "slot", *entry_files(folder), folder / "index.sqlite"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path


# ---- a real model ------------------------------------------------------------------------------------------------


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_smollm2_resumes_from_disk_bit_for_bit(smollm2_path: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"n_ctx": 1024, "n_slots": 1, "n_ubatch": 64, "n_threads": 2, "exact": True}
    with Model(smollm2_path, progress=False) as model:
        ids = random_ids(1, 700, vocabulary=model.n_vocab)
        longer = joined(ids, random_ids(2, 40, vocabulary=model.n_vocab))
        with Engine(model, cache=on_disk(tmp_path / "cache"), progress=False, **options) as engine:
            engine.complete(ids, max_tokens=4)
        with Engine(model, cache=CacheConfig(host_bytes=0), progress=False, **options) as cold:
            expected = cold.complete(longer, max_tokens=8, return_logits=True)
        with Engine(model, cache=on_disk(tmp_path / "cache"), progress=False, **options) as engine:
            reply = engine.complete(longer, max_tokens=8, return_logits=True)
            check_numbers(longer, reply)
            assert (reply.cache.source.value, reply.usage.cached_tokens) == ("disk", 640)
            assert reply.logits is not None
            assert expected.logits is not None
            assert np.array_equal(reply.logits, expected.logits)
            assert reply.token_ids == expected.token_ids
            audit(engine)
