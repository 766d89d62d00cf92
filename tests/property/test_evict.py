"""Cuts over random sharing: enough is freed or nothing more could be, and never at a bystander's cost."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pyllamacache.prefix.cells import CellLedger
from pyllamacache.prefix.evict import Cut, Victim, plan_cuts
from pyllamacache.request import SlotId

SLOTS = [SlotId(index) for index in range(5)]


@st.composite
def ledgers(draw: st.DrawFn) -> CellLedger:
    ledger = CellLedger()
    for slot_id in SLOTS:
        donor_id = draw(st.sampled_from(SLOTS))
        if donor_id != slot_id:
            ledger.share(donor_id, slot_id, draw(st.integers(0, ledger.length(donor_id))))
        ledger.grow(slot_id, ledger.length(slot_id) + draw(st.integers(0, 20)))
    return ledger


@st.composite
def victim_lists(draw: st.DrawFn) -> list[Victim]:
    idle = draw(st.lists(st.sampled_from(SLOTS), unique=True))
    return [Victim(slot_id, draw(st.sampled_from([0, 1, 1, 9, 99])), draw(st.integers(0, 3))) for slot_id in idle]


def carried_out(ledger: CellLedger, cuts: tuple[Cut, ...]) -> CellLedger:
    after = ledger.copy()
    for cut in cuts:
        after.trim(cut.slot_id, cut.n_tokens)
    return after


@given(ledgers(), victim_lists(), st.integers(1, 80), st.sets(st.sampled_from(SLOTS), max_size=2), st.integers(0, 5))
def test_cuts_free_the_need_or_all_there_is(
    ledger: CellLedger, victims: list[Victim], needed: int, keep: set[SlotId], slack: int
) -> None:
    cuts = plan_cuts(needed, 0, victims, ledger, keep=keep, slack=slack)
    allowed = {victim.slot_id: victim for victim in victims if victim.slot_id not in keep}
    assert len({cut.slot_id for cut in cuts}) == len(cuts)
    for cut in cuts:
        assert cut.slot_id in allowed
        assert cut.n_tokens == 0 or allowed[cut.slot_id].rewind_floor <= cut.n_tokens
        assert cut.n_tokens < ledger.length(cut.slot_id)
    everything = carried_out(ledger, tuple(Cut(slot_id, 0) for slot_id in allowed))
    freed = ledger.used() - carried_out(ledger, cuts).used()
    assert freed >= min(needed, ledger.used() - everything.used())


@given(ledgers(), victim_lists(), st.integers(1, 80))
def test_memory_that_can_be_cut_anywhere_is_cut_to_the_token(
    ledger: CellLedger, victims: list[Victim], needed: int
) -> None:
    victims = [Victim(victim.slot_id, 1, victim.last_used) for victim in victims]
    freed = ledger.used() - carried_out(ledger, plan_cuts(needed, 0, victims, ledger)).used()
    assert freed <= needed


@given(ledgers(), victim_lists(), st.integers(1, 80))
def test_every_cut_is_needed_for_something_that_comes_free(
    ledger: CellLedger, victims: list[Victim], needed: int
) -> None:
    """A cut slot's tail is held by nobody else afterwards: no conversation is shortened in vain."""
    cuts = plan_cuts(needed, 0, victims, ledger)
    after = carried_out(ledger, cuts)
    for cut in cuts:
        before = ledger.copy()
        for other in cuts:
            if other != cut:
                before.trim(other.slot_id, other.n_tokens)
        assert before.used() > after.used()


@given(ledgers(), victim_lists(), st.integers(1, 80))
def test_a_more_recent_slot_is_spared_while_older_ones_suffice(
    ledger: CellLedger, victims: list[Victim], needed: int
) -> None:
    cut_slots = {cut.slot_id for cut in plan_cuts(needed, 0, victims, ledger)}
    order = sorted(victims, key=lambda victim: (victim.last_used, victim.slot_id))
    for index, victim in enumerate(order):
        older = carried_out(ledger, tuple(Cut(each.slot_id, 0) for each in order[:index]))
        if ledger.used() - older.used() >= needed:
            assert victim.slot_id not in cut_slots
