"""Timing: interleaved cases, warm-up first, medians with spread, and a JSON file that says where it came from."""

from __future__ import annotations

import argparse
import datetime as dt
import gc
import json
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True, slots=True)
class Summary:
    """Of one case's samples."""

    median: float
    p05: float
    p95: float
    minimum: float
    maximum: float
    n: int


def summarize(samples: Sequence[float]) -> Summary:
    ordered = sorted(samples)

    def quantile(q: float) -> float:
        return ordered[min(len(ordered) - 1, round(q * (len(ordered) - 1)))]

    return Summary(statistics.median(ordered), quantile(0.05), quantile(0.95), ordered[0], ordered[-1], len(ordered))


def interleave(cases: Mapping[str, Callable[[], float]], *, repeats: int, warmup: int = 1) -> dict[str, list[float]]:
    """Run every case in turn, `repeats` times over; each returns its own measurement. The warm-up is thrown away."""
    samples: dict[str, list[float]] = {name: [] for name in cases}
    for round_ in range(-warmup, repeats):
        for name, case in cases.items():
            gc.collect()
            value = case()
            if round_ >= 0:
                samples[name].append(value)
    return samples


def print_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    widths = [max(len(str(row[i])) for row in [header, *rows]) for i in range(len(header))]
    print(f"\n{title}")
    for row in [header, ["-" * width for width in widths], *rows]:
        print("  ".join(str(cell).ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _commit() -> str:
    run = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=12"], capture_output=True, text=True, check=False
    )
    return run.stdout.strip() or "unknown"


def origin(model: Any) -> dict[str, Any]:
    """What a figure depends on. `model` is a pyllamacache.Model, or None."""
    from pyllamacache.config import usable_cores
    from pyllamacache.native.library import info

    library = info()
    return {
        "commit": _commit(),
        "llama": library.llama_tag,
        "source_digest": library.source_digest,
        "patches": list(library.patches),
        "model": None if model is None else {"name": model.path.name, "fingerprint": model.fingerprint},
        "cpu": _cpu_name(),
        "cores": usable_cores(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "date": dt.date.today().isoformat(),
    }


def write_json(name: str, model: Any, results: Mapping[str, Any]) -> Path:
    """`bench/results/NAME.json`. Summaries become objects."""

    def plain(value: Any) -> Any:
        if isinstance(value, Summary):
            return asdict(value)
        if isinstance(value, Mapping):
            return {key: plain(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [plain(item) for item in value]
        return value

    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({"origin": origin(model), "results": plain(results)}, indent=1) + "\n", encoding="utf-8")
    print(f"\nwritten: {path}")
    return path


def arguments(description: str, *, repeats: int) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--repeats", type=int, default=repeats)
    parser.add_argument("--json", action="store_true", help="write bench/results/NAME.json")
    parser.add_argument("--model", type=Path, default=None, help="a GGUF file; default SmolLM2-135M-Instruct")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--tools", type=Path, default=None, help="folder with llama-bench and llama-batched-bench")
    return parser.parse_args()


def load_model(path: Path | None) -> Any:
    """The given model, or SmolLM2 as the tests and the demo find it."""
    from pyllamacache import Model

    if path is None:
        from tests.models.real import smollm2

        path = smollm2()
    return Model(path, progress=False)


def on_engine_thread(engine: Any, function: Callable[[], Any]) -> Any:
    """Run a native call where the engine runs its own.

    OpenMP keeps a pool of threads per calling thread, and lets none of them spin once there are more than cores: a
    second thread that computes makes every call of the process several times slower.
    """
    return engine._scheduler.inbox.call(function)


def find_tool(folder: Path | None, name: str, *, is_quiet: bool = False) -> Path | None:
    """A llama.cpp program built by `-DPYLLAMACACHE_TOOLS=ON`, in `folder` or in the build folder."""
    root = Path(__file__).parent.parent / "build"
    for place in [folder] if folder is not None else sorted(root.glob("*/bin")) + sorted(root.glob("*/llama/bin")):
        if place is not None and (place / name).is_file():
            return place / name
    if not is_quiet:
        print(f"{name} was not found; build with -DPYLLAMACACHE_TOOLS=ON or name its folder: --tools", file=sys.stderr)
    return None
