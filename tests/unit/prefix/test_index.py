from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
import pytest

from pyllamacache.errors import InternalError
from pyllamacache.prefix import evicted as evicted_module
from pyllamacache.prefix import index as index_module
from pyllamacache.prefix.evicted import Evicted
from pyllamacache.prefix.index import Checkpoint, PrefixIndex
from pyllamacache.prefix.match import common_prefix_len
from pyllamacache.request import CheckpointKind

if TYPE_CHECKING:
    from pyllamacache.request import Ids

TAIL = CheckpointKind.TAIL


def as_ids(values: Iterable[int]) -> Ids:
    return np.array(list(values), dtype=np.int32)


HEADER = as_ids(range(100, 120))
ONE = as_ids([*HEADER, 1, 1, 1])
TWO = as_ids([*HEADER, 2, 2])


def add(index: PrefixIndex, ids: Ids, namespace: str = "") -> Checkpoint:
    return index.add_checkpoint(namespace, ids, TAIL, 10)


def positions(nodes: Iterable[Checkpoint]) -> list[int]:
    return [node.position for node in nodes]


# ---- shape -----------------------------------------------------------------------------------------------------


def test_a_checkpoint_knows_its_prefix_and_its_distance_to_the_one_before() -> None:
    index = PrefixIndex()
    header, one = add(index, HEADER), add(index, ONE)
    assert (header.start, header.gap, header.parent) == (0, 20, None)
    assert (one.start, one.gap, one.parent) == (20, 3, header)
    assert header.children == [one]
    assert np.array_equal(one.ids(), ONE)
    assert len(index.checkpoints) == 2


def test_a_new_one_is_neither_ready_nor_used() -> None:
    node = add(PrefixIndex(), ONE, "a")
    assert (node.namespace, node.kind, node.n_bytes) == ("a", TAIL, 10)
    assert (node.is_ready, node.hits, node.last_used, node.n_users) == (False, 0, 0, 0)


def test_one_in_between_takes_over_those_that_extend_it_and_no_others() -> None:
    """A branch point is found after the two conversations that part there."""
    index = PrefixIndex()
    one, two, other = add(index, ONE), add(index, TWO), add(index, as_ids([100, 5, 5]))
    header = add(index, HEADER)
    assert header.children == [one, two]
    assert (other.parent, one.parent, two.parent) == (None, header, header)
    assert (one.gap, two.gap) == (3, 2)
    assert [node.ids().tolist() for node in (one, two)] == [ONE.tolist(), TWO.tolist()]


def test_a_second_one_of_the_same_prefix_is_an_error_of_the_caller() -> None:
    index = PrefixIndex()
    add(index, HEADER)
    with pytest.raises(InternalError, match="second checkpoint at position 20"):
        add(index, HEADER)
    with pytest.raises(InternalError, match="position 0"):
        add(index, HEADER[:0])
    assert len(index.checkpoints) == 1
    add(index, HEADER, "elsewhere")


def test_the_callers_array_is_not_the_one_that_is_kept() -> None:
    index = PrefixIndex()
    ids = ONE.copy()
    node = add(index, ids)
    ids[:] = 0
    assert np.array_equal(node.ids(), ONE)
    node.ids()[:] = 0
    assert np.array_equal(node.ids(), ONE)


# ---- looking up ------------------------------------------------------------------------------------------------


def test_the_way_to_a_prompt_is_every_checkpoint_at_a_prefix_of_it() -> None:
    index = PrefixIndex()
    for ids in (HEADER[:4], HEADER, ONE, TWO):
        add(index, ids)
    assert positions(index.path("", as_ids([*ONE, 7]))) == [4, 20, 23]
    assert positions(index.path("", ONE)) == [4, 20, 23]
    assert positions(index.path("", ONE[:-1])) == [4, 20]
    assert positions(index.path("", as_ids([*HEADER, 9]))) == [4, 20]
    assert positions(index.path("", HEADER[:3])) == []
    assert positions(index.path("", HEADER[:0])) == []


def test_a_checkpoint_that_differs_in_its_last_token_is_not_on_the_way() -> None:
    index = PrefixIndex()
    add(index, ONE)
    assert index.path("", as_ids([*ONE[:-1], 2, 3])) == []


def test_siblings_that_part_late_are_told_apart() -> None:
    index = PrefixIndex()
    one, two = add(index, ONE), add(index, TWO)
    assert index.path("", as_ids([*TWO, 8])) == [two]
    assert index.path("", as_ids([*ONE, 8])) == [one]


def test_namespaces_know_nothing_of_each_other() -> None:
    index = PrefixIndex()
    a, b = add(index, HEADER, "a"), add(index, ONE, "b")
    assert index.path("a", ONE) == [a]
    assert index.path("b", ONE) == [b]
    assert index.path("c", ONE) == []
    assert b.parent is None
    index.remove(b, is_evicted=True)
    assert index.path("a", ONE) == [a]
    assert index.evicted.deepest("a", ONE, 0, 23) == 0
    assert index.evicted.deepest("b", ONE, 0, 23) == 23


def test_a_lookup_costs_one_comparison_of_the_tokens_matched(monkeypatch: pytest.MonkeyPatch) -> None:
    """100,000 tokens under 32 checkpoints, with a short branch at each of them."""
    compared: list[int] = []

    def counted(a: Ids, b: Ids) -> int:
        compared.append(min(len(a), len(b)))
        return common_prefix_len(a, b)

    index = PrefixIndex()
    prompt = (np.arange(100_000, dtype=np.int32) * 7919) % 1009
    ends = np.linspace(3_000, 96_000, 32).astype(int)
    for end in ends[::-1]:
        add(index, prompt[:end])
        add(index, as_ids([*prompt[:end], 2000, 2000]))
    monkeypatch.setattr(index_module, "common_prefix_len", counted)
    assert positions(index.path("", prompt)) == ends.tolist()
    assert len(compared) <= len(ends) + 1
    assert ends[-1] <= sum(compared) <= ends[-1] + 2
    compared.clear()
    add(index, prompt)
    assert sum(compared) <= 2 * len(prompt)
    compared.clear()
    assert index.path("", prompt[:2_999]) == []
    assert sum(compared) <= 2_999


# ---- removing --------------------------------------------------------------------------------------------------


def test_descendants_of_a_removed_one_go_to_its_parent_with_all_their_tokens() -> None:
    index = PrefixIndex()
    start, header, one, two = (add(index, ids) for ids in (HEADER[:4], HEADER, ONE, TWO))
    index.remove(header)
    assert start.children == [one, two]
    assert (one.parent, one.gap, two.gap) == (start, 19, 18)
    assert np.array_equal(one.ids(), ONE)
    assert positions(index.path("", ONE)) == [4, 23]
    index.remove(start)
    assert (one.parent, two.parent) == (None, None)
    assert np.array_equal(two.ids(), TWO)
    assert len(index.checkpoints) == 2


def test_one_can_be_taken_again_at_the_place_of_a_removed_one() -> None:
    index = PrefixIndex()
    old = add(index, ONE)
    index.remove(old)
    new = add(index, ONE)
    assert index.path("", ONE) == [new]


def test_removing_what_is_not_there_is_an_error_of_the_caller() -> None:
    index = PrefixIndex()
    node = add(index, ONE)
    index.remove(node)
    with pytest.raises(InternalError, match="23 is not in the index"):
        index.remove(node)
    with pytest.raises(InternalError, match="not in the index"):
        PrefixIndex().remove(node)
    assert len(index.checkpoints) == 0
    assert list(index.checkpoints) == []


# ---- what was evicted ------------------------------------------------------------------------------------------


def test_the_deepest_evicted_one_is_found_within_the_limits() -> None:
    index = PrefixIndex()
    for ids in (HEADER[:4], HEADER, ONE):
        index.remove(add(index, ids), is_evicted=True)
    longer = as_ids([*ONE, 7, 8])
    assert index.evicted.deepest("", longer, 0, 25) == 23
    assert index.evicted.deepest("", longer, 0, 22) == 20
    assert index.evicted.deepest("", longer, 4, 20) == 20
    assert index.evicted.deepest("", longer, 4, 19) == 0
    assert index.evicted.deepest("", longer, 23, 25) == 0
    assert index.evicted.deepest("", as_ids([*HEADER, 9, 9, 9]), 0, 23) == 20
    assert index.evicted.deepest("", ONE[:10], 0, 23) == 4


def test_what_became_of_a_prefix_is_remembered_and_only_want_of_room_makes_it_missed() -> None:
    index = PrefixIndex()
    index.remove(add(index, HEADER), is_evicted=True, reason="outvalued", at_s=3.0)
    index.remove(add(index, ONE), reason="replaced", at_s=5.0)
    assert index.evicted.what_became_of("", as_ids(HEADER)) == Evicted(True, "outvalued", 3.0)
    assert index.evicted.what_became_of("", ONE) == Evicted(False, "replaced", 5.0)
    assert index.evicted.what_became_of("a", ONE) is index.evicted.what_became_of("", ONE[:-1]) is None
    assert index.evicted.deepest("", ONE, 0, 23) == 20
    assert index.evicted.deepest("", ONE, 0, 23, is_missed=False) == 23
    index.evicted.forget("")
    assert index.evicted.what_became_of("", ONE) is index.evicted.what_became_of("", as_ids(HEADER)) is None


def test_those_given_up_for_other_reasons_are_few_and_push_no_evicted_one_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evicted_module, "MAX_GONE", 3)
    index = PrefixIndex()
    index.remove(add(index, ONE), is_evicted=True)
    for end in range(1, 6):
        index.remove(add(index, ONE[:end]), reason="broken")
    assert [index.evicted.deepest("", ONE, end - 1, end, is_missed=False) for end in range(1, 6)] == [0, 0, 3, 4, 5]
    assert index.evicted.deepest("", ONE, 0, 23) == 23


def test_what_was_merely_removed_is_not_remembered() -> None:
    index = PrefixIndex()
    index.remove(add(index, ONE))
    assert index.evicted.deepest("", ONE, 0, 23) == 0


def test_the_whole_prefix_counts_not_only_the_edge() -> None:
    index = PrefixIndex()
    add(index, HEADER)
    one = add(index, ONE)
    index.remove(one, is_evicted=True)
    other = as_ids([5, *HEADER[1:], 1, 1, 1])
    assert index.evicted.deepest("", other, 0, 23) == 0
    assert index.evicted.deepest("", ONE, 0, 23) == 23


def test_evicted_ones_can_be_forgotten_by_namespace_or_all() -> None:
    index = PrefixIndex()
    for namespace in "abc":
        index.remove(add(index, ONE, namespace), is_evicted=True)
    index.evicted.forget("b")
    assert [index.evicted.deepest(namespace, ONE, 0, 23) for namespace in "abc"] == [23, 0, 23]
    index.evicted.forget()
    assert [index.evicted.deepest(namespace, ONE, 0, 23) for namespace in "abc"] == [0, 0, 0]


def test_only_so_many_evicted_ones_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evicted_module, "MAX_EVICTED", 3)
    index = PrefixIndex()
    for end in range(1, 6):
        index.remove(add(index, ONE[:end]), is_evicted=True)
    assert [index.evicted.deepest("", ONE, end - 1, end) for end in range(1, 6)] == [0, 0, 3, 4, 5]
