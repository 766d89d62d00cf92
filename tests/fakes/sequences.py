"""The whole memory of the fake engine room, by kind: which parts a sequence has and what can be done to them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pyllamacache.config import Memory
from pyllamacache.scheduler.backend import Feed, Traits

from .memory import Cell, Span, State, Window, mix


class Sequences:
    """The parts of every sequence's memory, with llama.cpp's rules for cutting them."""

    def __init__(self, traits: Traits, n_swa: int) -> None:
        self.traits = traits
        self.n_swa = n_swa
        n_slots, memory = traits.n_slots, traits.memory
        n_cells = traits.n_ctx if traits.exact else traits.kv_tokens
        self.span = (
            None if memory is Memory.RECURRENT else Span(n_slots + traits.n_parked, n_cells, unified=not traits.exact)
        )
        self.states = [State() for _ in range(n_slots)] if memory.splits_steps else None
        self.windows: list[Window] | None = None
        """By sequence; one for all under a unified cache."""
        if memory is Memory.SLIDING and traits.exact:
            self.windows = [Window(n_slots, n_cells, n_swa) for _ in range(n_slots)]
        elif memory is Memory.SLIDING:
            self.windows = [Window(n_slots, min(n_cells, n_swa * n_slots + traits.n_ubatch), n_swa)] * n_slots

    def ends(self, seq_id: int) -> list[int]:
        """How many tokens each part thinks it holds."""
        ends = []
        if self.span is not None:
            ends.append(len(self.span.cells(seq_id)))
        if self.windows is not None:
            ends.append(self.windows[seq_id].last(seq_id) + 1)
        if self.states is not None:
            ends.append(self.states[seq_id].n_tokens)
        return ends

    def holds(self, seq_id: int, n_tokens: int) -> bool:
        if set(self.ends(seq_id)) != {n_tokens}:
            return False
        first = 0 if self.windows is None else self.windows[seq_id].first(seq_id)
        return first <= max(0, n_tokens - self.n_swa + 1)

    def rewind_floor(self, seq_id: int) -> int:
        length = max(self.ends(seq_id))
        if self.windows is not None:
            first = self.windows[seq_id].first(seq_id)
            return min(1 if first <= 0 else first + self.n_swa - 1, length)
        return length if self.states is not None else min(1, length)

    def trim(self, seq_id: int, n_tokens: int) -> bool:
        if self.holds(seq_id, n_tokens):
            return True
        if self.states is not None:
            return False
        self.cut(seq_id, n_tokens)
        return self.holds(seq_id, n_tokens)

    def cut(self, seq_id: int, n_tokens: int) -> None:
        """Without asking whether what is left can be used; a state goes with the last token only."""
        if self.span is not None:
            self.span.trim(seq_id, n_tokens)
        if self.windows is not None:
            self.windows[seq_id].trim(seq_id, n_tokens)
        if self.states is not None and n_tokens == 0:
            self.states[seq_id] = State()

    def share(self, donor_id: int, seq_id: int, n_tokens: int) -> None:
        assert self.traits.memory is Memory.FULL
        assert self.span is not None
        assert donor_id != seq_id
        assert 0 < n_tokens <= len(self.span.cells(donor_id))
        assert not self.span.cells(seq_id), "shared into a sequence that is not empty"
        self.span.share(donor_id, seq_id, n_tokens)

    # -- the span alone --

    def share_span(self, donor_id: int, seq_id: int, n_tokens: int) -> None:
        """Planted faults override it."""
        assert self.span is not None
        assert 0 < n_tokens <= len(self.span.cells(donor_id))
        assert not self.span.cells(seq_id), "shared into a sequence that is not empty"
        self.span.share(donor_id, seq_id, n_tokens)

    def save_span(self, seq_id: int, start: int, end: int) -> list[tuple[int, int]]:
        """Planted faults override it."""
        assert self.span is not None
        assert 0 <= start < end <= len(self.span.cells(seq_id))
        return [(cell.token, cell.value) for cell in self.span.cells(seq_id)[start:end]]

    def append_span(self, seq_id: int, start: int, saved: list[tuple[int, int]]) -> None:
        """Raises ValueError and changes nothing."""
        assert self.span is not None
        assert len(self.span.cells(seq_id)) == start, "cells that do not begin where the sequence ends"
        if len(saved) > self.span.n_free(seq_id):
            raise ValueError("no cells")
        for token, value in saved:
            self.span.append(seq_id, token, value)

    # -- decoding --

    def read_cells(self, seq_id: int) -> list[Cell]:
        """What attention reads. Planted faults override it."""
        return [] if self.span is None else self.span.cells(seq_id)

    def feed_state(self, feed: Feed, value: int) -> None:
        """Planted faults override it."""
        assert self.states is not None
        self.states[feed.seq_id].feed(value)

    def check_read(self, feed: Feed) -> None:
        """What the feed's first token would attend to is exactly positions [0, start)."""
        if self.span is not None:
            positions = [cell.position for cell in self.read_cells(feed.seq_id)]
            assert positions == list(range(feed.start)), f"cells read are not exactly [0, {feed.start}): {positions}"
        if self.windows is not None:
            window = self.windows[feed.seq_id]
            n_seen = len(window.visible(feed.seq_id, feed.start))
            assert n_seen == len(window.needed(feed.start)), f"window cells before {feed.start} are missing"

    def digest(self, seq_id: int) -> int:
        """Of everything in the span."""
        digest = 0
        for cell in self.read_cells(seq_id):
            digest = mix(digest, cell.token, cell.position, cell.value)
        return digest

    def decode(self, ubatch: Sequence[tuple[Feed, int]], digests: dict[int, int]) -> dict[int, int]:
        """Decode (feed, offset) rows; returns the last value of each sequence, keeps its digest up to date.

        In exact mode the number of rows and the order of window cells show in the values, as kernels round by both.
        """
        is_exact = self.traits.exact
        shape = len(ubatch) if is_exact else 0
        rows = [(feed.seq_id, feed.start + offset) for feed, offset in ubatch]
        places = None if self.windows is None else self.windows[rows[0][0]].put(rows)
        values: dict[int, int] = {}
        for index, (feed, offset) in enumerate(ubatch):
            seq_id, position = rows[index]
            token = int(feed.tokens[offset])
            window = () if self.windows is None else self.windows[seq_id].visible(seq_id, position)
            if self.windows is not None and is_exact:
                window += self.windows[seq_id].places(seq_id, position)
            state = 0 if self.states is None else self.states[seq_id].digest
            value = values[seq_id] = mix(digests[seq_id], window, state, token, position, shape)
            if self.span is not None:
                digests[seq_id] = mix(digests[seq_id], token, position, value)
                self.span.append(seq_id, token, value)
            if places is not None:
                places[index].value = value
            if self.states is not None:
                self.feed_state(feed, value)
        return values

    def spoil(self, ubatch: Sequence[tuple[Feed, int]]) -> None:
        """What a failed ubatch leaves: libllama removes its positions, which memory with a state refuses."""
        first: dict[int, int] = {}
        for feed, offset in ubatch:
            first.setdefault(feed.seq_id, feed.start + offset)
        for seq_id, position in first.items():
            if self.states is None:
                self.cut(seq_id, position)
            else:
                self.states[seq_id].digest = mix(666, position)

    # -- states at one position --

    def save_state(self, seq_id: int) -> dict[str, Any]:
        """The part that cannot be cut. Planted faults override it."""
        saved = self.save(seq_id)
        saved.pop("span", None)
        return saved

    def resume(self, donor_id: int | None, seq_id: int, n_tokens: int, saved: dict[str, Any]) -> None:
        """Raises ValueError and leaves everything as it was, or nothing where the state was of another position."""
        if (saved["kind"], saved["exact"]) != (self.traits.memory.value, self.traits.exact):
            raise ValueError("of another kind")
        if self.span is not None:
            n_held = len(self.span.cells(seq_id if donor_id is None else donor_id))
            if n_held < n_tokens or (donor_id is not None and self.span.cells(seq_id)):
                raise ValueError("the cells before it are not there")
            if donor_id is not None:
                self.span.share(donor_id, seq_id, n_tokens)
            self.span.trim(seq_id, n_tokens)
        if self.windows is not None:
            self.windows[seq_id].trim(seq_id, 0)
        self._load_state(seq_id, saved)
        if not self.holds(seq_id, n_tokens):
            self.cut(seq_id, 0)
            raise ValueError("of another position")

    # -- whole states --

    def save(self, seq_id: int) -> dict[str, Any]:
        saved: dict[str, Any] = {"kind": self.traits.memory.value, "exact": self.traits.exact}
        if self.span is not None:
            saved["span"] = [(cell.token, cell.value) for cell in self.span.cells(seq_id)]
        if self.windows is not None:
            window = self.windows[seq_id]
            written = window.needed(window.last(seq_id) + 1)  # cells no later token sees are not
            saved["window"] = [(cell.position, cell.value) for cell in window.cells(seq_id) if cell.position in written]
        if self.states is not None:
            saved["state"] = (self.states[seq_id].digest, self.states[seq_id].n_tokens)
        return saved

    def load(self, seq_id: int, saved: dict[str, Any]) -> None:
        """Into an empty sequence. Raises ValueError and leaves it in between."""
        if (saved["kind"], saved["exact"]) != (self.traits.memory.value, self.traits.exact):
            raise ValueError("of another kind")
        if self.span is not None:
            if len(saved["span"]) > self.span.n_free(seq_id):
                raise ValueError("no cells")
            for token, value in saved["span"]:
                self.span.append(seq_id, token, value)
        self._load_state(seq_id, saved)

    def _load_state(self, seq_id: int, saved: dict[str, Any]) -> None:
        if self.windows is not None and saved["window"]:
            cells = self.windows[seq_id].put([(seq_id, position) for position, _ in saved["window"]])
            for cell, (_, value) in zip(cells, saved["window"], strict=True):
                cell.value = value
        if self.states is not None:
            self.states[seq_id] = State(*saved["state"])
