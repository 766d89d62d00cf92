"""A sampler chain, made from `SamplingParams`. Owned by one request, used and closed on the scheduler's thread."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any

from ..errors import GrammarError, NativeError
from .library import collect_log, load

if TYPE_CHECKING:
    from ..request import Ids, SamplingParams
    from .model import NativeModel


class NativeSampler:
    """Owns a `plc_sampler *`."""

    def __init__(self, model: NativeModel, params: SamplingParams, prompt: Ids) -> None:
        """Make the chain; the penalties have seen the end of `prompt`, the grammar has seen nothing.

        Raises:
            GrammarError: the grammar does not parse.
        Source: llama_sampler_chain_init and the llama_sampler_init_* it names.
        """
        module = load()
        ffi, lib = module.ffi, module.lib
        self._lib = lib
        self._guard = model.guard
        self.pointer: Any = ffi.NULL
        ids = ffi.new("int32_t[]", list(params.logit_bias))
        values = ffi.new("float[]", list(params.logit_bias.values()))
        grammar = ffi.NULL if params.grammar is None else ffi.new("char[]", params.grammar.encode())
        constraint = ffi.NULL if params.constraint is None else ffi.new("char[]", params.constraint.encode())
        native = ffi.new(
            "struct plc_sampler_params *",
            {
                "temperature": params.temperature,
                "top_k": params.top_k,
                "top_p": params.top_p,
                "min_p": params.min_p,
                "penalty_last_n": params.penalty_last_n,
                "repeat_penalty": params.repeat_penalty,
                "frequency_penalty": params.frequency_penalty,
                "presence_penalty": params.presence_penalty,
                "seed": secrets.randbelow(2**32 - 1) if params.seed is None else params.seed,
                "min_tokens": params.min_tokens,
                "n_bias": len(params.logit_bias),
                "bias_ids": ids,
                "bias_values": values,
                "grammar": grammar,
                "constraint": constraint,
                "n_logprobs": params.top_logprobs if params.logprobs else -1,
            },
        )
        history = prompt[max(0, len(prompt) - params.penalty_last_n) :]
        pointer = lib.plc_sampler_new(
            model.pointer,
            native,
            ffi.from_buffer("int32_t[]", history) if len(history) else ffi.NULL,
            len(history),
        )
        if not pointer:
            log = collect_log()
            if params.grammar is not None or params.constraint is not None:
                raise GrammarError(log or "it does not parse, or has no rule named root")
            raise NativeError("llama_sampler_init", -1, log)
        self.pointer = pointer

    def close(self) -> None:
        """Free the chain; repeatable."""
        pointer, self.pointer = self.pointer, None
        if pointer:
            self._lib.plc_sampler_free(pointer)

    def __del__(self) -> None:
        if getattr(self, "pointer", None) and not self._guard.is_forked:
            self.close()
