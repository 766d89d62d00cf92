"""What a model's description must say so that llama.cpp can act on it: it ends the process on much that breaks these.

Works on values that were read already. A key that is missing breaks no rule: llama.cpp refuses such a model itself.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NoReturn, Protocol

Scalar = int | float | bool | str


@dataclass(frozen=True, slots=True)
class Array:
    """An array of the description.

    `values` are kept of short arrays of numbers only; of the tokens' types, the different ones.
    """

    kind: str
    n_items: int
    values: tuple[int | float | bool, ...] | None = None


class Fail(Protocol):
    """Raises ModelFormatError."""

    def __call__(self, what: str) -> NoReturn: ...


_RANGES: tuple[tuple[str, int, int], ...] = (
    ("block_count", 1, 512),
    ("context_length", 1, 2**31 - 1),
    ("embedding_length", 1, 2**24),
    ("embedding_length_out", 0, 2**24),
    ("features_length", 0, 2**24),
    ("feed_forward_length", 0, 2**24),
    ("vocab_size", 0, 2**24),
    ("token_type_count", 0, 2**24),
    ("expert_count", 0, 1024),
    ("expert_used_count", 0, 1024),
    ("full_attention_interval", 1, 2**16),
    ("attention.head_count", 0, 2**16),
    ("attention.head_count_kv", 0, 2**16),
    ("attention.key_length", 0, 2**16),
    ("attention.value_length", 0, 2**16),
    ("attention.key_length_swa", 0, 2**16),
    ("attention.value_length_swa", 0, 2**16),
    ("attention.key_length_mla", 0, 2**16),
    ("attention.value_length_mla", 0, 2**16),
    ("attention.sliding_window", 0, 2**30),
    ("rope.dimension_count", 0, 2**16),
    ("rope.dimension_count_swa", 0, 2**16),
    ("ssm.conv_kernel", 0, 2**10),
    ("ssm.inner_size", 0, 2**24),
    ("ssm.state_size", 0, 2**16),
    ("ssm.time_step_rank", 0, 2**16),
    ("wkv.head_size", 0, 2**16),
)
"""Whole numbers below `architecture.`, alone or as an array with one per layer, and what they may be.

0 is what llama.cpp itself writes where an architecture has no such thing.
"""

_WORDS: tuple[tuple[str, frozenset[str]], ...] = (
    ("rope.scaling.type", frozenset({"none", "linear", "yarn", "longrope"})),
    ("classifier.activation", frozenset({"gelu", "silu", "tanh"})),
)

_ALWAYS_HEADS = frozenset({"olmo2", "phimoe"})
_ALWAYS_SECTIONS = frozenset(
    {"qwen2vl", "paddleocr", "qwen3vl", "qwen3vlmoe", "qwen35", "qwen35moe", "clef", "qwen4exp", "qwen3tts"}
)
_ALWAYS_EXPERTS = frozenset({"smallthinker", "qwen3next", "rnd1", "mellum"})
"""Beside everything named moe. llama.cpp divides by, or asserts, what these architectures always have."""

_STATE_SPACE = re.compile("mamba|jamba|granitehybrid|falcon-h1|nemotron_h|plamo[23]|qwen3next|qwen35|qwen4exp")
"""Architectures whose layers keep a state of the sizes under `ssm.`."""

_TWICE_WIDE = frozenset({"jamba", "granitehybrid"})

_BYTE_TOKEN = 6
"""The type of a token that stands for a byte."""

_ENCODERS = frozenset(
    {"wavtokenizer-dec", "gemma-embedding", "gemma-embedding2", "dream", "llada", "llada-moe", "rnd1", "clef"}
)
"""Beside everything named bert: what llama.cpp gives no memory."""

_SPECIAL_IDS: dict[str, dict[str, int | None]] = {
    "llama": {"bos": 1, "eos": 2},
    "bert": {"bos": 101, "eos": None, "seperator": 102},
    "gpt2": {"bos": 11, "eos": 11},
    "hybriddna": {"bos": 11, "eos": 11},
    "whitespace": {"bos": 11, "eos": 11},
    "t5": {"bos": None, "eos": 1},
    "gemma4": {"bos": None, "eos": None},
    "plamo2": {"bos": 1, "eos": 2},
    "plamo3": {"bos": 1, "eos": 2},
}
"""By kind of tokenizer, the tokens llama.cpp assumes where the file names none."""

_ALWAYS_ADDED: dict[str, tuple[str, ...]] = {
    "llama": ("bos",),
    "bert": ("bos", "seperator"),
    "t5": ("eos",),
    "gemma4": ("bos",),
}
"""By kind of tokenizer, the tokens that are added where the file does not say."""


class Rules:
    """The rules over one model's description."""

    def __init__(self, scalars: Mapping[str, Scalar], arrays: Mapping[str, Array], fail: Fail) -> None:
        self._scalars = scalars
        self._arrays = arrays
        self._architecture = str(scalars.get("general.architecture", ""))
        self._fail = fail

    def check(self) -> None:
        for name, low, high in _RANGES:
            for value in self._numbers(name):
                if not low <= value <= high:
                    self._fail(f"{self._key(name)} is {value}, outside {low} to {high}")
        for name, words in _WORDS:
            word = self._scalars.get(self._key(name))
            if word is not None and word not in words:
                self._fail(f"{self._key(name)} is {word!r}, none of {', '.join(sorted(words))}")
        # The largest number stands for -1: llama.cpp chooses.
        if not all(value in (0, 1, 2, 3, 4, 2**32 - 1) for value in self._numbers("pooling_type")):
            self._fail(f"{self._key('pooling_type')} is none that llama.cpp knows")
        if self._scalars.get(self._key("attention.causal")) is False and not self._is_encoder:
            self._fail(f"{self._key('attention.causal')} is false, so nothing can be kept between calls")
        self._check_floats()
        self._check_heads()
        self._check_layers()
        self._check_experts()
        self._check_state_space()
        self._check_vocabulary()

    @property
    def _is_encoder(self) -> bool:
        return "bert" in self._architecture or self._architecture in _ENCODERS

    def _key(self, name: str) -> str:
        return f"{self._architecture}.{name}"

    def _numbers(self, name: str) -> tuple[int, ...]:
        """The whole number or numbers under a key; () when there is none."""
        key = self._key(name)
        array = self._arrays.get(key)
        values = (array.values or ()) if array else (self._scalars.get(key, 0),) if key in self._scalars else ()
        for value in values:
            if not isinstance(value, int):
                self._fail(f"{key} is {value!r}, not a whole number")
        return tuple(int(value) for value in values)

    def _number(self, name: str, default: int = 0) -> int:
        """The first number under a key."""
        return next(iter(self._numbers(name)), default)

    def _check_floats(self) -> None:
        for key, value in self._scalars.items():
            if isinstance(value, float) and key.startswith(f"{self._architecture}."):
                if math.isnan(value):
                    self._fail(f"{key} is not a number")
                if key.endswith("epsilon") and not 0 <= value < math.inf:
                    self._fail(f"{key} is {value}, negative or infinite")

    def _check_heads(self) -> None:
        heads, kv_heads = self._numbers("attention.head_count"), self._numbers("attention.head_count_kv")
        n_layers = max(len(heads), len(kv_heads))
        for n_heads, n_kv_heads in zip(_spread(heads, n_layers), _spread(kv_heads, n_layers), strict=False):
            if n_heads and n_kv_heads and n_heads % n_kv_heads:
                self._fail(f"{n_heads} attention heads cannot share {n_kv_heads} KV heads")
        n_heads = self._number("attention.head_count")
        if not n_heads and self._architecture in _ALWAYS_HEADS:
            self._fail(f"{self._key('attention.head_count')} is 0 or missing")
        if n_heads:
            n_embd = self._number("embedding_length", 2**24)
            head = self._number("attention.key_length", n_embd // n_heads)
            if (
                not head
                or not self._number("attention.value_length", head)
                or ("bert" in self._architecture and head * n_heads != n_embd)
            ):
                self._fail(f"{n_heads} heads of {head} for {self._key('embedding_length')}={n_embd}")
            rotated = head
            for suffix in ("", "_swa"):
                head = self._number(f"attention.key_length{suffix}", head)
                rotated = self._number(f"rope.dimension_count{suffix}", rotated)
                if rotated % 2 or not 0 < rotated <= head:
                    self._fail(f"rope over {rotated} of a head of {head}")
        self._check_sections()
        # Either each layer's kind, or every how many layers one has no window.
        pattern = self._key("attention.sliding_window_pattern")
        layers = self._numbers("attention.sliding_window_pattern") if pattern in self._arrays else (1,)
        if self._number("attention.sliding_window") and (self._scalars.get(pattern) == 1 or not any(layers)):
            self._fail(f"{pattern} leaves no layer with a window")

    def _check_sections(self) -> None:
        sections = self._numbers("rope.dimension_sections")
        n_pairs = self._number("rope.dimension_count", 2**16) // 2
        if self._architecture in _ALWAYS_SECTIONS and not any(sections[:3]):
            self._fail(f"{self._key('rope.dimension_sections')} are missing or 0")
        if sections and (min(sections) < 0 or sum(sections) > n_pairs):
            self._fail(f"{self._key('rope.dimension_sections')} are {sections}, which are no parts of {n_pairs} pairs")

    def _check_layers(self) -> None:
        n_layers = self._number("block_count", 512) - self._number("nextn_predict_layers")
        if n_layers < 0:
            self._fail(f"{self._key('nextn_predict_layers')} is above {self._key('block_count')}")
        # A hybrid needs a layer with attention; by default the last of each interval is one.
        is_hybrid = self._architecture.startswith("qwen") and self._key("ssm.inner_size") in self._scalars
        recurrent = _spread(self._numbers("attention.recurrent_layers"), n_layers)
        interval = self._number("full_attention_interval", 4 if is_hybrid else 1)
        if (all(recurrent[:n_layers]) and is_hybrid) if recurrent else n_layers < interval:
            self._fail(f"none of its {n_layers} layers has attention")

    def _check_experts(self) -> None:
        n_experts, n_groups = self._number("expert_count"), self._number("expert_group_count")
        n_used = max(self._numbers("expert_used_count"), default=0)
        if self._architecture.startswith("hunyuan") and n_experts <= 1:
            return
        must_have = "moe" in self._architecture or self._architecture in _ALWAYS_EXPERTS
        if n_used > n_experts or (not n_used and (n_experts or must_have)):
            self._fail(f"{n_used} of {n_experts} experts used")
        if n_groups and n_groups >= n_experts:
            self._fail(f"{n_groups} groups of {n_experts} experts")
        n_groups_used = self._number("expert_group_used_count")
        if n_groups > 1 and (n_experts % n_groups or not 0 < n_groups_used < n_groups):
            self._fail(f"{n_groups_used} of {n_groups} groups used of {n_experts} experts")

    def _check_state_space(self) -> None:
        n_inner, n_heads = self._number("ssm.inner_size"), self._number("ssm.time_step_rank")
        n_groups = self._number("ssm.group_count")
        if _STATE_SPACE.search(self._architecture):
            for name in ("conv_kernel", "inner_size", "state_size", "time_step_rank", "group_count"):
                # plamo has no groups, and says so.
                if 0 in self._numbers(f"ssm.{name}") and not (name == "group_count" and "plamo" in self._architecture):
                    self._fail(f"{self._key(f'ssm.{name}')} is 0")
        # Without groups, as in mamba, the rank is no number of heads.
        if n_groups and (n_inner % n_groups or n_heads % n_groups or (n_heads and n_inner % n_heads)):
            self._fail(f"state of size {n_inner} with {n_heads} heads in {n_groups} groups")
        n_state = self._number("ssm.state_size")
        if self._architecture.startswith("qwen") and n_inner != n_heads * n_state:
            self._fail(f"state of size {n_inner} is not {n_heads} heads of {n_state}")
        n_embd = self._number("embedding_length")
        if self._architecture in _TWICE_WIDE and n_inner and n_inner != 2 * n_embd:
            self._fail(f"state of size {n_inner} is not twice {self._key('embedding_length')}={n_embd}")
        for head in self._numbers("wkv.head_size"):
            if n_embd % head if head else "rwkv" in self._architecture:
                self._fail(
                    f"{self._key('embedding_length')}={n_embd} is no multiple of {self._key('wkv.head_size')}={head}"
                )

    def _check_vocabulary(self) -> None:
        model = self._scalars.get("tokenizer.ggml.model")
        tokens = self._arrays.get("tokenizer.ggml.tokens")
        if model in ("none", "no_vocab") or tokens is None:
            return
        if model != "whitespace" and self._scalars.get("tokenizer.ggml.pre") == "whitespace":
            self._fail("tokenizer.ggml.pre is 'whitespace', which only a tokenizer of that name can use")
        if tokens.kind != "string" or not tokens.n_items:
            self._fail(f"tokenizer.ggml.tokens is an array of {tokens.n_items} {tokens.kind} items")
        for name in ("scores", "token_type"):
            array = self._arrays.get(f"tokenizer.ggml.{name}")
            if array is not None and array.n_items < tokens.n_items:
                self._fail(f"tokenizer.ggml.{name} has {array.n_items} items for {tokens.n_items} tokens")
        types = self._arrays.get("tokenizer.ggml.token_type")
        if model == "bert" and types and _BYTE_TOKEN in (types.values or ()):
            self._fail("tokenizer.ggml.token_type has bytes, which a tokenizer of words has not")
        for name in ("bos", "eos", "seperator"):
            if self._is_added(str(model), name) and self._special_id(str(model), name, tokens.n_items) is None:
                self._fail(f"each prompt gets a {name} token, and tokenizer.ggml.{name}_token_id is no token")

    def _is_added(self, model: str, name: str) -> bool:
        said = self._scalars.get(f"tokenizer.ggml.add_{name}_token")
        return name in _ALWAYS_ADDED.get(model, ()) if said is None or model in ("bert", "gemma4") else said is True

    def _special_id(self, model: str, name: str, n_tokens: int) -> int | None:
        named = self._scalars.get(f"tokenizer.ggml.{name}_token_id")
        assumed = _SPECIAL_IDS.get(model, {}).get(name)
        for token_id in (named, assumed):
            if isinstance(token_id, int) and 0 <= token_id < n_tokens:
                return token_id
        return None


def _spread(values: tuple[int, ...], n_layers: int) -> tuple[int, ...]:
    """One value per layer: a single value holds for all of them."""
    return values * n_layers if len(values) == 1 else values
