"""The disk tier against a model of it: a set of entries, and a budget that holds at every step."""

from __future__ import annotations

import errno
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pyllamacache.errors import CacheFileError
from pyllamacache.store.disk import DiskEntry, DiskStore
from tests.fakes.clock import FakeClock
from tests.fakes.disk import assert_sound, bytes_on_disk, get, open_store, put, spans, state

BRANCHES = [list(range(16)), [*range(8), *range(50, 58)], list(range(100, 112))]
POOL: list[DiskEntry] = [
    *(entry for ids in BRANCHES for entry in spans(ids, n_bytes=600)),
    *(state(ids[:n], n_bytes=1500, tokens=300) for ids in BRANCHES for n in (6, 8, 12)),
    *spans(range(8), namespace="b", n_bytes=600),
]
entries = st.sampled_from(POOL)
ENTRY_BYTES = 2000
STEPS = [
    *("index.reserve", "index.reserve.commit", "file.remove", "file.create", "file.write", "file.sync", "file.rename"),
    *("index.publish", "index.publish.commit"),
]


def name_of(entry: DiskEntry) -> tuple[str, bytes]:
    return entry.kind, entry.key


class Disk(RuleBasedStateMachine):
    """Two stores on one folder, each with its limit. `held` is what may be there, `pinned` what must be."""

    @initialize(limits=st.tuples(st.integers(1, 12), st.integers(1, 12)))
    def open(self, limits: tuple[int, int]) -> None:
        self.folder = Path(tempfile.mkdtemp()) / "cache"
        self.clock = FakeClock()
        self.fault: tuple[str, BaseException] | None = None
        self.limits = [n * ENTRY_BYTES for n in limits]
        self.last_limit = max(self.limits)
        self.stores: list[DiskStore] = [self.new_store(0), self.new_store(1)]
        self.held: dict[tuple[str, bytes], DiskEntry] = {}
        self.pinned: set[tuple[str, bytes]] = set()

    def new_store(self, which: int) -> DiskStore:
        self.last_limit = self.limits[which]
        return open_store(self.folder, self.limits[which], clock=self.clock, before_step=self.before_step)

    def before_step(self, step: str) -> None:
        # Nothing is written while more than the writer's limit is there.
        if step in ("file.create", "file.write", "file.sync", "file.rename") and not self.pinned:
            assert bytes_on_disk(self.folder) <= self.last_limit
        if self.fault is not None and self.fault[0] == step:
            error, self.fault = self.fault[1], None
            raise error

    def teardown(self) -> None:
        if hasattr(self, "stores"):
            for store in self.stores:
                store.close()
            assert_sound(self.folder)
            shutil.rmtree(self.folder.parent)

    # -- what may happen --

    @rule(
        which=st.integers(0, 1),
        entry=entries,
        priority=st.integers(-1, 1),
        lives_s=st.sampled_from([None, None, 5.0]),
        hits=st.integers(0, 3),
    )
    def write(self, which: int, entry: DiskEntry, priority: int, lives_s: float | None, hits: int) -> None:
        self.last_limit = self.limits[which]
        expires_s = None if lives_s is None else self.clock.now_s + lives_s
        chosen = replace(entry, priority=priority, expires_s=expires_s, hits=hits)
        was_there = get(self.stores[which], entry)
        if put(self.stores[which], chosen)[0]:
            assert get(self.stores[which], entry)
            if not was_there:
                self.held[name_of(entry)] = chosen
        else:
            assert not was_there

    @rule(which=st.integers(0, 1), entry=entries)
    def read(self, which: int, entry: DiskEntry) -> None:
        is_there = get(self.stores[which], entry)
        known = self.held.get(name_of(entry))
        assert not is_there or known is not None
        if known is not None and not self.is_valid(known):
            assert not is_there

    @rule(which=st.integers(0, 1), chosen=st.lists(entries, max_size=4), hits=st.integers(0, 2))
    def touch(self, which: int, chosen: list[DiskEntry], hits: int) -> None:
        self.stores[which].touch(map(name_of, chosen), hits)

    @rule(which=st.integers(0, 1), chosen=st.lists(entries, max_size=2), is_pinned=st.booleans())
    def pin(self, which: int, chosen: list[DiskEntry], is_pinned: bool) -> None:
        there = {name_of(entry) for entry in chosen if get(self.stores[which], entry)}
        self.stores[which].set_pinned(there, is_pinned)
        self.pinned = self.pinned | there if is_pinned else self.pinned - there

    @rule(which=st.integers(0, 1), chosen=st.lists(entries, max_size=2))
    def remove(self, which: int, chosen: list[DiskEntry]) -> None:
        self.stores[which].remove(map(name_of, chosen))
        self.forget(set(map(name_of, chosen)))

    @rule(which=st.integers(0, 1), namespace=st.sampled_from(["", "b"]))
    def clear(self, which: int, namespace: str) -> None:
        self.stores[which].clear(namespace)
        self.forget({name for name, entry in self.held.items() if entry.namespace == namespace})

    @rule(seconds=st.integers(1, 10))
    def wait(self, seconds: int) -> None:
        self.clock.advance(seconds)

    @rule(which=st.integers(0, 1))
    def restart(self, which: int) -> None:
        self.stores[which].close()
        self.stores[which] = self.new_store(which)

    @rule(
        which=st.integers(0, 1),
        entry=entries,
        step=st.sampled_from(STEPS),
    )
    def fail(self, which: int, entry: DiskEntry, step: str) -> None:
        self.last_limit = self.limits[which]
        was_there = get(self.stores[which], entry)
        self.fault = (step, OSError(errno.ENOSPC, "No space left on device"))
        try:
            is_there = put(self.stores[which], entry)[0]
        except CacheFileError:
            assert self.fault is None
            is_there = was_there
        self.fault = None
        assert get(self.stores[which], entry) == is_there
        if is_there and not was_there:
            self.held[name_of(entry)] = entry

    @precondition(lambda self: not self.pinned)
    @rule()
    def lose_the_index(self) -> None:
        for store in self.stores:
            store.close()
        (self.folder / "index.sqlite").write_bytes(b"no database" * 500)
        self.stores = [self.new_store(0), self.new_store(1)]

    # -- what must hold --

    def is_valid(self, entry: DiskEntry) -> bool:
        is_pinned = name_of(entry) in self.pinned
        return is_pinned or entry.expires_s is None or entry.expires_s > self.clock.now_s

    def forget(self, names: set[tuple[str, bytes]]) -> None:
        self.pinned -= names
        for name in names:
            self.held.pop(name, None)

    @invariant()
    def holds(self) -> None:
        if not hasattr(self, "stores"):
            return
        for store in self.stores:
            found = {name_of(entry): entry for entry in store.scan()[0]}
            assert set(found) <= set(self.held)
            assert self.pinned <= set(found)
            for name, entry in found.items():
                assert self.is_valid(self.held[name])
                assert entry.ids.tolist() == self.held[name].ids.tolist()
        size = self.stores[0].size_bytes
        assert size == self.stores[1].size_bytes
        assert bytes_on_disk(self.folder) <= size <= max(*self.limits, self.pinned_bytes())

    def pinned_bytes(self) -> int:
        # A pinned entry keeps its chain.
        return len(POOL) * ENTRY_BYTES if self.pinned else 0


TestDisk = Disk.TestCase
TestDisk.settings = settings(max_examples=25, stateful_step_count=25)


def test_a_value_is_worth_what_it_saves() -> None:
    from pyllamacache.store.disk_evict import bucket_of, weight_of

    assert bucket_of(256, 0, 1024) < bucket_of(256, 3, 1024)
    assert weight_of(256, 1, 1024) == 2 * weight_of(256, 0, 1024)
    values: list[Any] = [bucket_of(1, 0, 1 << n) for n in range(60)]
    assert values == sorted(values, reverse=True)
