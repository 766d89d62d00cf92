"""What a turn of an agent costs on memory that cannot be rewound: the new tokens and next to nothing else.

A system prompt of 2,000 tokens, messages of 60, replies of 10. The default mode computes at most 4 tokens more than are
new; exact mode reuses whole chunks of prompt tokens only, so replies count as new and one n_ubatch comes on top.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from tests.flow.checkpoints import check_budget
from tests.flow.law import Ids, Pair, joined, random_ids

SYSTEM = random_ids(1, 2000)
N_UBATCH, N_REPLY = 512, 10

Answers = dict[tuple[bytes, int], Any]


@dataclass(frozen=True)
class Turn:
    """A prompt and what it was answered."""

    prompt: Ids
    reply: tuple[int, ...]

    @property
    def ids(self) -> Ids:
        return joined(self.prompt, self.reply)


def message(seed: int) -> Ids:
    return random_ids(100 + seed, 60)


def talk(engine: Any, *, n_turns: int = 4, n_system: int = 2000) -> list[Turn]:
    turns: list[Turn] = []
    ids = joined(SYSTEM[:n_system], message(0))
    for number in range(n_turns):
        reply = engine.complete(ids, max_tokens=N_REPLY)
        turns.append(Turn(ids, reply.token_ids))
        ids = joined(turns[-1].ids, message(1 + number))
    return turns


CHANGES: dict[str, Callable[[list[Turn]], tuple[Ids, int]]] = {
    # the prompt, and how many of its tokens are new
    "append": lambda turns: (joined(turns[-1].ids, message(50)), 60),
    "regenerate": lambda turns: (turns[-1].prompt, 0),
    "edit the last message": lambda turns: (joined(turns[-2].ids, message(51)), 60),
    "go back to an earlier branch": lambda turns: (joined(turns[0].ids, message(52)), 60),
    "drop the previous reply": lambda turns: (joined(turns[-1].prompt, message(53)), 60),
}
MODES = [
    pytest.param(
        kind,
        exact,
        id=f"{kind}-{'exact' if exact else 'default'}",
        marks=[] if kind == "hybrid" else pytest.mark.slow,
    )
    for kind, exact in [
        ("hybrid", False),
        ("hybrid", True),
        ("recurrent", False),
        ("recurrent", True),
        ("sliding", False),
    ]
]


@pytest.fixture(scope="module")
def answers() -> dict[tuple[str, bool], Answers]:
    return {}


@pytest.fixture
def make(new_pair: Callable[..., Pair], answers: dict[tuple[str, bool], Answers]) -> Callable[..., Pair]:
    def pair(kind: str, *, exact: bool, n_slots: int) -> Pair:
        options: dict[str, Any] = {} if exact else {"kv_tokens": 12_000}
        known = answers.setdefault((kind, exact), {})
        return new_pair(
            kind,
            exact=exact,
            n_slots=n_slots,
            n_ctx=2560,
            n_batch=N_UBATCH,
            n_ubatch=N_UBATCH,
            answers=known,
            **options,
        )

    return pair


def allowed(n_new: int, turns: list[Turn], ids: Ids, *, exact: bool) -> int:
    if not exact:
        return n_new + 4
    in_it = [turn for turn in turns if len(turn.ids) <= len(ids) and (turn.ids == ids[: len(turn.ids)]).all()]
    return n_new + N_REPLY * len(in_it) + N_UBATCH


@pytest.mark.parametrize(
    ("exact", "change"), [*((False, change) for change in CHANGES), (True, "append"), (True, "drop the previous reply")]
)
def test_a_change_to_a_fresh_conversation_costs_what_is_new(
    exact: bool, change: str, make: Callable[..., Pair]
) -> None:
    pair = make("hybrid", exact=exact, n_slots=1)
    turns = talk(pair.warm)
    ids, n_new = CHANGES[change](turns)
    reply = pair.ask(ids, max_tokens=N_REPLY)
    assert reply.cache.prefilled_tokens <= allowed(n_new, turns, ids, exact=exact), reply.cache


@pytest.mark.parametrize(("kind", "exact"), MODES)
def test_changes_one_after_the_other_cost_what_is_new_each(kind: str, exact: bool, make: Callable[..., Pair]) -> None:
    """Over eight slots, an unrelated conversation and a return among them; every branch is kept."""
    pair = make(kind, exact=exact, n_slots=8)
    turns = talk(pair.warm, n_system=2000 if kind == "hybrid" else 1000)
    for change in [*CHANGES, "append", "regenerate"]:
        if change == "append":
            pair.warm.complete(random_ids(300, 200), max_tokens=N_REPLY)
        ids, n_new = CHANGES[change](turns)
        reply = pair.ask(ids, max_tokens=N_REPLY)
        assert reply.cache.prefilled_tokens <= allowed(n_new, turns, ids, exact=exact), (change, reply.cache)
    assert pair.warm.statistics().checkpoints.evicted == {}
    check_budget(pair.warm)


@pytest.mark.parametrize(("kind", "exact"), MODES)
def test_a_second_agent_with_the_same_header_pays_for_it_once(
    kind: str, exact: bool, make: Callable[..., Pair]
) -> None:
    """The point where its prompt leaves the first one's is found in the prefill that computes it, and taken there."""
    pair = make(kind, exact=exact, n_slots=4)
    talk(pair.warm, n_turns=1)
    for number, spare in enumerate([N_UBATCH, 4]):
        ids = joined(SYSTEM, random_ids(200 + number, 100))
        reply = pair.ask(ids, max_tokens=N_REPLY)
        assert reply.cache.prefilled_tokens <= 100 + (N_UBATCH if exact else spare), reply.cache
        assert reply.cache.matched_tokens == 2000


@pytest.mark.parametrize("exact", [False, True], ids=["default", "exact"])
def test_a_return_to_a_long_conversation_after_an_unrelated_one_costs_what_is_new(
    exact: bool, make: Callable[..., Pair]
) -> None:
    pair = make("hybrid", exact=exact, n_slots=2)
    turns = talk(pair.warm)
    other = pair.warm.complete(random_ids(300, 700), max_tokens=N_REPLY)
    assert other.slot_id != 0
    ids, n_new = CHANGES["append"](turns)
    reply = pair.ask(ids, max_tokens=N_REPLY)
    assert reply.cache.prefilled_tokens <= allowed(n_new, turns, ids, exact=exact), reply.cache
