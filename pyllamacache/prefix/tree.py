"""Which checkpoints exist, at which prefixes: a tree in which a node's prefix extends that of its parent.

One tree for all slots of an engine. Its nodes are the checkpoints; an edge holds the ids between a checkpoint and its
nearest ancestor, so a prefix that many share is stored once:

    root --[2000 ids]-- branch @2000 --[56 ids]-- tail @2056
                                     `-[96 ids]-- tail @2096 --[40 ids]-- end @2136
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING

import numpy as np

from ..errors import InternalError
from .match import common_prefix_len

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ..request import CheckpointKind, Ids

MAX_EVICTED = 4096
"""Evicted checkpoints that are remembered, to say that a request missed one."""


@dataclass(slots=True, eq=False)
class Checkpoint:
    """A state at exactly `position`. Its bytes are the store's business, which knows it by identity."""

    namespace: str
    position: int
    kind: CheckpointKind
    n_bytes: int
    parent: Checkpoint | None = None
    """The nearest checkpoint on the way to position 0; None: the root."""
    edge: Ids = field(default_factory=lambda: np.empty(0, dtype=np.int32), repr=False)
    """Ids between the parent's position and this one's."""
    children: list[Checkpoint] = field(default_factory=list, repr=False)
    is_ready: bool = False
    """Its bytes are whole."""
    hits: int = 0
    """Requests that resumed from it."""
    last_used: int = 0
    """Number of the latest request whose prompt went past it."""
    n_users: int = 0
    """Restores and the like going on: it must stay."""

    @property
    def is_second_class(self) -> bool:
        """Gives way to any other kind. One that was of use has proved itself."""
        return self.kind.is_optional and not self.hits

    @property
    def start(self) -> int:
        """The position before its edge."""
        return 0 if self.parent is None else self.parent.position

    @property
    def gap(self) -> int:
        """Tokens to prefill again if only its nearest ancestor were there."""
        return self.position - self.start

    def ids(self) -> Ids:
        """Its whole prefix; a copy, shape (position,)."""
        edges = []
        node: Checkpoint | None = self
        while node is not None:
            edges.append(node.edge)
            node = node.parent
        return np.concatenate(edges[::-1])


class CheckpointTree:
    """All checkpoints, by namespace and prefix. Wrong calls raise InternalError. Thread: scheduler."""

    def __init__(self) -> None:
        self._top: dict[str, list[Checkpoint]] = {}
        self._evicted: OrderedDict[tuple[str, int, bytes], None] = OrderedDict()
        self._n = 0

    def __len__(self) -> int:
        return self._n

    def __iter__(self) -> Iterator[Checkpoint]:
        """Ancestors before descendants."""
        left = [node for top in self._top.values() for node in reversed(top)]
        while left:
            node = left.pop()
            yield node
            left += reversed(node.children)

    def _children(self, namespace: str, node: Checkpoint | None) -> list[Checkpoint]:
        return self._top.setdefault(namespace, []) if node is None else node.children

    def path(self, namespace: str, ids: Ids) -> list[Checkpoint]:
        """Every checkpoint at a prefix of `ids`, the shallowest first. Cost: one comparison over the tokens matched."""
        found: list[Checkpoint] = []
        children = self._top.get(namespace, [])
        start = 0
        while True:
            for node in children:
                end = node.position
                if end <= len(ids) and node.edge[0] == ids[start]:
                    piece = ids[start:end]
                    if common_prefix_len(node.edge, piece) == len(piece):
                        break
            else:
                return found
            found.append(node)
            children, start = node.children, end

    def add(self, namespace: str, ids: Ids, kind: CheckpointKind, n_bytes: int) -> Checkpoint:
        """A new checkpoint at the end of `ids`, of which a part is copied. Raises InternalError if there is one."""
        path = self.path(namespace, ids)
        parent = path[-1] if path else None
        node = Checkpoint(namespace, len(ids), kind, n_bytes, parent)
        if not node.gap:
            raise InternalError(f"a second checkpoint at position {node.position}")
        node.edge = ids[node.start :].copy()
        siblings = self._children(namespace, parent)
        for other in [each for each in siblings if each.position > node.position]:
            if common_prefix_len(other.edge, node.edge) == len(node.edge):
                siblings.remove(other)
                other.edge = other.edge[len(node.edge) :].copy()
                other.parent = node
                node.children.append(other)
        siblings.append(node)
        self._n += 1
        return node

    def remove(self, node: Checkpoint, *, is_evicted: bool = False) -> None:
        """Take it out; its descendants stay, as children of its parent. Evicted ones are remembered for a while."""
        siblings = self._children(node.namespace, node.parent)
        if node not in siblings:
            raise InternalError(f"the checkpoint at {node.position} is not in the tree")
        if is_evicted:
            self._remember(node)
        siblings.remove(node)
        for child in node.children:
            child.edge = np.concatenate([node.edge, child.edge])
            child.parent = node.parent
        siblings += node.children
        node.children = []
        self._n -= 1
        if not siblings and node.parent is None:
            del self._top[node.namespace]

    # ---- what is no longer there ----

    def _remember(self, node: Checkpoint) -> None:
        digest = blake2b(node.ids().tobytes(), digest_size=16).digest()
        self._evicted[node.namespace, node.position, digest] = None
        if len(self._evicted) > MAX_EVICTED:
            self._evicted.popitem(last=False)

    def deepest_evicted(self, namespace: str, ids: Ids, after: int, upto: int) -> int:
        """The deepest position in (after, upto] at which `ids` once had a checkpoint that was evicted; 0: none."""
        positions = sorted(
            {position for space, position, _ in self._evicted if space == namespace and after < position <= upto}
        )
        found, start, running = 0, 0, blake2b(digest_size=16)
        for position in positions:
            running.update(ids[start:position].tobytes())
            start = position
            if (namespace, position, running.digest()) in self._evicted:
                found = position
        return found

    def forget_evicted(self, namespace: str | None = None) -> None:
        """Forget what was evicted, of one namespace or (None) of all."""
        for key in [key for key in self._evicted if namespace in (None, key[0])]:
            del self._evicted[key]
