"""Which idle slots and parked prefixes to cut, and how far, before a request fails for want of KV cells.

The lowest priority first, of equal ones the least recently used, from the tail. A cell that several hold is as recent
as the most recent of them: when its turn comes, all of them are cut to the same length. What a slot outside `victims`
holds frees nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from ..request import SlotId
    from .cells import CellLedger


@dataclass(frozen=True, slots=True)
class Victim:
    """An idle slot, or a parked prefix, that may be cut. `rewind_floor` and `last_used` as in `plan.SlotView`."""

    slot_id: SlotId
    rewind_floor: int
    last_used: int
    priority: int = 0
    """Lower ones go first."""
    is_pinned: bool = False
    """Goes after everything else: only for a request that would fail otherwise."""

    @property
    def rank(self) -> tuple[bool, int, int, int]:
        return (self.is_pinned, self.priority, self.last_used, self.slot_id)


@dataclass(frozen=True, slots=True)
class Cut:
    """Cut the slot to [0, n_tokens); 0 erases it."""

    slot_id: SlotId
    n_tokens: int


def plan_cuts(
    needed_cells: int,
    free_cells: int,
    victims: Iterable[Victim],
    ledger: CellLedger,
    *,
    keep: Collection[SlotId] = (),
    slack: int = 0,
) -> tuple[Cut, ...]:
    """The cuts after which `needed_cells` are free, or, where that cannot be had, everything victims could free.

    A memory that cannot be cut where it would have to be is erased whole. Slots in `keep` are not victims.

    Args:
        slack: cells to free beyond the need where a victim has them, so that growth does not cut token by token.
    Effects: none; the caller applies the cuts to the backend and to the ledger.
    """
    if needed_cells <= free_cells:
        return ()
    target = ledger.used() - (needed_cells - free_cells)
    after = ledger.copy()
    cuts: dict[SlotId, int] = {}
    reached: dict[SlotId, Victim] = {}

    def cut(victim: Victim, n_tokens: int) -> None:
        if n_tokens < after.length(victim.slot_id):
            cuts[victim.slot_id] = n_tokens if n_tokens >= victim.rewind_floor else 0
            after.trim(victim.slot_id, cuts[victim.slot_id])

    for victim in sorted(victims, key=lambda each: each.rank):
        if after.used() <= target:
            break
        if victim.slot_id in keep:
            continue
        n_tokens = after.length_freeing(victim.slot_id, after.used() - target + slack, reached)
        sharers = [each for each in reached.values() if after.shared_length(victim.slot_id, each.slot_id) > n_tokens]
        for each in (victim, *sharers):
            cut(each, n_tokens)
        reached[victim.slot_id] = victim
    return tuple(Cut(slot_id, n_tokens) for slot_id, n_tokens in cuts.items())
