"""`Cache`: what an engine keeps beside its slots, to look at, clear and limit."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from .config import CacheConfig
from .errors import ClosedError, ConfigError
from .observe import display, lines
from .prefix.tree import Held, TreeCheckpoint, TreeNode, grow
from .store.machine import memory_bytes
from .text.validate import check_namespace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from concurrent.futures import Future

    from typing_extensions import Unpack

    from .config import CacheBudget
    from .engine import Engine
    from .prefix.index import PrefixIndex, Span
    from .prefix.tree import Place
    from .request import CheckpointKind, Ids, SlotId
    from .scheduler.state import SchedulerState
    from .text.options import PromptInput, PromptOptions

    _T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class CacheEntry:
    """A checkpoint, at one instant. No token ids."""

    namespace: str
    position: int
    """Tokens of the prefix it continues."""
    n_bytes: int
    kind: CheckpointKind
    age_s: float
    hits: int
    """Requests that resumed from it."""
    is_ready: bool
    """False: its capture is in flight."""
    slots: tuple[SlotId, ...]
    """Slots that hold the KV cells before it. Empty: nothing can resume from it, except on recurrent models."""


@dataclass(frozen=True, slots=True)
class CachePrefix:
    """KV cells that are kept, at one instant. No token ids. What prefixes have in common is counted with each."""

    tier: str
    """"device": parked; "host"; "disk"."""
    namespace: str
    n_tokens: int
    n_bytes: int
    """Of all its spans; 0 on the device, where it takes cells."""
    hits: int
    is_pinned: bool


@dataclass(frozen=True, slots=True)
class CacheTree:
    """What is held in slots and beside them, at one instant, by what it has in common. No token ids.

    Draws itself in a notebook; printed, it is text.
    """

    namespaces: tuple[tuple[str, tuple[TreeNode, ...]], ...]
    """Each namespace with its nodes at position 0."""

    def nodes(self) -> Iterator[TreeNode]:
        """All, each before its children."""
        return (node for _, roots in self.namespaces for root in roots for _, node in root.walk())

    def __str__(self) -> str:
        return lines.tree(self.namespaces)

    def _repr_html_(self) -> str:
        return display.tree(self.namespaces)


_TEXT_TOKENS = 24
"""Of each node, where text was asked for."""


def _holdings(state: SchedulerState) -> Iterator[Held]:
    """On the scheduler's thread: copies of what slots hold, references to what the indices do."""
    state.checkpoints.poll()
    state.expiry.sweep()
    for slot in state.slots:
        yield Held(slot.namespace, "slot", [slot.tokens.ids.copy()], len(slot), slot_id=slot.slot_id)
    for each in state.index.parked:
        yield Held(each.namespace, "parked", each.edges(), each.position, is_pinned=each.n_pins > 0)
    yield from _stored(state.index, "host")
    if state.disk is not None:
        yield from _stored(state.disk.index, "disk")


def _stored(index: PrefixIndex, place: Place) -> Iterator[Held]:
    told: set[int] = set()
    for span in index.spans:
        if span.n_children:
            continue
        spans: list[tuple[int, int]] = []
        above: Span | None = span
        while above is not None and id(above) not in told:
            told.add(id(above))
            spans.append((above.position, above.n_bytes))
            above = above.parent
        n_tokens, is_pinned = span.position, span.n_pins > 0
        yield Held(span.namespace, place, span.edges(), n_tokens, spans=tuple(spans), is_pinned=is_pinned)
    for node in index.checkpoints:
        shown = TreeCheckpoint(
            position=node.position,
            kind=node.kind,
            n_bytes=node.n_bytes,
            hits=node.hits,
            in_memory=place == "host",
            on_disk=place == "disk",
            is_pinned=node.n_pins > 0,
        )
        yield Held(node.namespace, place, node.edges(), node.position, checkpoint=shown)


def _prefix_of(tier: str, span: Span) -> CachePrefix:
    n_bytes, above = 0, span
    while True:
        n_bytes += above.n_bytes
        if above.parent is None:
            return CachePrefix(tier, span.namespace, span.position, n_bytes, span.hits, span.n_pins > 0)
        above = above.parent


class Cache:
    """A view; asking it asks the scheduler, between two steps. Any thread."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def _call(self, function: Callable[[], _T]) -> _T:
        self._engine._check_process()

        def run() -> _T:
            try:
                return function()
            finally:
                self._engine._state.report_checkpoints()
                self._engine._state.report_tiers()

        return self._engine._scheduler.inbox.call(run)

    def entries(self) -> tuple[CacheEntry, ...]:
        """All checkpoints, by namespace and position."""

        def read() -> list[CacheEntry]:
            state = self._engine._state
            checkpoints = state.checkpoints
            checkpoints.poll()
            state.expiry.sweep()
            held = {
                slot.slot_id: set(checkpoints.index.path(slot.namespace, slot.tokens.ids))
                for slot in state.slots
                if len(slot)
            }
            return [
                CacheEntry(
                    node.namespace,
                    node.position,
                    node.n_bytes,
                    node.kind,
                    checkpoints.age_s(node),
                    node.hits,
                    node.is_ready,
                    tuple(slot_id for slot_id, nodes in held.items() if node in nodes),
                )
                for node in checkpoints.index.checkpoints
            ]

        return tuple(sorted(self._call(read), key=lambda entry: (entry.namespace, entry.position)))

    def __len__(self) -> int:
        """Checkpoints, in flight or ready."""
        return self._call(lambda: len(self._engine._state.checkpoints.index.checkpoints))

    def __bool__(self) -> bool:
        """A view is there, whatever it shows."""
        return True

    @property
    def size_bytes(self) -> int:
        """Bytes of all checkpoints."""
        return self._call(lambda: self._engine._state.checkpoints.used_bytes)

    @property
    def resident_bytes(self) -> int:
        """Host memory in use, at most `budget.host_bytes`.

        Checkpoints, captures in flight, staging, and blocks kept for the next ones.
        """
        return self._call(lambda: self._engine._pool.resident_bytes)

    @property
    def budget(self) -> CacheBudget:
        return self._call(lambda: self._engine._state.checkpoints.budget)

    def limit(self, config: CacheConfig) -> None:
        """Change the budgets, all of them: what `config` does not name takes its default.

        What no longer fits is given up, least valuable first, and the memory is returned. Pinned ones go last. What is
        in use goes when it no longer is, and files go a moment later.

        Raises:
            ConfigError: not a CacheConfig, or one that names another folder.
        """
        if not isinstance(config, CacheConfig):
            raise ConfigError("config", config, "a pyllamacache.CacheConfig")
        folder = self._engine._disk_dir
        if config.disk_dir is not None and (
            folder is None or os.path.realpath(config.disk_dir) != os.path.realpath(folder)
        ):
            expected = "None, as this engine has no disk" if folder is None else f"None or {folder!r}"
            raise ConfigError("disk_dir", config.disk_dir, f"{expected}: the folder is chosen with the engine")
        budget, disk_bytes = config.resolve(memory_bytes()), config.resolve_disk()

        def change() -> None:
            self._engine._state.set_budget(budget)
            disk = self._engine._state.disk
            if disk is not None and self._engine._store is not None:
                self._engine._store.limit_bytes = disk_bytes
                disk.tidy()

        self._call(change)

    def clear(self, namespace: str | None = None) -> int:
        """Give up all that is kept of a namespace, or (None) of all, pinned or not. Returns how many entries.

        Checkpoints, spans, parked prefixes, and what this model and layout have on disk. Slots keep what they hold.

        Raises:
            CacheFileError: the operating system refused to remove files; everything else is gone.
        """
        space = None if namespace is None else check_namespace(namespace)

        state = self._engine._state

        def clear() -> tuple[int, Future[int] | None]:
            state.pins.clear(space)
            n_entries = state.checkpoints.clear(space) + state.spans.clear(space) + state.parking.clear(space)
            state.transcripts.clear(space)
            state.recents.clear(space)
            return n_entries, None if state.disk is None else state.disk.begin_clear(space)

        def end() -> None:
            if state.disk is not None:
                state.disk.forget_all(space)

        if self._engine._chat_renderer is not None:
            self._engine._chat_renderer.clear(space)
        n_entries, on_disk = self._call(clear)
        if on_disk is not None:
            n_entries += on_disk.result()  # on this thread: it may have to wait for other processes
            self._call(end)
        return n_entries

    def pin(self, prompt: PromptInput, **options: Unpack[PromptOptions]) -> int:
        """Keep what is held of this prefix, in every tier, until it is unpinned: nothing but a lower budget takes it.

        On the device a running request that would fail for want of cells comes first; what it takes goes to host memory
        if there is room. What is not held yet is not computed: `warm` it first. Pins count.

        Returns: tokens of the prefix at which a longer prompt can resume now; 0: nothing is held.
        """
        namespace, ids = self._engine._prefix(prompt, options)
        return self._call(lambda: self._engine._state.pins.pin(namespace, ids))

    def unpin(self, prompt: PromptInput, **options: Unpack[PromptOptions]) -> bool:
        """Take back one `pin` of exactly this prefix. False: there is none."""
        namespace, ids = self._engine._prefix(prompt, options)
        return self._call(lambda: self._engine._state.pins.unpin(namespace, ids))

    def prefixes(self) -> tuple[CachePrefix, ...]:
        """What is held of KV cells outside the slots, by tier: the longest prefixes, by namespace."""

        def read() -> list[CachePrefix]:
            state = self._engine._state
            found = [
                CachePrefix("device", each.namespace, each.position, 0, each.hits, each.n_pins > 0)
                for each in state.index.parked
            ]
            tiers = [("host", state.index)] + ([] if state.disk is None else [("disk", state.disk.index)])
            for tier, index in tiers:
                for span in index.spans:
                    if not span.n_children:
                        found.append(_prefix_of(tier, span))
            return found

        return tuple(sorted(self._call(read), key=lambda each: (each.namespace, each.tier, each.n_tokens)))

    def tree(self, *, text: bool = False) -> CacheTree:
        """What is held in slots and in all tiers, by the prefixes it shares.

        Args:
            text: with how each node begins, which is text of prompts and replies.
        """
        model = self._engine._model

        def beginning(ids: Ids) -> str:
            return model.detokenize(ids[:_TEXT_TOKENS].tolist())

        held = self._call(lambda: list(_holdings(self._engine._state)))
        return CacheTree(grow(held, beginning if text else None))

    def __str__(self) -> str:
        try:
            return str(self.tree())
        except ClosedError:
            return repr(self)

    def _repr_html_(self) -> str | None:
        """None, and so `repr`, once the engine is closed."""
        try:
            tree = self.tree()
            return display.tree(tree.namespaces, below=display.memory(self._engine.statistics()))
        except ClosedError:
            return None

    def __repr__(self) -> str:
        return f"<Cache of {self._engine!r}>"
