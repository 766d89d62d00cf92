"""Recorded agent conversations through `engine.chat`: what is prefilled, against what any prefix cache could reuse.

The first conversations of tau-bench's airline agent, one after the other, as an agent sends them: a request for every
assistant message of the recording, with the messages before it; the recorded message then comes back as history.

    smollm2         Qwen3's template, with the 14 tools
    gemma3          its file has no template: ChatML, which has no tools; the calls are written into the contents
    hybrid          tiny, with a byte-level vocabulary and random weights; Qwen3's template, with the tools

The ideal is the longest common prefix with any earlier prompt and its sampled token, at most all but one, on the ids
that were sent. Without the traces (`../shared/traces`), a scripted agent's conversations are sent.
"""

from __future__ import annotations

import gzip
import json
import math
import sys
import tempfile
import time
from argparse import ArgumentParser
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from bench.harness import print_table, summarize, write_json
from bench.replay import TRACES
from bench.workloads import Ids
from pyllamacache import Engine, Model

Message = dict[str, Any]

FOLDER = TRACES / "tau-bench"
REFERENCE_PERCENT = 97.3
"""The ideal of all 200 conversations in `../shared/reference/traces.md`: other tokens, another layout."""
TEMPLATE = "Qwen-Qwen3-0.6B"
SPARE_TOKENS = 4
"""Prefilled beyond the ideal without being listed."""
NOW_S = 1_715_800_000


# ---- what is sent ----


@dataclass(frozen=True, slots=True)
class Recording:
    """Conversations to replay, each with its system message in front."""

    name: str
    conversations: list[list[Message]]
    tools: list[Any]


def tau_bench(n: int) -> Recording:
    tools = json.loads((FOLDER / "airline_tools.json").read_text(encoding="utf-8"))
    with gzip.open(FOLDER / "gpt-4o-airline.first100.json.gz", "rt", encoding="utf-8") as file:
        trajectories = [each["traj"] for each in json.load(file)[:n]]
    return Recording("tau-bench airline", trajectories, tools)


def scripted(n: int) -> Recording:
    from tests.flow.chats import TOOLS, Agent

    conversations: list[list[Message]] = []
    for _ in range(n):
        agent = Agent(seed=5, with_reasoning=False)  # the system message is the same in all of them
        agent._random.seed(1_000 + len(conversations))
        for _ in agent.requests(4):
            pass
        conversations.append(agent.messages)
    return Recording("a scripted agent", conversations, TOOLS)


def requests(conversation: Sequence[Message]) -> Iterator[list[Message]]:
    """The messages that each recorded reply answered."""
    for i, message in enumerate(conversation):
        if message["role"] == "assistant":
            yield list(conversation[:i])


def without_calls(conversation: Sequence[Message]) -> list[Message]:
    """For a template without tools: the calls as text."""

    def plain(message: Message) -> Message:
        calls = [call["function"] for call in message.get("tool_calls") or ()]
        content = (message.get("content") or "") + "".join(json.dumps(call) for call in calls)
        return {"role": message["role"], "content": content}

    return [plain(each) for each in conversation]


# ---- what comes of it ----


class TimedEngine(Engine):
    """Notes what a chat request costs before it is sent, on the thread that calls."""

    began_s = rendered_s = tokenized_s = 0.0

    def chat(self, *args: Any, **options: Any) -> Any:
        self.began_s = time.perf_counter()
        return super().chat(*args, **options)

    def _send(self, *args: Any) -> Any:
        self.rendered_s = time.perf_counter() - self.began_s
        return super()._send(*args)

    def _request(self, *args: Any, **options: Any) -> Any:
        start_s = time.perf_counter()
        request = super()._request(*args, **options)
        self.tokenized_s = time.perf_counter() - start_s
        return request


@dataclass(frozen=True, slots=True)
class Sent:
    """One request and what became of it."""

    conversation: int
    number: int
    """In the conversation."""
    ids: Ids
    completion: Any
    ideal: int
    """Tokens."""
    render_s: float
    tokenize_s: float

    @property
    def beyond_ideal(self) -> int:
        return self.ideal - int(self.completion.usage.cached_tokens)


@dataclass(slots=True)
class Replay:
    """Requests in the order they were sent."""

    sent: list[Sent] = field(default_factory=list)
    _seen: list[Ids] = field(default_factory=list)

    def run(
        self, engine: TimedEngine, recording: Recording, *, progress: bool = False, limit_s: float = math.inf
    ) -> None:
        """No conversation is begun after `limit_s`."""
        end_s = time.perf_counter() + limit_s
        options: dict[str, Any] = {"tools": recording.tools or None, "max_tokens": 1, "now_s": NOW_S}
        for i, conversation in enumerate(recording.conversations):
            start_s = time.perf_counter()
            if start_s > end_s:
                break
            for number, messages in enumerate(requests(conversation)):
                completion = engine.chat(messages, **options).completion
                ids = np.asarray(completion.prompt_token_ids)
                ideal = min(len(ids) - 1, max((n_common(ids, each) for each in self._seen), default=0))
                each = Sent(i, number, ids, completion, ideal, engine.rendered_s, engine.tokenized_s)
                self.sent.append(each)
                self._seen.append(np.append(ids, np.asarray(completion.token_ids, dtype=np.int32)))
            if progress:
                print(f"  conversation {i}: {time.perf_counter() - start_s:.1f} s", file=sys.stderr, flush=True)

    @property
    def prompt_tokens(self) -> int:
        return sum(len(each.ids) for each in self.sent)

    @property
    def prefilled_tokens(self) -> int:
        return sum(int(each.completion.cache.prefilled_tokens) for each in self.sent)

    @property
    def hit_percent(self) -> float:
        return 100 * (self.prompt_tokens - self.prefilled_tokens) / self.prompt_tokens

    @property
    def ideal_percent(self) -> float:
        return 100 * sum(each.ideal for each in self.sent) / self.prompt_tokens


def n_common(a: Ids, b: Ids) -> int:
    n = min(len(a), len(b))
    differs = np.flatnonzero(a[:n] != b[:n])
    return int(differs[0]) if len(differs) else n


def context_for(model: Model, engine_options: dict[str, Any], recording: Recording) -> dict[str, Any]:
    """`n_ctx` that holds the longest prompt, beyond the trained length where need be."""
    longest = 0
    with Engine(model, n_ctx=512, n_slots=1, progress=False, **engine_options) as engine:
        for conversation in recording.conversations:
            *_, last = requests(conversation)
            longest = max(longest, len(model.tokenize(engine.render(last, tools=recording.tools or None).text)))
    n_ctx = -(-(longest + longest // 50 + 64) // 1024) * 1024  # contents are tokenized piece by piece: a few more
    return {"n_ctx": n_ctx} if n_ctx <= model.n_ctx_train else {"n_ctx": n_ctx, "rope_scaling": "yarn"}


def shortfalls(replay: Replay, model: Model) -> list[dict[str, Any]]:
    """The requests that prefilled more than they had to: where, and what is there."""
    found = []
    for each in replay.sent:
        if each.beyond_ideal > SPARE_TOKENS:
            cache, ids = each.completion.cache, each.ids.tolist()
            at = each.completion.usage.cached_tokens
            found.append(
                {
                    "conversation": each.conversation,
                    "request": each.number,
                    "tokens": len(ids),
                    "ideal": each.ideal,
                    "cached": at,
                    "source": str(cache.source),
                    "reason": str(cache.reason),
                    "position": cache.position,
                    "resumed before": model.detokenize(ids[at : at + 12], special=True),
                    "left at": model.detokenize(ids[max(0, each.ideal - 8) : each.ideal], special=True)
                    + " | "
                    + model.detokenize(ids[each.ideal : each.ideal + 8], special=True),
                }
            )
    return found


def results_of(replay: Replay, model: Model, n_ctx: int) -> dict[str, Any]:
    """Numbers only, but for what surrounds a shortfall."""
    sent = replay.sent
    spent_s = sum(each.completion.timings.prefill_s + each.completion.timings.restore_s for each in sent)
    first = sent[0].completion
    cold_tokens_s = first.cache.prefilled_tokens / first.timings.prefill_s
    by_source: Counter[str] = Counter()
    by_reason: Counter[str] = Counter()
    for each in sent:
        by_source[str(each.completion.cache.source)] += int(each.completion.usage.cached_tokens)
        by_reason[str(each.completion.cache.reason)] += 1
    sources = Counter(str(each.completion.cache.source) for each in sent)
    return {
        "model": model.path.name,
        "n_ctx": n_ctx,
        "conversations": len({each.conversation for each in sent}),
        "requests": len(sent),
        "prompt tokens": replay.prompt_tokens,
        "prefilled tokens": replay.prefilled_tokens,
        "hit percent": replay.hit_percent,
        "ideal percent": replay.ideal_percent,
        "reference ideal percent": REFERENCE_PERCENT,
        "requests by source": dict(sources),
        "cached tokens by source": dict(by_source),
        "requests by reason": dict(by_reason),
        "largest shortfall tokens": max(each.beyond_ideal for each in sent),
        "shortfall tokens": sum(each.beyond_ideal for each in sent),
        "prefill and restore s": spent_s,
        "cold tokens/s": cold_tokens_s,
        "without reuse s, estimated": replay.prompt_tokens / cold_tokens_s,
        "render s": summarize([each.render_s for each in sent]),
        "tokenize s": summarize([each.tokenize_s for each in sent]),
        "shortfalls": shortfalls(replay, model),
    }


# ---- the models ----


def smollm2() -> Path:
    from tests.models.real import smollm2 as path

    return path()


def gemma3() -> Path:
    from tests.models.real import gemma3 as path

    return path()


def tiny_hybrid() -> Path:
    from tests.models import HybridSpec, write_model

    path = Path(tempfile.mkdtemp()) / "tiny-hybrid.gguf"
    write_model(HybridSpec(n_ctx_train=131072), path)  # a token is a byte or two: prompts of 40,000
    return path


MODELS: dict[str, tuple[Callable[[], Path], bool]] = {
    "smollm2": (smollm2, True),
    "gemma3": (gemma3, False),
    "hybrid": (tiny_hybrid, True),
}
"""Its file, and whether it is given a template with tools."""


def replayed(name: str, recording: Recording, n_threads: int | None, limit_s: float) -> dict[str, Any]:
    from tests.flow.chats import template_source

    find, has_tools = MODELS[name]
    if not has_tools:
        recording = Recording(recording.name, [without_calls(each) for each in recording.conversations], [])
    options: dict[str, Any] = {"chat_template": template_source(TEMPLATE)} if has_tools else {}
    options["n_threads"] = n_threads
    with Model(find(), progress=False) as model:
        options |= context_for(model, options, recording)
        replay = Replay()
        with TimedEngine(model, progress=False, **options) as engine:
            replay.run(engine, recording, progress=True, limit_s=limit_s)
        return results_of(replay, model, options["n_ctx"])


def _listed(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {n:,}" for name, n in sorted(counts.items(), key=lambda each: -each[1]))


def table(results: dict[str, dict[str, Any]]) -> list[list[str]]:
    def row(what: str, show: Callable[[dict[str, Any]], str]) -> list[str]:
        return [what, *(show(each) for each in results.values())]

    return [
        row("conversations, requests", lambda r: f"{r['conversations']}, {r['requests']}"),
        row("tokens sent", lambda r: f"{r['prompt tokens']:,}"),
        row("prefilled", lambda r: f"{r['prefilled tokens']:,}"),
        row("hit rate, %", lambda r: f"{r['hit percent']:.2f}"),
        row("ideal on these ids, %", lambda r: f"{r['ideal percent']:.2f}"),
        row("ideal of traces.md, %", lambda r: f"{r['reference ideal percent']:.1f}"),
        row(
            "beyond the ideal: all, largest, tokens",
            lambda r: f"{r['shortfall tokens']}, {r['largest shortfall tokens']}",
        ),
        row("requests by source", lambda r: _listed(r["requests by source"])),
        row("requests by reason", lambda r: _listed(r["requests by reason"])),
        row("prefill and restore, s", lambda r: f"{r['prefill and restore s']:.1f}"),
        row("without reuse at the first one's rate, s", lambda r: f"{r['without reuse s, estimated']:.0f}"),
        row("rendering, median ms", lambda r: f"{r['render s'].median * 1e3:.1f}"),
        row("tokenizing, median ms", lambda r: f"{r['tokenize s'].median * 1e3:.1f}"),
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--conversations", type=int, default=20, help="the first N of the recording")
    parser.add_argument("--only", choices=list(MODELS), action="append", help="only this model; repeatable")
    parser.add_argument("--limit", type=float, default=math.inf, help="seconds after which a model begins no other one")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--json", action="store_true", help="write bench/results/chat.json")
    args = parser.parse_args(arguments)
    if args.conversations < 1:
        parser.error("--conversations takes at least 1")
    if FOLDER.is_dir():
        recording = tau_bench(args.conversations)
    else:
        print(f"no traces in {FOLDER}: a scripted agent instead", file=sys.stderr)
        recording = scripted(args.conversations)
    results = {}
    for name in args.only or MODELS:
        print(f"{name}:", file=sys.stderr)
        results[name] = replayed(name, recording, args.threads, args.limit)
        print(*(": ".join(row) for row in table({name: results[name]})), sep="\n", file=sys.stderr)
        for each in results[name]["shortfalls"][:5]:
            print(f"  {each}", flush=True)
    print_table(f"{recording.name}, through chat", ["", *results], table(results))
    print("gemma3 has no tools: its file has no template, and ChatML writes none", file=sys.stderr)
    if args.json:
        with Model(smollm2(), progress=False) as model:
            write_json("chat", model, {"recording": recording.name, **results})
    return 0


if __name__ == "__main__":
    sys.exit(main())
