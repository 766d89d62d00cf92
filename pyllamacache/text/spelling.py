"""How token ids spell a text: where in its bytes each token ends, and which of them are control tokens.

Knows a vocabulary by what its tokens spell, and compares: ids that do not spell a text byte for byte have no spelling.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from ..request import Spelling

if TYPE_CHECKING:
    from ..request import Ids

    Tokenize = Callable[[str, bool, bool], Ids]
    """Text, add_special, parse_special."""


class _Table(dict[int, bytes]):
    """What tokens spell, asked for once each. Threads may ask at the same time: they get the same answer."""

    def __init__(self, read: Callable[[int], bytes]) -> None:
        super().__init__()
        self._read = read

    def __missing__(self, token: int) -> bytes:
        piece = self[token] = self._read(token)
        return piece


class Speller:
    """The tokens of one vocabulary, as text.

    Args:
        tokenize: plain tokenization.
        piece: the bytes a token adds to a text; none for control tokens.
        control_text: the bytes that a control token is written as where special tokens are parsed.
    """

    def __init__(self, tokenize: Tokenize, piece: Callable[[int], bytes], control_text: Callable[[int], bytes]) -> None:
        self._tokenize = tokenize
        self._pieces = _Table(piece)
        self._control_texts = _Table(control_text)

    def spelling(self, ids: Ids, data: bytes, add_special: bool, parse_special: bool) -> Spelling | None:
        """How `ids`, the tokenization of all of `data`, spell it. None: they do not, or they go on after its end."""
        added = self._start if add_special else []
        n_added = len(added)
        if ids[:n_added].tolist() != added:
            return None
        spelled = self.ends(ids[n_added:], data, parse_special, at_start=True)
        if spelled is None:
            return None
        ends, controls = spelled
        ends = np.concatenate([np.zeros(n_added, dtype=np.int32), ends])
        return Spelling(data, ends, controls + np.int32(n_added), add_special, parse_special)

    def ends(self, ids: Ids, data: bytes, parse_special: bool, *, at_start: bool) -> tuple[Ids, Ids] | None:
        """Where each token ends in `data`, and the indices of control tokens; None if they do not spell `data`.

        Vocabularies that put a space before a text, and again after a control token, do not mean it as part of the
        text. `at_start` says that `data` is such a text, and not what follows on other text.
        """
        tokens = ids.tolist()
        pieces = [self._pieces[token] for token in tokens]
        controls = [index for index, piece in enumerate(pieces) if not piece]
        if controls and not parse_special:
            return None
        for index in controls:
            pieces[index] = self._control_texts[tokens[index]]
            if not pieces[index]:
                return None
        if self._adds_space:
            starts = [0, *(index + 1 for index in controls)] if at_start else [index + 1 for index in controls]
            for index in starts:
                if index < len(pieces):
                    pieces[index] = pieces[index].removeprefix(b" ")
        if b"".join(pieces) != data:
            return None
        ends = np.cumsum(np.fromiter(map(len, pieces), np.int32, len(pieces)), dtype=np.int32)
        return ends, np.array(controls, dtype=np.int32)

    @cached_property
    def _start(self) -> list[int]:
        """What the model wants before a text. What it wants after one follows here, and then no text begins so."""
        return list(self._tokenize("", True, False).tolist())

    @cached_property
    def _adds_space(self) -> bool:
        ids = self._tokenize("a", False, False).tolist()
        return b"".join(self._pieces[token] for token in ids) == b" a"
