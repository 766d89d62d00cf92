"""Tokenizing texts of which some parts are a stranger's: what spells a control token there stays text.

The whole text is tokenized at once, as it would be without marks. Only where a control token comes out of a marked
part is the text taken apart, at the control tokens that are meant.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from ..request import Spelling

if TYPE_CHECKING:
    from ..request import Ids
    from .spelling import Speller, Tokenize

Ranges = tuple[tuple[int, int], ...]
"""[start, end) in bytes, ascending and disjoint."""


def touches(starts: Ids, ends: Ids, ranges: Ranges) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Which of [starts, ends) have a byte in common with one of `ranges`."""
    if not ranges or not len(starts):
        return np.zeros(len(starts), dtype=np.bool_)
    bounds = np.array(ranges, dtype=np.int64)
    first = np.searchsorted(bounds[:, 1], starts, side="right")
    begins = np.append(bounds[:, 0], np.iinfo(np.int64).max)[first]
    return np.asarray(begins < ends, dtype=np.bool_)


class MarkedTokenizer:
    """Plain tokenization that knows which bytes of a text must not become control tokens."""

    def __init__(self, tokenize: Tokenize, speller: Speller) -> None:
        self._tokenize = tokenize
        self._speller = speller

    def whole(
        self, text: str, data: bytes, inputs: Ranges, add_special: bool, parse_special: bool
    ) -> tuple[Ids, Spelling | None]:
        """Ids of all of `text`, and how they spell `data`, its UTF-8; None: they do not."""
        ids = self._tokenize(text, add_special, parse_special)
        spelling = self._speller.spelling(ids, data, add_special, parse_special)
        if not inputs or not parse_special:
            return ids, spelling
        if spelling is None:
            is_safe = not self._may_touch(data, inputs)
            return (ids if is_safe else self._by_part(data, inputs, add_special)), None
        starts, ends = control_ranges(spelling)
        wrong = touches(starts, ends, inputs)
        if not wrong.any():
            return ids, spelling
        head = self._tokenize("", True, False) if add_special else ids[:0]
        rest = self._apart(data, 0, inputs)
        if rest is None:
            return self._by_part(data, inputs, add_special), None
        ids = np.concatenate([head, rest])
        spelling = self._speller.spelling(ids, data, add_special, parse_special)
        literals = tuple(zip(starts[wrong].tolist(), ends[wrong].tolist(), strict=True))
        return ids, None if spelling is None else replace(spelling, literals=literals)

    def tail(self, start: int, data: bytes, inputs: Ranges, parse_special: bool) -> tuple[Ids, Ids, Ids, Ranges] | None:
        """`data` from `start` on, tokenized by itself: ids, ends and controls in it, and literals; None as above."""
        rest = data[start:]
        ids = self._tokenize(rest.decode(), False, parse_special)
        spelled = self._speller.ends(ids, rest, parse_special, at_start=False)
        if spelled is None:
            return None
        if not inputs or not parse_special:
            return ids, *spelled, ()
        ends, controls = spelled
        starts_of, ends_of = np.concatenate([[0], ends])[controls] + start, ends[controls] + start
        wrong = touches(starts_of, ends_of, inputs)
        if not wrong.any():
            return ids, ends, controls, ()
        apart = self._apart(data, start, inputs)
        spelled = None if apart is None else self._speller.ends(apart, rest, parse_special, at_start=False)
        if apart is None or spelled is None:
            return None
        return apart, *spelled, tuple(zip(starts_of[wrong].tolist(), ends_of[wrong].tolist(), strict=True))

    def _apart(self, data: bytes, start: int, inputs: Ranges) -> Ids | None:
        """Tokenized piece by piece between the control tokens of the unmarked parts; None: one cannot be spelled."""
        pieces: list[Ids] = []
        cursor = start
        for begin, end in _gaps(inputs, start, len(data)):
            run = data[begin:end]
            ids = self._tokenize(run.decode(), False, True)
            spelled = self._speller.ends(ids, run, True, at_start=True)
            if spelled is None:
                return None
            ends, controls = spelled
            starts = np.concatenate([[0], ends])
            for index in controls.tolist():
                if cursor < begin + int(starts[index]):
                    text = data[cursor : begin + int(starts[index])].decode()
                    pieces.append(self._tokenize(text, False, False))
                pieces.append(ids[index : index + 1])
                cursor = begin + int(ends[index])
        if cursor < len(data):
            pieces.append(self._tokenize(data[cursor:].decode(), False, False))
        return np.concatenate(pieces) if pieces else np.zeros(0, dtype=np.int32)

    def _may_touch(self, data: bytes, inputs: Ranges) -> bool:
        """Whether a marked part, by itself, would give a control token."""
        for start, end in inputs:
            text = data[start:end].decode()
            if not np.array_equal(self._tokenize(text, False, True), self._tokenize(text, False, False)):
                return True
        return False

    def _by_part(self, data: bytes, inputs: Ranges, add_special: bool) -> Ids:
        """Each part by itself: other tokens where parts meet, and none that was not meant."""
        parts = sorted([(*gap, True) for gap in _gaps(inputs, 0, len(data))] + [(*each, False) for each in inputs])
        pieces = [self._tokenize("", True, False)] if add_special else []
        pieces += [self._tokenize(data[start:end].decode(), False, parse) for start, end, parse in parts]
        return np.concatenate(pieces)


def control_ranges(spelling: Spelling) -> tuple[Ids, Ids]:
    """Where each control token of the text begins and ends, in bytes."""
    starts = np.concatenate([np.zeros(1, dtype=np.int32), spelling.ends])[spelling.controls]
    return starts, spelling.ends[spelling.controls]


def agrees_upto(known: Spelling, inputs: Ranges, limit: int) -> int:
    """How much of the first `limit` bytes of `known` a text marked with `inputs` takes the same way."""
    starts, ends = control_ranges(known)
    wrong = starts[touches(starts, ends, inputs) & (starts < limit)]
    if len(wrong):
        limit = min(limit, int(wrong[0]))
    for start, end in known.literals:
        if start >= limit:
            break
        if not any(first <= start and end <= last for first, last in inputs):
            return start
    return limit


def _gaps(ranges: Ranges, start: int, end: int) -> list[tuple[int, int]]:
    """What of [start, end) is in none of `ranges`."""
    gaps = []
    for first, last in ranges:
        if last <= start:
            continue
        if start < first:
            gaps.append((start, min(first, end)))
        start = max(start, last)
    if start < end:
        gaps.append((start, end))
    return gaps
