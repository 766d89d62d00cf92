"""What the scheduler asks of the engine room, and the frozen values it passes.

`native/context.py` implements `Backend` over llama.cpp; `tests/fakes` implements it over lists of (token, position).
All calls are made on the scheduler's thread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Protocol

from ..config import Memory

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from ..request import CaptureMode, Ids, Logits, SamplingParams, TokenLogprob


@dataclass(frozen=True, slots=True)
class Traits:
    """What a backend is like; constant over its life."""

    memory: Memory
    exact: bool
    """One stream per slot and one sequence per native decode: what else runs then changes no bit."""
    n_slots: int
    n_ctx: int
    """Tokens one request may hold."""
    kv_tokens: int
    """KV cells all sequences share; in exact mode `n_ctx` for each slot."""
    n_batch: int
    n_ubatch: int
    n_vocab: int
    eog_ids: frozenset[int]
    """Tokens that end a generation."""
    n_parked: int = 0
    """Sequences beside the slots', `n_slots` to `n_slots + n_parked - 1`, which can hold cells but not run."""

    @property
    def has_state(self) -> bool:
        """Whether a sequence has a part that exists at one position only, of which checkpoints are taken.

        Not in exact mode on sliding models: window cells that are put back lie in another order of the ring, which is
        another rounding, and the whole window stays resident there anyway.
        """
        return self.memory.has_state and not (self.exact and self.memory is Memory.SLIDING)


class Sampler(Protocol):
    """Opaque to the scheduler: made, passed in `Feed`s and closed."""

    def close(self) -> None: ...


class Capture(Protocol):
    """A state on its way out of the backend. `finish` or `cancel` ends it, before the backend is closed."""

    @property
    def is_ready(self) -> bool:
        """`finish` would not wait."""
        ...

    def finish(self) -> bool:
        """Wait until the bytes are there. False: they could not be had."""
        ...

    def cancel(self) -> None:
        """The memory written to is the caller's again when this returns."""
        ...


@dataclass(slots=True)
class Feed:
    """Consecutive tokens of one sequence in one native decode: positions [start, start + len(tokens)).

    Not frozen, because one is made per token and slotted construction is on the hot path; nobody changes it.
    """

    seq_id: int
    start: int
    tokens: Sequence[int] | Ids
    sampler: Sampler | None = None
    """Sample a token from the logits of the last one; None: no output is computed."""
    want_logits: bool = False


Group = Sequence[Feed]
"""Feeds that go into one `llama_decode`, in ascending order of sequence id."""


class Outcome(Enum):
    """What became of a step."""

    DONE = "done"
    NO_CELLS = "no_cells"
    """The failing group changed nothing: no KV cells for it (`llama_decode` returned 1)."""
    REFUSED = "refused"
    """The failing group changed nothing: the batch or a position was refused (-1, or our own check)."""
    LOST = "lost"
    """The failing group may have changed any of its sequences (any other code)."""


@dataclass(slots=True)
class StepResult:
    """What one step did. Groups before `n_groups_done` were decoded and sampled completely."""

    outcome: Outcome
    n_groups_done: int
    code: int
    """`llama_decode`'s return value for the group that failed, 0 if none did."""
    tokens: list[int]
    """Per feed, over the groups done, in order: the sampled token, or -1 where the feed had no sampler or failed."""
    logprobs: Mapping[int, TokenLogprob] = field(default_factory=dict)
    """By index into `tokens`."""
    logits: Mapping[int, Logits] = field(default_factory=dict)
    """By index into `tokens`; copies."""
    sampler_errors: Mapping[int, str] = field(default_factory=dict)
    """By index into `tokens`: sampling failed there; the decode itself was done."""
    log: str = ""


class Backend(Protocol):
    """One native context. Sequence ids are slot ids: 0 to n_slots - 1; above them are the parked ones.

    A donor may be a parked sequence, and so may what the calls with `span` in their names speak of; everything else is
    for those of slots. A sequence whose span was changed alone has to be resumed or erased before it runs.
    """

    @property
    def traits(self) -> Traits: ...

    def step(self, groups: Sequence[Group]) -> StepResult:
        """Decode the groups one after the other and sample every feed that has a sampler.

        Before each group, every part of each sequence's memory must end at `start - 1`; otherwise the group is
        REFUSED without a native decode. Stops at the first group that is not done. Never raises for what a request
        contains.
        """
        ...

    def length(self, seq_id: int) -> int | None:
        """Tokens the sequence holds, or None when its parts disagree (it can then only be erased). Effects: none."""
        ...

    def rewind_floor(self, seq_id: int) -> int:
        """The smallest length > 0 the sequence can be cut to; its own length when it cannot be cut. Effects: none."""
        ...

    def trim(self, seq_id: int, n_tokens: int) -> bool:
        """Cut the sequence to [0, n_tokens). False: nothing usable is left, the sequence must be erased."""
        ...

    def erase(self, seq_id: int) -> None:
        """Forget the sequence. Never fails."""
        ...

    def share(self, donor_id: int, seq_id: int, n_tokens: int) -> None:
        """Make [0, n_tokens) of the donor the content of `seq_id`, which is empty. Memory.FULL only."""
        ...

    def share_span(self, donor_id: int, seq_id: int, n_tokens: int) -> None:
        """Let a sequence whose span is empty hold the cells [0, n_tokens) of another one as well; no state.

        Raises:
            NativeError: nothing was changed.
        """
        ...

    def trim_span(self, seq_id: int, n_tokens: int) -> None:
        """Cut the span of a sequence to [0, n_tokens), anywhere, without a look at its state. Never fails."""
        ...

    def span_length(self, seq_id: int) -> int:
        """Cells a sequence holds. Effects: none."""
        ...

    def span_size(self, seq_id: int, start: int, end: int) -> int:
        """Bytes of the cells [start, end) of a sequence. Raises NativeError."""
        ...

    def save_span(self, seq_id: int, start: int, end: int, data: npt.NDArray[np.uint8]) -> object:
        """Write the cells [start, end) to `data`, which has `span_size`. Waits for what is being computed.

        Raises:
            NativeError: what `data` holds then is undefined.
        """
        ...

    def append_span(self, seq_id: int, start: int, end: int, data: npt.NDArray[np.uint8]) -> None:
        """Add saved cells to a sequence whose cells end at `start`. Its state, if it has one, stays what it was.

        Raises:
            NativeError: refused; the sequence is what it was.
        """
        ...

    def state_bytes(self, seq_id: int) -> int:
        """Size of a capture of the sequence as it is now. Raises NativeError."""
        ...

    def staging_bytes(self, n_bytes: int) -> int:
        """Host memory that captures of this size take besides their destination, all of them together, from now on."""
        ...

    def capture_mode(self, seq_id: int) -> CaptureMode:
        """How the next capture of the sequence would be taken."""
        ...

    def begin_capture(self, seq_id: int, data: npt.NDArray[np.uint8]) -> Capture | None:
        """Start to copy the sequence's state into `data`, which has `state_bytes`. None: too many are in flight.

        Never waits for what is being computed. Whatever is decoded next does not change what is captured.

        Raises:
            NativeError: nothing was begun.
        """
        ...

    def resume(self, donor_id: int | None, seq_id: int, n_tokens: int, state: npt.NDArray[np.uint8]) -> None:
        """Put back a state captured at `n_tokens`.

        Beside it go the sequence's own cells, cut there, or (the sequence being empty) those of a donor.

        Raises:
            NativeError: refused; the sequence is as it was, or empty where even that could not be had.
        """
        ...

    def new_sampler(self, params: SamplingParams, prompt: Ids) -> Sampler:
        """A sampler chain that has seen the end of `prompt` (for penalties).

        Raises:
            GrammarError: the grammar does not parse.
        """
        ...

    def save_state(self, seq_id: int) -> bytearray:
        """The sequence's whole state in llama.cpp's own format. Raises NativeError."""
        ...

    def load_state(self, seq_id: int, state: bytes | bytearray | npt.NDArray[np.uint8], n_tokens: int) -> None:
        """Replace the sequence by a saved one of `n_tokens` tokens.

        Raises:
            NativeError: it does not fit; what the sequence held before is there again.
        """
        ...

    def close(self) -> None: ...
