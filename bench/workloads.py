"""Seeded inputs. Token ids are drawn from the vocabulary: the cost of a token does not depend on which it is."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int32]


def random_ids(n: int, n_vocab: int, seed: int) -> Ids:
    return np.random.default_rng(seed).integers(100, n_vocab - 100, n, dtype=np.int32)


def growing_conversation(n_vocab: int, *, header: int, turns: int, per_turn: int, seed: int) -> list[Ids]:
    """Prompts of an append-only conversation, each extending the one before."""
    ids = random_ids(header + turns * per_turn, n_vocab, seed)
    return [ids[: header + (turn + 1) * per_turn] for turn in range(turns)]
