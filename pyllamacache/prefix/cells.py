"""Which KV cells are held by whom, where sequences share a prefix. Exact counts, no native call.

A lineage is a run of cells that were computed one after the other. A slot's content is a path of lineages. Content is
only ever appended to, cut at its tail, or copied from the start of another slot's; so whoever holds a cell of a
lineage holds it from the lineage's start, and one end per holder says everything:

    slot 0:  [0 ......... lineage A ......... 900)
    slot 1:  [0 .. A .. 400)[400 . B . 650)             cells in use: 900 of A + 250 of B
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import InternalError

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from ..request import SlotId


class _Lineage:
    """Cells of positions [start, highest end); each slot in `ends` holds [start, ends[slot_id])."""

    __slots__ = ("ends", "start")

    def __init__(self, start: int, ends: dict[SlotId, int]) -> None:
        self.start = start
        self.ends = ends

    def end_without(self, released: Collection[SlotId]) -> int:
        """Where the cells end that anyone but `released` holds."""
        return max((end for slot_id, end in self.ends.items() if slot_id not in released), default=self.start)


class CellLedger:
    """The books of a unified cache. Costs follow the number of lineages, not of cells.

    Wrong calls raise InternalError and change nothing. Thread: scheduler.
    """

    def __init__(self) -> None:
        self._paths: dict[SlotId, list[_Lineage]] = {}
        self._used = 0

    def copy(self) -> CellLedger:
        """An independent ledger, to try changes on."""
        twin = CellLedger()
        twin._used = self._used
        twins = {
            lineage: _Lineage(lineage.start, dict(lineage.ends)) for path in self._paths.values() for lineage in path
        }
        twin._paths = {slot_id: [twins[lineage] for lineage in path] for slot_id, path in self._paths.items()}
        return twin

    # ---- views -------------------------------------------------------------------------------------------------

    def length(self, slot_id: SlotId) -> int:
        path = self._paths.get(slot_id)
        return path[-1].ends[slot_id] if path else 0

    def used(self) -> int:
        """Distinct cells held by anyone."""
        return self._used

    def used_if(self, lengths: Mapping[SlotId, int]) -> int:
        """Distinct cells if these slots had these lengths, all at once, and every other slot were empty.

        A slot grows by cells of its own; a length below the current one counts as a cut.
        """
        kept: dict[_Lineage, int] = {}
        grown = 0
        for slot_id, n_tokens in lengths.items():
            for lineage in self._paths.get(slot_id, ()):
                n_cells = min(lineage.ends[slot_id], n_tokens) - lineage.start
                kept[lineage] = max(kept.get(lineage, 0), n_cells)
            grown += max(0, n_tokens - self.length(slot_id))
        return sum(kept.values()) + grown

    def freed_by_trim(self, slot_id: SlotId, n_tokens: int) -> int:
        """Distinct cells nobody would hold any more if the slot were cut to [0, n_tokens)."""
        freed = 0
        for lineage in reversed(self._paths.get(slot_id, [])):
            end = lineage.ends[slot_id]
            if end <= n_tokens:
                break
            freed += max(0, end - max(n_tokens, lineage.end_without((slot_id,))))
        return freed

    def length_freeing(self, slot_id: SlotId, n_cells: int, released: Collection[SlotId] = ()) -> int:
        """The greatest length such that cutting the slot to it, and `released` slots along with it, frees `n_cells`.

        Where that many cannot be freed: the greatest length that frees all there is.
        """
        ours = {slot_id, *released}
        length = self.length(slot_id)
        for lineage in reversed(self._paths.get(slot_id, [])):
            end = lineage.ends[slot_id]
            kept = min(end, lineage.end_without(ours))
            if n_cells <= end - kept:
                return end - n_cells
            if kept < end:
                length, n_cells = kept, n_cells - (end - kept)
        return length

    def shared_length(self, a: SlotId, b: SlotId) -> int:
        """How many leading cells both hold."""
        for lineage in reversed(self._paths.get(a, [])):
            if b in lineage.ends:
                return min(lineage.ends[a], lineage.ends[b])
        return 0

    # ---- changes -----------------------------------------------------------------------------------------------

    def grow(self, slot_id: SlotId, n_tokens: int) -> None:
        """Append cells of the slot's own up to length `n_tokens`."""
        length = self.length(slot_id)
        if n_tokens < length:
            raise InternalError(f"grow of slot {slot_id} from {length} to {n_tokens} tokens")
        if n_tokens == length:
            return
        self._used += n_tokens - length
        path = self._paths.setdefault(slot_id, [])
        ends = path[-1].ends if path else {}
        if path and (len(ends) == 1 or max(ends.values()) == length):  # nobody holds cells beyond: go on in place
            ends[slot_id] = n_tokens
        else:
            path.append(_Lineage(length, {slot_id: n_tokens}))

    def share(self, donor_id: SlotId, slot_id: SlotId, n_tokens: int) -> None:
        """Let an empty slot hold the donor's cells [0, n_tokens) as well."""
        if donor_id == slot_id or self.length(slot_id) or not 0 <= n_tokens <= self.length(donor_id):
            raise InternalError(
                f"share of {n_tokens} tokens from slot {donor_id} ({self.length(donor_id)} tokens) "
                f"into slot {slot_id} ({self.length(slot_id)} tokens)"
            )
        path = [lineage for lineage in self._paths.get(donor_id, []) if lineage.start < n_tokens]
        for lineage in path:
            lineage.ends[slot_id] = min(lineage.ends[donor_id], n_tokens)
        if path:
            self._paths[slot_id] = path

    def trim(self, slot_id: SlotId, n_tokens: int) -> None:
        """Cut the slot to [0, n_tokens). What others hold stays theirs."""
        if not 0 <= n_tokens <= self.length(slot_id):
            raise InternalError(f"trim of slot {slot_id} from {self.length(slot_id)} to {n_tokens} tokens")
        self._used -= self.freed_by_trim(slot_id, n_tokens)
        path = self._paths.get(slot_id, [])
        left: list[_Lineage] = []
        while path and path[-1].start >= n_tokens:
            left.append(path.pop())
            del left[-1].ends[slot_id]
        if path:
            path[-1].ends[slot_id] = min(path[-1].ends[slot_id], n_tokens)
        else:
            self._paths.pop(slot_id, None)
        for lineage in left:
            self._join_with_next(lineage)

    def erase(self, slot_id: SlotId) -> None:
        """Forget the slot's content; an empty slot may be erased."""
        self.trim(slot_id, 0)

    def _join_with_next(self, lineage: _Lineage) -> None:
        """Append the lineage in which its longest holder goes on: paths stay short over any number of hand-overs.

        Nobody holds this lineage beyond where that one starts, so the cells keep their names.
        """
        holder = max(lineage.ends, key=lineage.ends.__getitem__, default=None)
        if holder is None:
            return
        path = self._paths[holder]
        at = path.index(lineage)
        if at + 1 < len(path):
            following = path[at + 1]
            lineage.ends.update(following.ends)
            for slot_id in following.ends:
                self._paths[slot_id].remove(following)
