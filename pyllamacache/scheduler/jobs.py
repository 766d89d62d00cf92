"""A request while it runs: what has been fed, sampled and timed. Scheduler thread only."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..request import Reason, Source, TokenLogprob
from .slots import SlotState, TokenBuffer

if TYPE_CHECKING:
    from ..observe.evidence import Evidence
    from ..prefix.index import Checkpoint
    from ..prefix.placement import Placement
    from ..prefix.plan import Plan
    from ..request import Logits, Request
    from ..text.decode import TextStream
    from .backend import Sampler
    from .inbox import Outbox
    from .restore import Restore


@dataclass(slots=True)
class Job:
    """One admitted request on its slot.

    `tokens` is the prompt and then the sampled tokens; the slot holds a prefix of it, and what the slot does not hold
    yet is what is left to feed. Every case is that one: prefill, decode, and feeding again after a failed call.
    """

    request: Request
    outbox: Outbox
    slot: SlotState
    plan: Plan
    tokens: TokenBuffer
    text: TextStream
    sampler: Sampler | None
    submitted_s: float
    admitted_s: float
    order: int
    """Grows with admission: the youngest has the highest."""
    deadline_s: float | None
    prefill_target: int
    """Prompt tokens to feed: all of them, or fewer for a warm-up on memory that cannot be rewound."""
    evidence: Evidence | None = None
    """For whoever asks why it was prefilled; None: nobody will."""
    restore: Restore | None = None
    """What is still being put back into its slot, which is not fed until then."""
    restore_started_s: float = 0.0
    restored_s: float = 0.0
    prefill_started_s: float = 0.0
    first_token_s: float = 0.0
    source: Source = Source.NONE
    reason: Reason = Reason.COLD
    position: int = 0
    resumed_tokens: int = 0
    generated: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    logits: Logits | None = None
    last_prefill: int = 0
    """Step number of its last prefill chunk: whoever waited longest goes first."""
    is_waiting: bool = False
    """Set aside until another request ends: running ones competed for cells."""
    placements: list[Placement] = field(default_factory=list)
    """Checkpoints to take during prefill, the next one last."""
    capture_at: int = 1 << 62
    """Position at which the next checkpoint is taken, of prefill or reply."""
    awaited_at: int = 1 << 62
    """Position that a queued request with the same prefix waits for."""
    rolling: list[Checkpoint] = field(default_factory=list)
    """Those of its reply, the oldest first."""
    n_failures: int = 0
    """Native calls that failed under this request since it last got further than ever before."""
    failed_end: int = 0
    """Where it has to get to for that: how far the furthest failed call would have brought it."""

    @property
    def n_prompt(self) -> int:
        return len(self.request.prompt)

    @property
    def n_left(self) -> int:
        """Tokens to feed before the next can be sampled."""
        return self.prefill_target + len(self.generated) - len(self.slot)

    @property
    def is_decoding(self) -> bool:
        return bool(self.generated) and self.slot.tokens.n == self.tokens.n - 1

    @property
    def total_tokens(self) -> int:
        """What the slot holds at most when the request is done."""
        return self.n_prompt + self.request.max_tokens
