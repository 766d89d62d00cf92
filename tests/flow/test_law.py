"""The law over random conversations, on every memory kind, default and exact, under every budget of checkpoints."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, seed, settings
from hypothesis import strategies as st

from tests.flow.checkpoints import BUDGETS, budget_of, check_budget, watch_peaks
from tests.flow.hold import before_step, held
from tests.flow.law import Ids, Pair, joined, random_ids

KINDS = ["full", "sliding", "hybrid", "recurrent"]
MAX_TOKENS = 700


@dataclass(frozen=True)
class Move:
    """One thing a client does to one of its conversations."""

    what: str
    conversation: int
    fraction: float
    n: int
    seed: int


moves = st.builds(
    Move,
    what=st.sampled_from(
        [
            "append",
            "append",
            "append with reply",
            "edit",
            "edit the end",
            "cut",
            "repeat",
            "return",
            "prefix",
            "branch",
            "boundary",
            "beside",
            "cancel",
            "cancel prefill",
            "warm",
        ]
    ),
    conversation=st.integers(0, 2),
    fraction=st.floats(0.05, 0.95),
    n=st.integers(1, 90),
    seed=st.integers(0, 2**32 - 1),
)


class Client:
    """Holds conversations and replays moves against a pair."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        self.conversations: list[Ids] = [random_ids(seed, 60 + 40 * seed) for seed in range(3)]
        self.earlier = list(self.conversations)
        """What some conversation once was, by the order of the moves."""

    def play(self, move: Move) -> None:
        ids = self.conversations[move.conversation]
        at = max(1, int(len(ids) * move.fraction))
        fresh = random_ids(move.seed, move.n)
        options: dict[str, Any] = {}
        if move.what == "append":
            ids = joined(ids, fresh)
        elif move.what == "append with reply":
            first = self.pair.ask(ids)
            ids = joined(ids, first.token_ids, fresh)
        elif move.what == "edit":
            ids = joined(ids[:at], fresh[: len(ids) - at], ids[at + len(fresh) :])
        elif move.what == "edit the end":
            ids = joined(ids[: -min(move.n, len(ids) - 1)], fresh)
        elif move.what == "return":
            ids = joined(self.earlier[int(len(self.earlier) * move.fraction)], fresh[: move.n // 4])
        elif move.what == "boundary":
            ids = joined(ids, fresh)
            options["boundaries"] = [at, len(ids) - 1]
        elif move.what in ("cut", "prefix"):
            ids = ids[:at]
        elif move.what == "branch":
            ids = joined(self.conversations[(move.conversation + 1) % 3][:at], fresh)
        ids = ids[:MAX_TOKENS]
        if move.what == "beside":
            self._beside(ids, fresh)
        elif move.what == "cancel":
            self._cancel(joined(ids, fresh)[:MAX_TOKENS])
        elif move.what == "cancel prefill":
            ids = joined(ids, random_ids(move.seed, 4 * move.n))[:MAX_TOKENS]
            self._cancel_prefill(ids, 1 + move.n % 4)
        elif move.what == "warm":
            self.pair.warm.warm(ids)
        else:
            self.pair.ask(ids, **options)
        if move.what != "prefix":
            self.conversations[move.conversation] = ids
            self.earlier.append(ids)
        check_budget(self.pair.warm)

    def _beside(self, ids: Ids, fresh: Ids) -> None:
        """The same conversation while another, unrelated request generates."""
        neighbour = self.pair.warm.submit(fresh, max_tokens=30)
        self.pair.ask(ids)
        other = neighbour.result()
        assert other.usage.cached_tokens + other.cache.prefilled_tokens == len(fresh)

    def _cancel(self, ids: Ids) -> None:
        handle = self.pair.warm.submit(ids, max_tokens=50)
        for _ in handle:
            break  # leaving the loop cancels
        assert handle.result().finish_reason in ("cancelled", "length", "stop")
        self.pair.ask(ids)

    def _cancel_prefill(self, ids: Ids, nth: int) -> None:
        backend = self.pair.warm._state.backend
        step = backend.step
        with held(self.pair.warm):
            handle = self.pair.warm.submit(ids, max_tokens=4)
            before_step(self.pair.warm, nth, handle.cancel)
        handle.result()
        backend.step = step
        self.pair.ask(ids)


Answers = dict[tuple[bytes, int], Any]

USUAL = [
    Move("append with reply", 2, 0.5, 400, 1),
    Move("repeat", 2, 0.5, 1, 2),
    Move("edit", 2, 0.4, 9, 3),  # further back than a window's cells are kept
    Move("return", 2, 0.99, 40, 4),
]


@pytest.fixture(scope="module")
def cold_answers() -> Callable[[str, bool], Answers]:
    """What the engines without reuse said, by kind and mode: the same scripts are played under every budget."""
    kept: dict[tuple[str, bool], Answers] = {}
    return lambda kind, exact: kept.setdefault((kind, exact), {})


@pytest.mark.parametrize("exact", [False, True], ids=["default", "exact"])
@pytest.mark.parametrize(
    ("kind", "budget"),
    [
        ("full", "32"),
        *(
            pytest.param(kind, budget, marks=[pytest.mark.slow] if budget in ("1", "32") else [])
            for kind in KINDS[1:]
            for budget in BUDGETS
        ),
    ],
)
def test_reuse_never_changes_an_answer(
    kind: str, budget: str, exact: bool, new_pair: Callable[..., Pair], cold_answers: Callable[[str, bool], Answers]
) -> None:
    """Random moves on three conversations and two slots."""
    pair = new_pair(kind, exact=exact, cache=budget_of(budget, kind), answers=cold_answers(kind, exact))
    peaks, limits = watch_peaks(pair.warm), pair.warm.cache.budget

    @settings(max_examples=4, database=None)
    @seed(zlib.crc32(f"{kind} {exact}".encode()))
    @given(st.lists(moves, min_size=3, max_size=8))
    def replay(script: list[Move]) -> None:
        client = Client(pair)
        for move in script:
            client.play(move)

    replay()
    client = Client(pair)
    for move in USUAL:
        client.play(move)
    takes_any = kind != "full" and not (exact and kind == "sliding") and budget != "0"
    if takes_any and budget in ("4", "32"):
        assert "checkpoint" in pair.sources
    elif not takes_any:
        assert "checkpoint" not in pair.sources
    assert peaks.n_checkpoints <= limits.max_checkpoints
    assert peaks.checkpoint_bytes <= limits.checkpoint_bytes
    assert peaks.resident_bytes <= limits.host_bytes
    assert pair.n_reused > 0 or (exact and budget == "0" and kind != "full"), "nothing was ever reused: vacuous"


WINDOW_SCRIPT = [(0, 150, 45), (1, 10, 60), (0, 120, 20), (1, 120, 100), (0, 60, 1), (1, 180, 60)]
"""Slot, tokens of the slot's own text, fresh tokens: leaves a window's cells out of order, with few free ones."""


@pytest.mark.parametrize("n_batch", [32, 128])
def test_a_window_is_whole_for_every_ubatch_of_a_native_call(n_batch: int, new_pair: Callable[..., Pair]) -> None:
    """The last request goes back to 120 and is fed 120 tokens: with one call for two ubatches the first one's window
    was gone before it was computed."""
    pair = new_pair("sliding", n_batch=n_batch, cache=budget_of("0", "sliding"))
    texts = [random_ids(1000 + slot, 600) for slot in range(2)]
    for number, (slot, n_common, n_fresh) in enumerate(WINDOW_SCRIPT):
        pair.ask(joined(texts[slot][:n_common], random_ids(number, n_fresh)), max_tokens=0, slot=slot)


@pytest.mark.parametrize("kind", ["hybrid", "recurrent"])
def test_exact_mode_reuses_a_warmed_prompt_that_ends_on_the_grid(kind: str, new_pair: Callable[..., Pair]) -> None:
    pair = new_pair(kind, exact=True)
    header = random_ids(1, 96)  # three times n_ubatch
    neighbour = pair.warm.submit(random_ids(2, 70), max_tokens=60)
    assert pair.warm.warm(header).cache_write_tokens == 96
    reply = pair.ask(joined(header, random_ids(3, 41)))
    assert reply.usage.cached_tokens == 96
    neighbour.result()


@pytest.mark.parametrize("exact", [False, True], ids=["default", "exact"])
def test_bits_survive_reuse_beside_others_in_exact_mode_only(exact: bool, new_engine: Callable[..., Any]) -> None:
    """What exact mode buys: the same script, beside the same neighbours, changes bits in default mode."""
    engine, cold = (new_engine("full", exact=exact, n_slots=2, flash_attention="on") for _ in range(2))
    parked = engine.complete(random_ids(4, 200), max_tokens=8, slot=1)
    ids = random_ids(5, 150)
    engine.warm(ids, slot=0)
    longer = joined(ids, [5])  # one row is computed by another kernel than a chunk
    reused = engine.complete(longer, max_tokens=0, return_logits=True, slot=0)
    plain = cold.complete(longer, max_tokens=0, return_logits=True, slot=0)
    assert parked.finish_reason == "length"
    assert reused.usage.cached_tokens == (128 if exact else 150)
    assert np.array_equal(reused.logits, plain.logits) == exact


@pytest.mark.parametrize("exact", [False, True], ids=["default", "exact"])
@pytest.mark.parametrize("n_slots", [1, 4])
def test_another_slots_prefix_is_shared_without_changing_an_answer(
    exact: bool, n_slots: int, new_pair: Callable[..., Pair]
) -> None:
    """Dense memory: a branch in an empty slot takes the trunk from its donor, also while the donor is busy."""
    pair = new_pair("full", exact=exact, n_slots=n_slots)
    trunk = random_ids(5, 160)
    donor = pair.warm.submit(trunk, max_tokens=100)
    chunks = iter(donor)
    next(chunks)
    for index in range(3):
        reply = pair.ask(joined(trunk, random_ids(10 + index, 30)))
        assert reply.usage.cached_tokens == 160
        if n_slots > 1:
            assert reply.cache.source.value == "shared"
            assert reply.slot_id != 0
    assert sum(len(chunk.token_ids) for chunk in chunks) == 99
