"""Tokens 0 to 255 are bytes; 256 is a control token without text."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from pyllamacache.request import Ids

EOG = 256


class ByteVocab:
    n_vocab = 257

    def piece(self, token: int) -> bytes:
        return bytes([token]) if token < 256 else b""

    def tokenize(self, text: str) -> Ids:
        return np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int32)
