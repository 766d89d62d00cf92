"""The disk as a tier: what is stored there, found by an index of its own; written behind, read ahead, by threads.

    span or checkpoint in host memory --offer--> waiting --pump--> writer thread --> store
    restore --fetch--> reader thread --> block of host memory

A mark of this index says that the store had the bytes when it was last asked; reading finds out whether it still has.
Everything here is the scheduler thread's, but the two calls of the store that the threads make.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol, TypeVar

import numpy as np

from ..errors import PyLlamaCacheError
from ..prefix.index import Checkpoint, PrefixIndex, Span
from ..prefix.key import chain_key, next_key, root_key
from ..store.disk_format import DiskEntry

if TYPE_CHECKING:
    import numpy.typing as npt

    from ..request import CheckpointKind, Ids
    from ..store.host import Block

_T = TypeVar("_T")

MAX_WRITES = 2
"""Entries with the writer at once: each keeps its host memory busy."""
MAX_WAITING = 4096


class Store(Protocol):
    """What is asked of `store.disk.DiskStore`."""

    scope: str
    limit_bytes: int

    def scan(self, since: int = 0) -> tuple[list[DiskEntry], int]: ...
    def write(self, entry: DiskEntry, data: npt.NDArray[np.uint8]) -> bool: ...
    def read(self, kind: str, key: bytes, into: npt.NDArray[np.uint8]) -> bool: ...
    def touch(self, items: Iterable[tuple[str, bytes]], hits: int = 0) -> None: ...
    def tidy(self) -> None: ...
    def set_pinned(self, items: Iterable[tuple[str, bytes]], is_pinned: bool) -> None: ...
    def clear(self, namespace: str | None = None) -> int: ...
    def close(self) -> None: ...


Mark = Checkpoint | Span


@dataclass(slots=True, eq=False)
class _Offer:
    mark: Mark
    entry: DiskEntry
    hold: Callable[[], Block | None]
    """Lease the bytes; None: they are gone."""
    let_go: Callable[[], None]


def kind_name(mark: Mark) -> str:
    """As the store calls it."""
    return "span" if isinstance(mark, Span) else "state"


class DiskTier:
    """One engine's view of a store.

    `kind_of` turns a stored label into a checkpoint's kind; `wake` is called by the writer's thread, after each write.
    """

    def __init__(
        self,
        store: Store,
        *,
        kind_of: Callable[[str], CheckpointKind],
        wall_clock: Callable[[], float],
        clock: Callable[[], float],
        wake: Callable[[], None] = lambda: None,
        executors: Sequence[ThreadPoolExecutor] | None = None,
    ) -> None:
        self._store = store
        self._kind_of = kind_of
        self._wall_clock = wall_clock
        self._clock = clock
        self._wake = wake
        self._writer, self._reader = executors or tuple(
            ThreadPoolExecutor(1, thread_name_prefix=f"pyllamacache-disk-{name}") for name in ("write", "read")
        )
        self.index = PrefixIndex()
        self.on_expires: Callable[[float | None], None] = lambda _: None
        """Is told when an entry that was found will expire."""
        self.on_found: Callable[[], None] = lambda: None
        """Is told when something that was written is there."""
        self._token = 0
        self._by_key: dict[tuple[str, bytes], Span | Checkpoint] = {}
        self.n_bytes = 0
        """Of all that is known to be there."""
        self._orphans: dict[bytes, list[DiskEntry]] = {}
        """Entries that came before the span they continue, by its key."""
        self._waiting: deque[_Offer] = deque()
        self._writing: deque[tuple[_Offer, Future[bool]]] = deque()
        self.n_written = self.n_refused = self.n_failed = self.n_read = self.n_lost = 0

    # ---- what is there ----

    def refresh(self) -> None:
        """Take in what came since the last time, from whatever process."""
        try:
            entries, self._token = self._store.scan(self._token)
        except PyLlamaCacheError:
            return
        for entry in entries:
            self._take(entry)

    def _take(self, entry: DiskEntry) -> None:
        name = (entry.kind, entry.key)
        if name in self._by_key:
            return
        if entry.start == 0:
            ids = entry.ids
            is_ours = entry.parent == root_key(self._store.scope, entry.namespace)
        else:
            parent = self._by_key.get(("span", entry.parent))
            if parent is None:
                self._orphans.setdefault(entry.parent, []).append(entry)
                return
            ids = np.concatenate([parent.ids(), entry.ids])
            is_ours = parent.position == entry.start
        if is_ours and next_key(entry.parent, entry.ids) == entry.key:
            self._add(entry, ids)
            for each in self._orphans.pop(entry.key, ()):
                self._take(each)

    def _add(self, entry: DiskEntry, ids: Ids) -> None:
        mark: Span | Checkpoint
        if entry.kind == "span":
            match = self.index.match(entry.namespace, ids)
            known = match.spans.get(entry.start)
            if known is not None and match.usable_end(known) >= entry.end:
                return
            mark, shorter = self.index.add_span(entry.namespace, ids, entry.n_bytes)
            for each in shorter:
                self.forget(each)
        else:
            path = self.index.path(entry.namespace, ids)
            if path and path[-1].position == entry.end:
                return
            mark = self.index.add_checkpoint(entry.namespace, ids, self._kind_of(entry.label), entry.n_bytes)
            mark.is_ready = True
        mark.key, mark.priority, mark.hits = entry.key, entry.priority, entry.hits
        mark.n_pins = int(entry.is_pinned)
        if entry.expires_s is not None:
            mark.expires_s = self._clock() + entry.expires_s - self._wall_clock()
            self.on_expires(mark.expires_s)
        self._by_key[entry.kind, entry.key] = mark
        self.n_bytes += mark.n_bytes

    @property
    def n_entries(self) -> int:
        """Known to be there."""
        return len(self._by_key)

    @property
    def limit_bytes(self) -> int:
        """Of the folder."""
        return self._store.limit_bytes

    def adopt(self, namespace: str, ids: Ids) -> None:
        """Find states by the keys of this prompt: where no spans are stored (recurrent models) it alone has the ids."""
        if not self._orphans:
            return
        key, n_span = root_key(self._store.scope, namespace), self.index.span_tokens
        for start in range(0, len(ids), n_span):
            left = []
            for entry in self._orphans.get(key, ()):
                is_it = entry.kind == "state" and entry.namespace == namespace and entry.start == start
                if is_it and next_key(key, ids[start : entry.end]) == entry.key:
                    self._add(entry, ids[: entry.end])
                else:
                    left.append(entry)
            if left:
                self._orphans[key] = left
            else:
                self._orphans.pop(key, None)
            key = next_key(key, ids[start : start + n_span])

    def forget(self, mark: Mark) -> None:
        """It is not there any more, or of no use."""
        name = (kind_name(mark), mark.key)
        if self._by_key.get(name) is mark:  # the same may have been written and found again meanwhile
            del self._by_key[name]
            self.n_bytes -= mark.n_bytes
        if mark.node is not None:
            self.index.remove(mark)

    # ---- writing ----

    def offer(self, mark: Mark, ids: Ids, hold: Callable[[], Block | None], let_go: Callable[[], None]) -> None:
        """Have a mark of the host's index written, later; `ids` is its whole prefix. Known ones are only touched."""
        n_span = self.index.span_tokens
        start = (mark.position - 1) // n_span * n_span
        above = mark.parent if isinstance(mark, Span) else None
        if above is not None and above.key:
            parent = above.key
        else:
            parent = chain_key(root_key(self._store.scope, mark.namespace), ids[:start], span_tokens=n_span)
        tail = ids[start:].copy()
        mark.key = next_key(parent, tail)
        if (kind_name(mark), mark.key) in self._by_key or len(self._waiting) >= MAX_WAITING:
            self._store.touch([(kind_name(mark), mark.key)])
            return
        expires_s = None
        if mark.expires_s is not None:
            expires_s = self._wall_clock() + mark.expires_s - self._clock()
        entry = DiskEntry(
            key=mark.key,
            parent=parent,
            kind=kind_name(mark),
            namespace=mark.namespace,
            start=start,
            end=mark.position,
            ids=tail,
            n_bytes=mark.n_bytes,
            label="" if isinstance(mark, Span) else mark.kind.value,
            priority=mark.priority,
            expires_s=expires_s,
            hits=mark.hits,
            used_s=self._wall_clock(),
            tokens=mark.n_tokens if isinstance(mark, Span) else mark.gap,
        )
        self._waiting.append(_Offer(mark, entry, hold, let_go))

    @property
    def being_written(self) -> list[Mark]:
        """Marks of the host's index that the writer has leased."""
        return [offer.mark for offer, _ in self._writing]

    @property
    def n_waiting(self) -> int:
        """Entries that are to be written, or being written."""
        return len(self._waiting) + len(self._writing)

    @property
    def is_busy(self) -> bool:
        """Something waits to be written, or is being."""
        return bool(self._waiting or self._writing)

    def pump(self, *, wait: bool = False) -> None:
        """Take in what was written and hand the writer more. `wait`: at least one more is done when this returns."""
        while self._writing and (wait or self._writing[0][1].done()):
            wait = False
            offer, future = self._writing.popleft()
            offer.let_go()
            self._written(future)
        while self._waiting and len(self._writing) < MAX_WRITES:
            offer = self._waiting.popleft()
            block = offer.hold()
            if block is None:
                continue
            entry = replace(offer.entry, is_pinned=offer.mark.n_pins > 0)
            future = self._submit(self._writer, self._store.write, entry, block.data)
            self._writing.append((offer, future))
            future.add_done_callback(lambda _: self._wake())

    @staticmethod
    def _submit(executor: ThreadPoolExecutor, function: Callable[..., _T], *arguments: object) -> Future[_T]:
        try:
            return executor.submit(function, *arguments)
        except RuntimeError:  # the interpreter ends, and executors with it; there is still time to do it here
            future: Future[_T] = Future()
            try:
                future.set_result(function(*arguments))
            except PyLlamaCacheError as error:
                future.set_exception(error)
            return future

    def _written(self, future: Future[bool]) -> None:
        error = future.exception()  # raised here it would hold this frame, hence the future, itself and the bytes
        if isinstance(error, PyLlamaCacheError):
            self.n_failed += 1
        elif future.result():
            self.n_written += 1
            self.refresh()
            self.on_found()
        else:
            self.n_refused += 1

    # ---- reading ----

    def fetch(self, mark: Mark, block: Block) -> Future[bool]:
        """Read a mark of this index into `block`, which nobody touches until the answer is there."""
        return self._submit(self._reader, self._store.read, kind_name(mark), mark.key, block.data)

    def touch(self, marks: Iterable[Mark]) -> None:
        """A request resumed from them. Host marks that were never offered have no key, and nothing on disk."""
        self._store.touch([(kind_name(mark), mark.key) for mark in marks if mark.key], hits=1)

    # ---- pins, end ----

    def set_pinned(self, marks: Iterable[Mark], is_pinned: bool) -> None:
        """Have the store note it, behind whatever is being written. One that cannot is not told of again."""
        names = []
        for mark in marks:
            mark.n_pins = int(is_pinned)
            names.append((kind_name(mark), mark.key))

        def note() -> bool:
            self._store.set_pinned(names, is_pinned)
            return True

        self._submit(self._writer, note)

    def tidy(self) -> None:
        """Have the store remove what has expired or is over its limit, behind whatever is being written."""

        def tidy() -> bool:
            self._store.tidy()
            return True

        self._submit(self._writer, tidy)

    def begin_clear(self, namespace: str | None = None) -> Future[int]:
        """Remove what is stored, of one namespace or (None) all of this engine's scope; the answer: how many entries.

        When it is there, `forget_all` has to be called: what was written just before may have been found meanwhile.
        """
        self._waiting = deque(each for each in self._waiting if namespace not in (None, each.entry.namespace))
        self.forget_all(namespace)
        return self._submit(self._writer, self._store.clear, namespace)

    def forget_all(self, namespace: str | None = None) -> None:
        """Whatever the index says is there of a namespace, or (None) at all."""
        for mark in [mark for mark in self._by_key.values() if namespace in (None, mark.namespace)]:
            self.forget(mark)
        left = {key: [each for each in entries if namespace not in (None, each.namespace)]
                for key, entries in self._orphans.items()}  # fmt: skip
        self._orphans = {key: entries for key, entries in left.items() if entries}

    def settle(self) -> None:
        """Wait until nothing waits to be written."""
        while self.is_busy:
            self.pump(wait=True)

    def close(self) -> None:
        """Write what waits, and let go of the store."""
        self.settle()
        self.tidy()
        self._writer.shutdown()
        self._reader.shutdown()
        self._store.close()
