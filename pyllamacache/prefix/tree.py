"""What is held, in all tiers and slots at once, as a tree of the prefixes it shares: for people to look at.

The index knows no slots, and the disk has an index of its own; this puts their contents together anew from copies, on
the thread of whoever asks. A node ends where contents part, or where that of a slot or a parked prefix ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

import numpy as np

from .match import common_prefix_len

if TYPE_CHECKING:
    from ..request import CheckpointKind, Ids, SlotId

Place = Literal["slot", "parked", "host", "disk"]


@dataclass(frozen=True, slots=True)
class TreeCheckpoint:
    """A state that is stored at `position`, in host memory, on disk or both."""

    position: int
    kind: CheckpointKind
    n_bytes: int
    hits: int
    in_memory: bool
    on_disk: bool
    is_pinned: bool

    def merged(self, other: TreeCheckpoint) -> TreeCheckpoint:
        """The same state, stored twice: what host memory says of it, and where it is."""
        first = self if self.in_memory else other
        return replace(
            first,
            hits=max(self.hits, other.hits),
            in_memory=self.in_memory or other.in_memory,
            on_disk=self.on_disk or other.on_disk,
            is_pinned=self.is_pinned or other.is_pinned,
        )


@dataclass(frozen=True, slots=True)
class Held:
    """Something that is held of a prefix, as it was when somebody looked."""

    namespace: str
    place: Place
    edges: Sequence[Ids]
    """Put together and cut to `n_tokens`: the ids of the prefix."""
    n_tokens: int
    slot_id: SlotId | None = None
    spans: tuple[tuple[int, int], ...] = ()
    """Where each stored span ends, and its bytes: those of the chain that no `Held` before this one has."""
    checkpoint: TreeCheckpoint | None = None
    is_pinned: bool = False

    def ids(self) -> Ids:
        whole = self.edges[0] if len(self.edges) == 1 else np.concatenate(self.edges)
        return whole[: self.n_tokens]


@dataclass(frozen=True, slots=True)
class TreeNode:
    """Tokens [start, end) that everything below has in common."""

    start: int
    end: int
    slots: tuple[SlotId, ...]
    """Whose KV cells go through all of it."""
    n_parked: int
    """Parked prefixes that do."""
    host_tokens: int
    """So many of its tokens, from its start, have their KV cells in host memory too."""
    host_bytes: int
    """Of the spans that end in it; bytes of checkpoints are theirs."""
    disk_tokens: int
    disk_bytes: int
    checkpoints: tuple[TreeCheckpoint, ...]
    """In it, at its end included, by position."""
    is_pinned: bool
    """Something that is pinned goes through all of it."""
    children: tuple[TreeNode, ...]
    text: str | None = field(default=None, repr=False)
    """How it begins, where it was asked for."""

    @property
    def n_tokens(self) -> int:
        return self.end - self.start

    def walk(self) -> Iterator[tuple[int, TreeNode]]:
        """It and all below with their depths, each before its children."""
        todo = [(0, self)]
        while todo:
            depth, node = todo.pop()
            yield depth, node
            todo.extend((depth + 1, child) for child in reversed(node.children))


@dataclass(slots=True, eq=False)
class _Branch:
    start: int
    edge: Ids
    children: dict[int, _Branch] = field(default_factory=dict)
    slots: list[SlotId] = field(default_factory=list)
    n_parked: int = 0
    is_pinned: bool = False
    ends: dict[Place, int] = field(default_factory=dict)
    n_bytes: dict[Place, int] = field(default_factory=dict)
    checkpoints: dict[int, TreeCheckpoint] = field(default_factory=dict)

    @property
    def end(self) -> int:
        return self.start + len(self.edge)

    def split(self, n_tokens: int) -> None:
        """Have it end after `n_tokens`; the rest becomes its only child. Nothing is noted in it yet."""
        rest = _Branch(self.start + n_tokens, self.edge[n_tokens:], self.children)
        self.edge, self.children = self.edge[:n_tokens], {int(rest.edge[0]): rest}

    def note(self, held: Held, n_tokens: int) -> None:
        """It is on the way of a content of `n_tokens`."""
        end = min(self.end, n_tokens)
        if end == self.end:
            self.n_parked += held.place == "parked"
            self.is_pinned |= held.is_pinned and held.checkpoint is None
            if held.slot_id is not None:
                self.slots.append(held.slot_id)
        if held.checkpoint is not None:
            if self.start < n_tokens <= self.end:
                known = self.checkpoints.get(n_tokens)
                self.checkpoints[n_tokens] = known.merged(held.checkpoint) if known else held.checkpoint
            return
        self.ends[held.place] = max(self.ends.get(held.place, 0), end)
        more = sum(n_bytes for position, n_bytes in held.spans if self.start < position <= self.end)
        self.n_bytes[held.place] = self.n_bytes.get(held.place, 0) + more


def grow(
    holdings: Iterable[Held], text_of: Callable[[Ids], str] | None = None
) -> tuple[tuple[str, tuple[TreeNode, ...]], ...]:
    """By namespace, the nodes at position 0; of siblings, the one that leads furthest comes first.

    Args:
        text_of: given the ids of a node, says how it begins; None: nobody may know.
    """
    roots: dict[str, _Branch] = {}
    contents = [(held, held.ids()) for held in holdings if held.n_tokens]
    for held, ids in contents:
        _plant(roots.setdefault(held.namespace, _Branch(0, ids[:0])), ids, cuts=held.place in ("slot", "parked"))
    for held, ids in contents:
        for branch in _way(roots[held.namespace], ids):
            branch.note(held, len(ids))
    return tuple((namespace, _frozen(root, text_of).children) for namespace, root in sorted(roots.items()))


def _plant(root: _Branch, ids: Ids, *, cuts: bool) -> None:
    branch, at = root, 0
    while at < len(ids):
        child = branch.children.get(int(ids[at]))
        if child is None:
            branch.children[int(ids[at])] = _Branch(at, ids[at:])
            return
        n_same = common_prefix_len(child.edge, ids[at:])
        at += n_same
        is_cut = at < len(ids) or cuts
        if n_same < len(child.edge) and is_cut:
            child.split(n_same)
        branch = child


def _way(root: _Branch, ids: Ids) -> Iterator[_Branch]:
    branch = root
    while branch.end < len(ids):
        branch = branch.children[int(ids[branch.end])]
        yield branch


def _frozen(root: _Branch, text_of: Callable[[Ids], str] | None) -> TreeNode:
    """From the leaves up, without recursion: a long conversation with many forks is deep."""
    order, todo = [], deque([root])
    while todo:
        branch = todo.popleft()
        order.append(branch)
        todo.extend(branch.children.values())
    done: dict[int, tuple[int, TreeNode]] = {}
    """With how far each reaches."""
    for branch in reversed(order):
        below = sorted((done.pop(id(child)) for child in branch.children.values()), key=lambda each: -each[0])
        ends = branch.ends
        node = TreeNode(
            start=branch.start,
            end=branch.end,
            slots=tuple(sorted(branch.slots)),
            n_parked=branch.n_parked,
            host_tokens=max(0, ends.get("host", 0) - branch.start),
            host_bytes=branch.n_bytes.get("host", 0),
            disk_tokens=max(0, ends.get("disk", 0) - branch.start),
            disk_bytes=branch.n_bytes.get("disk", 0),
            checkpoints=tuple(branch.checkpoints[position] for position in sorted(branch.checkpoints)),
            is_pinned=branch.is_pinned,
            children=tuple(child for _, child in below),
            text=None if text_of is None or not len(branch.edge) else text_of(branch.edge),
        )
        done[id(branch)] = max([branch.end, *(reach for reach, _ in below)]), node
    return done[id(root)][1]
