from __future__ import annotations

import numpy as np
import pytest

from pyllamacache.prefix.match import common_prefix_len

LENGTHS = [0, 1, 2, 127, 128, 129, 1151, 1152, 1153, 9343, 9344, 9345, 100_000]


def ids(n_tokens: int) -> np.ndarray:
    return np.arange(n_tokens, dtype=np.int32)


@pytest.mark.parametrize("n_tokens", LENGTHS)
def test_equal_arrays_match_whole(n_tokens: int) -> None:
    assert common_prefix_len(ids(n_tokens), ids(n_tokens)) == n_tokens


@pytest.mark.parametrize("n_tokens", LENGTHS)
def test_a_prefix_matches_whole_from_either_side(n_tokens: int) -> None:
    longer = ids(n_tokens + 5)
    assert common_prefix_len(ids(n_tokens), longer) == n_tokens
    assert common_prefix_len(longer, ids(n_tokens)) == n_tokens


@pytest.mark.parametrize("at", [0, 1, 126, 127, 128, 129, 1151, 1152, 1153, 9343, 9344, 99_999])
def test_the_match_ends_at_the_first_difference(at: int) -> None:
    one, other = ids(100_000), ids(100_000)
    other[at:] = -1
    assert common_prefix_len(one, other) == at
    other[at + 1 :] = one[at + 1 :]
    assert common_prefix_len(one, other) == at


def test_the_result_is_a_plain_int() -> None:
    assert type(common_prefix_len(ids(3), ids(2))) is int
