"""Prefixes that were there and no longer are, by a digest: to say that a request missed one, and why."""

from __future__ import annotations

from collections import OrderedDict
from hashlib import blake2b
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from ..request import Ids

MAX_EVICTED = 4096
"""Those given up for want of room that are remembered."""

MAX_GONE = 256
"""And those given up for another reason."""


class Evicted(NamedTuple):
    """Of a prefix that is no longer there."""

    is_missed: bool
    """It was given up for want of room."""
    reason: str
    at_s: float
    """On the clock of whoever gave it up."""


class EvictedPrefixes:
    """The latest ones, the oldest first. Those given up for other reasons push out none given up for want of room."""

    def __init__(self) -> None:
        self._missed: OrderedDict[tuple[str, int, bytes], Evicted] = OrderedDict()
        self._others: OrderedDict[tuple[str, int, bytes], Evicted] = OrderedDict()

    def add(self, namespace: str, ids: Ids, evicted: Evicted) -> None:
        """What became of this prefix."""
        known, limit = (self._missed, MAX_EVICTED) if evicted.is_missed else (self._others, MAX_GONE)
        known[namespace, len(ids), _digest(ids)] = evicted
        if len(known) > limit:
            known.popitem(last=False)

    def deepest(self, namespace: str, ids: Ids, after: int, upto: int, *, is_missed: bool = True) -> int:
        """The deepest position in (after, upto] at which a prefix of `ids` once was; 0: none.

        With `is_missed` False, one that was given up for another reason than want of room.
        """
        known = self._missed if is_missed else self._others
        mine = {position for space, position, _ in known if space == namespace}
        found, start, running = 0, 0, blake2b(digest_size=16)
        for position in sorted(position for position in mine if after < position <= upto):
            running.update(ids[start:position].tobytes())
            start = position
            if (namespace, position, running.digest()) in known:
                found = position
        return found

    def what_became_of(self, namespace: str, ids: Ids) -> Evicted | None:
        """Of exactly this prefix; None: it is not known to be gone."""
        key = (namespace, len(ids), _digest(ids))
        return self._missed.get(key) or self._others.get(key)

    def forget(self, namespace: str | None = None) -> None:
        """Those of one namespace or (None) of all."""
        for known in (self._missed, self._others):
            for key in [key for key in known if namespace in (None, key[0])]:
                del known[key]


def _digest(ids: Ids) -> bytes:
    return blake2b(ids.tobytes(), digest_size=16).digest()
