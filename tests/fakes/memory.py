"""What sequences hold in the fake engine room: KV cells, the cells of a sliding window, and states.

Every cell carries a value that depends on all its token attended to when it was computed. A wrong read anywhere
therefore changes every later value of that sequence, also after the wrong cell itself is gone.
"""

from __future__ import annotations

from dataclasses import dataclass, field

_MASK = (1 << 61) - 1


def mix(*parts: object) -> int:
    """A number that depends on all parts; the same in every process, as no strings are hashed."""
    return hash(parts) & _MASK


@dataclass(slots=True, eq=False)
class Cell:
    """One KV cell; several sequences may hold it."""

    token: int
    position: int
    value: int
    owners: set[int]


@dataclass(slots=True)
class State:
    """A recurrent state: a rolling hash of everything fed, at one position only."""

    digest: int = 0
    n_tokens: int = 0

    def feed(self, value: int) -> None:
        self.digest = mix(self.digest, value)
        self.n_tokens += 1


class Span:
    """The KV cells of all sequences: shared by marking under a unified cache, copied between streams without one."""

    def __init__(self, n_seqs: int, n_cells: int, *, unified: bool) -> None:
        self._n_cells = n_cells
        """All there are; without unified, all there are for each sequence."""
        self._unified = unified
        self._held: list[list[Cell]] = [[] for _ in range(n_seqs)]
        self._n_used = 0

    def cells(self, seq_id: int) -> list[Cell]:
        return self._held[seq_id]

    def n_used(self) -> int:
        """Distinct cells."""
        return self._n_used

    def n_free(self, seq_id: int) -> int:
        return self._n_cells - (self._n_used if self._unified else len(self._held[seq_id]))

    def append(self, seq_id: int, token: int, value: int) -> None:
        assert self.n_free(seq_id) > 0
        held = self._held[seq_id]
        held.append(Cell(token, len(held), value, {seq_id}))
        self._n_used += 1

    def share(self, donor_id: int, seq_id: int, n_tokens: int) -> None:
        for cell in self._held[donor_id][:n_tokens]:
            if self._unified:
                cell.owners.add(seq_id)
                self._held[seq_id].append(cell)
            else:
                self.append(seq_id, cell.token, cell.value)

    def trim(self, seq_id: int, n_tokens: int) -> None:
        held = self._held[seq_id]
        while len(held) > n_tokens:
            cell = held.pop()
            cell.owners.remove(seq_id)
            self._n_used -= not cell.owners


@dataclass(slots=True, eq=False)
class WindowCell:
    seq_id: int
    position: int
    value: int = 0


@dataclass(slots=True)
class _Held:
    """What one sequence has in the window: its cells by position."""

    by_position: dict[int, tuple[int, WindowCell]] = field(default_factory=dict)
    """Position to (index in the ring, cell)."""

    @property
    def first(self) -> int:
        return min(self.by_position, default=-1)

    @property
    def last(self) -> int:
        return max(self.by_position, default=-1)


class Window:
    """The ring of sliding-window layers, filled as llama.cpp b11549 fills it (`find_slot`, `apply_ubatch`).

    A cell is free when nobody holds it or when its owner's next token could not see it; whoever comes may take it,
    and then everything of that owner up to its position goes as well.
    """

    def __init__(self, n_seqs: int, n_cells: int, n_swa: int) -> None:
        self._ring: list[WindowCell | None] = [None] * n_cells
        self._held = [_Held() for _ in range(n_seqs)]
        self._n_swa = n_swa
        self._head = 0

    def first(self, seq_id: int) -> int:
        """Smallest position held, -1 for none."""
        return self._held[seq_id].first

    def last(self, seq_id: int) -> int:
        return self._held[seq_id].last

    def cells(self, seq_id: int) -> list[WindowCell]:
        return [cell for _, (_, cell) in sorted(self._held[seq_id].by_position.items())]

    def visible(self, seq_id: int, position: int) -> tuple[int, ...]:
        """Values of the cells before `position` that its token sees."""
        held = self._held[seq_id].by_position
        return tuple(held[each][1].value for each in self.needed(position) if each in held)

    def places(self, seq_id: int, position: int) -> tuple[int, ...]:
        """Where in the ring they lie, as seen from their positions: the order in which kernels sum."""
        held = self._held[seq_id].by_position
        return tuple(held[each][0] - each for each in self.needed(position) if each in held)

    def needed(self, position: int) -> range:
        return range(max(0, position - self._n_swa + 1), position)

    def put(self, rows: list[tuple[int, int]]) -> list[WindowCell]:
        """Places for one ubatch of (sequence, position); values are filled in by the caller."""
        overwritten: dict[int, int] = {}
        cells = []
        for index, (seq_id, position) in zip(self._find(len(rows)), rows, strict=True):
            old = self._ring[index]
            if old is not None:
                overwritten[old.seq_id] = max(overwritten.get(old.seq_id, -1), old.position)
                del self._held[old.seq_id].by_position[old.position]
            cell = self._ring[index] = WindowCell(seq_id, position)
            self._held[seq_id].by_position[position] = (index, cell)
            cells.append(cell)
        for seq_id, last in overwritten.items():
            self._remove(seq_id, 0, last + 1)
        self._head = index + 1
        return cells

    def _find(self, n_tokens: int) -> list[int]:
        size = len(self._ring)
        n_used = size - self._ring.count(None)
        start = 0 if self._head > n_used + 2 * n_tokens else self._head
        last = [held.last for held in self._held]
        found = []
        for at in range(start, start + size):
            cell = self._ring[at % size]
            if cell is None or last[cell.seq_id] + 1 - cell.position >= self._n_swa:
                found.append(at % size)
                if len(found) == n_tokens:
                    return found
        raise AssertionError(f"no place in the window for {n_tokens} tokens although the span had one")

    def trim(self, seq_id: int, n_tokens: int) -> None:
        self._remove(seq_id, n_tokens, self._held[seq_id].last + 1)

    def _remove(self, seq_id: int, start: int, end: int) -> None:
        held = self._held[seq_id].by_position
        freed = [held.pop(position)[0] for position in sorted(held) if start <= position < end]
        for index in freed:
            self._ring[index] = None
        self._head = min([self._head, *freed])
