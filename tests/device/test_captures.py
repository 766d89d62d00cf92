"""Captures of sequence states against synchronous reads, while decoding goes on: on a device, and under sanitizers.

The driver replays one schedule of decode calls; it exits with a message at the first byte that differs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.device.builds import ADDRESS, THREAD_VULKAN, VULKAN, Flavour, lavapipe_environment, thread_flavour
from tests.models import HybridSpec, RecurrentSpec, SlidingSpec, TinySpec

# A fixture may compile llama.cpp and its shaders first.
pytestmark = pytest.mark.timeout(2400)

# As small as can be: a software device takes milliseconds for each row of a norm.
MODELS: dict[str, TinySpec] = {
    "hybrid": HybridSpec(n_layer=2, n_head=1, n_head_kv=1, value_heads=2, key_heads=1),
    "sliding": SlidingSpec(n_layer=2, n_head=1, n_head_kv=1, window=8),
    "recurrent": RecurrentSpec(n_layer=2),
    # Three layers on the device leave part of the state in host memory.
    "hybrid-split": HybridSpec(n_layer=4, n_head=1, n_head_kv=1, value_heads=2, key_heads=1),
    "sliding-split": SlidingSpec(n_layer=4, n_head=1, n_head_kv=1, window=8),
    # One tensor of more than the chunk that is read at once.
    "large": HybridSpec(n_layer=2, n_head=1, n_head_kv=1, value_heads=80, key_heads=16, state_size=128),
}

# Mode, model, type of the cache, flash attention, layers on the device. Without flash attention a window's values lie
# transposed: one piece per value. Quantized values need flash attention.
Case = tuple[str, str, str, int, int]
CASES: list[Case] = [
    ("snapshot", "hybrid", "f16", 0, 99),
    ("snapshot", "hybrid-split", "f32", 0, 3),
    ("snapshot", "sliding", "f16", 0, 99),
    ("snapshot", "sliding", "q8_0", 1, 99),
    ("snapshot", "recurrent", "f16", 0, 99),
    ("staging", "hybrid", "f16", 0, 99),
    ("staging", "sliding-split", "f32", 0, 3),
    ("staging", "sliding", "q8_0", 1, 99),
]

SANITIZER_OPTIONS = {
    "ASAN_OPTIONS": "exitcode=66:detect_leaks=0",  # Mesa's compiler keeps what it made
    "TSAN_OPTIONS": "exitcode=66:halt_on_error=0",
}


def run(driver: Path, model: Path, *arguments: str, environment: dict[str, str] | None = None) -> list[dict[str, Any]]:
    """Run the driver; returns its JSON lines, or fails with what it said."""
    seed = os.environ.get("PYLLAMACACHE_TEST_SEED", "1")
    command = [str(driver), str(model), "--seed", seed, *arguments]
    result = subprocess.run(
        command,
        env=os.environ | SANITIZER_OPTIONS | (environment or {}),
        capture_output=True, text=True, check=False, timeout=1200,
    )  # fmt: skip
    if result.returncode != 0:
        said = f"{result.stdout[-2000:]}\n{result.stderr[:6000]}"
        pytest.fail(f"exit status {result.returncode}, seed {seed}: {' '.join(command[2:])}\n{said}", pytrace=False)
    sys.stdout.write(result.stdout)
    return [json.loads(line) for line in result.stdout.splitlines()]


def arguments(case: Case) -> list[str]:
    mode, _, kv_type, flash, layers = case
    return ["--device", "gpu", "--mode", mode, "--type", kv_type, "--flash", str(flash), "--layers", str(layers)]


@pytest.mark.device
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_device_captures_equal_synchronous_reads(
    driver: Callable[[Flavour], Path], tiny_path: Callable[[TinySpec], Path], case: Case
) -> None:
    options = [*arguments(case), "--captures", "12"]
    lines = run(driver(VULKAN), tiny_path(MODELS[case[1]]), *options, environment=lavapipe_environment())
    equal = [line for line in lines if line["check"] == "equal"]
    assert lines[-1]["check"] == "end"
    assert sum(line["in_flight"] for line in equal) > 0, "no capture was in flight when begin returned"
    assert sum(line["two_in_flight"] for line in equal) > 0, "never were two captures in flight"
    assert equal[1]["cancelled"] > 0


@pytest.mark.device
@pytest.mark.parametrize("mode", ["sync", "host"])
def test_host_captures_in_a_build_with_a_device(
    driver: Callable[[Flavour], Path], tiny_path: Callable[[TinySpec], Path], mode: str
) -> None:
    lines = run(
        driver(VULKAN),
        tiny_path(MODELS["hybrid"]),
        "--device", "cpu", "--mode", mode,
        environment=lavapipe_environment(),
    )  # fmt: skip
    assert {line["in_flight"] for line in lines if line["check"] == "equal"} == {0}


@pytest.mark.device
@pytest.mark.parametrize("mode", ["snapshot", "staging"])
def test_begin_does_not_wait_for_queued_work(
    driver: Callable[[Flavour], Path], tiny_path: Callable[[TinySpec], Path], mode: str
) -> None:
    options = [*arguments((mode, "large", "f16", 0, 99)), "--bench", "--captures", "5"]
    [times] = run(driver(VULKAN), tiny_path(MODELS["large"]), *options, environment=lavapipe_environment())
    # A hundredth where nothing else runs; other programs on the same cores slow a short call more than a long one.
    assert times["begin_ms"] < times["sync_read_ms"] / 20


@pytest.mark.sanitizer
@pytest.mark.parametrize("flavour", [lambda: ADDRESS, thread_flavour], ids=["address", "thread"])
@pytest.mark.parametrize("kind", ["hybrid", "sliding", "recurrent"])
def test_host_captures_under_a_sanitizer(
    driver: Callable[[Flavour], Path],
    tiny_path: Callable[[TinySpec], Path],
    flavour: Callable[[], Flavour],
    kind: str,
) -> None:
    run(driver(flavour()), tiny_path(MODELS[kind]), "--device", "cpu", "--captures", "16")


@pytest.mark.sanitizer
@pytest.mark.device
@pytest.mark.parametrize("case", [CASES[0], CASES[6]], ids=lambda case: "-".join(map(str, case)))
def test_device_captures_under_a_sanitizer(
    driver: Callable[[Flavour], Path], tiny_path: Callable[[TinySpec], Path], case: Case
) -> None:
    options = [*arguments(case), "--captures", "8"]
    run(driver(THREAD_VULKAN), tiny_path(MODELS[case[1]]), *options, environment=lavapipe_environment())
