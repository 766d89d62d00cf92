"""The decoding rules, checked on every step that a scheduler asks for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pyllamacache.scheduler.backend import Feed, Group, Traits

from .sampler import FakeSampler


@dataclass(frozen=True, slots=True)
class FeedRecord:
    """A feed as it was asked for."""

    seq_id: int
    start: int
    n_tokens: int
    decodes: bool
    """Feeds back the token that was sampled last; anything else is prefill."""
    samples: bool
    want_logits: bool

    @classmethod
    def of(cls, feed: Feed) -> FeedRecord:
        sampler = feed.sampler
        assert sampler is None or isinstance(sampler, FakeSampler)
        decodes = sampler is not None and len(feed.tokens) == 1 and bool(sampler.tokens)
        return cls(feed.seq_id, feed.start, len(feed.tokens), decodes, sampler is not None, feed.want_logits)

    @property
    def end(self) -> int:
        return self.start + self.n_tokens


StepRecord = tuple[tuple[FeedRecord, ...], ...]


def check_step(traits: Traits, groups: Sequence[Group]) -> StepRecord:
    """The step's record. Raises AssertionError where it breaks a rule."""
    step = tuple(tuple(FeedRecord.of(feed) for feed in group) for group in groups)
    assert step, "a step of nothing"
    feeds = [feed for group in step for feed in group]
    assert len({feed.seq_id for feed in feeds}) == len(feeds), "a sequence is fed twice in a step"
    assert sum(feed.n_tokens for feed in feeds) <= 2 * traits.n_batch + traits.n_slots, (
        "more than the native buffers hold"
    )
    for group in step:
        _check_group(traits, group)
    if any(feed.decodes for feed in feeds):
        n_prefill = sum(feed.n_tokens for feed in feeds if not feed.decodes)
        assert n_prefill <= traits.n_ubatch, f"{n_prefill} tokens of prefill beside a sequence that decodes"
    return step


def _check_group(traits: Traits, group: tuple[FeedRecord, ...]) -> None:
    seq_ids = [feed.seq_id for feed in group]
    assert seq_ids == sorted(set(seq_ids)), "rows must ascend by sequence, one feed each"
    assert seq_ids, "an empty group"
    assert 0 <= seq_ids[0] <= seq_ids[-1] < traits.n_slots
    assert all(feed.n_tokens > 0 and feed.start >= 0 and feed.end <= traits.n_ctx for feed in group)
    assert sum(feed.n_tokens for feed in group) <= traits.n_batch, "more than one native batch holds"
    if traits.memory.splits_steps and len(group) > 1:
        assert all(feed.n_tokens == 1 for feed in group), "a prefill chunk beside other rows on memory with a state"
    if traits.exact:
        assert len(group) == 1, "exact mode decodes one sequence at a time"
        if group[0].n_tokens > 1:
            assert group[0].start % traits.n_ubatch == 0, "exact mode: a chunk that begins off the grid"
