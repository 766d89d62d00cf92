"""The tree against a twin that keeps whole prefixes in a dictionary."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pyllamacache.errors import InternalError
from pyllamacache.prefix.tree import Checkpoint, CheckpointTree
from pyllamacache.request import CheckpointKind

if TYPE_CHECKING:
    from pyllamacache.request import Ids

NAMESPACES = ("", "other")
TRUNKS = ([1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 2, 3, 9, 9, 9, 9], [2, 2])
Key = tuple[str, tuple[int, ...]]


@st.composite
def prefixes(draw: st.DrawFn) -> tuple[int, ...]:
    trunk = draw(st.sampled_from(TRUNKS))
    return (*trunk[: draw(st.integers(0, len(trunk)))], *draw(st.lists(st.integers(1, 3), max_size=3)))


def as_ids(values: tuple[int, ...]) -> Ids:
    return np.array(values, dtype=np.int32)


namespaces = st.sampled_from(NAMESPACES)


class TreeMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.tree = CheckpointTree()
        self.twin: dict[Key, Checkpoint] = {}
        self.evicted: set[Key] = set()
        self.removed: list[tuple[Key, Checkpoint]] = []

    def expected_path(self, namespace: str, ids: tuple[int, ...]) -> list[Checkpoint]:
        ends = (ids[:end] for end in range(1, len(ids) + 1))
        return [self.twin[namespace, end] for end in ends if (namespace, end) in self.twin]

    @rule(namespace=namespaces, ids=prefixes(), kind=st.sampled_from(CheckpointKind), n_bytes=st.integers(0, 9))
    def add(self, namespace: str, ids: tuple[int, ...], kind: CheckpointKind, n_bytes: int) -> None:
        key = (namespace, ids)
        if key in self.twin or not ids:
            with pytest.raises(InternalError):
                self.tree.add(namespace, as_ids(ids), kind, n_bytes)
            return
        node = self.twin[key] = self.tree.add(namespace, as_ids(ids), kind, n_bytes)
        assert (node.namespace, node.position, node.kind, node.n_bytes) == (namespace, len(ids), kind, n_bytes)

    @precondition(lambda self: self.twin)
    @rule(index=st.integers(0, 99), is_evicted=st.booleans())
    def remove(self, index: int, is_evicted: bool) -> None:
        key = sorted(self.twin)[index % len(self.twin)]
        node = self.twin.pop(key)
        self.tree.remove(node, is_evicted=is_evicted)
        self.removed.append((key, node))
        if is_evicted:
            self.evicted.add(key)

    @precondition(lambda self: self.removed)
    @rule(index=st.integers(0, 99))
    def remove_again(self, index: int) -> None:
        with pytest.raises(InternalError):
            self.tree.remove(self.removed[index % len(self.removed)][1])

    @rule(namespace=st.sampled_from([*NAMESPACES, None]))
    def forget_evicted(self, namespace: str | None) -> None:
        self.tree.forget_evicted(namespace)
        self.evicted = {key for key in self.evicted if namespace not in (None, key[0])}

    @rule(namespace=namespaces, ids=prefixes())
    def path(self, namespace: str, ids: tuple[int, ...]) -> None:
        assert self.tree.path(namespace, as_ids(ids)) == self.expected_path(namespace, ids)

    @rule(namespace=namespaces, ids=prefixes(), after=st.integers(0, 12), upto=st.integers(0, 12))
    def deepest_evicted(self, namespace: str, ids: tuple[int, ...], after: int, upto: int) -> None:
        ends = [end for end in range(1, len(ids) + 1) if after < end <= upto and (namespace, ids[:end]) in self.evicted]
        assert self.tree.deepest_evicted(namespace, as_ids(ids), after, upto) == max(ends, default=0)

    @invariant()
    def every_node_is_where_the_twin_says(self) -> None:
        nodes = list(self.tree)
        assert len(nodes) == len(self.tree) == len(self.twin)
        assert {id(node) for node in nodes} == {id(node) for node in self.twin.values()}
        for (namespace, ids), node in self.twin.items():
            ancestors = self.expected_path(namespace, ids)[:-1]
            parent = ancestors[-1] if ancestors else None
            assert node.parent is parent
            assert node.start == (parent.position if parent else 0)
            assert node.gap == len(node.edge) == node.position - node.start > 0
            assert tuple(node.ids().tolist()) == ids
            assert all(child.parent is node for child in node.children)
            assert parent is None or any(child is node for child in parent.children)

    @invariant()
    def ancestors_come_first(self) -> None:
        order = {id(node): index for index, node in enumerate(self.tree)}
        assert all(node.parent is None or order[id(node.parent)] < order[id(node)] for node in self.twin.values())

    @invariant()
    def what_was_removed_still_tells_its_prefix(self) -> None:
        for (_, ids), node in self.removed[-4:]:
            assert tuple(node.ids().tolist()) == ids


TestTree = TreeMachine.TestCase
TestTree.settings = settings(stateful_step_count=40, deadline=None)
