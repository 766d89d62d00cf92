"""The work that every engine is given: scripts of requests, where later ones contain what the engine itself answered.

A script is a generator: it yields a `Step` and is sent the reply's text. Engines get scripts of their own, made from
the same seed, and are driven through them in step, so that each case is measured on all of them within seconds.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from bench.flow import chat
from bench.peer.peer import ChatRequest, Message
from bench.replay import TRACES, read_lines

REPLY_TOKENS = 24
BUSY_TOKENS = 192
"""Of the reply beside which a second agent asks."""
N_AGENTS = 8
N_ROUNDS = 3

_PROSE = """
able about above account across action after again agent agree along among answer apply argue around arrive ask
author basket before begin behind believe below between book bottle bridge bring build buyer call careful carry
change check city clear close cloud coast cold collect common compare copper corner count cover cross current
daily decide deep deliver depend detail differ direct double draw drive early earth east edge effect eight
engine enough enter equal even event every example exchange expect extra factor fair farm field figure final
find first floor follow force forest forward four fresh front garden gather general give glass grain green
ground group grow half harbour heavy height help hold home hour house idea include inside island join judge keep
kind know label large later learn leave letter level light limit line list little local look lower machine main
make market match matter measure meet middle mind minute modern month morning mountain move narrow near need
never night north note number offer office often open orange order other outside paper part path pattern people
period piece place plain plan plate point port position power press price print problem produce proper public
quarter quick quiet quite rain reach read reason record region remain repair repeat reply report rest result
return river road round rule sail sample season second section sell send separate serve seven shape share sheet
shift ship shore short side sign silver simple single six size slow small smooth solid some sound south space
speak special square stand start state station stay steel still stone store street strong study such sugar
summer supply surface system table take talk task tell ten term thing third three tide time today together tool
total touch town trade train travel tree turn under until upper usual valley value very view village visit voice
wait walk wall warm watch water weather week weight west wheel where while white whole wide window winter wood
word work world write year yellow young
"""
WORDS = tuple(_PROSE.split())


@dataclass(frozen=True, slots=True)
class Step:
    """One thing to do. `case` is what its measurement counts for; None: it only prepares."""

    case: str | None
    request: ChatRequest
    restarts: bool = False
    """The engine is stopped and started again first; what its users do for that is done."""
    beside: ChatRequest | None = None
    """A request that is generating when `request` is sent, and is waited for afterwards."""


Script = Generator[Step, str, None]


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}


def system(text: str) -> Message:
    return {"role": "system", "content": text}


class Writer:
    """Seeded prose of a stated number of tokens, up to the last word."""

    def __init__(self, count_tokens: Callable[[str], int], seed: int) -> None:
        self._count_tokens = count_tokens
        self._random = np.random.default_rng(seed)

    def _sentence(self) -> str:
        words = [WORDS[i] for i in self._random.integers(0, len(WORDS), self._random.integers(6, 14))]
        return " ".join(words).capitalize() + "."

    def text(self, n_tokens: int) -> str:
        sentences: list[str] = []
        n_have = 0
        while n_have < n_tokens:
            sentences.append(self._sentence())
            n_have += self._count_tokens(" " + sentences[-1])
        words = " ".join(sentences).split(" ")
        while self._count_tokens(" ".join(words)) > n_tokens:
            words.pop()
        return " ".join(words)


# ---- one conversation, and what people do to it ----


def conversation(writer: Writer, header_tokens: int) -> Script:
    """Everything but agents in turn: one process, one system prompt."""
    head = system(writer.text(header_tokens))
    ask = [user(writer.text(60)) for _ in range(9)]

    def ask_for(case: str | None, messages: Sequence[Message], **more: Any) -> Step:
        return Step(case, ChatRequest(list(messages), REPLY_TOKENS), **more)

    main = [head, ask[0]]
    main.append(assistant((yield ask_for("cold", main))))
    main.append(ask[1])
    yield ask_for("append", main)
    yield ask_for("repeat", main)
    edited = user(ask[1]["content"].rsplit(" ", 6)[0] + " " + writer.text(12))
    main[-1] = edited
    main.append(assistant((yield ask_for("edit the last message", main))))
    for i in (2, 3):
        main.append(ask[i])
        main.append(assistant((yield ask_for("append", main))))
    yield ask_for("branch in the middle", [*main[:5], user(writer.text(60))])
    main.append(ask[4])
    main.append(assistant((yield ask_for("return to the old branch", main))))
    changed = user(main[3]["content"].rsplit(" ", 4)[0] + " " + writer.text(8))
    yield ask_for("edit a question in the middle", [*main[:3], changed, *main[4:], ask[5]])
    shortened = assistant(main[4]["content"][: len(main[4]["content"]) // 2])
    yield ask_for("edit a reply in the middle", [*main[:4], shortened, *main[5:], ask[5]])
    main.append(ask[5])
    main.append(assistant((yield ask_for("return to the old branch", main))))
    yield ask_for("drop the previous reply", [*main[:-1], ask[6]])
    main.append(ask[6])
    main.append(assistant((yield ask_for("return to the old branch", main))))
    yield ask_for(None, [system(writer.text(150)), user(writer.text(40))])
    main.append(ask[7])
    main.append(assistant((yield ask_for("after an unrelated request", main))))
    main.append(ask[8])
    main.append(assistant((yield ask_for("restart and resume", main, restarts=True))))
    others = [[head, user(writer.text(60))] for _ in range(2)]
    beside = ChatRequest(others[0], BUSY_TOKENS, is_endless=True)
    yield ask_for("same header, its holder busy", others[1], beside=beside)


def agents_in_turn(writer: Writer, header_tokens: int) -> Script:
    """Eight agents with one system prompt, each with a task of its own, in turn."""
    head = system(writer.text(header_tokens))
    talks = [[head, user(writer.text(60))] for _ in range(N_AGENTS)]
    for round_ in range(N_ROUNDS):
        for i, talk in enumerate(talks):
            # the very first prompt is cold everywhere and would hide the rest
            case = "eight agents in turn" if round_ or i else None
            reply = yield Step(case, ChatRequest(list(talk), REPLY_TOKENS))
            talk += [assistant(reply), user(writer.text(40))]


# ---- recorded sessions: what the recording answered comes back, whatever was generated ----


@dataclass(frozen=True, slots=True)
class Recording:
    """Conversations that are sent in turn, a request of each at a time. `requests[i]`: the i-th conversation's."""

    name: str
    requests: tuple[tuple[ChatRequest, ...], ...]

    def script(self) -> Script:
        for turn in range(max(map(len, self.requests))):
            for requests in self.requests:
                if turn < len(requests):
                    yield Step(self.name, requests[turn])


def _answered(messages: Sequence[Message], tools: Sequence[Any], limit: int) -> tuple[ChatRequest, ...]:
    """A request for each assistant message, up to `limit`."""
    return tuple(ChatRequest(each, 1, tools) for each in islice(chat.requests(messages), limit))


def tau_bench(n: int, n_requests: int) -> Recording:
    """The first conversations of the airline agent, with its 14 tools, in turn."""
    recorded = chat.tau_bench(n)
    talks = tuple(_answered(talk, recorded.tools, n_requests) for talk in recorded.conversations)
    return Recording(f"tau-bench, {n} agents", talks)


def miniswe(numbers: Sequence[int], n_requests: int) -> Recording:
    """Coding sessions of lmcache-agent-trace, in turn. The system message is ours: the recording has none."""
    head = system("You are a helpful assistant that can interact with a computer.")
    sessions = list(read_lines(TRACES / "lmcache-agent-trace" / "miniswe_sessions.first10.jsonl.gz"))
    requests = []
    for number in numbers:
        messages = [head]
        for turn in sessions[number]["turns"]:
            messages += [user(turn["user"]), assistant(turn["assistant"])]
        requests.append(_answered(messages, (), n_requests))
    agents = "1 agent" if len(numbers) == 1 else f"{len(numbers)} agents"
    return Recording(f"mini-swe-agent, {agents}", tuple(requests))


def toolbench(numbers: Sequence[int], n_requests: int) -> Recording:
    """Tree searches, one after the other: a request at every node, siblings leave their parent's path."""
    trees = list(read_lines(TRACES / "toolbench" / "dfs_answers.jsonl.gz"))
    requests: list[ChatRequest] = []
    for number in numbers:
        data = trees[number]["data"]
        generation = data["answer_generation"]
        head = system("Use the tools to answer. They are:\n" + json.dumps(generation["function"], indent=1))
        found: list[ChatRequest] = []
        _walk(data["tree"]["tree"], [head, user(generation["query"])], found)
        requests += found[:n_requests]
    return Recording(f"ToolBench, {len(numbers)} tree searches", (tuple(requests),))


def _walk(node: dict[str, Any], path: list[Message], found: list[ChatRequest]) -> None:
    """Pre-order. What a chain of nodes says up to its observation is one reply."""
    for child in node["children"]:
        found.append(ChatRequest(list(path), 1))
        said, seen = [], child
        while True:
            said.append(f"{seen['node_type']}: {seen['description']}")
            if seen.get("observation") or len(seen["children"]) != 1:
                break
            seen = seen["children"][0]
        if seen["children"]:
            observed = user("Observation: " + str(seen.get("observation") or "none"))
            _walk(seen, [*path, assistant("\n".join(said)), observed], found)


def synthetic(n_agents: int, n_requests: int, seed: int = 7) -> Recording:
    """In place of recordings: agents with one header, results of tools that differ in length, one going back a turn."""
    random = np.random.default_rng(seed)

    def prose(n_words: int) -> str:
        return " ".join(WORDS[i] for i in random.integers(0, len(WORDS), n_words))

    head = system(prose(900))
    talks = []
    for agent in range(n_agents):
        messages = [head]
        for turn in range(n_requests):
            messages += [user(prose(int(random.integers(30, 160)))), assistant(prose(30))]
            if agent == 0 and turn == n_requests // 2:
                messages = messages[:-4]
        talks.append(_answered(messages, (), n_requests))
    return Recording(f"synthetic, {n_agents} agents", tuple(talks))


def recordings(*, is_small: bool) -> list[Recording]:
    """`is_small`: what a 135M model prefills on two cores in minutes."""
    if not TRACES.is_dir():
        return [synthetic(3, 6)]
    if is_small:
        return [tau_bench(3, 4), miniswe([2], 5), miniswe([0, 2, 7], 4), toolbench([0, 1], 12)]
    return [tau_bench(6, 12), miniswe([2], 6), miniswe([0, 2, 5, 6, 7], 12), toolbench([0, 1, 2, 3], 40)]
