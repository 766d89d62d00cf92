"""Put the measured numbers of `bench/results/*.json` into the README between its markers.

python -m bench.report            # rewrite the table
python -m bench.report --check    # fail if README and JSON differ
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench import peers_report

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
PEERS = ROOT / "bench" / "PEERS.md"

Results = dict[str, Any]


def _ms(summary: Results) -> str:
    median_s = summary["median"]
    return f"{median_s:.1f} s" if median_s >= 1 else f"{median_s * 1e3:.3g} ms"


def _rate(summary: Results) -> str:
    return f"{summary['median']:.1f} tokens/s"


def _replayed(results: Results, budget: str) -> str:
    def percent(policy: str) -> str:
        return ", ".join(
            f"{results[name][budget][policy]['hit_percent']:.1f}" for name in ("conversation", "synthetic")
        )

    return f"{percent('ours')} % (prompt ends and LRU: {percent('ends + LRU')} %)"


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))


def _first_and_later(extra: dict[str, int]) -> str:
    return f"{extra['first']} the first time, then {extra['second']}"


def _of_ideal(results: Results) -> str:
    names = {"smollm2": "SmolLM2", "gemma3": "Gemma 3 270M without tools", "hybrid": "hybrid"}
    return "; ".join(
        f"{name} {results[key]['hit percent']:.2f} % ({results[key]['ideal percent']:.2f})"
        for key, name in names.items()
        if key in results
    )


ROWS: list[tuple[str, str, Callable[[Results], str]]] = [
    (
        "append",
        "40 new tokens on 6,000: time to first token, reusing",
        lambda r: f"{_ms(r['append_ttft_s'])} ({r['append_over_floor']:.2f} of a bare `llama_decode` of them)",
    ),
    (
        "append",
        "the same prompt without reuse",
        lambda r: f"{_ms(r['cold_ttft_s'])} ({r['cold_over_append']:.0f} times as long)",
    ),
    (
        "session",
        "12 turns on a 2,000-token header: tokens prefilled with reuse, without",
        lambda r: (
            f"{r['prefilled_tokens with reuse']:,}, {r['prefilled_tokens without']:,} "
            f"(prefill takes {r['without_over_with']:.1f} times as long without)"
        ),
    ),
    (
        "decode",
        "one slot, against llama-bench of the same build",
        lambda r: f"{_rate(r['one slot tokens/s'])} ({r['one_slot_over_llama_bench']:.2f} of it)",
    ),
    (
        "decode",
        "two slots, against llama-batched-bench of the same build",
        lambda r: f"{_rate(r['two slots tokens/s'])} ({r['two_slots_over_batched_bench']:.2f} of it)",
    ),
    (
        "decode",
        "four slots, against llama-batched-bench of the same build",
        lambda r: f"{_rate(r['four slots tokens/s'])} ({r['four_slots_over_batched_bench']:.2f} of it)",
    ),
    (
        "busy_thread",
        "four slots beside a busy Python thread, against without",
        lambda r: f"{_rate(r['beside tokens/s'])} ({r['beside_over_alone']:.2f} of it)",
    ),
    (
        "interleave",
        "largest gap between reply tokens beside a 2,000-token prefill",
        lambda r: f"{_ms(r['largest_gap_s'])} ({r['gap_over_ubatch']:.2f} of the prefill of one `n_ubatch`)",
    ),
    (
        "checkpoints",
        "taking a checkpoint of 149.62 MiB, against a memcpy of as many bytes into used memory",
        lambda r: f"{_ms(r['capture_s'])} ({r['capture_over_memcpy']:.2f}; p95 {r['capture_p95_over_memcpy']:.2f})",
    ),
    (
        "checkpoints",
        "restoring it, against the same",
        lambda r: f"{_ms(r['restore_s'])} ({r['restore_over_memcpy']:.2f})",
    ),
    (
        "checkpoints",
        "prefill with a checkpoint every 512 tokens, against none",
        lambda r: f"{r['prefill_with_over_without']:.3f} of the speed",
    ),
    (
        "checkpoints",
        "host memory of 32 of them",
        lambda r: f"{r['resident_over_states']:.3f} of 32 states",
    ),
    (
        "sharing",
        "4,010 tokens after a restart, from disk: time to first token",
        lambda r: (
            f"{_ms(r['restart']['resumed ttft s'])} "
            f"(prefilling 4,000 takes {r['restart']['cold_over_resumed']:.0f} times as long)"
        ),
    ),
    (
        "sharing",
        "a second agent with the same 2,000-token header while the first generates: prefilled beyond its own tokens",
        lambda r: f"dense {r['dense']['busy donor']['first']}; hybrid {_first_and_later(r['hybrid']['busy donor'])}",
    ),
    (
        "sharing",
        "eight agents in turn on two slots, prefilled beyond what is new, by round",
        lambda r: f"dense {_listed(r['dense']['in turn'])}; hybrid {_listed(r['hybrid']['in turn'])}",
    ),
    (
        "sharing",
        "four branches of a 2,000-token trunk sent at once, prefilled beyond trunk and branches",
        lambda r: f"dense {r['dense']['together']}; hybrid {r['hybrid']['together']}",
    ),
    (
        "chat",
        "recorded conversations of tau-bench through `chat`: token hit rate (what any cache could reach)",
        _of_ideal,
    ),
    (
        "replay",
        "token hit rate on Mooncake's first ten minutes (conversation, synthetic), one budget of 10,000 blocks",
        lambda r: _replayed(r, "10,000 blocks"),
    ),
    ("replay", "the same without limit", lambda r: _replayed(r, "unlimited")),
    (
        "index_cost",
        "a prompt of 100,000 tokens: looking it up, publishing it in the index",
        lambda r: f"{_ms(r['look up beside 96 s'])}, {_ms(r['publish beside 96 s'])}",
    ),
    (
        "scheduler_step",
        "the scheduler's own time per decode step, one slot, eight slots",
        lambda r: f"{_ms(r['1 slots s'])}, {_ms(r['8 slots s'])}",
    ),
    ("import_time", "`import pyllamacache`, process start included", lambda r: _ms(r["import pyllamacache s"])),
]


def loaded(name: str) -> dict[str, Any] | None:
    path = Path(__file__).parent / "results" / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def table() -> str:
    """The section's text: machine and model, then one row per figure."""
    found = {name: data for name in {row[0] for row in ROWS} if (data := loaded(name)) is not None}
    if not found:
        return "Nothing has been measured yet."
    origins = [data["origin"] for _, data in sorted(found.items()) if data["origin"]["model"]]
    origins = [each for each in origins if not each["model"]["name"].startswith("tiny")] or origins
    origin = max(origins, key=lambda each: str(each["date"]))
    lines = [
        f"{origin['model']['name']}, llama.cpp {origin['llama']}, Python {origin['python']}, two shared cores.",
        "Medians of interleaved runs. `bench/results` has spread and machine, [bench](bench/README.md) the commands.",
        "",
        "| What | Measured |",
        "|---|---|",
    ]
    lines += [f"| {what} | {show(found[name]['results'])} |" for name, what, show in ROWS if name in found]
    return "\n".join(lines)


def side_by_side() -> str:
    data = loaded("peers")
    return "Nothing has been measured yet." if data is None else "\n".join(peers_report.short(data["results"]))


SECTIONS: dict[str, Callable[[], str]] = {"numbers": table, "peers": side_by_side}
"""By the name in the README's markers."""


def wanted() -> dict[Path, str]:
    """What the files that show figures have to contain."""
    text = README.read_text(encoding="utf-8")
    for name, make in SECTIONS.items():
        begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
        if text.count(begin) != 1 or text.count(end) != 1:
            raise SystemExit(f"README.md needs {begin} and {end}, once each")
        before, _, rest = text.partition(begin)
        text = f"{before}{begin}\n{make()}\n{end}{rest.partition(end)[2]}"
    files = {README: text}
    data = loaded("peers")
    if data is not None:
        files[PEERS] = "\n".join(peers_report.full(data["results"], data["origin"])) + "\n"
    return files


def main() -> int:
    files = wanted()
    if "--check" not in sys.argv[1:]:
        for path, text in files.items():
            path.write_text(text, encoding="utf-8")
        return 0
    differ = [
        path.name for path, text in files.items() if not path.exists() or path.read_text(encoding="utf-8") != text
    ]
    if differ:
        print(f"{', '.join(differ)} and bench/results differ; run python -m bench.report", file=sys.stderr)
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main())
