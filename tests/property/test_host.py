"""The host pool under random use, against a model that only counts, with a meter where memory is made."""

from __future__ import annotations

import functools
from itertools import pairwise
from typing import Any
from unittest import mock

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pyllamacache.store import host
from pyllamacache.store.host import Block, HostPool, region_bytes
from pyllamacache.store.region import Region, map_region

MIB = 1 << 20
sizes = st.one_of(
    st.integers(0, 5000), st.integers(50_000, 400_000), st.integers(MIB - 1, 3 * MIB), st.sampled_from([4096, MIB])
)
limits = st.one_of(st.integers(0, 20_000), st.integers(0, 12 * MIB))
picks = st.integers(0, 1000)


class Meter:
    """Counts memory where it is made and freed, also on the worker's thread."""

    def __init__(self) -> None:
        self.pool: HostPool | None = None
        self.alive = 0
        self.n_made = 0
        self.n_over = 0

    def make(self, n_bytes: int, on_freed: Any) -> Region:
        assert self.pool is not None
        self.n_made += 1
        self.alive += region_bytes(n_bytes)
        if self.alive + self.pool._reserved > self.pool.limit_bytes:
            self.n_over += 1
        return map_region(n_bytes, functools.partial(self.free, on_freed))

    def free(self, on_freed: Any, size: int) -> None:
        self.alive -= size
        on_freed(size)


class PoolMachine(RuleBasedStateMachine):
    @initialize(limit=limits)
    def start(self, limit: int) -> None:
        self.meter = Meter()
        self.patch = mock.patch.object(host, "map_region", self.meter.make)
        self.patch.start()
        self.pool = self.meter.pool = HostPool(limit)
        self.limit = limit
        self.reserved: list[int] = []
        self.out: list[tuple[Block, int, int]] = []  # a block, its length, the byte that fills it
        self.n_taken = 0

    def teardown(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.close()
        self.out.clear()
        assert self.pool.resident_bytes == sum(self.reserved)
        assert self.meter.alive == 0
        self.patch.stop()

    @property
    def used(self) -> int:
        return sum(block.size_bytes for block, _, _ in self.out) + sum(self.reserved)

    def take(self, n_bytes: int) -> bool:
        fits = self.used + region_bytes(n_bytes) <= self.limit
        block = self.pool.allocate(n_bytes)
        if block is None:
            assert not fits
            return False
        assert len(block.data) == n_bytes <= block.size_bytes <= max(region_bytes(n_bytes), 5 * n_bytes // 4)
        self.n_taken += 1
        mark = self.n_taken % 251 + 1
        block.data[:] = mark
        self.out.append((block, n_bytes, mark))
        return True

    @rule(n_bytes=sizes)
    def allocate(self, n_bytes: int) -> None:
        self.take(n_bytes)

    @precondition(lambda self: self.out)
    @rule(pick=picks)
    def release(self, pick: int) -> None:
        block, _, _ = self.out.pop(pick % len(self.out))
        block.release()
        block.release()

    @precondition(lambda self: self.out)
    @rule(pick=picks)
    def forget(self, pick: int) -> None:
        del self.out[pick % len(self.out)]

    @precondition(lambda self: self.out and self.used <= self.limit)
    @rule(pick=picks)
    def replace(self, pick: int) -> None:
        """Bytes that were given back are used again."""
        block, n_bytes, _ = self.out.pop(pick % len(self.out))
        block.release()
        self.pool.wait_ready()
        n_made = self.meter.n_made
        assert self.take(n_bytes)
        assert self.meter.n_made == n_made

    @rule(n_bytes=sizes)
    def reserve(self, n_bytes: int) -> None:
        fits = self.used + n_bytes <= self.limit
        assert self.pool.reserve(n_bytes) is fits
        if fits:
            self.reserved.append(n_bytes)

    @precondition(lambda self: self.reserved)
    @rule(pick=picks)
    def unreserve(self, pick: int) -> None:
        self.pool.unreserve(self.reserved.pop(pick % len(self.reserved)))

    @rule(n_bytes=sizes, is_waiting=st.booleans())
    def expect(self, n_bytes: int, is_waiting: bool) -> None:
        self.pool.expect(n_bytes)
        if is_waiting:
            self.pool.wait_ready()

    @rule(n_bytes=sizes)
    def take_what_was_expected(self, n_bytes: int) -> None:
        self.pool.wait_ready()
        n_before = self.meter.n_made
        self.pool.expect(n_bytes)
        self.pool.wait_ready()
        n_made = self.meter.n_made
        if n_made > n_before:
            assert self.take(n_bytes)
            assert self.meter.n_made == n_made

    @rule(limit=limits)
    def set_limit(self, limit: int) -> None:
        is_lower, self.limit = limit < self.limit, limit
        assert self.pool.set_limit(limit) == max(0, self.used - limit)
        if is_lower:
            self.pool.wait_ready()  # what was expected before may be made now, where it fits
            assert self.pool.resident_bytes <= max(self.limit, self.used)

    @invariant()
    def the_limit_holds(self) -> None:
        assert self.meter.n_over == 0
        assert self.pool.used_bytes == self.used
        assert self.pool.resident_bytes <= max(self.limit, self.used)

    @invariant()
    def blocks_out_keep_their_bytes(self) -> None:
        spans = []
        for block, n_bytes, mark in self.out:
            assert np.all(block.data == mark)
            start = block.data.__array_interface__["data"][0]
            spans.append((start, start + n_bytes))
        spans.sort()
        for (_, end), (start, _) in pairwise(spans):
            assert end <= start


PoolMachine.TestCase.settings = settings(stateful_step_count=40)
TestPool = PoolMachine.TestCase
