"""Small native contexts, and tokens to feed them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pyllamacache.config import EngineSettings
from pyllamacache.native.context import NativeContext
from pyllamacache.scheduler.backend import Feed
from tests.flow.law import random_ids

KINDS = ["full", "sliding", "hybrid", "recurrent"]
IDS = random_ids(1, 500)

NewContext = Callable[..., NativeContext]


def make_context(
    model: Any,
    *,
    exact: bool = False,
    n_slots: int = 2,
    type_kv: str = "f32",
    flash_attention: str = "off",
) -> NativeContext:
    settings = EngineSettings.check(
        n_ctx_train=8192,
        n_ctx=512,
        n_slots=n_slots,
        kv_tokens=None if exact else 1024,
        n_batch=128,
        n_ubatch=32,
        n_threads=1,
        type_k=type_kv,
        type_v=type_kv,
        flash_attention=flash_attention,
        adapters=(),
        exact=exact,
        offload_kqv=True,
        rope_scaling=None,
        rope_freq_base=0.0,
        rope_freq_scale=0.0,
    )
    return NativeContext(model._native, settings)


def feed(context: NativeContext, seq_id: int, start: int, end: int, **options: Any) -> Any:
    return context.step([[Feed(seq_id, start, IDS[start:end], **options)]])


def next_logits(context: NativeContext, seq_id: int, position: int) -> Any:
    """Decode the token at `position`; its logits as bytes, so that a bit and a NaN count."""
    result = feed(context, seq_id, position, position + 1, want_logits=True)
    return result.logits[0].tobytes()
