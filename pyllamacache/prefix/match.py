"""How far two id arrays agree. The one comparison everything else in this room is built on."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..request import Ids

_FIRST_BLOCK = 128
_GROWTH = 8


def common_prefix_len(a: Ids, b: Ids) -> int:
    """Number of leading ids that `a` and `b` share; ids of shape (n_tokens,), int32.

    Compares in growing blocks, so that the cost follows where they part and not how long they are.
    """
    n_tokens = min(len(a), len(b))
    start, block = 0, _FIRST_BLOCK
    while start < n_tokens:
        end = min(start + block, n_tokens)
        differs = a[start:end] != b[start:end]
        first = int(differs.argmax())
        if differs[first]:
            return start + first
        start, block = end, block * _GROWTH
    return n_tokens
