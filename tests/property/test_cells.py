"""The ledger against a model that keeps every cell of every slot as an object of its own."""

from __future__ import annotations

from itertools import count

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pyllamacache.prefix.cells import CellLedger
from pyllamacache.request import SlotId

SLOTS = [SlotId(index) for index in range(5)]
slots = st.sampled_from(SLOTS)
fractions = st.floats(0, 1)


class LedgerMachine(RuleBasedStateMachine):
    @initialize()
    def start(self) -> None:
        self.ledger = CellLedger()
        self.cells: dict[SlotId, list[int]] = {slot_id: [] for slot_id in SLOTS}
        self.new_cells = count()

    def distinct(self, cells: dict[SlotId, list[int]] | None = None) -> int:
        return len(set().union(*(cells or self.cells).values()))

    @rule(slot_id=slots, n_tokens=st.integers(0, 12))
    def grow(self, slot_id: SlotId, n_tokens: int) -> None:
        self.cells[slot_id] = self.cells[slot_id] + [next(self.new_cells) for _ in range(n_tokens)]
        self.ledger.grow(slot_id, len(self.cells[slot_id]))

    @rule(slot_id=slots, fraction=fractions)
    def trim(self, slot_id: SlotId, fraction: float) -> None:
        n_tokens = round(fraction * len(self.cells[slot_id]))
        before = self.distinct()
        freed = self.ledger.freed_by_trim(slot_id, n_tokens)
        self.cells[slot_id] = self.cells[slot_id][:n_tokens]
        assert freed == before - self.distinct()
        self.ledger.trim(slot_id, n_tokens)

    @rule(slot_id=slots)
    def erase(self, slot_id: SlotId) -> None:
        self.cells[slot_id] = []
        self.ledger.erase(slot_id)

    @rule(donor_id=slots, slot_id=slots, fraction=fractions)
    def share(self, donor_id: SlotId, slot_id: SlotId, fraction: float) -> None:
        if donor_id == slot_id:
            return
        self.erase(slot_id)
        n_tokens = round(fraction * len(self.cells[donor_id]))
        self.cells[slot_id] = self.cells[donor_id][:n_tokens]
        self.ledger.share(donor_id, slot_id, n_tokens)

    @rule(first=slots, second=slots, n_turns=st.integers(1, 4), n_dropped=st.integers(0, 2))
    def hand_over(self, first: SlotId, second: SlotId, n_turns: int, n_dropped: int) -> None:
        """A conversation that moves between two slots, losing its last tokens each time."""
        for turn in range(n_turns):
            donor_id, slot_id = (first, second) if turn % 2 else (second, first)
            if donor_id != slot_id:
                n_tokens = max(0, len(self.cells[donor_id]) - n_dropped)
                self.erase(slot_id)
                self.cells[slot_id] = self.cells[donor_id][:n_tokens]
                self.ledger.share(donor_id, slot_id, n_tokens)
                self.grow(slot_id, 3)

    @rule(lengths=st.dictionaries(slots, st.integers(0, 40)))
    def foresee(self, lengths: dict[SlotId, int]) -> None:
        fresh = count(-1, -1)
        grown = {
            slot_id: self.cells[slot_id][:n_tokens] + [next(fresh) for _ in range(n_tokens - len(self.cells[slot_id]))]
            for slot_id, n_tokens in lengths.items()
        }
        assert self.ledger.used_if(lengths) == (self.distinct(grown) if grown else 0)

    @rule(slot_id=slots, n_cells=st.integers(0, 30))
    def find_length_freeing(self, slot_id: SlotId, n_cells: int) -> None:
        content = self.cells[slot_id]
        others = set().union(*(cells for each, cells in self.cells.items() if each != slot_id))
        freed = [len(set(content[length:]) - others) for length in range(len(content) + 1)]
        best = max(length for length, cells in enumerate(freed) if cells >= min(n_cells, freed[0]))
        assert self.ledger.length_freeing(slot_id, n_cells) == best

    @precondition(lambda self: any(self.cells.values()))
    @rule(slot_id=slots)
    def change_a_copy(self, slot_id: SlotId) -> None:
        twin = self.ledger.copy()
        assert twin.used() == self.ledger.used()
        twin.grow(slot_id, twin.length(slot_id) + 3)
        for each in SLOTS:
            twin.erase(each)
        assert twin.used() == 0

    @invariant()
    def counts_agree(self) -> None:
        assert self.ledger.used() == self.distinct()
        for slot_id, cells in self.cells.items():
            assert self.ledger.length(slot_id) == len(cells)
            for other_id, others in self.cells.items():
                assert self.ledger.shared_length(slot_id, other_id) == len(set(cells) & set(others))

    @invariant()
    def paths_stay_as_short_as_their_branches(self) -> None:
        """One lineage for each other slot that parts from the path somewhere, and one for the rest."""
        for slot_id in SLOTS:
            assert len(self.ledger._paths.get(slot_id, [])) <= len(SLOTS)


LedgerMachine.TestCase.settings = settings(stateful_step_count=40)
TestLedger = LedgerMachine.TestCase
