"""The scheduler's thread: how it ends, what it takes with it, and that it serves many threads at once."""

from __future__ import annotations

import gc
import logging
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from pyllamacache.config import Memory
from pyllamacache.errors import ClosedError, InternalError, NativeError, SlotBusyError
from pyllamacache.request import SlotId
from pyllamacache.scheduler.slot_files import idle_slot
from tests.fakes import FakeBackend, cold_run, make_traits
from tests.fakes.engine import WAIT_S, FakeEngine, Gate, until


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.open()


@pytest.fixture
def engine(gate: Gate) -> Iterator[FakeEngine]:
    """Two slots; every step waits at the gate."""
    engine = FakeEngine()
    engine.backend.before_step = gate
    yield engine
    gate.open()
    engine.close()


@pytest.fixture
def free_engine() -> Iterator[FakeEngine]:
    engine = FakeEngine(FakeBackend(make_traits(n_slots=4, kv_tokens=256)))
    yield engine
    engine.close()


def test_requests_are_answered(free_engine: FakeEngine) -> None:
    handles = [free_engine.submit([1, 2, n], max_tokens=5) for n in range(10)]
    for n, handle in enumerate(handles):
        assert handle.result(WAIT_S).token_ids == cold_run(free_engine.backend.traits, [1, 2, n], 5)


# ---- close -----------------------------------------------------------------------------------------------------


def test_closing_ends_running_and_queued_requests_with_closed_error(engine: FakeEngine, gate: Gate) -> None:
    handles = [engine.submit([n], max_tokens=30) for n in (1, 2, 3, 4)]
    gate.wait()
    closing = threading.Thread(target=engine.close)
    closing.start()
    gate.open()
    closing.join(WAIT_S)
    assert not engine.scheduler.is_alive
    for handle in handles:
        with pytest.raises(ClosedError, match="fake engine"):
            handle.result(WAIT_S)
    assert engine.backend.is_closed
    assert engine.backend.n_open_samplers() == 0


def test_closing_twice_and_from_two_threads_is_one_close(free_engine: FakeEngine) -> None:
    with ThreadPoolExecutor(4) as pool:
        for future in [pool.submit(free_engine.scheduler.stop) for _ in range(4)]:
            future.result(WAIT_S)
    free_engine.close()
    free_engine.close()
    assert free_engine.backend.is_closed


def test_nothing_is_accepted_after_close(free_engine: FakeEngine) -> None:
    free_engine.close()
    with pytest.raises(ClosedError):
        free_engine.submit([1])
    with pytest.raises(ClosedError):
        free_engine.call(lambda: 1)


def test_what_is_done_stays_readable_after_close(free_engine: FakeEngine) -> None:
    handle = free_engine.submit([1, 2])
    handle.result(WAIT_S)
    free_engine.close()
    assert len(handle.result().token_ids) == 4
    assert free_engine.statistics.n_requests == 1


def test_the_loop_may_be_told_to_stop_on_its_own_thread(free_engine: FakeEngine) -> None:
    """The collector runs finalizers on whatever thread it happens to be on."""
    free_engine.call(free_engine.scheduler.stop)
    free_engine.scheduler._thread.join(WAIT_S)
    assert free_engine.backend.is_closed


# ---- the collector ---------------------------------------------------------------------------------------------


def test_a_dropped_engine_is_collected_and_its_thread_ends() -> None:
    engine = FakeEngine()
    handle = engine.submit([1, 2, 3])
    handle.result(WAIT_S)
    backend, thread, gone = engine.backend, engine.scheduler._thread, weakref.ref(engine)
    del engine
    gc.collect()
    assert gone() is not None, "a handle keeps its engine"
    del handle
    gc.collect()
    assert gone() is None
    thread.join(WAIT_S)
    assert not thread.is_alive()
    assert backend.is_closed


def test_an_engine_dropped_while_it_works_is_collected_too(gate: Gate) -> None:
    engine = FakeEngine()
    engine.backend.before_step = gate
    outbox = engine.submit([1, 2, 3], max_tokens=30)._outbox
    gate.wait()
    gone = weakref.ref(engine)
    gate.open()
    del engine
    gc.collect()
    assert gone() is None
    with pytest.raises(ClosedError):
        outbox.result(WAIT_S)


# ---- failure ---------------------------------------------------------------------------------------------------


def test_a_failure_of_the_loop_reaches_every_handle_and_later_ones(
    engine: FakeEngine, gate: Gate, caplog: pytest.LogCaptureFixture
) -> None:
    handles = [engine.submit([n], max_tokens=30) for n in (1, 2, 3, 4)]
    gate.wait()

    def fail() -> None:
        raise ZeroDivisionError("a bug")

    engine.backend.before_step = fail
    with caplog.at_level(logging.ERROR, logger="pyllamacache"):
        gate.open()
        for handle in handles:
            with pytest.raises(InternalError, match="ZeroDivisionError: a bug") as caught:
                handle.result(WAIT_S)
            assert isinstance(caught.value.__cause__, ZeroDivisionError)
        engine.scheduler._thread.join(WAIT_S)
    assert "a bug" in caplog.text
    for late in (lambda: engine.submit([1]), lambda: engine.call(lambda: 1)):
        with pytest.raises(InternalError, match="a bug"):
            late()
    assert engine.backend.is_closed
    engine.close()


@pytest.mark.parametrize("call", ["erase", "step_raises"])
def test_a_native_error_where_none_may_be_ends_the_loop_and_says_so(
    free_engine: FakeEngine, call: str, caplog: pytest.LogCaptureFixture
) -> None:
    free_engine.submit([1, 2, 3]).result(WAIT_S)
    free_engine.backend.faults.calls = [call, call]  # type: ignore[list-item]
    handle = free_engine.submit([7, 8], slot=0)
    with pytest.raises(NativeError, match=call):
        handle.result(WAIT_S)
    with pytest.raises(NativeError, match=call):
        free_engine.submit([1])


def test_a_call_that_breaks_the_loop_leaves_nobody_waiting(
    engine: FakeEngine, gate: Gate, caplog: pytest.LogCaptureFixture
) -> None:
    """What had been taken from the inbox together with it was forgotten, and its callers waited for ever."""
    first = engine.submit([1], max_tokens=30)
    gate.wait()

    def fail() -> None:
        raise ZeroDivisionError("a bug")

    with ThreadPoolExecutor(4) as pool:
        broken = pool.submit(engine.call, fail)
        until(lambda: engine.scheduler.inbox._items.qsize() == 1)
        behind = [engine.submit([2]), engine.submit([3])]
        call = pool.submit(engine.call, lambda: 1)
        until(lambda: engine.scheduler.inbox._items.qsize() == 4)
        gate.open()
        with pytest.raises(ZeroDivisionError):
            broken.result(WAIT_S)
        with pytest.raises(InternalError, match="a bug"):
            call.result(WAIT_S)
        for handle in (first, *behind):
            with pytest.raises(InternalError, match="a bug"):
                handle.result(WAIT_S)


def test_a_call_that_is_refused_breaks_nothing(engine: FakeEngine, gate: Gate) -> None:
    handle = engine.submit([1, 2], max_tokens=3)
    gate.wait()
    with ThreadPoolExecutor(1) as pool:
        refused = pool.submit(engine.call, lambda: idle_slot(engine.state, SlotId(0), "erase"))
        gate.open()
        with pytest.raises(SlotBusyError):
            refused.result(WAIT_S)
    assert len(handle.result(WAIT_S).token_ids) == 3


# ---- many threads ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("memory", list(Memory))
def test_eight_threads_get_their_own_answers(memory: Memory) -> None:
    engine = FakeEngine(FakeBackend(make_traits(memory, n_slots=3, kv_tokens=100)))
    traits = engine.backend.traits

    def work(worker: int) -> None:
        prompt = [worker + 1, 7]
        for turn in range(6):
            result = engine.submit(prompt, max_tokens=3, namespace="ab"[worker % 2]).result(WAIT_S)
            assert result.token_ids == cold_run(traits, prompt, 3)
            assert engine.call(lambda: len(engine.state.slots)) == 3
            if turn % 3 == 2:
                cancelled = engine.submit(prompt, max_tokens=20)
                cancelled.cancel()
                assert cancelled.result(WAIT_S).finish_reason in ("cancelled", "length")
            prompt += [*result.token_ids, turn]

    with ThreadPoolExecutor(8) as pool:
        for future in [pool.submit(work, worker) for worker in range(8)]:
            future.result(3 * WAIT_S)
    engine.close()
    total = engine.statistics
    assert (total.n_requests + total.n_cancelled, total.n_failed) == (8 * 8, 0)
    assert total.cached_tokens + total.prefilled_tokens == total.prompt_tokens


def test_closing_under_load_leaves_nobody_waiting() -> None:
    engine = FakeEngine(FakeBackend(make_traits(n_slots=3, kv_tokens=100)))
    some_done = threading.Semaphore(0)

    def work(worker: int) -> int:
        n_done = 0
        while True:
            try:
                engine.submit([worker, n_done % 50], max_tokens=3).result(WAIT_S)
                engine.call(lambda: engine.state.slot_info(SlotId(0)))
            except ClosedError:
                return n_done
            n_done += 1
            some_done.release()

    with ThreadPoolExecutor(8) as pool:
        futures = [pool.submit(work, worker) for worker in range(8)]
        for _ in range(20):
            assert some_done.acquire(timeout=WAIT_S)
        engine.close()
        assert sum(future.result(WAIT_S) for future in futures) >= 20


# ---- what it is doing ------------------------------------------------------------------------------------------


def test_statistics_say_what_runs_and_what_waits(engine: FakeEngine, gate: Gate) -> None:
    """A lone running request was reported as queued until something else came in."""
    engine.submit([1], max_tokens=3)
    gate.wait()
    assert (engine.statistics.n_running, engine.statistics.n_queued) == (1, 0)
    handles = [engine.submit([n], max_tokens=3) for n in (2, 3, 4)]
    gate.let_on()
    gate.wait()
    assert (engine.statistics.n_running, engine.statistics.n_queued) == (2, 2)
    gate.open()
    for handle in handles:
        handle.result(WAIT_S)
    engine.call(lambda: None)
    engine.call(lambda: None)
    assert (engine.statistics.n_running, engine.statistics.n_queued) == (0, 0)


def test_an_idle_loop_waits() -> None:
    n_readings = 0

    def clock() -> float:
        nonlocal n_readings
        n_readings += 1
        return 0.0

    engine = FakeEngine(clock=clock)
    engine.submit([1]).result(WAIT_S)
    engine.call(lambda: None)
    before = n_readings
    for _ in range(20):
        engine.call(lambda: None)
    assert n_readings == before
    engine.close()
