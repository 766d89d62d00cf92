"""A client that sends random requests side by side to an engine whose every budget is tiny, and lets things fail."""

from __future__ import annotations

import errno
import functools
import random
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from pyllamacache import CacheConfig
from pyllamacache.errors import NativeError
from pyllamacache.prefix.index import PrefixIndex
from pyllamacache.prefix.match import common_prefix_len
from pyllamacache.store.disk import DiskStore
from tests.flow.hold import before_step, held
from tests.flow.law import Ids, Pair, joined, random_ids
from tests.flow.tiers import always_load, audit, bytes_on_disk, store_behind
from tests.native.faults import damage, on_scheduler

SPAN_TOKENS = 32
MAX_TOKENS, N_CTX, KV_TOKENS = 280, 320, 512
HOST_BYTES, DISK_BYTES = 1_500_000, 900_000
BACKEND_CALLS = ("save_span", "append_span", "begin_capture", "resume", "share_span")


def short_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spans of 32 tokens instead of 256, so that short prompts have many."""
    monkeypatch.setattr(PrefixIndex.__init__, "__kwdefaults__", {"span_tokens": SPAN_TOKENS})


class Faults:
    """Lets steps of the disk and calls of the backend fail, each with a chance of its own."""

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)
        self.disk_chance = 0.0
        self.call_chance = 0.0
        self.happened: Counter[str] = Counter()

    def before_disk_step(self, step: str) -> None:
        """See `store.disk_files.BeforeStep`. Called by several threads."""
        if self._draw.random() < self.disk_chance:
            self.happened[step.partition(".")[0]] += 1
            if step.startswith("index."):
                raise sqlite3.OperationalError("database is locked")
            raise OSError(errno.ENOSPC, "No space left on device")  # a new one: its frames hold the bytes

    def store(self, *arguments: Any, **options: Any) -> DiskStore:
        """Instead of `DiskStore`."""
        return DiskStore(*arguments, before_step=self.before_disk_step, **options)

    def watch(self, engine: Any) -> None:
        backend = engine._state.backend
        for name in BACKEND_CALLS:
            setattr(backend, name, functools.partial(self._call, name, getattr(backend, name)))

    def _call(self, name: str, function: Callable[..., Any], *arguments: Any) -> Any:
        if self._draw.random() < self.call_chance:
            self.happened[name] += 1
            raise NativeError(name, -1, "a planted fault")
        return function(*arguments)


class Client:
    """Plays rounds of requests that run beside each other against a pair.

    `reopen` gives an engine like the one under test, over the same folder.
    """

    def __init__(
        self, pair: Pair, seed: int, faults: Faults, *, folder: Path | None, reopen: Callable[[], Any]
    ) -> None:
        self.pair = pair
        self.draw = random.Random(seed)
        self.faults = faults
        self.folder = folder
        self.reopen = reopen
        self.n_slots = pair.warm.n_slots
        self.kind = pair.warm.model.memory
        self.talks: list[Ids] = [random_ids(seed + i, 40 + 60 * i) for i in range(4)]
        self.sent: dict[str, list[Ids]] = {"": [], "a": []}
        """By namespace: whatever may be held of it."""
        self.n_cancelled = self.n_rounds = 0
        self.pinned: list[Ids] = []
        self.others: list[Any] = []
        """Engines over the same folder, which take turns with the one that plays."""
        self.begin()

    def add_engine(self) -> None:
        """Another one, which plays from now on."""
        self.others.append(self.pair.warm)
        self.pair.warm = self.reopen()
        self.begin()

    def begin(self) -> None:
        """The engine is new: look at its budgets at every step from now on."""
        engine = self.pair.warm
        always_load(engine)
        self.faults.watch(engine)
        backend, pool = engine._state.backend, engine._pool
        step = backend.step

        def watched(groups: Any) -> Any:
            assert pool.resident_bytes <= pool.limit_bytes
            if self.folder is not None:
                assert bytes_on_disk(self.folder) <= DISK_BYTES
            return step(groups)

        backend.step = watched

    # -- prompts --

    def prompt(self) -> tuple[int, Ids]:
        number = self.draw.randrange(len(self.talks))
        ids = self.talks[number]
        fresh = random_ids(self.draw.randrange(1 << 30), self.draw.randint(1, 50))
        how = self.draw.random()
        if how < 0.45:
            ids = joined(ids, fresh)
        elif how < 0.75:
            ids = joined(ids[: self.draw.randint(1, len(ids))], fresh)
        elif how < 0.85:
            ids = ids[: self.draw.randint(1, len(ids))]
        elif how < 0.9:
            ids = joined(fresh, random_ids(self.draw.randrange(1 << 30), 150))
        return number, ids[:MAX_TOKENS]

    def options(self, ids: Ids) -> dict[str, Any]:
        draw = self.draw
        options: dict[str, Any] = {
            "namespace": draw.choice(["", "", "", "a"]),
            "store": draw.random() < 0.85,
            "cache_prompt": draw.random() < 0.95,
            "max_tokens": draw.choice([0, 1, 4, 12, 30]),
        }
        if draw.random() < 0.3 and len(ids) > 2:
            options["boundaries"] = sorted({draw.randrange(1, len(ids)) for _ in range(2)})
        if draw.random() < 0.3:
            options["priority"] = draw.randint(-1, 1)
        if draw.random() < 0.15:
            options["ttl_s"] = draw.choice([1e-3, 0.05, 3600.0])
        if draw.random() < 0.15:
            options["slot"] = draw.randrange(self.n_slots)
        return options

    # -- rounds --

    def play(self) -> None:
        move = self.draw.random()
        self.n_rounds += 1
        if self.others and self.draw.random() < 0.4:
            self.others.append(self.pair.warm)
            self.pair.warm = self.others.pop(0)
        if move < 0.75 or self.n_rounds < 4:
            self.together()
        elif move < 0.8:
            self.pair.warm.slots[self.draw.randrange(self.n_slots)].erase()
        elif move < 0.83:
            chance, self.faults.disk_chance = self.faults.disk_chance, 0.0  # whoever clears is told of what fails
            self.pair.warm.cache.clear(self.draw.choice([None, "", "a"]))
            self.faults.disk_chance = chance
        elif move < 0.87 and self.folder is not None:
            self.restart()
        elif move < 0.92:
            self.pin()
        else:
            store_behind(self.pair.warm)
        self.look()

    def look(self) -> None:
        audit(self.pair.warm)
        cache = self.pair.warm.cache
        assert cache.resident_bytes <= cache.budget.host_bytes
        assert self.folder is None or bytes_on_disk(self.folder) <= DISK_BYTES

    def pin(self) -> None:
        """A prefix, or let go of all that were pinned; what is on disk may refuse."""
        cache, pinned = self.pair.warm.cache, self.pinned
        chance, self.faults.disk_chance = self.faults.disk_chance, 0.0
        if pinned and self.draw.random() < 0.6:
            while pinned:
                cache.unpin(pinned.pop())
        else:
            pinned.append(self.draw.choice(self.talks)[: self.draw.randint(1, 100)])
            cache.pin(pinned[-1])
        self.faults.disk_chance = chance

    def restart(self) -> None:
        """With whatever fails at the end of the old one, but not at the beginning of the new one."""
        self.pair.warm.close()
        chance, self.faults.disk_chance = self.faults.disk_chance, 0.0
        self.pair.warm = self.reopen()
        self.faults.disk_chance = chance
        self.begin()

    def together(self) -> None:
        engine, draw = self.pair.warm, self.draw
        prompts = [self.prompt() for _ in range(draw.randint(1, self.n_slots + 2))]
        asked = [self.options(ids) for _, ids in prompts]
        known = {space: list(sent) for space, sent in self.sent.items()}
        for (_, ids), options in zip(prompts, asked, strict=True):
            known[options["namespace"]].append(ids)
        backend = engine._state.backend
        step = backend.step
        with held(engine):
            handles = [
                engine.submit(ids, return_logits=True, **options)
                for (_, ids), options in zip(prompts, asked, strict=True)
            ]
            if draw.random() < 0.4:
                before_step(engine, draw.randint(1, 12), draw.choice(handles).cancel)
            if draw.random() < 0.2:
                code = draw.choice([-1, 2, -3])
                before_step(engine, draw.randint(1, 8), lambda: damage(engine).fail_decode(1, code))
        for (number, ids), options, handle in zip(prompts, asked, handles, strict=True):
            self._check(number, ids, options, handle.result(), known[options["namespace"]])
        on_scheduler(engine, lambda: setattr(backend, "step", step))

    def _check(self, number: int, ids: Ids, options: dict[str, Any], reply: Any, known: list[Ids]) -> None:
        usage, cache = reply.usage, reply.cache
        sent = joined(ids, reply.token_ids)
        others = [each for each in known if each is not ids]
        reach = max((common_prefix_len(ids, each) for each in others), default=0)
        # replies of this very round may be matched as well; they only ever follow what was sent
        self.sent[options["namespace"]].append(sent)
        assert cache.resumed_tokens + cache.prefilled_tokens == usage.prompt_tokens
        if reply.finish_reason == "cancelled":
            self.n_cancelled += 1
            return
        assert len(reply.token_ids) == options["max_tokens"]
        assert cache.matched_tokens <= max(reach, self._reach_of_replies(ids, options["namespace"]))
        self.pair.check(ids, reply, options["max_tokens"])
        if self.draw.random() < 0.5:
            self.talks[number] = sent[:MAX_TOKENS]
            if len(sent) > MAX_TOKENS - 20:
                self.talks[number] = sent[: self.draw.randint(20, 120)]

    def _reach_of_replies(self, ids: Ids, namespace: str) -> int:
        return max((common_prefix_len(ids, each) for each in self.sent[namespace][:-1]), default=0)


@contextmanager
def law_pair(
    monkeypatch: pytest.MonkeyPatch,
    new_engine: Callable[..., Any],
    kind: str,
    *,
    exact: bool,
    n_slots: int,
    folder: Path | None,
    faults: Faults,
    answers: dict[tuple[bytes, int], Any] | None = None,
) -> Iterator[tuple[Pair, Callable[[], Any]]]:
    """A pair whose engine under test has tiny budgets, and a way to open another one over the same folder."""
    short_spans(monkeypatch)
    monkeypatch.setattr("pyllamacache.engine.DiskStore", faults.store)
    options: dict[str, Any] = {"exact": exact, "n_ctx": N_CTX, "flash_attention": "off"}
    if not exact:
        options["kv_tokens"] = KV_TOKENS
    cache = CacheConfig(max_checkpoints=12, host_bytes=HOST_BYTES, disk_dir=folder, disk_bytes=DISK_BYTES)

    def reopen() -> Any:
        return new_engine(kind, n_slots=n_slots, cache=cache, **options)

    cold = new_engine(kind, n_slots=1, cache=CacheConfig(max_checkpoints=0, host_bytes=0), **options)
    yield Pair(reopen(), cold, exact=exact, answers=answers), reopen
