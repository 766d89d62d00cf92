"""Examples and refusals; the counts themselves are held to a model in tests/property/test_cells.py."""

from __future__ import annotations

import pytest

from pyllamacache.errors import InternalError
from pyllamacache.prefix.cells import CellLedger
from pyllamacache.request import SlotId

A, B, C = SlotId(0), SlotId(1), SlotId(2)


@pytest.fixture
def shared() -> CellLedger:
    """A holds 900 cells; B shares 400 of them and has 250 of its own."""
    ledger = CellLedger()
    ledger.grow(A, 900)
    ledger.share(A, B, 400)
    ledger.grow(B, 650)
    return ledger


def test_shared_cells_count_once(shared: CellLedger) -> None:
    assert shared.used() == 1150
    assert (shared.length(A), shared.length(B), shared.length(C)) == (900, 650, 0)
    assert shared.shared_length(A, B) == shared.shared_length(B, A) == 400


def test_cutting_frees_only_what_nobody_else_holds(shared: CellLedger) -> None:
    assert shared.freed_by_trim(A, 300) == 500
    shared.trim(A, 300)
    assert shared.used() == 650
    assert shared.freed_by_trim(B, 0) == 350


def test_a_donor_that_grows_again_after_a_cut_gets_cells_of_its_own(shared: CellLedger) -> None:
    shared.trim(A, 300)
    shared.grow(A, 400)
    assert shared.used() == 750
    assert shared.shared_length(A, B) == 300


def test_two_holders_of_the_same_end_grow_apart() -> None:
    ledger = CellLedger()
    ledger.grow(A, 10)
    ledger.share(A, B, 10)
    ledger.grow(A, 15)
    ledger.grow(B, 15)
    assert ledger.used() == 20


def test_the_future_counts_what_is_shared_once_and_what_grows_for_each(shared: CellLedger) -> None:
    assert shared.used_if({A: 1000, B: 700}) == 1000 + 300
    assert shared.used_if({B: 700}) == 700
    assert shared.used_if({A: 200, B: 300, C: 50}) == 300 + 50
    assert shared.used_if({}) == 0
    assert shared.used() == 1150


def test_a_length_that_frees_enough_is_found_past_shared_cells(shared: CellLedger) -> None:
    assert shared.length_freeing(A, 10) == 890
    assert shared.length_freeing(A, 501) == 400
    assert shared.length_freeing(A, 501, [B]) == 399
    assert shared.length_freeing(C, 1) == 0


def test_conversations_that_move_between_slots_keep_short_paths() -> None:
    """Each turn one slot takes all but the last token of the other, and goes on with five of its own."""
    ledger = CellLedger()
    ledger.grow(A, 10)
    for turn in range(100):
        donor, heir = (A, B) if turn % 2 == 0 else (B, A)
        ledger.erase(heir)
        ledger.share(donor, heir, ledger.length(donor) - 1)
        ledger.grow(heir, ledger.length(heir) + 5)
    assert len(ledger._paths[A]) <= 2
    assert len(ledger._paths[B]) <= 2
    assert (ledger.length(A), ledger.length(B), ledger.used()) == (410, 406, 411)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda ledger: ledger.grow(A, 899),
        lambda ledger: ledger.trim(A, 901),
        lambda ledger: ledger.trim(A, -1),
        lambda ledger: ledger.share(A, B, 10),
        lambda ledger: ledger.share(A, C, 901),
        lambda ledger: ledger.share(C, C, 0),
    ],
)
def test_wrong_calls_are_refused_and_change_nothing(shared: CellLedger, wrong) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(InternalError):
        wrong(shared)
    assert shared.used() == 1150
    assert shared.length(C) == 0
