"""The border between user threads and the scheduler's."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from pyllamacache.errors import ClosedError, InternalError, NativeError, ResultTimeoutError, SlotBusyError
from pyllamacache.request import CacheReport, Chunk, Completion, Reason, SlotId, Source, Timings, Usage
from pyllamacache.scheduler.inbox import Call, Inbox, Outbox, Submission
from tests.fakes import make_request
from tests.fakes.engine import WAIT_S

DONE = Completion(
    text="",
    token_ids=(),
    finish_reason="length",
    usage=Usage(0, 0, 0, 0),
    cache=CacheReport(0, 0, 0, Source.NONE, Reason.COLD, 0),
    timings=Timings(0.0, 0.0, 0.0, 0.0, 0.0),
    slot_id=SlotId(0),
    prompt_token_ids=np.zeros(0, dtype=np.int32),
)


def outbox(*, keeps_chunks: bool = True) -> Outbox:
    return Outbox(keeps_chunks=keeps_chunks)


def submission(n: int = 0) -> Submission:
    return Submission(make_request([1 + n]), outbox(), 0.0)


def n_frames(error: BaseException) -> int:
    n, frame = 0, error.__traceback__
    while frame is not None:
        n, frame = n + 1, frame.tb_next
    return n


# ---- a request's way back --------------------------------------------------------------------------------------


def test_chunks_come_in_order_and_then_nothing() -> None:
    box = outbox()
    for text in "abc":
        box.push(Chunk(text))
    box.finish(DONE)
    assert [chunk.text for chunk in iter(box.next_chunk, None)] == ["a", "b", "c"]
    assert box.next_chunk() is None
    assert box.result() is DONE


def test_an_error_comes_after_the_chunks_before_it() -> None:
    box = outbox()
    box.push(Chunk("a"))
    box.fail(NativeError("call", -1))
    assert box.next_chunk() == Chunk("a")
    for _ in range(2):
        with pytest.raises(NativeError):
            box.next_chunk()
        with pytest.raises(NativeError):
            box.result()


def test_putting_in_never_waits_for_a_reader() -> None:
    box = outbox()
    for _ in range(10_000):
        box.push(Chunk("x"))
    assert box.poll() == Chunk("x")


def test_chunks_nobody_wants_are_not_kept() -> None:
    box = outbox(keeps_chunks=False)
    box.push(Chunk("x"))
    assert box.poll() is None


def test_a_parked_reader_is_woken_by_each_chunk_and_by_the_end() -> None:
    box, read = outbox(), threading.Semaphore(0)
    texts = []

    def reader() -> None:
        for chunk in iter(box.next_chunk, None):
            texts.append(chunk.text)
            read.release()

    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(reader)
        for text in "abc":
            box.push(Chunk(text))
            assert read.acquire(timeout=WAIT_S)
        box.finish(DONE)
        future.result(WAIT_S)
    assert texts == ["a", "b", "c"]


def test_only_the_first_end_counts() -> None:
    box = outbox()
    box.finish(DONE)
    box.fail(ClosedError("it"))
    assert box.result() is DONE


def test_waiting_gives_up_after_the_timeout() -> None:
    with pytest.raises(ResultTimeoutError):
        outbox().result(0)


@pytest.mark.parametrize("timeout_s", [float("inf"), 1e300, 1e10])
def test_a_timeout_longer_than_the_platform_can_wait_is_no_limit(timeout_s: float) -> None:
    """It was an OverflowError."""
    box = outbox()
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(box.result, timeout_s)
        box.finish(DONE)
        assert future.result(WAIT_S) is DONE


def test_every_listener_hears_of_chunks_and_of_the_end_until_it_leaves() -> None:
    box = outbox()
    heard: list[str] = []
    first, second = (lambda: heard.append("first")), (lambda: heard.append("second"))
    box.listen(first)
    box.listen(second)
    box.push(Chunk("x"))
    box.unlisten(first)
    box.finish(DONE)
    box.fail(ClosedError("it"))
    assert heard == ["first", "second", "second"]


def test_one_error_raised_many_times_does_not_grow() -> None:
    """Every raise hung its frames on the one object, for as long as anybody asked."""
    box, inbox = outbox(), Inbox("it")
    box.fail(ClosedError("it"))
    inbox.close(ClosedError("it"))
    for ask in (box.result, lambda: inbox.submit(submission()), box.next_chunk):
        depths = []
        for _ in range(5):
            with pytest.raises(ClosedError) as caught:
                ask()
            depths.append(n_frames(caught.value))
        assert len(set(depths)) == 1


# ---- into the loop ---------------------------------------------------------------------------------------------


def test_items_come_out_in_the_order_they_came() -> None:
    inbox = Inbox("it")
    items = [submission(n) for n in range(3)]
    for item in items:
        inbox.submit(item)
    assert inbox.has_items
    assert list(inbox.take(wait=True)) == items
    assert not inbox.has_items
    assert list(inbox.take(wait=False)) == []


def test_what_was_not_taken_stays() -> None:
    inbox = Inbox("it")
    items = [submission(n) for n in range(3)]
    for item in items:
        inbox.submit(item)
    assert next(iter(inbox.take(wait=True))) is items[0]
    assert inbox.close(ClosedError("it")) == items[1:]


def test_a_waiting_loop_is_woken_by_an_item() -> None:
    inbox, item = Inbox("it"), submission()
    with ThreadPoolExecutor(1) as pool:
        taken = pool.submit(lambda: list(inbox.take(wait=True)))
        inbox.submit(item)
        assert taken.result(WAIT_S) == [item]


def test_a_waiting_loop_is_woken_by_stop() -> None:
    inbox = Inbox("it")
    with ThreadPoolExecutor(1) as pool:
        taken = pool.submit(lambda: list(inbox.take(wait=True)))
        inbox.stop()
        assert taken.result(WAIT_S) == []
    assert inbox.is_stopping
    assert list(inbox.take(wait=True)) == []


def test_after_stop_nothing_is_accepted() -> None:
    inbox = Inbox("engine of m.gguf")
    inbox.stop()
    inbox.stop()
    with pytest.raises(ClosedError, match=r"engine of m\.gguf"):
        inbox.submit(submission())
    with pytest.raises(ClosedError):
        inbox.call(lambda: 1)


def test_after_a_failure_everything_is_refused_with_it() -> None:
    inbox, error = Inbox("it"), InternalError("broken")
    item = submission()
    inbox.submit(item)
    assert inbox.close(error) == [item]
    inbox.stop()
    with pytest.raises(InternalError, match="broken"):
        inbox.submit(submission())


def test_every_item_of_many_threads_is_taken_once_and_in_its_threads_order() -> None:
    inbox, n_threads, n_items = Inbox("it"), 8, 200
    sent = [[submission() for _ in range(n_items)] for _ in range(n_threads)]

    def send(items: list[Submission]) -> None:
        for item in items:
            inbox.submit(item)

    with ThreadPoolExecutor(n_threads) as pool:
        futures = [pool.submit(send, items) for items in sent]
        taken: list[Submission | Call] = []
        while len(taken) < n_threads * n_items:
            taken += inbox.take(wait=True)
        for future in futures:
            future.result(WAIT_S)
    place = {id(item): index for index, item in enumerate(taken)}
    assert len(place) == n_threads * n_items
    for items in sent:
        places = [place[id(item)] for item in items]
        assert places == sorted(places)


# ---- calls -----------------------------------------------------------------------------------------------------


def called(function: Callable[[], object]) -> Call:
    call = Call(function)
    try:
        call.run()
    except RuntimeError:
        assert call._error is not None
    return call


def test_a_call_brings_its_value_back() -> None:
    assert called(lambda: 42).wait() == 42


def test_an_error_of_the_tree_goes_to_the_caller_only() -> None:
    def busy() -> None:
        raise SlotBusyError(0, "erase")

    with pytest.raises(SlotBusyError):
        called(busy).wait()


def test_any_other_error_goes_to_the_caller_and_to_the_loop() -> None:
    def broken() -> None:
        raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug"):
        Call(broken).run()
    with pytest.raises(RuntimeError, match="a bug"):
        called(broken).wait()


def test_a_call_that_never_ran_fails_with_why() -> None:
    call = Call(lambda: 42)
    call.fail(ClosedError("it"))
    with pytest.raises(ClosedError):
        call.wait()
