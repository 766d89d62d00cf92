"""The same requests from asyncio: answers, chunks, cancelled tasks, loops that are left early."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from typing import Any

import pytest

from pyllamacache.errors import ClosedError, InvalidRequestError, UnknownOptionError
from tests.flow.hold import before_step, held
from tests.flow.law import random_ids

PROMPT = random_ids(1, 100)
LONG = random_ids(2, 1000)
ENDLESS = 7000

NewEngine = Callable[..., Any]


@pytest.fixture
def make(new_engine: NewEngine) -> NewEngine:
    return functools.partial(new_engine, n_threads=1, n_ctx=8192, kv_tokens=16384)


def test_an_awaited_answer_is_the_one_a_thread_gets(make: NewEngine) -> None:
    engine = make()
    expected = engine.complete(PROMPT, max_tokens=12)

    async def main() -> list[Any]:
        return await asyncio.gather(*(engine.acomplete(PROMPT, max_tokens=12) for _ in range(7)))

    assert {(reply.token_ids, reply.text) for reply in asyncio.run(main())} == {(expected.token_ids, expected.text)}


def test_chunks_come_one_by_one_and_another_task_runs_between_them(make: NewEngine) -> None:
    engine = make()
    expected = engine.complete(PROMPT, max_tokens=40)

    async def read() -> list[Any]:
        return [chunk async for chunk in engine.astream(PROMPT, max_tokens=40)]

    async def main() -> list[list[Any]]:
        return await asyncio.gather(*(read() for _ in range(3)))

    for chunks in asyncio.run(main()):
        assert "".join(chunk.text for chunk in chunks) == expected.text
        assert tuple(token for chunk in chunks for token in chunk.token_ids) == expected.token_ids
        assert chunks[-1].finish_reason == "length"


@pytest.mark.parametrize("kind", ["full", "sliding", "hybrid", "recurrent"])
def test_a_cancelled_task_cancels_its_request_and_what_was_computed_is_resumed(kind: str, make: NewEngine) -> None:
    engine = make(kind)

    async def main() -> None:
        loop = asyncio.get_running_loop()
        with held(engine):
            task = asyncio.create_task(engine.acomplete(LONG, max_tokens=ENDLESS))
            await asyncio.sleep(0)  # the task runs up to its first wait
            cancelled = asyncio.Event()
            task.add_done_callback(lambda _: cancelled.set())
            before_step(engine, 3, lambda: loop.call_soon_threadsafe(task.cancel))
        with pytest.raises(asyncio.CancelledError):
            await task
        await cancelled.wait()

    asyncio.run(main())
    again = engine.complete(LONG, max_tokens=1, slot=0)
    assert engine.statistics().n_cancelled == 1
    assert again.usage.cached_tokens >= 3 * 128 or again.cache.reason.value == "not_rewindable"


def test_a_time_limit_of_asyncio_cancels_the_request(make: NewEngine) -> None:
    engine = make(n_slots=1)

    async def main() -> None:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(engine.acomplete(PROMPT, max_tokens=ENDLESS), timeout=0.01)
        assert len((await engine.acomplete(PROMPT, max_tokens=3)).token_ids) == 3

    asyncio.run(main())
    assert engine.statistics().n_cancelled == 1


@pytest.mark.parametrize("closes", [False, True], ids=["break", "aclose"])
def test_leaving_a_stream_cancels_its_request(closes: bool, make: NewEngine) -> None:
    engine = make(n_slots=1)

    async def main() -> int:
        stream = engine.astream(PROMPT, max_tokens=ENDLESS)
        async for chunk in stream:
            assert len(chunk.token_ids) == 1
            break
        if closes:
            await stream.aclose()
        del stream
        reply = await engine.acomplete(PROMPT, max_tokens=2)
        return int(reply.usage.cached_tokens)

    assert asyncio.run(main()) == 99
    assert engine.statistics().n_cancelled == 1


def test_a_stream_that_was_never_read_ends_with_its_event_loop(make: NewEngine) -> None:
    engine = make(n_slots=1)

    async def main() -> None:
        stream = engine.astream(PROMPT, max_tokens=ENDLESS)
        await anext(stream)
        asyncio.get_running_loop().call_soon(lambda: stream)  # something still refers to it

    asyncio.run(main())
    assert len(engine.complete(PROMPT, max_tokens=2).token_ids) == 2
    assert engine.statistics().n_cancelled == 1


def test_a_handle_can_be_awaited_and_iterated(make: NewEngine) -> None:
    engine = make()

    async def main() -> tuple[Any, list[Any]]:
        handle = engine.submit(PROMPT, max_tokens=10)
        chunks = [chunk async for chunk in handle]
        return await handle.wait(), chunks

    reply, chunks = asyncio.run(main())
    assert tuple(token for chunk in chunks for token in chunk.token_ids) == reply.token_ids
    assert reply.finish_reason == "length"


def test_closing_the_engine_wakes_the_tasks(make: NewEngine) -> None:
    engine = make(n_slots=1)

    async def read() -> None:
        async for _ in engine.astream(PROMPT, max_tokens=ENDLESS):
            pass

    async def main() -> list[Any]:
        tasks = [asyncio.create_task(engine.acomplete(PROMPT, max_tokens=ENDLESS)) for _ in range(2)]
        tasks.append(asyncio.create_task(read()))
        await asyncio.sleep(0)
        await asyncio.to_thread(engine.close)
        return await asyncio.gather(*tasks, return_exceptions=True)

    assert [type(error) for error in asyncio.run(main())] == [ClosedError] * 3


def test_a_bad_request_raises_where_it_is_awaited(make: NewEngine) -> None:
    engine = make()

    async def main() -> None:
        with pytest.raises(UnknownOptionError, match="max_tokens"):
            await engine.acomplete(PROMPT, max_token=3)
        with pytest.raises(InvalidRequestError, match="prompt"):
            async for _ in engine.astream([]):
                pass

    asyncio.run(main())
