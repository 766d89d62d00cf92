"""What memory and disk hold of one prompt, seen as one: how far its KV cells reach, and from where they come."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from .index import Checkpoint, Match, Span


def _always(_mark: Span | Checkpoint, _n_tokens: int) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class StoredPrefix:
    """Matches of a prompt in the indexes of several tiers, the fastest first. Valid until one of them changes."""

    matches: tuple[Match, ...]
    is_worth: Callable[[Span | Checkpoint, int], bool] = _always
    """Whether putting it back takes less time than computing the tokens that it saves."""
    _chains: dict[int, list[Span]] = field(default_factory=dict, repr=False)

    @property
    def is_end(self) -> bool:
        """Nothing that is stored goes on where the prompt leaves what is known."""
        furthest = max((each.n_tokens for each in self.matches), default=0)
        return any(each.is_end for each in self.matches if each.n_tokens == furthest)

    def chain(self, held_tokens: int) -> list[Span]:
        """Spans that lead furthest, put after the first `held_tokens` of the prompt cut to the first one's start."""
        held = self._chains.get(held_tokens)
        if held is None:
            held = self._chains[held_tokens] = self._find_chain(held_tokens)
        return held

    def _find_chain(self, held_tokens: int) -> list[Span]:
        found: list[Span] = []
        if not self.matches:
            return found
        n_span = self.matches[0].span_tokens
        reach, start = held_tokens, held_tokens // n_span * n_span
        while True:
            best, end = None, reach
            for match in self.matches:
                span = match.spans.get(start)
                if span is not None and match.usable_end(span) > end and self.is_worth(span, span.n_tokens):
                    best, end = span, match.usable_end(span)
            if best is None:
                return found
            found.append(best)
            reach = end
            if reach < start + n_span:
                return found
            start = reach

    def usable_end(self, span: Span) -> int:
        """How far the prompt agrees with a span of a chain."""
        return max(each.usable_end(span) for each in self.matches if each.spans.get(span.start) is span)

    def reach(self, held_tokens: int) -> int:
        """How far cells get, at least `held_tokens`, when spans are put behind those that are held."""
        chain = self.chain(held_tokens)
        return self.usable_end(chain[-1]) if chain else held_tokens

    def checkpoints(self) -> dict[int, Checkpoint]:
        """By position: of several at one, that of the fastest tier, if it is worth it beside the one before."""
        found: dict[int, Checkpoint] = {}
        for match in self.matches:
            for each in match.checkpoints:
                if each.is_ready:
                    found.setdefault(each.position, each)
        kept: dict[int, Checkpoint] = {}
        before = 0
        for position, each in sorted(found.items()):
            if self.is_worth(each, position - before):
                kept[position] = each
                before = position
        return kept
