"""`Model`: a GGUF file, loaded once, shared by engines. Safe to use from any thread."""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from .errors import ConfigError, InvalidRequestError, ModelFormatError
from .native.context import memory_of
from .native.model import ModelParams, NativeModel
from .observe.progress import LoadBar
from .store.fingerprint import fingerprint, user_cache_dir
from .store.gguf_check import check_model
from .text.validate import check_ids

if TYPE_CHECKING:
    from typing_extensions import Self

    from .engine import Engine


class Model:
    """A loaded model.

    Args:
        path: a GGUF file; of a split model, its first part.
        n_gpu_layers: layers to put on a device; -1: all that fit llama.cpp's rule.
        main_gpu: the device used when a model is not split over several.
        use_mmap: None leaves the choice to llama.cpp.
        use_mlock: keep the weights from being swapped out.
        check_tensors: let llama.cpp check every weight for invalid numbers while loading; slow.
        progress: a progress bar while loading; None: when standard error is a terminal, or in a notebook.
    Raises:
        ModelNotFoundError, ModelFormatError: before native code sees the file.
        ModelLoadError: llama.cpp refused it, with what it said.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        n_gpu_layers: int = -1,
        main_gpu: int = 0,
        use_mmap: bool | None = None,
        use_mlock: bool = False,
        check_tensors: bool = False,
        progress: bool | None = None,
    ) -> None:
        for name, value in (("n_gpu_layers", n_gpu_layers), ("main_gpu", main_gpu)):
            if isinstance(value, bool) or not isinstance(value, int) or not -(2**31) <= value < 2**31:
                raise ConfigError(name, value, "a 32-bit integer")
        for name, flag in (("use_mlock", use_mlock), ("check_tensors", check_tensors)):
            if not isinstance(flag, bool):
                raise ConfigError(name, flag, "True or False")
        if use_mmap is not None and not isinstance(use_mmap, bool):
            raise ConfigError("use_mmap", use_mmap, "True, False or None")
        if not isinstance(path, (str, os.PathLike)) or not os.fspath(path):
            raise ConfigError("path", path, "a path of a GGUF file")
        self.path = Path(path).absolute()
        self._summary, self._paths = check_model(self.path)
        self._files = self._identify()
        with LoadBar(self.path.name, progress) as bar:
            self._native = NativeModel(
                self.path,
                ModelParams(n_gpu_layers, main_gpu, use_mmap, use_mlock, check_tensors),
                bar.update,
            )
        self._require_unchanged()
        self._n_gpu_layers = n_gpu_layers
        original = self._summary.metadata.get(f"{self.architecture}.rope.scaling.original_context_length")
        self._n_ctx_original = original if isinstance(original, int) and original > 0 else self.n_ctx_train
        self._fingerprint: str | None = None
        self._memory: str | None = None
        self._engines: weakref.WeakSet[Engine] = weakref.WeakSet()

    @classmethod
    def from_pretrained(
        cls,
        repo_id: str,
        filename: str,
        *,
        revision: str | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
        token: str | bool | None = None,
        local_files_only: bool | None = None,
        **options: Any,
    ) -> Model:
        """Load a file of a Hugging Face repository, downloading it into the hub's cache if it is not there.

        Args:
            filename: a file's name, or a glob that fits one model, e.g. "*Q4_K_M.gguf". All parts of a split model
                are fetched.
            local_files_only: use the cache and never the network; None: as HF_HUB_OFFLINE says.
            options: those of `Model`.
        Raises:
            ModelNotFoundError: no such repository, revision or file; offline and not cached.
            ConfigError: the glob fits several models; the message lists them.
        """
        from .hub import fetch_model  # huggingface_hub takes its time to import

        path = fetch_model(
            repo_id,
            filename,
            revision=revision,
            cache_dir=cache_dir,
            token=token,
            local_files_only=local_files_only,
        )
        return cls(path, **options)

    # -- facts --

    @property
    def name(self) -> str:
        """The model's own name, or its file's."""
        return self._summary.name or self.path.name

    @property
    def architecture(self) -> str:
        return self._summary.architecture

    @property
    def description(self) -> str:
        """llama.cpp's one-line description."""
        return self._native.description

    @property
    def n_vocab(self) -> int:
        return self._native.n_vocab

    @property
    def n_ctx_train(self) -> int:
        """Tokens of context the model was trained with."""
        return self._native.n_ctx_train

    @property
    def size_bytes(self) -> int:
        return self._native.size_bytes

    @property
    def eog_ids(self) -> frozenset[int]:
        """Tokens that end a generation."""
        return self._native.eog_ids

    @property
    def memory(self) -> str:
        """What the model keeps of a sequence: "full", "sliding", "hybrid", "recurrent" or "other".

        Asked of llama.cpp by way of a small context the first time. Raises ModelUnsupportedError for an encoder.
        """
        if self._memory is None:
            self._memory = memory_of(self._native).value
        return self._memory

    @property
    def fingerprint(self) -> str:
        """Hex digest over every byte of the file: weights, tokenizer and configuration. Hashed once per file.

        Raises:
            ModelFormatError: the file is no longer the one that was loaded, so nobody can say what that was.
        """
        if self._fingerprint is None:
            digest = fingerprint(self._paths, cache_dir=user_cache_dir())
            self._require_unchanged()
            self._fingerprint = digest
        return self._fingerprint

    def _identify(self) -> tuple[tuple[int, ...], ...]:
        """What tells a replaced file from the same one: device, inode, size, time of the last change, per file."""
        stats = [os.stat(path) for path in self._paths]
        return tuple((stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns) for stat in stats)

    def _require_unchanged(self) -> None:
        try:
            is_same = self._identify() == self._files
        except OSError:
            is_same = False
        if not is_same:
            raise ModelFormatError(str(self.path), "it was replaced or changed after it was loaded; load it again")

    def _adapters_digest(self, adapters: tuple[tuple[str, float], ...]) -> str:
        """Identifies LoRA files and their scales; "" for none."""
        return ",".join(
            f"{fingerprint([Path(path)], cache_dir=user_cache_dir())}*{scale!r}" for path, scale in adapters
        )

    # -- text --

    def tokenize(self, text: str, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """Token ids of `text`.

        Args:
            add_special: add what the model wants at the start and end (BOS, EOS).
            parse_special: read control tokens that the text spells, instead of taking them as text.
        Raises:
            ModelUnsupportedError: the model has no vocabulary.
            InvalidRequestError: `text` is no text.
        """
        if not isinstance(text, str):
            raise InvalidRequestError("text", f"expected a string, got {type(text).__name__}")
        return list(self._native.tokenize(text, bool(add_special), bool(parse_special)).tolist())

    def detokenize(self, ids: Sequence[int], *, special: bool = False) -> str:
        """The text of `ids`; bytes that are not UTF-8 become U+FFFD. `special` renders control tokens."""
        if isinstance(ids, Sequence) and not len(ids):
            return ""
        return self._native.detokenize(check_ids(ids, self.n_vocab, field="ids"), bool(special)).decode(
            errors="replace"
        )

    # -- end --

    def close(self) -> None:
        """Close every engine made from this model, then free it. Repeatable."""
        for engine in list(self._engines):
            engine.close()
        self._native.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Model cannot be copied or pickled: it owns native memory")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = " closed" if self._native.is_closed else ""
        return f"<Model {self.name!r} {self.architecture}{state}>"
