"""A loaded model and its vocabulary. Safe to use from any thread; closing waits for calls in progress.

Knows GGUF models as llama.cpp loads them; knows nothing of contexts but that they keep their model alive.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import (
    InternalError,
    InvalidRequestError,
    ModelLoadError,
    ModelUnsupportedError,
)
from .library import Guard, collect_log, load, tune_log_level

if TYPE_CHECKING:
    from ..request import Ids

_INT32_MIN = -(2**31)


@dataclass(frozen=True, slots=True)
class ModelParams:
    """How to load; the names are llama.cpp's."""

    n_gpu_layers: int = -1
    main_gpu: int = 0
    use_mmap: bool | None = None
    use_mlock: bool = False
    check_tensors: bool = False


class _Progress:
    """Carries a Python callback through `llama_progress_callback`; an exception aborts the load and is raised after."""

    def __init__(self, on_progress: Callable[[float], None] | None) -> None:
        self.on_progress = on_progress
        self.error: BaseException | None = None

    def __call__(self, fraction: float) -> bool:
        if self.on_progress is None:
            return True
        try:
            self.on_progress(fraction)
        except BaseException as error:  # noqa: BLE001 - KeyboardInterrupt too: it must leave through the C frame
            self.error = error
            return False
        return True


def _install_callback(module: Any) -> None:
    @module.ffi.def_extern(name="plc_on_progress", error=False)  # type: ignore[untyped-decorator]
    def _on_progress(fraction: float, user_data: Any) -> bool:
        return bool(module.ffi.from_handle(user_data)(fraction))


class NativeModel:
    """Owns a `llama_model *`."""

    def __init__(
        self,
        path: Path,
        params: ModelParams,
        on_progress: Callable[[float], None] | None = None,
    ) -> None:
        """Load `path`, which has passed `store.gguf_check`.

        Raises:
            ModelLoadError: llama.cpp refused it.
        Source: llama_model_load_from_file.
        """
        module = load()
        self._ffi, self._lib = module.ffi, module.lib
        self._guard = Guard(f"model {path.name}")
        self._model: Any = None
        tune_log_level()
        collect_log()
        _install_callback(module)
        progress = _Progress(on_progress)
        handle = self._ffi.new_handle(progress)
        native = self._ffi.new(
            "struct plc_model_params *",
            {
                "n_gpu_layers": params.n_gpu_layers,
                "main_gpu": params.main_gpu,
                "use_mmap": -1 if params.use_mmap is None else int(params.use_mmap),
                "use_mlock": int(params.use_mlock),
                "check_tensors": int(params.check_tensors),
            },
        )
        model = self._lib.plc_model_load(os.fsencode(path), native, self._lib.plc_on_progress, handle)
        log = collect_log()
        if progress.error is not None:
            if model:
                self._lib.plc_model_free(model)
            raise progress.error
        if not model:
            raise ModelLoadError(str(path), log)
        self._model = model
        self._vocab = self._lib.llama_model_get_vocab(model)
        self.has_vocab = self._lib.llama_vocab_type(self._vocab) != self._lib.LLAMA_VOCAB_TYPE_NONE
        self.n_vocab = int(self._lib.llama_vocab_n_tokens(self._vocab))
        self.n_ctx_train = int(self._lib.llama_model_n_ctx_train(model))
        self.n_swa = int(self._lib.llama_model_n_swa(model))
        self.n_head = int(self._lib.llama_model_n_head(model))
        self.size_bytes = int(self._lib.llama_model_size(model))
        self.n_params = int(self._lib.llama_model_n_params(model))
        self.has_decoder = bool(self._lib.llama_model_has_decoder(model))
        self.description = self._read_text(self._lib.llama_model_desc)
        self.eog_ids = self._read_eog_ids()
        self._pieces: dict[int, bytes] = {}

    def _read_text(self, getter: Callable[..., int]) -> str:
        buffer = self._ffi.new("char[]", 256)
        getter(self._model, buffer, 256)
        return str(self._ffi.string(buffer).decode("utf-8", "replace"))

    def _read_eog_ids(self) -> frozenset[int]:
        if not self.has_vocab:
            return frozenset()
        n = self._lib.plc_eog_tokens(self._vocab, self._ffi.NULL, 0)
        ids = self._ffi.new("int32_t[]", max(n, 1))
        self._lib.plc_eog_tokens(self._vocab, ids, n)
        return frozenset(ids[i] for i in range(n))

    @property
    def is_closed(self) -> bool:
        return self._guard.is_closed

    @property
    def guard(self) -> Guard:
        """Held by a context while it exists, so that a model is never freed under it."""
        return self._guard

    @property
    def pointer(self) -> Any:
        """For `native/` only, inside `with guard`."""
        if self._model is None:
            raise InternalError("model pointer used after close")
        return self._model

    def _require_vocab(self, what: str) -> None:
        if not self.has_vocab:
            raise ModelUnsupportedError(what, "the model has no vocabulary; send token ids, and read token ids")

    def tokenize(self, text: str, add_special: bool, parse_special: bool) -> Ids:
        """Token ids, int32 (n_tokens,). Raises ModelUnsupportedError, InvalidRequestError. Source: llama_tokenize."""
        self._require_vocab("tokenize")
        try:
            data = text.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequestError("text", f"not valid Unicode at character {error.start}: {error.reason}") from None
        if len(data) > 2**31 - 2**16:
            raise InvalidRequestError("text", f"{len(data)} bytes are more than llama.cpp tokenizes at once")
        with self._guard:
            n_max = len(data) + 16  # a token is a byte at least; the rest is for what the model adds
            ids = np.empty(n_max, dtype=np.int32)
            n = self._lib.plc_tokenize(
                self._vocab, data, len(data), self._ffi.from_buffer("int32_t[]", ids), n_max, add_special, parse_special
            )
            if n < 0:
                raise InvalidRequestError(
                    "text", f"llama.cpp could not tokenize {len(data)} bytes: {collect_log() or n}"
                )
            return ids[:n].copy()

    def detokenize(self, ids: Ids, unparse_special: bool) -> bytes:
        """The text of `ids` as bytes, which may end inside a character. Source: llama_detokenize."""
        self._require_vocab("detokenize")
        data = np.ascontiguousarray(ids, dtype=np.int32)
        if data.size and (int(data.min()) < 0 or int(data.max()) >= self.n_vocab):
            raise InvalidRequestError("ids", f"token ids must lie in [0, {self.n_vocab})")
        with self._guard:
            n_max = data.size * 8 + 16
            while True:
                buffer = self._ffi.new("char[]", n_max)
                n = self._lib.plc_detokenize(
                    self._vocab,
                    self._ffi.from_buffer("int32_t[]", data) if data.size else self._ffi.NULL,
                    data.size,
                    buffer,
                    n_max,
                    False,
                    unparse_special,
                )
                if n >= 0:
                    return bytes(self._ffi.buffer(buffer, n))
                if n == _INT32_MIN:
                    raise ModelUnsupportedError("detokenize", collect_log() or "llama.cpp failed")
                n_max = -n

    def control_text(self, token_id: int) -> bytes:
        """How a control token is written where special tokens are parsed."""
        return self.detokenize(np.array([token_id], dtype=np.int32), True)

    def piece(self, token_id: int) -> bytes:
        """The bytes a generated token adds to the text; control tokens add none. Source: llama_token_to_piece."""
        piece = self._pieces.get(token_id)
        if piece is None:
            piece = self._pieces[token_id] = self._read_piece(token_id)
        return piece

    def _read_piece(self, token_id: int) -> bytes:
        if not self.has_vocab:
            return b""
        size = 64
        with self._guard:
            while True:
                buffer = self._ffi.new("char[]", size)
                n = self._lib.plc_token_to_piece(self._vocab, token_id, buffer, size, False)
                if n >= 0:
                    return bytes(self._ffi.buffer(buffer, n))
                if n == _INT32_MIN:
                    return b""
                size = -n

    def close(self) -> None:
        """Free the model. Waits for calls in progress and for contexts; repeatable."""
        if self._guard.close() and self._model is not None:
            model, self._model = self._model, None
            self._lib.plc_model_free(model)

    def __del__(self) -> None:
        # only reached when nothing uses the model any more: contexts hold a reference
        if getattr(self, "_model", None) is not None and not self._guard.is_forked:
            self.close()
