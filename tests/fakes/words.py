"""A vocabulary in which most texts have several spellings: bytes, longer pieces, control tokens.

Plain tokenization takes the longest piece that fits, from left to right, so that more text can change the tokens before
it. `start` and `end` are what a model adds to a text; with `adds_space` a text begins with a space that nobody wrote,
and so does what follows a control token.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from pyllamacache.text.spelling import Speller

if TYPE_CHECKING:
    from pyllamacache.request import Ids

PIECES = ("ab", "abc", "bc", " a", " ab", "  ", "\n\n", ".\n", ".\n\n", "c.", "🙂", "é", "<|", "|>", "end", "<|en")
CONTROLS = ("<|end|>", "<|user|>")
N_BYTES = 256
FIRST_CONTROL = N_BYTES + len(PIECES)
BOS = FIRST_CONTROL + len(CONTROLS)
EOS = BOS + 1
END, USER = FIRST_CONTROL, FIRST_CONTROL + 1


class WordVocab:
    def __init__(self, *, start: tuple[int, ...] = (), end: tuple[int, ...] = (), adds_space: bool = False) -> None:
        self.start, self.end, self.adds_space = start, end, adds_space
        self.n_vocab = EOS + 1
        self.tokenized: list[str] = []
        """What `tokenize` was asked for."""
        self._pieces = [bytes([byte]) for byte in range(N_BYTES)] + [piece.encode() for piece in PIECES]
        self._by_length = sorted(range(len(self._pieces)), key=lambda token: -len(self._pieces[token]))

    def piece(self, token: int) -> bytes:
        return self._pieces[token] if token < len(self._pieces) else b""

    def control_text(self, token: int) -> bytes:
        return {BOS: b"<|bos|>", EOS: b"<|eos|>"}.get(token) or CONTROLS[token - FIRST_CONTROL].encode()

    def fitting(self, data: bytes, at: int) -> list[int]:
        """Tokens that can stand there, the longest first."""
        return [token for token in self._by_length if data.startswith(self._pieces[token], at)]

    def tokenize(self, text: str, add_special: bool, parse_special: bool) -> Ids:
        self.tokenized.append(text)
        ids = list(self.start) if add_special else []
        for fragment in _fragments(text) if parse_special else [text] * bool(text):
            if parse_special and fragment in CONTROLS:
                ids.append(FIRST_CONTROL + CONTROLS.index(fragment))
            else:
                ids += self._longest_first((" " if self.adds_space else "") + fragment)
        return np.array(ids + (list(self.end) if add_special else []), dtype=np.int32)

    def speller(self) -> Speller:
        return Speller(self.tokenize, self.piece, self.control_text)

    def spelled(self, ids: Ids) -> bytes:
        """The text of ids of a vocabulary without spaces of its own."""
        added = len(self.start) if tuple(ids[: len(self.start)].tolist()) == self.start else 0
        return b"".join(self.piece(token) or self.control_text(token) for token in ids[added:].tolist())

    def _longest_first(self, text: str) -> Iterator[int]:
        data, at = text.encode(), 0
        while at < len(data):
            token = self.fitting(data, at)[0]
            yield token
            at += len(self._pieces[token])


def _fragments(text: str) -> Iterator[str]:
    while text:
        found = [(at, name) for name in CONTROLS if (at := text.find(name)) >= 0]
        if not found:
            yield text
            return
        at, name = min(found)
        if at:
            yield text[:at]
        yield name
        text = text[at + len(name) :]
