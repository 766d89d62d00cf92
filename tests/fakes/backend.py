"""`scheduler.backend.Backend` over lists of cells. What is sampled follows from everything that was read."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from pyllamacache.config import Memory
from pyllamacache.errors import GrammarError, NativeError
from pyllamacache.request import SamplingParams
from pyllamacache.scheduler.backend import Feed, Group, StepResult, Traits

from .faults import NO_CELLS, POSITION, Call, Faults, GroupFault, outcome_of
from .rules import StepRecord, check_step
from .sampler import FakeSampler, SamplingFailed, logits_of
from .sequences import Sequences
from .vocabulary import ByteVocab

if TYPE_CHECKING:
    import numpy.typing as npt

    from pyllamacache.request import CaptureMode, Ids

REFUSED_STATE = -103


def make_traits(
    memory: Memory = Memory.FULL,
    *,
    exact: bool = False,
    n_slots: int = 2,
    n_ctx: int = 64,
    kv_tokens: int | None = None,
    n_batch: int = 8,
    n_ubatch: int = 4,
    eog_ids: frozenset[int] = frozenset(),
    n_parked: int = 0,
) -> Traits:
    """Traits as `native.context` would make them of an engine's settings. No token ends a reply unless one is named."""
    assert n_batch % n_ubatch == 0
    assert n_batch >= n_slots
    cells = n_ctx * n_slots if exact else kv_tokens or n_ctx
    return Traits(memory, exact, n_slots, n_ctx, cells, n_batch, n_ubatch, ByteVocab.n_vocab, eog_ids, n_parked)


class FakeCapture:
    """A state on its way: written when it is ready, which takes some polls."""

    def __init__(
        self, backend: FakeBackend, state: bytes, data: npt.NDArray[np.uint8], n_polls: int, *, fails: bool
    ) -> None:
        self._backend, self._state, self._data = backend, state, data
        self._n_polls, self._fails = n_polls, fails
        self.is_over = False

    @property
    def is_ready(self) -> bool:
        assert not self.is_over, "asked after its end"
        self._n_polls -= 1
        return self._n_polls < 0

    def finish(self) -> bool:
        assert not self.is_over, "ended twice"
        self.is_over = True
        self._backend.n_finished_captures += 1
        self._data[:] = list(self._state)
        del self._data  # the memory is the caller's again
        return not self._fails

    def cancel(self) -> None:
        assert not self.is_over, "ended twice"
        self.is_over = True
        del self._data


class FakeBackend:
    """A context in which every cell stores (token, position) and a value that depends on all it attended to.

    A step checks what it reads, unless `is_strict` is off: then a wrong read shows in the tokens that come out.
    """

    def __init__(
        self,
        traits: Traits,
        *,
        n_swa: int = 6,
        is_strict: bool = True,
        sequences_type: type[Sequences] = Sequences,
    ) -> None:
        self._traits = traits
        self._is_strict = is_strict
        self.sequences = sequences_type(traits, n_swa)
        self.faults = Faults()
        self.calls: list[StepRecord] = []
        """Every step that was asked for."""
        self.samplers: list[FakeSampler] = []
        self.captures: list[FakeCapture] = []
        self.max_captures = 2
        self.n_finished_captures = 0
        self.staging = 0
        self.capture_polls = 0
        """How often a capture says that it is not ready; on the CPU it is ready at once."""
        self.before_step: Callable[[], None] = lambda: None
        self.is_closed = False
        self._n_groups = 0
        self._n_samplings = 0
        self._thread: int | None = None

    # -- for tests --

    def content(self, seq_id: int) -> list[int] | None:
        """The tokens held, where there are cells to tell."""
        span = self.sequences.span
        return None if span is None else [cell.token for cell in span.cells(seq_id)]

    def n_used_cells(self) -> int:
        return 0 if self.sequences.span is None else self.sequences.span.n_used()

    def n_open_samplers(self) -> int:
        return sum(not sampler.is_closed for sampler in self.samplers)

    def fail_group(self, nth: int, fault: GroupFault) -> None:
        """Make the nth group from now fail; 1 is the next."""
        self.faults.by_group[self._n_groups + nth] = fault

    def fail_sampling(self, nth: int) -> None:
        """Make the nth sampling from now fail; 1 is the next."""
        self.faults.samplings.add(self._n_samplings + nth)

    # -- sequences --

    @property
    def traits(self) -> Traits:
        return self._traits

    def _enter(self, call: Call | None = None) -> None:
        """One thread owns a context."""
        assert not self.is_closed
        self._thread = self._thread or threading.get_ident()
        assert self._thread == threading.get_ident(), "called from two threads"
        if call is not None and self.faults.take(call):
            raise NativeError(call, -100, "ordered by a test")

    def length(self, seq_id: int) -> int | None:
        self._enter()
        ends = self.sequences.ends(seq_id)
        return ends[0] if len(set(ends)) == 1 else None

    def rewind_floor(self, seq_id: int) -> int:
        self._enter()
        return self.sequences.rewind_floor(seq_id)

    def trim(self, seq_id: int, n_tokens: int) -> bool:
        self._enter("trim_raises")
        assert n_tokens > 0
        return not self.faults.take("trim") and self.sequences.trim(seq_id, n_tokens)

    def erase(self, seq_id: int) -> None:
        self._enter("erase")
        self.sequences.cut(seq_id, 0)

    def share(self, donor_id: int, seq_id: int, n_tokens: int) -> None:
        self._enter("share")
        self.sequences.share(donor_id, seq_id, n_tokens)

    # -- the span alone --

    def share_span(self, donor_id: int, seq_id: int, n_tokens: int) -> None:
        self._enter("share_span")
        self.sequences.share_span(donor_id, seq_id, n_tokens)

    def trim_span(self, seq_id: int, n_tokens: int) -> None:
        self._enter()
        assert self.sequences.span is not None
        self.sequences.span.trim(seq_id, n_tokens)

    def span_length(self, seq_id: int) -> int:
        self._enter()
        assert self.sequences.span is not None
        return len(self.sequences.span.cells(seq_id))

    def span_size(self, seq_id: int, start: int, end: int) -> int:
        self._enter("span_size")
        return 16 * (end - start)

    def save_span(self, seq_id: int, start: int, end: int, data: npt.NDArray[np.uint8]) -> None:
        self._enter("save_span")
        cells = np.array(self.sequences.save_span(seq_id, start, end), dtype=np.int64)
        data[:] = cells.reshape(-1).view(np.uint8)

    def append_span(self, seq_id: int, start: int, end: int, data: npt.NDArray[np.uint8]) -> None:
        self._enter("append_span")
        cells = [(int(token), int(value)) for token, value in data.copy().view(np.int64).reshape(-1, 2)]
        assert len(cells) == end - start
        try:
            self.sequences.append_span(seq_id, start, cells)
        except ValueError as error:
            raise NativeError("llama_state_seq_append_range", REFUSED_STATE, str(error)) from None

    # -- captures --

    def _state_of(self, seq_id: int) -> bytes:
        return json.dumps(self.sequences.save_state(seq_id)).encode()

    def state_bytes(self, seq_id: int) -> int:
        self._enter("state_bytes")
        return len(self._state_of(seq_id))

    def staging_bytes(self, n_bytes: int) -> int:
        self._enter()
        return self.staging

    def capture_mode(self, seq_id: int) -> CaptureMode:
        self._enter()
        return "snapshot" if self.capture_polls else "host"

    def begin_capture(self, seq_id: int, data: npt.NDArray[np.uint8]) -> FakeCapture | None:
        self._enter("begin_capture")
        self.captures = [each for each in self.captures if not each.is_over]
        if len(self.captures) >= self.max_captures:
            return None
        state = self._state_of(seq_id)
        assert len(data) == len(state)
        self.captures.append(FakeCapture(self, state, data, self.capture_polls, fails=self.faults.take("capture")))
        return self.captures[-1]

    def resume(self, donor_id: int | None, seq_id: int, n_tokens: int, state: npt.NDArray[np.uint8]) -> None:
        self._enter("resume")
        try:
            self.sequences.resume(donor_id, seq_id, n_tokens, json.loads(state.tobytes()))
        except ValueError as error:
            raise NativeError("llama_state_seq_set_data_ext", REFUSED_STATE, str(error)) from None

    # -- the step --

    def new_sampler(self, params: SamplingParams, prompt: Ids) -> FakeSampler:
        self._enter("new_sampler")
        if params.grammar == "unparsable":
            raise GrammarError("it does not parse")
        self.samplers.append(FakeSampler(params, prompt, self.traits.eog_ids))
        return self.samplers[-1]

    def step(self, groups: Sequence[Group]) -> StepResult:
        self._enter("step_raises")
        self.before_step()
        self.calls.append(check_step(self.traits, groups))
        result = StepResult(outcome_of(0), 0, 0, [], {}, {}, {})
        for group in groups:
            self._n_groups += 1
            values: dict[int, int] = {}
            result.code = self._decode(group, values)
            result.outcome = outcome_of(result.code)
            if result.code:
                result.log = "ordered by a test"
                break
            for feed in group:
                self._sample(feed, values[feed.seq_id], result)
            result.n_groups_done += 1
        return result

    def _decode(self, group: Group, values: dict[int, int]) -> int:
        """`llama_decode`: its return value, and into `values` the last one of each sequence."""
        sequences = self.sequences
        if any(set(sequences.ends(feed.seq_id)) != {feed.start} for feed in group):
            return POSITION
        if self._is_strict:
            for feed in group:
                sequences.check_read(feed)
        fault = self.faults.group(self._n_groups, group)
        if fault is not None and fault.n_ubatches == 0:
            return fault.code
        n_tokens = sum(len(feed.tokens) for feed in group)
        if sequences.span is not None and n_tokens > sequences.span.n_free(group[0].seq_id):
            return NO_CELLS
        digests = {feed.seq_id: sequences.digest(feed.seq_id) for feed in group}
        rows = [(feed, offset) for feed in group for offset in range(len(feed.tokens))]
        n_ubatch = self.traits.n_ubatch
        for number, at in enumerate(range(0, n_tokens, n_ubatch), start=1):
            ubatch = rows[at : at + n_ubatch]
            values.update(sequences.decode(ubatch, digests))
            if fault is not None and fault.n_ubatches == number:
                sequences.spoil(ubatch)
                return fault.code
        return 0 if fault is None else fault.code

    def _sample(self, feed: Feed, value: int, result: StepResult) -> None:
        index, sampler = len(result.tokens), feed.sampler
        result.tokens.append(-1)
        if sampler is None and not feed.want_logits:
            return
        logits = logits_of(value, self.traits.n_vocab)
        if feed.want_logits:
            result.logits = {**result.logits, index: logits}
        if sampler is None:
            return
        assert isinstance(sampler, FakeSampler)
        self._n_samplings += 1
        try:
            if self._n_samplings in self.faults.samplings:
                raise SamplingFailed("ordered by a test")
            result.tokens[index] = sampler.sample(logits)
        except SamplingFailed as error:
            result.sampler_errors = {**result.sampler_errors, index: str(error)}
            return
        logprob = sampler.logprob(logits)
        if logprob is not None:
            result.logprobs = {**result.logprobs, index: logprob}

    # -- state --

    def save_state(self, seq_id: int) -> bytearray:
        self._enter("save_state")
        return bytearray(json.dumps(self.sequences.save(seq_id)).encode())

    def load_state(self, seq_id: int, state: bytes | bytearray | npt.NDArray[np.uint8], n_tokens: int) -> None:
        self._enter()
        before = self.sequences.save(seq_id)
        self.sequences.cut(seq_id, 0)
        try:
            if self.faults.take("load_state"):
                raise ValueError("ordered by a test")
            self.sequences.load(seq_id, json.loads(bytes(state)))
            if not self.sequences.holds(seq_id, n_tokens):
                raise ValueError("of another length")
        except ValueError as error:
            self.sequences.cut(seq_id, 0)
            if not self.faults.take("load_state_undo"):
                self.sequences.load(seq_id, before)
            raise NativeError("llama_state_seq_set_data_ext", REFUSED_STATE, str(error)) from None

    def close(self) -> None:
        self._enter("close")
        assert not self.n_open_samplers(), "a sampler outlives the context"
        assert all(each.is_over for each in self.captures), "a capture outlives the context"
        self.is_closed = True
