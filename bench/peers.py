"""The same work on pyllamacache, llama-server and llama-cpp-python: tokens prefilled, waiting, memory.

python -m bench.peers --json          # everything, about an hour on two cores; writes bench/results/peers.json
python -m bench.peers --quick         # the tiny hybrid with short headers, minutes

llama-server is built from the pinned sources, llama-cpp-python from its package into an environment of its own; both
the first time only. Every engine runs in a process of its own and is asked the way its users ask it. They take turns
request by request; the next is asked when the last has come to rest. Decoding, and how costs grow with history, are
measured by `bench.flow.decode` and `bench.growth`.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from bench.cases import Recording, Script, Step, Writer, agents_in_turn, conversation, recordings
from bench.harness import load_model, print_table, summarize, write_json
from bench.peer import build
from bench.peer.llama_server import LlamaServer
from bench.peer.peer import Answer, EngineFailedError, Peer, Setup
from bench.peer.process import forget_peak, peak_bytes, wait_until_quiet
from bench.peer.python_peers import llama_cpp_python, pyllamacache
from bench.peer.worker import Worker
from bench.verdicts import BINDING, FLOOR, OURS, RECORDED, SERVER, TUNED, lines
from pyllamacache.config import usable_cores

TUNED_FLAGS = ("--ctx-checkpoints", "128", "--checkpoint-min-step", "256", "--slot-prompt-similarity", "0.5")
TEMPLATE = "Qwen-Qwen3-0.6B"
"""Of recorded sessions, which have tools; the others use the model's own."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """One request on one engine."""

    case: str
    prompt_tokens: int
    prefilled_tokens: int
    completion_tokens: int
    ttft_s: float
    total_s: float
    engine_prefill_s: float
    peak_bytes: int
    after_cpu_s: float
    """CPU seconds the engine went on for after the reply."""
    depth: int
    """What any prefix cache could have reused; the floor computes the rest."""


@dataclass(slots=True)
class Lane:
    """An engine on its way through a script."""

    peer: Peer
    setup: Setup
    script: Script
    step: Step | None
    seen: list[np.ndarray]
    """Prompts and replies so far, where the engine gives ids."""
    measured: list[Measurement]


def peers_for(tools: Path, binding: Path | None) -> list[Peer]:
    program = tools / "llama-server"
    found: list[Peer] = [
        pyllamacache(OURS),
        LlamaServer(SERVER, program),
        LlamaServer(TUNED, program, TUNED_FLAGS, saves_slots=True),
    ]
    if binding is not None:
        found.append(llama_cpp_python(binding, BINDING))
    return found


# ---- driving ----


def drive(peers: Sequence[Peer], setup: Setup, script: Callable[[], Script]) -> dict[str, list[Measurement]]:
    """Every engine through the script, in turn at each step; who goes first moves on with the steps."""
    with ExitStack() as stack:
        lanes = []
        for peer in peers:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="plc-peer-")))
            own = replace(setup, folder=folder)
            stack.callback(peer.stop)
            try:
                peer.start(own)
            except EngineFailedError as error:
                print(f"  {peer.name} is left out: {error}", file=sys.stderr)
                continue
            run = script()
            lanes.append(Lane(peer, own, run, next(run), [], []))
        number = 0
        while active := [lane for lane in lanes if lane.step is not None]:
            first = number % len(active)
            for lane in active[first:] + active[:first]:
                _advance(lane)
            number += 1
    return {lane.peer.name: lane.measured for lane in lanes}


def _advance(lane: Lane) -> None:
    """One step. An engine that fails one is out of this script; what it has measured until then stays."""
    step = lane.step
    assert step is not None
    try:
        answer, measured = _perform(lane, step)
    except EngineFailedError as error:
        print(f"  {lane.peer.name}, {step.case}: {error}", file=sys.stderr)
        lane.step = None
        return
    if step.case is not None:
        lane.measured.append(measured)
    try:
        lane.step = lane.script.send(answer.text)
    except StopIteration:
        lane.step = None


def _perform(lane: Lane, step: Step) -> tuple[Answer, Measurement]:
    peer = lane.peer
    if step.restarts:
        peer.keep()
        peer.stop()
        peer.start(lane.setup)
        wait_until_quiet(peer.pid)
    forget_peak(peer.pid)
    busy = None
    if step.beside is not None:
        busy = peer.send(step.beside)
        busy.has_begun.wait(900)
    answer = peer.send(step.request).result()
    peak = peak_bytes(peer.pid)
    if busy is not None:
        _note(lane, busy.result())
    after_cpu_s = wait_until_quiet(peer.pid)
    depth = _note(lane, answer)
    return answer, Measurement(
        case=step.case or "",
        prompt_tokens=answer.prompt_tokens,
        prefilled_tokens=answer.prefilled_tokens,
        completion_tokens=answer.completion_tokens,
        ttft_s=answer.ttft_s,
        total_s=answer.total_s,
        engine_prefill_s=answer.engine_prefill_s,
        peak_bytes=peak,
        after_cpu_s=after_cpu_s,
        depth=depth,
    )


def _note(lane: Lane, answer: Answer) -> int:
    """The longest prefix of the prompt that was sent or sampled before, at most all but one."""
    if not answer.token_ids:
        return 0
    ids = np.asarray(answer.token_ids)
    prompt = ids[: answer.prompt_tokens]
    depth = 0
    for each in lane.seen:
        n = min(len(each), len(prompt))
        differs = np.flatnonzero(each[:n] != prompt[:n])
        depth = max(depth, int(differs[0]) if len(differs) else n)
    lane.seen.append(ids)
    return min(depth, len(prompt) - 1)


# ---- the floor ----


def floors(setup: Setup, measured: Sequence[Measurement]) -> list[float]:
    """Seconds of `llama_decode` for what was new in each."""
    wanted = sorted({(each.depth, each.prompt_tokens - each.depth) for each in measured})
    worker = Worker([sys.executable, Path(build.__file__).parent / "floor.py"], log=setup.folder / "floor.txt")
    try:
        shape = {"n_ctx": setup.n_ctx, "kv_tokens": 2 * setup.n_ctx, "n_threads": setup.n_threads}
        reply = worker.call({"op": "floor", "model": str(setup.model), "cases": wanted, **shape}, 1800)
    finally:
        worker.close()
    by_case = dict(zip(wanted, reply["done"], strict=True))
    return [by_case[each.depth, each.prompt_tokens - each.depth] for each in measured]


# ---- what comes of it ----


@dataclass(slots=True)
class Round:
    """One pass of every engine through one script. The floor is that of pyllamacache's prompts, in the first round."""

    measured: dict[str, list[Measurement]]
    floor_s: list[float] | None

    def cases(self) -> list[str]:
        first = next(iter(self.measured.values()))
        return list(dict.fromkeys(each.case for each in first))

    def of(self, engine: str, case: str) -> list[Measurement]:
        return [each for each in self.measured.get(engine, ()) if each.case == case]

    def floor_of(self, case: str) -> float:
        assert self.floor_s is not None
        return sum(s for each, s in zip(self.measured[OURS], self.floor_s, strict=True) if each.case == case)


def collected(rounds: Sequence[Round]) -> dict[str, dict[str, Any]]:
    """By case and engine: medians over the rounds of what the case's requests come to together."""
    results: dict[str, dict[str, Any]] = {}
    for case in rounds[0].cases():
        of_case: dict[str, Any] = {}
        for engine in rounds[0].measured:
            runs = [each.of(engine, case) for each in rounds]
            if any(len(run) != len(each.of(OURS, case)) for run, each in zip(runs, rounds, strict=True)):
                continue  # it failed a request
            of_case[engine] = _sums(runs)
        of_case[FLOOR] = {"ttft_s": summarize([each.floor_of(case) for each in rounds if each.floor_s])}
        results[case] = of_case
    return results


def _sums(runs: Sequence[Sequence[Measurement]]) -> dict[str, Any]:
    def summary(field: str) -> Any:
        return summarize([sum(getattr(each, field) for each in run) for run in runs])

    said = all(math.isfinite(each.engine_prefill_s) for run in runs for each in run)
    return {
        "requests": len(runs[0]),
        "rounds": len(runs),
        "prompt_tokens": summary("prompt_tokens").median,
        "prefilled_tokens": summary("prefilled_tokens").median,
        "completion_tokens": summary("completion_tokens").median,
        "ttft_s": summary("ttft_s"),
        "total_s": summary("total_s"),
        **({"engine_prefill_s": summary("engine_prefill_s")} if said else {}),
        "after_cpu_s": summary("after_cpu_s"),
        "peak_bytes": summarize([max(each.peak_bytes for each in run) for run in runs]).median,
    }


def show(title: str, results: dict[str, dict[str, Any]]) -> None:
    rows = []
    for case, of_case in results.items():
        for engine, each in of_case.items():
            ttft = each["ttft_s"]
            spread = f"{ttft.p05 * 1e3:.1f}-{ttft.p95 * 1e3:.1f}"
            counts = [f"{each['prefilled_tokens']:,.0f}", f"{each['prompt_tokens']:,.0f}"] if "requests" in each else []
            rest = [f"{each['total_s'].median * 1e3:.0f}", f"{each['peak_bytes'] / 2**20:.0f}"] if counts else ["", ""]
            rows.append([case, engine, *(counts or ["", ""]), f"{ttft.median * 1e3:.1f}", spread, *rest])
    header = ["case", "engine", "prefilled", "of", "ttft ms", "p05-p95", "total ms", "peak MiB"]
    print_table(title, header, rows)


# ---- the runs ----


@dataclass(frozen=True, slots=True)
class Subject:
    """A model, and how much of it is asked."""

    name: str
    model: Any
    n_ctx: int
    rounds: dict[int, int]
    """By the header's tokens."""
    recordings: tuple[Recording, ...]
    recorded_rounds: int = 1


def template_file() -> Path:
    from tests.flow.chats import TEMPLATES

    return Path(TEMPLATES) / f"{TEMPLATE}.jinja"


@contextmanager
def tiny_hybrid(n_ctx: int) -> Iterator[Any]:
    from pyllamacache import Model
    from tests.models import HybridSpec, write_model

    with tempfile.TemporaryDirectory(prefix="plc-peers-") as folder:
        path = Path(folder) / "tiny-hybrid.gguf"
        write_model(HybridSpec(n_ctx_train=n_ctx, is_readable=True), path)
        with Model(path, progress=False) as model:
            yield model


def measure(subject: Subject, peers: Sequence[Peer], *, n_threads: int, seed: int) -> dict[str, Any]:
    """By workload and case."""

    def count(text: str) -> int:
        return len(subject.model.tokenize(text, add_special=False))

    base = Setup(subject.model.path, 4, subject.n_ctx, 2 * subject.n_ctx, n_threads, Path())
    results: dict[str, Any] = {}
    for header, repeats in subject.rounds.items():
        scripts: list[tuple[Setup, Callable[[int], Script]]] = [
            (base, lambda round_, header=header: conversation(Writer(count, seed + round_), header)),
            (
                replace(base, n_slots=2),
                lambda round_, header=header: agents_in_turn(Writer(count, seed + round_), header),
            ),
        ]
        of_header: dict[str, Any] = {}
        for setup, script in scripts:
            of_header |= _repeated(peers, setup, script, repeats)
        results[f"system prompt of {header:,} tokens"] = of_header
        show(f"{subject.name}, system prompt of {header:,} tokens, {repeats} rounds", of_header)
    if subject.recordings:
        setup = replace(base, chat_template=template_file())
        recorded: dict[str, Any] = {}
        for recording in subject.recordings:
            recorded |= _repeated(
                peers, setup, lambda _, recording=recording: recording.script(), subject.recorded_rounds
            )
        results[RECORDED] = recorded
        show(f"{subject.name}, recorded sessions", recorded)
    return results


def _repeated(
    peers: Sequence[Peer], setup: Setup, script: Callable[[int], Script], repeats: int
) -> dict[str, dict[str, Any]]:
    rounds = []
    for round_ in range(repeats):
        measured = drive(peers, setup, lambda round_=round_: script(round_))
        floor_s = None
        if not rounds:
            with tempfile.TemporaryDirectory(prefix="plc-floor-") as folder:
                floor_s = floors(replace(setup, folder=Path(folder)), measured[OURS])
        rounds.append(Round(measured, floor_s))
        print(f"  round {round_ + 1} of {repeats}", file=sys.stderr, flush=True)
    return collected(rounds)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="write bench/results/peers.json")
    parser.add_argument("--quick", action="store_true", help="the tiny hybrid only, one round")
    parser.add_argument("--rounds", type=int, nargs=2, default=(3, 2), metavar="N", help="of the short and long header")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--tools", type=Path, default=None, help="folder of llama-server; built where not given")
    parser.add_argument("--without-llama-cpp-python", action="store_true")
    args = parser.parse_args(arguments)
    if args.json and args.quick:
        parser.error("--json takes the whole run")
    tools = build.tools_folder(args.tools)
    binding = None if args.without_llama_cpp_python else build.python_with_llama_cpp()
    peers = peers_for(tools, binding)
    n_threads = args.threads or usable_cores()
    results: dict[str, Any] = {}
    with tiny_hybrid(65_536) as hybrid:
        short, long = args.rounds
        recorded = tuple(recordings(is_small=False))
        subjects = [Subject("tiny hybrid", hybrid, 65_536, {2000: short + 2, 6000: long + 2}, recorded, 2)]
        if args.quick:
            subjects = [replace(subjects[0], rounds={600: 1}, recordings=())]
        else:
            dense = load_model(None)
            recorded = tuple(recordings(is_small=True))
            subjects.insert(0, Subject("SmolLM2-135M", dense, 8192, {2000: short, 6000: long}, recorded))
        for subject in subjects:
            results[subject.name] = measure(subject, peers, n_threads=n_threads, seed=args.seed)
    print(*lines(results), sep="\n")
    if args.json:
        write_json("peers", dense, results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
