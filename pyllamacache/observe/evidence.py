"""What an engine knew when it answered a request: enough to say later why the request was prefilled again.

References only, taken on the scheduler's thread; comparing is left to whoever asks for an explanation.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..request import Ids, Outline, Prompt, Spelling


@dataclass(frozen=True, slots=True, eq=False)
class Recent:
    """A request that ran lately and may be stored, with its reply as far as it was sampled."""

    namespace: str = field(repr=False)
    ids: Ids = field(repr=False)
    """Prompt and reply, shape (n_tokens,)."""
    spelling: Spelling | None = field(repr=False)
    """Of `ids`, or of the prompt only."""
    outline: Outline | None = field(repr=False)
    """Of the prompt."""
    n_prompt: int
    """How many of `ids` are the prompt's."""
    at_s: float
    """When it began, monotonic."""

    @property
    def size_bytes(self) -> int:
        """What it keeps alive, about."""
        spelling = self.spelling
        if spelling is None:
            return int(self.ids.nbytes)
        n_bytes = self.ids.nbytes + spelling.ends.nbytes + spelling.controls.nbytes + len(spelling.data)
        return n_bytes + (0 if self.outline is None else len(spelling.data))


@dataclass(frozen=True, slots=True)
class Lost:
    """A checkpoint that was given up before it could be of use."""

    position: int
    reason: str
    """As in `CheckpointCounts.evicted`."""
    age_s: float
    """How long before the request."""


@dataclass(frozen=True, slots=True, eq=False)
class Evidence:
    """Of one request, as it was admitted."""

    prompt: Prompt = field(repr=False)
    recent: tuple[Recent, ...] = field(repr=False)
    """Of the same namespace, the latest last."""
    at_s: float
    """Monotonic, as in `Recent`."""
    has_state: bool
    """The memory cannot go back but to checkpoints."""
    checkpoint: int | None = None
    """The deepest usable one at or before what matched."""
    n_checkpoints: int = 0
    """How many may be held; 0: none are taken."""
    min_gap_tokens: int = 0
    """Closer to the one before, a checkpoint that nobody asked for is not worth it."""
    lost: Lost | None = None
    prefill_s_per_token: float | None = None
    """As measured so far; None: not yet."""
    prefill_s: float | None = None
    """What the prefill of this request took."""
