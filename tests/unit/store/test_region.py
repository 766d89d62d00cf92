"""Regions: what they occupy, how they lie in memory, and when it is gone."""

from __future__ import annotations

import errno
import mmap
from typing import Any, NoReturn

import pytest

from pyllamacache.store.region import HUGE_PAGE_BYTES, map_region, region_bytes

SIZES = [0, 1, 63, 64, 5000, 65_535, 65_536, 300_000, (1 << 20) - 1, 1 << 20, 3_000_000, 16 << 20, 17_000_001]


@pytest.mark.parametrize("n_bytes", SIZES)
def test_a_region_is_counted_in_full_and_aligned(n_bytes: int) -> None:
    region = map_region(n_bytes, lambda size: None)
    address = region.data.__array_interface__["data"][0]
    assert region.size_bytes == region_bytes(n_bytes) >= len(region.data) >= n_bytes
    assert address % (HUGE_PAGE_BYTES if n_bytes >= 1 << 20 else 64) == 0
    assert region.data.flags.writeable
    region.data[:] = 7
    assert (region.data == 7).all()


def test_what_is_lost_to_whole_pages_is_little() -> None:
    state = int(149.62 * (1 << 20))
    assert 32 * region_bytes(state) <= 1.05 * 32 * state
    for n_bytes in (2000, 5000, 60_000, 100_000, 1 << 20, (1 << 20) + 1, 9_000_001):
        assert region_bytes(n_bytes) <= 1.065 * n_bytes


@pytest.mark.parametrize("n_bytes", SIZES)
def test_touching_ends_at_the_end_and_writes_zeros_only(n_bytes: int) -> None:
    region = map_region(n_bytes, lambda size: None)
    region.data[:] = 1
    n_touches = 0
    while not region.is_touched:
        region.touch(4 << 20)
        n_touches += 1
    assert n_touches == -(-len(region.data) // (4 << 20))
    assert set(region.data.tolist()[:5000]) <= {0, 1}


@pytest.mark.parametrize("n_bytes", [100, 100_000, 3_000_000])
def test_the_last_view_keeps_the_memory(n_bytes: int) -> None:
    freed: list[int] = []
    region = map_region(n_bytes, freed.append)
    region.data[:] = 5
    view = region.data[10:20]
    del region
    assert freed == []
    assert view.tolist() == [5] * 10
    del view
    assert freed == [region_bytes(n_bytes)]


def test_a_refused_mapping_is_a_memory_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any, **options: Any) -> NoReturn:
        raise OSError(errno.ENOMEM, "no memory")

    freed: list[int] = []
    monkeypatch.setattr(mmap, "mmap", refuse)
    with pytest.raises(MemoryError):
        map_region(1 << 20, freed.append)
    assert freed == []


def test_a_kernel_without_huge_pages_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    class Pages(mmap.mmap):
        def madvise(self, *arguments: int) -> NoReturn:
            raise OSError(errno.EINVAL, "no huge pages")

    monkeypatch.setattr(mmap, "mmap", Pages)
    region = map_region(3 << 20, lambda size: None)
    region.data[:] = 1
    assert len(region.data) == 3 << 20
