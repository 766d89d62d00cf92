"""The disk tier of one process: what is written is read back or refused, under its budget, whatever fails."""

from __future__ import annotations

import errno
import gc
import hashlib
import json
import os
import shutil
import sqlite3
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyllamacache.errors import (
    CacheCorruptError,
    CacheFileError,
    CacheMismatchError,
    ClosedError,
    ConfigError,
    InternalError,
)
from pyllamacache.store import disk_check, disk_format, disk_index
from pyllamacache.store.disk import DiskEntry, DiskStore
from pyllamacache.store.disk_files import BROKEN_INDEX, INDEX, BeforeStep, EntryFiles
from tests.fakes.clock import FakeClock
from tests.fakes.disk import (
    FACTS,
    FULL,
    LOCKED,
    SCOPE,
    assert_sound,
    bytes_on_disk,
    data_of,
    get,
    names,
    open_store,
    put,
    spans,
    state,
)

CHAIN = spans(range(100, 140))
FILE_BYTES = 2000
"""More than an entry of 1,000 bytes takes, less than two."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def store(folder: Path, clock: FakeClock) -> Any:
    store = open_store(folder, clock=clock)
    yield store
    store.close()
    if folder.exists():
        assert_sound(folder)


def one_file_bytes(tmp_path: Path) -> int:
    with_one = open_store(tmp_path / "one")
    put(with_one, CHAIN[0])
    size = with_one.size_bytes
    with_one.close()
    return size


def limited(tmp_path: Path, folder: Path, n_entries: int, **options: Any) -> DiskStore:
    """Has room for this many entries of 1,000 bytes."""
    return open_store(folder, one_file_bytes(tmp_path) * n_entries + 300, **options)


def only_file(folder: Path) -> Path:
    (path,) = folder.glob("*/*/*")
    return path


# ---- round trips -----------------------------------------------------------------------------------------------


def test_what_is_written_is_read_back(store: DiskStore) -> None:
    entries = [*CHAIN[:3], state(range(100, 110), label="branch", priority=2, tokens=77, expires_s=5000.0, hits=3)]
    assert put(store, *entries) == [True] * 4
    found, token = store.scan()
    for wrote, read in zip(entries, found, strict=True):
        facts = ("key", "parent", "kind", "namespace", "start", "end", "n_bytes", "label", "priority", "expires_s")
        for name in (*facts, "hits"):
            assert getattr(read, name) == getattr(wrote, name), name
        assert read.ids.tolist() == wrote.ids.tolist()
        assert read.used_s == 1000.0
    assert found[-1].tokens == 77
    assert all(get(store, entry) for entry in entries)
    assert store.scan(token) == ([], token)
    counted = store.statistics
    assert (counted.written, counted.read, counted.read_bytes) == (4, 4, 4000)


def test_a_scan_tells_what_is_new_by_whomever(store: DiskStore, folder: Path) -> None:
    put(store, CHAIN[0])
    _, token = store.scan()
    other = open_store(folder)
    put(other, CHAIN[1])
    put(store, CHAIN[2])
    found, later = store.scan(token)
    assert [entry.key for entry in found] == [CHAIN[1].key, CHAIN[2].key]
    assert later > token
    store.remove([("span", CHAIN[2].key)])
    put(other, CHAIN[2])
    assert [entry.key for entry in store.scan(later)[0]] == [CHAIN[2].key]
    other.close()


def test_another_process_and_a_restart_find_it(folder: Path, store: DiskStore) -> None:
    put(store, *CHAIN)
    store.close()
    again = open_store(folder)
    assert names(again) == {("span", entry.key) for entry in CHAIN}
    assert all(get(again, entry) for entry in CHAIN)
    again.close()


def test_scopes_share_the_budget_and_nothing_else(store: DiskStore, folder: Path) -> None:
    put(store, CHAIN[0])
    other = open_store(folder, scope="77" * 32)
    assert names(other) == set()
    assert not get(other, CHAIN[0])
    put(other, CHAIN[0])
    assert other.size_bytes == store.size_bytes == bytes_on_disk(folder)
    assert other.clear() == 1
    assert get(store, CHAIN[0])
    other.close()


def test_a_second_write_is_a_use(store: DiskStore, clock: FakeClock) -> None:
    assert put(store, CHAIN[0]) == [True]
    before = store.size_bytes
    clock.advance(50)
    assert put(store, CHAIN[0]) == [True]
    store.flush()
    assert store.size_bytes == before
    assert store.scan()[0][0].used_s == 1050.0
    assert store.statistics.present == 1


def test_uses_and_hits_are_kept(store: DiskStore, folder: Path, clock: FakeClock) -> None:
    put(store, *CHAIN[:2])
    clock.advance(10)
    store.touch([("span", CHAIN[0].key)], hits=2)
    store.touch([("span", CHAIN[0].key), ("span", b"x" * 16)], hits=1)
    store.close()
    again = open_store(folder)
    found = {entry.key: entry for entry in again.scan()[0]}
    assert (found[CHAIN[0].key].hits, found[CHAIN[0].key].used_s) == (3, 1010.0)
    assert (found[CHAIN[1].key].hits, found[CHAIN[1].key].used_s) == (0, 1000.0)
    again.close()


@pytest.mark.parametrize("kind", [bytes, bytearray, np.frombuffer])
def test_data_may_be_any_bytes(store: DiskStore, kind: Any) -> None:
    data = kind(data_of(CHAIN[0])) if kind is not np.frombuffer else np.frombuffer(data_of(CHAIN[0]), np.int32)
    assert store.write(CHAIN[0], data)
    assert get(store, CHAIN[0])


def test_names_may_be_any_text(store: DiskStore) -> None:
    odd = spans(range(4), namespace='n/../"ä\0\n\U0001f600')[0]
    put(store, odd)
    assert get(store, odd)
    assert store.scan()[0][0].namespace == odd.namespace
    assert store.clear(odd.namespace) == 1


def test_a_file_is_safetensors(store: DiskStore, folder: Path) -> None:
    from safetensors import safe_open

    entry = replace(CHAIN[1], label="tail", priority=-3)
    put(store, entry)
    with safe_open(only_file(folder), framework="numpy") as opened:
        assert opened.get_tensor("data").tobytes() == data_of(entry)
        assert opened.get_tensor("ids").tolist() == entry.ids.tolist()
        metadata = opened.metadata()
    assert metadata["fact.model"] == "tiny"
    assert metadata["key"] == entry.key.hex()
    assert (metadata["start"], metadata["end"], metadata["priority"]) == ("4", "8", "-3")


def test_files_are_for_their_owner_only(folder: Path) -> None:
    previous = os.umask(0)
    try:
        store = open_store(folder)
        put(store, *CHAIN[:2])
        modes = {path: path.stat().st_mode & 0o777 for path in [folder, *folder.rglob("*")]}
        store.close()
    finally:
        os.umask(previous)
    assert len(modes) > 8
    for path, mode in modes.items():
        assert mode == (0o700 if path.is_dir() else 0o600), path


@pytest.mark.parametrize(
    "change",
    [
        {"key": b"short"},
        {"parent": b""},
        {"kind": "window"},
        {"end": 9},
        {"n_bytes": 999},
        {"label": "no label"},
        {"expires_s": float("nan")},
        {"priority": 1 << 40},
        {"tokens": -1},
    ],
)
def test_a_caller_that_contradicts_itself_is_told(store: DiskStore, change: dict[str, Any]) -> None:
    with pytest.raises(InternalError):
        store.write(replace(CHAIN[0], **change), data_of(CHAIN[0]))
    assert names(store) == set()


# ---- budget ----------------------------------------------------------------------------------------------------


def test_the_limit_holds_and_the_oldest_goes(tmp_path: Path, folder: Path, clock: FakeClock) -> None:
    store = limited(tmp_path, folder, 5, clock=clock)
    alone = [spans(range(n, n + 4))[0] for n in range(0, 100, 10)]
    for entry in alone:
        clock.advance(1)
        assert put(store, entry) == [True]
        assert bytes_on_disk(folder) == store.size_bytes <= store.limit_bytes
    assert names(store) == {("span", entry.key) for entry in alone[-5:]}
    assert store.statistics.evicted == 5
    store.close()
    assert_sound(folder)


def test_what_can_never_fit_is_refused_and_nothing_goes(tmp_path: Path, folder: Path) -> None:
    store = limited(tmp_path, folder, 2)
    put(store, *CHAIN[:2])
    assert put(store, state(range(50), n_bytes=4000)) == [False]
    assert len(names(store)) == 2
    assert store.statistics.refused == 1
    store.close()


def test_a_lower_limit_is_reached_when_the_folder_is_opened(tmp_path: Path, folder: Path, store: DiskStore) -> None:
    put(store, *CHAIN)
    small = limited(tmp_path, folder, 3)
    assert small.size_bytes <= small.limit_bytes
    assert names(small) == {("span", entry.key) for entry in CHAIN[:3]}
    assert bytes_on_disk(folder) == small.size_bytes
    small.close()


def test_a_chain_goes_from_its_end_and_not_for_its_own_next_span(tmp_path: Path, folder: Path) -> None:
    clock = FakeClock(tick_s=1)
    store = limited(tmp_path, folder, 6, clock=clock)
    other = spans(range(500, 516))
    put(store, *other)
    assert put(store, *CHAIN[:8]) == [True] * 6 + [False, False]
    assert names(store) == {("span", entry.key) for entry in CHAIN[:6]}
    assert put(store, other[0]) == [True]
    assert names(store) == {("span", entry.key) for entry in [*CHAIN[:5], other[0]]}
    store.close()


def test_a_state_keeps_its_chain(tmp_path: Path, folder: Path, clock: FakeClock) -> None:
    store = limited(tmp_path, folder, 4, clock=clock)
    put(store, *CHAIN[:2])
    kept = state(range(100, 108), tokens=100)
    partial = state(range(100, 106), tokens=100)
    put(store, kept, partial)
    clock.advance(100)
    assert put(store, spans(range(4))[0]) == [True]
    assert len(names(store) & {("span", each.key) for each in CHAIN[:2]}) == 2
    store.close()


def test_the_order_in_which_things_go(tmp_path: Path, folder: Path, clock: FakeClock) -> None:
    store = limited(tmp_path, folder, 7, clock=clock)
    lone = {n: spans(range(n * 10, n * 10 + 4))[0] for n in range(9)}
    put(store, replace(lone[0], priority=9, expires_s=1500.0))  # expires
    put(store, replace(CHAIN[0], priority=5), replace(CHAIN[1], priority=5))  # will be stranded
    put(store, replace(lone[1], priority=-1, tokens=9000))  # low priority
    put(store, replace(lone[2], tokens=40), replace(lone[3], tokens=4000), replace(lone[4], tokens=400))
    clock.advance(1000)
    store.remove([("span", CHAIN[0].key)])
    store.touch([("span", lone[4].key)], hits=100)
    assert put(store, replace(lone[5], priority=1)) == [True]  # takes the free place
    expected = [lone[0], CHAIN[1], lone[1], lone[2], lone[3], lone[4]]
    for n, gone in enumerate(expected):
        assert ("span", gone.key) in names(store) or gone is lone[0]
        newcomer = replace(spans(range(1000 + 10 * n, 1004 + 10 * n))[0], priority=1)
        assert put(store, newcomer) == [True]
        assert ("span", gone.key) not in names(store), n
    store.close()
    assert_sound(folder)


def test_a_parent_that_ranks_below_its_children_goes_next(tmp_path: Path, folder: Path) -> None:
    store = limited(tmp_path, folder, 4)
    put(store, replace(CHAIN[0], priority=0), replace(CHAIN[1], priority=1))
    put(store, *(replace(spans(range(n, n + 4))[0], priority=2) for n in (0, 10)))
    big = replace(spans(range(20, 24), n_bytes=1900)[0], priority=2)
    assert put(store, big) == [True]
    assert not names(store) & {("span", CHAIN[0].key), ("span", CHAIN[1].key)}
    store.close()


def test_what_is_worth_more_does_not_make_room(tmp_path: Path, folder: Path, clock: FakeClock) -> None:
    store = limited(tmp_path, folder, 2, clock=clock)
    put(store, replace(CHAIN[0], tokens=1000), replace(spans(range(4))[0], priority=1))
    before = names(store)
    store.touch([("span", CHAIN[0].key)], hits=1)
    assert put(store, spans(range(10, 14))[0]) == [False]
    assert put(store, replace(spans(range(10, 14))[0], priority=-1, tokens=1 << 20)) == [False]
    assert names(store) == before
    store.flush()
    assert {entry.key: entry.hits for entry in store.scan()[0]}[CHAIN[0].key] == 1
    clock.advance(10000)
    assert put(store, spans(range(10, 14))[0]) == [True]
    store.close()


def test_a_pinned_entry_stays_and_with_it_what_it_stands_on(tmp_path: Path, folder: Path, clock: FakeClock) -> None:
    store = limited(tmp_path, folder, 3, clock=clock)
    put(store, CHAIN[0], replace(CHAIN[1], expires_s=1100.0), replace(spans(range(4))[0], priority=5))
    store.set_pinned([("span", CHAIN[1].key)], True)
    clock.advance(1000)
    better = [replace(spans(range(n, n + 4))[0], priority=9) for n in (10, 20)]
    assert put(store, *better) == [True, True]
    store.close()
    again = limited(tmp_path, folder, 3, clock=clock)
    assert {("span", entry.key) for entry in CHAIN[:2]} < names(again)
    assert [entry.is_pinned for entry in again.scan()[0] if entry.key == CHAIN[1].key] == [True]
    assert get(again, CHAIN[1])
    again.set_pinned([("span", CHAIN[1].key)], False)
    assert not get(again, CHAIN[1])
    assert ("span", CHAIN[1].key) not in names(again)
    again.close()


def test_what_has_expired_is_not_there(store: DiskStore, clock: FakeClock) -> None:
    entry = replace(CHAIN[0], expires_s=1010.0)
    assert put(store, entry) == [True]
    assert get(store, entry)
    clock.advance(10)
    assert names(store) == set()
    assert not get(store, entry)
    assert put(store, entry) == [False]
    assert put(store, CHAIN[0]) == [True]
    assert get(store, CHAIN[0])


def test_a_span_that_comes_back_takes_up_what_was_stranded(tmp_path: Path, folder: Path) -> None:
    store = limited(tmp_path, folder, 4)
    put(store, *CHAIN[:3], spans(range(4))[0])
    store.remove([("span", CHAIN[0].key)])
    put(store, CHAIN[0])
    assert put(store, spans(range(10, 14))[0]) == [True]
    # A stranded entry would have gone first.
    assert {("span", entry.key) for entry in CHAIN[:2]} < names(store)
    store.close()


def test_removing_and_clearing(store: DiskStore, folder: Path) -> None:
    other = spans(range(100, 120), namespace="b")
    put(store, *CHAIN, *other, state(range(100, 108)))
    store.set_pinned([("span", other[0].key)], True)
    store.remove([("state", chain[1].key) for chain in [CHAIN]])
    assert len(names(store)) == 15
    assert store.clear("b") == 5
    assert store.clear() == 10
    assert store.clear() == 0
    assert bytes_on_disk(folder) == store.size_bytes == 0


@pytest.mark.parametrize("is_from_outside", [False, True])
def test_clearing_leaves_no_ids_behind(folder: Path, is_from_outside: bool) -> None:
    store = open_store(folder)
    secret = replace(spans(range(4))[0], ids=np.array([0x5EC12E7, 0x5EC12E8, 0x5EC12E9, 0x5EC12EA], np.int32))
    put(store, secret)
    mark = secret.ids.tobytes()
    assert any(mark in path.read_bytes() for path in folder.rglob("*") if path.is_file())
    (folder / BROKEN_INDEX).touch(mode=0o600)
    if is_from_outside:
        assert disk_check.clear(folder) == 1
        assert not (folder / BROKEN_INDEX).exists()
    else:
        assert store.clear() == 1
    assert not any(mark in path.read_bytes() for path in folder.rglob("*") if path.is_file())
    assert put(store, CHAIN[0]) == [True]
    store.close()


# ---- damage ----------------------------------------------------------------------------------------------------


def test_any_flipped_byte_is_refused(store: DiskStore, folder: Path) -> None:
    put(store, replace(CHAIN[0], label="a", expires_s=9000.5))
    path = only_file(folder)
    good = path.read_bytes()
    into = np.empty(1000, np.uint8)
    fd = os.open(path, os.O_RDWR)
    for position, byte in enumerate(good):
        for flip in (0x01, 0x20, 0x80):
            os.pwrite(fd, bytes([byte ^ flip]), position)
            with pytest.raises(CacheCorruptError):
                disk_format.load(fd, disk_format.decode(fd, "x"), into, "x")
        os.pwrite(fd, bytes([byte]), position)
    disk_format.load(fd, disk_format.decode(fd, "x"), into, "x")
    os.close(fd)
    assert into.tobytes() == data_of(CHAIN[0])


@pytest.mark.parametrize("damage", ["flip", "cut", "longer", "empty", "other", "link", "folder", "fifo"])
def test_a_damaged_entry_is_told_once_and_dropped(store: DiskStore, folder: Path, tmp_path: Path, damage: str) -> None:
    put(store, CHAIN[0])
    path = only_file(folder)
    good = path.read_bytes()
    if damage in ("link", "folder", "fifo"):
        path.unlink()
        (tmp_path / "target").write_bytes(good)
        {"link": lambda: path.symlink_to(tmp_path / "target"), "folder": path.mkdir, "fifo": lambda: os.mkfifo(path)}[
            damage
        ]()  # type: ignore[no-untyped-call]
    elif damage == "other":
        put(store, CHAIN[1])
        (other,) = set(folder.glob("*/*/*")) - {path}
        path.write_bytes(other.read_bytes())
    else:
        content = {"flip": good[:-1] + b"?", "cut": good[:-1], "longer": good + b"?", "empty": b""}[damage]
        path.write_bytes(content)
    if damage == "folder":
        problems = disk_check.check(folder).problems
        assert [each.kind for each in problems] == ["damaged"]
    with pytest.raises(CacheCorruptError):
        get(store, CHAIN[0])
    assert not get(store, CHAIN[0])
    assert ("span", CHAIN[0].key) not in names(store)
    assert store.statistics.corrupt == 1
    if damage == "folder":
        path.rmdir()
    assert put(store, CHAIN[0]) == [True]
    assert get(store, CHAIN[0])


def test_a_file_that_is_gone_is_a_miss(store: DiskStore, folder: Path) -> None:
    put(store, CHAIN[0])
    only_file(folder).unlink()
    assert not get(store, CHAIN[0])
    assert store.statistics.gone == 1
    store.flush()
    assert store.size_bytes == 0
    assert put(store, CHAIN[0]) == [True]
    assert get(store, CHAIN[0])


def test_an_entry_of_another_size_is_another_one(store: DiskStore) -> None:
    put(store, CHAIN[0])
    assert not store.read("span", CHAIN[0].key, np.empty(999, np.uint8))
    assert get(store, CHAIN[0])


def test_ids_in_the_index_must_be_those_in_the_file(store: DiskStore, folder: Path) -> None:
    put(store, CHAIN[0])
    change(folder, "UPDATE entries SET ids = ?", np.zeros(4, "<i4").tobytes())
    with pytest.raises(CacheCorruptError, match="another entry"):
        get(store, CHAIN[0])


def change(folder: Path, statement: str, *values: Any) -> None:
    connection = sqlite3.connect(folder / INDEX)
    with connection:
        connection.create_function("bucket_of", 3, lambda *_: 0)
        connection.execute(statement, values)
    connection.close()


# ---- links and other folders -----------------------------------------------------------------------------------


def test_links_below_the_folder_are_not_followed(store: DiskStore, folder: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (folder / SCOPE).symlink_to(elsewhere)
    with pytest.raises(CacheFileError):
        put(store, CHAIN[0])
    assert list(elsewhere.iterdir()) == []
    (folder / SCOPE).unlink()
    assert put(store, CHAIN[0]) == [True]


def test_an_index_that_is_a_link_is_set_aside(folder: Path, tmp_path: Path) -> None:
    store = open_store(folder)
    put(store, CHAIN[0])
    store.close()
    (folder / INDEX).rename(tmp_path / "index")
    content = (tmp_path / "index").read_bytes()
    (folder / INDEX).symlink_to(tmp_path / "index")
    store = open_store(folder)
    assert get(store, CHAIN[0])
    put(store, CHAIN[1])
    store.close()
    assert (tmp_path / "index").read_bytes() == content
    (folder / BROKEN_INDEX).unlink()
    assert_sound(folder)


def test_the_folder_itself_may_be_reached_by_a_link(folder: Path, tmp_path: Path) -> None:
    folder.mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(folder)
    store = open_store(tmp_path / "link")
    put(store, CHAIN[0])
    store.close()
    assert_sound(folder)


def test_a_folder_with_other_things_is_left_alone(folder: Path) -> None:
    folder.mkdir()
    (folder / "thesis.txt").write_text("all of it")
    with pytest.raises(CacheFileError, match="not empty"):
        open_store(folder)
    assert os.listdir(folder) == ["thesis.txt"]
    for call in (disk_check.clear, disk_check.check, disk_check.groups):
        with pytest.raises(CacheFileError, match="not the folder of a disk cache"):
            call(folder)


@pytest.mark.parametrize("scope", ["", "short", "G" * 32, "../../../../etc", "A" * 32])
def test_a_scope_is_a_digest(folder: Path, scope: str) -> None:
    with pytest.raises(ConfigError):
        open_store(folder, scope=scope)
    assert not folder.exists()


@pytest.mark.parametrize("place", ["file", "file/below", "nul\0"])
def test_what_cannot_be_a_folder_is_refused(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(CacheFileError):
        open_store(tmp_path / place)


@pytest.mark.parametrize("name", ["../../victim", "../cache/victim", "victim", "", f"{SCOPE}/../../victim", "/victim"])
def test_a_name_in_a_damaged_index_leads_nowhere(folder: Path, tmp_path: Path, name: str) -> None:
    victims = [tmp_path / "victim", tmp_path.parent / "victim", folder / "victim"]
    store = open_store(folder)
    put(store, CHAIN[0])
    for victim in victims:
        victim.write_bytes(b"not yours")
    change(folder, "UPDATE entries SET name = ?", name)
    assert not get(store, CHAIN[0])
    store.clear()
    store.close()
    disk_check.check(folder, repair=True)
    for victim in victims:
        victim.unlink()


# ---- failures --------------------------------------------------------------------------------------------------


class Failing:
    """Lets the n-th step of what is done next fail."""

    def __init__(self) -> None:
        self.steps: list[str] = []
        self.at = -1
        self.error: BaseException | None = None

    def __call__(self, step: str) -> None:
        self.steps.append(step)
        if self.at == len(self.steps) - 1:
            assert self.error is not None
            raise self.error

    def arm(self, at: int, error: BaseException | None) -> None:
        self.steps, self.at, self.error = [], at, error


def eviction(tmp_path: Path, folder: Path, failing: BeforeStep) -> DiskStore:
    """A store whose next write has something to evict."""
    store = limited(tmp_path, folder, 3, before_step=failing, clock=FakeClock(tick_s=1))
    put(store, *(spans(range(n, n + 4))[0] for n in (0, 10, 20)))
    return store


NEW = spans(range(50, 54))[0]


def steps_of_a_write(tmp_path: Path) -> list[str]:
    failing = Failing()
    store = eviction(tmp_path, tmp_path / "plan", failing)
    failing.arm(-1, None)
    assert put(store, NEW) == [True]
    store.close()
    return failing.steps


def test_every_step_of_a_write_may_fail(tmp_path: Path, folder: Path) -> None:
    failing = Failing()
    steps = steps_of_a_write(tmp_path)
    assert {"index.reserve", "file.remove", "file.write", "file.sync", "file.rename", "index.publish"} < set(steps)
    for error in (FULL, LOCKED, KeyboardInterrupt()):
        for at, step in enumerate(steps):
            if error is LOCKED and not step.startswith("index."):
                continue
            failing.arm(-1, None)
            store = eviction(tmp_path, folder, failing)
            before = names(store)
            failing.arm(at, error)
            with pytest.raises(KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else CacheFileError):
                put(store, NEW)
            assert ("span", NEW.key) not in names(store), step
            assert names(store) <= before
            assert bytes_on_disk(folder) <= store.limit_bytes
            failing.arm(-1, None)
            store.flush()
            assert bytes_on_disk(folder) == store.size_bytes, step
            assert_sound(folder)
            assert put(store, NEW) == [True]
            assert get(store, NEW)
            store.close()
            assert_sound(folder)
            shutil.rmtree(folder)


def test_a_reservation_that_cannot_be_given_back_at_once_is_given_back_later(tmp_path: Path, folder: Path) -> None:
    refused: list[str] = []

    def fail(step: str) -> None:
        if step in refused:
            raise FULL

    store = eviction(tmp_path, folder, fail)
    refused[:] = ["file.write", "index.flush"]
    with pytest.raises(CacheFileError, match="No space left"):
        put(store, NEW)
    refused.clear()
    assert names(store).isdisjoint({("span", NEW.key)})
    assert bytes_on_disk(folder) < store.size_bytes <= store.limit_bytes
    assert put(store, NEW) == [True]
    assert bytes_on_disk(folder) == store.size_bytes
    store.close()
    assert_sound(folder)


def test_a_file_that_cannot_be_removed_goes_on_counting(tmp_path: Path, folder: Path) -> None:
    refused = {"on": True}

    def refuse(step: str) -> None:
        if refused["on"] and step == "file.remove":
            raise PermissionError(errno.EACCES, "Permission denied")

    refused["on"] = False
    store = eviction(tmp_path, folder, refuse)
    refused["on"] = True
    with pytest.raises(CacheFileError, match="remove"):
        put(store, NEW)
    assert bytes_on_disk(folder) <= store.limit_bytes
    store.flush()
    assert bytes_on_disk(folder) <= store.size_bytes
    refused["on"] = False
    assert put(store, NEW) == [True]
    store.close()
    assert disk_check.check(folder, repair=True).remaining == ()
    assert_sound(folder)


def test_a_database_that_cannot_grow_is_an_error_and_no_more(folder: Path, store: DiskStore) -> None:
    put(store, CHAIN[0])
    index = store._folder._index
    assert index is not None
    (n_pages,) = index._connection.execute("PRAGMA page_count").fetchone()
    index._connection.execute(f"PRAGMA max_page_count = {n_pages}")
    odd = spans(range(4), namespace="n" * 20_000)[0]
    with pytest.raises(CacheFileError, match="full"):
        put(store, odd)
    assert get(store, CHAIN[0])
    assert bytes_on_disk(folder) == store.size_bytes
    index._connection.execute("PRAGMA max_page_count = 1000000")
    assert put(store, odd) == [True]


def test_a_failing_read_is_an_error_of_the_system(
    store: DiskStore, monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    put(store, CHAIN[0])

    def fail(*_: Any) -> int:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", fail)
        with pytest.raises(CacheFileError, match="Input/output error"):
            get(store, CHAIN[0])
    assert get(store, CHAIN[0])


@pytest.mark.parametrize("step", ["index.open", "index.create", "index.create.commit", "index.sweep", "index.shrink"])
def test_opening_may_fail_and_be_tried_again(folder: Path, step: str) -> None:
    def fail(name: str) -> None:
        if name == step:
            raise FULL

    with pytest.raises(CacheFileError, match="No space left"):
        open_store(folder, before_step=fail)
    store = open_store(folder)
    put(store, CHAIN[0])
    store.close()
    with pytest.raises(CacheFileError) if "create" not in step else pytest.raises(ZeroDivisionError):
        open_store(folder, before_step=fail).close()
        raise ZeroDivisionError
    store = open_store(folder)
    assert get(store, CHAIN[0])
    store.close()
    assert_sound(folder)


# ---- a broken index --------------------------------------------------------------------------------------------


def break_index(folder: Path, how: str) -> None:
    path = folder / INDEX
    if how == "garbage":
        path.write_bytes(b"this is no database" * 100)
    elif how == "header":
        content = path.read_bytes()
        path.write_bytes(b"\0" * 100 + content[100:])
    elif how == "tables":
        change(folder, "DROP TABLE entries")
    elif how == "pages":
        size = path.stat().st_size
        path.write_bytes(path.read_bytes()[:4096] + b"\xff" * (size - 4096))
    elif how == "gone":
        path.unlink()
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "folder":
        path.unlink()
        path.mkdir()
    elif how == "foreign":
        path.unlink()
        connection = sqlite3.connect(path)
        connection.execute("CREATE TABLE recipes (name TEXT)")
        connection.execute("PRAGMA user_version = 1")
        connection.commit()
        connection.close()


@pytest.mark.parametrize("how", ["garbage", "header", "tables", "pages", "gone", "empty", "folder", "foreign"])
def test_a_broken_index_is_made_anew_from_the_files(folder: Path, clock: FakeClock, how: str) -> None:
    store = open_store(folder, clock=clock)
    kept = [*CHAIN, state(range(100, 106), label="end", priority=3, expires_s=9e9)]
    put(store, *kept)
    store.close()
    damaged = CHAIN[-1]
    (path,) = folder.glob(f"*/*/{damaged.key.hex()}*")
    path.write_bytes(path.read_bytes()[:100])
    break_index(folder, how)
    store = open_store(folder, clock=clock)
    assert names(store) == {(each.kind, each.key) for each in kept if each is not damaged}
    assert all(get(store, entry) for entry in kept if entry is not damaged)
    (found,) = (entry for entry in store.scan()[0] if entry.kind == "state")
    assert (found.label, found.priority, found.expires_s, found.start) == ("end", 3, 9e9, 4)
    assert put(store, damaged) == [True]
    store.close()
    shutil.rmtree(folder / BROKEN_INDEX, ignore_errors=True)
    (folder / BROKEN_INDEX).unlink(missing_ok=True)
    assert_sound(folder)


@pytest.mark.parametrize("how", ["garbage", "gone"])
def test_an_index_that_breaks_under_an_open_store(folder: Path, store: DiskStore, how: str) -> None:
    put(store, *CHAIN[:3])
    _, token = store.scan()
    for suffix in ("-wal", "-shm"):
        (folder / (INDEX + suffix)).unlink(missing_ok=True)
    (folder / INDEX).rename(folder / "old")
    (folder / "old").unlink()
    if how == "garbage":
        (folder / INDEX).touch(mode=0o600)
        (folder / INDEX).write_bytes(b"no database" * 1000)
    assert names(store) == set()
    assert not get(store, CHAIN[0])
    assert store.size_bytes == 0
    assert put(store, CHAIN[3]) == [True]
    assert {entry.key for entry in store.scan(token)[0]} == {entry.key for entry in CHAIN[:4]}
    assert all(get(store, entry) for entry in CHAIN[:4])


def test_an_index_that_is_made_anew_by_another_store(folder: Path, store: DiskStore) -> None:
    put(store, CHAIN[0])
    _, token = store.scan()
    (folder / INDEX).rename(folder / BROKEN_INDEX)
    other = open_store(folder)
    assert get(other, CHAIN[0])
    put(other, CHAIN[1])
    assert len(store.scan(token)[0]) == 2
    assert get(store, CHAIN[1])
    assert put(store, CHAIN[2]) == [True]
    assert get(other, CHAIN[2])
    other.close()


def test_a_folder_that_is_removed_under_an_open_store(folder: Path, store: DiskStore) -> None:
    put(store, CHAIN[0])
    shutil.rmtree(folder)
    assert names(store) == set()
    assert not get(store, CHAIN[0])
    assert put(store, CHAIN[1]) == [True]
    assert get(store, CHAIN[1])


def test_an_index_of_a_newer_version_is_left_alone(folder: Path) -> None:
    open_store(folder).close()
    change(folder, "PRAGMA user_version = 2")
    before = (folder / INDEX).read_bytes()
    with pytest.raises(CacheMismatchError, match="format_version"):
        open_store(folder)
    assert (folder / INDEX).read_bytes() == before


# ---- leftovers -------------------------------------------------------------------------------------------------


def test_files_that_nobody_knows_are_swept(folder: Path, store: DiskStore) -> None:
    put(store, CHAIN[0])
    path = only_file(folder)
    stray = path.with_name(f"{CHAIN[0].key.hex()}.span.{'0' * 16}")
    half = path.with_name(f"{CHAIN[0].key.hex()}.span.{'1' * 16}.tmp")
    stray.write_bytes(path.read_bytes())
    half.write_bytes(b"half")
    ours = path.with_name("notes.txt")
    ours.write_bytes(b"not a name of ours")
    assert {each.kind for each in disk_check.check(folder).problems} == {"leftover"}
    open_store(folder).close()
    assert set(path.parent.iterdir()) == {path, ours}
    ours.unlink()


def test_a_sweep_leaves_alone_what_a_living_store_is_writing(folder: Path) -> None:
    seen = []

    def look(step: str) -> None:
        if step in ("file.write", "file.rename", "index.publish", "file.mkdir"):
            open_store(folder).close()
            assert disk_check.check(folder).problems == ()
            seen.append(step)

    store = open_store(folder, before_step=look)
    assert put(store, CHAIN[0]) == [True]
    assert {"file.mkdir", "file.write", "file.rename", "index.publish"} == set(seen)
    assert get(store, CHAIN[0])
    store.close()
    assert_sound(folder)


def test_what_another_store_is_writing_counts_and_need_not_be_written_twice(tmp_path: Path, folder: Path) -> None:
    other = limited(tmp_path, folder, 2)
    told: dict[str, Any] = {}

    def look(step: str) -> None:
        if step == "file.rename" and not told:
            told["same"] = put(other, CHAIN[0])
            told["size"] = other.size_bytes
            told["room"] = put(other, *(spans(range(n, n + 4))[0] for n in (0, 10)))
            told["disk"] = bytes_on_disk(folder)

    store = limited(tmp_path, folder, 2, before_step=look)
    assert put(store, CHAIN[0]) == [True]
    assert told["same"] == [True]
    assert told["size"] == one_file_bytes(tmp_path)
    assert told["room"] == [True, True]  # the second takes the place of the first, not of what is being written
    assert told["disk"] <= store.limit_bytes
    assert get(store, CHAIN[0])
    assert get(other, CHAIN[0])
    store.close()
    other.close()
    assert_sound(folder)


# ---- lifetime and threads --------------------------------------------------------------------------------------


def test_a_closed_store_says_so(folder: Path) -> None:
    store = open_store(folder)
    store.close()
    store.close()
    calls: list[Any] = [store.scan, store.flush, store.clear, lambda: get(store, CHAIN[0]), lambda: put(store, NEW)]
    for call in calls:
        with pytest.raises(ClosedError):
            call()
    assert not list(folder.glob("writer-*"))


def test_a_forgotten_store_is_closed(folder: Path) -> None:
    store = open_store(folder)
    put(store, CHAIN[0])
    del store
    gc.collect()
    assert not list(folder.glob("writer-*"))
    assert_sound(folder)


def test_threads_may_share_a_store(tmp_path: Path, folder: Path) -> None:
    store = limited(tmp_path, folder, 12, clock=FakeClock(tick_s=0.25))
    errors: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            for n in range(8):
                mine = spans(range(1000 * seed + 10 * n, 1000 * seed + 10 * n + 8))
                put(store, *mine)
                get(store, mine[0])
                store.touch([("span", mine[0].key)], hits=1)
                store.scan()
                if n == 5:
                    store.remove([("span", mine[1].key)])
        except BaseException as error:  # noqa: BLE001 - the test's own thread tells it
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert store.statistics.written + store.statistics.refused >= 64
    assert store.size_bytes <= store.limit_bytes
    store.close()
    assert_sound(folder)


# ---- the index -------------------------------------------------------------------------------------------------


def test_nothing_on_the_way_of_a_write_looks_at_every_row(store: DiskStore, folder: Path) -> None:
    put(store, *CHAIN[:3], state(range(100, 108)))
    asked: list[str] = []
    index = store._folder._index
    assert index is not None
    index._connection.set_trace_callback(asked.append)
    store.limit_bytes = store.size_bytes
    store.touch([("span", CHAIN[0].key)])
    assert put(store, replace(spans(range(4))[0], priority=1, expires_s=9999.0)) == [True]
    index._connection.set_trace_callback(None)
    store.limit_bytes = 1 << 20
    reader = sqlite3.connect(folder / INDEX)
    reader.create_function("bucket_of", 3, lambda *_: 0)
    n_plans = 0
    for statement in asked:
        if statement.lstrip("- ").startswith(("SELECT", "UPDATE", "DELETE", "WITH", "INSERT")):
            for *_, plan in reader.execute(f"EXPLAIN QUERY PLAN {statement.lstrip('- ')}"):
                n_plans += 1
                assert "SCAN" not in plan or "doomed" in plan or "CONSTANT" in plan or "down" in plan, (statement, plan)
    reader.close()
    assert n_plans > 10


def test_facts_are_kept_with_the_scope(store: DiskStore, folder: Path) -> None:
    put(store, *CHAIN[:2])
    (group,) = disk_check.groups(folder)
    assert (group.scope, group.facts, group.n_spans, group.n_tokens) == (SCOPE, FACTS, 2, 8)


def test_a_name_says_what_is_in_a_file(store: DiskStore, folder: Path) -> None:
    put(store, CHAIN[0])
    (name,) = (name for name, _ in EntryFiles(str(folder)).walk())
    key = CHAIN[0].key.hex()
    assert name.startswith(f"{SCOPE}/{key[:2]}/{key}.span.")


def test_an_index_is_identified_by_its_file(folder: Path, store: DiskStore) -> None:
    before = disk_index.identity(str(folder))
    assert before is not None
    assert disk_index.identity(str(folder / "nowhere")) is None


def test_headers_are_ours_to_the_byte(store: DiskStore, folder: Path) -> None:
    """A header that says the same in other words, with a digest that holds, is refused."""
    put(store, CHAIN[0])
    raw = only_file(folder).read_bytes()
    n_header = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + n_header])
    header["__metadata__"]["digest"] = "0" * 64
    text = json.dumps(header)
    text += " " * (-len(text) % 8)
    unsigned = len(text).to_bytes(8, "little") + text.encode()
    signed = unsigned.replace(b"0" * 64, hashlib.sha256(unsigned).hexdigest().encode(), 1)
    path = folder.parent / "other"
    path.write_bytes(signed + raw[8 + n_header :])
    fd = os.open(path, os.O_RDONLY)
    with pytest.raises(CacheCorruptError):
        disk_format.decode(fd, "x")
    os.close(fd)


def test_an_entry_shows_no_ids() -> None:
    assert "100" not in repr(DiskEntry(b"k" * 16, b"p" * 16, "span", "", 0, 4, np.arange(100, 104, dtype=np.int32), 1))
