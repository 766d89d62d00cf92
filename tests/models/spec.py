"""What a tiny model is made of: one frozen value per model, the cache key of its file.

Defaults are sized for tests (about 1 MB, 2,000 tokens in well under a second on two cores) and for devices: attention
heads of 64 values, recurrent states whose sizes the CUDA and Vulkan kernels accept.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from typing import ClassVar, Literal

WRITER_VERSION = 1
"""Raise it when the same spec gives other bytes: cached files of the old version are then left alone."""

Kind = Literal["full", "sliding", "hybrid", "recurrent", "encoder"]
Vocabulary = Literal["bpe", "none"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TinySpec:
    """What all kinds share. `seed` decides every weight; nothing else is random."""

    kind: ClassVar[Kind]
    architecture: ClassVar[str]

    seed: int = 0
    n_layer: int = 3
    n_embd: int = 64
    n_ff: int = 128
    n_ctx_train: int = 8192
    n_head: int = 4
    n_head_kv: int = 2
    head_dim: int = 64
    vocabulary: Vocabulary = "bpe"
    """`none`: tokenizer type none, the same number of tokens, no text in or out."""
    add_bos: bool = False
    control_scale: float = 0.1
    """Scale of the output rows of control tokens: at 0.1 greedy decoding never ends by itself, at 1.0 it may."""
    is_readable: bool = False
    """Greedy decoding gives printable ASCII and nothing else, so that replies survive any client's JSON."""

    @property
    def digest(self) -> str:
        """Hex; equal iff kind, parameters and writer version are."""
        fields = {"kind": self.kind, "writer": WRITER_VERSION, **dataclasses.asdict(self)}
        if not self.is_readable:
            del fields["is_readable"]  # files from before there was this field keep their names
        return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def file_name(self) -> str:
        return f"tiny-{self.kind}-seed{self.seed}-{self.digest}.gguf"


@dataclass(frozen=True, slots=True, kw_only=True)
class FullSpec(TinySpec):
    """Arch llama: every layer attends to everything; memory is one KV cache."""

    kind: ClassVar[Kind] = "full"
    architecture: ClassVar[str] = "llama"


@dataclass(frozen=True, slots=True, kw_only=True)
class SlidingSpec(TinySpec):
    """Arch gemma3: layers with a sliding window, and every `full_every`-th layer without."""

    kind: ClassVar[Kind] = "sliding"
    architecture: ClassVar[str] = "gemma3"

    n_layer: int = 4
    window: int = 32
    full_every: int = 2
    add_bos: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class HybridSpec(TinySpec):
    """Arch qwen35 (M-RoPE): Gated DeltaNet layers, and every `full_every`-th layer attends."""

    kind: ClassVar[Kind] = "hybrid"
    architecture: ClassVar[str] = "qwen35"

    n_layer: int = 4
    full_every: int = 2
    value_heads: int = 4
    key_heads: int = 2
    state_size: int = 32
    conv_kernel: int = 4

    @property
    def conv_channels(self) -> int:
        return self.state_size * (2 * self.key_heads + self.value_heads)

    @property
    def recurrent_layers(self) -> tuple[int, ...]:
        return tuple(layer for layer in range(self.n_layer) if (layer + 1) % self.full_every)

    @property
    def state_bytes(self) -> int:
        """Recurrent state of one sequence: what a checkpoint of this model copies, without cell metadata."""
        matrix = self.value_heads * self.state_size * self.state_size
        return len(self.recurrent_layers) * (matrix + (self.conv_kernel - 1) * self.conv_channels) * 4


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrentSpec(TinySpec):
    """Arch mamba2: no attention at all; the state is the whole memory."""

    kind: ClassVar[Kind] = "recurrent"
    architecture: ClassVar[str] = "mamba2"

    state_heads: int = 8
    state_head_dim: int = 16
    state_size: int = 128
    groups: int = 1
    conv_kernel: int = 4

    @property
    def inner_size(self) -> int:
        return self.state_heads * self.state_head_dim

    @property
    def conv_channels(self) -> int:
        return self.inner_size + 2 * self.groups * self.state_size

    @property
    def state_bytes(self) -> int:
        """State of one sequence, without cell metadata."""
        matrix = self.inner_size * self.state_size
        return self.n_layer * (matrix + (self.conv_kernel - 1) * self.conv_channels) * 4


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderSpec(TinySpec):
    """Arch bert: an encoder without memory. The library must refuse it with a clear error."""

    kind: ClassVar[Kind] = "encoder"
    architecture: ClassVar[str] = "bert"

    n_layer: int = 2
    n_ctx_train: int = 512
    n_head: int = 2
    head_dim: int = 32


def default_specs(seed: int = 0) -> tuple[FullSpec, SlidingSpec, HybridSpec, RecurrentSpec]:
    """One of each memory kind, for parametrised tests."""
    return FullSpec(seed=seed), SlidingSpec(seed=seed), HybridSpec(seed=seed), RecurrentSpec(seed=seed)


def hybrid_27b_state(seed: int = 0, *, n_ctx_train: int = 8192) -> HybridSpec:
    """The recurrent state of Qwen3.5-27B (149.62 MiB per sequence) behind a small embedding: a file of about 150 MB."""
    return HybridSpec(
        seed=seed,
        n_layer=64,
        full_every=4,
        value_heads=48,
        key_heads=16,
        state_size=128,
        n_embd=32,
        n_ff=64,
        n_head=1,
        n_head_kv=1,
        n_ctx_train=n_ctx_train,
    )
