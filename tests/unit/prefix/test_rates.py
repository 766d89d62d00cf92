from __future__ import annotations

import pytest

from pyllamacache.prefix.rates import MAX_MIN_GAP_TOKENS, Rates


def learned(*, token_s: float, capture_s: float, restore_s: float | None = None, n_bytes: int = 1000) -> Rates:
    rates = Rates()
    rates.prefilled(10, 10 * token_s)
    rates.captured(n_bytes, capture_s)
    if restore_s is not None:
        rates.restored(n_bytes, restore_s)
    return rates


def test_nothing_is_demanded_while_nothing_is_known() -> None:
    rates = Rates()
    assert rates.min_gap_tokens(1000) == 0
    assert rates.prefill_s_per_token is None
    rates.prefilled(10, 1.0)
    rates.restored(1000, 1.0)
    assert rates.min_gap_tokens(1000) == 0
    only_moved = Rates()
    only_moved.captured(1000, 1.0)
    assert only_moved.min_gap_tokens(1000) == 0


def test_the_gap_is_what_capturing_and_restoring_would_prefill() -> None:
    """Of a state, in tokens: 6 and 10. A restore counts as two captures at most."""
    assert learned(token_s=0.5, capture_s=3, restore_s=5).min_gap_tokens(1000) == 16
    assert learned(token_s=0.5, capture_s=3, restore_s=9).min_gap_tokens(1000) == 18
    assert learned(token_s=0.5, capture_s=3, restore_s=2).min_gap_tokens(1000) == 10


def test_a_restore_that_was_never_seen_counts_as_two_captures() -> None:
    assert learned(token_s=1, capture_s=4).min_gap_tokens(1000) == 12


def test_the_gap_follows_the_size_of_the_state() -> None:
    rates = learned(token_s=1, capture_s=4, restore_s=4, n_bytes=1024)
    assert [rates.min_gap_tokens(n_bytes) for n_bytes in (0, 128, 1024, 2048)] == [0, 1, 8, 16]


def test_more_than_so_much_is_never_demanded() -> None:
    assert learned(token_s=1e-6, capture_s=1.0).min_gap_tokens(1000) == MAX_MIN_GAP_TOKENS
    assert learned(token_s=0.001, capture_s=1e300).min_gap_tokens(10**12) == MAX_MIN_GAP_TOKENS


def test_prefill_is_the_median_so_that_one_slow_call_changes_nothing() -> None:
    rates = Rates()
    for _ in range(9):
        rates.prefilled(100, 0.1)
    rates.prefilled(100, 60.0)
    assert rates.prefill_s_per_token == pytest.approx(0.001)


def test_prefill_follows_recent_calls() -> None:
    rates = Rates()
    for _ in range(100):
        rates.prefilled(1, 1.0)
    for _ in range(16):
        rates.prefilled(1, 2.0)
    assert rates.prefill_s_per_token == 2.0


def test_a_call_that_took_no_time_teaches_nothing() -> None:
    rates = Rates()
    rates.prefilled(100, 0.0)
    assert rates.prefill_s_per_token is None


def test_moving_is_the_fastest_seen_so_that_noise_only_adds_checkpoints() -> None:
    rates = learned(token_s=1, capture_s=1, restore_s=1)
    before = rates.min_gap_tokens(1000)
    rates.captured(1000, 5)
    rates.restored(1000, 5)
    assert rates.min_gap_tokens(1000) == before == 2
    rates.captured(1000, 0.0)
    assert rates.min_gap_tokens(1000) == 0
