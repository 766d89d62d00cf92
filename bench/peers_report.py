"""The tables of `bench/results/peers.json`: the short one of the README and all of `bench/PEERS.md`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from bench.verdicts import BINDING, FLOOR, OURS, RECORDED, SERVER, TUNED, lines

Results = dict[str, Any]
ENGINES = (OURS, SERVER, TUNED, BINDING)
SHORT = {OURS: "ours", SERVER: "llama-server", TUNED: "tuned", BINDING: "llama-cpp-python", FLOOR: "`llama_decode`"}
LONGEST_HEADER = "system prompt of 6,000 tokens"


def seconds(value_s: float) -> str:
    if value_s >= 1:
        return f"{value_s:.3g} s" if value_s < 100 else f"{value_s:.0f} s"
    return f"{value_s * 1e3:.3g} ms"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield "| " + " | ".join(header) + " |"
    yield "|---" + "|---:" * (len(header) - 1) + "|"
    for row in rows:
        yield "| " + " | ".join(row) + " |"


def _took_part(of_case: Results, engine: str) -> bool:
    """In all of it: an engine that failed a request on the way has done less than the others."""
    if engine not in of_case:
        return False
    return engine == FLOOR or of_case[engine]["requests"] == of_case[OURS]["requests"]


def _cell(of_case: Results, engine: str, show: Callable[[Results], str]) -> str:
    return show(of_case[engine]) if _took_part(of_case, engine) else "-"


def _prefilled(each: Results) -> str:
    return f"{each['prefilled_tokens']:,.0f}"


def _ttft(each: Results) -> str:
    return seconds(each["ttft_s"]["median"])


def _spread(each: Results) -> str:
    ttft = each["ttft_s"]
    return f"{seconds(ttft['median'])} ({seconds(ttft['minimum'])} to {seconds(ttft['maximum'])})"


def short(results: Results) -> Iterator[str]:
    """For the README: the long header and the recordings, what was prefilled and how long it took."""
    for subject, workloads in results.items():
        yield f"**{subject}**: tokens prefilled (four columns), then time to first token (five):"
        yield ""
        header = ["", *(SHORT[engine] for engine in ENGINES), *(SHORT[engine] for engine in (*ENGINES, FLOOR))]
        rows = []
        for workload in (LONGEST_HEADER, RECORDED):
            for case, of_case in workloads.get(workload, {}).items():
                n_requests = of_case[OURS]["requests"]
                name = case if n_requests == 1 else f"{case} ({n_requests} requests)"
                counts = [_cell(of_case, engine, _prefilled) for engine in ENGINES]
                times = [_cell(of_case, engine, _ttft) for engine in (*ENGINES, FLOOR)]
                rows.append([name, *counts, *times])
        yield from _table(header, rows)
        yield ""
    found = list(lines(results))
    yield f"Of the claims checked (never more tokens than llama-server, no more time for the same work), {found[-1]}."


def full(results: Results, origin: Results) -> Iterator[str]:
    """`bench/PEERS.md`."""
    yield "# Side by side"
    yield ""
    machine = f"{origin['cpu']}, {origin['cores']} cores (shared)"
    build = f"llama.cpp {origin['llama']}, patches {origin['source_digest'][:12]}, commit {origin['commit']}"
    yield "Written by `python -m bench.report` from `results/peers.json`; [README](README.md) says how it is measured."
    yield f"{machine}; {build}; {origin['date']}."
    for subject, workloads in results.items():
        for workload, cases in workloads.items():
            yield ""
            yield f"## {subject}: {workload}"
            yield ""
            rows = []
            for case, of_case in cases.items():
                for engine in (*ENGINES, FLOOR):
                    if _took_part(of_case, engine):
                        rows.append(_row(case, engine, of_case[engine]))
            header = ["Case", "Engine", "Prefilled", "Of", "Time to first token", "Total", "Peak memory"]
            yield from _table(header, rows)
    yield ""
    yield "## What was to be reached"
    yield ""
    for line in lines(results):
        yield f"- {line}"


def _row(case: str, engine: str, each: Results) -> list[str]:
    if "requests" not in each:
        return [case, engine, "", "", _spread(each), "", ""]
    peak = f"{each['peak_bytes'] / 2**20:,.0f} MiB" if each["peak_bytes"] else "-"
    total = seconds(each["total_s"]["median"])
    return [case, engine, _prefilled(each), f"{each['prompt_tokens']:,.0f}", _spread(each), total, peak]
