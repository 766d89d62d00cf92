"""Which checkpoint goes when there is no room for another.

    1. stranded: no slot holds the KV cells before it, so nothing can resume from it; the longest unused first
    2. of the lowest priority there is: periodic and rolling, whose loss leaves the smallest gap between its neighbours
    3. semantic: by the gap left between its neighbours, times hits, over age and bytes

Never: pinned or in use, the deepest of what a slot holds, the first on the way there (the header's, as a rule), and
those at the places where a conversation's template lets its next prompt leave, up to half of a slot's share.
For a first-class newcomer these give way in the end, idle slots' first: one budget, and the newest is needed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from ..request import SlotId
    from .index import Checkpoint


class Eviction(str, Enum):
    """Why a checkpoint was given up."""

    STRANDED = "stranded"
    """No slot held its prefix any more."""
    THINNED = "thinned"
    """Second class, for one that leaves a larger gap, or for one of the first class."""
    OUTVALUED = "outvalued"
    """Least to replay, least used, longest ago."""
    REPLACED = "replaced"
    """An older rolling one of the same reply."""
    CLEARED = "cleared"
    """The caller asked, or lowered a budget."""
    BROKEN = "broken"
    """It could not be put back."""

    EXPIRED = "expired"
    """Its time to live was over."""

    __str__ = str.__str__


@dataclass(frozen=True, slots=True)
class Holdings:
    """What the slots hold of the tree, which decides what is worth keeping."""

    paths: Mapping[SlotId, list[Checkpoint]]
    """By slot: the checkpoints on the way to its end, the shallowest first."""
    busy: frozenset[SlotId]
    needs_span: bool
    """Without KV cells a checkpoint is of no use (false for purely recurrent memory)."""
    marks: Mapping[SlotId, frozenset[int]] = field(default_factory=dict)
    """By slot: positions at which its conversation is expected to be left."""
    n_shielded: int = 2
    """How many of a slot's are shielded at most."""

    def resident(self) -> set[int]:
        """Identities of those whose prefix some slot holds."""
        return {id(node) for path in self.paths.values() for node in path}

    def shielded(self, newcomer: Sequence[Checkpoint], taker: SlotId | None) -> dict[int, int]:
        """Identities of first and last ones, with how much it takes to give them up.

        A newcomer succeeds the last one of the slot that takes it.
        """
        shield: dict[int, int] = {}
        for slot_id, path in self.paths.items():
            level = 2 if slot_id in self.busy else 1
            for node in self._needed(slot_id, path, is_taker=slot_id == taker):
                shield[id(node)] = max(shield.get(id(node), 0), level)
        if newcomer:
            shield[id(newcomer[0])] = max(shield.get(id(newcomer[0]), 0), 2)
        return shield

    def _needed(self, slot_id: SlotId, path: list[Checkpoint], *, is_taker: bool) -> list[Checkpoint]:
        """The first and, but for the taker, the last one; then those at marks, the deepest first."""
        needed = path[:1] if is_taker else path[:1] + path[-1:]
        marks = self.marks.get(slot_id)
        if marks and self.n_shielded > len(needed):
            at_marks = [node for node in reversed(path) if node.position in marks and node not in needed]
            needed = needed + at_marks[: self.n_shielded - len(needed)]
        return needed


def choose_victim(
    nodes: Iterable[Checkpoint],
    holdings: Holdings,
    *,
    now: int,
    newcomer: Sequence[Checkpoint],
    taker: SlotId | None = None,
    is_optional: bool,
    gap: int,
    priority: int = 1 << 30,
) -> tuple[Checkpoint, Eviction] | None:
    """The next one to go so that a newcomer finds room, or None: the newcomer has to do without.

    Args:
        now: the number of the latest request.
        newcomer: the path of checkpoints above the newcomer.
        taker: the slot it is taken from; None: it comes from elsewhere.
        is_optional: the newcomer is of the second class.
        gap: tokens between the newcomer and its nearest ancestor.
        priority: of the newcomer, which displaces nothing of a higher one.
    """
    free = [node for node in nodes if node.is_free and node.is_ready]
    if holdings.needs_span:
        resident = holdings.resident()
        stranded = [node for node in free if id(node) not in resident]
        if stranded:
            return min(stranded, key=lambda node: (node.last_used, -node.position)), Eviction.STRANDED
    lowest = min((node.priority for node in free), default=0)
    if lowest > priority:
        return None
    free = [node for node in free if node.priority == lowest]
    shield = holdings.shielded(newcomer, taker)
    second = [node for node in free if node.is_second_class and shield.get(id(node), 0) < 1 + (not is_optional)]
    if second:
        node = min(second, key=lambda node: (_merged_gap(node), node.last_used))
        if not is_optional or node.gap < gap:
            return node, Eviction.THINNED
    if is_optional:
        return None
    for level in range(3):  # of the second class only what is shielded is left
        candidates = [node for node in free if shield.get(id(node), 0) == level]
        if candidates:
            return min(candidates, key=lambda node: (value(node, now), node.last_used)), Eviction.OUTVALUED
    return None


def _merged_gap(node: Checkpoint) -> int:
    """From its ancestor to its furthest nearest descendant: the largest gap that its loss leaves behind."""
    return max((child.position for child in node.children), default=node.position) - node.start


def value(node: Checkpoint, now: int) -> float:
    """What its loss costs: the gap it leaves, weighed by use.

    Dropping the smallest of these keeps a long conversation covered: of k checkpoints none is further from the next
    than about 2 / k of its length (scenario S07).
    """
    return _merged_gap(node) * (1 + node.hits) / (1 + max(0, now - node.last_used)) / max(1, node.n_bytes)
