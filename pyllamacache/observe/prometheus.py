"""An engine's `Statistics` as Prometheus metrics, read when they are scraped. The extra `metrics` brings what it needs.

    pyllamacache.register_metrics(engine, model_name="smollm2")
    prometheus_client.start_http_server(9400)

Names are those of vLLM and SGLang where they have one, so that their dashboards work with another prefix. Labels are
`model_name` and `engine`, and beside them only values of enumerations: never a namespace, nor anything of a prompt.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from ..errors import ConfigError, MissingExtraError, PyLlamaCacheError
from ..request import CheckpointKind, Reason, Source
from .histogram import Histogram
from .metrics import EVICTION_CAUSES, Metrics

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric
    from prometheus_client.registry import CollectorRegistry

    from .metrics import Statistics

_K = TypeVar("_K")

PREFIX = "pyllamacache:"
LABELS = ("model_name", "engine")

_EVICTIONS = ("stranded", "thinned", "outvalued", "replaced", "cleared", "broken", "expired")
_REFUSALS = ("larger_than_budget", "no_room", "busy", "failed")


class Observed(Protocol):
    """What is asked of an engine."""

    @property
    def is_closed(self) -> bool: ...
    def statistics(self) -> Statistics: ...


@dataclass(frozen=True, slots=True)
class _Family:
    """One metric of one engine."""

    kind: str
    """counter, gauge or histogram."""
    name: str
    help: str
    labels: tuple[str, ...]
    """Beside those of the engine."""
    values: Mapping[tuple[str, ...], float | Histogram]
    """By the values of `labels`."""


class Collector:
    """A `prometheus_client` collector over engines that come and go.

    Engines are held weakly: one that was closed or collected is missing from the next scrape. One registry takes one
    collector, since a name may be in it once; `register` sees to that.
    """

    def __init__(self, engine: Observed | None = None, labels: Mapping[str, str] | None = None) -> None:
        """`labels`: as in `add`; `model_name` and `engine`, of which either may be left out."""
        _client()
        self._engines: dict[int, tuple[weakref.ref[Observed], tuple[str, str]]] = {}
        self._numbers = itertools.count()
        if engine is not None:
            self.add(engine, labels)

    def add(self, engine: Observed, labels: Mapping[str, str] | None = None) -> None:
        """Adding one again changes its labels.

        Args:
            labels: `model_name`, "" if left out, and `engine`, a number that no other one here has if left out.

        Raises:
            ConfigError: other labels, or a pair that another engine here has.
        """
        labels = dict(labels or {})
        if not set(labels) <= set(LABELS):
            raise ConfigError("labels", sorted(set(labels) - set(LABELS)), f"none beside {' and '.join(LABELS)}")
        known = next((number for number, (each, _) in list(self._engines.items()) if each() is engine), None)
        number = next(self._numbers) if known is None else known
        values = (str(labels.get("model_name", "")), str(labels.get("engine", number)))
        taken = [pair for other, (each, pair) in list(self._engines.items()) if other != number and _alive(each)]
        if values in taken:
            raise ConfigError("labels", dict(zip(LABELS, values, strict=True)), "what no other engine here has")
        self._engines[number] = (weakref.ref(engine), values)

    def describe(self) -> list[Metric]:
        """Names only: the registry refuses what another collector has."""
        return [_metric(family) for family in _families(Metrics(0).snapshot())]

    def collect(self) -> Iterator[Metric]:
        """One metric of each name, with the samples of every engine that is open. Raises nothing of theirs."""
        found: dict[str, Any] = {}
        for number, (reference, labels) in list(self._engines.items()):
            statistics = _statistics(reference)
            if statistics is None:
                self._engines.pop(number, None)
                continue
            for family in _families(statistics):
                metric = found.get(family.name) or found.setdefault(family.name, _metric(family))
                for key, value in family.values.items():
                    _add(metric, (*labels, *key), value)
        yield from found.values()


_COLLECTORS: weakref.WeakKeyDictionary[CollectorRegistry, Collector] = weakref.WeakKeyDictionary()


def register(
    engine: Observed,
    registry: CollectorRegistry | None = None,
    *,
    model_name: str | None = None,
    engine_name: str | None = None,
) -> Collector:
    """Export an engine's statistics from a registry until it is closed or collected.

    Args:
        registry: None: prometheus_client's own.
        model_name: None: its model's name, where it has one.
        engine_name: tells engines of one model apart; None: a number.

    Returns: the registry's collector, which all engines registered there share.

    Raises:
        MissingExtraError: prometheus_client is not installed.
        ConfigError: another engine there has both names.
        ValueError: prometheus_client's, where another collector there has the names of these metrics.
    """
    registry = _client().REGISTRY if registry is None else registry
    fresh = Collector()
    collector = _COLLECTORS.setdefault(registry, fresh)
    try:
        registry.register(collector)
    except ValueError:  # as a rule because it is there, unless somebody took it out
        if collector is fresh:
            del _COLLECTORS[registry]
            raise
    if model_name is None:
        model_name = str(getattr(getattr(engine, "model", None), "name", ""))
    labels = {"model_name": model_name}
    if engine_name is not None:
        labels["engine"] = engine_name
    collector.add(engine, labels)
    return collector


register_metrics = register
"""As `pyllamacache.register_metrics`."""


def _client() -> Any:
    try:
        import prometheus_client
    except ImportError:
        raise MissingExtraError("exporting metrics", "prometheus_client", "metrics") from None
    return prometheus_client


def _alive(reference: weakref.ref[Observed]) -> bool:
    engine = reference()
    return engine is not None and not engine.is_closed


def _statistics(reference: weakref.ref[Observed]) -> Statistics | None:
    """None: the engine is gone, or belongs to the process that this one was forked from."""
    engine = reference()
    try:
        return None if engine is None or engine.is_closed else engine.statistics()
    except PyLlamaCacheError:
        return None


# ---- what is exported ------------------------------------------------------------------------------------------


def _families(now: Statistics) -> Iterator[_Family]:
    yield from _tokens(now)
    yield from _requests(now)
    yield from _held(now)
    yield from _work(now)
    yield from _seconds(now)


def _plain(kind: str, name: str, text: str, value: float | Histogram) -> _Family:
    return _Family(kind, name, text, (), {(): value})


def _by(kind: str, name: str, text: str, label: str, values: Mapping[Any, int]) -> _Family:
    return _Family(kind, name, text, (label,), {(str(key),): value for key, value in values.items()})


def _all(keys: Iterable[_K], counts: Mapping[_K, int]) -> dict[_K, int]:
    """With a zero for what did not happen yet, so that its first time shows as an increase."""
    return {**dict.fromkeys(keys, 0), **counts}


def _tokens(now: Statistics) -> Iterator[_Family]:
    asked = now.prompt_tokens - now.prefilled_tokens_by_reason.get(Reason.DISABLED, 0)
    cached = {source: now.cached_tokens_by_source.get(source, 0) for source in Source if source is not Source.NONE}
    prefilled = _all(Reason, now.prefilled_tokens_by_reason)
    yield _plain("counter", "prefix_cache_queries", "Prompt tokens looked up: all but those sent without reuse.", asked)
    yield _plain("counter", "prefix_cache_hits", "Of these, tokens that were not computed again.", now.cached_tokens)
    yield _by("counter", "cached_tokens", "Prompt tokens not computed again, by where they were.", "source", cached)
    text = "Prompt tokens computed, by why not more was reused; hit: what was new."
    yield _by("counter", "prefilled_tokens", text, "reason", prefilled)
    yield _plain("counter", "prompt_tokens", "Prompt tokens, cached or computed.", now.prompt_tokens)
    yield _plain("counter", "generation_tokens", "Sampled tokens.", now.completion_tokens)


def _requests(now: Statistics) -> Iterator[_Family]:
    results = {"answered": now.n_requests, "cancelled": now.n_cancelled, "failed": now.n_failed}
    by_source, by_reason = _all(Source, now.requests_by_source), _all(Reason, now.requests_by_reason)
    yield _plain("gauge", "num_requests_running", "Requests in a slot.", now.n_running)
    yield _plain("gauge", "num_requests_waiting", "Requests without one.", now.n_queued)
    yield _by("counter", "requests", "Requests that ended.", "result", results)
    yield _by("counter", "requests_by_source", "Requests that ran, by what was reused.", "source", by_source)
    yield _by("counter", "requests_by_reason", "Requests that ran, by why not more was.", "reason", by_reason)
    yield _plain(
        "counter", "num_preemptions", "Requests that gave their KV cells back and began again.", now.n_preempted
    )


def _held(now: Statistics) -> Iterator[_Family]:
    tiers, checkpoints = now.tiers, now.checkpoints
    usage = now.kv_tokens_used / now.kv_tokens if now.kv_tokens else 0.0
    tokens = {"device": now.kv_tokens_used, "slots": tiers.slot_tokens, "parked": tiers.parked_tokens}
    entries = {
        "slots": tiers.slots,
        "parked": tiers.parked,
        "spans": tiers.spans,
        "checkpoints": checkpoints.held,
        "disk": tiers.disk_entries,
    }
    sizes = {
        "spans": tiers.span_bytes,
        "checkpoints": checkpoints.held_bytes,
        "host": tiers.host_bytes,
        "disk": tiers.disk_bytes,
    }
    limits = {
        "checkpoints": checkpoints.limit_bytes,
        "host": tiers.host_limit_bytes,
        "disk": tiers.disk_limit_bytes,
    }
    yield _plain("gauge", "kv_cache_usage_perc", "KV cells in use, 1 is all.", usage)
    yield _plain("gauge", "kv_cache_cells", "KV cells there are.", now.kv_tokens)
    text = "Tokens with KV cells; device counts each cell once, slots and parked count what they share."
    yield _by("gauge", "cache_tokens", text, "tier", tokens)
    yield _by("gauge", "cache_entries", "What is kept: slots that hold something, and entries beside.", "tier", entries)
    text = "Bytes kept; host is all host memory in use: spans, checkpoints, and blocks for the next ones."
    yield _by("gauge", "cache_bytes", text, "tier", sizes)
    yield _by("gauge", "cache_limit_bytes", "What the bytes of a tier may be.", "tier", limits)
    yield _plain("gauge", "checkpoints_in_flight", "Captures that are not ready.", checkpoints.in_flight)
    yield _plain("gauge", "disk_entries_waiting", "Entries to be written to disk.", tiers.disk_waiting)


def _work(now: Statistics) -> Iterator[_Family]:
    tiers, checkpoints = now.tiers, now.checkpoints
    evictions: dict[tuple[str, ...], int] = {}
    for tier, counts in (("checkpoints", checkpoints.evicted), ("spans", tiers.evicted)):
        evictions.update(((tier, reason), n) for reason, n in _all(_EVICTIONS, counts).items())
    disk = {
        "written": tiers.disk_written,
        "read": tiers.disk_read,
        "refused": tiers.disk_refused,
        "failed": tiers.disk_failed,
        "lost": tiers.disk_lost,
    }
    text = "Tokens whose KV cells were given up, by cause."
    yield _by("counter", "evicted_tokens", text, "cause", _all(EVICTION_CAUSES, now.evicted_tokens_by_cause))
    text = "Checkpoints and spans in host memory given up."
    yield _Family("counter", "evictions", text, ("tier", "reason"), evictions)
    captured = {str(kind): n for kind, n in checkpoints.captured.items()}
    yield _by("counter", "checkpoints_captured", "Checkpoints taken.", "kind", _all(map(str, CheckpointKind), captured))
    refused = _all(_REFUSALS, checkpoints.refused)
    yield _by("counter", "checkpoints_refused", "Checkpoints not taken.", "reason", refused)
    yield _plain("counter", "checkpoints_restored", "Checkpoints put back.", checkpoints.restored)
    yield _plain("counter", "spans_saved", "Spans copied to host memory.", tiers.spans_saved)
    yield _plain("counter", "spans_refused", "Spans that found no room there.", tiers.spans_refused)
    yield _by("counter", "disk_operations", "Entries of the disk tier.", "outcome", disk)
    yield _plain("counter", "steps", "Steps of the scheduler.", now.n_steps)
    yield _plain("counter", "lost_steps", "Native calls whose sequences were lost.", now.n_lost_steps)


def _seconds(now: Statistics) -> Iterator[_Family]:
    counts = now.checkpoints
    yield _plain("counter", "native_seconds", "Inside native steps.", now.native_s)
    yield _plain("counter", "scheduler_seconds", "The scheduler's own work around them.", now.scheduler_s)
    yield _plain("counter", "checkpoint_stall_seconds", "On taking checkpoints, refused ones too.", counts.stall_s)
    text = "From the end of restoring to the first token, or to the end of the request."
    yield _plain("histogram", "request_prefill_time_seconds", text, now.prefill)
    text = "Of bringing the slot to where the prefill began."
    yield _plain("histogram", "request_restore_time_seconds", text, now.restore)
    text = "Of a checkpoint, from when it was begun until it was ready."
    yield _plain("histogram", "checkpoint_capture_time_seconds", text, counts.capture)
    text = "Of a checkpoint, while the scheduler did nothing else."
    yield _plain("histogram", "checkpoint_stall_time_seconds", text, counts.stall)


# ---- in prometheus_client's terms ------------------------------------------------------------------------------


def _metric(family: _Family) -> Any:
    from prometheus_client import core

    kinds = {
        "counter": core.CounterMetricFamily,
        "gauge": core.GaugeMetricFamily,
        "histogram": core.HistogramMetricFamily,
    }
    return kinds[family.kind](PREFIX + family.name, family.help, labels=(*LABELS, *family.labels))


def _add(metric: Any, labels: tuple[str, ...], value: float | Histogram) -> None:
    if not isinstance(value, Histogram):
        metric.add_metric(labels, value)
        return
    ends = [*map(str, value.bounds), "+Inf"]
    metric.add_metric(labels, list(zip(ends, itertools.accumulate(value.counts), strict=True)), value.sum_s)
