"""What a prefix cache can reach over a log of requests, and where and why it cannot reach more."""

from __future__ import annotations

import json
import os
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import ConfigError, InvalidRequestError
from .advice import BREAKS, UNSTABLE_JSON
from .audit import JSON_FORM, audit, json_value
from .difference import Change, Unit, common_length, overlap
from .inputs import Input, explain_inputs, read
from .volatile import Volatile

if TYPE_CHECKING:
    from .audit import Audit
    from .explanation import Explanation
    from .inputs import Tokenizer
    from .places import Serialised

_MAX_COMPARED = 32
_MAX_SIMILAR = 6
_MIN_COST: dict[Unit, int] = {"tokens": 16, "bytes": 64}


@dataclass(frozen=True, slots=True)
class Break:
    """A request that goes on with an earlier one, but for a change that costs what follows it."""

    request: int
    """Number in the log, from 1: the line, in a file."""
    earlier: int
    """That of the one it goes on with."""
    kind: str
    """A `Change`, or "json_form": the same JSON written otherwise."""
    volatile: str | None
    """A `Volatile` kind, where the change looks like one."""
    path: str
    position: int
    cost: int
    """What the earlier one had too, behind the change: reusable if it were not for that. In `unit` of the audit."""
    suggestion: str

    def __str__(self) -> str:
        kind = self.kind if self.volatile is None else f"{self.kind} ({self.volatile})"
        where = f" in {self.path}" if self.path else ""
        return f"request {self.request} after {self.earlier}: {kind}{where} at {self.position:,} costs {self.cost:,}"


@dataclass(frozen=True, slots=True)
class LogAudit:
    """Printed, it is the hit rate and the breaks, the costliest first."""

    unit: Unit
    n_requests: int
    size: int
    """Of all requests, without what templates add."""
    reachable: int
    """What of it a cache that forgets nothing would have: with anything earlier in common at the front."""
    breaks: tuple[Break, ...] = ()
    """As they come."""
    skipped: tuple[InvalidRequestError, ...] = ()
    """What was not a request, by line."""
    latest: Audit | None = None
    """Of the last request by itself."""

    @property
    def hit_rate(self) -> float:
        """`reachable` of `size`; 0 without requests."""
        return self.reachable / self.size if self.size else 0.0

    @property
    def avoidable(self) -> float:
        """How much the hit rate would gain without the breaks, at most."""
        return sum(each.cost for each in self.breaks) / self.size if self.size else 0.0

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        found = {name: getattr(self, name) for name in ("unit", "n_requests", "size", "reachable")}
        found |= {"hit_rate": round(self.hit_rate, 4), "avoidable": round(self.avoidable, 4)}
        found |= {"breaks": [asdict(each) for each in self.breaks], "skipped": [str(each) for each in self.skipped]}
        return found | {"latest": None if self.latest is None else self.latest.to_dict()}

    def __str__(self) -> str:
        what = f"{self.n_requests:,} requests, {self.size:,} {self.unit}"
        lines = [f"{what}: a prefix cache reaches a hit rate of {self.hit_rate:.1%}"]
        if self.breaks:
            breaks = "1 break costs" if len(self.breaks) == 1 else f"{len(self.breaks):,} breaks cost"
            lines.append(f"{breaks} {self.avoidable:.1%} of all {self.unit}; the costliest:")
        worst = sorted(self.breaks, key=lambda each: -each.cost)[:10]
        for each in worst:
            lines += [f"  {each} {self.unit}", f"    {each.suggestion}"]
        found = () if self.latest is None else self.latest.findings
        lines += [f"in the latest request: {each}" for each in found if each.severity != "low"]
        lines += [f"skipped: {each}" for each in self.skipped[:10]]
        return "\n".join(lines)


def audit_log(
    requests: str | os.PathLike[str] | Iterable[Any], *, model: Tokenizer | None = None, strict: bool = False
) -> LogAudit:
    """The hit rate that a prefix cache can reach over requests in their order, and each break with its cost.

    Args:
        requests: bodies with "messages" and "tools", also inside "request" or "body", or lists of messages; or the
            path of a file with one a line, as JSON.
        model: counts in tokens; without one, in bytes.
        strict: raise for the first line that is not a request, which are skipped otherwise.

    Raises:
        ConfigError: the file cannot be read.
        InvalidRequestError: names the line; without `strict`, nothing was a request.
    """
    walk, skipped = _Walk(), []
    for number, value in _numbered(requests):
        try:
            walk.add(number, _request(value, f"line {number}", model))
        except InvalidRequestError as error:
            if strict:
                raise
            skipped.append(error)
    if skipped and not walk.n_requests:
        raise skipped[0]
    unit: Unit = "bytes" if model is None else "tokens"
    latest = None if walk.latest is None else audit(walk.latest.messages, tools=walk.latest.tools, model=model)
    return LogAudit(unit, walk.n_requests, walk.size, walk.reachable, tuple(walk.breaks), tuple(skipped), latest)


def _numbered(requests: str | os.PathLike[str] | Iterable[Any]) -> Iterator[tuple[int, Any]]:
    if not isinstance(requests, (str, os.PathLike)):
        yield from enumerate(requests, 1)
        return
    try:
        with open(requests, encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield number, line
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError("log", os.fspath(requests), f"a readable file of JSON lines; {why}") from None


def _request(value: Any, where: str, model: Tokenizer | None) -> Input:
    for _ in range(3):  # a line, an envelope, and a body that is text again
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except (ValueError, RecursionError):
                raise InvalidRequestError(where, "is not JSON") from None
        if isinstance(value, Mapping) and "messages" not in value:
            value = value.get("request", value.get("body", value))
    if isinstance(value, Mapping) and "messages" not in value:
        raise InvalidRequestError(where, 'has no "messages"')
    if not isinstance(value, (Mapping, list, tuple)):
        raise InvalidRequestError(where, f"expected an object, got {type(value).__name__}")
    try:
        return read(value, where, None, model) if value else read({"messages": value}, where, None, model)
    except InvalidRequestError as error:
        raise InvalidRequestError(f"{where}, {error.field}", str(error).removeprefix(f"{error.field}: ")) from None


@dataclass(frozen=True, slots=True)
class _Seen:
    number: int
    request: Input
    array: Any


class _Walk:
    """Requests one after the other."""

    def __init__(self) -> None:
        self.n_requests = self.size = self.reachable = 0
        self.breaks: list[Break] = []
        self.latest: Serialised | None = None
        self._sorted: list[bytes] = []
        """All requests. Of those, one beside where a new one belongs has most of its beginning."""
        self._latest: deque[_Seen] = deque(maxlen=_MAX_COMPARED)

    def add(self, number: int, request: Input) -> None:
        array = np.frombuffer(request.data or b"", dtype=np.uint8) if request.ids is None else request.ids
        self.n_requests += 1
        self.size += len(array)
        self.reachable += max(0, min(self._longest(array), len(array) - 1))
        self.latest = request.serial
        now = _Seen(number, request, array)
        found = self._find_break(now)
        if found is not None:
            self.breaks.append(found)
        self._latest.append(now)

    def _longest(self, array: Any) -> int:
        """With any earlier one in common at the front."""
        width = 1 if array.dtype == np.uint8 else 4
        key = array.tobytes() if width == 1 else array.astype(">u4").tobytes()
        at = bisect_left(self._sorted, key)
        mine = np.frombuffer(key, dtype=np.uint8)
        beside = [np.frombuffer(each, dtype=np.uint8) for each in self._sorted[max(0, at - 1) : at + 1]]
        self._sorted.insert(at, key)
        return max((common_length(each, mine) for each in beside), default=0) // width

    def _find_break(self, now: _Seen) -> Break | None:
        common = [(common_length(each.array, now.array), each) for each in reversed(self._latest)]
        common.sort(key=lambda pair: -pair[0])  # the latest of equals stays first
        if not common or any(n_common >= len(each.array) for n_common, each in common):
            return None  # it goes on with all of an earlier one
        unit: Unit = "bytes" if now.request.ids is None else "tokens"
        near = self._near(common)
        scores = [n_common / len(now.array) + overlap(each.array, now.array, unit=unit) for n_common, each in near]
        earlier = near[int(np.argmax(scores))][1]
        explained = explain_inputs(earlier.request, now.request, show_text=False)
        return _break(earlier, now, explained)

    @staticmethod
    def _near(common: list[tuple[int, _Seen]]) -> list[tuple[int, _Seen]]:
        """The best at the front, and the latest: what changed at the front has little there."""
        latest = sorted(common, key=lambda pair: -pair[1].number)[:_MAX_SIMILAR]
        return [*latest, *(pair for pair in common[:_MAX_SIMILAR] if pair not in latest)]


def _break(earlier: _Seen, now: _Seen, explained: Explanation) -> Break | None:
    difference = explained.difference
    assert difference is not None
    is_break = difference.change in BREAKS or (explained.volatile is not None and explained.place.is_header)
    cost = difference.identical_after + difference.moved
    if not is_break or cost < _MIN_COST[difference.unit] or 10 * cost < difference.n_new - difference.position:
        return None  # another conversation says something like it
    kind, suggestion = difference.change.value, explained.suggestion
    if difference.change is Change.CHANGED_SPAN and _is_same_json(earlier.request, now.request, explained):
        kind, suggestion = JSON_FORM, UNSTABLE_JSON
    volatile = explained.volatile
    return Break(
        now.number,
        earlier.number,
        kind,
        volatile.value if isinstance(volatile, Volatile) else None,
        explained.place.path,
        difference.position,
        cost,
        suggestion,
    )


def _is_same_json(earlier: Input, now: Input, explained: Explanation) -> bool:
    if earlier.serial is None or now.serial is None or explained.place.path != explained.old_place.path:
        return False
    texts = [
        next((leaf.text for leaf in side.leaves if leaf.place.path == explained.place.path), "")
        for side in (earlier.serial, now.serial)
    ]
    values = [json_value(text) for text in texts]
    return values[0] is not None and values[0] == values[1] and texts[0] != texts[1]
