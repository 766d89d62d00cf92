"""Shared fixtures: tiny models of every memory kind, engines over them, real models where behaviour is real."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# Read when the extension is loaded. On a machine that others use too, threads that spin at every barrier make a test
# take minutes instead of seconds.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from tests.models import FullSpec, HybridSpec, ModelCache, RecurrentSpec, SlidingSpec, TinySpec

_SLOW_MACHINE = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.function_scoped_fixture]
settings.register_profile("ci", deadline=None, print_blob=True, suppress_health_check=_SLOW_MACHINE)
settings.register_profile("long", settings.get_profile("ci"), max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

KINDS: dict[str, TinySpec] = {
    "full": FullSpec(),
    "sliding": SlidingSpec(),
    "hybrid": HybridSpec(),
    "recurrent": RecurrentSpec(),
}


@pytest.fixture(scope="session")
def model_cache(tmp_path_factory: pytest.TempPathFactory) -> ModelCache:
    return ModelCache(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def tiny_path(model_cache: ModelCache) -> Callable[[TinySpec | str], Path]:
    """The file of a spec, or of the default spec of a kind."""

    def path(spec: TinySpec | str) -> Path:
        return model_cache.path(KINDS[spec] if isinstance(spec, str) else spec)

    return path


@pytest.fixture(scope="session")
def tiny_models(tiny_path: Callable[[TinySpec | str], Path]) -> Iterator[Callable[[TinySpec | str], Any]]:
    """Loaded models by kind or spec, shared by the whole session; nobody closes them but this fixture."""
    from pyllamacache import Model

    loaded: dict[Path, Model] = {}

    def load(spec: TinySpec | str) -> Model:
        path = tiny_path(spec)
        if path not in loaded:
            loaded[path] = Model(path, progress=False)
        return loaded[path]

    yield load
    for model in loaded.values():
        model.close()


@pytest.fixture
def new_engine(tiny_models: Callable[[TinySpec | str], Any]) -> Iterator[Callable[..., Any]]:
    """`new_engine("hybrid", n_slots=2)`: an engine over a tiny model, closed at the end of the test."""
    from pyllamacache import Engine

    made: list[Engine] = []

    def make(spec: TinySpec | str = "full", **options: Any) -> Engine:
        defaults: dict[str, Any] = {
            "n_ctx": 1024,
            "n_slots": 2,
            "n_batch": 128,
            "n_ubatch": 32,
            "n_threads": 1,
            "type_k": "f32",
            "type_v": "f32",
            "progress": False,
        }
        if options.get("type_v", "f32") in ("f32", "f16", "bf16"):
            defaults["flash_attention"] = "off"  # with it ggml adds values up in F16: tests/models has the numbers
        if not options.get("exact"):
            defaults["kv_tokens"] = 4096
        engine = Engine(tiny_models(spec), **{**defaults, **options})
        made.append(engine)
        return engine

    yield make
    for engine in made:
        engine.close()


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    from tests.models.real import smollm2

    return smollm2()


@pytest.fixture(scope="session")
def gemma3_path() -> Path:
    from tests.models.real import gemma3

    return gemma3()
