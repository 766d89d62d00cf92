"""The values a request is made of and answers with.

Everything here is frozen and knows neither threads nor native code: a stage reads what an earlier one wrote and
passes a new value on. `Request` goes in, `Chunk`s and one `Completion` come out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, Literal, NewType

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from .observe.evidence import Evidence
    from .observe.explanation import Explanation

    Ids = npt.NDArray[np.int32]
    Logits = npt.NDArray[np.float32]

RequestId = NewType("RequestId", int)
SlotId = NewType("SlotId", int)

FinishReason = Literal["stop", "length", "cancelled"]
CaptureMode = Literal["none", "host", "staging", "snapshot", "synchronous"]
"""How states are captured.

none: not yet, or never. host: copied where they lie, in host memory. staging: read from the device into pinned memory,
in the order of its work. snapshot: copied on the device, and read from there beside its work. synchronous: the device
cannot do either, and prefill waits.
"""


class Source(str, Enum):
    """Where the reused part of a prompt came from."""

    NONE = "none"
    """Nothing was reused."""
    SLOT = "slot"
    """The slot that ran the request already held it."""
    SHARED = "shared"
    """Another slot, idle or busy, held it; its cells are now held by both."""
    HOST = "host"
    """Stored KV cells were put back from host memory, behind those of the slot or of another one, if any."""
    DISK = "disk"
    """The same, and some of them came from disk, or the state did."""
    CHECKPOINT = "checkpoint"
    """A stored state was put back, beside the KV cells of the slot or of another one where the model has such."""

    __str__ = str.__str__


class Reason(str, Enum):
    """Why not more of the prompt was reused. One enumeration for results, statistics and the command line."""

    HIT = "hit"
    """Everything that was known of this prompt was reused: it extends, repeats or is a prefix of what was held."""
    COLD = "cold"
    """Nothing that is held in this namespace starts like this prompt."""
    DIVERGED = "diverged"
    """What is held differs from the prompt at `position`; everything before it was reused."""
    NO_CHECKPOINT = "no_checkpoint"
    """The prompt leaves what is held at `position`; the state cannot go back there, and no checkpoint lies there or is
    taken at all."""
    EVICTED = "evicted"
    """A checkpoint at `position` would have been used, but was given up for want of room."""
    NOT_REWINDABLE = "not_rewindable"
    """The prompt leaves what is held at `position`; this kind of memory cannot go back and has no checkpoints."""
    OFF_GRID = "off_grid"
    """Exact mode: only whole `n_ubatch` chunks of prompt tokens are reused; `position` is the last such boundary."""
    SLOT_BUSY = "slot_busy"
    """The longest match is held by a busy slot, and this memory cannot share it. `position` is how far it matched."""
    OTHER_SLOT = "other_slot"
    """The longest match is held by another slot than the one asked for, and this memory cannot share it."""
    NOT_RUN = "not_run"
    """The request was cancelled before a slot was chosen for it."""
    DISABLED = "disabled"
    """`cache_prompt=False`."""
    LOST = "lost"
    """What was to be reused could not be: a failed native call took it while the request ran, or it was gone or damaged
    when it was to be put back. The prompt was prefilled from `position` on."""
    PREEMPTED = "preempted"
    """Running requests competed for KV cells; this one gave its own back and was prefilled again."""

    __str__ = str.__str__


class CheckpointKind(str, Enum):
    """Why a checkpoint was taken."""

    BOUNDARY = "boundary"
    """The caller asked for it."""
    BRANCH = "branch"
    """A prompt left a known prefix there."""
    TAIL = "tail"
    """A few tokens before the end of a prompt: where a reply is regenerated, or a template ends otherwise."""
    END = "end"
    """Where a request ended, with or without a reply."""
    ANCHOR = "anchor"
    """The last multiple of `n_ubatch` at least `n_ubatch` before the end of a prompt."""
    PERIODIC = "periodic"
    """Where a native call of prefill ended anyway, taken into bytes nothing else wanted."""
    ROLLING = "rolling"
    """Every so often during a reply; the last two are kept."""

    __str__ = str.__str__

    @property
    def is_optional(self) -> bool:
        """Second class: not worth a wait, a batch of its own or anything of the first class."""
        return self in (CheckpointKind.PERIODIC, CheckpointKind.ROLLING)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen. Ranges are checked by `text.validate`, meanings are those of llama.cpp's samplers.

    The chain is: min_tokens, logit_bias, penalties, top_k, top_p, min_p, temperature, draw. A drawn token that the
    grammar forbids is drawn again with the grammar in front. At `temperature` 0 the largest logit wins, and top_k,
    top_p, min_p and seed have no effect.
    """

    temperature: float = 0.0
    top_k: int = 0
    """Keep the k most probable tokens; 0 keeps all."""
    top_p: float = 1.0
    min_p: float = 0.0
    repeat_penalty: float = 1.0
    """Divides the logits of recent tokens, prompt included; 1 is off."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    penalty_last_n: int = 64
    """How many recent tokens (prompt and reply) the three penalties look at."""
    seed: int | None = None
    """0 to 2**32 - 2; None draws one."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Token id to a number added to its logit; -inf forbids the token."""
    min_tokens: int = 0
    """No end-of-generation token is sampled before this many tokens."""
    grammar: str | None = None
    """GBNF, root rule `root`."""
    constraint: str | None = field(default=None, repr=False)
    """In place of `grammar`: what a chat template asks of a reply, as JSON that only the template's engine reads."""
    logprobs: bool = False
    top_logprobs: int = 0


@dataclass(frozen=True, slots=True)
class Spelling:
    """How the ids of a prompt, or of a prompt and its reply, spell a text."""

    data: bytes
    """The text as UTF-8; a reply may end inside a character."""
    ends: Ids
    """Offset in `data` at which each token ends, ascending. Tokens that the text does not spell come first."""
    controls: Ids
    """Indices of the control tokens that the text spells, ascending."""
    add_special: bool
    parse_special: bool
    reply_ends: tuple[int, ...] = ()
    """How many tokens there were when a reply ended, ascending."""
    literals: tuple[tuple[int, int], ...] = ()
    """Ranges of `data`, ascending, that spell a control token and were taken as text, as a chat's contents are."""


@dataclass(frozen=True, slots=True)
class Outline:
    """Which parts of a prompt's text came from which messages. All offsets are bytes of the text as UTF-8.

    A message that the template leaves out, or puts elsewhere, begins where the next one does.
    """

    starts: tuple[int, ...]
    """Where each message begins, ascending; as many as `messages`."""
    header_end: int
    """End of the header: what the tools and the system messages at the front gave. 0: there is none."""
    generation_start: int
    """Where what the template adds for the reply begins; the end of the text if it adds nothing."""
    inputs: tuple[tuple[int, int], ...] = ()
    """Ranges [start, end) that came from the caller, ascending and disjoint; the rest is the template's."""
    messages: tuple[Mapping[str, Any], ...] = field(default=(), repr=False)
    """As sent, in OpenAI's shape."""
    tools: tuple[Mapping[str, Any], ...] = field(default=(), repr=False)


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """Messages and tools as the model's template writes them: a prompt for every method of an engine that takes one."""

    text: str = field(repr=False)
    outline: Outline = field(repr=False)
    boundaries: tuple[int, ...] = ()
    """Bytes of the text at which messages begin, as far as known, ascending."""
    marks: tuple[int, ...] = ()
    """Bytes of the text at which a checkpoint is wanted in any case, ascending."""
    stops: tuple[str, ...] = field(default=(), repr=False)
    """Texts that end a reply, beside the tokens that do."""
    constraint: str | None = field(default=None, repr=False)
    """As in `SamplingParams`."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A tokenized prompt: what every later stage works on.

    `ids` is a read-only int32 array of shape (n_tokens,). `text` is what the caller sent, if it was text. `spelling` is
    None where nobody will ask for it. `retokenized_at` is as in `CacheReport`. `outline` is that of a rendered chat.
    """

    ids: Ids
    text: str | None = None
    spelling: Spelling | None = None
    retokenized_at: int | None = None
    outline: Outline | None = None

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True, slots=True)
class Request:
    """What a caller asked for, validated. `generate` False is `warm`: prefill and keep, sample nothing."""

    request_id: RequestId
    prompt: Prompt
    max_tokens: int
    sampling: SamplingParams = SamplingParams()
    stop: tuple[str, ...] = ()
    cache_prompt: bool = True
    slot: SlotId | None = None
    cache_key: str | None = None
    """Of slots that serve equally well, the one that ran this key last is taken. A hint, no isolation."""
    namespace: str = ""
    store: bool = True
    boundaries: tuple[int, ...] = ()
    """Ascending positions from 1 to len(prompt) - 1 at which the caller wants a checkpoint."""
    marks: tuple[int, ...] = ()
    """The same, taken whatever their distance: where the rules of a chat's template let the next prompt leave."""
    return_logits: bool = False
    generate: bool = True
    timeout_s: float | None = None
    priority: int = 0
    ttl_s: float | None = None
    spells_controls: bool = False
    """The reply's text has the control tokens in it, but for the one that ends it."""


@dataclass(frozen=True, slots=True)
class ReusePlan:
    """What a request would reuse if it were sent now. Nothing was changed to find out."""

    matched_tokens: int
    """Longest common prefix with anything held in the namespace, in any tier."""
    resumable_tokens: int
    """Where it would resume: its `cached_tokens`."""
    prefill_tokens: int
    source: Source
    reason: Reason
    position: int
    """As in `CacheReport`."""
    restore_bytes: int
    """To be moved from host memory or disk before the prefill begins."""
    expected_s: float
    """Restore and prefill at the rates measured so far; nan before the first prefill of a whole `n_ubatch`."""
    must_wait: bool
    """For a slot, or for a running request that is computing the same prefix; the other fields are as of now."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts under OpenAI's names. `cached_tokens` is included in `prompt_tokens`."""

    prompt_tokens: int
    """Prompt tokens cached or prefilled: the whole prompt, unless the request was cancelled before that, or was a
    warm-up on memory that cannot be rewound, which stops one token short (exact mode: at the last chunk boundary)."""
    cached_tokens: int
    """Prompt tokens whose forward pass was skipped: the position the prefill resumed at, at most prompt - 1."""
    completion_tokens: int
    cache_write_tokens: int
    """Prompt tokens newly stored and reusable; generated tokens never count."""

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True)
class CacheReport:
    """What was reused, from where, and why not more. `resumed_tokens + prefilled_tokens` is `usage.prompt_tokens`."""

    matched_tokens: int
    """Longest common prefix with anything held in this namespace; may exceed `resumed_tokens`."""
    resumed_tokens: int
    prefilled_tokens: int
    source: Source
    reason: Reason
    position: int
    """The token position the reason speaks of: the first token that was not reused because of it."""
    retokenized_at: int | None = None
    """A text prompt spelled with tokens that an earlier request left: the first position at which they differ from
    those that tokenizing the whole text gives. None: they do not."""
    evidence: Evidence | None = field(default=None, repr=False, compare=False)
    """What `explain` goes by; None: nothing but these numbers."""

    def explain(self, *, show_text: bool = False) -> Explanation:
        """Why this was prefilled: what changed, where, at what cost, and what to do about it. Any thread, any time.

        Args:
            show_text: with what was there and what is there now, which is text of prompts.
        """
        from .observe.explain import explain_report

        return explain_report(self, show_text=show_text)

    @property
    def note(self) -> str:
        """What else there is to say; "" if nothing."""
        return "" if self.retokenized_at is None else "same text, other tokens"


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds on the monotonic clock. `ttft_s` counts from submission to the first sampled token; nan without one."""

    queue_s: float
    restore_s: float
    prefill_s: float
    ttft_s: float
    decode_s: float


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural log of the probability under the model's own distribution, before any sampler."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """(token id, logprob) of the most probable tokens, best first."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of a reply as it comes. `text` is valid UTF-8 at every chunk and may be empty."""

    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None


@dataclass(frozen=True, slots=True)
class Completion:
    """The answer to one request.

    `token_ids` are all sampled tokens: an end-of-generation token and those of a stop string too. `text` stops before
    either. `logits` has shape (n_vocab,), float32, the caller's own copy, of the last prompt token.
    """

    text: str = field(repr=False)
    token_ids: tuple[int, ...] = field(repr=False)
    finish_reason: FinishReason
    usage: Usage
    cache: CacheReport
    timings: Timings
    slot_id: SlotId | None
    """The slot it ran in; None if it was cancelled before it had one."""
    prompt_token_ids: Ids = field(repr=False, compare=False)
    """The prompt as it was used: int32, shape (n_tokens,), read-only."""
    logprobs: tuple[TokenLogprob, ...] | None = field(default=None, repr=False)
    logits: Logits | None = field(default=None, repr=False)

    def __str__(self) -> str:
        from .observe import lines

        return lines.completion(self)

    def _repr_html_(self) -> str:
        from .observe import display

        return display.completion(self)
