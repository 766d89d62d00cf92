"""Two prompts beside each other, without an engine: ids, texts, or requests with messages and tools."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from ..errors import InvalidRequestError
from .advice import advise_on_prompt
from .difference import Change, Difference, compare
from .explanation import Explanation, Windows
from .places import Place, Serialised, serialise
from .windows import MAX_SHOWN_IDS, Seen, shown, volatile_at

if TYPE_CHECKING:
    from .difference import Unit

Ids = npt.NDArray[np.int64]
_MAX_ITEMS = 4000


class Tokenizer(Protocol):
    """A `Model` is one."""

    def tokenize(self, text: str, add_special: bool, parse_special: bool) -> Sequence[int]:
        """Text to ids."""
        ...


@dataclass(frozen=True, slots=True)
class Input:
    """`data` is None for ids; `ids` is None where bytes are counted."""

    data: bytes | None
    ids: Ids | None
    serial: Serialised | None = None


def read(value: Any, name: str, tools: object, model: Tokenizer | None) -> Input:
    """Whatever `explain` takes. Raises InvalidRequestError, which names it by `name`."""
    if isinstance(value, str):
        ids = None if model is None else np.asarray(model.tokenize(value, True, False), dtype=np.int64)
        return Input(value.encode(errors="replace"), ids)
    if isinstance(value, Mapping):
        if "messages" not in value:
            raise InvalidRequestError(name, 'has no "messages"')
        return read_messages(value["messages"], value.get("tools") or tools, model)
    if isinstance(value, Sequence) and (not isinstance(value[0], (int, np.integer)) if value else tools):
        return read_messages(value, tools, model)
    problem = "expected token ids, a text, a list of messages or a request with them"
    try:
        array = np.asarray(value)
    except ValueError:
        raise InvalidRequestError(name, problem) from None
    if array.ndim != 1 or (len(array) and array.dtype.kind not in "iu"):
        raise InvalidRequestError(name, problem)
    return Input(None, array.astype(np.int64))


def read_messages(messages: object, tools: object, model: Tokenizer | None) -> Input:
    """Raises InvalidRequestError, which names the message or tool."""
    serial = serialise(messages, tools)
    return Input(b"".join(serial.pieces), None if model is None else tokens_of(serial, model), serial)


def tokens_of(serial: Serialised, model: Tokenizer) -> Ids:
    """Each leaf by itself, so that every leaf begins with a token."""
    pieces = [model.tokenize(piece.decode(), False, False) for piece in serial.pieces]
    return np.array([token for piece in pieces for token in piece], dtype=np.int64)


def explain_inputs(old: Input, new: Input, *, show_text: bool) -> Explanation:
    """Of the same kind, both with ids or both without. Places come from their bytes, counts from ids if there are."""
    unit: Unit = "bytes" if new.ids is None else "tokens"
    in_bytes = None
    if old.data is not None and new.data is not None:
        in_bytes = compare(*(np.frombuffer(data, dtype=np.uint8) for data in (old.data, new.data)), unit="bytes")
    difference = in_bytes
    if old.ids is not None and new.ids is not None:
        difference = compare(old.ids, new.ids)
    assert difference is not None
    change = None if old.serial is None or new.serial is None else _items_change(old.serial, new.serial)
    seen = _look_at_inputs(old, new, in_bytes or difference)
    if change is not None:
        difference = replace(difference, change=change)
        seen = replace(seen, place=seen.place.whole(), old_place=seen.old_place.whole())
    advice = advise_on_prompt(difference, seen.place, seen.old_place, seen.volatile)
    return Explanation(
        unit=unit,
        difference=difference,
        position=difference.position,
        place=seen.place,
        old_place=seen.old_place,
        volatile=seen.volatile,
        cost=difference.n_new - difference.position,
        cost_s=None,
        suggestion=advice or "nothing to do: the rest is new",
        shows_text=show_text,
        windows=seen.windows,
    )


def _look_at_inputs(old: Input, new: Input, found: Difference) -> Seen:
    first = found.hunks[0] if found.hunks else None
    old_span = (found.position, found.position) if first is None else (first.old_start, first.old_end)
    new_span = (found.position, found.position) if first is None else (first.new_start, first.new_end)
    if old.data is None or new.data is None:
        return Seen(Place(), Place(), None, Windows(_cut(old.ids, old_span), _cut(new.ids, new_span)))
    return Seen(
        Place() if new.serial is None else place_at(new.serial, new_span[0]),
        Place() if old.serial is None else place_at(old.serial, old_span[0]),
        volatile_at(old.data, old_span, new.data, new_span),
        Windows(old_text=shown(old.data, old_span), new_text=shown(new.data, new_span)),
    )


def _cut(ids: Ids | None, span: tuple[int, int]) -> tuple[int, ...]:
    return () if ids is None else tuple(map(int, ids[slice(*span)][:MAX_SHOWN_IDS]))


def place_at(serial: Serialised, offset: int) -> Place:
    """The leaf that a byte of the serialisation lies in; nothing behind its end."""
    ends = np.cumsum([len(piece) for piece in serial.pieces])
    at = int(np.searchsorted(ends, offset, side="right"))
    return serial.leaves[at].place if at < len(serial.leaves) else Place()


def _items_change(old: Serialised, new: Serialised) -> Change | None:
    """What happened to whole messages and tools; None if some changed within, or there are too many."""
    if max(len(old.items), len(new.items)) > _MAX_ITEMS:
        return None
    numbers: dict[bytes, int] = {}
    mine, its = ([numbers.setdefault(said, len(numbers)) for _, said in side.items] for side in (new, old))
    steps = [
        step for step in difflib.SequenceMatcher(None, its, mine, autojunk=False).get_opcodes() if step[0] != "equal"
    ]
    if not steps:
        return Change.IDENTICAL
    if len(steps) > 1 and steps[-1][2] == len(its) and steps[-1][4] == len(mine):
        tail, steps = steps[-1], steps[:-1]
        added_behind = mine[tail[3] : tail[4]]
    else:
        added_behind = []
    removed = Counter(item for step in steps for item in its[step[1] : step[2]])
    added = Counter(item for step in steps for item in mine[step[3] : step[4]])
    moved = removed & (added + Counter(added_behind))
    if moved and 2 * moved.total() >= removed.total():
        return Change.REORDERED_BLOCKS
    if removed and added:
        return None
    if not removed:
        is_end = steps[0][1] == len(its)
        return Change.APPENDED if is_end else Change.INSERTED_SPAN
    if steps[0][1] == 0:
        return Change.CUT_FRONT
    return Change.TRUNCATED if steps[0][2] == len(its) else Change.REMOVED_MIDDLE
