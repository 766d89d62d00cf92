"""Ends: closing, dropping, cancelling, timeouts, clients that go away. Those of processes are in test_processes."""

from __future__ import annotations

import asyncio
import functools
import gc
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pyllamacache import Engine, Model
from pyllamacache.errors import ClosedError, InvalidRequestError, RequestTimeoutError, ResultTimeoutError
from pyllamacache.scheduler.inbox import Call
from tests.flow.hold import LIMIT_S, before_step, held, wait_for_chunk
from tests.flow.law import joined, random_ids

KINDS = ["full", "sliding", "hybrid", "recurrent"]
PROMPT, OTHER = random_ids(1, 100), random_ids(2, 40)
ENDLESS = 7000
"""Tokens of a reply that no test waits for."""

NewEngine = Callable[..., Any]


@pytest.fixture
def make(new_engine: NewEngine) -> NewEngine:
    return functools.partial(new_engine, n_threads=1, n_ctx=8192, kv_tokens=16384)


def scheduler_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("pyllamacache")]


# ---- closing ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_closing_ends_running_and_queued_requests(kind: str, make: NewEngine) -> None:
    engine = make(kind)
    with held(engine):
        handles = [engine.submit(random_ids(seed, 30), max_tokens=ENDLESS) for seed in range(5)]
    for handle in handles[:2]:
        wait_for_chunk(handle)
    engine.close()
    for handle in handles:
        assert handle.done
        for _ in range(2):
            with pytest.raises(ClosedError, match="closed"):
                handle.result()
        with pytest.raises(ClosedError):
            list(handle)  # what had come is given, then the error
    assert engine.is_closed
    assert "closed" in repr(engine)


def test_closing_wakes_every_thread_that_waits(make: NewEngine) -> None:
    engine = make()
    begun, ended = threading.Barrier(5), []

    def client(index: int) -> None:
        begun.wait(LIMIT_S)
        with pytest.raises(ClosedError):
            engine.complete(random_ids(index, 20), max_tokens=ENDLESS)
        ended.append(index)

    threads = [threading.Thread(target=client, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    begun.wait(LIMIT_S)
    handle = engine.submit(OTHER, max_tokens=1, slot=0)
    engine.close()
    for thread in threads:
        thread.join(LIMIT_S)
    assert sorted(ended) == [0, 1, 2, 3]
    assert handle.done


def test_closing_again_and_from_several_threads_is_no_error(make: NewEngine) -> None:
    engine = make()
    engine.complete(PROMPT, max_tokens=2)
    closers = [threading.Thread(target=engine.close) for _ in range(4)]
    for thread in closers:
        thread.start()
    for thread in closers:
        thread.join(LIMIT_S)
    engine.close()
    with pytest.raises(ClosedError), engine:
        pass


def test_a_closed_engine_says_so_whatever_is_asked(make: NewEngine, tmp_path: Path) -> None:
    engine = make()
    engine.complete(PROMPT, max_tokens=2)
    slot, path = engine.slots[0], tmp_path / "slot"
    slot.save(path)
    engine.close()
    uses: list[Callable[[], object]] = [
        lambda: engine.complete(PROMPT),
        lambda: engine.complete("text"),
        lambda: engine.submit(PROMPT),
        lambda: engine.warm(PROMPT),
        lambda: next(iter(engine.stream(PROMPT))),
        lambda: asyncio.run(engine.acomplete(PROMPT)),
        lambda: slot.state,
        lambda: slot.token_ids,
        lambda: slot.n_tokens,
        lambda: slot.namespace,
        lambda: slot.save(path),
        lambda: slot.restore(path),
        slot.erase,
    ]
    for use in uses:
        with pytest.raises(ClosedError):
            use()
    assert engine.statistics().n_requests == 1, "what was counted stays readable"


def test_saying_that_it_is_closed_many_times_keeps_no_frames(make: NewEngine) -> None:
    """One error object was raised again and again, and its traceback grew with every raise."""
    engine = make()
    handle = engine.submit(PROMPT, max_tokens=ENDLESS)
    engine.close()
    for use in (lambda: engine.submit(PROMPT), handle.result, lambda: list(handle)):
        lengths = []
        for _ in range(3):
            with pytest.raises(ClosedError) as caught:
                use()
            lengths.append(len(caught.traceback))
        assert lengths[0] == lengths[2]


def test_closing_a_model_closes_its_engines(tiny_path: Callable[[str], Path]) -> None:
    model = Model(tiny_path("full"), progress=False)
    engines = [Engine(model, n_ctx=1024, n_threads=1, progress=False) for _ in range(2)]
    handle = engines[0].submit(OTHER, max_tokens=900)
    wait_for_chunk(handle)
    model.close()
    model.close()
    with pytest.raises(ClosedError):
        handle.result()
    for use in (
        lambda: engines[1].complete(PROMPT),
        lambda: engines[1].complete("text"),
        lambda: model.tokenize("text"),
        lambda: model.detokenize([1]),
        lambda: Engine(model, progress=False),
        lambda: model.memory,
    ):
        with pytest.raises(ClosedError):
            use()
    assert "closed" in repr(model)
    assert model.n_vocab == 320


def test_two_engines_on_one_model_do_not_know_each_other(make: NewEngine) -> None:
    one, other = make(), make(n_slots=3)
    expected = one.complete(PROMPT, max_tokens=20)
    handles = [engine.submit(PROMPT, max_tokens=20) for engine in (one, other) for _ in range(2)]
    assert {handle.result().token_ids for handle in handles} == {expected.token_ids}
    running = other.submit(PROMPT, max_tokens=200)
    wait_for_chunk(running)
    one.close()
    assert len(running.result().token_ids) == 200


# ---- dropping --------------------------------------------------------------------------------------------------


def test_an_engine_that_nobody_holds_is_freed_with_its_thread(tiny_models: Callable[[str], Any]) -> None:
    before = set(scheduler_threads())
    engine = Engine(tiny_models("full"), n_ctx=8192, n_threads=1, progress=False)
    engine.complete(PROMPT, max_tokens=3)
    slot = engine.slots[0]
    handle = engine.submit(PROMPT, max_tokens=ENDLESS)
    wait_for_chunk(handle)
    (thread,) = set(scheduler_threads()) - before
    engine_ref, context_ref = weakref.ref(engine), weakref.ref(engine._state.backend)
    del engine
    gc.collect()
    assert engine_ref() is not None, "a handle and a slot keep their engine"
    assert slot.state in ("busy", "idle")
    del slot, handle
    gc.collect()
    assert engine_ref() is None
    assert not thread.is_alive()
    gc.collect()
    assert context_ref() is None


def test_an_engine_is_freed_without_waiting_for_the_collector(tiny_models: Callable[[str], Any]) -> None:
    """A notebook cell that makes a new engine must not hold the memory of two."""
    before = set(scheduler_threads())
    gc.disable()
    try:
        engine = Engine(tiny_models("full"), n_ctx=1024, n_threads=1, progress=False)
        assert engine.slots[0].state == "idle"
        assert engine.complete(PROMPT, max_tokens=3).slot_id == 0
        del engine
        assert set(scheduler_threads()) <= before
    finally:
        gc.enable()


def test_an_engine_collected_on_its_own_thread_ends_it(tiny_models: Callable[[str], Any]) -> None:
    """The collector runs on whichever thread allocates: here on the one that is to end."""
    before = set(scheduler_threads())
    engine = Engine(tiny_models("full"), n_ctx=1024, n_threads=1, progress=False)
    (thread,) = set(scheduler_threads()) - before
    dropped, cycle = threading.Event(), [engine]
    cycle.append(cycle)  # type: ignore[arg-type]

    def collect() -> None:
        dropped.wait(LIMIT_S)
        gc.collect()

    engine._scheduler.inbox._put(Call(collect))
    outbox = engine.submit(PROMPT, max_tokens=2)._outbox
    del engine, cycle
    dropped.set()
    thread.join(LIMIT_S)
    assert not thread.is_alive()
    with pytest.raises(ClosedError):
        outbox.result(LIMIT_S)


def test_a_request_whose_handle_was_dropped_still_finishes(make: NewEngine) -> None:
    engine = make(n_slots=1)
    engine.submit(PROMPT, max_tokens=30)
    engine.complete(OTHER, max_tokens=1)
    assert engine.statistics().n_requests == 2
    assert engine.statistics().completion_tokens == 31


# ---- clients that go away --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_leaving_a_stream_cancels_and_what_was_computed_is_resumed(kind: str, make: NewEngine) -> None:
    engine = make(kind)
    said: list[int] = []
    for chunk in engine.stream(PROMPT, max_tokens=ENDLESS):
        said += chunk.token_ids
        if len(said) == 3:
            break
    longer = joined(PROMPT, said, OTHER)
    reply = engine.complete(longer, max_tokens=2)
    assert engine.statistics().n_cancelled == 1
    assert reply.cache.matched_tokens >= len(PROMPT) + 2
    if kind == "full":
        assert reply.usage.cached_tokens >= len(PROMPT) + 2


def test_cancelling_says_so_keeps_the_text_and_is_repeatable(make: NewEngine) -> None:
    engine = make()
    handle = engine.submit(PROMPT, max_tokens=ENDLESS)
    wait_for_chunk(handle)
    handle.cancel()
    handle.cancel()
    reply = handle.result()
    handle.cancel()
    assert reply.finish_reason == "cancelled"
    assert 1 <= len(reply.token_ids) < ENDLESS
    assert reply.text == engine.model.detokenize(reply.token_ids)
    assert list(handle)[-1].finish_reason == "cancelled"
    assert engine.slots[reply.slot_id].n_tokens == len(PROMPT) + len(reply.token_ids) - 1
    again = engine.complete(joined(PROMPT, reply.token_ids, OTHER), max_tokens=1)
    assert again.usage.cached_tokens == len(PROMPT) + len(reply.token_ids) - 1


# ---- time ------------------------------------------------------------------------------------------------------


def pass_time(engine: Any, nth_step: int, seconds: float) -> None:
    """Let the scheduler's clock jump before the nth step from now."""
    jumped = [0.0]
    engine._state.clock = lambda: time.monotonic() + jumped[0]
    before_step(engine, nth_step, lambda: jumped.append(jumped.pop() + seconds))


@pytest.mark.parametrize("kind", KINDS)
def test_a_request_out_of_time_fails_and_its_retry_resumes(kind: str, make: NewEngine) -> None:
    engine = make(kind)
    ids = random_ids(3, 1000)
    pass_time(engine, 3, 1000.0)
    with pytest.raises(RequestTimeoutError, match="384 tokens prefilled, 0 generated") as caught:
        engine.complete(ids, max_tokens=4, timeout_s=500.0)
    assert isinstance(caught.value, TimeoutError)
    assert (caught.value.timeout_s, engine.statistics().n_failed) == (500.0, 1)
    retry = engine.complete(ids, max_tokens=4, timeout_s=float("inf"))
    assert retry.usage.cached_tokens == 384


def test_time_runs_out_while_generating_and_in_the_queue(make: NewEngine) -> None:
    engine = make(n_slots=1)
    pass_time(engine, 10, 1000.0)
    with held(engine):
        running = engine.submit(PROMPT, max_tokens=ENDLESS, timeout_s=500.0)
        queued = engine.submit(OTHER, max_tokens=4, timeout_s=400.0)
        patient = engine.submit(OTHER, max_tokens=4)
    with pytest.raises(RequestTimeoutError, match="100 tokens prefilled, 10 generated"):
        running.result()
    with pytest.raises(RequestTimeoutError, match="0 tokens prefilled, 0 generated"):
        queued.result()
    assert len(patient.result().token_ids) == 4
    assert sum(len(chunk.token_ids) for chunk in iter(queued._outbox.poll, None)) == 0


def test_waiting_less_than_it_takes_leaves_the_request_running(make: NewEngine) -> None:
    engine = make()
    with held(engine):
        handle = engine.submit(PROMPT, max_tokens=4)
        for timeout in (0, 0.001):
            with pytest.raises(ResultTimeoutError, match="still running"):
                handle.result(timeout=timeout)
        for timeout in (-1, float("nan")):
            with pytest.raises(InvalidRequestError, match="timeout"):
                handle.result(timeout=timeout)
        assert not handle.done
    assert len(handle.result(timeout=LIMIT_S).token_ids) == 4
    assert handle.result(timeout=0) is handle.result()
