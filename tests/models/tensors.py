"""The weights of a tiny model: names, shapes, and how each is drawn.

Gains are chosen so that a model is lively: logits with a deviation of about 1.5, attention that weighs all cells alike
within a factor of two or so, states that remember from five tokens to a thousand. A missing cell or a stale state then
moves logits far more than the order of additions does (numbers in `__init__`). Shapes are numpy's: rows out, values in.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .spec import EncoderSpec, FullSpec, HybridSpec, RecurrentSpec, SlidingSpec, TinySpec
from .vocabulary import TOKENS, USER_DEFINED_TYPE

Array = npt.NDArray[np.float32]
Draw = Callable[[np.random.RandomState, tuple[int, ...]], npt.NDArray[np.float64]]

LOGIT_STD = 2.0
UNREADABLE_SCALE = 0.6  # bytes outside printable ASCII still win now and then: broken UTF-8 is part of the test
SELF_REPULSION = 0.5
SHORT_HORIZON, LONG_HORIZON = 5.0, 1000.0  # tokens until a state has faded to 1/e, per head


@dataclass(frozen=True, slots=True)
class _Gains:
    """How strongly each part of a layer speaks, relative to the others: only ratios matter behind a norm.

    The last attention layer speaks loudest: what one cell adds there is heard, while values stay different from cell
    to cell because the layers below mix little.
    """

    embedding: float
    sharpness: float  # deviation of queries and of keys; attention scores deviate by its square
    attention: float
    last_attention: float
    feed_forward: float
    window_attention: float = 0.0  # of layers with a sliding window
    feed_forward_out: float = 1.0  # where a norm follows: GELU is a table of F16 in ggml, so keep it low


_FULL = _Gains(embedding=4.0, sharpness=0.8, attention=12.0, last_attention=40.0, feed_forward=6.0)
_SLIDING = _Gains(
    embedding=1.5,
    sharpness=0.7,
    attention=0.3,
    window_attention=0.3,
    last_attention=1.8,
    feed_forward=4.0,
    feed_forward_out=0.4,
)
_HYBRID = _Gains(embedding=3.0, sharpness=0.8, attention=12.0, last_attention=110.0, feed_forward=4.0)


@dataclass(frozen=True, slots=True)
class Tensor:
    """One F32 tensor, drawn only when written. Independent of all others: same seed and name, same values."""

    name: str
    shape: tuple[int, ...]
    draw: Draw

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape)) * 4

    def values(self, seed: int) -> Array:
        random = np.random.RandomState([seed & 0xFFFFFFFF, zlib.crc32(self.name.encode())])
        return np.ascontiguousarray(self.draw(random, self.shape), dtype=np.float32)


def _normal(std: float, mean: float = 0.0) -> Draw:
    return lambda random, shape: mean + std * random.standard_normal(shape)


def _matrix(name: str, rows: int, columns: int, gain: float) -> Tensor:
    """Maps values of deviation 1 to values of deviation `gain`."""
    return Tensor(name, (rows, columns), _normal(gain / math.sqrt(columns)))


def _norm(name: str, size: int, scale: float = 1.0) -> Tensor:
    return Tensor(name, (size,), _normal(0.1 * scale, mean=scale))


def _given(name: str, values: npt.ArrayLike, shape: tuple[int, ...]) -> Tensor:
    return Tensor(name, shape, lambda _random, _shape: np.asarray(values, dtype=np.float64).reshape(shape))


def _fade(heads: int) -> npt.NDArray[np.float64]:
    """Decay per token of each head, from short horizons to long ones."""
    return 1.0 / np.geomspace(SHORT_HORIZON, LONG_HORIZON, heads)


def tensors(spec: TinySpec) -> list[Tensor]:
    """All tensors of a model, in file order."""
    match spec:
        case FullSpec():
            return [*_outer(spec), *(t for i in range(spec.n_layer) for t in _full_layer(spec, i))]
        case SlidingSpec():
            return [*_outer(spec), *(t for i in range(spec.n_layer) for t in _sliding_layer(spec, i))]
        case HybridSpec():
            return [*_outer(spec), *(t for i in range(spec.n_layer) for t in _hybrid_layer(spec, i))]
        case RecurrentSpec():
            return [*_outer(spec), *(t for i in range(spec.n_layer) for t in _recurrent_layer(spec, f"blk.{i}"))]
        case EncoderSpec():
            return list(_encoder(spec))
    raise TypeError(f"no tensors for {type(spec).__name__}")


def _outer(spec: TinySpec) -> Iterator[Tensor]:
    embedding = Tensor("token_embd.weight", (len(TOKENS), spec.n_embd), _normal(_embedding_std(spec)))
    yield embedding
    yield _norm("output_norm.weight", spec.n_embd)
    yield Tensor("output.weight", embedding.shape, _output_rows(spec, embedding))


def _output_rows(spec: TinySpec, embedding: Tensor) -> Draw:
    """Random rows that lean away from the token's own embedding, so that greedy text does not repeat one token."""
    scale = np.ones((len(TOKENS), 1))
    scale[list(TOKENS.unreadable_ids)] = UNREADABLE_SCALE
    scale[list(TOKENS.control_ids)] = spec.control_scale
    if spec.is_readable:
        tags = [i for i, kind in enumerate(TOKENS.types) if kind == USER_DEFINED_TYPE]
        scale[[*TOKENS.unreadable_ids, *TOKENS.control_ids, *tags]] = 0.0  # below the largest of 160 others

    def draw(random: np.random.RandomState, shape: tuple[int, ...]) -> npt.NDArray[np.float64]:
        own = embedding.values(spec.seed).astype(np.float64) / _embedding_std(spec)
        away = math.sqrt(1.0 - SELF_REPULSION**2) * random.standard_normal(shape) - SELF_REPULSION * own
        rows: npt.NDArray[np.float64] = scale * away * LOGIT_STD / math.sqrt(spec.n_embd)
        return rows

    return draw


def _embedding_std(spec: TinySpec) -> float:
    match spec:
        case FullSpec():
            return _FULL.embedding
        case SlidingSpec():
            return _SLIDING.embedding / math.sqrt(spec.n_embd)  # the model multiplies by sqrt(n_embd)
        case HybridSpec():
            return _HYBRID.embedding
        case _:
            return 1.0


def _attention(spec: TinySpec, layer: str, *, query_rows: int, sharpness: float, out_gain: float) -> Iterator[Tensor]:
    key_rows = spec.n_head_kv * spec.head_dim
    yield _matrix(f"{layer}.attn_q.weight", query_rows, spec.n_embd, sharpness)
    yield _matrix(f"{layer}.attn_k.weight", key_rows, spec.n_embd, sharpness)
    yield _matrix(f"{layer}.attn_v.weight", key_rows, spec.n_embd, 1.0)
    yield _matrix(f"{layer}.attn_output.weight", spec.n_embd, spec.n_head * spec.head_dim, out_gain)


def _feed_forward(spec: TinySpec, layer: str, gain: float) -> Iterator[Tensor]:
    yield _matrix(f"{layer}.ffn_gate.weight", spec.n_ff, spec.n_embd, gain)
    yield _matrix(f"{layer}.ffn_up.weight", spec.n_ff, spec.n_embd, gain)
    yield _matrix(f"{layer}.ffn_down.weight", spec.n_embd, spec.n_ff, 1.0)


def _full_layer(spec: FullSpec, index: int) -> Iterator[Tensor]:
    layer, gains = f"blk.{index}", _FULL
    out_gain = gains.last_attention if index == spec.n_layer - 1 else gains.attention
    yield _norm(f"{layer}.attn_norm.weight", spec.n_embd)
    query_rows = spec.n_head * spec.head_dim
    yield from _attention(spec, layer, query_rows=query_rows, sharpness=gains.sharpness, out_gain=out_gain)
    yield _norm(f"{layer}.ffn_norm.weight", spec.n_embd)
    yield from _feed_forward(spec, layer, gains.feed_forward)


def _sliding_layer(spec: SlidingSpec, index: int) -> Iterator[Tensor]:
    layer, gains = f"blk.{index}", _SLIDING
    post_gain = gains.last_attention if index == spec.n_layer - 1 else gains.attention
    if (index + 1) % spec.full_every:
        post_gain = gains.window_attention
    yield _norm(f"{layer}.attn_norm.weight", spec.n_embd)
    yield from _attention(spec, layer, query_rows=spec.n_head * spec.head_dim, sharpness=1.0, out_gain=1.0)
    yield _norm(f"{layer}.attn_q_norm.weight", spec.head_dim, gains.sharpness)
    yield _norm(f"{layer}.attn_k_norm.weight", spec.head_dim, gains.sharpness)
    yield _norm(f"{layer}.post_attention_norm.weight", spec.n_embd, post_gain)
    yield _norm(f"{layer}.ffn_norm.weight", spec.n_embd)
    yield from _feed_forward(spec, layer, gains.feed_forward)
    yield _norm(f"{layer}.post_ffw_norm.weight", spec.n_embd, gains.feed_forward_out)


def _hybrid_layer(spec: HybridSpec, index: int) -> Iterator[Tensor]:
    layer, gains = f"blk.{index}", _HYBRID
    yield _norm(f"{layer}.attn_norm.weight", spec.n_embd)
    if index in spec.recurrent_layers:
        yield from _delta_net(spec, layer)
    else:
        out_gain = gains.last_attention if index >= spec.n_layer - spec.full_every else gains.attention
        query_rows = 2 * spec.n_head * spec.head_dim  # each head's query, then its output gate
        yield from _attention(spec, layer, query_rows=query_rows, sharpness=1.0, out_gain=out_gain)
        yield _norm(f"{layer}.attn_q_norm.weight", spec.head_dim, gains.sharpness)
        yield _norm(f"{layer}.attn_k_norm.weight", spec.head_dim, gains.sharpness)
    yield _norm(f"{layer}.post_attention_norm.weight", spec.n_embd)
    yield from _feed_forward(spec, layer, gains.feed_forward)


def _delta_net(spec: HybridSpec, layer: str) -> Iterator[Tensor]:
    heads, value_rows = spec.value_heads, spec.value_heads * spec.state_size
    yield _matrix(f"{layer}.attn_qkv.weight", spec.conv_channels, spec.n_embd, 1.0)
    yield _matrix(f"{layer}.attn_gate.weight", value_rows, spec.n_embd, 1.0)
    yield _matrix(f"{layer}.ssm_conv1d.weight", spec.conv_channels, spec.conv_kernel, 1.5)
    yield _given(f"{layer}.ssm_dt.bias", np.zeros(heads), (heads,))
    yield _given(f"{layer}.ssm_a", -_fade(heads) / np.log(2.0), (heads,))
    yield _matrix(f"{layer}.ssm_beta.weight", heads, spec.n_embd, 0.5)
    yield _matrix(f"{layer}.ssm_alpha.weight", heads, spec.n_embd, 0.5)
    yield _norm(f"{layer}.ssm_norm.weight", spec.state_size)
    yield _matrix(f"{layer}.ssm_out.weight", spec.n_embd, value_rows, 2.0)


def _recurrent_layer(spec: RecurrentSpec, layer: str) -> Iterator[Tensor]:
    heads = spec.state_heads
    in_rows = 2 * spec.inner_size + 2 * spec.groups * spec.state_size + heads
    yield _norm(f"{layer}.attn_norm.weight", spec.n_embd)
    yield _matrix(f"{layer}.ssm_in.weight", in_rows, spec.n_embd, 1.0)
    yield _matrix(f"{layer}.ssm_conv1d.weight", spec.conv_channels, spec.conv_kernel, 1.5)
    yield Tensor(f"{layer}.ssm_conv1d.bias", (spec.conv_channels,), _normal(0.1))
    yield _given(f"{layer}.ssm_dt.bias", np.full(heads, -1.0), (heads,))
    yield _given(f"{layer}.ssm_a", -_fade(heads) / np.log1p(np.exp(-1.0)), (heads, 1))
    yield Tensor(f"{layer}.ssm_d", (heads, 1), _normal(0.3, mean=1.0))
    yield Tensor(f"{layer}.ssm_norm.weight", (spec.groups, spec.inner_size // spec.groups), _normal(0.1, mean=1.0))
    yield _matrix(f"{layer}.ssm_out.weight", spec.n_embd, spec.inner_size, 1.0)


def _encoder(spec: EncoderSpec) -> Iterator[Tensor]:
    yield Tensor("token_embd.weight", (len(TOKENS), spec.n_embd), _normal(1.0))
    yield Tensor("position_embd.weight", (spec.n_ctx_train, spec.n_embd), _normal(0.3))
    yield from _layer_norm("token_embd_norm", spec.n_embd)
    for index in range(spec.n_layer):
        layer = f"blk.{index}"
        yield from _attention(spec, layer, query_rows=spec.n_embd, sharpness=1.0, out_gain=1.0)
        yield from _layer_norm(f"{layer}.attn_output_norm", spec.n_embd)
        yield _matrix(f"{layer}.ffn_up.weight", spec.n_ff, spec.n_embd, 1.0)
        yield _matrix(f"{layer}.ffn_down.weight", spec.n_embd, spec.n_ff, 1.0)
        yield from _layer_norm(f"{layer}.layer_output_norm", spec.n_embd)


def _layer_norm(name: str, size: int) -> Iterator[Tensor]:
    yield _norm(f"{name}.weight", size)
    yield Tensor(f"{name}.bias", (size,), _normal(0.1))
