"""Host memory and disk: what leaves the device comes back from there, also after a restart, and the law holds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pyllamacache import CacheConfig
from tests.flow.law import Pair, joined, random_ids

NewPair = Callable[..., Pair]
NewEngine = Callable[..., Any]
KINDS = ["full", "sliding", "hybrid", "recurrent"]
MODES = pytest.mark.parametrize("exact", [False, True], ids=["default", "exact"])
EVERY_KIND = pytest.mark.parametrize("kind", KINDS)

HEADER, FIRST, SECOND = random_ids(1, 600), random_ids(2, 90), random_ids(3, 70)


def stores(kind: str, exact: bool) -> bool:
    """Window cells that are put back lie in another order of the ring: exact mode takes no states of them."""
    return not (kind == "sliding" and exact)


@MODES
@EVERY_KIND
def test_a_conversation_is_resumed_from_disk_after_a_restart(
    kind: str, exact: bool, new_pair: NewPair, tmp_path: Path
) -> None:
    cache = CacheConfig(disk_dir=tmp_path / "cache")
    before = new_pair(kind, exact=exact, cache=cache)
    first = before.ask(joined(HEADER, FIRST), max_tokens=20, boundaries=[len(HEADER)])
    reply = joined(HEADER, FIRST, first.token_ids[:-1])
    before.warm.close()
    after = new_pair(kind, exact=exact, cache=cache)
    second = after.ask(joined(reply, SECOND), max_tokens=8)
    if not stores(kind, exact):
        assert second.cache.source == "none"
        return
    assert second.cache.source == "disk"
    grid = 32 if exact else 1
    expected = (len(HEADER) + len(FIRST)) // grid * grid - grid * 2 if exact else len(reply)
    assert second.cache.resumed_tokens >= expected - (0 if kind == "full" or exact else 4)
    third = after.ask(joined(HEADER, SECOND), max_tokens=2)
    assert third.cache.resumed_tokens == len(HEADER) // grid * grid
    assert after.n_reused > 0


@MODES
@EVERY_KIND
def test_what_the_device_has_no_cells_for_comes_back_from_host_memory(
    kind: str, exact: bool, new_pair: NewPair
) -> None:
    """Three conversations of 600 tokens in 1,024 cells and one slot, in turn."""
    pair = new_pair(kind, exact=exact, n_slots=1, **({} if exact else {"kv_tokens": 1024}))
    talks = [joined(random_ids(10 + i, 600)) for i in range(3)]
    for talk in talks:
        pair.ask(talk, max_tokens=4)
    for i in (0, 1, 2, 0):
        reply = pair.ask(joined(talks[i], SECOND[: 10 * i + 5]), max_tokens=4)
        if stores(kind, exact):
            assert reply.cache.resumed_tokens >= (576 if exact else 596), reply.cache
    assert not stores(kind, exact) or pair.sources & {"host", "checkpoint"}
