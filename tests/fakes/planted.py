"""Faults as real caches have had them, planted where every number still looks right. The law has to find them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pyllamacache.scheduler.backend import Feed, Traits

from .memory import Cell
from .sequences import Sequences


class StaleTail(Sequences):
    """A cut leaves the first cell behind the new end, and attention still sees it."""

    def __init__(self, traits: Traits, n_swa: int) -> None:
        super().__init__(traits, n_swa)
        self._stale: dict[int, Cell] = {}

    def cut(self, seq_id: int, n_tokens: int) -> None:
        cells = [] if self.span is None else self.span.cells(seq_id)
        left = cells[n_tokens] if 0 < n_tokens < len(cells) else None
        super().cut(seq_id, n_tokens)
        self._stale.pop(seq_id, None)
        if left is not None:
            self._stale[seq_id] = left

    def read_cells(self, seq_id: int) -> list[Cell]:
        stale = self._stale.get(seq_id)
        return super().read_cells(seq_id) + ([] if stale is None else [stale])


class ShortShare(Sequences):
    """A shared prefix lacks its last cell."""

    def __init__(self, traits: Traits, n_swa: int) -> None:
        super().__init__(traits, n_swa)
        self._missing: dict[int, int] = {}

    def share(self, donor_id: int, seq_id: int, n_tokens: int) -> None:
        super().share(donor_id, seq_id, n_tokens)
        self._missing[seq_id] = n_tokens - 1

    def cut(self, seq_id: int, n_tokens: int) -> None:
        super().cut(seq_id, n_tokens)
        if n_tokens <= self._missing.get(seq_id, -1):
            del self._missing[seq_id]

    def read_cells(self, seq_id: int) -> list[Cell]:
        missing = self._missing.get(seq_id)
        return [cell for cell in super().read_cells(seq_id) if cell.position != missing]


class LateState(Sequences):
    """When a prompt goes on after a reply, the state is that from before the reply's last token."""

    def __init__(self, traits: Traits, n_swa: int) -> None:
        super().__init__(traits, n_swa)
        self._before_last: dict[int, int | None] = {}
        """By sequence: the state before its last feed, if that was a single token."""

    def feed_state(self, feed: Feed, value: int) -> None:
        assert self.states is not None
        state = self.states[feed.seq_id]
        is_first = state.n_tokens == feed.start
        before = self._before_last.get(feed.seq_id)
        if is_first and len(feed.tokens) > 1 and before is not None:
            state.digest = before
        if is_first:
            self._before_last[feed.seq_id] = state.digest if len(feed.tokens) == 1 else None
        super().feed_state(feed, value)

    def cut(self, seq_id: int, n_tokens: int) -> None:
        super().cut(seq_id, n_tokens)
        self._before_last.pop(seq_id, None)


class LateCapture(Sequences):
    """A capture takes the state from before the last feed, or a window in which a cell has another one's value."""

    def __init__(self, traits: Traits, n_swa: int) -> None:
        super().__init__(traits, n_swa)
        self._before: dict[int, int] = {}

    def feed_state(self, feed: Feed, value: int) -> None:
        assert self.states is not None
        self._before[feed.seq_id] = self.states[feed.seq_id].digest
        super().feed_state(feed, value)

    def save_state(self, seq_id: int) -> dict[str, Any]:
        saved = super().save_state(seq_id)
        if "state" in saved:
            saved["state"] = (self._before.get(seq_id, 0), saved["state"][1])
        if saved.get("window"):
            position, _ = saved["window"][0]
            saved["window"][0] = (position, 1)
        return saved


class ForeignDonor(Sequences):
    """What is taken from another sequence beside a checkpoint lacks a token in the middle."""

    def resume(self, donor_id: int | None, seq_id: int, n_tokens: int, saved: dict[str, Any]) -> None:
        super().resume(donor_id, seq_id, n_tokens, saved)
        if donor_id is not None and self.span is not None:
            cell = self.span.cells(seq_id)[n_tokens // 2]
            self.span.cells(seq_id)[n_tokens // 2] = replace(cell, value=cell.value ^ 1)
