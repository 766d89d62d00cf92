"""Faults a test orders: native calls that fail, and how much they had done by then."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal

from pyllamacache.scheduler.backend import Feed, Outcome

NO_CELLS = 1
REFUSED = -1
LOST_CODES = (2, -2, -3, -100)
POSITION = -102
"""`PLC_E_POSITION`: a part of the memory does not end where the batch begins."""

Call = Literal[
    "trim",
    "trim_raises",
    "share",
    "share_span",
    "span_size",
    "save_span",
    "append_span",
    "erase",
    "load_state",
    "load_state_undo",
    "save_state",
    "state_bytes",
    "begin_capture",
    "capture",
    "resume",
    "new_sampler",
    "step_raises",
    "close",
]


def outcome_of(code: int) -> Outcome:
    """As `native.context` reads `llama_decode`'s return value."""
    if code == 0:
        return Outcome.DONE
    if code == NO_CELLS:
        return Outcome.NO_CELLS
    return Outcome.REFUSED if code in (REFUSED, POSITION) else Outcome.LOST


@dataclass(frozen=True, slots=True)
class GroupFault:
    """A group that reports `code`."""

    code: int
    n_ubatches: int | None = 0
    """Ubatches that were begun; the last of them is left behind as llama.cpp leaves it. 0: nothing was touched. None:
    all were completed, and only then the code is reported."""


@dataclass(frozen=True, slots=True)
class Culprit:
    """A sequence whose groups fail as long as this is set."""

    seq_id: int
    fault: GroupFault
    from_position: int = 0
    """Feeds that end at or before this position are spared."""


@dataclass(slots=True)
class Faults:
    """What will go wrong."""

    by_group: dict[int, GroupFault] = field(default_factory=dict)
    """By number of the group over the backend's life."""
    culprit: Culprit | None = None
    calls: list[Call] = field(default_factory=list)
    """Each fails once, when it is made next."""
    samplings: set[int] = field(default_factory=set)
    """Numbers of samplings over the backend's life that fail."""

    def group(self, number: int, feeds: Collection[Feed]) -> GroupFault | None:
        culprit = self.culprit
        if culprit is not None:
            for feed in feeds:
                if feed.seq_id == culprit.seq_id and feed.start + len(feed.tokens) > culprit.from_position:
                    return culprit.fault
        return self.by_group.pop(number, None)

    def take(self, call: Call) -> bool:
        """Whether this call is to fail."""
        if call not in self.calls:
            return False
        self.calls.remove(call)
        return True


def every_fault() -> Sequence[GroupFault]:
    """Each code, and each state that `llama_decode` can leave behind with it."""
    clean = [GroupFault(code) for code in (NO_CELLS, REFUSED, POSITION)]
    return [*clean, *map(GroupFault, LOST_CODES), GroupFault(-3, 1), GroupFault(-100, None)]
