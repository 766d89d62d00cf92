"""The host pool: the limit, what is used again, the spare, and how it all ends. The worker is held by events."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest

from pyllamacache.errors import InternalError
from pyllamacache.store import host
from pyllamacache.store.host import Block, HostPool, region_bytes
from pyllamacache.store.region import Region

MIB = 1 << 20
STATE = 3 * MIB
LARGE = 64 * MIB
STATM = Path("/proc/self/statm")
needs_statm = pytest.mark.skipif(not STATM.exists(), reason="resident memory is read from /proc")


@pytest.fixture
def new_pool() -> Iterator[Callable[[int], HostPool]]:
    made: list[HostPool] = []

    def make(limit_bytes: int) -> HostPool:
        made.append(HostPool(limit_bytes))
        return made[-1]

    yield make
    for pool in made:
        pool.close()


@pytest.fixture
def pool(new_pool: Callable[[int], HostPool]) -> HostPool:
    return new_pool(4 * STATE)


def take(pool: HostPool, n_bytes: int) -> Block:
    block = pool.allocate(n_bytes)
    assert block is not None
    assert len(block.data) == n_bytes
    return block


def address(block: Block) -> int:
    found: int = block.data.__array_interface__["data"][0]
    return found


def process_bytes() -> int:
    return int(STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class HeldWorker:
    """Stops the worker inside each piece that it touches until `go`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.inside = threading.Event()
        self._gate = threading.Event()
        self.n_pieces = 0
        touch = Region.touch

        def held(region: Region, n_bytes: int) -> None:
            self.n_pieces += 1
            self.inside.set()
            assert self._gate.wait(60)
            touch(region, n_bytes)

        monkeypatch.setattr(Region, "touch", held)

    def go(self) -> None:
        self._gate.set()


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> HeldWorker:
    return HeldWorker(monkeypatch)


class Caller(threading.Thread):
    """Another thread that calls one function; `result` waits for what it returned."""

    def __init__(self, call: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self._call = call
        self._returned: list[Any] = []
        self.start()

    def run(self) -> None:
        self._returned.append(self._call())

    def result(self) -> Any:
        self.join(60)
        return self._returned[0]


def wait_for_claim(pool: HostPool) -> None:
    """Until another thread waits for the spare. It says so before it gives the lock away."""
    while True:
        with pool._changed:
            if pool._claims:
                return


class TestLimit:
    def test_blocks_are_handed_out_up_to_the_limit(self, pool: HostPool) -> None:
        blocks = [take(pool, STATE) for _ in range(4)]
        assert pool.used_bytes == pool.resident_bytes == 4 * STATE
        assert pool.allocate(1) is None
        blocks[0].release()
        assert take(pool, STATE)

    @pytest.mark.parametrize("limit", [0, 1, STATE - 1])
    def test_what_never_fits_is_refused(self, new_pool: Callable[[int], HostPool], limit: int) -> None:
        pool = new_pool(limit)
        assert pool.allocate(STATE) is None
        assert pool.resident_bytes == 0

    def test_reservations_count(self, pool: HostPool) -> None:
        assert pool.reserve(2 * STATE)
        assert pool.used_bytes == 2 * STATE
        blocks = [take(pool, STATE), take(pool, STATE)]
        assert not pool.reserve(1)
        assert pool.allocate(STATE) is None
        pool.unreserve(2 * STATE)
        assert pool.used_bytes == 2 * STATE
        assert len(blocks) == 2

    def test_a_reservation_drops_idle_blocks(self, pool: HostPool) -> None:
        block = take(pool, STATE)
        block.release()
        assert pool.reserve(4 * STATE)
        assert (pool.idle_bytes, pool.resident_bytes) == (0, 4 * STATE)

    def test_giving_back_more_than_was_reserved_is_our_bug(self, pool: HostPool) -> None:
        assert pool.reserve(10)
        with pytest.raises(InternalError):
            pool.unreserve(11)
        assert pool.used_bytes == 10

    def test_tiny_states_cost_little_more_than_they_are(self, new_pool: Callable[[int], HostPool]) -> None:
        pool = new_pool(32 * 2200)
        blocks = [take(pool, 2000) for _ in range(32)]
        assert pool.resident_bytes == sum(block.size_bytes for block in blocks)

    def test_refused_memory_is_no_error_and_counts_nothing(
        self, pool: HostPool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse(*arguments: Any) -> NoReturn:
            raise MemoryError

        with monkeypatch.context() as patched:
            patched.setattr(host, "map_region", refuse)
            assert pool.allocate(STATE) is None
            pool.expect(STATE)
            pool.wait_ready()
        assert pool.resident_bytes == 0
        assert take(pool, STATE)


class TestRecycling:
    def test_a_released_block_is_the_next_one(self, pool: HostPool) -> None:
        block = take(pool, STATE)
        there = address(block)
        block.release()
        assert (pool.used_bytes, pool.idle_bytes) == (0, STATE)
        assert address(take(pool, STATE - 5000)) == there
        assert pool.idle_bytes == 0

    def test_the_smallest_that_fits_is_taken(self, new_pool: Callable[[int], HostPool]) -> None:
        pool = new_pool(100 * MIB)
        blocks = [take(pool, n * MIB) for n in (12, 10, 11)]
        places = [address(block) for block in blocks]
        for block in blocks:
            block.release()
        assert address(take(pool, 10 * MIB - 1)) == places[1]
        assert address(take(pool, 10 * MIB - 1)) == places[2]
        assert pool.idle_bytes == 12 * MIB

    @pytest.mark.parametrize(("n_bytes", "is_taken"), [(8 * MIB, True), (8 * MIB - 1, False), (10 * MIB + 1, False)])
    def test_a_block_at_most_a_quarter_larger_fits(
        self, new_pool: Callable[[int], HostPool], n_bytes: int, is_taken: bool
    ) -> None:
        pool = new_pool(100 * MIB)
        take(pool, 10 * MIB).release()
        block = take(pool, n_bytes)
        assert (pool.idle_bytes == 0) is is_taken
        assert block.size_bytes == (10 * MIB if is_taken else region_bytes(n_bytes))

    def test_idle_blocks_make_way_only_if_that_helps(self, new_pool: Callable[[int], HostPool]) -> None:
        pool = new_pool(10 * MIB)
        kept = take(pool, 5 * MIB)
        take(pool, 3 * MIB).release()
        assert pool.allocate(6 * MIB) is None
        assert pool.idle_bytes == 3 * MIB
        assert take(pool, 5 * MIB)
        assert pool.idle_bytes == 0
        assert kept.size_bytes == 5 * MIB

    def test_release_is_repeatable_and_the_end(self, pool: HostPool) -> None:
        block = take(pool, STATE)
        block.release()
        other = take(pool, STATE)
        block.release()
        assert pool.used_bytes == STATE
        assert len(other.data) == STATE
        with pytest.raises(InternalError):
            _ = block.data

    def test_a_forgotten_block_comes_free(self, pool: HostPool) -> None:
        block = take(pool, STATE)
        view = block.data[:10]
        del block
        gc.collect()
        assert pool.used_bytes == STATE  # the view holds it
        del view
        assert pool.resident_bytes == 0

    def test_a_view_that_outlives_its_block_makes_less_room_not_more(self, pool: HostPool) -> None:
        blocks = [take(pool, STATE) for _ in range(4)]
        view = blocks[0].data
        for block in blocks[:2]:
            block.release()
        assert pool.allocate(2 * STATE) is None
        assert pool.resident_bytes == 3 * STATE
        del view
        assert pool.resident_bytes == 2 * STATE
        assert take(pool, 2 * STATE)

    def test_blocks_in_a_cycle_are_collected(self, pool: HostPool) -> None:
        holder: dict[str, Any] = {"block": take(pool, STATE), "view": None}
        holder["view"] = holder["block"].data
        holder["self"] = holder
        del holder
        gc.collect()
        assert pool.resident_bytes == 0


class TestSetLimit:
    def test_lowering_drops_what_is_idle_and_says_what_is_over(self, pool: HostPool) -> None:
        blocks = [take(pool, STATE) for _ in range(3)]
        blocks[0].release()
        assert pool.set_limit(2 * STATE) == 0
        assert (pool.resident_bytes, pool.idle_bytes) == (2 * STATE, 0)
        assert pool.set_limit(STATE // 2) == 2 * STATE - STATE // 2
        assert pool.limit_bytes == STATE // 2
        blocks[1].release()
        assert pool.resident_bytes == STATE
        blocks[2].data[:] = 1  # still there

    def test_raising_keeps_what_is_idle(self, pool: HostPool) -> None:
        take(pool, STATE).release()
        assert pool.set_limit(5 * STATE) == 0
        assert pool.idle_bytes == STATE

    @needs_statm
    def test_memory_returns_to_the_system(self, new_pool: Callable[[int], HostPool]) -> None:
        pool = new_pool(4 * LARGE)
        blocks = [take(pool, LARGE) for _ in range(2)]
        for block in blocks:
            block.data[:] = 1
            block.release()
        pool.expect(2 * LARGE)
        pool.wait_ready()
        before = process_bytes()
        assert pool.resident_bytes == 4 * LARGE
        assert pool.set_limit(4 * LARGE - 1) == 0
        assert before - process_bytes() > 3.9 * LARGE

    @needs_statm
    def test_blocks_released_while_over_the_limit_return_at_once(self, new_pool: Callable[[int], HostPool]) -> None:
        pool = new_pool(LARGE)
        block = take(pool, LARGE)
        block.data[:] = 1
        before = process_bytes()
        assert pool.set_limit(MIB) == LARGE - MIB
        block.release()
        assert before - process_bytes() > 0.9 * LARGE


class TestSpare:
    @needs_statm
    def test_what_is_expected_is_touched_by_the_worker(self, new_pool: Callable[[int], HostPool]) -> None:
        pool = new_pool(2 * LARGE)
        before = process_bytes()
        pool.expect(LARGE)
        pool.wait_ready()
        assert process_bytes() - before > 0.9 * LARGE
        assert (pool.used_bytes, pool.idle_bytes) == (0, LARGE)
        block = take(pool, LARGE)
        assert (pool.used_bytes, pool.idle_bytes) == (LARGE, 0)
        touched = process_bytes()
        block.data[:] = 1
        assert process_bytes() - touched < 0.1 * LARGE

    def test_there_is_one(self, pool: HostPool) -> None:
        for _ in range(2):
            pool.expect(STATE)
            pool.wait_ready()
        assert pool.resident_bytes == STATE
        pool.expect(2 * STATE)
        pool.wait_ready()
        assert pool.resident_bytes == 2 * STATE

    def test_none_is_made_where_an_idle_block_fits(self, pool: HostPool) -> None:
        take(pool, STATE).release()
        pool.expect(STATE)
        pool.wait_ready()
        assert pool.resident_bytes == STATE

    def test_none_is_made_without_room(self, pool: HostPool) -> None:
        blocks = [take(pool, STATE) for _ in range(4)]
        pool.expect(STATE)
        pool.wait_ready()
        assert pool.resident_bytes == 4 * STATE
        blocks[0].release()
        assert pool.idle_bytes == STATE

    def test_an_idle_block_is_taken_before_the_spare(self, pool: HostPool) -> None:
        block = take(pool, STATE)
        there = address(block)
        pool.expect(STATE)
        pool.wait_ready()
        block.release()
        assert address(take(pool, STATE)) == there

    def test_it_makes_way_for_another_size(self, pool: HostPool) -> None:
        pool.expect(STATE)
        pool.wait_ready()
        assert take(pool, 4 * STATE)
        assert pool.idle_bytes == 0

    def test_it_makes_way_for_a_reservation(self, pool: HostPool) -> None:
        pool.expect(STATE)
        pool.wait_ready()
        assert pool.reserve(4 * STATE)
        assert pool.idle_bytes == 0

    def test_asking_for_one_waits_for_nothing(self, pool: HostPool, worker: HeldWorker) -> None:
        pool.expect(STATE)
        assert worker.inside.wait(60)
        pool.expect(2 * STATE)
        assert take(pool, 2 * STATE)
        worker.go()
        pool.wait_ready()

    def test_an_untouched_spare_is_taken_after_one_piece(
        self, new_pool: Callable[[int], HostPool], worker: HeldWorker
    ) -> None:
        pool = new_pool(LARGE)
        pool.expect(LARGE)
        assert worker.inside.wait(60)
        taken = Caller(lambda: pool.allocate(LARGE))
        wait_for_claim(pool)
        worker.go()
        block = taken.result()
        assert worker.n_pieces == 1
        block.data[:] = 9
        pool.wait_ready()
        assert np.all(block.data == 9)

    @pytest.mark.parametrize(
        "call",
        [
            lambda pool: pool.reserve(LARGE),
            lambda pool: pool.set_limit(0) == 0,
            lambda pool: pool.close() is None,
            lambda pool: pool.allocate(LARGE // 2) is not None,
        ],
        ids=["reserve", "set_limit", "close", "allocate"],
    )
    def test_a_spare_being_touched_is_dropped_after_the_piece(
        self, new_pool: Callable[[int], HostPool], worker: HeldWorker, call: Callable[[HostPool], bool]
    ) -> None:
        pool = new_pool(LARGE)
        pool.expect(LARGE)
        assert worker.inside.wait(60)
        done = Caller(lambda: call(pool))
        wait_for_claim(pool)
        worker.go()
        assert done.result() is True
        assert worker.n_pieces == 1
        assert pool.idle_bytes == 0

    def test_expecting_it_again_goes_on_touching(self, new_pool: Callable[[int], HostPool], worker: HeldWorker) -> None:
        pool = new_pool(2 * LARGE)
        pool.expect(LARGE)
        assert worker.inside.wait(60)
        refused = Caller(lambda: pool.allocate(2 * LARGE))
        wait_for_claim(pool)
        worker.go()
        refused.result().release()
        pool.set_limit(2 * LARGE - 1)
        pool.expect(LARGE)
        pool.wait_ready()
        assert pool.idle_bytes == LARGE
        assert worker.n_pieces == 1 + LARGE // host._TOUCH_BYTES

    def test_without_a_thread_there_is_none(self, pool: HostPool, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(thread: threading.Thread) -> NoReturn:
            raise RuntimeError("can't start new thread")

        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", refuse)
            pool.expect(STATE)
            pool.wait_ready()
        assert pool.resident_bytes == 0
        pool.expect(STATE)
        pool.wait_ready()
        assert pool.idle_bytes == STATE


class TestEnd:
    def test_close_is_repeatable_and_ends_the_worker(self, pool: HostPool) -> None:
        pool.expect(STATE)
        pool.wait_ready()
        thread = pool._worker
        assert thread is not None
        block = take(pool, 2 * STATE)
        for _ in range(2):
            pool.close()
        assert not thread.is_alive()
        assert (pool.used_bytes, pool.idle_bytes) == (2 * STATE, 0)
        block.data[:] = 1
        block.release()
        assert pool.resident_bytes == 0

    def test_a_closed_pool_hands_out_nothing(self, pool: HostPool) -> None:
        pool.close()
        pool.expect(STATE)
        pool.wait_ready()
        assert pool.allocate(1) is None
        assert not pool.reserve(1)

    def test_the_worker_does_not_keep_the_pool(self) -> None:
        pool = HostPool(4 * STATE)
        pool.expect(STATE)
        pool.wait_ready()
        thread, gone = pool._worker, weakref.ref(pool)
        assert thread is not None
        del pool
        thread.join(60)
        gc.collect()
        assert gone() is None
        assert not thread.is_alive()

    def test_a_forked_child_has_a_closed_pool(self, pool: HostPool, worker: HeldWorker) -> None:
        block = take(pool, STATE)
        block.data[:] = 3
        pool.expect(2 * STATE)
        assert worker.inside.wait(60)
        with pool._changed, warnings.catch_warnings():  # as if another thread held it
            warnings.simplefilter("ignore", DeprecationWarning)
            child = os.fork()
            if child == 0:
                status = 1
                try:
                    status = 0 if self.is_dead(pool, block) else 2
                finally:
                    os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        worker.go()
        pool.wait_ready()
        assert pool.idle_bytes == 2 * STATE
        assert np.all(block.data == 3)

    @staticmethod
    def is_dead(pool: HostPool, block: Block) -> bool:
        is_whole = bool(np.all(block.data == 3))
        pool.expect(STATE)
        pool.wait_ready()
        refuses = pool.allocate(STATE) is None and not pool.reserve(1)
        block.release()
        pool.set_limit(0)
        pool.close()
        return is_whole and refuses and pool.idle_bytes == 0

    @pytest.mark.parametrize("closing", ["", "pool.close()", "del pool"])
    def test_a_program_may_end_while_the_worker_works(self, closing: str) -> None:
        program = (
            "from pyllamacache.store.host import HostPool\n"
            "pool = HostPool(1 << 30)\n"
            "pool.expect(256 << 20)\n"
            f"{closing}\n"
        )
        here = Path(__file__).resolve().parent
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, cwd=here, check=False
        )
        assert (done.returncode, done.stderr) == (0, "")
