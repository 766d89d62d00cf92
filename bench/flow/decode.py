"""Decode tokens/s of one slot, two and four, against llama-bench and llama-batched-bench of the same build.

Each of our runs generates 128 tokens from an empty context by default, as llama-bench's tg128 does. Rounds alternate.
"""

from __future__ import annotations

import json
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

from bench.harness import Summary, arguments, find_tool, interleave, load_model, print_table, summarize, write_json
from bench.workloads import random_ids
from pyllamacache import Engine
from pyllamacache.config import usable_cores

N_TOKENS = 128
N_PROMPT = 16
SLOTS = {"one slot": 1, "two slots": 2, "four slots": 4}


def _llama_bench(tool: Path, model: Path, threads: int) -> float:
    run = subprocess.run(
        [tool, "-m", model, "-p", "0", "-n", str(N_TOKENS), "-r", "1", "-t", str(threads), "-o", "json"],
        capture_output=True,
        text=True,
        check=True,
    )
    return float(json.loads(run.stdout)[0]["avg_ts"])


def _batched_bench(tool: Path, model: Path, threads: int, n_slots: int) -> float:
    run = subprocess.run(
        [
            tool,
            "-m",
            model,
            "-c",
            "2048",
            "-npp",
            str(N_PROMPT),
            "-ntg",
            str(N_TOKENS),
            "-npl",
            str(n_slots),
            "-t",
            str(threads),
            "-kvu",
            "--output-format",
            "jsonl",
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    row = next(json.loads(line) for line in run.stdout.splitlines() if line.startswith("{"))
    return float(row["speed_tg"])


def _ours(engine: Engine, n_slots: int, seed: int) -> float:
    """Tokens/s from the moment every slot has its first token to the moment the first one is done."""
    n_vocab = engine.model.n_vocab
    banned = {token: float("-inf") for token in engine.model.eog_ids}
    started = threading.Barrier(n_slots + 1)
    spans: list[tuple[float, float, int]] = []

    def run(index: int) -> None:
        handle = engine.submit(
            random_ids(N_PROMPT, n_vocab, seed * 100 + index), max_tokens=N_TOKENS + 8, logit_bias=banned
        )
        stamps = []
        started.wait()
        for chunk in handle:
            if chunk.token_ids:
                stamps.append(time.perf_counter())
        spans.append((stamps[4], stamps[-4], len(stamps) - 8))

    threads = [threading.Thread(target=run, args=(index,)) for index in range(n_slots)]
    for thread in threads:
        thread.start()
    started.wait()
    for thread in threads:
        thread.join()
    begin, end = max(span[0] for span in spans), min(span[1] for span in spans)
    rate = sum(span[2] / (span[1] - span[0]) for span in spans)
    return rate if end > begin else float("nan")


def main() -> None:
    args = arguments(__doc__ or "", repeats=7)
    model = load_model(args.model)
    threads = args.threads or usable_cores()
    bench, batched = find_tool(args.tools, "llama-bench"), find_tool(args.tools, "llama-batched-bench")
    seeds = iter(range(10**6))

    def _alone(n_slots: int) -> float:
        # one engine at a time: two would share the cores even while one of them is idle
        with Engine(model, n_ctx=2048, n_slots=n_slots, n_threads=threads, progress=False) as engine:
            return _ours(engine, n_slots, next(seeds))

    cases: dict[str, Callable[[], float]] = {name: lambda n=n: _alone(n) for name, n in SLOTS.items()}
    if bench is not None:
        cases["llama-bench"] = lambda: _llama_bench(bench, model.path, threads)
    if batched is not None:
        for n in (2, 4):
            cases[f"llama-batched-bench x{n}"] = lambda n=n: _batched_bench(batched, model.path, threads, n)
    samples = interleave(cases, repeats=args.repeats)
    summaries: dict[str, Summary] = {name: summarize(values) for name, values in samples.items()}
    print_table(
        f"decode, tokens/s, {threads} threads: {model.name}",
        ["case", "median", "p05", "p95", "n"],
        [[n, f"{s.median:.1f}", f"{s.p05:.1f}", f"{s.p95:.1f}", str(s.n)] for n, s in summaries.items()],
    )
    results: dict[str, object] = {f"{name} tokens/s": summary for name, summary in summaries.items()}
    for ours, theirs, key in (
        ("one slot", "llama-bench", "one_slot_over_llama_bench"),
        ("two slots", "llama-batched-bench x2", "two_slots_over_batched_bench"),
        ("four slots", "llama-batched-bench x4", "four_slots_over_batched_bench"),
    ):
        if theirs in summaries:
            results[key] = summaries[ours].median / summaries[theirs].median
            print(f"{ours} / {theirs}: {results[key]:.3f}")
    if args.json:
        write_json("decode", model, results)


if __name__ == "__main__":
    main()
