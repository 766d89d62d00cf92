"""Reports about hybrid, recurrent and sliding models, replayed: themes 1 and 2 of the project's scenario list.

`K` is how much may be computed beyond what is new. Every reply goes through the law's checker.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyllamacache import CacheConfig
from tests.flow.checkpoints import by_kind, check_budget, native_calls, positions, state_at, tamper
from tests.flow.hold import before_step, held
from tests.flow.law import Pair, check_numbers, joined, random_ids

STATEFUL = ["hybrid", "recurrent"]
WITH_STATE = ["sliding", *STATEFUL]
K = 4

NewPair = Callable[..., Pair]


# ---- theme 1: hybrid and recurrent -----------------------------------------------------------------------------


@pytest.mark.parametrize("max_checkpoints", [0, 1, 8])
@pytest.mark.parametrize("kind", STATEFUL)
def test_s01_an_append_only_chat_needs_no_checkpoint(kind: str, max_checkpoints: int, new_pair: NewPair) -> None:
    """The state is where the chat goes on; 41: the last sampled token was never fed."""
    pair = new_pair(kind, cache=CacheConfig(max_checkpoints=max_checkpoints))
    ids = random_ids(1, 100)
    reply = pair.ask(ids, max_tokens=8)
    for turn in range(5):
        ids = joined(ids, reply.token_ids, random_ids(10 + turn, 40))
        reply = pair.ask(ids, max_tokens=8)
        assert (reply.cache.prefilled_tokens, reply.cache.source.value) == (41, "slot")


@pytest.mark.parametrize("kind", WITH_STATE)
def test_s02_a_short_prompt_has_a_checkpoint_too(kind: str, new_pair: NewPair) -> None:
    pair = new_pair(kind)
    for n in (1, 4, 5, 8, 16, 40, 63, 64, 65):
        ids = random_ids(1000 + n, n)
        pair.ask(ids, max_tokens=8)
        changed = joined(ids[: max(1, n - 3)], random_ids(3, 3))
        reply = pair.ask(changed, max_tokens=8)
        if n >= 8:
            assert reply.cache.prefilled_tokens <= 3 + K


@pytest.mark.parametrize(
    ("kind", "n_prefix", "n_question"),
    [*((kind, 400, 30) for kind in WITH_STATE), pytest.param("hybrid", 1500, 700, marks=pytest.mark.slow)],
)
def test_s03_another_question_over_the_same_text(kind: str, n_prefix: int, n_question: int, new_pair: NewPair) -> None:
    """Where the caller names the boundary it costs the question; where not, once what the last n_batch cost."""
    pair = new_pair(kind, n_ctx=2304, n_slots=4)
    text, questions = random_ids(4, n_prefix), [random_ids(5 + i, n_question) for i in range(3)]
    pair.warm.complete(joined(text, questions[0]), max_tokens=2, boundaries=[n_prefix])
    named = pair.ask(joined(text, questions[1]))
    assert named.cache.prefilled_tokens <= n_question + K
    pair.warm.cache.clear()  # periodic ones are taken while there is room for them
    other = random_ids(9, n_prefix)
    pair.warm.complete(joined(other, questions[0]), max_tokens=2)
    first = pair.ask(joined(other, questions[1]))
    assert first.cache.prefilled_tokens <= n_question + 128
    second = pair.ask(joined(other, questions[2]))
    assert second.cache.prefilled_tokens <= n_question + K
    check_budget(pair.warm)


def _hit_rate(replies: Sequence[Any]) -> float:
    cached = sum(reply.usage.cached_tokens for reply in replies)
    return float(cached / sum(reply.usage.prompt_tokens for reply in replies))


@pytest.mark.parametrize("kind", STATEFUL)
def test_s05_reasoning_removed_from_history_costs_the_answer(kind: str, new_pair: NewPair) -> None:
    """Of 60 tokens of thought and 20 of answer, only the answer comes back: resume at the end of the last prompt."""
    pair = new_pair(kind)
    ids = random_ids(6, 300)
    replies = [pair.ask(ids, max_tokens=80)]
    for turn in range(10):
        ids = joined(ids, replies[-1].token_ids[60:], random_ids(20 + turn, 20))
        replies.append(pair.ask(ids, max_tokens=80))
        assert replies[-1].cache.prefilled_tokens <= 40 + K
    assert _hit_rate(replies) > 0.85


@pytest.mark.slow
def test_s05_reasoning_removed_two_requests_later_costs_what_follows_the_last_user_turn(new_pair: NewPair) -> None:
    """A tool loop keeps its thoughts until the user speaks again; then those of both of its replies go."""
    pair = new_pair("hybrid", n_ctx=1280)
    ids = random_ids(7, 300)
    replies = []
    for turn in range(10):
        call = pair.ask(ids, max_tokens=80)
        result = random_ids(40 + turn, 20)
        answer = pair.ask(joined(ids, call.token_ids, result), max_tokens=80)
        assert answer.cache.prefilled_tokens <= 20 + K
        replies += [call, answer]
        ids = joined(ids, call.token_ids[60:], result, answer.token_ids[60:], random_ids(60 + turn, 20))
        if turn:
            assert call.cache.prefilled_tokens <= 80 + K
    assert _hit_rate(replies) > 0.85


@pytest.mark.parametrize("kind", STATEFUL)
def test_s07_few_checkpoints_stay_spread_over_a_long_session(kind: str, new_pair: NewPair) -> None:
    """Sixty requests of 30 tokens each under a budget of 8: no cluster at the end, no lost beginning."""
    pair = new_pair(kind, n_ctx=2304, cache=CacheConfig(max_checkpoints=8))
    ids, first = random_ids(8, 30), None
    for turn in range(60):
        reply = pair.warm.complete(ids, max_tokens=1)
        check_numbers(ids, reply)
        held_at, length = positions(pair.warm), pair.warm.slots[reply.slot_id].n_tokens
        first = held_at[0] if first is None else first
        assert held_at[0] == first, "the first one was dropped"
        assert held_at[-1] == length == len(ids), "the newest is missing"
        gaps = [after - before for before, after in zip([0, *held_at], held_at, strict=False)]
        assert max(gaps) <= max(30, 2 * length / 8), (turn, held_at)
        ids = joined(ids, random_ids(100 + turn, 30))
    pair.ask(joined(ids[:900], random_ids(99, 30)))
    check_budget(pair.warm)


@pytest.mark.parametrize(
    ("kind", "n"), [("sliding", 1000), pytest.param("hybrid", 3000, marks=pytest.mark.slow), ("recurrent", 1000)]
)
def test_s09_a_cancelled_long_prompt_goes_on_and_an_insertion_costs_its_distance(
    kind: str, n: int, new_pair: NewPair
) -> None:
    pair = new_pair(kind, n_ctx=3328)
    ids = random_ids(9, n)
    step = pair.warm._state.backend.step
    with held(pair.warm):
        handle = pair.warm.submit(ids, max_tokens=4)
        before_step(pair.warm, 1 + n // 256, handle.cancel)  # halfway: calls are of 128
    assert handle.result().finish_reason == "cancelled"
    pair.warm._state.backend.step = step
    again = pair.ask(ids)
    assert again.cache.prefilled_tokens <= n // 2 + 128
    inserted = pair.ask(joined(ids[:-300], random_ids(10, 20), ids[-300:]))
    assert inserted.cache.prefilled_tokens <= 320 + 128
    check_budget(pair.warm)


@pytest.mark.parametrize("max_tokens", [0, 8])
@pytest.mark.parametrize("cancels", [False, True], ids=["whole", "cancelled"])
@pytest.mark.parametrize("kind", STATEFUL)
def test_s11_an_identical_prompt_resumes_at_its_tail(
    kind: str, cancels: bool, max_tokens: int, new_pair: NewPair
) -> None:
    """And takes no second capture: what it leaves behind is there already."""
    pair = new_pair(kind)
    ids = random_ids(11, 500)
    if cancels:
        handle = pair.warm.submit(ids, max_tokens=400)
        next(iter(handle))
        handle.cancel()
        handle.result()
    first = pair.ask(ids, max_tokens=max_tokens)
    before = by_kind(pair.warm)
    for _ in range(3):
        again = pair.ask(ids, max_tokens=max_tokens)
        assert again.token_ids == first.token_ids
        assert 1 <= again.cache.prefilled_tokens <= K
    assert by_kind(pair.warm) == before
    assert pair.warm.statistics().checkpoints.captured["tail"] == 1


@pytest.mark.parametrize("kind", ["full", *WITH_STATE])
def test_s13_a_prefix_put_into_another_sequence_is_whole(kind: str, new_pair: NewPair) -> None:
    """Attention cells, window and state: the next 16 tokens and the logits are those of a cold run."""
    pair = new_pair(kind, n_slots=3)
    ids = random_ids(12, 200)
    pair.warm.complete(joined(ids, [7]), max_tokens=3, slot=0, boundaries=[200])
    for slot, ending in ((1, [8, 9]), (2, [9])):
        reply = pair.ask(joined(ids, ending), max_tokens=16, slot=slot)
        assert reply.usage.cached_tokens == 200
        assert reply.cache.source.value == ("shared" if kind == "full" else "checkpoint")
        assert reply.token_ids == pair.cold_answer(joined(ids, ending), 16).token_ids


@pytest.mark.parametrize("kind", WITH_STATE)
def test_s13_a_prefix_put_into_another_process_is_whole(
    kind: str, new_engine: Callable[..., Any], tiny_path: Callable[..., Path], tmp_path: Path
) -> None:
    engine = new_engine(kind, type_k="f16", type_v="f16", n_slots=1)
    ids = random_ids(13, 400)
    ending = joined(ids[:200], [8, 9])
    cold = engine.complete(ending, max_tokens=16, return_logits=True, store=False)
    engine.complete(ids, max_tokens=3, slot=0, boundaries=[200])
    engine.slots[0].save(tmp_path / "slot")
    script = (
        "import sys, numpy as np, pyllamacache as plc\n"
        "model, path = sys.argv[1:]\n"
        "engine = plc.Engine(plc.Model(model, progress=False), n_ctx=512, n_slots=2, n_threads=1,"
        " flash_attention='off', progress=False)\n"
        "engine.slots[1].restore(path + '/slot')\n"
        "ids = np.load(path + '/ids.npy')\n"
        "r = engine.complete(ids, max_tokens=16, return_logits=True)\n"
        "print(r.cache.source, r.cache.resumed_tokens, *r.token_ids)\n"
        "np.save(path + '/logits.npy', r.logits)\n"
    )
    np.save(tmp_path / "ids.npy", ending)
    command = [sys.executable, "-W", "error", "-c", script, str(tiny_path(kind)), str(tmp_path)]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=200).stdout.split()
    assert printed == ["checkpoint", "200", *map(str, cold.token_ids)]
    assert np.abs(np.load(tmp_path / "logits.npy") - cold.logits).max() < 1e-3


@pytest.mark.parametrize("kind", STATEFUL)
def test_s15_any_turn_may_diverge_by_a_token(kind: str, new_pair: NewPair) -> None:
    """Never an exception; the fallback is named with its position, whether or not a checkpoint was there."""
    pair = new_pair(kind, n_slots=1)
    ids = random_ids(14, 300)
    pair.ask(ids)
    for position in (299, 297, 260, 200, 100, 20, 0):
        edited = ids.copy()
        edited[position] = (edited[position] + 1) % 256
        reply = pair.ask(edited)
        assert reply.cache.reason.value in ("no_checkpoint", "diverged", "cold")
        assert reply.cache.position == reply.cache.matched_tokens == position
        assert reply.usage.cached_tokens == max((each for each in (128, 256, 296) if each <= position), default=0)


# ---- theme 2: sliding windows ----------------------------------------------------------------------------------


def test_s16_thoughts_removed_after_a_tool_loop_cost_what_is_kept_of_it(new_pair: NewPair) -> None:
    pair = new_pair("sliding", n_ctx=1280)
    system, user = random_ids(15, 200), random_ids(16, 20)
    ids = kept = joined(system, user)
    for number in range(10):
        reply = pair.warm.complete(ids, max_tokens=30)  # 20 of thought, 10 of a call
        result = random_ids(20 + number, 50)
        ids, kept = joined(ids, reply.token_ids, result), joined(kept, reply.token_ids[20:], result)
    answer = pair.ask(ids, max_tokens=40)
    kept = joined(kept, answer.token_ids[20:], random_ids(17, 20))
    reply = pair.ask(kept)
    assert reply.cache.prefilled_tokens <= 10 * 60 + 20 + 20 + 32
    assert reply.usage.cached_tokens >= 220 - K


def test_s17_a_checkpoint_that_begins_at_position_0_is_used(new_pair: NewPair) -> None:
    """Twenty tokens under a window of 32, taken into another slot at 15."""
    pair = new_pair("sliding")
    ids = random_ids(18, 20)
    pair.warm.complete(ids, max_tokens=4, slot=0, boundaries=[15])
    reply = pair.ask(joined(ids[:15], random_ids(19, 5)), slot=1)
    assert (reply.usage.cached_tokens, reply.cache.source.value) == (15, "checkpoint")


def test_s17_a_window_of_full_size_goes_back_anywhere(new_pair: NewPair) -> None:
    """Exact mode keeps every cell of the window: divergence at 100 of 400 costs what is new, and the grid."""
    pair = new_pair("sliding", exact=True)
    ids = random_ids(20, 400)
    pair.ask(ids)
    reply = pair.ask(joined(ids[:100], random_ids(21, 300)), slot=0)
    assert (reply.usage.cached_tokens, reply.cache.source.value) == (96, "slot")


def test_s19_checkpoints_do_not_change_the_text(new_pair: NewPair) -> None:
    """Eight turns with an edit far back in each, under budgets of 0, 1 and 8."""
    answers: dict[tuple[bytes, int], Any] = {}
    spoken, resumed = [], []
    for max_checkpoints in (0, 1, 8):
        pair = new_pair("sliding", n_slots=1, cache=CacheConfig(max_checkpoints=max_checkpoints), answers=answers)
        ids = random_ids(22, 400)
        replies = []
        for turn in range(8):
            replies.append(pair.ask(ids, max_tokens=8))
            ids = joined(ids[: 390 - 3 * turn], random_ids(30 + turn, 20 + turn))
        spoken.append([reply.token_ids for reply in replies])
        resumed.append(sum(reply.usage.cached_tokens for reply in replies))
    assert spoken[0] == spoken[1] == spoken[2]
    assert resumed[0] <= resumed[1] <= resumed[2]


# ---- a checkpoint that cannot be put back ----------------------------------------------------------------------


def _nonsense(data: bytes) -> bytes:
    """No native reader takes it: the header says nothing that exists."""
    return bytes(255 for _ in data)


@pytest.mark.parametrize("slot", [0, 1], ids=["own cells", "another slot's"])
@pytest.mark.parametrize("kind", WITH_STATE)
def test_s21_a_checkpoint_that_is_refused_is_dropped_and_the_next_one_used(
    kind: str, slot: int, new_pair: NewPair
) -> None:
    """Cells come first, the state second; when the second half fails the first is undone."""
    pair = new_pair(kind, n_ctx=1280)
    ids = random_ids(23, 700)
    pair.warm.complete(ids, max_tokens=2, slot=0, boundaries=[200])
    assert {128, 200} <= set(positions(pair.warm))
    tamper(pair.warm, 200, _nonsense)
    bystander = state_at(pair.warm, 384)
    asked = joined(ids[:200], random_ids(24, 30))
    reply = pair.ask(asked, slot=slot)
    assert (reply.usage.cached_tokens, reply.cache.reason.value, reply.cache.position) == (128, "lost", 128)
    assert pair.warm.statistics().checkpoints.evicted == {"broken": 1}
    assert pair.warm.slots[slot].token_ids[: len(asked)] == asked.tolist()
    assert pair.ask(asked, slot=slot).cache.prefilled_tokens <= K
    if slot:
        assert state_at(pair.warm, 384) == bystander
        assert pair.ask(joined(ids, [1])).usage.cached_tokens >= 700 - K, "the donor is as it was"
    check_budget(pair.warm)


@pytest.mark.parametrize("slot", [0, 1], ids=["own cells", "another slot's"])
@pytest.mark.parametrize("kind", WITH_STATE)
def test_s21_a_request_whose_checkpoints_are_all_refused_is_prefilled(kind: str, slot: int, new_pair: NewPair) -> None:
    pair = new_pair(kind, n_ctx=1280)
    ids = random_ids(25, 700)
    pair.warm.complete(ids, max_tokens=2, slot=0)
    for position in positions(pair.warm):
        tamper(pair.warm, position, _nonsense)
    asked = joined(ids[:300], random_ids(26, 30))
    with native_calls(pair.warm) as calls:
        reply = pair.ask(asked, slot=slot)
    assert (reply.usage.cached_tokens, reply.cache.reason.value, reply.cache.position) == (0, "lost", 0)
    assert sum(calls) == len(asked) + 3
    assert pair.warm.statistics().checkpoints.evicted["broken"] == 2
    again = pair.ask(asked, slot=slot)
    assert 1 <= again.cache.prefilled_tokens <= K
    check_budget(pair.warm)
