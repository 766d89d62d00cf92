"""The law's checker and the audit notice what sharing, parking and the tiers could get wrong: each planted fault shows.

Without the fault, the same steps keep the law.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyllamacache import CacheConfig
from pyllamacache.errors import InternalError
from pyllamacache.prefix.index import Match
from tests.flow.law import Ids, LawBroken, Pair, joined, random_ids
from tests.flow.tiers import KINDS, always_load, audit, forget_device, store_behind, stores
from tests.flow.tiers import WITH_CELLS as EACH_WITH_CELLS
from tests.native.faults import SPAN, damage, on_scheduler, with_position

NewPair = Callable[..., Pair]

HEADER, MORE = random_ids(1, 512), random_ids(2, 24)
CASES = [
    pytest.param(
        kind,
        exact,
        id=f"{kind}-{'exact' if exact else 'default'}",
        marks=[pytest.mark.slow] if exact or kind == "sliding" else [],
    )
    for kind in KINDS
    for exact in (False, True)
    if stores(kind, exact)
]
WITH_CELLS = [case for case in CASES if case.values[0] != "recurrent"]
WITH_STATE = [case for case in CASES if case.values[0] != "full"]


def wrong_ids() -> Ids:
    wrong = HEADER.copy()
    wrong[100] = (wrong[100] + 1) % 256
    return wrong


def shifted_ids() -> Ids:
    """Everything one position off."""
    return joined([7], HEADER[:-1])


def keep(pair: Pair, ids: Ids) -> dict[tuple[str, int], bytes]:
    """Compute `ids`, with a state at their end, and leave them in host memory alone. Returns the bytes, by position."""
    always_load(pair.warm)
    pair.warm.complete(joined(ids, [7]), max_tokens=0, slot=0, boundaries=[256, 512])
    store_behind(pair.warm, even_if_unwanted=True)
    forget_device(pair.warm)

    def read() -> dict[tuple[str, int], bytes]:
        state = pair.warm._state
        marks = [("span", mark.position, block) for mark, block in state.spans.blocks.items()]
        marks += [("state", mark.position, state.checkpoints.data(mark)) for mark in state.index.checkpoints]
        return {(kind, position): block.data.tobytes() for kind, position, block in marks}

    return dict(on_scheduler(pair.warm, read))


def forget_all(pair: Pair) -> None:
    def run() -> None:
        pair.warm._state.spans.clear()
        pair.warm._state.checkpoints.clear()

    on_scheduler(pair.warm, run)


def replace(pair: Pair, bytes_of: dict[tuple[str, int], bytes], *names: tuple[str, int]) -> None:
    def run() -> None:
        state = pair.warm._state
        blocks = {("span", mark.position): block for mark, block in state.spans.blocks.items()}
        blocks.update((("state", mark.position), state.checkpoints.data(mark)) for mark in state.index.checkpoints)
        for name in names:
            blocks[name].data[:] = np.frombuffer(bytes_of[name], np.uint8)

    on_scheduler(pair.warm, run)


def resume(pair: Pair, source: tuple[str, ...] = ("host", "checkpoint")) -> None:
    reply = pair.ask(joined(HEADER, [8], MORE))
    assert reply.usage.cached_tokens == 512, "the test shows nothing"
    assert reply.cache.source.value in source


# ---- host memory -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "exact"), CASES)
def test_what_is_put_back_undamaged_keeps_the_law(kind: str, exact: bool, new_pair: NewPair) -> None:
    pair = new_pair(kind, exact=exact)
    kept = keep(pair, HEADER)
    replace(pair, kept, *kept)
    resume(pair)


@pytest.mark.parametrize("made_of", [wrong_ids, shifted_ids], ids=["one wrong token", "one position off"])
@pytest.mark.parametrize(("kind", "exact"), WITH_CELLS)
def test_a_span_of_other_cells_breaks_the_law(
    kind: str, exact: bool, made_of: Callable[[], Ids], new_pair: NewPair
) -> None:
    pair = new_pair(kind, exact=exact)
    bytes_of_others = keep(pair, made_of())
    forget_all(pair)
    keep(pair, HEADER)
    replace(pair, bytes_of_others, ("span", 256))
    with pytest.raises(LawBroken):
        resume(pair)


@pytest.mark.parametrize(("kind", "exact"), WITH_CELLS)
def test_spans_put_back_in_the_wrong_order_are_refused_or_break_the_law(
    kind: str, exact: bool, new_pair: NewPair
) -> None:
    """The cells say where they belong: either nothing of them is reused, or the answer is wrong and noticed."""
    pair = new_pair(kind, exact=exact)
    kept = keep(pair, HEADER)
    replace(pair, {("span", 256): kept["span", 512]}, ("span", 256))
    reply = pair.ask(joined(HEADER, [8], MORE))
    assert (reply.usage.cached_tokens, reply.cache.reason.value) == (0, "lost")
    audit(pair.warm)


@pytest.mark.parametrize("made_of", [wrong_ids, shifted_ids], ids=["one wrong token", "one position off"])
@pytest.mark.parametrize(("kind", "exact"), WITH_STATE)
def test_a_state_of_another_text_over_spans_put_back_breaks_the_law(
    kind: str, exact: bool, made_of: Callable[[], Ids], new_pair: NewPair
) -> None:
    """The window of a sliding model and the state of the others, the last tokens of which are what they should be."""
    pair = new_pair(kind, exact=exact)
    ids = made_of()
    ids[480:500] = (ids[480:500] + 1) % 256
    bytes_of_others = keep(pair, ids)
    forget_all(pair)
    keep(pair, HEADER)
    replace(pair, bytes_of_others, ("state", 512))
    with pytest.raises(LawBroken):
        resume(pair)


@pytest.mark.parametrize(("kind", "exact"), [case for case in WITH_STATE if case.values[0] != "sliding"])
def test_a_state_one_span_behind_breaks_the_law(kind: str, exact: bool, new_pair: NewPair) -> None:
    pair = new_pair(kind, exact=exact)
    kept = keep(pair, HEADER)
    behind = with_position(bytearray(kept["state", 256]), 511)
    replace(pair, {("state", 512): bytes(behind)}, ("state", 512))
    with pytest.raises(LawBroken):
        resume(pair)


@pytest.mark.parametrize(("kind", "exact"), [case for case in WITH_STATE if case.values[0] == "hybrid"])
def test_a_state_that_was_not_put_back_is_noticed_before_anything_is_computed(
    kind: str, exact: bool, new_pair: NewPair
) -> None:
    """What the slot's own memory says is asked before every native call."""
    pair = new_pair(kind, exact=exact)
    keep(pair, HEADER)
    backend = pair.warm._state.backend
    on_scheduler(pair.warm, lambda: setattr(backend, "resume", lambda *_: None))
    reply = pair.ask(joined(HEADER, [8], MORE))
    assert (reply.usage.cached_tokens, reply.cache.reason.value) == (0, "lost")


# ---- disk --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_damaged", [False, True], ids=["undamaged", "damaged"])
@pytest.mark.parametrize(("kind", "exact"), CASES)
def test_what_is_read_wrong_from_disk_breaks_the_law(
    kind: str, exact: bool, is_damaged: bool, new_pair: NewPair, tmp_path: Path
) -> None:
    """A store that gives the bytes of another text, checksums and all."""
    pair = new_pair(kind, exact=exact, cache=CacheConfig(disk_dir=tmp_path / "cache"))
    bytes_of_others = keep(pair, wrong_ids())
    pair.warm.cache.clear()
    keep(pair, HEADER)
    pair.warm.close()
    pair = new_pair(kind, exact=exact, cache=CacheConfig(disk_dir=tmp_path / "cache"))
    always_load(pair.warm)
    disk = pair.warm._state.disk
    fetch = disk.fetch

    def reads_another(mark: Any, block: Any) -> Any:
        future = fetch(mark, block)
        assert future.result()
        name = ("span" if hasattr(mark, "start") and hasattr(mark, "n_children") else "state", mark.position)
        if is_damaged and name in (("span", 256), ("state", 512)):
            block.data[:] = np.frombuffer(bytes_of_others[name], np.uint8)
        return future

    on_scheduler(pair.warm, lambda: setattr(disk, "fetch", reads_another))
    if is_damaged:
        with pytest.raises(LawBroken):
            resume(pair, ("disk",))
    else:
        resume(pair, ("disk",))


# ---- sharing and parking -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_damaged", [False, True], ids=["undamaged", "damaged"])
@EACH_WITH_CELLS
def test_a_parked_donor_that_lacks_a_cell_breaks_the_law(kind: str, is_damaged: bool, new_pair: NewPair) -> None:
    pair = new_pair(kind, n_slots=1)
    pair.warm.complete(joined(HEADER, [7]), max_tokens=0, boundaries=[512])
    if is_damaged:
        on_scheduler(pair.warm, lambda: damage(pair.warm).remove(0, 40, 41, SPAN))
    pair.warm.complete(random_ids(3, 40), max_tokens=0)
    assert len(pair.warm._state.index.parked) == 1
    if is_damaged:
        with pytest.raises(LawBroken):
            resume(pair, ("shared", "checkpoint"))
    else:
        resume(pair, ("shared", "checkpoint"))


@EACH_WITH_CELLS
def test_what_a_slot_shares_stays_its_own_when_the_donor_is_erased(kind: str, new_pair: NewPair) -> None:
    """Cells that two sequences mark are taken from one of them only."""
    pair = new_pair(kind, n_slots=2)
    pair.warm.complete(joined(HEADER, [7]), max_tokens=0, slot=0, boundaries=[512])
    pair.ask(joined(HEADER, [9], MORE), slot=1)
    pair.warm.slots[0].erase()
    reply = pair.ask(joined(HEADER, [9], MORE, [1]), slot=1)
    assert reply.usage.cached_tokens > 512


@pytest.mark.parametrize("is_damaged", [False, True], ids=["undamaged", "damaged"])
@pytest.mark.parametrize("kind", ["full", "hybrid"])
def test_an_index_that_takes_one_branch_for_another_breaks_the_law(
    kind: str, is_damaged: bool, new_pair: NewPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if a prompt agreed with a whole span in which it parts from it."""
    if is_damaged:
        monkeypatch.setattr(Match, "usable_end", lambda self, span: span.position)
    pair = new_pair(kind)
    always_load(pair.warm)
    branch = joined(HEADER[:300], random_ids(4, 212))
    pair.warm.complete(joined(HEADER, [7]), max_tokens=0, boundaries=[300, 512])
    store_behind(pair.warm, even_if_unwanted=True)
    forget_device(pair.warm)
    if is_damaged and kind == "full":
        with pytest.raises(LawBroken):
            pair.ask(branch)
    else:
        pair.ask(branch)


# ---- the audit ---------------------------------------------------------------------------------------------------


def _leak_a_block(state: Any) -> None:
    state.leaked = state.room.pool.allocate(1000)


def _lose_a_lease(state: Any) -> None:
    next(iter(state.index.spans)).n_users += 1


def _lengthen_a_slot(state: Any) -> None:
    state.slots[0].tokens.append(1)


def _forget_cells(state: Any) -> None:
    state.ledger.trim(state.slots[0].slot_id, len(state.slots[0]) - 1)


def _cut_a_parked_sequence(state: Any) -> None:
    state.backend.trim_span(next(iter(state.index.parked)).seq_id, 10)


def _count_bytes_twice(state: Any) -> None:
    state.spans.used_bytes += 1


def _lose_a_span(state: Any) -> None:
    state.index.remove(next(each for each in state.index.spans if not each.n_children))


def _lower_the_limit(state: Any) -> None:
    state.room.pool._limit = 1000


PLANTED = {
    "a leaked block": _leak_a_block,
    "a lease without an owner": _lose_a_lease,
    "a slot that is longer in the books": _lengthen_a_slot,
    "cells that the ledger does not know": _forget_cells,
    "a parked sequence that is shorter": _cut_a_parked_sequence,
    "a wrong sum of bytes": _count_bytes_twice,
    "bytes of a span that is not in the index": _lose_a_span,
    "more bytes than the limit": _lower_the_limit,
}


@pytest.mark.parametrize("what", PLANTED)
@EACH_WITH_CELLS
def test_the_audit_finds(kind: str, what: str, new_pair: NewPair) -> None:
    pair = new_pair(kind, n_slots=1)
    pair.warm.complete(joined(HEADER, [7]), max_tokens=0, boundaries=[512])
    pair.warm.complete(random_ids(3, 40), max_tokens=0)

    def plant() -> None:
        state = pair.warm._state
        while state.spans.save_some(1 << 20):
            pass
        state.audit()
        PLANTED[what](state)
        with pytest.raises(InternalError):
            state.audit()

    on_scheduler(pair.warm, plant)
