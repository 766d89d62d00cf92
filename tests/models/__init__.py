"""Tiny models for the tests: random F32 weights by seed, about a megabyte each, one per memory kind.

    cache = ModelCache(tmp_path_factory.getbasetemp() / "models")
    path = cache.path(SlidingSpec(seed=1, window=32))

`default_specs()` gives one spec per memory kind. `real` finds the real models, `malformed` the files a loader must
refuse.

Largest differences over all logits, measured on the CPU with seeds 0 and 1 after 100 and 300 tokens ("noise": the same
tokens in chunks of 1 or 64, beside a parked or a decoding neighbour; "fault": the next token's logits):

    flash attention, KV      full     sliding  hybrid   recurrent
    noise  off, f32          5e-6     2e-4     5e-6     2e-6
    noise  off, f16          6e-4     1e-3     5e-4
    noise  on, f16           2e-2     1e-2     7e-3                ggml adds values up in F16 there
    cell [10, 11) missing    0.08     0.09     0.06                the least of both seeds, after 300 tokens
    window cell missing               0.13
    state 1 to 256 behind                      1.5      0.6

So compare within 1e-3 with `flash_attention="off"` and `type_k=type_v="f32"`, or compare bits in exact mode.
"""

from __future__ import annotations

from .spec import (
    WRITER_VERSION,
    EncoderSpec,
    FullSpec,
    HybridSpec,
    Kind,
    RecurrentSpec,
    SlidingSpec,
    TinySpec,
    default_specs,
    hybrid_27b_state,
)
from .vocabulary import CHAT_TEMPLATE, TOKENS, bytes_of
from .writer import ModelCache, write_model, write_split_model

__all__ = [
    "CHAT_TEMPLATE",
    "TOKENS",
    "WRITER_VERSION",
    "EncoderSpec",
    "FullSpec",
    "HybridSpec",
    "Kind",
    "ModelCache",
    "RecurrentSpec",
    "SlidingSpec",
    "TinySpec",
    "bytes_of",
    "default_specs",
    "hybrid_27b_state",
    "write_model",
    "write_split_model",
]
