"""What of a request will be another one at the next call, found before it is sent."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from .advice import VOLATILE_WORDS
from .places import serialise
from .volatile import find_volatile

if TYPE_CHECKING:
    from .difference import Unit
    from .inputs import Tokenizer
    from .places import Leaf, Serialised
    from .volatile import Sighting

Severity = Literal["high", "medium", "low"]
_RANKS: dict[str, int] = {"high": 0, "medium": 1, "low": 2}
_LONG_FLOAT = re.compile(r"\d\.\d{13,}")
TOOL_ORDER = "tool_order"
JSON_FORM = "json_form"


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that costs a prefill of all that follows it, if it changes. No text of the request."""

    kind: str
    """A `Volatile` kind, "tool_order" or "json_form"."""
    path: str
    """The field, such as "messages[0].content"."""
    position: int
    """Where it begins, in `unit`, tools first, without what a template adds."""
    weight: int
    """What stands there and behind it, in `unit`: what a change would cost."""
    unit: Unit
    severity: Severity
    """high: written so, it is not constant. medium: it may be. low: it is if the code that builds it is."""
    suggestion: str

    def __str__(self) -> str:
        where = f"{self.kind} in {self.path} at {self.unit[:-1]} {self.position:,}"
        return f"{self.severity}: {where}, {self.weight:,} {self.unit} at or behind it: {self.suggestion}"


@dataclass(frozen=True, slots=True)
class Audit:
    """Of one request. Printed, it is a line for each finding."""

    unit: Unit
    size: int
    """Of tools and messages together, without what a template adds."""
    findings: tuple[Finding, ...] = ()
    """The worst first."""

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    def __str__(self) -> str:
        if not self.findings:
            return f"nothing found in {self.size:,} {self.unit}"
        return "\n".join(map(str, self.findings))


def audit(messages: Any, *, tools: object = None, model: Tokenizer | None = None) -> Audit:
    """Point at what will change with the next call: clocks, ids and counters above stable text, loose orders.

    Args:
        messages: in OpenAI's shape, or a request body with "messages" and "tools".
        model: counts in tokens; without one, in bytes.

    Raises:
        InvalidRequestError: not messages.
    """
    if isinstance(messages, Mapping) and "messages" in messages:
        tools, messages = messages.get("tools") or tools, messages["messages"]
    request = serialise(messages, tools)
    ruler = _Ruler(request, model)
    found = [*_volatile_findings(request, ruler), *_order_findings(request, ruler), *_json_findings(request, ruler)]
    found.sort(key=lambda each: (_RANKS[each.severity], each.position))
    return Audit(ruler.unit, ruler.size, tuple(found))


class _Ruler:
    """Positions of leaves, and of places in them."""

    def __init__(self, serial: Serialised, model: Tokenizer | None) -> None:
        self.unit: Unit = "bytes" if model is None else "tokens"
        self._model = model
        self._serial = serial
        sizes = [self._measure(piece) for piece in serial.pieces] if model is not None else map(len, serial.pieces)
        self._starts = [0, *np.cumsum(list(sizes), dtype=np.int64).tolist()]
        self.size = int(self._starts[-1])

    def _measure(self, piece: bytes) -> int:
        if self._model is None:
            return len(piece)
        return len(self._model.tokenize(piece.decode(errors="ignore"), False, False))

    def at(self, leaf: int, n_before: int = 0) -> int:
        """Position of the character behind the first `n_before` of a leaf's text."""
        shown = self._serial.leaves[leaf]
        prefix = len(f"{shown.key}: ".encode(errors="replace")) if shown.key else 0
        n_bytes = prefix + len(shown.text[:n_before].encode(errors="replace")) if n_before else 0
        return int(self._starts[leaf]) + (self._measure(self._serial.pieces[leaf][:n_bytes]) if n_bytes else 0)

    def finding(self, kind: str, leaf: int, severity: Severity, suggestion: str, *, n_before: int = 0) -> Finding:
        position = self.at(leaf, n_before)
        path = self._serial.leaves[leaf].place.path
        return Finding(kind, path, position, self.size - position, self.unit, severity, suggestion)


def _volatile_findings(serial: Serialised, ruler: _Ruler) -> Iterator[Finding]:
    last = len(serial.messages) - 1
    first_user = next((leaf.place.message for leaf in serial.leaves if leaf.place.role == "user"), None)
    for index, leaf in enumerate(serial.leaves):
        place = leaf.place
        if place.message is not None and place.message == last and last > 0:
            continue  # the place for what changes
        if not (place.is_header or place.message == first_user) or place.path.endswith(".role"):
            continue
        for each in find_volatile(leaf.text):
            if place.is_header or each.is_sure:
                yield _volatile_finding(leaf, each, index, ruler)


def _volatile_finding(leaf: Leaf, each: Sighting, index: int, ruler: _Ruler) -> Finding:
    severity: Severity = "low" if not leaf.place.is_header else "high" if each.is_sure else "medium"
    suggestion = f"move {VOLATILE_WORDS[each.kind]} behind what stays: into the last message"
    return ruler.finding(each.kind.value, index, severity, suggestion, n_before=each.start)


def _order_findings(serial: Serialised, ruler: _Ruler) -> Iterator[Finding]:
    names = [str(tool.get("function", tool).get("name", "")) for tool in serial.tools]
    unordered = [index for index in range(1, len(names)) if names[index] < names[index - 1]]
    if unordered:
        leaf = next(n for n, each in enumerate(serial.leaves) if each.place.tool == unordered[0])
        suggestion = "the order is not that of the names: if nothing else fixes it, sort the tools once"
        yield ruler.finding(TOOL_ORDER, leaf, "low", suggestion)


def _json_findings(serial: Serialised, ruler: _Ruler) -> Iterator[Finding]:
    for index, leaf in enumerate(serial.leaves):
        is_arguments = leaf.place.path.endswith(".arguments")
        if not is_arguments and leaf.place.role != "tool":
            continue
        value = json_value(leaf.text)
        if value is None:
            continue
        if is_arguments and leaf.text not in _json_forms(value):
            suggestion = (
                "parsed and written again, this JSON is another text: send it back as it came, or write it one way"
            )
            yield ruler.finding(JSON_FORM, index, "low", suggestion)
        elif _LONG_FLOAT.search(leaf.text):
            yield ruler.finding(JSON_FORM, index, "low", "round floats before they are written: their last digits vary")


def json_value(text: str) -> Any:
    """An object or array; None if the text is not one."""
    if not text.lstrip().startswith(("{", "[")):
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _json_forms(value: Any) -> set[str]:
    """As the usual writers write it."""
    separators = ((", ", ": "), (",", ":"))
    return {json.dumps(value, ensure_ascii=ascii_, separators=pair) for ascii_ in (True, False) for pair in separators}
