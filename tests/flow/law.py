"""The law as a checker: the same ids give the same answer with reuse and without.

In exact mode bit for bit, tokens included; otherwise all logits of the last prompt token within `TOLERANCE`, which
lies far above the noise of batching on F32 models (2e-5) and far below any fault (0.1 and more).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

TOLERANCE = 1e-3

Ids = npt.NDArray[np.int32]


class LawBroken(AssertionError):
    """An answer with reuse differs from the one without."""


class Pair:
    """An engine under test beside one that never reuses anything, over the same model and layout.

    `answers` keeps what the cold one said: pairs of the same model and layout may share it.
    """

    def __init__(
        self, warm: Any, cold: Any, *, exact: bool, answers: dict[tuple[bytes, int], Any] | None = None
    ) -> None:
        self.warm = warm
        self.cold = cold
        self.exact = exact
        self.n_reused = 0
        self.sources: set[str] = set()
        self._answers = answers

    def cold_answer(self, ids: Ids, max_tokens: int) -> Any:
        key = (ids.tobytes(), max_tokens)
        if self._answers is not None and key in self._answers:
            return self._answers[key]
        answer = self.cold.complete(
            ids, max_tokens=max_tokens, return_logits=True, cache_prompt=False, store=False, slot=0
        )
        if self._answers is not None:
            self._answers[key] = answer
        return answer

    def ask(self, ids: Ids, *, max_tokens: int = 4, **options: Any) -> Any:
        """Send, check, and return the reply."""
        reply = self.warm.complete(ids, max_tokens=max_tokens, return_logits=True, **options)
        self.check(ids, reply, max_tokens)
        return reply

    def check(self, ids: Ids, reply: Any, max_tokens: int) -> None:
        check_numbers(ids, reply)
        self.n_reused += reply.usage.cached_tokens
        self.sources.add(reply.cache.source.value)
        cold = self.cold_answer(ids, max_tokens if self.exact else 0)  # elsewhere only logits are compared
        difference = float(np.abs(reply.logits - cold.logits).max())
        where = f"{reply.cache} of {len(ids)} tokens"
        if self.exact:
            if not np.array_equal(reply.logits, cold.logits):
                raise LawBroken(f"logits differ by {difference:.3g} in exact mode: {where}")
            if reply.token_ids != cold.token_ids:
                raise LawBroken(f"tokens differ in exact mode: {where}")
        elif not difference <= TOLERANCE:
            raise LawBroken(f"logits differ by {difference:.3g}: {where}")


def check_numbers(ids: Ids, reply: Any) -> None:
    """Promise 1: cached + prefilled = prompt, at least one token computed, and a reason with a position."""
    usage, cache = reply.usage, reply.cache
    assert usage.prompt_tokens == len(ids)
    assert usage.cached_tokens == cache.resumed_tokens
    assert usage.cached_tokens + cache.prefilled_tokens == usage.prompt_tokens
    assert 0 <= usage.cached_tokens <= len(ids) - 1
    assert cache.resumed_tokens <= cache.matched_tokens <= len(ids)
    assert 0 <= cache.position <= len(ids)
    assert usage.cached_tokens + usage.cache_write_tokens <= usage.prompt_tokens


def random_ids(seed: int, n: int, *, vocabulary: int = 256) -> Ids:
    return np.random.default_rng(seed).integers(0, vocabulary, n, dtype=np.int32)


def joined(*parts: Any) -> Ids:
    return np.concatenate([np.asarray(part, dtype=np.int32) for part in parts])
