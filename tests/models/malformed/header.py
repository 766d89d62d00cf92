"""Files that parse, but whose keys describe no model: missing, of the wrong type, or contradicting each other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache
from typing import Any

from gguf import GGUFValueType as Type

from ..image import Image, encode, small_images
from ..metadata import Entry
from .file import MalformedFile, Native, Stage

Edit = Callable[[Image], Image]
_TOKENS, _TYPES = "tokenizer.ggml.tokens", "tokenizer.ggml.token_type"


@lru_cache(maxsize=1)
def _images() -> dict[str, Image]:
    return small_images()


def _file(
    name: str, edit: Edit, native: Native = "refuses", stage: Stage = "load", check: str = "", kind: str = "full"
) -> MalformedFile:
    return MalformedFile(name, lambda: encode(edit(_images()[kind])), native, stage, check)


def _set(key: str, value: Any, type_: Type | None = None) -> Edit:
    return lambda image: image.setting(key, value, type_)


def _array(key: str, value: list[Any], item_type: Type) -> Edit:
    return lambda image: image.setting_array(key, value, item_type)


def _add(*pairs: tuple[str, Any, Type]) -> Edit:
    return lambda image: image.adding(*(Entry(key, value, type_) for key, value, type_ in pairs))


def _drop(key: str) -> Edit:
    return lambda image: image.dropping(key)


def _as(architecture: str) -> Edit:
    """The same model under another architecture's name."""

    def edit(image: Image) -> Image:
        old = image.entry("general.architecture").value
        renamed = (replace(e, key=e.key.replace(f"{old}.", f"{architecture}.")) for e in image.entries)
        return replace(image, entries=tuple(renamed)).setting("general.architecture", architecture)

    return edit


def header_files() -> Iterator[MalformedFile]:
    yield from _architecture()
    yield from _shape()
    yield from _mixture()
    yield from _other_architectures()
    yield from _rope_and_norm()
    yield from _tokenizer()
    yield from _sliding_and_state()


def _architecture() -> Iterator[MalformedFile]:
    yield _file("architecture-missing", _drop("general.architecture"))
    yield _file("architecture-unknown", _set("general.architecture", "transformer9000"))
    yield _file("architecture-empty", _set("general.architecture", ""))
    yield _file("architecture-number", _set("general.architecture", 1, Type.UINT32))
    yield _file("architecture-array", _array("general.architecture", ["llama"], Type.STRING))
    yield _file("architecture-of-other-keys", _set("general.architecture", "qwen2"))
    yield _file("name-number", _set("general.name", 1, Type.UINT32))
    yield _file("file-type-string", _set("general.file_type", "all F32", Type.STRING))
    yield _file("split-count-without-others", _add(("split.count", 3, Type.UINT16), ("split.no", 0, Type.UINT16)))
    yield _file("split-is-second", _add(("split.count", 2, Type.UINT16), ("split.no", 1, Type.UINT16)))


def _shape() -> Iterator[MalformedFile]:
    for key in ("context_length", "embedding_length", "block_count", "attention.layer_norm_rms_epsilon"):
        yield _file(f"{key.split('.')[-1]}-missing", _drop(f"llama.{key}"))
    yield _file("head-count-missing", lambda i: i.dropping("llama.attention.head_count"))
    blocks = "block_count is from 1 to 512"
    for count in (0, 513, 2**32 - 1):
        yield _file(f"block-count-{count}", _set("llama.block_count", count), "aborts", check=blocks)
    yield _file("block-count-more-than-tensors", _set("llama.block_count", 2))
    yield _file("block-count-string", _set("llama.block_count", "1", Type.STRING))
    yield _file("block-count-float", _set("llama.block_count", 1.0, Type.FLOAT32))
    yield _file("block-count-u64", _set("llama.block_count", 1, Type.UINT64))
    yield _file("block-count-negative", _set("llama.block_count", -1, Type.INT32))
    yield _file("block-count-array", _array("llama.block_count", [1], Type.UINT32))
    for length in (0, 8, 17, 2**32 - 1):
        yield _file(f"embedding-length-{length}", _set("llama.embedding_length", length))
    yield _file("context-length-string", _set("llama.context_length", "512", Type.STRING))
    yield _file("heads-zero", _set("llama.attention.head_count", 0))
    yield _file("heads-do-not-divide", lambda i: _without_lengths(i).setting("llama.attention.head_count", 3))
    yield _file("heads-more-than-embedding", lambda i: _without_lengths(i).setting("llama.attention.head_count", 64))
    yield _file("heads-kv-zero", _set("llama.attention.head_count_kv", 0))
    yield _file("heads-kv-more-than-heads", _set("llama.attention.head_count_kv", 3))
    yield _file("heads-array-too-long", _array("llama.attention.head_count", [2] * 600, Type.UINT32))
    yield _file("heads-array-empty", _array("llama.attention.head_count", [], Type.UINT32))
    yield _file("heads-array-of-strings", _array("llama.attention.head_count", ["2"], Type.STRING))
    yield _file("heads-array-of-bytes", _array("llama.attention.head_count", [2], Type.UINT8))
    yield _file("key-length-zero", _set("llama.attention.key_length", 0))
    yield _file("key-length-odd", _set("llama.attention.key_length", 7))
    yield _file("feed-forward-zero", _set("llama.feed_forward_length", 0))


def _without_lengths(image: Image) -> Image:
    for key in ("attention.key_length", "attention.value_length", "rope.dimension_count"):
        image = image.dropping(f"llama.{key}")
    return image


def _mixture() -> Iterator[MalformedFile]:
    experts, used, groups = "llama.expert_count", "llama.expert_used_count", "llama.expert_group_count"
    check = "expert_used_count is from 1 to expert_count if that is above 0, else 0; expert_count is at most 1024"
    cases: dict[str, tuple[tuple[str, int], ...]] = {
        "experts-none-used": ((experts, 4),),
        "experts-used-without-any": ((used, 2),),
        "experts-more-used-than-there": ((experts, 2), (used, 4)),
        "experts-too-many": ((experts, 1025), (used, 1)),
        "expert-groups-without-experts": ((groups, 2),),
    }
    for name, pairs in cases.items():
        edit = _add(*((key, value, Type.UINT32) for key, value in pairs))
        yield _file(name, edit, "aborts", check=check if groups not in dict(pairs) else "expert_group_count is 0 here")
    edit = _add((experts, 4, Type.UINT32), (used, 2, Type.UINT32), (groups, 4, Type.UINT32))
    yield _file("expert-groups-as-many-as-experts", edit, "aborts", check="expert_group_count is below expert_count")
    edit = _add(("llama.nextn_predict_layers", 2, Type.UINT32))
    yield _file("more-draft-layers-than-layers", edit, "aborts", check="nextn_predict_layers is at most block_count")
    edit = _add(("llama.classifier.activation", "bogus", Type.STRING))
    yield _file("classifier-activation-unknown", edit, "aborts", check="classifier.activation is absent or known")


def _other_architectures() -> Iterator[MalformedFile]:
    heads = "attention.head_count is above 0 but for recurrent architectures (mamba, rwkv): olmo2 divides by it"
    yield _file("heads-zero-olmo2", _as("olmo2"), "crashes", check=heads, kind="recurrent")
    experts = (
        "expert_used_count is above 0 where the architecture is a mixture of experts (named moe): some divide by it"
    )
    yield _file("experts-missing-qwen35moe", _as("qwen35moe"), "crashes", check=experts, kind="hybrid")
    yield _file("experts-missing-smallthinker", _as("smallthinker"), "aborts", check=experts)
    inner = "jamba, granitehybrid: ssm.inner_size is twice embedding_length"
    yield _file("inner-size-jamba", _as("jamba"), "aborts", check=inner, kind="recurrent")
    yield _file("inner-size-granitehybrid", _as("granitehybrid"), "aborts", check=inner, kind="recurrent")
    sections = "architectures with M-RoPE have rope.dimension_sections"
    yield _file("rope-sections-missing-paddleocr", _as("paddleocr"), "aborts", "decode", sections)


def _rope_and_norm() -> Iterator[MalformedFile]:
    scaling = "rope.scaling.type is none, linear, yarn or longrope"
    edit = _add(("llama.rope.scaling.type", "bogus", Type.STRING))
    yield _file("rope-scaling-unknown", edit, "aborts", check=scaling)
    epsilon = "layer_norm_rms_epsilon and layer_norm_epsilon are finite and not negative"
    for value in (-1.0, float("nan")):
        edit = _set("llama.attention.layer_norm_rms_epsilon", value)
        yield _file(f"epsilon-{value}", edit, "aborts", "decode", epsilon)
    yield _file("epsilon-double", _set("llama.attention.layer_norm_rms_epsilon", 1e-6, Type.FLOAT64))
    yield _file("rope-dimensions-not-the-head", _set("llama.rope.dimension_count", 4))
    rope = "rope.dimension_count (and _swa) is even, above 0 and at most attention.key_length"
    for count, native in ((0, "hangs"), (3, "aborts"), (64, "aborts")):
        edit = _set("gemma3.rope.dimension_count", count)
        yield _file(f"rope-dimensions-{count}", edit, native, "decode", rope, "sliding")  # type: ignore[arg-type]
    edit = _add(("llama.attention.causal", False, Type.BOOL))
    yield _file(
        "not-causal", edit, "aborts", "decode", "attention.causal is absent or true: reuse needs causal attention"
    )


def _tokenizer() -> Iterator[MalformedFile]:
    yield _file("tokenizer-missing", _drop("tokenizer.ggml.model"))
    yield _file("tokenizer-unknown", _set("tokenizer.ggml.model", "abacus"))
    yield _file("tokenizer-pre-unknown", _set("tokenizer.ggml.pre", "abacus"))
    yield _file("tokens-missing", _drop(_TOKENS))
    yield _file("tokens-numbers", _array(_TOKENS, list(range(320)), Type.UINT32))
    yield _file("tokens-fewer-than-embedding", _cut_tokens(100))
    yield _file("tokens-none", _cut_tokens(0))
    yield _file("token-types-too-few", lambda i: i.setting(_TYPES, i.entry(_TYPES).value[:-1]))
    yield _file("token-types-strings", _array(_TYPES, ["1"] * 320, Type.STRING))
    yield _file("merges-missing", _drop("tokenizer.ggml.merges"))
    yield _file("merges-numbers", _array("tokenizer.ggml.merges", [1, 2], Type.UINT32))
    edit = _add(("tokenizer.ggml.scores", 1, Type.UINT32))
    yield _file("scores-scalar", edit)
    twice = "tokenizer.ggml.tokens are all different (an empty one counts as [EMPTY_<id>])"
    yield _file("tokens-twice", lambda i: i.setting(_TOKENS, ["!", *i.entry(_TOKENS).value[1:]]), "aborts", check=twice)
    yield _file("tokens-all-alike", _array(_TOKENS, ["x"] * 320, Type.STRING), "aborts", check=twice)
    no_bos = "if add_bos_token (add_eos_token), there is a bos (eos) id below the number of tokens, or the vocabulary "
    no_bos += "type's default is; after loading: llama_vocab_get_add_bos implies llama_vocab_bos >= 0"
    yield _file("begin-token-out-of-range", _begin_out_of_range, "aborts", "tokenize", no_bos)
    spaces = "tokenizer.ggml.pre is not whitespace unless tokenizer.ggml.model is: any text with a space aborts"
    yield _file("pre-tokenizer-whitespace", _set("tokenizer.ggml.pre", "whitespace"), "aborts", "tokenize", spaces)
    no_bytes = "exceptions of llama_tokenize are caught: an SPM vocabulary without byte tokens throws"
    yield _file("sentencepiece-without-bytes", _set("tokenizer.ggml.model", "llama"), "throws", "tokenize", no_bytes)


def _cut_tokens(count: int) -> Edit:
    return lambda i: i.setting(_TOKENS, i.entry(_TOKENS).value[:count]).setting(_TYPES, i.entry(_TYPES).value[:count])


def _begin_out_of_range(image: Image) -> Image:
    few = _cut_tokens(5)(image).dropping("tokenizer.ggml.bos_token_id").setting("tokenizer.ggml.add_bos_token", True)
    data = image.tensor("token_embd.weight").data[: 5 * 16 * 4]
    return few.changing_tensor("token_embd.weight", dims=(16, 5), data=data)


def _sliding_and_state() -> Iterator[MalformedFile]:
    pattern = (
        "attention.sliding_window_pattern leaves at least one sliding layer (a number above 1, or a true in the array)"
    )
    edit = _set("gemma3.attention.sliding_window_pattern", 1)
    yield _file("no-layer-slides", edit, "aborts", "context", pattern, "sliding")
    edit = _array("gemma3.attention.sliding_window_pattern", [0, 0], Type.UINT32)
    yield _file("no-layer-slides-array", edit, "aborts", "context", pattern, "sliding")
    window = "attention.sliding_window is below 2**30"
    edit = _set("gemma3.attention.sliding_window", 2**31 - 1)
    yield _file("window-huge", edit, "throws", "decode", window, "sliding")
    yield _file(
        "attention-interval-zero",
        _set("qwen35.full_attention_interval", 0),
        "crashes",
        check="full_attention_interval is above 0",
        kind="hybrid",
    )
    inner = "ssm.inner_size is time_step_rank times the value head size (ssm.state_size for Gated DeltaNet)"
    for size in (0, 8):
        yield _file(f"inner-size-{size}", _set("qwen35.ssm.inner_size", size), "aborts", "context", inner, "hybrid")
    edit = _add(("qwen35.nextn_predict_layers", 1, Type.UINT32))
    left = "a hybrid has an attention layer among the first block_count - nextn_predict_layers"
    yield _file("only-attention-layer-is-for-drafts", edit, "aborts", "decode", left, "hybrid")
    sections = "rope.dimension_sections are not negative, the first three not all 0, sum at most half the dimensions"
    for name, value in (("zero", [0] * 4), ("fourth-only", [0, 0, 0, 2]), ("negative", [-1] * 4), ("many", [6] * 4)):
        edit = _set("qwen35.rope.dimension_sections", value)
        yield _file(f"rope-sections-{name}", edit, "aborts", "decode", sections, "hybrid")
    for key in ("conv_kernel", "state_size", "time_step_rank", "group_count"):
        yield _file(f"state-{key.replace('_', '-')}-missing", _drop(f"qwen35.ssm.{key}"), kind="hybrid")
        yield _file(f"state-{key.replace('_', '-')}-zero", _set(f"qwen35.ssm.{key}", 0), kind="hybrid")
        yield _file(f"mamba-{key.replace('_', '-')}-zero", _set(f"mamba2.ssm.{key}", 0), kind="recurrent")
