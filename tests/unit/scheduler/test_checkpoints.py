"""Checkpoints while requests run: where they are taken, who waits for whom, what is put back, what fits.

States are small here and prompts short: n_ubatch is 16, batches are 32, a checkpoint saves what it saves.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from pyllamacache.config import CacheBudget, Memory
from pyllamacache.errors import NativeError
from pyllamacache.prefix.index import Checkpoint, PrefixIndex
from pyllamacache.prefix.retention import Eviction
from pyllamacache.request import CheckpointKind, Reason, Source
from pyllamacache.scheduler.backend import Traits
from pyllamacache.scheduler.checkpoints import Checkpoints
from pyllamacache.scheduler.slot_files import put_checkpoints
from pyllamacache.store.host import Block
from tests.fakes import Driver, FakeBackend, GroupFault, make_traits
from tests.fakes.engine import FakeEngine, Gate

STATEFUL = pytest.mark.parametrize("memory", [Memory.SLIDING, Memory.HYBRID, Memory.RECURRENT])
SPLITTING = pytest.mark.parametrize("memory", [Memory.HYBRID, Memory.RECURRENT])
PROMPT = list(range(1, 101))
OTHER = list(range(150, 250))
LATER = 10**9
"""Polls: not before somebody waits for it."""


def traits(memory: Memory = Memory.HYBRID, **options: Any) -> Traits:
    defaults = {"n_slots": 2, "n_ctx": 400, "n_batch": 32, "n_ubatch": 16}
    if not options.get("exact"):
        defaults["kv_tokens"] = 1200
    return make_traits(memory, **{**defaults, **options})


def make(
    memory: Memory = Memory.HYBRID, *, budget: int = 32, checkpoint_bytes: int | None = None, **options: Any
) -> Driver:
    return Driver(traits(memory, **options), max_checkpoints=budget, checkpoint_bytes=checkpoint_bytes)


def late(driver: Driver, max_captures: int = 1) -> Driver:
    """From now on a capture is done when somebody waits for it."""
    driver.backend.capture_polls, driver.backend.max_captures = LATER, max_captures
    return driver


def nodes(driver: Driver) -> list[Checkpoint]:
    return sorted(driver.state.checkpoints.index.checkpoints, key=lambda node: node.position)


def taken(driver: Driver) -> list[tuple[int, str]]:
    return [(node.position, str(node.kind)) for node in nodes(driver)]


def positions(driver: Driver) -> list[int]:
    return [node.position for node in nodes(driver)]


def node_at(driver: Driver, position: int) -> Checkpoint:
    return next(node for node in nodes(driver) if node.position == position)


def n_captured(driver: Driver) -> int:
    return sum(driver.state.checkpoints.counts().captured.values())


# ---- where they are taken --------------------------------------------------------------------------------------


@STATEFUL
def test_a_prefill_takes_them_where_they_were_placed(memory: Memory) -> None:
    driver = make(memory)
    driver.complete(PROMPT, max_tokens=6, boundaries=(40,))
    assert taken(driver) == [
        (32, "periodic"),
        (40, "boundary"),
        (64, "periodic"),
        (80, "anchor"),
        (96, "tail"),
        (105, "end"),
    ]
    assert all(node.is_ready for node in nodes(driver))
    assert driver.state.slot_info(driver.slot(0).slot_id).checkpoints == (32, 40, 64, 80, 96, 105)
    counts = driver.statistics.checkpoints
    assert counts.captured == {"periodic": 2, "boundary": 1, "anchor": 1, "tail": 1, "end": 1}
    assert (counts.held, counts.held_bytes, counts.in_flight) == (6, driver.state.checkpoints.used_bytes, 0)
    driver.check_answers()


@STATEFUL
def test_an_identical_prompt_takes_none(memory: Memory) -> None:
    driver = make(memory)
    driver.complete(PROMPT, max_tokens=6)
    before, n_before = taken(driver), n_captured(driver)
    for _ in range(2):
        again = driver.complete(PROMPT, max_tokens=6)
        assert again.cache.prefilled_tokens <= 4
    assert (taken(driver), n_captured(driver)) == (before, n_before)
    assert all(node.last_used == driver.state.n_admitted for node in nodes(driver))
    driver.check_answers()


@SPLITTING
def test_where_a_prompt_leaves_what_is_known_one_is_taken_in_that_same_prefill(memory: Memory) -> None:
    driver = make(memory)
    driver.complete(PROMPT, max_tokens=1)
    first = driver.complete([*PROMPT[:70], *OTHER[:20]], max_tokens=1)
    assert (first.cache.resumed_tokens, first.cache.matched_tokens) == (64, 70)
    assert (first.cache.reason, first.cache.position) == (Reason.NO_CHECKPOINT, 70)
    assert (70, "branch") in taken(driver)
    second = driver.complete([*PROMPT[:70], *OTHER[30:50]], max_tokens=1)
    assert (second.cache.resumed_tokens, second.cache.reason) == (70, Reason.DIVERGED)
    driver.check_answers()


def test_a_window_that_can_still_be_cut_takes_none_at_the_cut() -> None:
    driver = make(Memory.SLIDING, n_slots=1)
    driver.complete(PROMPT, max_tokens=1)
    result = driver.complete([*PROMPT[:97], 7], max_tokens=1)
    assert result.cache.resumed_tokens == 97
    assert "branch" not in dict(driver.state.checkpoints.counts().captured)
    driver.check_answers()


@STATEFUL
def test_warming_takes_them_as_a_request_does(memory: Memory) -> None:
    driver = make(memory)
    driver.warm(PROMPT)
    assert taken(driver) == [(32, "periodic"), (64, "periodic"), (80, "anchor"), (96, "tail"), (99, "end")]
    result = driver.complete([*PROMPT, 1, 2, 3], max_tokens=1)
    assert result.cache.resumed_tokens == 99
    driver.check_answers()


@STATEFUL
def test_without_storing_nothing_is_taken_and_without_reuse_it_is(memory: Memory) -> None:
    driver = make(memory)
    driver.complete(PROMPT, store=False, boundaries=(40,))
    assert taken(driver) == []
    driver.complete(PROMPT, cache_prompt=False)
    assert len(taken(driver)) == 5
    before = n_captured(driver)
    driver.complete(PROMPT, cache_prompt=False)
    assert n_captured(driver) == before
    driver.check_answers()


def test_a_slot_that_is_cut_back_because_nothing_was_to_be_stored_gets_none() -> None:
    driver = make(Memory.SLIDING, n_slots=1)
    driver.complete(PROMPT, max_tokens=1)
    n_before = n_captured(driver)
    driver.complete([*PROMPT[:97], 7], max_tokens=1, store=False)
    assert driver.held(0) == PROMPT[:97]
    assert n_captured(driver) == n_before


@pytest.mark.parametrize("memory", [Memory.FULL, Memory.OTHER])
def test_memory_without_such_a_state_takes_none(memory: Memory) -> None:
    driver = make(memory)
    driver.complete(PROMPT, boundaries=(40,))
    assert taken(driver) == []
    assert driver.state.checkpoints.counts().refused == {}


def test_a_window_in_exact_mode_takes_none() -> None:
    driver = make(Memory.SLIDING, exact=True)
    driver.complete(PROMPT, boundaries=(40,))
    assert taken(driver) == []


@SPLITTING
def test_exact_mode_takes_them_on_the_grid_only(memory: Memory) -> None:
    driver = make(memory, exact=True)
    driver.complete(PROMPT, max_tokens=80, boundaries=(40,))
    assert taken(driver) == [(32, "boundary"), (64, "periodic"), (80, "anchor"), (96, "tail")]
    driver.complete([*PROMPT[:50], *OTHER[:30]], max_tokens=1)
    driver.warm(PROMPT[:49])
    assert (48, "branch") in taken(driver)
    assert all(position % 16 == 0 for position in positions(driver))
    again = driver.complete([*PROMPT[:50], *OTHER[40:60]], max_tokens=1)
    assert again.cache.resumed_tokens == 48
    driver.check_answers()


@SPLITTING
def test_exact_mode_takes_the_end_of_a_prompt_that_ends_on_the_grid(memory: Memory) -> None:
    driver = make(memory, exact=True)
    driver.complete(PROMPT[:96], max_tokens=0)
    assert (96, "end") in taken(driver)
    driver = make(memory, exact=True)
    driver.complete(PROMPT[:96], max_tokens=1)
    assert (96, "end") in taken(driver)
    driver = make(memory, exact=True)
    driver.complete(PROMPT[:96], max_tokens=2)
    assert positions(driver)[-1] == 80


@STATEFUL
def test_prefill_makes_at_most_one_call_more_for_each_that_was_wanted(memory: Memory) -> None:
    def n_calls(budget: int) -> tuple[int, int]:
        driver = make(memory, budget=budget)
        driver.complete(PROMPT, max_tokens=1, boundaries=(3, 40, 41, 77))
        driver.complete([*PROMPT[:50], *OTHER], max_tokens=1)
        counts = driver.state.checkpoints.counts()
        return len(driver.backend.calls), sum(counts.captured.values()) - counts.captured.get("periodic", 0)

    without, _ = n_calls(0)
    calls, n_wanted = n_calls(32)
    assert calls <= without + n_wanted


@STATEFUL
def test_no_decode_call_is_made_otherwise_for_them(memory: Memory) -> None:
    """Also where a prefill beside it is cut."""

    def decoded(budget: int) -> list[tuple[int, int, int]]:
        driver = make(memory, budget=budget, n_slots=1)
        driver.complete(PROMPT[:20], max_tokens=200)
        driver.check_answers()
        return [
            (feed.start, feed.n_tokens, len(group))
            for step in driver.backend.calls
            for group in step
            for feed in group
            if feed.decodes
        ]

    assert decoded(32) == decoded(0)
    driver = make(memory)
    first = driver.submit(PROMPT[:20], max_tokens=30)
    driver.run_until(first, 1)
    n_before = len(driver.backend.calls)
    driver.submit(OTHER, max_tokens=1, boundaries=(5, 11, 55))
    driver.run()
    beside = [
        step for step in driver.backend.calls[n_before:] if any(feed.seq_id == 1 for group in step for feed in group)
    ]
    assert all(any(feed.decodes for group in step for feed in group) for step in beside)
    driver.check_answers()


# ---- replies ---------------------------------------------------------------------------------------------------


@STATEFUL
def test_a_long_reply_keeps_two_rolling_ones_and_leaves_one(memory: Memory) -> None:
    driver = make(memory, n_slots=1)
    ticket = driver.submit(PROMPT[:20], max_tokens=300)
    most = 0
    while not ticket.is_done:
        driver.turn()
        rolling = [position for position, kind in taken(driver) if kind == "rolling"]
        assert all((position - 20) % 64 == 0 for position in rolling)
        most = max(most, len(rolling))
    assert most == 2
    assert taken(driver)[-2:] == [(276, "rolling"), (319, "end")]
    assert driver.state.checkpoints.counts().evicted == {"replaced": 3}
    trimmed = [*PROMPT[:20], *ticket.completion.token_ids[:290]]
    again = driver.complete(trimmed, max_tokens=1)
    assert again.cache.resumed_tokens == (309 if memory is Memory.SLIDING else 276)
    driver.check_answers()


def test_a_rolling_one_that_was_resumed_from_is_not_replaced() -> None:
    driver = make(n_slots=2)
    ticket = driver.submit(PROMPT[:20], max_tokens=300, slot=0)
    driver.run_until(ticket, 70)
    reply = next(job.generated for job in driver.state.running)
    side = driver.complete_beside([*PROMPT[:20], *reply[:66]], max_tokens=1, slot=1)
    assert side.cache.resumed_tokens == 84
    driver.run()
    assert (84, "rolling") in taken(driver)
    driver.check_answers()


def test_a_reply_that_ends_where_one_was_taken_takes_no_second() -> None:
    driver = make(n_slots=1)
    driver.complete(PROMPT[:20], max_tokens=65)
    assert [position for position, _ in taken(driver)].count(84) == 1
    assert driver.state.checkpoints.counts().captured.get("end", 0) == 0


# ---- the decode path -------------------------------------------------------------------------------------------


@STATEFUL
def test_a_decode_step_does_no_work_for_checkpoints(memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def counted(owner: type, name: str) -> None:
        original = getattr(owner, name)

        def wrapper(*args: Any, **options: Any) -> Any:
            calls.append(name)
            return original(*args, **options)

        monkeypatch.setattr(owner, name, wrapper)

    driver = make(memory)
    driver.submit(PROMPT, max_tokens=100)
    driver.submit(OTHER, max_tokens=100)
    for _ in range(30):
        driver.turn()
    assert all(job.is_decoding for job in driver.state.running)
    for name in ("path", "held_by", "take", "poll", "serve", "wait", "counts", "touch", "drop", "prepare"):
        counted(Checkpoints, name)
    counted(PrefixIndex, "path")
    n_steps = driver.state.n_steps
    for _ in range(20):
        driver.step_only()
    assert driver.state.n_steps == n_steps + 20
    assert calls == []


# ---- captures in flight ----------------------------------------------------------------------------------------


def test_an_optional_one_is_dropped_while_captures_are_in_flight_and_counted() -> None:
    driver = late(make())
    ticket = driver.submit(PROMPT, max_tokens=1)
    driver.turn()
    driver.turn()
    assert taken(driver) == [(32, "periodic")]
    assert driver.held(0) == PROMPT[:64]
    counts = driver.statistics.checkpoints
    assert (counts.refused, counts.in_flight, counts.waited) == ({"busy": 1}, 1, 0)
    assert not driver.slot(0).is_held
    driver.run()
    driver.check_answer(ticket)


@STATEFUL
def test_one_that_is_wanted_waits_and_its_slot_is_not_fed_while_others_go_on(memory: Memory) -> None:
    driver = make(memory)
    neighbour = driver.submit(OTHER, max_tokens=60, slot=1)
    driver.run_until(neighbour, 2)
    late(driver)
    ticket = driver.submit(PROMPT, max_tokens=1, slot=0, boundaries=(10, 20))
    for _ in range(9):
        driver.turn()
    assert driver.slot(0).is_held
    assert driver.held(0) == PROMPT[:20]
    assert (10, "boundary") in taken(driver)
    assert (20, "boundary") not in taken(driver)
    n_before, n_other = len(driver.backend.calls), len(driver.held(1))
    for _ in range(10):
        driver.turn()
    assert driver.held(0) == PROMPT[:20]
    assert len(driver.held(1)) == n_other + 10
    assert all(feed.seq_id == 1 for step in driver.backend.calls[n_before:] for group in step for feed in group)
    assert driver.statistics.checkpoints.waited == 1
    driver.backend.capture_polls = 0
    driver.backend.captures[0]._n_polls = 0
    driver.turn()
    assert not driver.slot(0).is_held
    assert (20, "boundary") in taken(driver)
    assert len(driver.held(0)) > 20
    driver.run()
    driver.check_answers()
    assert ticket.is_done


@STATEFUL
def test_where_nothing_else_can_run_the_oldest_capture_is_waited_for(memory: Memory) -> None:
    driver = late(make(memory), max_captures=2)
    result = driver.complete(PROMPT, max_tokens=2, boundaries=(10, 20, 60, 90))
    assert {10, 60, 80, 90} - set(positions(driver)) <= {20}
    assert driver.statistics.checkpoints.waited > 0
    assert result.finish_reason == "length"
    driver.check_answers()
    assert sum(not node.is_ready for node in nodes(driver)) <= 2


def test_two_slots_that_wait_are_served_in_turn() -> None:
    driver = late(make(n_slots=3, n_ctx=300))
    for slot_id in range(3):
        driver.submit([slot_id + 1] * 5 + PROMPT, max_tokens=2, slot=slot_id, boundaries=(4, 50))
    driver.run()
    driver.check_answers()
    counts = driver.state.checkpoints.counts()
    assert counts.captured["boundary"] >= 5
    assert counts.waited >= 5


def idle_and_held(budget: int = 32) -> tuple[Driver, list[int]]:
    """Slot 0 is idle, but a checkpoint of its end waits until one of slot 1, which runs, is done."""
    driver = make(budget=budget)
    driver.warm(PROMPT, slot=0)
    late(driver)
    driver.run_until(driver.submit(OTHER, slot=1, max_tokens=100), 1)
    assert driver.state.checkpoints.counts().in_flight == 1
    ids = [*PROMPT, 1, 2]
    driver.complete_beside(ids, slot=0, max_tokens=1)
    assert driver.slot(0).is_held
    assert not driver.slot(0).is_busy
    return driver, ids


def erase(driver: Driver) -> None:
    driver.erase(0)
    assert not driver.slot(0).is_held


def put_another_state(driver: Driver) -> None:
    first = make()
    first.warm(OTHER, slot=0)
    driver.restore(0, first.save(0))
    assert not driver.slot(0).is_held


def replace(driver: Driver) -> None:
    driver.complete_beside([9, 8, 7], slot=0, max_tokens=1)


def go_back(driver: Driver) -> None:
    result = driver.complete_beside([*PROMPT[:97], 3, 2], slot=0, max_tokens=1)
    assert result.cache.resumed_tokens == 96


def go_on(driver: Driver) -> None:
    result = driver.complete_beside([*PROMPT, 1, 2, 3, 4], slot=0, max_tokens=1)
    assert result.cache.resumed_tokens == 102


def spare(driver: Driver) -> None:
    driver.complete_beside([*PROMPT, 1, 2, 3, 4], slot=0, max_tokens=1, store=False)


@pytest.mark.parametrize("change", [erase, put_another_state, replace, go_back, go_on, spare])
def test_a_slot_that_waits_is_settled_before_its_content_changes(change: Callable[[Driver], None]) -> None:
    """What was wanted is captured first, of the content it was wanted of."""
    driver, ids = idle_and_held()
    assert 102 not in positions(driver)
    change(driver)
    ends = [node for node in nodes(driver) if node.position == 102]
    assert [node.ids().tolist() for node in ends] == [ids]
    driver.run()
    driver.check_answers()
    driver.state.checkpoints.poll()
    result = driver.complete([*ids, 5], slot=0, max_tokens=1)
    driver.check_answers()
    assert result.cache.matched_tokens in (102, 97, 0)


def test_an_idle_slot_that_waits_is_served_by_the_next_step() -> None:
    driver, _ = idle_and_held()
    driver.backend.capture_polls = 0
    driver.backend.captures[0]._n_polls = 0
    driver.turn()
    assert not driver.slot(0).is_held
    assert 102 in positions(driver)


def test_the_checkpoint_that_is_put_back_is_not_given_up_for_one_that_waited() -> None:
    """The slot's last content is captured before the state is put back; that must not cost the state."""
    driver, _ = idle_and_held()
    checkpoints = driver.state.checkpoints
    for node in nodes(driver):
        if node.position in (32, 64, 99) and node.is_ready:
            checkpoints.drop(node, Eviction.OUTVALUED)
    checkpoints.set_budget(CacheBudget(len(nodes(driver)), 1 << 24, 1 << 24))
    result = driver.complete_beside([*PROMPT[:97], 3, 2], slot=0, max_tokens=1)
    assert result.cache.resumed_tokens == 96
    driver.run()
    driver.check_answers()


def test_the_next_shallower_one_may_have_been_given_up_meanwhile() -> None:
    """For what the slot waited with; then the deepest one is refused."""
    driver, _ = idle_and_held()
    checkpoints = driver.state.checkpoints
    for node in nodes(driver):
        if node.is_ready and (node.position in (64, 99) or node.ids()[-1] >= OTHER[0]):
            checkpoints.drop(node, Eviction.OUTVALUED)
    checkpoints.set_budget(CacheBudget(len(nodes(driver)), 1 << 24, 1 << 24))
    driver.backend.faults.calls = ["resume"]
    result = driver.complete_beside([*PROMPT[:97], 3, 2], slot=0, max_tokens=1)
    assert (result.cache.resumed_tokens, result.cache.reason) == (32, Reason.LOST)
    driver.run()
    driver.check_answers()


def test_a_request_that_is_cancelled_while_its_slot_waits_leaves_what_it_had() -> None:
    driver = late(make())
    ticket = driver.submit(PROMPT, max_tokens=5, boundaries=(10, 20))
    neighbour = driver.submit(OTHER, max_tokens=20, slot=1)
    while not driver.slot(0).is_held:
        driver.turn()
    held = driver.held(0)
    ticket.cancel()
    driver.turn()
    assert ticket.is_done
    driver.run()
    driver.check_answers()
    assert driver.held(0) == held
    assert neighbour.is_done
    driver.erase(0)
    assert not driver.slot(0).is_held


def test_a_request_that_is_cancelled_while_a_capture_is_in_flight_leaves_the_checkpoint() -> None:
    driver = late(make())
    ticket = driver.submit(PROMPT, max_tokens=5)
    driver.turn()
    assert driver.statistics.checkpoints.in_flight == 1
    ticket.cancel()
    driver.run()
    driver.check_answers()
    driver.backend.capture_polls = 0
    driver.backend.captures[0]._n_polls = 0
    result = driver.complete([*PROMPT[:40], 7], max_tokens=1)
    assert result.cache.resumed_tokens == 32
    driver.check_answers()


def test_one_in_flight_is_not_resumed_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pyllamacache.scheduler.checkpoints.MAX_IN_FLIGHT", 9)
    driver = late(make(), max_captures=9)
    driver.complete(PROMPT, max_tokens=1)
    assert len(taken(driver)) == 5
    assert driver.state.slot_info(driver.slot(0).slot_id).checkpoints == ()
    result = driver.complete([*PROMPT[:98], 7], max_tokens=1)
    assert (result.cache.resumed_tokens, result.cache.reason) == (0, Reason.NO_CHECKPOINT)
    driver.check_answers()


# ---- what fails ------------------------------------------------------------------------------------------------


@STATEFUL
@pytest.mark.parametrize("call", ["state_bytes", "begin_capture", "capture"])
def test_a_capture_that_fails_leaves_no_entry_and_the_request_goes_on(memory: Memory, call: str) -> None:
    driver = make(memory, budget=2)
    driver.complete([9], max_tokens=1)  # the size of a state is known
    driver.state.checkpoints.clear()
    driver.backend.faults.calls = [call, call, call]  # type: ignore[list-item]
    driver.submit(PROMPT, max_tokens=1)
    driver.run()
    driver.check_answers()
    counts = driver.statistics.checkpoints
    assert counts.refused["failed"] == 3 - len(driver.backend.faults.calls) > 0
    assert len(taken(driver)) + counts.refused["failed"] == 3
    assert all(node.is_ready for node in nodes(driver))


def test_a_capture_that_fails_while_its_slot_waits_lets_the_slot_go() -> None:
    driver = late(make())
    driver.submit(PROMPT, max_tokens=1, boundaries=(10, 20))
    for _ in range(2):
        driver.turn()
    assert driver.slot(0).is_held
    driver.backend.faults.calls = ["begin_capture"]
    driver.run()
    driver.check_answers()
    assert 20 not in positions(driver)
    assert driver.statistics.checkpoints.refused["failed"] == 1


@STATEFUL
def test_a_checkpoint_that_is_refused_is_given_up_and_the_next_shallower_is_tried(memory: Memory) -> None:
    for n_refused, resumed in ((1, 80), (2, 64), (3, 32), (4, 0)):
        driver = make(memory, n_slots=1)
        driver.complete(PROMPT, max_tokens=30)
        driver.backend.faults.calls = ["resume"] * n_refused
        result = driver.complete([*PROMPT[:98], 7], max_tokens=2)
        driver.check_answers()
        expected = (resumed, Source.CHECKPOINT if resumed else Source.NONE, Reason.LOST, resumed)
        cache = result.cache
        assert (cache.resumed_tokens, cache.source, cache.reason, cache.position) == expected
        counts = driver.statistics.checkpoints
        assert counts.evicted["broken"] == n_refused
        assert counts.restored == (1 if resumed else 0)


@SPLITTING
def test_a_refused_state_may_empty_the_slot_and_only_cells_are_lost_with_that(memory: Memory) -> None:
    """A checkpoint of purely recurrent memory needs nothing else, so the next shallower one will do."""
    driver = make(memory, n_slots=1)
    driver.complete(PROMPT, max_tokens=30)
    data = driver.state.checkpoints.data(node_at(driver, 96)).data
    data[:] = list(data.tobytes().replace(b" 96]", b" 95]"))
    result = driver.complete([*PROMPT[:98], 7], max_tokens=2)
    driver.check_answers()
    resumed = 80 if memory is Memory.RECURRENT else 0
    cache = result.cache
    assert (cache.resumed_tokens, cache.reason, cache.position) == (resumed, Reason.LOST, resumed)
    assert driver.statistics.checkpoints.evicted["broken"] == 1


def test_a_window_whose_refused_state_emptied_the_slot_starts_over() -> None:
    driver = make(Memory.SLIDING, n_slots=1)
    driver.complete(PROMPT, max_tokens=30)
    checkpoints = driver.state.checkpoints
    data, other = (checkpoints.data(node_at(driver, position)).data for position in (96, 80))
    data[: len(other)], data[len(other) :] = other, 32
    result = driver.complete([*PROMPT[:98], 7], max_tokens=2)
    driver.check_answers()
    assert (result.cache.resumed_tokens, result.cache.reason) == (0, Reason.LOST)


@SPLITTING
def test_a_lost_step_goes_back_to_the_deepest_checkpoint(memory: Memory) -> None:
    driver = make(memory, n_slots=1)
    ticket = driver.submit(PROMPT, max_tokens=9)
    driver.run_until(ticket, 3)
    n_before = len(driver.backend.calls)
    driver.backend.fail_group(1, GroupFault(-3, 1))
    driver.run()
    driver.check_answers()
    fed_again = driver.backend.calls[n_before + 1][0][0]
    assert (fed_again.start, fed_again.n_tokens) == (96, 4 + 3)
    cache = ticket.completion.cache
    assert (cache.resumed_tokens, cache.prefilled_tokens, cache.reason) == (0, 100, Reason.COLD)
    assert driver.statistics.n_lost_steps == 1


@SPLITTING
def test_a_lost_step_that_costs_what_was_resumed_says_so(memory: Memory) -> None:
    driver = make(memory, n_slots=1)
    driver.complete(PROMPT, max_tokens=9)
    ticket = driver.submit([*PROMPT[:99], 7], max_tokens=9)
    driver.run_until(ticket, 1)
    for position in (96, 99):
        driver.state.checkpoints.drop(node_at(driver, position), Eviction.OUTVALUED)
    driver.backend.fail_group(1, GroupFault(-3, 1))
    driver.run()
    driver.check_answers()
    cache = ticket.completion.cache
    assert (cache.source, cache.reason) == (Source.CHECKPOINT, Reason.LOST)
    assert cache.resumed_tokens == cache.position == 80
    assert cache.prefilled_tokens == 20


@SPLITTING
def test_a_lost_step_without_any_checkpoint_starts_over(memory: Memory) -> None:
    driver = make(memory, n_slots=1)
    ticket = driver.submit(PROMPT[:30], max_tokens=9)
    driver.run_until(ticket, 3)
    driver.state.checkpoints.clear()
    driver.backend.fail_group(1, GroupFault(-3, 1))
    driver.run()
    driver.check_answers()
    assert ticket.completion.cache.prefilled_tokens == 30


def test_a_window_goes_back_to_a_checkpoint_after_a_lost_step() -> None:
    driver = make(Memory.SLIDING, n_slots=1)
    ticket = driver.submit(PROMPT, max_tokens=20)
    driver.run_until(ticket, 15)
    n_before = len(driver.backend.calls)
    driver.backend.fail_group(1, GroupFault(-3, 1))
    driver.run()
    driver.check_answers()
    assert driver.backend.calls[n_before + 1][0][0].start == 96


# ---- what was evicted ------------------------------------------------------------------------------------------


@SPLITTING
def test_a_miss_says_which_evicted_checkpoint_would_have_helped(memory: Memory) -> None:
    driver = make(memory, budget=1, n_slots=1)
    driver.complete(PROMPT, max_tokens=1)
    assert taken(driver) == [(100, "end")]
    result = driver.complete([*PROMPT[:90], 7], max_tokens=1)
    assert (result.cache.reason, result.cache.position) == (Reason.EVICTED, 80)
    assert result.cache.matched_tokens == 90
    driver.check_answers()


def test_what_the_caller_cleared_was_not_evicted() -> None:
    driver = make(n_slots=1)
    driver.complete(PROMPT, max_tokens=1)
    driver.state.checkpoints.clear()
    result = driver.complete([*PROMPT[:90], 7], max_tokens=1)
    assert (result.cache.reason, result.cache.position) == (Reason.NO_CHECKPOINT, 90)


def test_what_was_evicted_before_the_caller_cleared_is_forgotten() -> None:
    driver = make(budget=1, n_slots=1)
    driver.complete(PROMPT, max_tokens=1)
    driver.state.checkpoints.clear()
    result = driver.complete([*PROMPT[:90], 7], max_tokens=1)
    assert (result.cache.reason, result.cache.position) == (Reason.NO_CHECKPOINT, 90)


def test_what_a_lower_budget_cost_or_was_never_whole_was_not_evicted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pyllamacache.scheduler.checkpoints.MAX_IN_FLIGHT", 9)
    driver = make(n_slots=1)
    driver.complete(PROMPT, max_tokens=1)
    driver.state.checkpoints.set_budget(CacheBudget(0, 1 << 24, 1 << 24))
    assert driver.complete([*PROMPT[:90], 7], max_tokens=1).cache.reason is Reason.NO_CHECKPOINT
    driver = late(make(n_slots=1), max_captures=9)
    driver.complete(PROMPT, max_tokens=1)
    for node in nodes(driver):
        driver.state.checkpoints.drop(node, Eviction.OUTVALUED)
    assert driver.complete([*PROMPT[:90], 7], max_tokens=1).cache.reason is Reason.NO_CHECKPOINT


def test_an_evicted_one_of_another_namespace_is_not_told() -> None:
    driver = make(budget=1, n_slots=1)
    driver.complete(PROMPT, max_tokens=1, namespace="a")
    driver.erase(0)
    driver.complete(PROMPT[:90], max_tokens=1, namespace="b")
    result = driver.complete([*PROMPT[:85], 7], max_tokens=1, namespace="b")
    assert result.cache.position in (64, 85)
    assert result.cache.position <= 85


# ---- budgets ---------------------------------------------------------------------------------------------------


@STATEFUL
@pytest.mark.parametrize("budget", [0, 1, 4])
def test_a_budget_is_kept_and_what_it_holds_is_used(memory: Memory, budget: int) -> None:
    driver = make(memory, budget=budget, n_slots=1)
    for turn in range(6):
        driver.complete([*PROMPT, *OTHER[: 5 * turn]], max_tokens=2, boundaries=(30, 60))
        assert len(taken(driver)) <= budget
    assert len(taken(driver)) == budget
    driver.check_answers()
    if budget:
        assert positions(driver)[-1] == len(driver.held(0))
        assert driver.statistics.checkpoints.refused.get("no_room", 0) == 0


@STATEFUL
def test_a_budget_in_bytes_is_kept_and_a_state_larger_than_it_refused(memory: Memory) -> None:
    driver = make(memory, checkpoint_bytes=20)
    driver.complete(PROMPT, max_tokens=2)
    assert taken(driver) == []
    assert set(driver.statistics.checkpoints.refused) == {"larger_than_budget"}
    driver.check_answers()
    size = driver.backend.state_bytes(0)
    driver = make(memory, checkpoint_bytes=3 * size)
    driver.complete(PROMPT, max_tokens=30)
    driver.complete([*PROMPT[:90], 1, 2, 3], max_tokens=2)
    assert 2 <= len(taken(driver)) <= 3
    driver.check_answers()


def test_memory_that_the_backend_needs_to_take_them_counts_before_it_is_there() -> None:
    driver = make()
    driver.backend.staging = 1 << 25
    driver.complete(PROMPT, max_tokens=1)
    assert taken(driver) == []
    assert set(driver.statistics.checkpoints.refused) == {"no_room"}
    assert driver.pool.used_bytes == 0
    driver.backend.staging = 5000
    driver.complete([*PROMPT, 1], max_tokens=1)
    assert driver.statistics.checkpoints.staging_bytes == 5000
    held = sum(block.size_bytes for block in driver.state.checkpoints._blocks.values())
    assert driver.pool.used_bytes == 5000 + held
    driver.check_answers()


def test_a_lowered_budget_gives_up_what_does_not_fit_and_returns_the_memory() -> None:
    driver = make()
    driver.complete(PROMPT, max_tokens=1)
    driver.complete(OTHER, max_tokens=1)
    checkpoints = driver.state.checkpoints
    assert len(taken(driver)) == 10
    checkpoints.set_budget(CacheBudget(3, 1 << 24, 1 << 24))
    driver.check()
    assert len(taken(driver)) == 3
    assert checkpoints.counts().evicted["cleared"] == 7
    driver.pool.wait_ready()
    n_spare = driver.pool.idle_bytes
    assert driver.pool.resident_bytes == driver.pool.used_bytes + n_spare
    size = max(block.size_bytes for block in checkpoints._blocks.values())
    assert n_spare <= size
    checkpoints.set_budget(CacheBudget(3, checkpoints.used_bytes - 1, 1 << 24))
    driver.check()
    assert len(taken(driver)) == 2
    checkpoints.set_budget(CacheBudget(3, 1 << 24, size))
    driver.check()
    assert len(taken(driver)) == 1
    checkpoints.set_budget(CacheBudget(0, 1 << 24, 1 << 24))
    driver.check()
    assert taken(driver) == []
    assert driver.pool.resident_bytes == 0
    driver.complete(PROMPT, max_tokens=1)
    assert taken(driver) == []
    checkpoints.set_budget(CacheBudget(4, 1 << 24, 1 << 24))
    driver.complete([*PROMPT, 1], max_tokens=1)
    assert 0 < len(taken(driver)) <= 4
    driver.check_answers()


def test_a_lowered_budget_ends_captures_in_flight_if_nothing_else_is_left() -> None:
    driver = late(make(), max_captures=2)
    driver.submit(PROMPT, max_tokens=5, boundaries=(10, 20, 30))
    while not driver.slot(0).is_held:
        driver.turn()
    driver.state.checkpoints.set_budget(CacheBudget(0, 1 << 24, 1 << 24))
    driver.check()
    assert taken(driver) == []
    driver.run()
    driver.check_answers()
    assert taken(driver) == []


def test_a_namespace_is_cleared_without_the_others() -> None:
    driver = make()
    driver.complete(PROMPT, max_tokens=1, namespace="a")
    driver.complete(PROMPT, max_tokens=1, namespace="b")
    n = len(taken(driver)) // 2
    assert driver.state.checkpoints.clear("a") == n
    assert {node.namespace for node in nodes(driver)} == {"b"}
    assert driver.state.checkpoints.clear("nobody's") == 0
    assert driver.held(0) == PROMPT
    result = driver.complete([*PROMPT[:90], 7], max_tokens=1, namespace="b")
    assert result.cache.resumed_tokens == 80
    n = len(taken(driver))
    assert driver.state.checkpoints.clear() == n > 0
    assert taken(driver) == []
    driver.check()
    driver.check_answers()


@STATEFUL
def test_room_is_made_by_stranded_ones_first(memory: Memory) -> None:
    driver = make(memory, budget=5, n_slots=1)
    driver.complete(PROMPT, max_tokens=1)
    old = nodes(driver)
    driver.complete(OTHER, max_tokens=1)
    checkpoints, counts = driver.state.checkpoints, driver.statistics.checkpoints
    if memory is Memory.RECURRENT:
        assert "stranded" not in counts.evicted
    else:
        assert counts.evicted == {"stranded": sum(not checkpoints.has(node) for node in old)}
    driver.check_answers()


# ---- while somebody reads them ---------------------------------------------------------------------------------


def test_the_bytes_of_a_checkpoint_stay_while_it_is_held() -> None:
    """A file is written from where they lie."""
    driver = make(budget=5)
    driver.complete(PROMPT, max_tokens=1)
    checkpoints = driver.state.checkpoints
    node = node_at(driver, 96)
    checkpoints.hold(node)
    data = checkpoints.data(node).data
    before, used = data.tobytes(), driver.pool.used_bytes
    checkpoints.clear()
    assert not checkpoints.has(node)
    assert 0 < driver.pool.used_bytes < used
    driver.check()
    driver.complete(OTHER, max_tokens=1)
    assert data.tobytes() == before
    n_used = driver.pool.used_bytes
    checkpoints.let_go(node)
    assert driver.pool.used_bytes < n_used
    driver.check()


def test_one_that_is_held_is_not_evicted_and_several_may_hold_it() -> None:
    driver = make(budget=2)
    driver.complete(PROMPT, max_tokens=1)
    driver.leases_of_tests = 1
    checkpoints = driver.state.checkpoints
    for node in nodes(driver):
        checkpoints.hold(node)
        checkpoints.hold(node)
        checkpoints.let_go(node)
    before = positions(driver)
    driver.complete(OTHER, max_tokens=1)
    assert positions(driver) == before
    assert driver.statistics.checkpoints.refused["no_room"] > 0
    for node in nodes(driver):
        checkpoints.let_go(node)
    driver.complete([*OTHER, 1], max_tokens=1)
    assert positions(driver) != before
    driver.check_answers()


# ---- from elsewhere --------------------------------------------------------------------------------------------


@STATEFUL
def test_checkpoints_of_a_file_are_used_in_another_engine(memory: Memory) -> None:
    first = make(memory)
    first.complete(PROMPT, max_tokens=30)
    second = make(memory, n_slots=3)
    second.restore(2, first.save(0))
    assert taken(second) == taken(first)
    result = second.complete([*PROMPT[:90], 7], max_tokens=3)
    assert (result.cache.resumed_tokens, result.cache.source) == (80, Source.CHECKPOINT)
    second.check_answers()


def test_checkpoints_of_a_file_that_are_there_already_take_no_second_place() -> None:
    driver = make()
    driver.complete(PROMPT, max_tokens=1)
    before, used = taken(driver), driver.pool.used_bytes
    driver.restore(0, driver.save(0))
    assert (taken(driver), driver.pool.used_bytes) == (before, used)


def test_a_file_of_another_namespace_puts_them_there() -> None:
    driver = make()
    driver.complete(PROMPT, max_tokens=1, namespace="a")
    driver.restore(1, dataclasses.replace(driver.save(0), namespace="b"))
    assert {node.namespace for node in nodes(driver)} == {"a", "b"}
    result = driver.complete([*PROMPT[:90], 7], max_tokens=1, namespace="b")
    assert (result.cache.resumed_tokens, result.slot_id) == (80, 1)
    driver.check_answers()


@pytest.mark.parametrize("budget", [0, 1, 3])
def test_of_a_file_with_more_than_fit_the_budget_takes_some(budget: int) -> None:
    first = make()
    first.complete(PROMPT, max_tokens=30)
    second = make(budget=budget)
    second.restore(0, first.save(0))
    assert len(taken(second)) == budget
    second.complete([*PROMPT[:90], 7], max_tokens=3)
    second.check_answers()


def test_a_file_that_cannot_be_put_in_leaves_no_memory_behind() -> None:
    driver = make()
    driver.complete(PROMPT, max_tokens=1)
    saved = driver.save(0)
    other = make()
    other.backend.faults.calls = ["load_state"]
    with pytest.raises(NativeError):
        other.restore(1, saved)
    assert other.pool.used_bytes == 0
    assert taken(other) == []


def test_a_kind_of_a_newer_version_counts_as_the_callers() -> None:
    first = make()
    first.complete(PROMPT, max_tokens=1)
    saved = first.save(0)
    position, _, data = saved.checkpoints[-1]
    second = make()
    second.restore(0, dataclasses.replace(saved, checkpoints=((position, "of tomorrow", data),)))
    assert taken(second) == [(position, "boundary")]


@pytest.mark.parametrize("meanwhile", ["captures", "a lower budget", "no budget"])
def test_a_budget_holds_whatever_happens_while_a_file_is_read(meanwhile: str) -> None:
    """Memory is had for its checkpoints before they are read, and taken over afterwards."""
    first = make()
    first.complete(PROMPT, max_tokens=1)
    saved = first.save(0)
    driver = make(budget=5)
    driver.restore(0, dataclasses.replace(saved, checkpoints=()))
    blocks: dict[int, tuple[str, Block]] = {}
    for position, kind, data in saved.checkpoints:
        block = driver.state.checkpoints.room_for(len(data), CheckpointKind(kind))
        assert block is not None
        block.data[:] = list(data)
        blocks[position] = (kind, block)
    if meanwhile == "captures":
        driver.complete(OTHER, max_tokens=1, slot=1)
    else:
        driver.state.checkpoints.set_budget(CacheBudget(2 if meanwhile == "a lower budget" else 0, 1 << 24, 1 << 24))
    put_checkpoints(driver.state, driver.slot(0).slot_id, blocks)
    driver.check()
    driver.complete([*PROMPT[:90], 7], max_tokens=1, slot=0)
    driver.check_answers()


# ---- the end ---------------------------------------------------------------------------------------------------


def test_closing_ends_captures_in_flight_before_the_backend_and_releases_all_memory() -> None:
    backend = FakeBackend(traits())
    backend.capture_polls = LATER
    gate = Gate()
    engine = FakeEngine(backend, max_checkpoints=32)
    backend.before_step = gate
    engine.submit(PROMPT, max_tokens=300)
    for _ in range(4):
        gate.wait()
        gate.let_on()
    gate.wait()
    checkpoints = engine.state.checkpoints
    assert checkpoints.counts().in_flight > 0
    gate.open()
    engine.close()
    assert backend.is_closed
    assert len(checkpoints.index.checkpoints) == checkpoints.used_bytes == 0
    assert checkpoints._pool.used_bytes == checkpoints._pool.resident_bytes == 0


def test_closing_leaves_the_bytes_that_somebody_reads() -> None:
    driver = make()
    driver.complete(PROMPT, max_tokens=1)
    checkpoints = driver.state.checkpoints
    node = node_at(driver, 96)
    data = checkpoints.data(node).data
    before = data.tobytes()
    checkpoints.hold(node)
    checkpoints.close()
    assert data.tobytes() == before
    assert driver.pool.used_bytes > 0
    del data
    checkpoints.let_go(node)
    assert driver.pool.used_bytes == 0


def test_one_given_up_is_counted_by_its_reason() -> None:
    driver = make()
    driver.complete(PROMPT, max_tokens=1)
    driver.state.checkpoints.drop(node_at(driver, 96), Eviction.OUTVALUED)
    assert driver.state.checkpoints.counts().evicted == {"outvalued": 1}
    assert driver.state.checkpoints.index.evicted.deepest("", driver.slot(0).tokens.ids, 80, 100) == 96
