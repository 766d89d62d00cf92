from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
import pytest

from pyllamacache.errors import InternalError
from pyllamacache.prefix import tree as tree_module
from pyllamacache.prefix.match import common_prefix_len
from pyllamacache.prefix.tree import Checkpoint, CheckpointTree
from pyllamacache.request import CheckpointKind

if TYPE_CHECKING:
    from pyllamacache.request import Ids

TAIL = CheckpointKind.TAIL


def as_ids(values: Iterable[int]) -> Ids:
    return np.array(list(values), dtype=np.int32)


HEADER = as_ids(range(100, 120))
ONE = as_ids([*HEADER, 1, 1, 1])
TWO = as_ids([*HEADER, 2, 2])


def add(tree: CheckpointTree, ids: Ids, namespace: str = "") -> Checkpoint:
    return tree.add(namespace, ids, TAIL, 10)


def positions(nodes: Iterable[Checkpoint]) -> list[int]:
    return [node.position for node in nodes]


# ---- shape -----------------------------------------------------------------------------------------------------


def test_a_checkpoint_knows_its_prefix_and_its_distance_to_the_one_before() -> None:
    tree = CheckpointTree()
    header, one = add(tree, HEADER), add(tree, ONE)
    assert (header.start, header.gap, header.parent) == (0, 20, None)
    assert (one.start, one.gap, one.parent) == (20, 3, header)
    assert header.children == [one]
    assert one.edge.tolist() == [1, 1, 1]
    assert np.array_equal(one.ids(), ONE)
    assert len(tree) == 2


def test_a_new_one_is_neither_ready_nor_used() -> None:
    node = add(CheckpointTree(), ONE, "a")
    assert (node.namespace, node.kind, node.n_bytes) == ("a", TAIL, 10)
    assert (node.is_ready, node.hits, node.last_used, node.n_users) == (False, 0, 0, 0)


def test_one_in_between_takes_over_those_that_extend_it_and_no_others() -> None:
    """A branch point is found after the two conversations that part there."""
    tree = CheckpointTree()
    one, two, other = add(tree, ONE), add(tree, TWO), add(tree, as_ids([100, 5, 5]))
    header = add(tree, HEADER)
    assert header.children == [one, two]
    assert (other.parent, one.parent, two.parent) == (None, header, header)
    assert (one.gap, two.gap) == (3, 2)
    assert [node.ids().tolist() for node in (one, two)] == [ONE.tolist(), TWO.tolist()]


def test_a_second_one_of_the_same_prefix_is_an_error_of_the_caller() -> None:
    tree = CheckpointTree()
    add(tree, HEADER)
    with pytest.raises(InternalError, match="second checkpoint at position 20"):
        add(tree, HEADER)
    with pytest.raises(InternalError, match="position 0"):
        add(tree, HEADER[:0])
    assert len(tree) == 1
    add(tree, HEADER, "elsewhere")


def test_ancestors_come_before_descendants() -> None:
    tree = CheckpointTree()
    for ids in (ONE, TWO, HEADER, HEADER[:4], ONE[:21]):
        add(tree, ids)
    seen: list[Checkpoint] = []
    for node in tree:
        assert node.parent is None or node.parent in seen
        seen.append(node)
    assert len(seen) == len(tree) == 5


def test_the_callers_array_is_not_the_one_that_is_kept() -> None:
    tree = CheckpointTree()
    ids = ONE.copy()
    node = add(tree, ids)
    ids[:] = 0
    assert np.array_equal(node.ids(), ONE)
    node.ids()[:] = 0
    assert np.array_equal(node.ids(), ONE)


def test_an_edge_holds_no_view_of_a_longer_array() -> None:
    """A header of 100 tokens would keep every prompt alive that it was cut from."""
    tree = CheckpointTree()
    long, short = add(tree, ONE), add(tree, HEADER)
    assert long.edge.base is None
    assert short.edge.base is None


# ---- looking up ------------------------------------------------------------------------------------------------


def test_the_way_to_a_prompt_is_every_checkpoint_at_a_prefix_of_it() -> None:
    tree = CheckpointTree()
    for ids in (HEADER[:4], HEADER, ONE, TWO):
        add(tree, ids)
    assert positions(tree.path("", as_ids([*ONE, 7]))) == [4, 20, 23]
    assert positions(tree.path("", ONE)) == [4, 20, 23]
    assert positions(tree.path("", ONE[:-1])) == [4, 20]
    assert positions(tree.path("", as_ids([*HEADER, 9]))) == [4, 20]
    assert positions(tree.path("", HEADER[:3])) == []
    assert positions(tree.path("", HEADER[:0])) == []


def test_a_checkpoint_that_differs_in_its_last_token_is_not_on_the_way() -> None:
    tree = CheckpointTree()
    add(tree, ONE)
    assert tree.path("", as_ids([*ONE[:-1], 2, 3])) == []


def test_siblings_that_part_late_are_told_apart() -> None:
    tree = CheckpointTree()
    one, two = add(tree, ONE), add(tree, TWO)
    assert tree.path("", as_ids([*TWO, 8])) == [two]
    assert tree.path("", as_ids([*ONE, 8])) == [one]


def test_namespaces_know_nothing_of_each_other() -> None:
    tree = CheckpointTree()
    a, b = add(tree, HEADER, "a"), add(tree, ONE, "b")
    assert tree.path("a", ONE) == [a]
    assert tree.path("b", ONE) == [b]
    assert tree.path("c", ONE) == []
    assert b.parent is None
    tree.remove(b, is_evicted=True)
    assert tree.path("a", ONE) == [a]
    assert tree.deepest_evicted("a", ONE, 0, 23) == 0
    assert tree.deepest_evicted("b", ONE, 0, 23) == 23


def test_a_lookup_costs_one_comparison_of_the_tokens_matched(monkeypatch: pytest.MonkeyPatch) -> None:
    """100,000 tokens under 32 checkpoints, with a short branch at each of them."""
    compared: list[int] = []

    def counted(a: Ids, b: Ids) -> int:
        compared.append(min(len(a), len(b)))
        return common_prefix_len(a, b)

    tree = CheckpointTree()
    prompt = (np.arange(100_000, dtype=np.int32) * 7919) % 1009
    ends = np.linspace(3_000, 96_000, 32).astype(int)
    for end in ends[::-1]:
        add(tree, prompt[:end])
        add(tree, as_ids([*prompt[:end], 2000, 2000]))
    monkeypatch.setattr(tree_module, "common_prefix_len", counted)
    assert positions(tree.path("", prompt)) == ends.tolist()
    assert len(compared) <= len(ends)
    assert sum(compared) == ends[-1]
    compared.clear()
    add(tree, prompt)
    assert sum(compared) <= len(prompt)
    compared.clear()
    assert tree.path("", prompt[:2_999]) == []
    assert compared == []


# ---- removing --------------------------------------------------------------------------------------------------


def test_descendants_of_a_removed_one_go_to_its_parent_with_all_their_tokens() -> None:
    tree = CheckpointTree()
    start, header, one, two = (add(tree, ids) for ids in (HEADER[:4], HEADER, ONE, TWO))
    tree.remove(header)
    assert start.children == [one, two]
    assert (one.parent, one.gap, two.gap) == (start, 19, 18)
    assert np.array_equal(one.ids(), ONE)
    assert positions(tree.path("", ONE)) == [4, 23]
    tree.remove(start)
    assert (one.parent, two.parent) == (None, None)
    assert np.array_equal(two.ids(), TWO)
    assert len(tree) == 2


def test_a_removed_one_still_tells_its_prefix_whatever_happens_to_the_others() -> None:
    """It may be in use when it is given up."""
    tree = CheckpointTree()
    header, one = add(tree, HEADER), add(tree, ONE)
    tree.remove(one)
    add(tree, HEADER[:4])
    tree.remove(header)
    assert np.array_equal(one.ids(), ONE)


def test_one_can_be_taken_again_at_the_place_of_a_removed_one() -> None:
    tree = CheckpointTree()
    old = add(tree, ONE)
    tree.remove(old)
    new = add(tree, ONE)
    assert tree.path("", ONE) == [new]


def test_removing_what_is_not_there_is_an_error_of_the_caller() -> None:
    tree = CheckpointTree()
    node = add(tree, ONE)
    tree.remove(node)
    with pytest.raises(InternalError, match="23 is not in the tree"):
        tree.remove(node)
    with pytest.raises(InternalError, match="not in the tree"):
        CheckpointTree().remove(node)
    assert len(tree) == 0
    assert list(tree) == []


# ---- what was evicted ------------------------------------------------------------------------------------------


def test_the_deepest_evicted_one_is_found_within_the_limits() -> None:
    tree = CheckpointTree()
    for ids in (HEADER[:4], HEADER, ONE):
        tree.remove(add(tree, ids), is_evicted=True)
    longer = as_ids([*ONE, 7, 8])
    assert tree.deepest_evicted("", longer, 0, 25) == 23
    assert tree.deepest_evicted("", longer, 0, 22) == 20
    assert tree.deepest_evicted("", longer, 4, 20) == 20
    assert tree.deepest_evicted("", longer, 4, 19) == 0
    assert tree.deepest_evicted("", longer, 23, 25) == 0
    assert tree.deepest_evicted("", as_ids([*HEADER, 9, 9, 9]), 0, 23) == 20
    assert tree.deepest_evicted("", ONE[:10], 0, 23) == 4


def test_what_was_merely_removed_is_not_remembered() -> None:
    tree = CheckpointTree()
    tree.remove(add(tree, ONE))
    assert tree.deepest_evicted("", ONE, 0, 23) == 0


def test_the_whole_prefix_counts_not_only_the_edge() -> None:
    tree = CheckpointTree()
    add(tree, HEADER)
    one = add(tree, ONE)
    tree.remove(one, is_evicted=True)
    other = as_ids([5, *HEADER[1:], 1, 1, 1])
    assert tree.deepest_evicted("", other, 0, 23) == 0
    assert tree.deepest_evicted("", ONE, 0, 23) == 23


def test_evicted_ones_can_be_forgotten_by_namespace_or_all() -> None:
    tree = CheckpointTree()
    for namespace in "abc":
        tree.remove(add(tree, ONE, namespace), is_evicted=True)
    tree.forget_evicted("b")
    assert [tree.deepest_evicted(namespace, ONE, 0, 23) for namespace in "abc"] == [23, 0, 23]
    tree.forget_evicted()
    assert [tree.deepest_evicted(namespace, ONE, 0, 23) for namespace in "abc"] == [0, 0, 0]


def test_only_so_many_evicted_ones_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree_module, "MAX_EVICTED", 3)
    tree = CheckpointTree()
    for end in range(1, 6):
        tree.remove(add(tree, ONE[:end]), is_evicted=True)
    assert [tree.deepest_evicted("", ONE, end - 1, end) for end in range(1, 6)] == [0, 0, 3, 4, 5]
