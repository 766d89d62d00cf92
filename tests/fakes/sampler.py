"""Logits that follow from content alone, and the sampler that takes the largest."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pyllamacache.request import SamplingParams, TokenLogprob

if TYPE_CHECKING:
    from pyllamacache.request import Ids, Logits


def logits_of(value: int, n_vocab: int) -> Logits:
    """Pseudo-random logits for a cell's value, shape (n_vocab,)."""
    x = (np.arange(n_vocab, dtype=np.uint64) + np.uint64(value)) * np.uint64(0x9E3779B97F4A7C15)
    x ^= x >> np.uint64(29)
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(32)
    return (x & np.uint64(0xFFFF)).astype(np.float32) / np.float32(4096)


class SamplingFailed(Exception):
    """What the sampler says when it finds no token."""


class FakeSampler:
    """Argmax with logit_bias and min_tokens. The grammar "fail at N" allows nothing at the Nth token (from 0)."""

    def __init__(self, params: SamplingParams, prompt: Ids, eog_ids: frozenset[int]) -> None:
        self.params = params
        self.prompt = prompt.copy()
        self.tokens: list[int] = []
        self.is_closed = False
        self._eog = sorted(eog_ids)
        grammar = params.grammar or ""
        self._fails_at = int(grammar.removeprefix("fail at ")) if grammar.startswith("fail at ") else None

    def sample(self, logits: Logits) -> int:
        assert not self.is_closed
        if len(self.tokens) == self._fails_at:
            raise SamplingFailed("no token is allowed here")
        logits = logits.copy()
        for token, bias in self.params.logit_bias.items():
            logits[token] += bias
        if len(self.tokens) < self.params.min_tokens:
            logits[self._eog] = -np.inf
        self.tokens.append(int(logits.argmax()))
        return self.tokens[-1]

    def logprob(self, logits: Logits) -> TokenLogprob | None:
        if not self.params.logprobs:
            return None
        logprobs = logits - logits.max()
        logprobs -= np.log(np.exp(logprobs).sum())
        best = np.argsort(-logprobs, kind="stable")[: self.params.top_logprobs]
        token = self.tokens[-1]
        return TokenLogprob(token, float(logprobs[token]), tuple((int(each), float(logprobs[each])) for each in best))

    def close(self) -> None:
        assert not self.is_closed, "closed twice"
        self.is_closed = True
