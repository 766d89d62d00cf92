"""Finding a token that a vocabulary holds twice: llama.cpp ends the process on one.

A vocabulary has some 10**5 tokens. Their hashes are computed together; only where two agree are texts compared.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from .gguf_cursor import WINDOW_BYTES, Strings

Hashes = npt.NDArray[np.uint64]
Flags = npt.NDArray[np.bool_]

_RENAMED = re.compile(rb"\[EMPTY_(0|[1-9][0-9]{0,8})\]")
"""What llama.cpp calls an empty token, after its number."""

_BASE = 6364136223846793005
"""Odd, so that it has an inverse modulo 2**64."""


def find_duplicate(read: Callable[[], Iterable[Strings]]) -> tuple[int, int] | None:
    """The numbers of two tokens that llama.cpp takes for the same, or None.

    Args:
        read: walks over the vocabulary from its start; called again where hashes agree.
    """
    hashes, is_empty = np.empty(0, dtype=np.uint64), np.empty(0, dtype=np.bool_)
    batches = [(_hash(batch), batch.n_bytes == 0) for batch in read()]
    if batches:
        hashes, is_empty = (np.concatenate(column) for column in zip(*batches, strict=True))
    in_order = np.sort(hashes[~is_empty])
    shared = in_order[1:][in_order[1:] == in_order[:-1]]
    if not len(shared) and not is_empty.any():
        return None
    return _compare(read(), np.isin(hashes, shared) & ~is_empty, is_empty)


def _compare(batches: Iterable[Strings], suspects: Flags, is_empty: Flags) -> tuple[int, int] | None:
    seen: dict[bytes, int] = {}
    first = 0
    for batch in batches:
        end = first + len(batch.starts)
        wanted = suspects[first:end] | _looks_renamed(batch)
        for index in np.flatnonzero(wanted).tolist():
            text, number = batch.text(index), first + index
            twin = seen.setdefault(text, number)
            if twin != number:
                return twin, number
            renamed = _RENAMED.fullmatch(text)
            if renamed and (twin := int(renamed[1])) < len(is_empty) and is_empty[twin]:
                return min(twin, number), max(twin, number)
        first = end
    return None


def _looks_renamed(batch: Strings) -> Flags:
    """Which tokens may have the name that llama.cpp gives to an empty one."""
    n_known = np.minimum(batch.n_bytes, 1)
    flags: Flags = (batch.n_bytes >= len("[EMPTY_0]")) & (batch.data[batch.starts + 7 + n_known] == ord("["))
    return flags


def _hash(batch: Strings) -> Hashes:
    """A polynomial in the bytes of each string, its length included."""
    powers, inverses = _powers()
    end = int(batch.starts[-1] + batch.n_bytes[-1]) + 8
    # As if each string began at 0: the sum over its bytes, divided by the power at its start.
    sums = np.add.reduceat(batch.data[:end] * powers[:end], batch.starts)
    return sums * inverses[batch.starts]


@lru_cache(maxsize=1)
def _powers() -> tuple[Hashes, Hashes]:
    """The powers of the base, and their inverses."""
    bases = (_BASE, pow(_BASE, -1, 1 << 64))
    powers, inverses = (np.full(WINDOW_BYTES, base, dtype=np.uint64).cumprod() for base in bases)
    return powers, inverses
