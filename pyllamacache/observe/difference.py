"""What became of one sequence of ids in another: a prompt and the one sent before it, as tokens or as bytes.

    old  [ same ][ hunk ][ same, perhaps elsewhere ][ hunk ]
    new  [ same ][ hunk ][ same, perhaps elsewhere ][ hunk ]

Runs that occur once in both are found by hashing k-grams, and the longest chain of runs in the same order is what
stayed where it was. The cost follows the length times its logarithm, whatever was changed.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from ..request import Spelling

Unit = Literal["tokens", "bytes"]
Sequence = npt.NDArray[Any]
"""Integers, shape (n,)."""

_MAX_RUNS = 2048
_MAX_HUNKS = 64
_MAX_SAMPLE = 2048
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
_FIRST_BLOCK = 256


class Change(str, Enum):
    """What happened to a prompt, seen from the one before it. The first that applies."""

    IDENTICAL = "identical"
    """Nothing."""
    APPENDED = "appended"
    """All of the old one is there, and more follows."""
    TRUNCATED = "truncated"
    """The new one is the beginning of the old one."""
    OTHER_TOKENS = "other_tokens"
    """Where the tokens part, both spell the same text."""
    REORDERED_BLOCKS = "reordered_blocks"
    """Most of what is missing at its place stands at another one."""
    UNRELATED = "unrelated"
    """Nothing in common at the front, and hardly anything after it."""
    CUT_FRONT = "cut_front"
    """The beginning is gone, and what followed it is there."""
    OTHER_HEADER = "other_header"
    """The beginning is another, and what followed it is there."""
    INSERTED_SPAN = "inserted_span"
    """There is more in the middle, and nothing is missing."""
    REMOVED_MIDDLE = "removed_middle"
    """Something between the beginning and the end is gone, or much less stands for it."""
    BRANCHED = "branched"
    """The same beginning, and from there on something else."""
    CHANGED_SPAN = "changed_span"
    """Something in the middle is another, and what followed it is there."""

    __str__ = str.__str__


class Hunk(NamedTuple):
    """`old[old_start:old_end]` became `new[new_start:new_end]`; one of them may be empty."""

    old_start: int
    old_end: int
    new_start: int
    new_end: int

    @property
    def n_old(self) -> int:
        return self.old_end - self.old_start

    @property
    def n_new(self) -> int:
        return self.new_end - self.new_start


@dataclass(frozen=True, slots=True)
class Difference:
    """Counts are in `unit`. `position + new_changed + identical_after` is at most `n_new`."""

    change: Change
    unit: Unit
    n_old: int
    n_new: int
    position: int
    """The first that differs: how much the two have in common at the front."""
    old_changed: int = 0
    """What stood there in the old one, up to where the two agree again."""
    new_changed: int = 0
    """What stands there now."""
    identical_after: int = 0
    """Of the new one, behind the first change: what the old one has in the same order."""
    moved: int = 0
    """Of the new one: what the old one has in another order."""
    n_places: int = 0
    """At how many places the two differ."""
    hunks: tuple[Hunk, ...] = field(default=(), repr=False)
    """The first of them."""

    @property
    def share_identical(self) -> float:
        """Of the new one from `position` on, what was there before in the same order; 1 if nothing is left."""
        rest = self.n_new - self.position
        return self.identical_after / rest if rest else 1.0


class _Scale(NamedTuple):
    """How many units make a run that is no coincidence."""

    gram: int
    small_gram: int
    front: int
    """As much in common at the front means nothing: templates begin all prompts alike."""


_SCALES: dict[Unit, _Scale] = {"tokens": _Scale(8, 4, 4), "bytes": _Scale(24, 12, 24)}


class _Run(NamedTuple):
    old: int
    new: int
    length: int


def compare(old: Sequence, new: Sequence, *, unit: Unit = "tokens") -> Difference:
    """Align two sequences and say what the change was."""
    scale = _SCALES[unit]
    position = common_length(old, new)
    found = Difference(Change.IDENTICAL, unit, len(old), len(new), position)
    if position == len(old) == len(new):
        return found
    hunks, moved = _hunks(old, new, position, scale)
    first = hunks[0]
    found = replace(
        found,
        old_changed=first.n_old,
        new_changed=first.n_new,
        identical_after=len(new) - position - sum(hunk.n_new for hunk in hunks),
        moved=moved,
        n_places=len(hunks),
        hunks=tuple(hunks[:_MAX_HUNKS]),
    )
    return replace(found, change=_classify(found, hunks, scale))


def compare_spelled(
    old: Sequence, new: Sequence, old_spelling: Spelling | None, new_spelling: Spelling | None
) -> Difference:
    """`compare` of tokens, and whether they part over the same text. Spellings are of at least the tokens that part."""
    found = compare(old, new)
    at = found.position
    if old_spelling is None or new_spelling is None or at >= min(len(old_spelling.ends), len(new_spelling.ends)):
        return found
    if at >= min(found.n_old, found.n_new):
        return found
    upto = max(int(old_spelling.ends[at]), int(new_spelling.ends[at]))
    mine = old_spelling.data[:upto]
    if len(mine) == upto and new_spelling.data[:upto] == mine:
        return replace(found, change=Change.OTHER_TOKENS)
    return found


def common_length(a: Sequence, b: Sequence) -> int:
    """How many of the first are equal. The cost follows where they part."""
    n, start, block = min(len(a), len(b)), 0, _FIRST_BLOCK
    while start < n:
        end = min(start + block, n)
        differs = a[start:end] != b[start:end]
        first = int(differs.argmax())
        if differs[first]:
            return start + first
        start, block = end, block * 8
    return n


def overlap(old: Sequence, new: Sequence, *, unit: Unit = "tokens") -> float:
    """Share of the k-grams of `new` that occur in `old`, at any place, by a sample of them: 0 to 1."""
    k = min(_SCALES[unit].gram, len(old), len(new))
    if not k:
        return 0.0
    grams = _grams(new, k)
    sample = np.unique(grams[:: 1 + len(grams) // _MAX_SAMPLE])
    known = _grams(old, k)
    at = np.minimum(np.searchsorted(sample, known), len(sample) - 1)
    return len(np.unique(at[sample[at] == known])) / len(sample)


# ---- what the change was ---------------------------------------------------------------------------------------


def _classify(found: Difference, hunks: list[Hunk], scale: _Scale) -> Change:
    first, last = hunks[0], hunks[-1]
    is_tail = last.old_end == found.n_old and last.new_end == found.n_new
    if is_tail and len(hunks) == 1 and not (first.n_old and first.n_new):
        return Change.TRUNCATED if first.n_old else Change.APPENDED
    n_removed = sum(hunk.n_old for hunk in hunks)
    if found.moved >= scale.small_gram and 2 * found.moved >= n_removed > 0:
        return Change.REORDERED_BLOCKS
    if found.position <= scale.front:
        return _classify_front(found, first)
    if 4 * found.identical_after <= min(n_removed, sum(hunk.n_new for hunk in hunks)):
        return Change.BRANCHED
    return _classify_middle(hunks[:-1] if is_tail and len(hunks) > 1 else hunks)


def _classify_front(found: Difference, first: Hunk) -> Change:
    if 10 * (found.identical_after + found.moved) < found.n_new - found.position:
        return Change.UNRELATED
    if not first.n_old:
        return Change.INSERTED_SPAN
    return Change.CUT_FRONT if 8 * first.n_new <= first.n_old else Change.OTHER_HEADER


def _classify_middle(hunks: list[Hunk]) -> Change:
    n_removed, n_added = sum(hunk.n_old for hunk in hunks), sum(hunk.n_new for hunk in hunks)
    if not n_removed:
        return Change.INSERTED_SPAN
    return Change.REMOVED_MIDDLE if 8 * n_added <= n_removed else Change.CHANGED_SPAN


# ---- alignment -------------------------------------------------------------------------------------------------


def _hunks(old: Sequence, new: Sequence, position: int, scale: _Scale) -> tuple[list[Hunk], int]:
    """Where the two differ, in order, from `position` on, and how much of `new` there stood elsewhere in `old`."""
    n_suffix = common_length(old[position:][::-1], new[position:][::-1])
    old_end, new_end = len(old) - n_suffix, len(new) - n_suffix
    a, b = old[position:old_end], new[position:new_end]
    runs = _aligned(a, b, scale.gram)
    if runs or min(len(a), len(b)) < 1 << 12:
        runs = _refined(a, b, runs, scale.small_gram)
    gaps = list(_gaps(runs, len(a), len(b)))
    moved = _moved(a, b, gaps, scale)
    shifted = [Hunk(*(each + position for each in gap)) for gap in gaps]
    return shifted, moved


def _gaps(runs: list[_Run], n_old: int, n_new: int) -> list[Hunk]:
    """What lies between runs, before the first and behind the last, where anything does."""
    found, at_old, at_new = [], 0, 0
    for run in [*runs, _Run(n_old, n_new, 0)]:
        if run.old > at_old or run.new > at_new:
            found.append(Hunk(at_old, run.old, at_new, run.new))
        at_old, at_new = run.old + run.length, run.new + run.length
    return found


def _refined(a: Sequence, b: Sequence, runs: list[_Run], k: int) -> list[_Run]:
    """Shorter runs between those that are known."""
    found: list[_Run] = []
    at_old = at_new = 0
    for run in [*runs, _Run(len(a), len(b), 0)]:
        inner = _aligned(a[at_old : run.old], b[at_new : run.new], k)
        found += [_Run(each.old + at_old, each.new + at_new, each.length) for each in inner]
        if run.length:
            found.append(run)
        at_old, at_new = run.old + run.length, run.new + run.length
    return found


def _aligned(a: Sequence, b: Sequence, k: int) -> list[_Run]:
    """Runs of at least k that occur once in both, made as long as they are, in the same order in both."""
    if min(len(a), len(b)) < k:
        return []
    in_a, at_a = _once(_grams(a, k))
    in_b, at_b = _once(_grams(b, k))
    _, x, y = np.intersect1d(in_a, in_b, assume_unique=True, return_indices=True)
    at_a, at_b = at_a[x], at_b[y]
    order = np.argsort(at_b)
    return _trimmed(_chain(_extended(a, b, at_a[order], at_b[order], k)))


def _extended(a: Sequence, b: Sequence, at_a: Sequence, at_b: Sequence, k: int) -> list[_Run]:
    if not len(at_b):
        return []
    breaks = np.flatnonzero((np.diff(at_b) != 1) | (np.diff(at_a) != 1)) + 1
    starts = [0, *breaks.tolist()]
    ends = [*starts[1:], len(at_b)]
    runs: list[_Run] = []
    reached: dict[int, int] = {}
    for start, end in zip(starts, ends, strict=True):
        i, j, n = int(at_a[start]), int(at_b[start]), end - start + k - 1
        if reached.get(i - j, 0) >= j + n:
            continue  # part of one that was found before
        back = common_length(a[:i][::-1], b[:j][::-1])
        ahead = common_length(a[i + n :], b[j + n :])
        if n + back + ahead < k or not np.array_equal(a[i : i + n], b[j : j + n]):
            continue
        runs.append(_Run(i - back, j - back, back + n + ahead))
        reached[i - j] = j + n + ahead
    return runs


def _chain(runs: list[_Run]) -> list[_Run]:
    """Those that stand in the same order in both and are longest together."""
    if len(runs) > _MAX_RUNS:
        runs = sorted(runs, key=lambda run: -run.length)[:_MAX_RUNS]
    runs = sorted(runs, key=lambda run: (run.new, run.old))
    if len(runs) < 2:
        return runs
    old = np.array([run.old for run in runs])
    ends = np.array([(run.old + run.length, run.new + run.length) for run in runs])
    length = np.array([run.length for run in runs])
    best, before = length.copy(), np.full(len(runs), -1)
    for at in range(1, len(runs)):
        # neighbours may overlap by what they have in common by chance
        fits = (old[:at] < old[at]) & (ends[:at, 0] < ends[at, 0]) & (ends[:at, 1] < ends[at, 1])
        lost = np.maximum(0, np.maximum(ends[:at, 0] - old[at], ends[:at, 1] - runs[at].new))
        weight = np.where(fits, best[:at] - lost, 0)
        top = int(weight.argmax())
        if weight[top] > 0:
            best[at] += weight[top]
            before[at] = top
    at, kept = int(best.argmax()), []
    while at >= 0:
        kept.append(runs[at])
        at = int(before[at])
    return kept[::-1]


def _trimmed(runs: list[_Run]) -> list[_Run]:
    """Without what the one before already has."""
    kept, at_old, at_new = [], 0, 0
    for run in runs:
        n_over = max(0, at_old - run.old, at_new - run.new)
        if run.length > n_over:
            kept.append(_Run(run.old + n_over, run.new + n_over, run.length - n_over))
            at_old, at_new = run.old + run.length, run.new + run.length
    return kept


def _moved(a: Sequence, b: Sequence, gaps: list[Hunk], scale: _Scale) -> int:
    """How much of the gaps of `b` stands in gaps of `a`."""
    n_removed = sum(gap.n_old for gap in gaps)
    k = scale.gram if n_removed >= 4 * scale.gram else scale.small_gram
    removed = [_grams(a[gap.old_start : gap.old_end], k) for gap in gaps if gap.n_old >= k]
    added = [_grams(b[gap.new_start : gap.new_end], k) for gap in gaps if gap.n_new >= k]
    if not removed or not added:
        return 0
    places = np.concatenate([np.arange(gap.new_start, gap.new_end - k + 1) for gap in gaps if gap.n_new >= k])
    starts = places[np.isin(np.concatenate(added), np.concatenate(removed))]
    steps = np.diff(starts, append=starts[-1] + k) if len(starts) else starts
    return min(int(np.minimum(steps, k).sum()), n_removed)


def _grams(ids: Sequence, k: int) -> npt.NDArray[np.uint64]:
    """A hash of each k neighbours, shape (n - k + 1,)."""
    mixed = ids.astype(np.uint64) + np.uint64(1)
    mixed *= _MULTIPLIER
    mixed ^= mixed >> np.uint64(29)
    n = len(ids) - k + 1
    hashes = mixed[:n].copy()
    for i in range(1, k):
        hashes *= _MULTIPLIER
        hashes += mixed[i : i + n]
    return hashes


def _once(hashes: npt.NDArray[np.uint64]) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.int64]]:
    """Those that occur once, ascending, and where."""
    order = np.argsort(hashes)
    ascending = hashes[order]
    differs = ascending[1:] != ascending[:-1]
    is_once = np.ones(len(hashes), dtype=bool)
    is_once[1:] &= differs
    is_once[:-1] &= differs
    return ascending[is_once], order[is_once]
