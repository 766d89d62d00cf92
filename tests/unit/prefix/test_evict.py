from __future__ import annotations

import pytest

from pyllamacache.prefix.cells import CellLedger
from pyllamacache.prefix.evict import Cut, Victim, plan_cuts
from pyllamacache.request import SlotId

A, B, C = SlotId(0), SlotId(1), SlotId(2)
OLD, MIDDLE, NEW = 1, 2, 3


def ledger_of(*lengths: int) -> CellLedger:
    ledger = CellLedger()
    for index, n_tokens in enumerate(lengths):
        ledger.grow(SlotId(index), n_tokens)
    return ledger


def test_nothing_is_cut_while_enough_is_free() -> None:
    assert plan_cuts(10, 10, [Victim(A, 1, OLD)], ledger_of(100)) == ()


def test_the_least_recently_used_is_cut_from_its_tail_just_as_far_as_needed() -> None:
    victims = [Victim(A, 1, NEW), Victim(B, 1, OLD)]
    assert plan_cuts(40, 10, victims, ledger_of(100, 100)) == (Cut(B, 70),)


def test_the_next_one_is_cut_only_for_what_the_first_does_not_have() -> None:
    victims = [Victim(A, 1, NEW), Victim(B, 1, OLD)]
    assert plan_cuts(120, 0, victims, ledger_of(100, 100)) == (Cut(B, 0), Cut(A, 80))


def test_slack_is_taken_where_a_victim_has_it_but_costs_no_second_victim() -> None:
    victims = [Victim(A, 1, NEW), Victim(B, 1, OLD)]
    assert plan_cuts(40, 0, victims, ledger_of(100, 100), slack=20) == (Cut(B, 40),)
    assert plan_cuts(95, 0, victims, ledger_of(100, 100), slack=20) == (Cut(B, 0),)


def test_memory_that_cannot_be_cut_there_is_erased_whole() -> None:
    assert plan_cuts(1, 0, [Victim(A, 100, OLD)], ledger_of(100)) == (Cut(A, 0),)
    assert plan_cuts(10, 0, [Victim(A, 90, OLD)], ledger_of(100)) == (Cut(A, 90),)
    assert plan_cuts(11, 0, [Victim(A, 90, OLD)], ledger_of(100)) == (Cut(A, 0),)


def test_slots_to_keep_are_not_cut() -> None:
    victims = [Victim(A, 1, OLD), Victim(B, 1, NEW)]
    assert plan_cuts(150, 0, victims, ledger_of(100, 100), keep={A}) == (Cut(B, 0),)


@pytest.fixture
def shared() -> CellLedger:
    """A and B share 100 cells and have 20 each of their own; C has 50."""
    ledger = ledger_of(120)
    ledger.share(A, B, 100)
    ledger.grow(B, 120)
    ledger.grow(C, 50)
    return ledger


def test_a_tail_that_a_running_slot_holds_too_is_not_cut(shared: CellLedger) -> None:
    assert plan_cuts(200, 0, [Victim(A, 1, OLD)], shared) == (Cut(A, 100),)
    shared.trim(A, 100)
    assert plan_cuts(200, 0, [Victim(A, 1, OLD)], shared) == ()


def test_a_shared_prefix_is_as_recent_as_its_most_recent_holder(shared: CellLedger) -> None:
    victims = [Victim(A, 1, OLD), Victim(B, 1, NEW), Victim(C, 1, MIDDLE)]
    assert plan_cuts(60, 0, victims, shared) == (Cut(A, 100), Cut(C, 10))


def test_idle_holders_of_a_prefix_are_cut_together(shared: CellLedger) -> None:
    victims = [Victim(A, 1, OLD), Victim(B, 1, MIDDLE), Victim(C, 1, NEW)]
    assert set(plan_cuts(60, 0, victims, shared)) == {Cut(A, 80), Cut(B, 80)}


def test_planning_changes_nothing(shared: CellLedger) -> None:
    plan_cuts(60, 0, [Victim(A, 1, OLD)], shared)
    assert shared.used() == 190
