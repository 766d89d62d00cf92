"""`scheduler.backend.Backend` over one llama.cpp context. One thread owns it after construction.

Knows sequences, cells and states; not what tokens mean, and not why they are fed or dropped.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..config import MAX_PARKED, MAX_SLOTS, EngineSettings, Memory
from ..errors import (
    ConfigError,
    ContextTooLargeError,
    InternalError,
    ModelUnsupportedError,
    NativeError,
)
from ..request import TokenLogprob
from ..scheduler.backend import Group, Outcome, StepResult, Traits
from .capture import NativeCapture
from .library import collect_log, load, tune_log_level
from .sampler import NativeSampler

if TYPE_CHECKING:
    import numpy.typing as npt

    from ..request import CaptureMode, Ids, SamplingParams
    from .model import NativeModel

_FLASH_ATTENTION = {"auto": "AUTO", "on": "ENABLED", "off": "DISABLED"}


class NativeContext:
    """Owns a `plc_context *`."""

    def __init__(self, model: NativeModel, params: EngineSettings) -> None:
        """Create the context.

        Raises:
            ContextTooLargeError: llama.cpp could not allocate it.
            ModelUnsupportedError: the model keeps no memory (an encoder), or has no decoder.
            ConfigError: an adapter was refused.
        Source: llama_init_from_model.
        """
        module = load()
        self._ffi, self._lib = module.ffi, module.lib
        self._model = model
        self._ctx: Any = None
        model.guard.__enter__()
        try:
            self._create(params)
        except BaseException:
            self._free()
            model.guard.__exit__()
            raise

    def _create(self, params: EngineSettings) -> None:
        ffi, lib = self._ffi, self._lib
        tune_log_level()
        collect_log()
        paths = [ffi.new("char[]", os.fsencode(path)) for path, _ in params.adapters]
        adapters = ffi.new("struct plc_adapter[]", len(paths))
        for index, (path, (_, scale)) in enumerate(zip(paths, params.adapters, strict=True)):
            adapters[index].path, adapters[index].scale = path, scale
        native = ffi.new(
            "struct plc_context_params *",
            {
                # one stream per slot in exact mode: llama.cpp divides the cells it is given among the streams
                "n_cells": -(-params.n_ctx // 256) * 256 * params.n_slots if params.exact else params.kv_tokens,
                "n_seq_max": params.n_slots,
                "n_batch": params.n_batch,
                "n_ubatch": params.n_ubatch,
                "n_threads": params.n_threads,
                "n_threads_batch": params.n_threads,
                "type_k": getattr(lib, f"GGML_TYPE_{params.type_k.upper()}"),
                "type_v": getattr(lib, f"GGML_TYPE_{params.type_v.upper()}"),
                "flash_attn": getattr(
                    lib,
                    f"LLAMA_FLASH_ATTN_TYPE_{_FLASH_ATTENTION[params.flash_attention]}",
                ),
                "kv_unified": not params.exact,
                "swa_full": params.exact,
                "offload_kqv": params.offload_kqv,
                "rope_scaling": getattr(
                    lib,
                    f"LLAMA_ROPE_SCALING_TYPE_{(params.rope_scaling or 'unspecified').upper()}",
                ),
                "rope_freq_base": params.rope_freq_base,
                "rope_freq_scale": params.rope_freq_scale,
            },
        )
        failed = ffi.new("int32_t *")
        self._ctx = lib.plc_context_new(self._model.pointer, native, adapters, len(paths), failed)
        log = collect_log()
        if not self._ctx:
            self._ctx = None
            if failed[0] >= 0:
                raise ConfigError("adapters", params.adapters[failed[0]][0], f"a LoRA file that fits the model: {log}")
            raise ContextTooLargeError(params.n_ctx, params.n_slots, log)
        self._traits = self._read_traits(params)
        self._n_swa = self._model.n_swa
        n_feeds = 4 * params.n_slots + 4
        n_tokens = 2 * self._traits.n_batch + params.n_slots
        self._feeds = ffi.new("struct plc_feed[]", n_feeds)
        self._feed = [self._feeds[i] for i in range(n_feeds)]
        self._outputs = ffi.new("struct plc_output[]", n_feeds)
        self._output = [self._outputs[i] for i in range(n_feeds)]
        self._sizes = ffi.new("int32_t[]", n_feeds)
        self._tokens = ffi.new("int32_t[]", n_tokens)
        self._token_array = np.frombuffer(ffi.buffer(self._tokens), dtype=np.int32)
        self._result = ffi.new("struct plc_step_result *")
        self._extent = ffi.new("struct plc_extent *")
        self._capture = ffi.new("struct plc_capture **")

    def _read_traits(self, params: EngineSettings) -> Traits:
        lib = self._lib
        kinds = {
            lib.LLAMA_MEMORY_KIND_OTHER: Memory.OTHER,
            lib.LLAMA_MEMORY_KIND_KV: Memory.FULL,
            lib.LLAMA_MEMORY_KIND_KV_WINDOW: Memory.SLIDING,
            lib.LLAMA_MEMORY_KIND_HYBRID: Memory.HYBRID,
            lib.LLAMA_MEMORY_KIND_RECURRENT: Memory.RECURRENT,
        }
        kind = lib.plc_context_memory_kind(self._ctx)
        if kind < 0 or not self._model.has_decoder:
            raise ModelUnsupportedError(
                self._model.description,
                "it keeps no memory of a sequence, so it cannot generate",
            )
        n_batch, n_ubatch = (
            lib.plc_context_n_batch(self._ctx),
            lib.plc_context_n_ubatch(self._ctx),
        )
        if n_batch < params.n_slots:
            raise ConfigError("n_batch", n_batch, f"at least one row per slot, {params.n_slots}")
        if lib.plc_context_n_cells_seq(self._ctx) < params.n_ctx or (
            not params.exact and lib.plc_context_n_cells(self._ctx) < params.kv_tokens
        ):
            raise InternalError("llama.cpp created a smaller context than was asked for")
        return Traits(
            memory=kinds[kind],
            exact=params.exact,
            n_slots=params.n_slots,
            n_ctx=params.n_ctx,
            kv_tokens=params.n_ctx * params.n_slots if params.exact else params.kv_tokens,
            n_batch=n_batch // n_ubatch * n_ubatch,
            n_ubatch=n_ubatch,
            n_vocab=self._model.n_vocab,
            eog_ids=self._model.eog_ids,
            n_parked=0 if params.exact or not kinds[kind].can_park else min(MAX_PARKED, MAX_SLOTS + 1 - params.n_slots),
        )

    @property
    def traits(self) -> Traits:
        return self._traits

    # -- sequences --

    def _read_extent(self, seq_id: int) -> Any:
        code = self._lib.plc_seq_extent(self._ctx, seq_id, self._extent)
        if code:
            raise NativeError("llama_memory_seq_pos_max", code, collect_log())
        return self._extent

    def length(self, seq_id: int) -> int | None:
        extent = self._read_extent(seq_id)
        span, state = extent.span_max, extent.state_max
        if span == -2:
            return int(state) + 1
        if state in (-2, span):
            return int(span) + 1
        return None

    def rewind_floor(self, seq_id: int) -> int:
        extent = self._read_extent(seq_id)
        length = max(extent.span_max, extent.state_max) + 1
        memory = self._traits.memory
        if memory is Memory.FULL:
            return min(1, length)
        if memory is Memory.SLIDING:
            # cutting to c needs window cells from max(0, c - n_swa + 1) on
            first = extent.state_min
            return min(1 if first <= 0 else first + self._n_swa - 1, length)
        return int(length)

    def trim(self, seq_id: int, n_tokens: int) -> bool:
        code = self._lib.plc_seq_trim(self._ctx, seq_id, n_tokens)
        if code < 0:
            raise NativeError("llama_memory_seq_rm", code, collect_log())
        return bool(code)

    def erase(self, seq_id: int) -> None:
        code = self._lib.plc_seq_erase(self._ctx, seq_id)
        if code:
            raise NativeError("llama_memory_seq_rm", code, collect_log())

    def share(self, donor_id: int, seq_id: int, n_tokens: int) -> None:
        code = self._lib.plc_seq_share(self._ctx, donor_id, seq_id, n_tokens)
        if code:
            raise NativeError("llama_memory_seq_cp", code, collect_log())

    # -- state --

    def save_state(self, seq_id: int) -> bytearray:
        size = self._lib.plc_state_size(self._ctx, seq_id)
        if not size:
            raise NativeError("llama_state_seq_get_size_ext", 0, collect_log())
        try:
            state = bytearray(size)
        except MemoryError:
            raise NativeError("llama_state_seq_get_data_ext", 0, f"no memory for {size} bytes") from None
        written = self._lib.plc_state_get(self._ctx, seq_id, self._ffi.from_buffer("uint8_t[]", state), size)
        if written != size:
            raise NativeError("llama_state_seq_get_data_ext", written, collect_log())
        return state

    def load_state(self, seq_id: int, state: bytes | bytearray | npt.NDArray[np.uint8], n_tokens: int) -> None:
        source = self._ffi.from_buffer("uint8_t[]", state)
        code = self._lib.plc_state_set(self._ctx, seq_id, source, len(source), n_tokens)
        if code:
            raise NativeError("llama_state_seq_set_data_ext", code, collect_log())

    def state_bytes(self, seq_id: int) -> int:
        size = int(self._lib.plc_capture_size(self._ctx, seq_id))
        if not size:
            raise NativeError("llama_state_seq_get_size_ext", 0, collect_log())
        return size

    def staging_bytes(self, n_bytes: int) -> int:
        return int(self._lib.plc_capture_staging(self._ctx, n_bytes))

    def capture_mode(self, seq_id: int) -> CaptureMode:
        lib = self._lib
        modes: dict[int, CaptureMode] = {
            lib.LLAMA_CAPTURE_MODE_HOST: "host",
            lib.LLAMA_CAPTURE_MODE_STAGING: "staging",
            lib.LLAMA_CAPTURE_MODE_SNAPSHOT: "snapshot",
        }
        return modes.get(lib.plc_capture_mode(self._ctx, seq_id), "synchronous")

    def begin_capture(self, seq_id: int, data: npt.NDArray[np.uint8]) -> NativeCapture | None:
        code = self._lib.plc_capture_begin(
            self._ctx, seq_id, self._ffi.from_buffer("uint8_t[]", data), len(data), self._capture
        )
        if code == self._lib.PLC_BUSY:
            return None
        if code:
            raise NativeError("llama_state_capture_begin", code, collect_log())
        return NativeCapture(self._lib, self._capture[0], data)

    def resume(self, donor_id: int | None, seq_id: int, n_tokens: int, state: npt.NDArray[np.uint8]) -> None:
        donor = -1 if donor_id is None else donor_id
        source = self._ffi.from_buffer("uint8_t[]", state)
        code = self._lib.plc_seq_resume(self._ctx, donor, seq_id, n_tokens, source, len(state))
        if code:
            raise NativeError("llama_state_seq_set_data_ext", code, collect_log())

    def share_span(self, donor_id: int, seq_id: int, n_tokens: int) -> None:
        code = self._lib.plc_span_share(self._ctx, donor_id, seq_id, n_tokens)
        if code:
            raise NativeError("llama_memory_seq_cp", code, collect_log())

    def trim_span(self, seq_id: int, n_tokens: int) -> None:
        code = self._lib.plc_span_trim(self._ctx, seq_id, n_tokens)
        if code:
            raise NativeError("llama_memory_seq_rm", code, collect_log())

    def span_length(self, seq_id: int) -> int:
        n_tokens = int(self._lib.plc_span_length(self._ctx, seq_id))
        if n_tokens < 0:
            raise NativeError("llama_memory_seq_pos_max", n_tokens, collect_log())
        return n_tokens

    def span_size(self, seq_id: int, start: int, end: int) -> int:
        """Bytes of the span's cells [start, end). Raises NativeError where the sequence does not hold them all."""
        size = int(self._lib.plc_span_size(self._ctx, seq_id, start, end))
        if not size:
            raise NativeError("llama_state_seq_range_size", 0, collect_log())
        return size

    def save_span(
        self, seq_id: int, start: int, end: int, data: npt.NDArray[np.uint8] | None = None
    ) -> npt.NDArray[np.uint8]:
        """The span's cells [start, end), in `data` or in an array of their own; independent of the sequence."""
        if data is None:
            size = self.span_size(seq_id, start, end)
            try:
                data = np.empty(size, dtype=np.uint8)
            except MemoryError:
                raise NativeError("llama_state_seq_get_range", 0, f"no memory for {size} bytes") from None
        size = len(data)
        written = self._lib.plc_span_get(self._ctx, seq_id, start, end, self._ffi.from_buffer("uint8_t[]", data), size)
        if written != size:
            raise NativeError("llama_state_seq_get_range", written, collect_log())
        return data

    def append_span(self, seq_id: int, start: int, end: int, data: bytes | bytearray | npt.NDArray[np.uint8]) -> None:
        """Add saved cells to a sequence whose span ends at `start`; the state part stays as it is.

        Raises:
            NativeError: the bytes were refused; the sequence is what it was.
        """
        source = self._ffi.from_buffer("uint8_t[]", data)
        code = self._lib.plc_span_append(self._ctx, seq_id, start, end, source, len(source))
        if code:
            raise NativeError("llama_state_seq_append_range", code, collect_log())

    # -- the step --

    def new_sampler(self, params: SamplingParams, prompt: Ids) -> NativeSampler:
        return NativeSampler(self._model, params, prompt)

    def step(self, groups: Sequence[Group]) -> StepResult:
        feed_slots, tokens, null = self._feed, self._tokens, self._ffi.NULL
        index = n_tokens = 0
        logits: dict[int, Any] = {}
        for group_index, group in enumerate(groups):
            self._sizes[group_index] = len(group)
            for feed in group:
                native = feed_slots[index]
                native.seq_id = feed.seq_id
                native.start = feed.start
                sampler = feed.sampler
                native.sampler = null if sampler is None else sampler.pointer  # type: ignore[attr-defined]
                n = len(feed.tokens)
                native.n_tokens = n
                if n == 1:
                    tokens[n_tokens] = feed.tokens[0]
                else:
                    self._token_array[n_tokens : n_tokens + n] = feed.tokens
                if feed.want_logits:
                    row = logits[index] = np.empty(self._traits.n_vocab, dtype=np.float32)
                    native.logits = self._ffi.from_buffer("float[]", row)
                else:
                    native.logits = null
                n_tokens += n
                index += 1
        result = self._result
        self._lib.plc_step(
            self._ctx,
            self._feeds,
            self._sizes,
            len(groups),
            tokens,
            self._outputs,
            result,
        )
        return self._read_result(groups, result, logits)

    def _read_result(self, groups: Sequence[Group], result: Any, logits: dict[int, Any]) -> StepResult:
        n_done = result.n_groups_done
        n_feeds = sum(len(group) for group in groups[:n_done])
        outputs = self._output
        sampled = [outputs[i].token for i in range(n_feeds)]
        log = collect_log() if result.log_pending else ""
        step = StepResult(
            self._outcome(result.code),
            n_done,
            result.code,
            sampled,
            logits=logits,
            log=log,
        )
        index = 0
        for group in groups[:n_done]:
            for feed in group:
                if feed.sampler is not None:
                    self._read_sampled(step, index)
                index += 1
        return step

    def _read_sampled(self, step: StepResult, index: int) -> None:
        output = self._output[index]
        if output.failed:
            step.tokens[index] = -1
            step.sampler_errors = {
                **step.sampler_errors,
                index: step.log or "sampling failed",
            }
        elif output.has_logprob:
            top = tuple((output.top_ids[i], output.top_logprobs[i]) for i in range(output.n_top))
            step.logprobs = {
                **step.logprobs,
                index: TokenLogprob(output.token, output.logprob, top),
            }

    def _outcome(self, code: int) -> Outcome:
        if code == 0:
            return Outcome.DONE
        if code == 1:
            return Outcome.NO_CELLS
        if code in (-1, self._lib.PLC_E_POSITION, self._lib.PLC_E_ARGUMENT):
            return Outcome.REFUSED
        return Outcome.LOST

    # -- end --

    def _free(self) -> None:
        context, self._ctx = self._ctx, None
        if context:
            self._lib.plc_context_free(context)

    def close(self) -> None:
        """Free the context and let go of the model; repeatable. In a forked child nothing is freed."""
        if self._ctx is None:
            return
        if self._model.guard.is_forked:
            self._ctx = None
            return
        self._free()
        self._model.guard.__exit__()

    def __del__(self) -> None:
        if getattr(self, "_ctx", None) is not None:
            self.close()


def memory_of(model: NativeModel) -> Memory:
    """What the model keeps of a sequence, asked of a context as small as there is. Raises ModelUnsupportedError."""
    settings = EngineSettings(
        n_ctx=256,
        n_slots=1,
        kv_tokens=256,
        n_batch=32,
        n_ubatch=32,
        n_threads=1,
        type_k="f16",
        type_v="f16",
        flash_attention="auto",
        adapters=(),
        exact=False,
        offload_kqv=False,
        rope_scaling=None,
        rope_freq_base=0.0,
        rope_freq_scale=0.0,
    )
    context = NativeContext(model, settings)
    try:
        return context.traits.memory
    finally:
        context.close()
