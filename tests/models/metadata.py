"""The key-value part of a tiny model's file: a list of typed entries, in file order."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from gguf import GGUFValueType

from .spec import EncoderSpec, HybridSpec, RecurrentSpec, SlidingSpec, TinySpec
from .vocabulary import BOS, CHAT_TEMPLATE, EOS, IM_END, MERGES, PAD, TOKENS

ROPE_FREQ_BASE = 10_000.0
RMS_EPSILON = 1e-6


@dataclass(frozen=True, slots=True)
class Entry:
    """One key-value pair; `item_type` only where `type` is ARRAY."""

    key: str
    value: Any
    type: GGUFValueType
    item_type: GGUFValueType | None = None


@dataclass(slots=True)
class _Entries:
    prefix: str
    entries: list[Entry] = field(default_factory=list)

    def u32(self, key: str, value: int) -> None:
        self._add(key, value, GGUFValueType.UINT32)

    def f32(self, key: str, value: float) -> None:
        self._add(key, value, GGUFValueType.FLOAT32)

    def flag(self, key: str, value: bool) -> None:
        self._add(key, value, GGUFValueType.BOOL)

    def text(self, key: str, value: str) -> None:
        self._add(key, value, GGUFValueType.STRING)

    def array(self, key: str, value: list[Any], item_type: GGUFValueType) -> None:
        self._add(key, value, GGUFValueType.ARRAY, item_type)

    def _add(self, key: str, value: Any, type_: GGUFValueType, item_type: GGUFValueType | None = None) -> None:
        full_key = key if key.startswith(("general.", "tokenizer.")) else f"{self.prefix}.{key}"
        self.entries.append(Entry(full_key, value, type_, item_type))


def metadata(spec: TinySpec) -> list[Entry]:
    """All entries of a model's file."""
    out = _Entries(spec.architecture)
    out.text("general.architecture", spec.architecture)
    out.text("general.name", f"tiny {spec.kind} seed {spec.seed}")
    out.u32("general.file_type", 0)  # all F32
    _add_shape(out, spec)
    _add_tokenizer(out, spec)
    return out.entries


def _add_shape(out: _Entries, spec: TinySpec) -> None:
    out.u32("context_length", spec.n_ctx_train)
    out.u32("embedding_length", spec.n_embd)
    out.u32("block_count", spec.n_layer)
    out.u32("vocab_size", len(TOKENS))
    if isinstance(spec, RecurrentSpec):
        out.u32("feed_forward_length", 0)
        out.u32("attention.head_count", 0)
    else:
        out.u32("feed_forward_length", spec.n_ff)
        _add_attention(out, spec)
    match spec:
        case EncoderSpec():
            out.f32("attention.layer_norm_epsilon", RMS_EPSILON)
            out.flag("attention.causal", False)
            out.u32("pooling_type", 1)  # mean
            return
        case SlidingSpec():
            out.u32("attention.sliding_window", spec.window)
            out.u32("attention.sliding_window_pattern", spec.full_every)
        case HybridSpec():
            _add_state(out, spec.conv_kernel, spec.value_heads, spec.state_size, spec.key_heads, spec.state_size)
            out.u32("full_attention_interval", spec.full_every)
        case RecurrentSpec():
            _add_state(out, spec.conv_kernel, spec.state_heads, spec.state_head_dim, spec.groups, spec.state_size)
    out.f32("attention.layer_norm_rms_epsilon", RMS_EPSILON)


def _add_attention(out: _Entries, spec: TinySpec) -> None:
    rotated = spec.head_dim // 4 if isinstance(spec, HybridSpec) else spec.head_dim
    out.u32("attention.head_count", spec.n_head)
    out.u32("attention.head_count_kv", spec.n_head_kv)
    out.u32("attention.key_length", spec.head_dim)
    out.u32("attention.value_length", spec.head_dim)
    out.u32("rope.dimension_count", rotated)
    out.f32("rope.freq_base", ROPE_FREQ_BASE)
    if isinstance(spec, HybridSpec):
        third = rotated // 6
        sections = [rotated // 2 - 2 * third, third, third, 0]
        out.array("rope.dimension_sections", sections, GGUFValueType.INT32)


def _add_state(out: _Entries, conv_kernel: int, heads: int, head_dim: int, groups: int, state_size: int) -> None:
    out.u32("ssm.conv_kernel", conv_kernel)
    out.u32("ssm.inner_size", heads * head_dim)
    out.u32("ssm.state_size", state_size)
    out.u32("ssm.time_step_rank", heads)
    out.u32("ssm.group_count", groups)


def _add_tokenizer(out: _Entries, spec: TinySpec) -> None:
    if spec.vocabulary == "none":
        out.text("tokenizer.ggml.model", "none")
        if isinstance(spec, EncoderSpec):
            out.u32("tokenizer.ggml.token_type_count", 1)
        return
    out.text("tokenizer.ggml.model", "gpt2")
    out.text("tokenizer.ggml.pre", "qwen2")  # digits one by one, no clean-up of spaces: detokenizing is exact
    out.array("tokenizer.ggml.tokens", list(TOKENS.texts), GGUFValueType.STRING)
    out.array("tokenizer.ggml.token_type", list(TOKENS.types), GGUFValueType.INT32)
    out.array("tokenizer.ggml.merges", list(MERGES), GGUFValueType.STRING)
    out.u32("tokenizer.ggml.bos_token_id", TOKENS.id_of(BOS))
    out.u32("tokenizer.ggml.eos_token_id", TOKENS.id_of(EOS))
    out.u32("tokenizer.ggml.eot_token_id", TOKENS.id_of(IM_END))
    out.u32("tokenizer.ggml.padding_token_id", TOKENS.id_of(PAD))
    out.flag("tokenizer.ggml.add_bos_token", spec.add_bos)
    if isinstance(spec, EncoderSpec):
        out.u32("tokenizer.ggml.token_type_count", 1)
    else:
        out.text("tokenizer.chat_template", CHAT_TEMPLATE)
