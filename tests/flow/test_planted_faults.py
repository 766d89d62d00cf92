"""The law's checker notices damaged memory: every fault a reuse bug could leave behind must break it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pyllamacache.request import CheckpointKind
from tests.flow.checkpoints import state_at, tamper
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


# ---- checkpoints -----------------------------------------------------------------------------------------------

CHECKPOINT_CASES = [
    pytest.param(kind, exact, id=f"{kind}-{'exact' if exact else 'default'}")
    for kind, exact in [("sliding", False), *((kind, exact) for kind in ("hybrid", "recurrent") for exact in MODES)]
]


def _wrong() -> Any:
    wrong = HEADER.copy()
    wrong[100] = (wrong[100] + 1) % 256
    return wrong


def _take(pair: Pair, ids: Any) -> bytes:
    """Slot 0 goes past `ids` and leaves a checkpoint at 128, whose bytes are returned."""
    pair.warm.complete(joined(ids, [7]), max_tokens=0, slot=0, boundaries=[128])
    return state_at(pair.warm, 128)


def _resume(pair: Pair) -> None:
    reply = pair.ask(joined(HEADER, [8], MORE))
    assert (reply.usage.cached_tokens, reply.cache.source.value) == (128, "checkpoint"), "the test shows nothing"


@pytest.mark.parametrize(("kind", "exact"), CHECKPOINT_CASES)
def test_an_undamaged_checkpoint_keeps_the_law(kind: str, exact: bool, new_pair: Callable[..., Pair]) -> None:
    pair = new_pair(kind, exact=exact)
    bytes_before = _take(pair, HEADER)
    tamper(pair.warm, 128, lambda _: bytes_before)
    _resume(pair)


@pytest.mark.parametrize(("kind", "exact"), CHECKPOINT_CASES)
def test_a_checkpoint_of_one_wrong_token_breaks_the_law(kind: str, exact: bool, new_pair: Callable[..., Pair]) -> None:
    pair = new_pair(kind, exact=exact)
    bytes_of_wrong = _take(pair, _wrong())
    pair.warm.slots[0].erase()
    pair.warm.cache.clear()
    _take(pair, HEADER)
    tamper(pair.warm, 128, lambda _: bytes_of_wrong)
    with pytest.raises(LawBroken):
        _resume(pair)


@pytest.mark.parametrize(("kind", "exact"), CHECKPOINT_CASES[1:])
def test_a_checkpoint_one_chunk_behind_breaks_the_law(kind: str, exact: bool, new_pair: Callable[..., Pair]) -> None:
    pair = new_pair(kind, exact=exact)
    pair.warm.complete(joined(HEADER, [7]), max_tokens=0, slot=0, boundaries=[96, 128])
    behind = bytearray(state_at(pair.warm, 96))
    tamper(pair.warm, 128, lambda _: with_position(behind, 127))
    with pytest.raises(LawBroken):
        _resume(pair)


def test_a_window_checkpoint_one_chunk_behind_breaks_the_law(new_pair: Callable[..., Pair]) -> None:
    """Its cells say where they belong, so the state of the chunk before is made at the right positions."""
    pair = new_pair("sliding")
    behind = _take(pair, joined(HEADER[:32], HEADER[:96]))
    pair.warm.slots[0].erase()
    pair.warm.cache.clear()
    _take(pair, HEADER)
    tamper(pair.warm, 128, lambda _: behind)
    with pytest.raises(LawBroken):
        _resume(pair)


@pytest.mark.parametrize("n_missing", [1, 8])
def test_a_window_checkpoint_that_lacks_cells_breaks_the_law(n_missing: int, new_pair: Callable[..., Pair]) -> None:
    pair = new_pair("sliding")
    backend = pair.warm._state.backend
    native_bytes = backend.state_bytes

    def state_bytes(seq_id: int) -> int:
        damage(pair.warm).remove(seq_id, 110, 110 + n_missing, STATE)
        return int(native_bytes(seq_id))

    backend.state_bytes = state_bytes  # asked right before each capture
    _take(pair, HEADER)
    backend.state_bytes = native_bytes
    with pytest.raises(LawBroken):
        _resume(pair)


@pytest.mark.parametrize(
    ("kind", "exact"), [("sliding", False), ("hybrid", False), ("hybrid", True)], ids=["sliding", "hybrid", "exact"]
)
def test_a_checkpoint_over_stale_cells_breaks_the_law(kind: str, exact: bool, new_pair: Callable[..., Pair]) -> None:
    """The state is right, but the span before it is what another text left there."""
    pair = new_pair(kind, exact=exact)

    def rename() -> None:
        pair.warm._state.slots[0].tokens.slice(0, 128)[100] = HEADER[100]

    right = _take(pair, HEADER)
    pair.warm.slots[0].erase()
    pair.warm.cache.clear()
    _take(pair, _wrong())
    on_scheduler(pair.warm, rename)
    _rekey(pair, right)
    with pytest.raises(LawBroken):
        _resume(pair)


def _rekey(pair: Pair, data: bytes) -> None:
    """Put `data` under the ids of HEADER."""

    def put() -> None:
        checkpoints = pair.warm._state.checkpoints
        block = checkpoints.room_for(len(data), CheckpointKind.BOUNDARY)
        block.data[:] = bytearray(data)
        checkpoints.put("", HEADER, CheckpointKind.BOUNDARY, block)

    on_scheduler(pair.warm, put)


@pytest.mark.parametrize("kind", ["sliding", "hybrid"])
def test_a_tail_left_behind_a_restored_state_is_noticed_before_anything_is_computed(
    kind: str, new_pair: Callable[..., Pair]
) -> None:
    """The parts of a sequence must end at the same token, or the answer would be garbage: it is prefilled instead."""
    pair = new_pair(kind, n_slots=1)
    _take(pair, joined(HEADER, random_ids(4, 470)))  # further on than a window's cells are kept
    backend = pair.warm._state.backend
    resume = backend.resume

    def leaves_a_tail(donor_id: int | None, seq_id: int, n_tokens: int, state: Any) -> None:
        tools = damage(pair.warm)
        whole = tools.read_state(seq_id, flags=0)
        resume(donor_id, seq_id, n_tokens, state)
        assert tools.write_state(seq_id, whole, flags=0) == len(whole)
        assert tools.write_state(seq_id, state.tobytes()) == len(state)
        assert backend.length(seq_id) is None

    backend.resume = leaves_a_tail
    reply = pair.ask(joined(HEADER, [8], MORE))
    assert (reply.usage.cached_tokens, reply.cache.reason.value) == (0, "lost")
