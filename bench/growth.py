"""How costs grow: an append's time to first token, lookup and publish, memory, over history and parked conversations.

python -m bench.growth --json     # writes bench/results/growth.json, growth.png and growth.svg

Tiny models (dense and hybrid), where what is not the model's own work shows most: a decode of 40 tokens takes some
milliseconds. Appends are drawn beside the bare `llama_decode` of the same tokens at the same depth, which grows too:
attention runs over the history. A line is fitted through the difference, and an exponent in log-log.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench.harness import RESULTS, Summary, print_table, summarize, write_json
from bench.micro.index_cost import look_up, withdraw
from bench.micro.index_cost import publish as publish_ids
from bench.peer import build
from bench.peer.process import wait_until_quiet
from bench.peer.worker import Worker
from bench.workloads import Ids, random_ids
from pyllamacache import CacheConfig, Engine, Model
from pyllamacache.config import usable_cores
from pyllamacache.prefix.index import PrefixIndex
from pyllamacache.request import SlotId

APPEND = 40
HISTORIES = (1024, 2048, 4096, 8192, 16384, 32768)
PARKED = (1, 2, 4, 8, 16, 32, 64)
PARKED_TOKENS = 1024
CACHE = CacheConfig(max_checkpoints=512)
"""The default 32 cannot hold one for each of 64 conversations; growth is asked here, not what is given up."""


@dataclass(frozen=True, slots=True)
class Point:
    """One length of history, or one number of parked conversations."""

    x: int
    ttft_s: Summary
    floor_s: Summary
    prefilled_tokens: int
    kv_bytes: int
    """Cells in use."""
    host_bytes: int
    """Spans and checkpoints in host memory."""


# ---- the engine ----


def kv_cell_bytes(model: Model) -> int:
    """K and V of one token in F16, from the tiny models' own specification."""
    from tests.models import HybridSpec

    spec = HybridSpec()
    n_attention = 3 if model.memory == "full" else spec.n_layer // spec.full_every
    return n_attention * 2 * spec.n_head_kv * spec.head_dim * 2


def held_bytes(engine: Engine) -> int:
    return int(engine.statistics().tiers.host_bytes)


def histories(model: Model, repeats: int, n_threads: int) -> list[Point]:
    longest = HISTORIES[-1]
    ids = random_ids(longest, model.n_vocab - 70, 1)
    points = []
    with Engine(
        model,
        n_ctx=longest + 512,
        n_slots=1,
        kv_tokens=longest + 4096,
        n_threads=n_threads,
        cache=CACHE,
        progress=False,
    ) as engine:
        for n_tokens in HISTORIES:
            engine.complete(ids[:n_tokens], max_tokens=0)
            ttft, prefilled = [], 0
            for i in range(repeats + 1):
                prompt = np.concatenate([ids[:n_tokens], random_ids(APPEND, model.n_vocab - 70, 100 + i)])
                wait_until_quiet_here()
                reply = engine.complete(prompt, max_tokens=1)
                prefilled = reply.cache.prefilled_tokens
                ttft.append(reply.timings.ttft_s)
            kv = engine.statistics().kv_tokens_used * kv_cell_bytes(model)
            points.append(Point(n_tokens, summarize(ttft[1:]), _unknown(), prefilled, kv, held_bytes(engine)))
    floors = bare(model, [(n_tokens, APPEND) for n_tokens in HISTORIES], repeats, longest + 512, n_threads)
    return [_with_floor(point, floor) for point, floor in zip(points, floors, strict=True)]


def parked(model: Model, repeats: int, n_threads: int) -> list[Point]:
    """Conversations that hold their cells; one of them goes on, another each time."""
    n_ctx = PARKED_TOKENS + 512
    cells = (PARKED[-1] + 4) * (PARKED_TOKENS + 2 * APPEND)
    talks = [random_ids(PARKED_TOKENS, model.n_vocab - 70, 1000 + i) for i in range(PARKED[-1] + 1)]
    points = []
    with Engine(
        model, n_ctx=n_ctx, n_slots=1, kv_tokens=cells, n_threads=n_threads, cache=CACHE, progress=False
    ) as engine:
        held = 0
        for n_parked in PARKED:
            while held <= n_parked:  # one more than are parked: the last is in the slot
                engine.complete(talks[held], max_tokens=0)
                held += 1
            ttft, prefilled = [], 0
            for i in range(repeats + 1):
                talk = talks[i % n_parked]
                prompt = np.concatenate([talk, random_ids(APPEND, model.n_vocab - 70, 100 + i)])
                wait_until_quiet_here()
                reply = engine.complete(prompt, max_tokens=1, store=False)
                prefilled = reply.cache.prefilled_tokens
                ttft.append(reply.timings.ttft_s)
            kv = engine.statistics().kv_tokens_used * kv_cell_bytes(model)
            points.append(Point(n_parked, summarize(ttft[1:]), _unknown(), prefilled, kv, held_bytes(engine)))
    floor = bare(model, [(PARKED_TOKENS, APPEND)], repeats, n_ctx, n_threads)[0]
    return [_with_floor(point, floor) for point in points]


def wait_until_quiet_here() -> None:
    wait_until_quiet(os.getpid(), window_s=0.03)


def bare(model: Model, cases: Sequence[tuple[int, int]], repeats: int, n_ctx: int, n_threads: int) -> list[Summary]:
    """`llama_decode` of each case, in a process that has nothing else."""
    with tempfile.TemporaryDirectory(prefix="plc-growth-") as folder:
        worker = Worker([sys.executable, Path(build.__file__).parent / "floor.py"], log=Path(folder) / "log.txt")
        try:
            wanted = [case for case in cases for _ in range(repeats)]
            shape = {"n_ctx": n_ctx, "kv_tokens": 2 * n_ctx, "n_threads": n_threads}
            reply = worker.call({"op": "floor", "model": str(model.path), "cases": wanted, **shape}, 1800)["done"]
        finally:
            worker.close()
    return [summarize(reply[i * repeats : (i + 1) * repeats]) for i in range(len(cases))]


def _unknown() -> Summary:
    return summarize([float("nan")])


def _with_floor(point: Point, floor: Summary) -> Point:
    return Point(point.x, point.ttft_s, floor, point.prefilled_tokens, point.kv_bytes, point.host_bytes)


# ---- the index ----


def index_times(n_tokens: int, n_others: int, other_tokens: int, repeats: int) -> tuple[Summary, Summary]:
    """Seconds of lookup (match, chain of spans, plan) and of publishing, beside others that are parked."""
    index = PrefixIndex()
    for i in range(n_others):
        publish_ids(index, random_ids(other_tokens, 50_000, 100 + i), SlotId(i))
    prompt = random_ids(n_tokens, 50_000, 2)
    longer: Ids = np.concatenate([prompt, random_ids(APPEND, 50_000, 3)])
    seq_id = SlotId(200)
    found, published = [], []
    for _ in range(repeats + 1):
        start_s = time.perf_counter()
        publish_ids(index, prompt, seq_id)
        published.append(time.perf_counter() - start_s)
        start_s = time.perf_counter()
        resumed = look_up(index, longer)
        found.append(time.perf_counter() - start_s)
        assert resumed == n_tokens, resumed
        withdraw(index, prompt, seq_id, after=0)
    return summarize(found[1:]), summarize(published[1:])


# ---- fits ----


def fit(xs: Sequence[float], ys: Sequence[float]) -> dict[str, float]:
    """Least squares: `at_zero + slope * x`, its R², and the exponent of a power law through the same points."""
    x, y = np.asarray(xs, dtype=float), np.asarray(ys, dtype=float)
    slope, at_zero = np.polyfit(x, y, 1)
    left = float(np.sum((y - (at_zero + slope * x)) ** 2))
    spread = float(np.sum((y - y.mean()) ** 2))
    positive = y > 0
    exponent = float(np.polyfit(np.log(x[positive]), np.log(y[positive]), 1)[0]) if positive.sum() > 1 else float("nan")
    return {
        "at_zero": float(at_zero),
        "slope": float(slope),
        "r_squared": 1 - left / spread if spread else 1.0,
        "exponent": exponent,
    }


# ---- what is shown ----


def series(points: Sequence[Point], times: Sequence[tuple[Summary, Summary]]) -> dict[str, Any]:
    xs = [point.x for point in points]
    beyond = [point.ttft_s.median - point.floor_s.median for point in points]
    found, published = [each[0] for each in times], [each[1] for each in times]
    return {
        "x": xs,
        "ttft_s": [point.ttft_s for point in points],
        "floor_s": [point.floor_s for point in points],
        "prefilled_tokens": [point.prefilled_tokens for point in points],
        "lookup_s": found,
        "publish_s": published,
        "kv_bytes": [point.kv_bytes for point in points],
        "host_bytes": [point.host_bytes for point in points],
        "fit": {
            "ttft_s": fit(xs, [point.ttft_s.median for point in points]),
            "floor_s": fit(xs, [point.floor_s.median for point in points]),
            "beyond_floor_s": fit(xs, beyond),
            "lookup_s": fit(xs, [each.median for each in found]),
            "publish_s": fit(xs, [each.median for each in published]),
            "held_bytes": fit(xs, [point.kv_bytes + point.host_bytes for point in points]),
        },
    }


def show(title: str, what: str, of: dict[str, Any], *, per: int) -> None:
    """`per`: of what a slope is given for so many."""
    rows = []
    for i, x in enumerate(of["x"]):
        seconds = [of[name][i].median * 1e3 for name in ("ttft_s", "floor_s", "lookup_s", "publish_s")]
        sizes = [of[name][i] / 2**20 for name in ("kv_bytes", "host_bytes")]
        rows.append(
            [f"{x:,}", str(of["prefilled_tokens"][i]), *(f"{s:.3f}" for s in seconds), *(f"{b:.2f}" for b in sizes)]
        )
    header = [what, "prefilled", "ttft ms", "floor ms", "lookup ms", "publish ms", "KV MiB", "host MiB"]
    print_table(title, header, rows)
    for name, each in of["fit"].items():
        scale, unit = (1 / 2**20, "MiB") if name.endswith("bytes") else (1e3, "ms")
        print(
            f"  {name}: {each['at_zero'] * scale:.3f} {unit} + {each['slope'] * scale * per:.4f} {unit} "
            f"per {per:,} {what} "
            f"(R² {each['r_squared']:.3f}), exponent {each['exponent']:.2f}"
        )


def plot(results: dict[str, Any], folder: Path) -> list[Path]:
    """`growth.png` and `growth.svg`; the same bytes for the same numbers."""
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams["svg.hashsalt"] = "pyllamacache"
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 6.4), layout="constrained")
    axes = figure.subplots(2, 3)
    colours = {"dense": "#0b7285", "hybrid": "#c2255c"}
    columns = (
        ("time to first token of an append, ms", 1e3),
        ("lookup and publish in the index, ms", 1e3),
        ("memory held, MiB", 1 / 2**20),
    )
    for row, (key, label) in zip(
        axes, (("history", "tokens of history"), ("parked", "parked conversations")), strict=True
    ):
        for name, colour in colours.items():
            of = results[name][key]
            drawn = (
                (("ttft_s", "-", "append"), ("floor_s", ":", "llama_decode alone")),
                (("lookup_s", "-", "lookup"), ("publish_s", "--", "publish")) if name == "dense" else (),
                (("kv_bytes", "-", "KV cells"), ("host_bytes", "--", "host memory")),
            )
            for axis, (_, scale), lines in zip(row, columns, drawn, strict=True):
                for what, style, text in lines:
                    ys = [(each.median if isinstance(each, Summary) else each) * scale for each in of[what]]
                    shown = text if lines is drawn[1] else f"{name}: {text}"
                    axis.plot(of["x"], ys, style, color=colour, marker="o", markersize=3, label=shown)
        for axis, (title, _) in zip(row, columns, strict=True):
            axis.set_xscale("log", base=2)
            axis.set_xlabel(label)
            axis.set_title(title, fontsize=10)
            axis.set_ylim(bottom=0)
            axis.grid(visible=True, linewidth=0.3)
            axis.legend(fontsize=7, frameon=False)
            ticks = results["dense"][key]["x"]
            axis.set_xticks(ticks, [f"{x // 1024}k" if x >= 1024 else str(x) for x in ticks])
            axis.minorticks_off()
    folder.mkdir(exist_ok=True)
    paths = [folder / "growth.png", folder / "growth.svg"]
    figure.savefig(paths[0], dpi=110, metadata={"Software": None})
    figure.savefig(paths[1], metadata={"Date": None})
    return paths


# ---- the run ----


def models(folder: Path) -> Iterator[tuple[str, Model]]:
    from tests.models import FullSpec, HybridSpec, write_model

    for name, spec in (("dense", FullSpec(n_ctx_train=65_536)), ("hybrid", HybridSpec(n_ctx_train=65_536))):
        path = folder / f"tiny-{name}.gguf"
        write_model(spec, path)
        with Model(path, progress=False) as model:
            yield name, model


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--json", action="store_true", help="write bench/results/growth.json, .png and .svg")
    args = parser.parse_args(arguments)
    n_threads = args.threads or usable_cores()
    over_history = [index_times(n, 8, PARKED_TOKENS, args.repeats) for n in HISTORIES]
    over_parked = [index_times(PARKED_TOKENS, n, PARKED_TOKENS, args.repeats) for n in PARKED]
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="plc-growth-") as folder:
        for name, model in models(Path(folder)):
            results[name] = {
                "history": series(histories(model, args.repeats, n_threads), over_history),
                "parked": series(parked(model, args.repeats, n_threads), over_parked),
            }
            show(f"tiny {name}: {APPEND} tokens appended to a history", "tokens", results[name]["history"], per=1000)
            show(
                f"tiny {name}: {APPEND} tokens appended to one of the parked, {PARKED_TOKENS:,} tokens each",
                "parked",
                results[name]["parked"],
                per=1,
            )
        if args.json:
            write_json("growth", None, results)
            print(*plot(results, RESULTS), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
