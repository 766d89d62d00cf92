"""What the scheduler knows of each slot, and the growing token arrays it compares prompts with."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from ..request import SlotId

if TYPE_CHECKING:
    from ..request import Ids
    from .jobs import Job


class TokenBuffer:
    """An int32 array that grows at its end and is cut there. Views stay valid until the next change.

    `n` is its length, to be read: `len()` costs a call, and some of these are made per token.
    """

    __slots__ = ("_data", "n")

    def __init__(self, ids: Ids | None = None, *, spare: int = 64) -> None:
        n = 0 if ids is None else len(ids)
        self._data = np.empty(n + spare, dtype=np.int32)
        if ids is not None:
            self._data[:n] = ids
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> int:
        return int(self._data[index])

    @property
    def ids(self) -> Ids:
        """A view, shape (n_tokens,)."""
        return self._data[: self.n]

    def slice(self, start: int, end: int) -> Ids:
        return self._data[start:end]

    def _reserve(self, n: int) -> None:
        if n > len(self._data):
            grown = np.empty(max(n, 2 * len(self._data)), dtype=np.int32)
            grown[: self.n] = self._data[: self.n]
            self._data = grown

    def append(self, token: int) -> None:
        self._reserve(self.n + 1)
        self._data[self.n] = token
        self.n += 1

    def extend(self, ids: Ids) -> None:
        n = self.n + len(ids)
        self._reserve(n)
        self._data[self.n : n] = ids
        self.n = n

    def truncate(self, n: int) -> None:
        self.n = min(self.n, n)


@dataclass(slots=True)
class SlotState:
    """One sequence: `tokens` is what its memory holds, positions [0, len). Scheduler thread only."""

    slot_id: SlotId
    tokens: TokenBuffer = field(default_factory=TokenBuffer)
    namespace: str = ""
    exact_tokens: int = 0
    """Exact mode: leading tokens that were computed in whole grid chunks of prompt tokens."""
    last_used: int = 0
    priority: int = 0
    """Of the request that ran in it last."""
    expires_s: float | None = None
    cache_key: str | None = None
    marks: frozenset[int] = frozenset()
    """Positions at which the conversation of the last request is expected to be left."""
    job: Job | None = None
    is_held: bool = False
    """Nothing may change its content before a checkpoint of it is taken (`Checkpoints.settle`)."""

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def is_busy(self) -> bool:
        return self.job is not None

    def truncate(self, n_tokens: int) -> None:
        self.tokens.truncate(n_tokens)
        self.exact_tokens = min(self.exact_tokens, n_tokens)


@dataclass(frozen=True, slots=True)
class SlotInfo:
    """A slot as users see it, at one instant."""

    slot_id: SlotId
    is_busy: bool
    namespace: str
    ids: Ids
    """A copy."""
    checkpoints: tuple[int, ...]
    """Ascending positions it can go back to."""
