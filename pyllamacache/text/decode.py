"""Bytes of tokens in, text out as it comes: valid UTF-8 at every chunk, ended by stop strings that span tokens.

Knows neither tokens nor vocabularies. The chunks together are what decoding all bytes at once (errors="replace")
gives, cut before the first stop string, however the bytes were split.
"""

from __future__ import annotations

import codecs
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

_new_decoder = codecs.getincrementaldecoder("utf-8")


class TextStream:
    """The text of one reply.

    The first stop string to be complete ends it; of several that end at one character, the longest does. Text that
    could be the beginning of a stop string is held back until it is clear that it is not. Once `stopped`, nothing
    more comes out.
    """

    __slots__ = ("_decoder", "_held", "_matchers", "stop_string")

    def __init__(self, stop: Sequence[str] = ()) -> None:
        self._decoder = _new_decoder("replace")
        self._matchers = [_StopMatcher(each) for each in stop]
        self._held = ""
        self.stop_string: str | None = None

    @property
    def stopped(self) -> bool:
        return self.stop_string is not None

    def push(self, piece: bytes) -> str:
        """The text that became certain with this piece, possibly empty. Incomplete sequences wait for their rest."""
        return self._advance(self._decoder.decode(piece))

    def finish(self) -> str:
        """What was still held back; an incomplete sequence becomes U+FFFD."""
        text = self._advance(self._decoder.decode(b"", True))
        text, self._held = text + self._held, ""
        return text

    def _advance(self, text: str) -> str:
        if not self._matchers or not text:
            return text
        if self.stop_string is not None:
            return ""
        found = [
            (end, end - len(matcher.stop), matcher.stop)
            for matcher in self._matchers
            if (end := matcher.advance(text)) is not None
        ]
        known = self._held + text
        if found:
            _, start, self.stop_string = min(found)
            cut, self._held = len(self._held) + start, ""
            return known[:cut]
        cut = len(known) - max(matcher.n_matched for matcher in self._matchers)
        self._held = known[cut:]
        return known[:cut]


class _StopMatcher:
    """Knuth-Morris-Pratt over a stream: linear in the text, whatever the stop string repeats.

    `n_matched` characters at the end of what was seen are the beginning of `stop`.
    """

    __slots__ = ("_fallback", "n_matched", "stop")

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.n_matched = 0
        self._fallback = _fallbacks(stop)

    def advance(self, text: str) -> int | None:
        """Where in `text` the stop string is first complete (exclusive end), if it is."""
        stop, fallback, n_matched = self.stop, self._fallback, self.n_matched
        at = 0
        while at < len(text):
            if n_matched == 0:
                at = text.find(stop[0], at)
                if at < 0:
                    break
            while n_matched and stop[n_matched] != text[at]:
                n_matched = fallback[n_matched - 1]
            if stop[n_matched] == text[at]:
                n_matched += 1
            at += 1
            if n_matched == len(stop):
                return at
        self.n_matched = n_matched
        return None


def _fallbacks(stop: str) -> list[int]:
    """For each prefix of `stop`, the length of its longest proper suffix that is a prefix as well."""
    fallback = [0] * len(stop)
    n_matched = 0
    for at in range(1, len(stop)):
        while n_matched and stop[n_matched] != stop[at]:
            n_matched = fallback[n_matched - 1]
        if stop[n_matched] == stop[at]:
            n_matched += 1
        fallback[at] = n_matched
    return fallback
