"""What a prompt gives on a fresh backend, with nothing but plain decoding: the other side of the law."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from pyllamacache.request import SamplingParams
from pyllamacache.scheduler.backend import Feed, Traits

from .backend import FakeBackend

if TYPE_CHECKING:
    from pyllamacache.request import Logits

GREEDY = SamplingParams()


def cold_run(
    traits: Traits, ids: Sequence[int], n_tokens: int, sampling: SamplingParams = GREEDY, *, n_swa: int = 6
) -> tuple[int, ...]:
    """The reply: up to `n_tokens` tokens, an end-of-generation token included."""
    if n_tokens == 0:
        return ()
    if sampling == GREEDY:
        return _plain_run(traits, tuple(map(int, ids)), n_swa, n_tokens)
    return _run(traits, tuple(map(int, ids)), n_tokens, sampling, n_swa)


@lru_cache(maxsize=4096)
def _plain_run(traits: Traits, ids: tuple[int, ...], n_swa: int, n_tokens: int) -> tuple[int, ...]:
    return _run(traits, ids, n_tokens, GREEDY, n_swa)


def _run(traits: Traits, ids: tuple[int, ...], n_tokens: int, sampling: SamplingParams, n_swa: int) -> tuple[int, ...]:
    backend = _fresh(traits, n_swa)
    sampler = backend.new_sampler(sampling, np.array(ids, dtype=np.int32))
    reply: list[int] = []
    tokens, start = ids, 0
    while len(reply) < n_tokens:
        chunk = tokens[: traits.n_ubatch]
        is_last = len(chunk) == len(tokens)
        result = backend.step([[Feed(0, start, chunk, sampler if is_last else None)]])
        assert result.code == 0
        start, tokens = start + len(chunk), tokens[len(chunk) :]
        if is_last:
            tokens = tuple(result.tokens)
            reply += tokens
            if reply[-1] in traits.eog_ids:
                break
    return tuple(reply)


def cold_logits(traits: Traits, ids: Sequence[int], *, n_swa: int = 6) -> Logits:
    """The logits of the last token of the prompt."""
    backend = _fresh(traits, n_swa)
    for start in range(0, len(ids), traits.n_ubatch):
        chunk = [int(token) for token in ids[start : start + traits.n_ubatch]]
        result = backend.step([[Feed(0, start, chunk, want_logits=True)]])
    return result.logits[0]


def _fresh(traits: Traits, n_swa: int) -> FakeBackend:
    return FakeBackend(replace(traits, n_slots=1, kv_tokens=traits.n_ctx), n_swa=n_swa)
