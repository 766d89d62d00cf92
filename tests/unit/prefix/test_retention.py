from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import pytest

from pyllamacache.prefix.index import Checkpoint, PrefixIndex
from pyllamacache.prefix.retention import Eviction, Holdings, choose_victim, value
from pyllamacache.request import CheckpointKind, SlotId

if TYPE_CHECKING:
    from pyllamacache.request import Ids

TAIL, PERIODIC, ROLLING = CheckpointKind.TAIL, CheckpointKind.PERIODIC, CheckpointKind.ROLLING
TRUNK = np.arange(1, 2001, dtype=np.int32)


def branch(at: int, token: int, length: int) -> Ids:
    """Leaves the trunk at `at`."""
    ids = TRUNK[:length].copy()
    ids[at:] = 5000 + token
    return ids


class Books:
    """A tree, and slots that hold prefixes of something."""

    def __init__(self, *, needs_span: bool = True) -> None:
        self.tree = PrefixIndex()
        self.slots: dict[SlotId, Ids] = {}
        self.busy: set[SlotId] = set()
        self.needs_span = needs_span

    def add(self, ids: Ids | int, kind: CheckpointKind = TAIL, *, used: int = 0, hits: int = 0) -> Checkpoint:
        node = self.tree.add_checkpoint("", TRUNK[:ids] if isinstance(ids, int) else ids, kind, 100)
        node.is_ready, node.last_used, node.hits = True, used, hits
        return node

    def hold(self, slot_id: int, ids: Ids | int, *, busy: bool = False) -> None:
        self.slots[SlotId(slot_id)] = TRUNK[:ids] if isinstance(ids, int) else ids
        if busy:
            self.busy.add(SlotId(slot_id))

    def holdings(self) -> Holdings:
        paths = {slot_id: self.tree.path("", ids) for slot_id, ids in self.slots.items()}
        return Holdings(paths, frozenset(self.busy), self.needs_span)

    def choose(
        self, newcomer: Ids | int = 0, *, optional: bool = False, now: int = 10
    ) -> tuple[Checkpoint, Eviction] | None:
        ids = TRUNK[:newcomer] if isinstance(newcomer, int) else newcomer
        path = self.tree.path("", ids)
        gap = len(ids) - (path[-1].position if path else 0)
        taker = next((slot_id for slot_id, held in self.slots.items() if extends(held, ids)), None)
        return choose_victim(
            self.tree.checkpoints, self.holdings(), now=now, newcomer=path, taker=taker, is_optional=optional, gap=gap
        )

    def order(self, newcomer: Ids | int = 0, *, optional: bool = False) -> list[tuple[int, str]]:
        """Everything that would go, one after the other."""
        gone = []
        while (chosen := self.choose(newcomer, optional=optional)) is not None:
            gone.append((chosen[0].position, str(chosen[1])))
            self.tree.remove(chosen[0])
        return gone


def extends(one: Ids, other: Ids) -> bool:
    """One of them goes on where the other ends."""
    n_tokens = min(len(one), len(other))
    return n_tokens > 0 and bool((one[:n_tokens] == other[:n_tokens]).all())


def positions(nodes: Iterable[Checkpoint]) -> list[int]:
    return sorted(node.position for node in nodes)


# ---- the order -------------------------------------------------------------------------------------------------


def test_stranded_ones_go_first_then_the_second_class_then_the_first() -> None:
    books = Books()
    for end in (100, 700, 1000):
        books.add(end)
    books.add(300, PERIODIC)
    books.add(branch(500, 1, 600), TAIL, used=9, hits=99)
    books.hold(0, 1100, busy=True)
    assert books.order(1100) == [
        (600, "stranded"),
        (300, "thinned"),
        (1000, "outvalued"),
        (700, "outvalued"),
        (100, "outvalued"),
    ]


def test_the_longest_unused_of_the_stranded_goes_and_of_equals_the_deepest() -> None:
    books = Books()
    books.add(100, used=5)
    books.add(200, used=4)
    books.add(300, used=4)
    assert books.order() == [(300, "stranded"), (200, "stranded"), (100, "stranded")]


def test_a_slot_that_holds_more_than_the_checkpoint_keeps_it_from_being_stranded() -> None:
    books = Books()
    books.add(100)
    books.add(101)
    books.hold(0, 100)
    assert books.order()[0] == (101, "stranded")


def test_without_cells_nothing_is_stranded() -> None:
    books = Books(needs_span=False)
    books.add(100)
    assert books.order() == [(100, "outvalued")]


def test_the_second_class_is_thinned_where_the_smallest_gap_is_left() -> None:
    """Both neighbours count: the one at 260 closes 200 to 300."""
    books = Books()
    books.add(100)
    for end in (200, 260, 300, 600):
        books.add(end, PERIODIC)
    books.add(1000)
    books.hold(0, 1000)
    assert books.order(1000)[:4] == [
        (260, "thinned"),
        (200, "thinned"),
        (300, "thinned"),
        (600, "thinned"),
    ]


def test_rolling_ones_are_of_the_second_class_too() -> None:
    books = Books()
    books.add(100)
    books.add(500, ROLLING)
    books.add(520)
    books.add(900)
    books.hold(0, 900)
    assert books.order(900)[0] == (500, "thinned")


def test_the_first_class_goes_by_gap_use_and_age() -> None:
    books = Books()
    books.add(100)
    wide, used, old, plain = (
        books.add(300, used=10),
        books.add(400, used=10, hits=2),
        books.add(500, used=8),
        books.add(600, used=10),
    )
    books.add(700, used=10)
    books.hold(0, 700)
    assert wide.children == [used]
    gone = books.choose(700)
    assert gone == (old, Eviction.OUTVALUED)
    books.tree.remove(old)
    # 300 leaves 100 to 400 (300 tokens), 400 leaves 300 to 600 thrice, 600 leaves 400 to 700
    assert value(wide, 10) == value(plain, 10) == value(used, 10) / 3


def test_a_fork_counts_its_furthest_branch() -> None:
    books = Books()
    fork = books.add(200)
    books.add(300)
    books.add(branch(250, 1, 900))
    assert value(fork, 0) == 900 / 100
    assert [value(child, 0) for child in fork.children] == [100 / 100, 700 / 100]


# ---- who stays -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [TAIL, PERIODIC])
def test_one_in_use_or_in_flight_never_goes(kind: CheckpointKind) -> None:
    books = Books()
    in_use, in_flight = books.add(100, kind), books.add(200, kind)
    in_use.n_users, in_flight.is_ready = 1, False
    assert books.choose() is None
    books.hold(0, 200)
    assert books.choose() is None
    assert books.choose(200) is None
    in_use.n_users = 0
    assert books.choose() is not None


def test_the_first_and_the_last_of_what_a_slot_holds_go_after_the_others() -> None:
    books = Books()
    for end in (50, 100, 900, 901):
        books.add(end)
    books.hold(0, 950)
    assert [position for position, _ in books.order(branch(10, 1, 40))] == [900, 100, 901, 50]


def test_a_busy_slot_is_shielded_longer_than_an_idle_one() -> None:
    books = Books()
    one, other = branch(0, 1, 30), branch(0, 2, 500)
    books.add(one, used=9)
    books.add(other, used=0)
    books.hold(0, one)
    books.hold(1, other, busy=True)
    gone = books.order(branch(0, 3, 40))
    assert [position for position, _ in gone] == [30, 500]
    books = Books()
    books.add(one, used=9)
    books.add(other, used=0)
    books.hold(0, one, busy=True)
    books.hold(1, other)
    assert [position for position, _ in books.order(branch(0, 3, 40))] == [500, 30]


def test_a_slot_both_idle_and_busy_ones_hold_counts_as_busy() -> None:
    books = Books()
    books.add(100)
    books.add(branch(0, 1, 50))
    books.hold(0, 100)
    books.hold(1, 100, busy=True)
    books.hold(2, branch(0, 1, 50))
    assert [position for position, _ in books.order(branch(0, 2, 10))] == [50, 100]


def test_a_newcomer_takes_the_place_of_the_last_one_on_its_own_way() -> None:
    """What it extends is no longer the deepest; the first on its way stays for as long as there is another."""
    books = Books()
    books.add(100)
    books.add(500)
    books.hold(0, 1000, busy=True)
    assert books.order(1000) == [(500, "outvalued"), (100, "outvalued")]


def test_with_a_budget_of_one_the_newest_wins() -> None:
    for kind in (TAIL, PERIODIC, ROLLING):
        for busy in (False, True):
            books = Books()
            books.add(100, kind)
            books.hold(0, 1000, busy=busy)
            chosen = books.choose(1000)
            assert chosen is not None, (kind, busy)
            assert chosen[0].position == 100


# ---- the second class as newcomer ------------------------------------------------------------------------------


def test_an_optional_newcomer_displaces_no_first_class_one() -> None:
    books = Books()
    for end in (100, 101, 102, 1500):
        books.add(end)
    books.hold(0, 2000)
    assert books.choose(1000, optional=True) is None


def test_an_optional_newcomer_displaces_a_stranded_one() -> None:
    books = Books()
    books.add(100)
    assert books.choose(1000, optional=True) is not None


def test_an_optional_newcomer_displaces_one_that_covers_less_than_it_would() -> None:
    books = Books()
    books.add(100)
    books.add(110, PERIODIC)
    books.add(600)
    books.hold(0, 1000)
    assert books.choose(609, optional=True) is None
    chosen = books.choose(611, optional=True)
    assert chosen is not None
    assert chosen[0].position == 110


def test_an_optional_newcomer_displaces_neither_first_nor_last_of_a_slot() -> None:
    books = Books()
    books.add(10, PERIODIC)
    books.add(20)
    books.add(25, PERIODIC)
    books.hold(0, 30)
    assert books.choose(branch(0, 1, 900), optional=True) is None
    chosen = books.choose(branch(0, 1, 900))
    assert chosen is not None
    assert chosen[0].position in (10, 25)


# ---- S07 -------------------------------------------------------------------------------------------------------


def largest_gap(nodes: Sequence[int], length: int) -> int:
    ends = [0, *nodes, length]
    return max(after - before for before, after in pairwise(ends))


@pytest.mark.parametrize("budget", [4, 8, 16, 32])
@pytest.mark.parametrize("step", [7, 30, 113])
@pytest.mark.parametrize("per_turn", [1, 2])
def test_a_conversation_of_many_short_turns_stays_covered(budget: int, step: int, per_turn: int) -> None:
    """S07: 60 turns crowded all checkpoints into the last 4 % of the context, and one jump back lost everything."""
    books = Books()
    rng = np.random.default_rng(budget * step)
    conversation = rng.integers(0, 1000, size=400 + 60 * step + 10).astype(np.int32)
    taken = 0
    for turn in range(60):
        length = 400 + turn * step
        ends = [length - 4, length][-per_turn:]
        for end in ends:
            books.hold(0, conversation[:end], busy=True)
            for node in books.tree.path("", conversation[:end]):
                node.last_used = turn
            while len(books.tree.checkpoints) >= budget:
                chosen = books.choose(conversation[:end], now=turn)
                assert chosen is not None
                assert chosen[1] is Eviction.OUTVALUED
                books.tree.remove(chosen[0])
            books.add(conversation[:end], used=turn)
            taken += 1
            held = positions(books.tree.checkpoints)
            assert len(held) == min(taken, budget)
            assert held[0] == (396 if per_turn == 2 else 400)
            assert held[-1] == end
            if taken >= budget:
                assert largest_gap(held, end) <= max(400, 2 * end / budget)
