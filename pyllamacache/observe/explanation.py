"""`Explanation`: why a prompt was, or would be, prefilled again. No text and no ids but where they are asked for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .difference import Change

if TYPE_CHECKING:
    from ..request import Reason, Source
    from .difference import Difference, Unit
    from .evidence import Lost
    from .places import Place
    from .volatile import Volatile

CHANGE_WORDS = {
    Change.IDENTICAL: "the same prompt again",
    Change.APPENDED: "the earlier prompt, and more behind it",
    Change.TRUNCATED: "the beginning of an earlier prompt",
    Change.OTHER_TOKENS: "the same text in other tokens",
    Change.REORDERED_BLOCKS: "the same blocks in another order",
    Change.UNRELATED: "nothing in common with an earlier prompt",
    Change.CUT_FRONT: "the front was cut off",
    Change.OTHER_HEADER: "another header in front of the same",
    Change.INSERTED_SPAN: "something was put in between",
    Change.REMOVED_MIDDLE: "something in the middle was removed",
    Change.BRANCHED: "the same beginning, then something else",
    Change.CHANGED_SPAN: "something in the middle changed",
}


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What the engine did and had. Tokens."""

    matched_tokens: int
    resumed_tokens: int
    prefilled_tokens: int
    source: Source
    reason: Reason
    position: int
    """As in `CacheReport`."""
    has_state: bool = False
    """It could go back to checkpoints only."""
    checkpoint: int | None = None
    """The deepest usable one at or before what matched."""
    lost: Lost | None = None
    """The checkpoint that would have been used."""
    compared_age_s: float | None = None
    """How long before the request the one it is compared with began."""


@dataclass(frozen=True, slots=True)
class Windows:
    """What was there and what is there now, cut to what can be shown. Ids are empty where there are none."""

    old_ids: tuple[int, ...] = ()
    new_ids: tuple[int, ...] = ()
    old_text: str | None = None
    new_text: str | None = None


@dataclass(frozen=True, slots=True)
class Explanation:
    """Printed, it is a few lines of text. `text` and `token_ids` give what was there and what is there now.

    Neither `repr`, `str` nor `to_dict` has any of it, unless the explanation was asked for with `show_text`.
    """

    unit: Unit
    difference: Difference | None
    """From the earlier prompt that is most like it; None: none is known, or the engine matched an older one further."""
    position: int
    """The first token, or byte, that differs."""
    place: Place
    """Where in the new prompt that is."""
    old_place: Place
    """Where in the earlier one; a path of "reply" is what was generated."""
    volatile: Volatile | None
    """What kind of changing text stands there."""
    cost: int
    """In `unit`: what was prefilled; without an engine, what comes from `position` on."""
    cost_s: float | None
    """Seconds at the rate of prefill measured so far; None: not known."""
    suggestion: str
    engine: EngineFacts | None = None
    shows_text: bool = False
    windows: Windows = field(default_factory=Windows, repr=False, compare=False)

    @property
    def change(self) -> Change | None:
        return None if self.difference is None else self.difference.change

    def text(self) -> tuple[str, str] | None:
        """What was there and what is there now; None: these were token ids without a text."""
        windows = self.windows
        if windows.old_text is None or windows.new_text is None:
            return None
        return windows.old_text, windows.new_text

    def token_ids(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The same as ids, the first of them."""
        return self.windows.old_ids, self.windows.new_ids

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        difference, engine = self.difference, self.engine
        found: dict[str, Any] = {
            "change": None if difference is None else difference.change.value,
            "unit": self.unit,
            "position": self.position,
            "path": self.place.path,
            "role": self.place.role,
            "message": self.place.message,
            "tool": self.place.tool,
            "old_path": self.old_place.path,
            "volatile": None if self.volatile is None else self.volatile.value,
            "cost": self.cost,
            "cost_s": self.cost_s,
            "suggestion": self.suggestion,
        }
        if difference is not None:
            for name in ("n_old", "n_new", "old_changed", "new_changed", "identical_after", "moved", "n_places"):
                found[name] = getattr(difference, name)
            found["share_identical"] = round(difference.share_identical, 4)
        if engine is not None:
            found["engine"] = _engine_dict(engine)
        if self.shows_text:
            found["old"], found["new"] = self.text() or self.token_ids()
        return found

    def __str__(self) -> str:
        lines = [self._cost_line(), self._change_line()]
        if self.engine is not None:
            lines.append(_engine_line(self.engine))
        if self.shows_text:
            old, new = self.text() or self.token_ids()
            lines += [f"was: {old!r}", f"now: {new!r}"]
        lines.append(f"suggestion: {self.suggestion}")
        return "\n".join(line for line in lines if line)

    def _cost_line(self) -> str:
        took = "" if self.cost_s is None else f", about {self.cost_s:.3g} s"
        if self.engine is None:
            n_new = 0 if self.difference is None else self.difference.n_new
            return f"{self.cost:,} of {n_new:,} {self.unit} come at or behind the first difference{took}"
        n_prompt = self.engine.resumed_tokens + self.engine.prefilled_tokens
        return f"{self.cost:,} of {n_prompt:,} prompt tokens were prefilled{took}"

    def _change_line(self) -> str:
        found, unit = self.difference, self.unit
        where = f" in {self.place}" if self.place.path else ""
        if found is None:
            return f"the prompt leaves what is known at {unit[:-1]} {self.position:,}{where}" if self.position else ""
        words = f"{found.change.value}: {CHANGE_WORDS[found.change]}"
        if found.change in (Change.IDENTICAL, Change.UNRELATED):
            return words
        kind = "" if self.volatile is None else f", which looks like a {self.volatile.value}"
        line = f"{words}; first difference at {unit[:-1]} {found.position:,}{where}{kind}"
        if found.old_changed or found.change is not Change.APPENDED:
            there = unit[:-1] if found.old_changed == 1 else unit
            line += f"; {found.old_changed:,} {there} there became {found.new_changed:,}"
        if found.identical_after or found.moved:
            line += f"; {found.identical_after:,} behind it ({found.share_identical:.1%}) are as before"
            line += f", {found.moved:,} only moved" if found.moved else ""
        return line


def _engine_dict(engine: EngineFacts) -> dict[str, Any]:
    lost = engine.lost
    return {
        "matched_tokens": engine.matched_tokens,
        "resumed_tokens": engine.resumed_tokens,
        "prefilled_tokens": engine.prefilled_tokens,
        "source": engine.source.value,
        "reason": engine.reason.value,
        "position": engine.position,
        "checkpoint": engine.checkpoint,
        "lost": None if lost is None else {"position": lost.position, "reason": lost.reason, "age_s": lost.age_s},
        "compared_age_s": engine.compared_age_s,
    }


def _engine_line(engine: EngineFacts) -> str:
    resumed = (
        f"resumed at {engine.resumed_tokens:,} ({engine.source.value})" if engine.resumed_tokens else "started over"
    )
    line = f"engine: matched {engine.matched_tokens:,}, {resumed}; reason {engine.reason.value} at {engine.position:,}"
    if engine.has_state and engine.resumed_tokens < engine.matched_tokens:
        nearest = "none" if engine.checkpoint is None else f"{engine.checkpoint:,}"
        line += f"; nearest checkpoint: {nearest}"
    if engine.lost is not None:
        lost = engine.lost
        line += f"; the one at {lost.position:,} was given up {lost.age_s:.3g} s before: {lost.reason}"
    return line
