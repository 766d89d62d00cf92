"""What a scrape says of engines: read back with prometheus_client's own parser, and equal to their `Statistics`."""

from __future__ import annotations

import gc
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
from prometheus_client import REGISTRY, CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

import pyllamacache
from pyllamacache import CacheConfig
from pyllamacache.errors import ConfigError, ForkedError, MissingExtraError
from pyllamacache.observe import prometheus
from pyllamacache.observe.histogram import SECONDS_BOUNDS, Histogram
from pyllamacache.observe.metrics import EVICTION_CAUSES, Metrics, Statistics
from pyllamacache.observe.prometheus import Collector, register
from pyllamacache.prefix.retention import Eviction
from pyllamacache.request import CheckpointKind, Reason, Source

NewEngine = Callable[..., Any]
WORDS = "Ottilie keeps seven lighthouses"


class Observed:
    """An engine as far as a collector sees it."""

    def __init__(self, statistics: Statistics | None = None) -> None:
        self.is_closed = False
        self.now = statistics or Metrics(0).snapshot()

    def statistics(self) -> Statistics:
        return self.now


def scrape(registry: CollectorRegistry) -> dict[str, Metric]:
    text = generate_latest(registry).decode()
    families = list(text_string_to_metric_families(text))
    assert len({each.name for each in families}) == len(families)
    return {each.name.removeprefix(prometheus.PREFIX): each for each in families}


def samples(registry: CollectorRegistry, **labels: str) -> dict[tuple[str, tuple[str, ...]], float]:
    """By name and label values beside those of the engine, of the engines that have `labels`."""
    found: dict[tuple[str, tuple[str, ...]], float] = {}
    for family in scrape(registry).values():
        for each in family.samples:
            if labels.items() <= each.labels.items():
                rest = tuple(value for key, value in each.labels.items() if key not in prometheus.LABELS)
                key = each.name.removeprefix(prometheus.PREFIX), rest
                assert key not in found
                found[key] = each.value
    return found


def work(engine: Any, seed: int = 0) -> None:
    """Hits, a branch, a checkpoint put back, an eviction and a request without reuse."""
    ids = np.random.default_rng(seed).integers(0, 200, 400, dtype=np.int32)
    engine.complete(ids[:200], max_tokens=3, boundaries=[64])
    engine.complete(np.append(ids[:100], 5), max_tokens=3)
    engine.complete(ids[200:300], max_tokens=2, cache_prompt=False, namespace=WORDS)
    engine.complete(WORDS, max_tokens=2)
    engine.complete(WORDS + " and a goat", max_tokens=2)


@pytest.fixture
def engine(new_engine: NewEngine) -> Any:
    made = new_engine("hybrid", cache=CacheConfig(max_checkpoints=4, host_bytes="32MiB"))
    work(made)
    return made


# ---- numbers ---------------------------------------------------------------------------------------------------


def test_every_number_is_that_of_the_statistics(engine: Any) -> None:
    registry = CollectorRegistry()
    register(engine, registry, model_name="tiny")
    now, found = engine.statistics(), samples(registry)
    assert found["prefix_cache_queries_total", ()] == now.prompt_tokens - 100
    assert found["prefix_cache_hits_total", ()] == now.cached_tokens > 0
    assert found["generation_tokens_total", ()] == now.completion_tokens
    assert found["prefilled_tokens_total", ("disabled",)] == 100
    for source, n in now.cached_tokens_by_source.items():
        assert source is Source.NONE or found["cached_tokens_total", (source.value,)] == n
    for reason in Reason:
        n_tokens = now.prefilled_tokens_by_reason.get(reason, 0)
        assert found["prefilled_tokens_total", (reason.value,)] == n_tokens
        assert found["requests_by_reason_total", (reason.value,)] == now.requests_by_reason.get(reason, 0)
    for source in Source:
        assert found["requests_by_source_total", (source.value,)] == now.requests_by_source.get(source, 0)
    assert found["requests_total", ("answered",)] == now.n_requests == 5
    assert found["kv_cache_usage_perc", ()] == now.kv_tokens_used / now.kv_tokens
    assert found["cache_entries", ("checkpoints",)] == now.checkpoints.held > 0
    assert found["cache_bytes", ("checkpoints",)] == now.checkpoints.held_bytes
    assert found["cache_bytes", ("host",)] == now.tiers.host_bytes == engine.cache.resident_bytes
    assert found["cache_limit_bytes", ("host",)] == 32 << 20
    assert found["cache_entries", ("slots",)] == now.tiers.slots == sum(slot.n_tokens > 0 for slot in engine.slots)
    assert found["cache_tokens", ("slots",)] == sum(slot.n_tokens for slot in engine.slots)
    for kind, n in now.checkpoints.captured.items():
        assert found["checkpoints_captured_total", (kind,)] == n
    for reason, n in now.checkpoints.evicted.items():
        assert found["evictions_total", (reason, "checkpoints")] == n


def test_hits_and_misses_add_up(engine: Any) -> None:
    registry = CollectorRegistry()
    register(engine, registry)
    found = samples(registry)
    by_source = sum(value for (name, _), value in found.items() if name == "cached_tokens_total")
    by_reason = sum(value for (name, _), value in found.items() if name == "prefilled_tokens_total")
    assert by_source == found["prefix_cache_hits_total", ()]
    assert by_source + by_reason == found["prompt_tokens_total", ()]


def test_histograms_have_the_documented_buckets_and_every_sample(engine: Any) -> None:
    registry = CollectorRegistry()
    register(engine, registry)
    now, families = engine.statistics(), scrape(registry)
    for name, value in {
        "request_prefill_time_seconds": now.prefill,
        "request_restore_time_seconds": now.restore,
        "checkpoint_capture_time_seconds": now.checkpoints.capture,
        "checkpoint_stall_time_seconds": now.checkpoints.stall,
    }.items():
        buckets = [each for each in families[name].samples if each.name.endswith("_bucket")]
        assert [float(each.labels["le"]) for each in buckets] == [*SECONDS_BOUNDS, float("inf")]
        assert [each.value for each in buckets] == list(np.cumsum(value.counts))
        assert value.count == buckets[-1].value > 0
        assert next(each.value for each in families[name].samples if each.name.endswith("_sum")) == value.sum_s


def test_counters_only_grow(engine: Any) -> None:
    def counters() -> dict[tuple[str, tuple[str, ...]], float]:
        return {
            (each.name, tuple(each.labels.values())): each.value
            for family in scrape(registry).values()
            if family.type != "gauge"
            for each in family.samples
        }

    registry = CollectorRegistry()
    register(engine, registry)
    before = counters()
    for seed in range(1, 4):
        work(engine, seed)
        engine.cache.clear()
        after = counters()
        assert before.keys() == after.keys()
        assert all(after[key] >= value for key, value in before.items())
        assert after != before
        before = after


# ---- labels ----------------------------------------------------------------------------------------------------


def test_labels_are_enumerations_and_the_engine(engine: Any) -> None:
    registry = CollectorRegistry()
    register(engine, registry, model_name="tiny", engine_name="a")
    evictions = {each.value for each in Eviction}
    allowed = {
        "model_name": {"tiny"},
        "engine": {"a"},
        "source": {each.value for each in Source},
        "reason": {each.value for each in Reason} | evictions | {"larger_than_budget", "no_room", "busy", "failed"},
        "kind": {each.value for each in CheckpointKind},
        "cause": set(EVICTION_CAUSES),
        "tier": {"device", "slots", "parked", "spans", "checkpoints", "host", "disk"},
        "result": {"answered", "cancelled", "failed"},
        "outcome": {"written", "read", "refused", "failed", "lost"},
        "le": {str(bound) for bound in SECONDS_BOUNDS} | {"+Inf"},
    }
    for family in scrape(registry).values():
        for each in family.samples:
            assert all(value in allowed[key] for key, value in each.labels.items()), each


def test_what_did_not_happen_yet_is_zero_and_not_missing() -> None:
    observed, registry = Observed(), CollectorRegistry()
    register(observed, registry)
    found = samples(registry)
    assert {key[1] for key in found if key[0] == "prefilled_tokens_total"} == {(each.value,) for each in Reason}
    evictions = {key[1] for key in found if key[0] == "evictions_total"}
    assert evictions == {(each.value, tier) for tier in ("checkpoints", "spans") for each in Eviction}
    assert not any(found.values())


def test_no_text_of_a_prompt_and_no_namespace_is_exported(engine: Any) -> None:
    registry = CollectorRegistry()
    register(engine, registry)
    text = generate_latest(registry).decode()
    assert not any(word in text for word in WORDS.split())


def test_names_have_the_form_of_the_ecosystem() -> None:
    observed, registry = Observed(), CollectorRegistry()
    register(observed, registry)
    for line in generate_latest(registry).decode().splitlines():
        name = line.split("{")[0] if not line.startswith("#") else line.split()[2]
        assert re.fullmatch(r"pyllamacache:[a-z][a-z0-9_]*", name), line
    assert 'pyllamacache:prefix_cache_hits_total{engine="0",model_name=""}' in generate_latest(registry).decode()


def test_a_strange_model_name_is_escaped() -> None:
    observed, registry, name = Observed(), CollectorRegistry(), 'a"b\\c\nd{e="f"}'
    register(observed, registry, model_name=name)
    assert samples(registry, model_name=name)


# ---- engines come and go ---------------------------------------------------------------------------------------


def test_several_engines_share_a_registry() -> None:
    registry, engines = CollectorRegistry(), [Observed() for _ in range(3)]
    collectors = {register(each, registry, model_name="m") for each in engines}
    assert len(collectors) == 1
    families = scrape(registry)
    assert [each.labels["engine"] for each in families["num_requests_running"].samples] == ["0", "1", "2"]
    register(engines[0], registry, model_name="m", engine_name="first")
    assert samples(registry, engine="first")
    assert not samples(registry, engine="0")


def test_two_engines_cannot_have_the_same_names() -> None:
    registry, first, second = CollectorRegistry(), Observed(), Observed()
    register(first, registry, model_name="m", engine_name="a")
    with pytest.raises(ConfigError, match="no other engine"):
        register(second, registry, model_name="m", engine_name="a")
    first.is_closed = True
    register(second, registry, model_name="m", engine_name="a")
    assert len(scrape(registry)["num_requests_running"].samples) == 1


def test_other_labels_are_refused() -> None:
    with pytest.raises(ConfigError, match="tenant"):
        Collector(Observed(), {"tenant": "x"})


def test_a_closed_engine_disappears(engine: Any) -> None:
    registry = CollectorRegistry()
    register(engine, registry)
    assert samples(registry)
    engine.close()
    assert scrape(registry) == {}


def test_the_collector_keeps_no_engine_alive() -> None:
    registry, observed = CollectorRegistry(), Observed()
    register(observed, registry)
    del observed
    gc.collect()
    assert scrape(registry) == {}


def test_an_engine_of_another_process_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    registry, observed, other = CollectorRegistry(), Observed(), Observed()
    register(observed, registry)
    register(other, registry)

    def forked() -> Statistics:
        raise ForkedError("engine")

    monkeypatch.setattr(observed, "statistics", forked)
    assert [each.labels["engine"] for each in scrape(registry)["steps"].samples] == ["1"]


def test_a_collector_of_ones_own_beside_another_is_refused_by_the_registry() -> None:
    registry, observed = CollectorRegistry(), Observed()
    register(observed, registry)
    with pytest.raises(ValueError, match="Duplicated"):
        registry.register(Collector(observed))


def test_a_foreign_collector_of_these_metrics_is_told_of() -> None:
    registry, observed = CollectorRegistry(), Observed()
    foreign = Collector(observed)
    registry.register(foreign)
    for _ in range(2):
        with pytest.raises(ValueError, match="Duplicated"):
            register(observed, registry)
    registry.unregister(foreign)
    register(observed, registry)
    assert samples(registry)


def test_what_was_taken_out_of_the_registry_comes_back_with_the_next_engine() -> None:
    registry, observed, other = CollectorRegistry(), Observed(), Observed()
    registry.unregister(register(observed, registry))
    assert scrape(registry) == {}
    register(other, registry)
    assert len(scrape(registry)["steps"].samples) == 2


def test_without_a_registry_it_is_the_one_of_the_package() -> None:
    observed = Observed()
    collector = register(observed, model_name="here")
    try:
        assert samples(REGISTRY, model_name="here")
    finally:
        REGISTRY.unregister(collector)


def test_the_public_name_takes_the_name_of_the_model(engine: Any) -> None:
    registry = CollectorRegistry()
    pyllamacache.register_metrics(engine, registry)
    assert samples(registry, model_name=engine.model.name)


def test_without_the_package_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(MissingExtraError, match=re.escape("pip install 'pyllamacache[metrics]'")):
        register(Observed())


def test_importing_the_module_does_not_import_the_package() -> None:
    program = "import sys, pyllamacache; pyllamacache.register_metrics; print('prometheus_client' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd="/")
    assert done.stdout.strip() == "False"


def test_every_duration_is_exported() -> None:
    """A histogram that is added to the statistics has to be added here."""
    now = Metrics(0).snapshot()
    histograms = [each.name for owner in (now, now.checkpoints) for each in fields(owner)
                  if isinstance(getattr(owner, each.name), Histogram)]  # fmt: skip
    observed, registry = Observed(now), CollectorRegistry()
    register(observed, registry)
    exported = [family for family in scrape(registry).values() if family.type == "histogram"]
    assert len(exported) == len(histograms) == 4
    assert all(isinstance(each, Sample) for family in exported for each in family.samples)
