"""Checkpoints in a slot file: extra tensors named `checkpoint.<position>.<kind>`.

Knows their names and what makes a set of them sound, never what is in a state or what a kind means.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..errors import CacheCorruptError, InternalError

if TYPE_CHECKING:
    from .slotfile import Blob

EXTRA_KIND = "checkpoint"
"""The part of a tensor's name before the first dot."""

_NAME = re.compile(r"checkpoint\.([1-9][0-9]{0,17})\.([a-z_]+)")


@dataclass(frozen=True, slots=True, order=True)
class CheckpointPlace:
    """A checkpoint that a file says it has."""

    position: int
    """How many tokens the state has seen."""
    kind: str
    size_bytes: int

    @property
    def name(self) -> str:
        return f"{EXTRA_KIND}.{self.position}.{self.kind}"


@dataclass(frozen=True, slots=True, eq=False)
class StoredCheckpoint:
    """A checkpoint and its bytes, which it does not own."""

    position: int
    kind: str
    """Why it was taken, in letters and underscores."""
    data: Blob = field(repr=False)

    @property
    def name(self) -> str:
        return f"{EXTRA_KIND}.{self.position}.{self.kind}"


def places(sizes: Mapping[str, int], n_tokens: int, where: str) -> tuple[CheckpointPlace, ...]:
    """The checkpoints among a file's extra tensors, by position.

    Raises:
        CacheCorruptError: one has no position from 1 to `n_tokens`, or no kind, or two have the same position.
    """
    found: dict[int, CheckpointPlace] = {}
    for name, size_bytes in sizes.items():
        if name.partition(".")[0] != EXTRA_KIND:
            continue
        match = _NAME.fullmatch(name)
        if match is None or int(match[1]) > n_tokens:
            raise CacheCorruptError(where, f"its header names a checkpoint {name!r} of {n_tokens} tokens")
        place = CheckpointPlace(int(match[1]), match[2], size_bytes)
        if place.position in found:
            raise CacheCorruptError(where, f"its header names two checkpoints at {place.position}")
        found[place.position] = place
    return tuple(sorted(found.values()))


def names(checkpoints: Iterable[StoredCheckpoint], n_tokens: int) -> dict[str, StoredCheckpoint]:
    """The tensors' names for checkpoints of a sequence of `n_tokens`, by position.

    Raises:
        InternalError: such a file could not be read back.
    """
    ordered = sorted(checkpoints, key=lambda each: each.position)
    named = {each.name: each for each in ordered}
    try:
        n_sound = len(places(dict.fromkeys(named, 0), n_tokens, ""))
    except CacheCorruptError as error:
        raise InternalError(f"a slot record with checkpoints that cannot be stored: {error.what}") from None
    if n_sound != len(ordered):
        raise InternalError("a slot record with a checkpoint twice")
    return named
