"""The law's checker notices damaged memory: every fault a reuse bug could leave behind must break it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.flow.law import LawBroken, Pair, joined, random_ids
from tests.native.faults import SPAN, STATE, damage, on_scheduler, with_position

HEADER = random_ids(1, 128)
MORE = random_ids(2, 24)
MODES = [False, True]


def _held(pair: Pair, kind: str) -> None:
    """A slot that holds HEADER, on the grid."""
    if kind in ("hybrid", "recurrent") and not pair.exact:
        pair.warm.complete(joined(HEADER, [7]), max_tokens=0, slot=0)
        return
    pair.warm.warm(HEADER, slot=0)


def _ask(pair: Pair) -> None:
    reply = pair.ask(joined(HEADER, [7], MORE))
    assert reply.usage.cached_tokens >= 96, "the damaged memory was not reused: the test shows nothing"


@pytest.mark.parametrize("exact", MODES, ids=["default", "exact"])
@pytest.mark.parametrize("kind", ["full", "sliding", "hybrid", "recurrent"])
def test_undamaged_memory_keeps_the_law(kind: str, exact: bool, new_pair: Callable[..., Pair]) -> None:
    pair = new_pair(kind, exact=exact)
    _held(pair, kind)
    _ask(pair)


@pytest.mark.parametrize("exact", MODES, ids=["default", "exact"])
@pytest.mark.parametrize(
    ("kind", "part", "start"),
    [("full", SPAN, 40), ("sliding", SPAN, 40), ("sliding", STATE, 120), ("hybrid", SPAN, 40)],
)
def test_a_missing_cell_breaks_the_law(
    kind: str, part: int, start: int, exact: bool, new_pair: Callable[..., Pair]
) -> None:
    pair = new_pair(kind, exact=exact)
    _held(pair, kind)
    on_scheduler(pair.warm, lambda: damage(pair.warm).remove(0, start, start + 1, part))
    with pytest.raises(LawBroken):
        _ask(pair)


@pytest.mark.parametrize("exact", MODES, ids=["default", "exact"])
@pytest.mark.parametrize("kind", ["hybrid", "recurrent"])
def test_a_state_one_chunk_behind_breaks_the_law(kind: str, exact: bool, new_pair: Callable[..., Pair]) -> None:
    pair = new_pair(kind, exact=exact)
    held = len(HEADER) if exact else len(HEADER) + 1

    def set_back() -> None:
        tools = damage(pair.warm)
        assert tools.write_state(0, with_position(behind, held - 1)) == len(behind)

    pair.warm.complete(HEADER[:96], max_tokens=0, slot=0)
    behind = on_scheduler(pair.warm, lambda: damage(pair.warm).read_state(0))
    pair.warm.slots[0].erase()
    _held(pair, kind)
    on_scheduler(pair.warm, set_back)
    with pytest.raises(LawBroken):
        _ask(pair)


@pytest.mark.parametrize("exact", MODES, ids=["default", "exact"])
@pytest.mark.parametrize("kind", ["full", "sliding", "hybrid", "recurrent"])
def test_one_wrong_token_in_the_middle_breaks_the_law(kind: str, exact: bool, new_pair: Callable[..., Pair]) -> None:
    """What a stale tail is: cells of other tokens at positions the books claim to know."""
    pair = new_pair(kind, exact=exact)
    wrong = HEADER.copy()
    wrong[100] = (wrong[100] + 1) % 256

    def rename() -> None:
        slot = pair.warm._state.slots[0]
        slot.tokens.slice(0, 128)[100] = HEADER[100]

    if kind in ("hybrid", "recurrent") and not exact:
        pair.warm.complete(joined(wrong, [7]), max_tokens=0, slot=0)
    else:
        pair.warm.warm(wrong, slot=0)
    on_scheduler(pair.warm, rename)
    with pytest.raises(LawBroken):
        _ask(pair)
