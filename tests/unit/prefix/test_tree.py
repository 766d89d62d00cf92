"""The tree that people look at: what is held, at its place, with whoever holds it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from pyllamacache.prefix.tree import Held, Place, TreeCheckpoint, TreeNode, grow
from pyllamacache.request import CheckpointKind, SlotId


def held(ids: Sequence[int], place: Place = "slot", namespace: str = "", **options: Any) -> Held:
    if place == "slot":
        options.setdefault("slot_id", SlotId(0))
    return Held(namespace, place, [np.array(ids, dtype=np.int32)], len(ids), **options)


def checkpoint(position: int, *, is_on_disk: bool = False) -> TreeCheckpoint:
    return TreeCheckpoint(
        position,
        CheckpointKind.TAIL,
        10,
        hits=int(is_on_disk),
        in_memory=not is_on_disk,
        on_disk=is_on_disk,
        is_pinned=False,
    )


def only(holdings: Sequence[Held], **options: Any) -> TreeNode:
    ((namespace, (node,)),) = grow(holdings, **options)
    assert namespace == ""
    return node


def shape(node: TreeNode) -> Any:
    return (node.start, node.end, [shape(child) for child in node.children])


TRUNK = list(range(100, 120))


def test_nothing_is_no_tree() -> None:
    assert grow([]) == ()
    assert grow([held([])]) == ()


def test_contents_part_where_their_ids_do() -> None:
    node = only([held([*TRUNK, 1, 2, 3]), held([*TRUNK, 4, 5], slot_id=SlotId(1)), held([*TRUNK, 1, 9], "host")])
    assert shape(node) == (0, 20, [(20, 21, [(21, 23, []), (21, 22, [])]), (20, 22, [])])
    assert node.slots == (0, 1)
    first, second = node.children
    assert (first.slots, second.slots) == ((0,), (1,))
    assert [child.slots for child in first.children] == [(0,), ()]
    assert [child.host_tokens for child in first.children] == [0, 1]
    assert node.host_tokens == 20


def test_a_slot_that_ends_inside_of_another_ends_a_node() -> None:
    node = only([held(TRUNK), held(TRUNK[:8], slot_id=SlotId(3)), held(TRUNK[:5], "parked")])
    assert shape(node) == (0, 5, [(5, 8, [(8, 20, [])])])
    assert [(each.slots, each.n_parked) for _, each in node.walk()] == [((0, 3), 1), ((0, 3), 0), ((0,), 0)]


def test_what_is_stored_of_a_content_ends_no_node() -> None:
    spans = ((8, 80), (12, 40))
    node = only([held(TRUNK), held(TRUNK[:12], "host", spans=spans), held(TRUNK[:8], "disk", spans=((8, 80),))])
    assert shape(node) == (0, 20, [])
    assert (node.host_tokens, node.host_bytes, node.disk_tokens, node.disk_bytes) == (12, 120, 8, 80)


def test_bytes_of_spans_count_where_they_end() -> None:
    chain = held([*TRUNK, 1, 2, 3, 4], "host", spans=((10, 100), (20, 100), (24, 7)))
    branch = held([*TRUNK, 9, 9], "host", spans=((22, 5),))
    node = only([chain, branch])
    assert node.host_bytes == 200
    assert [child.host_bytes for child in node.children] == [7, 5]


def test_checkpoints_lie_where_they_are_and_end_no_node() -> None:
    states = [held(TRUNK[:n], "host", checkpoint=checkpoint(n)) for n in (12, 5)]
    on_disk = held(TRUNK[:5], "disk", checkpoint=checkpoint(5, is_on_disk=True))
    node = only([held(TRUNK), *states, on_disk])
    assert shape(node) == (0, 20, [])
    assert [(each.position, each.in_memory, each.on_disk, each.hits) for each in node.checkpoints] == [
        (5, True, True, 1),
        (12, True, False, 0),
    ]
    assert node.host_tokens == node.disk_tokens == 0


def test_a_stranded_checkpoint_is_a_branch_that_nobody_holds() -> None:
    node = only([held(TRUNK), held([*TRUNK[:10], 7, 7], "host", checkpoint=checkpoint(12))])
    stranded = node.children[1]
    assert (stranded.start, stranded.end, stranded.slots, stranded.n_parked) == (10, 12, (), 0)
    assert [each.position for each in stranded.checkpoints] == [12]


def test_a_checkpoint_at_the_end_of_a_node_is_in_it() -> None:
    node = only([held([*TRUNK, 1]), held([*TRUNK, 2]), held(TRUNK, "host", checkpoint=checkpoint(20))])
    assert [each.position for each in node.checkpoints] == [20]
    assert not any(child.checkpoints for child in node.children)


def test_namespaces_share_nothing() -> None:
    trees = dict(grow([held(TRUNK), held(TRUNK, namespace="b"), held([1, 2], namespace="b")]))
    assert list(trees) == ["", "b"]
    assert [node.n_tokens for node in trees["b"]] == [20, 2]


def test_pinned_is_what_a_pinned_prefix_goes_through() -> None:
    node = only([held(TRUNK), held(TRUNK[:8], "parked", is_pinned=True)])
    assert [each.is_pinned for _, each in node.walk()] == [True, False]


def test_text_is_there_when_it_was_asked_for() -> None:
    contents = [held([*TRUNK, 1]), held([*TRUNK, 2])]
    assert all(each.text is None for _, each in only(contents).walk())
    node = only(contents, text_of=lambda ids: str(ids.tolist()[:1]))
    assert [each.text for _, each in node.walk()] == ["[100]", "[1]", "[2]"]
    assert "[100]" not in repr(node)


def test_a_tree_may_be_deeper_than_python_recurses() -> None:
    ids = list(range(3000))
    node = only([held(ids[: n + 1]) for n in range(0, 3000, 2)])
    assert sum(1 for _ in node.walk()) == 1500


@pytest.mark.parametrize("seed", range(20))
def test_every_content_is_a_way_through_the_tree(seed: int) -> None:
    """Against a comparison of all contents with all others, token by token."""
    rng = np.random.default_rng(seed)
    contents = [held(rng.integers(0, 2, rng.integers(1, 12)).tolist(), slot_id=SlotId(n)) for n in range(12)]
    ((_, roots),) = grow(contents)
    paths: dict[int, list[TreeNode]] = {}
    for root in roots:
        for _, node in root.walk():
            for slot_id in node.slots:
                paths.setdefault(slot_id, []).append(node)
    for each in contents:
        assert each.slot_id is not None
        way = paths[each.slot_id]
        assert [node.start for node in way] == [0, *(node.end for node in way[:-1])]
        assert way[-1].end == each.n_tokens
        ids = each.ids().tolist()
        for node in way:
            sharers = {other.slot_id for other in contents if other.ids().tolist()[: node.end] == ids[: node.end]}
            assert set(node.slots) == sharers
