"""Where a prefill takes checkpoints: positions and kinds, decided when the request is admitted.

    0        boundary      known    branch               anchor        tail  n
    |-----------|------------|--------|---------...---------|-------------|--|
    resume -----^            (there: no second one)         n - 4 --------^

Each position cuts the prefill, so each costs at most one native call more. Periodic ones cost none while nothing else
runs: those of a stretch are taken where aligning its calls to multiples of `n_batch` (whole `n_ubatch`; on the CPU just
one) needs no more calls than not doing so.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..request import CheckpointKind

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

TAIL_TOKENS = 4
"""How far before the end of a prompt its tail checkpoint lies. Templates end prompts with a stub of a few tokens that
differs or is dropped next time, and repeating a prompt has to leave one to compute."""

ROLLING_TOKENS = 64
"""Reply tokens between two rolling checkpoints."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Take a checkpoint when the slot holds exactly `position` tokens."""

    position: int
    kind: CheckpointKind


def place(
    *,
    resume: int,
    target: int,
    n_prompt: int,
    matched: int,
    boundaries: Sequence[int],
    known: Collection[int],
    n_ubatch: int,
    n_batch: int,
    grid: int = 1,
    min_gap: int = 0,
    n_free: int = 0,
    marks: Sequence[int] = (),
) -> tuple[Placement, ...]:
    """Ascending positions in (resume, target).

    Args:
        resume, target: the prefill feeds [resume, target) of `n_prompt` tokens; where it ends is not its business.
        matched: how far the prompt is known; beyond `resume` and before its end, it branches off there.
        boundaries: ascending. The first and the last are taken, those between where they are `n_ubatch` apart.
        known: positions of the prompt that have a checkpoint.
        grid: exact mode takes them at multiples of this only; others are lowered to one.
        min_gap: a semantic one closer than this to its nearest ancestor saves less than it costs.
        n_free: how many find room without anything being given up; periodic ones take what the others and the one at
            the request's end leave of it.
        marks: boundaries too, but taken whatever their distance: few, and each where a later prompt is known to leave.
    """
    wanted: dict[int, CheckpointKind] = {}

    def want(position: int, kind: CheckpointKind) -> None:
        position = position // grid * grid
        if resume < position < target and position not in known:
            wanted.setdefault(position, kind)

    for position in (*_spaced(boundaries, n_ubatch), *marks):
        want(position, CheckpointKind.BOUNDARY)
    if resume < matched < n_prompt:
        want(matched, CheckpointKind.BRANCH)
    want(n_prompt - TAIL_TOKENS if grid == 1 else n_prompt - 1, CheckpointKind.TAIL)
    want((n_prompt - n_ubatch) // n_ubatch * n_ubatch, CheckpointKind.ANCHOR)

    placed: list[Placement] = []
    for position in sorted(wanted):
        below = max((each for each in known if each < position), default=0)
        below = max(below, placed[-1].position) if placed else below
        if position - below >= min_gap or wanted[position] is CheckpointKind.BOUNDARY:
            placed.append(Placement(position, wanted[position]))

    periodic = [
        Placement(position, CheckpointKind.PERIODIC)
        for position in _aligned(resume, target, [each.position for each in placed], n_batch)
        if position not in known
    ]
    n_periodic = min(len(periodic), max(0, n_free - len(placed) - 1))
    # the deepest are worth the most: edits near the end are the usual ones
    return tuple(sorted(placed + periodic[len(periodic) - n_periodic :], key=_position))


def _position(placement: Placement) -> int:
    return placement.position


def _spaced(boundaries: Sequence[int], n_ubatch: int) -> list[int]:
    """A prompt of sixty short messages must not become sixty native calls."""
    kept = list(boundaries[:1])
    for position in boundaries[1:]:
        if position == boundaries[-1] or position - kept[-1] >= n_ubatch:
            kept.append(position)
    return kept


def _aligned(resume: int, target: int, cuts: Sequence[int], n_batch: int) -> list[int]:
    """Multiples of `n_batch` at which native calls can end for free, given where they are cut anyway."""
    free: list[int] = []
    start = resume
    for end in (*cuts, target):
        multiples = range((start // n_batch + 1) * n_batch, end, n_batch)
        if len(multiples) + 1 <= -(-(end - start) // n_batch):
            free += multiples
        start = end
    return free
