"""Counters of an engine. The scheduler thread writes, any thread takes a frozen `Statistics`. No prompt text."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .histogram import Histogram, Recorder

if TYPE_CHECKING:
    from ..request import CaptureMode, Completion, Reason, Source

EVICTION_CAUSES = ("slot", "parked", "outnumbered")
"""Keys of `Statistics.evicted_tokens_by_cause`."""


@dataclass(frozen=True, slots=True)
class CheckpointCounts:
    """What became of checkpoints. Counts grow, but for the first five, which are as of now."""

    held: int = 0
    """In flight or ready."""
    held_bytes: int = 0
    in_flight: int = 0
    max_held: int = 0
    limit_bytes: int = 0
    """0 where the memory has no state."""
    captured: Mapping[str, int] = field(default_factory=dict)
    """By `CheckpointKind`."""
    refused: Mapping[str, int] = field(default_factory=dict)
    """Not taken: `larger_than_budget`, `no_room`, `busy` (second class while two were in flight), `failed`."""
    evicted: Mapping[str, int] = field(default_factory=dict)
    """Given up: `stranded`, `thinned`, `outvalued`, `replaced`, `cleared`, `broken`, `expired`."""
    waited: int = 0
    """Of the first class, that had to wait for one in flight."""
    restored: int = 0
    mode: CaptureMode = "none"
    """How the latest one was taken."""
    staging_bytes: int = 0
    """Host memory reserved for the way from a device."""
    stall_s: float = 0.0
    """Seconds the scheduler's thread spent on taking them, refused ones included."""
    capture: Histogram = field(default_factory=Histogram)
    """Of each that became ready: from when it was begun until then."""
    stall: Histogram = field(default_factory=Histogram)
    """Of each that became ready: what the scheduler's thread spent on it, waiting for it included."""


@dataclass(frozen=True, slots=True)
class TierCounts:
    """What is kept of KV cells outside the slots, and what became of it.

    Counts grow, but for `slots` to `host_limit_bytes` and `disk_entries` to `disk_waiting`, which are as of now.
    """

    slots: int = 0
    """That hold something."""
    slot_tokens: int = 0
    """In them; what several share counts for each."""
    parked: int = 0
    """Prefixes that hold cells on the device, beside the slots."""
    parked_tokens: int = 0
    spans: int = 0
    """In host memory."""
    span_bytes: int = 0
    host_bytes: int = 0
    """Host memory in use: spans, checkpoints, captures in flight, staging, and blocks kept for the next ones."""
    host_limit_bytes: int = 0
    spans_saved: int = 0
    spans_refused: int = 0
    """Not copied to host memory: no room, or the native call failed."""
    spans_evicted: int = 0
    """But for those that the caller cleared."""
    evicted: Mapping[str, int] = field(default_factory=dict)
    """Spans given up, by reason as in `CheckpointCounts.evicted`."""
    disk_entries: int = 0
    """On disk for this model and layout, as far as this engine knows."""
    disk_bytes: int = 0
    """Of these."""
    disk_limit_bytes: int = 0
    """Of the folder, whatever is in it; 0: there is none."""
    disk_waiting: int = 0
    """Entries that are to be written, or being written."""
    disk_written: int = 0
    disk_refused: int = 0
    """By the budget of the folder."""
    disk_failed: int = 0
    """Writes that an error ended."""
    disk_read: int = 0
    disk_lost: int = 0
    """Entries that were gone or damaged when they were to be read."""


@dataclass(frozen=True, slots=True)
class Statistics:
    """What an engine has done since it was made, and what it is doing. Token and request counts grow monotonically."""

    n_requests: int
    """Finished, by result; failed and cancelled ones are counted apart."""
    n_cancelled: int
    n_failed: int
    n_queued: int
    n_running: int
    prompt_tokens: int
    cached_tokens: int
    prefilled_tokens: int
    completion_tokens: int
    requests_by_source: Mapping[Source, int]
    requests_by_reason: Mapping[Reason, int]
    cached_tokens_by_source: Mapping[Source, int]
    prefilled_tokens_by_reason: Mapping[Reason, int]
    """What was computed, by why not more was reused."""
    n_evicted_tokens: int
    """Tokens of idle slots and parked prefixes given up for want of KV cells."""
    evicted_tokens_by_cause: Mapping[str, int]
    """`slot`: of an idle slot, for want of cells. `parked`: the same of a parked prefix. `outnumbered`: of a parked
    prefix that gave its place to another or was over a new limit. What remained in host memory or on disk counts."""
    n_preempted: int
    """Running requests that gave their cells back and were prefilled again."""
    n_lost_steps: int
    """Native calls whose sequences were lost."""
    n_steps: int
    native_s: float
    """Seconds inside native steps."""
    scheduler_s: float
    """Seconds of the scheduler's own work around them, waiting for work excluded."""
    kv_tokens: int
    """KV cells there are; 0 for memory without cells."""
    kv_tokens_used: int
    checkpoints: CheckpointCounts
    tiers: TierCounts
    prefill: Histogram = field(default_factory=Histogram)
    """One of each request that ran and was answered, cancelled ones included: its `timings.prefill_s`."""
    restore: Histogram = field(default_factory=Histogram)
    """The same of its `timings.restore_s`."""

    @property
    def hit_rate(self) -> float:
        """Cached prompt tokens over all prompt tokens; 0 before the first."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    def __str__(self) -> str:
        from .lines import statistics

        return statistics(self)

    def _repr_html_(self) -> str:
        from .display import statistics

        return statistics(self)


class Metrics:
    """The mutable side. One writer."""

    def __init__(self, kv_tokens: int) -> None:
        self._lock = threading.Lock()
        self._kv_tokens = kv_tokens
        self._counts: Counter[str] = Counter()
        self._by_source: Counter[Source] = Counter()
        self._by_reason: Counter[Reason] = Counter()
        self._cached_by_source: Counter[Source] = Counter()
        self._prefilled_by_reason: Counter[Reason] = Counter()
        self._prefill = Recorder()
        self._restore = Recorder()
        self._native_s = 0.0
        self._scheduler_s = 0.0
        self._n_queued = 0
        self._n_running = 0
        self._kv_tokens_used = 0
        self._checkpoints = CheckpointCounts()
        self._tiers = TierCounts()

    def tiers(self, counts: TierCounts) -> None:
        with self._lock:
            self._tiers = counts

    def checkpoints(self, counts: CheckpointCounts) -> None:
        with self._lock:
            self._checkpoints = counts

    def step(self, native_s: float, scheduler_s: float, kv_tokens_used: int) -> None:
        with self._lock:
            self._counts["steps"] += 1
            self._native_s += native_s
            self._scheduler_s += scheduler_s
            self._kv_tokens_used = kv_tokens_used

    def load(self, n_queued: int, n_running: int, kv_tokens_used: int) -> None:
        with self._lock:
            self._n_queued, self._n_running, self._kv_tokens_used = (
                n_queued,
                n_running,
                kv_tokens_used,
            )

    def count(self, name: str, n: int = 1) -> None:
        """`name` is one of failed, cancelled, preempted, lost_steps, or `evicted_` and one of EVICTION_CAUSES."""
        with self._lock:
            self._counts[name] += n

    def failed(self, source: Source, reason: Reason, *, prompt: int, cached: int, completion: int) -> None:
        """Tokens of a request that ended with an error."""
        with self._lock:
            self._counts["failed"] += 1
            self._counts["prompt_tokens"] += prompt
            self._counts["cached_tokens"] += cached
            self._counts["prefilled_tokens"] += prompt - cached
            self._counts["completion_tokens"] += completion
            self._cached_by_source[source] += cached
            self._prefilled_by_reason[reason] += prompt - cached

    def finished(self, completion: Completion) -> None:
        cache, usage, timings = completion.cache, completion.usage, completion.timings
        with self._lock:
            self._counts["cancelled" if completion.finish_reason == "cancelled" else "requests"] += 1
            self._counts["prompt_tokens"] += usage.prompt_tokens
            self._counts["cached_tokens"] += usage.cached_tokens
            self._counts["prefilled_tokens"] += cache.prefilled_tokens
            self._counts["completion_tokens"] += usage.completion_tokens
            self._by_source[cache.source] += 1
            self._by_reason[cache.reason] += 1
            self._cached_by_source[cache.source] += usage.cached_tokens
            self._prefilled_by_reason[cache.reason] += cache.prefilled_tokens
            self._prefill.add(timings.prefill_s)
            self._restore.add(timings.restore_s)

    def snapshot(self) -> Statistics:
        with self._lock:
            counts = self._counts
            return Statistics(
                n_requests=counts["requests"],
                n_cancelled=counts["cancelled"],
                n_failed=counts["failed"],
                n_queued=self._n_queued,
                n_running=self._n_running,
                prompt_tokens=counts["prompt_tokens"],
                cached_tokens=counts["cached_tokens"],
                prefilled_tokens=counts["prefilled_tokens"],
                completion_tokens=counts["completion_tokens"],
                requests_by_source=dict(self._by_source),
                requests_by_reason=dict(self._by_reason),
                cached_tokens_by_source=dict(self._cached_by_source),
                prefilled_tokens_by_reason=dict(self._prefilled_by_reason),
                n_evicted_tokens=counts["evicted_slot"] + counts["evicted_parked"],
                evicted_tokens_by_cause={cause: counts[f"evicted_{cause}"] for cause in EVICTION_CAUSES},
                n_preempted=counts["preempted"],
                n_lost_steps=counts["lost_steps"],
                n_steps=counts["steps"],
                native_s=self._native_s,
                scheduler_s=self._scheduler_s,
                kv_tokens=self._kv_tokens,
                kv_tokens_used=self._kv_tokens_used,
                checkpoints=self._checkpoints,
                tiers=self._tiers,
                prefill=self._prefill.value(),
                restore=self._restore.value(),
            )
