"""A submitted request as its caller sees it: waiting, iterating, cancelling, with and without asyncio."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pyllamacache.errors import ClosedError, ForkedError, InvalidRequestError, NativeError, ResultTimeoutError
from pyllamacache.request import Chunk, Completion
from pyllamacache.scheduler.handle import Handle
from tests.fakes import FakeBackend, cold_run, make_traits
from tests.fakes.engine import WAIT_S, FakeEngine, Gate, until

PROMPT = [1, 2, 3, 4, 5]


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.open()


@pytest.fixture
def engine(gate: Gate) -> Iterator[FakeEngine]:
    """Every step waits at the gate."""
    engine = FakeEngine(FakeBackend(make_traits(n_slots=2)))
    engine.backend.before_step = gate
    yield engine
    gate.open()
    engine.close()


def reply(engine: FakeEngine, n_tokens: int) -> tuple[int, ...]:
    return cold_run(engine.backend.traits, PROMPT, n_tokens)


def check_ended_by_cancel(handle: Handle) -> None:
    assert handle.result(WAIT_S).finish_reason == "cancelled"


# ---- waiting ---------------------------------------------------------------------------------------------------


def test_a_result_can_be_asked_for_again(engine: FakeEngine, gate: Gate) -> None:
    gate.open()
    handle = engine.submit(PROMPT)
    assert handle.result(WAIT_S) is handle.result()
    assert handle.done
    assert handle.prefilled_tokens == len(PROMPT)


def test_a_wait_that_gives_up_leaves_the_request_running(engine: FakeEngine, gate: Gate) -> None:
    handle = engine.submit(PROMPT, max_tokens=4)
    with pytest.raises(ResultTimeoutError, match="still running"):
        handle.result(0)
    assert not handle.done
    gate.open()
    assert handle.result(WAIT_S).token_ids == reply(engine, 4)


@pytest.mark.parametrize("timeout", [-1, -0.5, float("nan"), float("-inf")])
def test_a_timeout_that_means_nothing_is_refused(engine: FakeEngine, timeout: float) -> None:
    with pytest.raises(InvalidRequestError, match="timeout"):
        engine.submit(PROMPT).result(timeout)


def test_an_endless_timeout_waits(engine: FakeEngine, gate: Gate) -> None:
    gate.open()
    assert engine.submit(PROMPT).result(float("inf")).finish_reason == "length"


def test_cancel_ends_the_request_at_the_next_step(engine: FakeEngine, gate: Gate) -> None:
    handle = engine.submit(PROMPT, max_tokens=30)
    gate.wait()
    handle.cancel()
    handle.cancel()
    gate.let_on()
    result = handle.result(WAIT_S)
    assert (result.finish_reason, result.token_ids) == ("cancelled", reply(engine, 1))


def test_dropping_a_handle_does_not_cancel(engine: FakeEngine, gate: Gate) -> None:
    engine.submit(PROMPT, max_tokens=3)
    gate.open()
    engine.submit(PROMPT, slot=0).result(WAIT_S)
    assert engine.statistics.n_requests == 2


# ---- iterating -------------------------------------------------------------------------------------------------


def test_chunks_come_while_the_request_runs(engine: FakeEngine, gate: Gate) -> None:
    tokens: list[int] = []
    gate.let_on()
    for chunk in engine.submit(PROMPT, max_tokens=4):
        tokens += chunk.token_ids
        gate.let_on()
    assert tuple(tokens) == reply(engine, 4)


def test_leaving_the_iteration_cancels(engine: FakeEngine, gate: Gate) -> None:
    handle = engine.submit(PROMPT, max_tokens=30)
    gate.let_on(2)
    for _ in handle:
        break
    gate.open()
    check_ended_by_cancel(handle)


def test_an_exception_in_the_loop_body_cancels(engine: FakeEngine, gate: Gate) -> None:
    handle = engine.submit(PROMPT, max_tokens=30)
    gate.let_on(2)
    with pytest.raises(ZeroDivisionError):
        [1 // 0 for _ in handle]
    gate.open()
    check_ended_by_cancel(handle)


def test_an_error_of_the_request_comes_out_of_the_iteration(engine: FakeEngine, gate: Gate) -> None:
    gate.open()
    engine.backend.fail_sampling(3)
    chunks: list[Chunk] = []
    with pytest.raises(NativeError):
        chunks.extend(engine.submit(PROMPT, max_tokens=9))


def test_a_second_iteration_finds_nothing_left(engine: FakeEngine, gate: Gate) -> None:
    gate.open()
    handle = engine.submit(PROMPT, max_tokens=3)
    assert len(list(handle)) == 3
    assert list(handle) == []


# ---- Ctrl-C ----------------------------------------------------------------------------------------------------


def wait_until_main_thread_sleeps() -> None:
    """A signal that comes just before a thread blocks does not wake it; CPython cannot help that.

    Reading the file gives the other thread the interpreter each time, so asleep 50 times in a row is blocked.
    """
    status = Path(f"/proc/self/task/{threading.main_thread().native_id}/stat")
    until(lambda: all(status.read_text().rpartition(")")[2].split()[0] == "S" for _ in range(50)))


def interrupted(engine: FakeEngine, gate: Gate, wait: Callable[[Handle], object]) -> Handle:
    """`wait` for a request on the main thread, and send the signal while it waits."""
    handle = engine.submit(PROMPT, max_tokens=30)

    def interrupt() -> None:
        gate.wait()
        wait_until_main_thread_sleeps()
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    sender = threading.Thread(target=interrupt)
    sender.start()
    with pytest.raises(KeyboardInterrupt):
        wait(handle)
    sender.join(WAIT_S)
    gate.open()
    return handle


needs_proc = pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="tells from /proc that a thread sleeps")


@needs_proc
def test_ctrl_c_while_waiting_cancels_the_request(engine: FakeEngine, gate: Gate) -> None:
    handle = interrupted(engine, gate, lambda handle: handle.result(WAIT_S))
    check_ended_by_cancel(handle)
    assert engine.submit(PROMPT).result(WAIT_S).cache.resumed_tokens == len(PROMPT) - 1


@needs_proc
def test_ctrl_c_while_iterating_cancels_the_request(engine: FakeEngine, gate: Gate) -> None:
    check_ended_by_cancel(interrupted(engine, gate, list))


# ---- asyncio ---------------------------------------------------------------------------------------------------


def test_a_task_waits_for_the_result(engine: FakeEngine, gate: Gate) -> None:
    gate.open()
    result = asyncio.run(engine.submit(PROMPT, max_tokens=4).wait())
    assert result.token_ids == reply(engine, 4)


def test_a_task_gets_the_error(engine: FakeEngine, gate: Gate) -> None:
    gate.open()
    engine.backend.fail_sampling(1)
    with pytest.raises(NativeError):
        asyncio.run(engine.submit(PROMPT).wait())


def test_a_task_iterates(engine: FakeEngine, gate: Gate) -> None:
    gate.open()

    async def collect() -> list[int]:
        return [token async for chunk in engine.submit(PROMPT, max_tokens=4) for token in chunk.token_ids]

    assert tuple(asyncio.run(collect())) == reply(engine, 4)


def test_many_tasks_of_one_loop_wait_at_once(engine: FakeEngine, gate: Gate) -> None:
    gate.open()

    async def all_of_them() -> list[Completion]:
        return await asyncio.gather(*(engine.submit([n, n], max_tokens=3).wait() for n in range(1, 9)))

    results = asyncio.run(all_of_them())
    assert [each.token_ids for each in results] == [cold_run(engine.backend.traits, [n, n], 3) for n in range(1, 9)]


def test_one_request_can_be_awaited_and_iterated_by_several_tasks(engine: FakeEngine, gate: Gate) -> None:
    """The last one to listen was the only one that was ever woken."""
    gate.let_on()

    async def all_of_them() -> tuple[Completion, Completion, int]:
        handle = engine.submit(PROMPT, max_tokens=3)

        async def count() -> int:
            n_chunks = 0
            async for _ in handle:
                n_chunks += 1
                gate.let_on()
            return n_chunks

        return await asyncio.wait_for(asyncio.gather(handle.wait(), handle.wait(), count()), WAIT_S)

    first, second, n_chunks = asyncio.run(all_of_them())
    assert first is second
    assert n_chunks == 3


def test_a_cancelled_task_cancels_the_request(engine: FakeEngine, gate: Gate) -> None:
    async def cancelled() -> Handle:
        handle = engine.submit(PROMPT, max_tokens=30)
        task = asyncio.ensure_future(handle.wait())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return handle

    handle = asyncio.run(cancelled())
    gate.open()
    check_ended_by_cancel(handle)


def test_a_cancelled_iteration_cancels_the_request(engine: FakeEngine, gate: Gate) -> None:
    gate.let_on(2)

    async def cancelled() -> Handle:
        handle = engine.submit(PROMPT, max_tokens=30)
        has_chunk = asyncio.Event()

        async def iterate() -> None:
            async for _ in handle:
                has_chunk.set()

        task = asyncio.ensure_future(iterate())
        await asyncio.wait_for(has_chunk.wait(), WAIT_S)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return handle

    handle = asyncio.run(cancelled())
    gate.open()
    check_ended_by_cancel(handle)


def test_a_listener_on_a_closed_event_loop_harms_nobody(engine: FakeEngine, gate: Gate) -> None:
    """Whoever listened is gone: the request is cancelled, the scheduler goes on."""
    loop = asyncio.new_event_loop()
    handle = engine.submit(PROMPT, max_tokens=30)

    async def start() -> asyncio.Task[Completion]:
        task = asyncio.ensure_future(handle.wait())
        await asyncio.sleep(0)
        return task

    task = loop.run_until_complete(start())
    loop.close()
    gate.open()
    check_ended_by_cancel(handle)
    assert len(engine.submit(PROMPT).result(WAIT_S).token_ids) == 4
    task.get_coro().close()
    task._log_destroy_pending = False  # type: ignore[attr-defined]


def test_closing_the_engine_wakes_waiting_tasks(engine: FakeEngine, gate: Gate) -> None:
    async def wait() -> None:
        handle = engine.submit(PROMPT, max_tokens=30)
        closing = threading.Thread(target=engine.close)
        gate.wait()
        closing.start()
        gate.open()
        with pytest.raises(ClosedError):
            await asyncio.wait_for(handle.wait(), WAIT_S)
        closing.join(WAIT_S)

    asyncio.run(wait())


# ---- another process -------------------------------------------------------------------------------------------


def test_a_handle_in_a_forked_child_is_dead(engine: FakeEngine, gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    gate.open()
    handle = engine.submit(PROMPT)
    handle.result(WAIT_S)
    monkeypatch.setattr(os, "getpid", lambda: -1)
    for use in (handle.result, lambda: next(iter(handle)), lambda: asyncio.run(handle.wait())):
        with pytest.raises(ForkedError):
            use()
