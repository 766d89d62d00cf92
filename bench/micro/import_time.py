"""How long `import pyllamacache` takes in a fresh interpreter, beyond an empty one."""

from __future__ import annotations

import subprocess
import sys
import time

from bench.harness import arguments, interleave, print_table, summarize, write_json


def _run_s(code: str) -> float:
    started_s = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True)
    return time.perf_counter() - started_s


def main() -> None:
    args = arguments(__doc__ or "", repeats=15)
    cases = {
        "empty": lambda: _run_s("pass"),
        "import pyllamacache": lambda: _run_s("import pyllamacache"),
        "and Engine": lambda: _run_s("import pyllamacache; pyllamacache.Engine"),
    }
    summaries = {name: summarize(values) for name, values in interleave(cases, repeats=args.repeats).items()}
    base = summaries["empty"].median
    print_table(
        "import time",
        ["case", "median ms", "beyond empty ms", "n"],
        [[n, f"{s.median * 1e3:.0f}", f"{(s.median - base) * 1e3:.0f}", str(s.n)] for n, s in summaries.items()],
    )
    if args.json:
        write_json("import_time", None, {f"{name} s": summary for name, summary in summaries.items()})


if __name__ == "__main__":
    main()
