"""Token hit rates of public traces under stated budgets, with the very code of `prefix/` and no model.

python -m bench.replay [--json] [--set NAME]

Rows: states at the ends of prompts and LRU, with 15 % of the budget for states; ours; both without a limit. A token of
KV costs one unit of the budget, a state as many as 4.7 blocks of 512 tokens. A request's hits are the prompt tokens
that need no prefill, at most all but one. Block traces show the input blocks only, texts the replies as well. Texts are
cut into runs of at most 4 letters, digits or marks, each a token.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import sys
import time
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from pyllamacache.prefix.budget import Newcomer, Retention
from pyllamacache.prefix.index import SPAN_TOKENS, Checkpoint, Match, PrefixIndex, Span
from pyllamacache.prefix.placement import place
from pyllamacache.request import CheckpointKind

from .harness import print_table, write_json
from .workloads import Ids

TRACES = Path(__file__).parents[2] / "shared" / "traces"
BLOCK_TOKENS = 512
STATE_TOKENS = round(4.7 * BLOCK_TOKENS)
"""What a state takes, in tokens of KV: 149.6 MiB against 64 KiB."""
ENDS_SHARE = 0.15
UBATCH_TOKENS, BATCH_TOKENS = 512, 2048
STATES_PER_CONVERSATION = 32
UNLIMITED = 1e15


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a trace."""

    ids: Ids
    """Of its prompt and, where it is known, of the reply."""
    n_prompt: int
    """Tokens."""
    boundaries: tuple[int, ...] = ()
    """Where the caller wants a checkpoint, in tokens."""
    namespace: str = ""


@dataclass(frozen=True, slots=True)
class Trace:
    name: str
    turns: Sequence[Turn]
    id_tokens: int = 1
    """Tokens that one id stands for."""
    budgets: tuple[int, ...] = ()
    """In blocks of 512 tokens; none: without limit, but for the number of states."""
    max_states: float = UNLIMITED


class Policy(Protocol):
    def serve(self, turn: Turn) -> int:
        """Prompt tokens that need no prefill."""


@dataclass(frozen=True, slots=True)
class Outcome:
    prompt_tokens: int
    hit_tokens: int
    n_requests: int
    seconds: float

    @property
    def hit_percent(self) -> float:
        return 100 * self.hit_tokens / max(1, self.prompt_tokens)

    @property
    def requests_per_minute(self) -> float:
        return 60 * self.n_requests / self.seconds


def replay(trace: Trace, policy: Policy) -> Outcome:
    hits = prompts = 0
    start_s = time.perf_counter()
    for turn in trace.turns:
        hits += policy.serve(turn)
        prompts += turn.n_prompt
    return Outcome(prompts, hits, len(trace.turns), time.perf_counter() - start_s)


# ---- ours ----------------------------------------------------------------------------------------------------------


class Ours:
    """What a scheduler does for a request, with nothing behind it but a sum of bytes."""

    def __init__(self, trace: Trace, budget: float, max_states: float = UNLIMITED) -> None:
        self.scale = trace.id_tokens
        self.span_ids = max(1, SPAN_TOKENS // trace.id_tokens)
        self.budget = budget
        self.max_states = max_states
        self.index = PrefixIndex(span_tokens=self.span_ids)
        self.retention = Retention(self.index, needs_span=True, needs_state=True)
        self.used = 0
        self.now = 0
        self._leased: list[Checkpoint | Span] = []

    def serve(self, turn: Turn) -> int:
        """Prompt tokens that need no prefill."""
        self.now += 1
        match = self.index.match(turn.namespace, turn.ids)
        chain = match.chain(0, match.n_tokens)
        reach = match.usable_end(chain[-1]) if chain else 0
        below = min(reach, (turn.n_prompt - 1) // self.scale)
        source = next((each for each in reversed(match.checkpoints) if each.position <= below), None)
        if chain:
            self._lease(chain[-1])
        if source is not None:
            source.hits += 1
            source.last_used = self.now
            self.retention.used(source)
            self._lease(source)
        resume = 0 if source is None else source.position
        placed = self._placements(turn, match, resume)
        if placed:
            self._store(turn, placed, match, chain)
        for mark in self._leased:
            mark.n_users -= 1
        self._leased.clear()
        return resume * self.scale

    def _lease(self, mark: Checkpoint | Span) -> None:
        mark.n_users += 1
        self._leased.append(mark)

    def _placements(self, turn: Turn, match: Match, resume: int) -> list[tuple[int, CheckpointKind]]:
        """Positions in ids."""
        scale = self.scale
        known = {each.position for each in match.checkpoints}
        n_free = (self.budget - self.used - (len(turn.ids) - resume) * scale) // STATE_TOKENS
        n_free = min(n_free, self.max_states - len(self.index.checkpoints))
        placed = place(
            resume=resume * scale,
            target=turn.n_prompt,
            n_prompt=turn.n_prompt,
            matched=match.n_tokens * scale,
            boundaries=turn.boundaries,
            known={position * scale for position in known},
            n_ubatch=UBATCH_TOKENS,
            n_batch=BATCH_TOKENS,
            grid=scale,
            n_free=int(max(0, n_free)),
        )
        wanted = [(each.position // scale, each.kind) for each in placed]
        if len(turn.ids) * scale > turn.n_prompt and scale == 1 and len(turn.ids) not in known:
            wanted.append((len(turn.ids), CheckpointKind.END))
        return wanted

    def _store(self, turn: Turn, placed: list[tuple[int, CheckpointKind]], match: Match, chain: Sequence[Span]) -> None:
        whole = [each.position for each in chain if match.usable_end(each) == each.start + self.span_ids]
        end = self._store_spans(turn, placed[-1][0], whole[-1] if whole else 0, match)
        positions = [each.position for each in match.checkpoints]
        for position, kind in placed:
            above = max((each for each in positions if each <= position), default=0)
            if position > end:
                break
            gap = position - above
            if gap and self._make_room(STATE_TOKENS, Newcomer(gap, is_optional=kind.is_optional), n_states=1):
                checkpoint = self.index.add_checkpoint(turn.namespace, turn.ids[:position], kind, STATE_TOKENS)
                checkpoint.is_ready = True
                checkpoint.last_used = self.now
                self.used += STATE_TOKENS
                self._lease(checkpoint)
                positions.append(position)

    def _store_spans(self, turn: Turn, end: int, held: int, match: Match) -> int:
        """How far the cells of [0, end) are there then."""
        if end <= held:
            return end
        newcomer = Newcomer(end - held)
        if not self._make_room((end - held) * self.scale, newcomer):
            room = (self.budget - self.used) // self.scale
            end = held + int(room) // self.span_ids * self.span_ids
        added = self.index.add_spans(turn.namespace, turn.ids[:end], self.span_ids * self.scale)
        whole = end // self.span_ids * self.span_ids
        last = match.spans.get(whole)
        if whole < end and (last is None or last.node is None or match.usable_end(last) < end):
            span, shorter = self.index.add_span(turn.namespace, turn.ids[:end], (end - whole) * self.scale)
            added.append(span)
            for each in shorter:
                self.index.remove(each)
                self.used -= each.n_bytes
        self.used += sum(span.n_bytes for span in added)
        for span in added[-1:]:
            span.last_used = self.now
            self._lease(span)
        return end

    def _make_room(self, n_bytes: int, newcomer: Newcomer, n_states: int = 0) -> bool:
        while self.used + n_bytes > self.budget or len(self.index.checkpoints) + n_states > self.max_states:
            chosen = self.retention.victim(newcomer)
            if chosen is None:
                return False
            self.index.remove(chosen[0])
            self.used -= chosen[0].n_bytes
        return True


# ---- states at the ends, least recently used out first --------------------------------------------------------------


class EndsAndLru:
    """States at the last whole block of a prompt, or at its end and that of its reply; shares for KV and states."""

    def __init__(self, trace: Trace, budget: float, max_states: float = UNLIMITED) -> None:
        self.scale = trace.id_tokens
        self.index = PrefixIndex(span_tokens=max(1, SPAN_TOKENS // trace.id_tokens))
        self.max_kv = budget * (1 - ENDS_SHARE)
        self.max_states = min(max_states, budget * ENDS_SHARE // STATE_TOKENS)
        self.kv = 0
        self.spans: OrderedDict[Span, None] = OrderedDict()
        self.states: OrderedDict[Checkpoint, None] = OrderedDict()

    def serve(self, turn: Turn) -> int:
        match = self.index.match(turn.namespace, turn.ids)
        chain = match.chain(0, match.n_tokens)
        below = min(match.usable_end(chain[-1]) if chain else 0, (turn.n_prompt - 1) // self.scale)
        source = next((each for each in reversed(match.checkpoints) if each.position <= below), None)
        if source is not None:
            self.states.move_to_end(source)
        self._touch(turn, match, chain)
        prompt_end = turn.n_prompt // self.scale
        for end in sorted({prompt_end, len(turn.ids)}):
            self._add_state(turn.namespace, turn.ids[:end])
        return 0 if source is None else source.position * self.scale

    def _touch(self, turn: Turn, match: Match, chain: Sequence[Span]) -> None:
        added = self.index.add_spans(turn.namespace, turn.ids, self.index.span_tokens * self.scale)
        whole = len(turn.ids) // self.index.span_tokens * self.index.span_tokens
        last = match.spans.get(whole)
        if whole < len(turn.ids) and (last is None or match.usable_end(last) < len(turn.ids)):
            span, shorter = self.index.add_span(turn.namespace, turn.ids, (len(turn.ids) - whole) * self.scale)
            added.append(span)
            for each in shorter:
                self._drop(each)
        self.kv += sum(span.n_bytes for span in added)
        path = {span.start: span for span in (*chain, *added) if span.node is not None}
        for start in sorted(path, reverse=True):
            self.spans[path[start]] = None
            self.spans.move_to_end(path[start])
        while self.kv > self.max_kv:
            self._drop(next(iter(self.spans)))

    def _drop(self, span: Span) -> None:
        del self.spans[span]
        self.index.remove(span)
        self.kv -= span.n_bytes

    def _add_state(self, namespace: str, ids: Ids) -> None:
        if not len(ids):
            return
        path = self.index.path(namespace, ids)
        state = path[-1] if path and path[-1].position == len(ids) else None
        if state is None:
            state = self.index.add_checkpoint(namespace, ids, CheckpointKind.END, STATE_TOKENS)
        self.states[state] = None
        self.states.move_to_end(state)
        while len(self.states) > self.max_states:
            self.index.remove(self.states.popitem(last=False)[0])


# ---- traces --------------------------------------------------------------------------------------------------------


def read_lines(path: Path) -> list[Any]:
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def mooncake(kind: str) -> Trace:
    turns = [
        Turn(np.array(row["hash_ids"][: row["input_length"] // BLOCK_TOKENS], dtype=np.int32), row["input_length"])
        for row in read_lines(TRACES / "mooncake" / f"{kind}_trace.first10min.jsonl.gz")
    ]
    return Trace(f"mooncake {kind}", turns, BLOCK_TOKENS, (5_000, 10_000, 20_000))


def coding_agent(file: str) -> Trace:
    """Conversations one after the other: one is live. Their ids are their own, so nothing is shared between them."""
    turns: list[Turn] = []
    for number, conversation in enumerate(
        read_lines(TRACES / "kv-cache-tester" / f"cc_traces_compact.{file}.jsonl.gz")
    ):
        header = conversation["tool_tokens"] + conversation["system_tokens"]
        for row in conversation["requests"]:
            ids = np.concatenate([np.arange(first, first + n, dtype=np.int32) for first, n in row["h"]])
            turns.append(Turn(ids[: row["in"] // 64], row["in"], (header,), str(number)))
    return Trace(f"coding agent {file}", turns, 64, (), STATES_PER_CONVERSATION)


_PIECE = re.compile(r"\w{1,4}|\s+|[^\w\s]{1,4}")


def tokens(text: str) -> list[int]:
    return [zlib.crc32(piece.encode()) & 0x7FFFFFFF for piece in _PIECE.findall(text)]


class Transcript:
    """A conversation's ids in a ChatML-like layout, tools after the system text."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.starts: list[int] = []

    def add(self, role: str, text: str) -> None:
        self.starts.append(len(self.ids))
        self.ids += tokens(f"<|im_start|>{role}\n{text}<|im_end|>\n")

    def answer(self, text: str, header_end: int) -> Turn:
        """The turn that produces it; it is then part of the conversation."""
        last_start = self.starts[-1]
        prompt = self.ids + tokens("<|im_start|>assistant\n")
        self.add("assistant", text)
        boundaries = tuple(sorted({header_end, last_start} - {0}))
        return Turn(np.array(self.ids[:-2], dtype=np.int32), len(prompt), boundaries)


def _text(message: Any) -> str:
    calls = message.get("tool_calls")
    return (message.get("content") or "") + (json.dumps(calls) if calls else "")


def tau_bench() -> Trace:
    folder = TRACES / "tau-bench"
    system = (folder / "airline_system_prompt.md").read_text(encoding="utf-8")
    tools = (folder / "airline_tools.json").read_text(encoding="utf-8")
    with gzip.open(folder / "gpt-4o-airline.first100.json.gz", "rt", encoding="utf-8") as file:
        conversations = json.load(file)
    turns: list[Turn] = []
    for conversation in conversations:
        transcript = Transcript()
        transcript.add("system", system + tools)
        header_end = len(transcript.ids)
        for message in conversation["traj"]:
            if message["role"] == "assistant":
                turns.append(transcript.answer(_text(message), header_end))
            elif message["role"] != "system":
                transcript.add(message["role"], _text(message))
    return Trace("tau-bench airline, one after the other", turns, 1, (), STATES_PER_CONVERSATION)


def miniswe() -> Trace:
    """Sessions one beside the other, at their own times."""
    timed: list[tuple[int, int, Turn]] = []
    sessions = read_lines(TRACES / "lmcache-agent-trace" / "miniswe_sessions.first10.jsonl.gz")
    for number, session in enumerate(sessions):
        transcript = Transcript()
        transcript.add("system", "You are a helpful assistant that can interact with a computer.")
        header_end = len(transcript.ids)
        for turn in session["turns"]:
            transcript.add("user", turn["user"])
            timed.append((turn["ts_us"], number, transcript.answer(turn["assistant"], header_end)))
    timed.sort(key=lambda each: each[:2])
    return Trace("miniswe", [turn for _, _, turn in timed], 1, (), STATES_PER_CONVERSATION)


def synthetic_agents(n_agents: int = 8, n_turns: int = 24, seed: int = 0) -> Trace:
    """Agents in turn on one header, each growing by 400 to 1,600 tokens; every fourth goes back a turn halfway."""
    rng = np.random.default_rng(seed)
    header = rng.integers(1, 1 << 30, 3_000, dtype=np.int32)
    held = [header] * n_agents
    turns: list[Turn] = []
    for turn in range(n_turns):
        for agent in range(n_agents):
            if turn == n_turns // 2 and agent % 4 == 0:
                held[agent] = held[agent][: len(held[agent]) * 3 // 4]
            prompt = np.concatenate([held[agent], rng.integers(1, 1 << 30, rng.integers(300, 1_200), dtype=np.int32)])
            held[agent] = np.concatenate([prompt, rng.integers(1, 1 << 30, rng.integers(100, 400), dtype=np.int32)])
            turns.append(Turn(held[agent], len(prompt), (len(header),)))
    return Trace("synthetic agents", turns, 1, (100, 200, 400))


SETS: dict[str, Callable[[], Trace]] = {
    "conversation": lambda: mooncake("conversation"),
    "synthetic": lambda: mooncake("synthetic"),
    "agent32k": lambda: coding_agent("max32k"),
    "agent64k": lambda: coding_agent("max64k_first60"),
    "tau": tau_bench,
    "miniswe": miniswe,
}
SYNTHETIC: dict[str, Callable[[], Trace]] = {"agents": synthetic_agents}


# ---- table ---------------------------------------------------------------------------------------------------------


def rows(trace: Trace) -> Iterator[tuple[str, str, Outcome]]:
    """Budget, policy, outcome."""
    unlimited = UNLIMITED
    for blocks in trace.budgets:
        budget = blocks * BLOCK_TOKENS
        yield f"{blocks:,} blocks", "ends + LRU", replay(trace, EndsAndLru(trace, budget))
        yield f"{blocks:,} blocks", "ours", replay(trace, Ours(trace, budget))
    if not trace.budgets:
        budget_name = f"{trace.max_states:,.0f} states"
        yield budget_name, "ends + LRU", replay(trace, EndsAndLru(trace, unlimited, trace.max_states))
        yield budget_name, "ours", replay(trace, Ours(trace, unlimited, trace.max_states))
    yield "unlimited", "ends + LRU", replay(trace, EndsAndLru(trace, unlimited))
    yield "unlimited", "ours", replay(trace, Ours(trace, unlimited))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="write bench/results/replay.json")
    parser.add_argument("--set", choices=[*SETS, *SYNTHETIC], action="append", help="only this one; repeatable")
    options = parser.parse_args(arguments)
    available = SETS | SYNTHETIC if TRACES.is_dir() else SYNTHETIC
    if not TRACES.is_dir():
        print(f"no traces in {TRACES}: synthetic workloads only", file=sys.stderr)
    results: dict[str, Any] = {}
    for name in options.set or available:
        if name not in available:
            continue
        trace = available[name]()
        table = []
        for budget, policy, outcome in rows(trace):
            rate = f"{outcome.requests_per_minute:,.0f}" if policy == "ours" else ""
            table.append((budget, policy, f"{outcome.hit_percent:.1f}", rate))
            results.setdefault(name, {}).setdefault(budget, {})[policy] = {
                "hit_percent": round(outcome.hit_percent, 2),
                "requests_per_minute": round(outcome.requests_per_minute),
            }
        title = f"{trace.name}: {len(trace.turns):,} requests, {sum(each.n_prompt for each in trace.turns):,} tokens"
        print_table(title, ("budget", "policy", "hits %", "requests/min"), table)
    if options.json:
        write_json("replay", None, results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
