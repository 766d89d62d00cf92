"""Eight threads doing everything at once to one engine; then the books must agree with the memory."""

from __future__ import annotations

import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pyllamacache.errors import CellsExhaustedError, PyLlamaCacheError, RequestTimeoutError, SlotBusyError
from tests.flow.law import check_numbers, joined, random_ids

KINDS = ["full", "sliding", "hybrid", "recurrent"]
N_THREADS, N_OPERATIONS, DEADLINE_S = 8, 150, 10.0
N_SLOTS, KV_TOKENS = 6, 1500
TRUNKS = [random_ids(seed, 200) for seed in range(5)]

EXPECTED = (SlotBusyError, CellsExhaustedError, RequestTimeoutError)
"""What a client may be told because of what others do."""


class Client:
    """One thread's operations, drawn from its seed."""

    def __init__(self, engine: Any, folder: Path, seed: int) -> None:
        self.engine = engine
        self.folder = folder
        self.draw = random.Random(seed)
        self.done: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self.error: BaseException | None = None

    def run(self, deadline: float) -> None:
        operations = [
            self.generate, self.generate, self.generate, self.stream, self.cancel, self.warm, self.time_out,
            self.save, self.restore, self.erase, self.look, self.is_wrong,
        ]  # fmt: skip
        try:
            for _ in range(N_OPERATIONS):
                if time.monotonic() > deadline:
                    return
                operation = self.draw.choice(operations)
                try:
                    operation()
                    self.done[operation.__name__] += 1
                except EXPECTED as error:
                    self.refused[type(error).__name__] += 1
        except BaseException as error:  # noqa: BLE001  # shown by the main thread
            self.error = error

    # -- operations --

    def prompt(self) -> Any:
        trunk = self.draw.choice(TRUNKS)
        return joined(trunk[: self.draw.randint(1, 200)], random_ids(self.draw.randint(0, 9), self.draw.randint(1, 40)))

    def options(self) -> dict[str, Any]:
        options: dict[str, Any] = {
            "namespace": self.draw.choice(["", "", "a"]),
            "store": self.draw.random() < 0.8,
            "cache_prompt": self.draw.random() < 0.9,
        }
        if self.draw.random() < 0.3:
            options["slot"] = self.draw.randrange(N_SLOTS)
        return options

    def sampling(self) -> dict[str, Any]:
        return self.draw.choice(
            [
                {},
                {"temperature": 1.0, "seed": 1, "top_k": 20, "repeat_penalty": 1.1},
                {"grammar": 'root ::= [a-f]+ "." root?'},
                {"stop": ["the", "e "], "logprobs": True, "top_logprobs": 3},
                {"return_logits": True, "min_tokens": 1},
            ]
        )

    def generate(self) -> None:
        ids = self.prompt()
        n = self.draw.randint(0, 30)
        sampling = {} if n == 0 else self.sampling()
        reply = self.engine.complete(ids, max_tokens=n, **self.options(), **sampling)
        check_numbers(ids, reply)
        assert len(reply.token_ids) <= n

    def stream(self) -> None:
        said = 0
        for chunk in self.engine.stream(self.prompt(), max_tokens=40, **self.options(), **self.sampling()):
            said += len(chunk.token_ids)
            if self.draw.random() < 0.05:
                break

    def cancel(self) -> None:
        handle = self.engine.submit(self.prompt(), max_tokens=200, **self.options())
        for _ in range(self.draw.randint(0, 200)):
            if handle.done:
                break
        handle.cancel()
        assert handle.result().finish_reason in ("cancelled", "length")

    def warm(self) -> None:
        self.engine.warm(self.prompt(), **self.options())

    def time_out(self) -> None:
        self.engine.complete(self.prompt(), max_tokens=200, timeout_s=self.draw.choice([0.001, 0.05]))

    def save(self) -> None:
        self.engine.slots[self.draw.randrange(N_SLOTS)].save(self.folder / str(self.draw.randrange(6)))

    def restore(self) -> None:
        path = self.folder / str(self.draw.randrange(6))
        if path.exists():
            self.engine.slots[self.draw.randrange(N_SLOTS)].restore(path)

    def erase(self) -> None:
        self.engine.slots[self.draw.randrange(N_SLOTS)].erase()

    def look(self) -> None:
        slot = self.engine.slots[self.draw.randrange(N_SLOTS)]
        assert slot.state in ("idle", "busy")
        assert len(slot.token_ids) <= self.engine.n_ctx
        statistics = self.engine.statistics()
        assert statistics.cached_tokens + statistics.prefilled_tokens == statistics.prompt_tokens
        assert 0 <= statistics.kv_tokens_used <= KV_TOKENS

    def is_wrong(self) -> None:
        with pytest.raises(PyLlamaCacheError):
            self.engine.complete([10**6])


def check_books(engine: Any) -> None:
    """Slots, ledger and memory say the same. On the scheduler's thread."""
    state = engine._state
    assert not state.running
    assert not state.queue
    for slot in state.slots:
        assert not slot.is_busy
        assert state.backend.length(slot.slot_id) == len(slot.tokens)
        if state.counts_cells:
            assert state.ledger.length(slot.slot_id) == len(slot.tokens)
    assert state.ledger.used() <= state.traits.kv_tokens


@pytest.mark.stress
@pytest.mark.timeout(300)
@pytest.mark.parametrize("exact", [False, True], ids=["default", "exact"])
@pytest.mark.parametrize("kind", KINDS)
def test_eight_threads_doing_everything_at_once(
    kind: str, exact: bool, new_engine: Callable[..., Any], tmp_path: Path
) -> None:
    seed = int(os.environ.get("STRESS_SEED") or random.randrange(2**32))
    print(f"STRESS_SEED={seed}")  # noqa: T201  # pytest shows it when the test fails
    options: dict[str, Any] = {"exact": True} if exact else {"kv_tokens": KV_TOKENS}
    engine = new_engine(kind, n_ctx=500, n_slots=N_SLOTS, n_threads=1, flash_attention="off", **options)
    probes = [joined(trunk, [7]) for trunk in TRUNKS[:2]]
    expected = [engine.complete(ids, max_tokens=8, cache_prompt=False).token_ids for ids in probes]
    before = set(threading.enumerate())
    deadline = time.monotonic() + DEADLINE_S
    clients = [Client(engine, tmp_path, seed + index) for index in range(N_THREADS)]
    threads = [threading.Thread(target=client.run, args=(deadline,)) for client in clients]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for client in clients:
        if client.error is not None:
            raise client.error
    done = sum((client.done for client in clients), Counter())
    print(done, sum((client.refused for client in clients), Counter()))  # noqa: T201
    assert sum(done.values()) > N_THREADS * 10
    for ids, tokens in zip(probes, expected, strict=True):
        reply = engine.complete(ids, max_tokens=8)
        check_numbers(ids, reply)
        assert reply.token_ids == tokens
    engine._scheduler.inbox.call(lambda: check_books(engine))
    assert engine.statistics().n_running == engine.statistics().n_queued == 0
    own = [each for each in threading.enumerate() if each not in before]
    assert not [each for each in own if not each.name.startswith("pyllamacache")]
    engine.close()
    engine_threads = {each for each in {*before, *own} if each.name.startswith("pyllamacache")}
    assert engine_threads
    assert not [each for each in engine_threads if each.is_alive()]
