"""What computing a token and moving a state cost on this machine, learned as the engine runs."""

from __future__ import annotations

from collections import deque
from statistics import median

_SAMPLES = 16
MAX_MIN_GAP_TOKENS = 64
"""Measured rates never demand more than this between two checkpoints: states are cheap beside long replays."""


class Rates:
    """Prefill by the median of recent calls, moving by the fastest seen: noise then only adds checkpoints."""

    def __init__(self) -> None:
        self._prefill: deque[float] = deque(maxlen=_SAMPLES)
        self._load_s_per_byte: dict[str, deque[float]] = {}
        self._capture_s_per_byte = float("inf")
        self._restore_s_per_byte = float("inf")

    def prefilled(self, n_tokens: int, seconds: float) -> None:
        """A native call that computed nothing but `n_tokens` of one prompt."""
        if seconds > 0:
            self._prefill.append(seconds / n_tokens)

    def captured(self, n_bytes: int, seconds: float) -> None:
        """Seconds the scheduler's thread was held up."""
        self._capture_s_per_byte = min(self._capture_s_per_byte, seconds / n_bytes)

    def restored(self, n_bytes: int, seconds: float) -> None:
        self._restore_s_per_byte = min(self._restore_s_per_byte, seconds / n_bytes)

    def loaded(self, tier: str, n_bytes: int, seconds: float) -> None:
        """Cells or a state were brought to where they can be put back, and put back."""
        if n_bytes:
            self._load_s_per_byte.setdefault(tier, deque(maxlen=_SAMPLES)).append(seconds / n_bytes)

    def load_s(self, tier: str, n_bytes: int) -> float:
        """What moving that much will take; 0 while nothing is known: the first attempt finds out."""
        samples = self._load_s_per_byte.get(tier)
        return median(samples) * n_bytes if samples else 0.0

    def is_worth_loading(self, tier: str, n_bytes: int, n_tokens: int) -> bool:
        """Whether it takes less time than computing what it saves."""
        per_token = self.prefill_s_per_token
        return per_token is None or self.load_s(tier, n_bytes) < n_tokens * per_token

    @property
    def prefill_s_per_token(self) -> float | None:
        return median(self._prefill) if self._prefill else None

    def min_gap_tokens(self, n_bytes: int) -> int:
        """Tokens whose prefill takes as long as capturing and restoring a state; 0 while nothing is known."""
        per_token = self.prefill_s_per_token
        if per_token is None or self._capture_s_per_byte == float("inf"):
            return 0
        restore = min(self._restore_s_per_byte, 2 * self._capture_s_per_byte)
        n_tokens = n_bytes * (self._capture_s_per_byte + restore) / per_token
        return int(min(n_tokens, MAX_MIN_GAP_TOKENS))
