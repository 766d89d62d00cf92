"""Where a request runs and what it reuses: one frozen decision from frozen views of the slots.

A resume position is at most len(ids) - 1, a multiple of the grid, no more than was matched and computed on the grid,
and one of these: the holder's whole length (the prompt extends it); a length the holder can be cut to; the position
of a checkpoint. Cells are taken from the donor's start, so the donor's own ability to be cut does not matter, nor
whether it is busy; memory with a state takes a checkpoint along, and purely recurrent memory needs nothing else.

The slot is the one with the least tokens to prefill plus tokens lost. With w = min(matched, len(ids) - 1), the
furthest that anyone could have resumed, the first line that applies gives the reason:

    cache_prompt=False                                               DISABLED        0
    nothing matched                                                  COLD            0
    resumed at w, and a longest holder or the prompt ends there      HIT             w
    resumed at w, all longest holders go on differently              DIVERGED        w
    another slot was asked for than one that could resume further    OTHER_SLOT      w
    only busy ones could resume further, and cannot share that       SLOT_BUSY       w
    an idle one could resume further, but would lose more            OTHER_SLOT      w
    resumed at the last place on the grid                            OFF_GRID        the resume position
    no checkpoint there or nearer, where they are taken              NO_CHECKPOINT   w
    it cannot be cut to w                                            NOT_REWINDABLE  w

"Holders" are slots of the same namespace; content of other namespaces counts only as something to lose.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cmp_to_key
from heapq import nlargest
from itertools import pairwise
from typing import TYPE_CHECKING, Protocol

from ..errors import InternalError
from ..request import Reason, Source
from .match import common_prefix_len

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ..request import Ids, SlotId


@dataclass(frozen=True, slots=True)
class SlotView:
    """What the planner sees of a slot. `ids` are those in its memory, positions [0, len)."""

    slot_id: SlotId
    is_busy: bool
    ids: Ids
    namespace: str
    """Means nothing where `ids` is empty."""
    rewind_floor: int
    """Smallest length > 0 it can be cut to. The whole length: it can only be extended; 1 or less: anywhere."""
    exact_tokens: int
    """Exact mode: leading tokens computed in whole grid chunks of prompt tokens. Otherwise the whole length."""
    last_used: int
    """Grows with use."""
    is_parked: bool = False
    """Not a slot: it holds cells and no state, and can only be a donor."""
    is_preferred: bool = False
    """Of slots that serve equally well, the caller wants this one."""


@dataclass(frozen=True, slots=True)
class Rules:
    """What the memory allows. Constant over an engine's life."""

    can_share: bool
    """A slot can take another one's cells."""
    has_state: bool = False
    """Beside cells, or instead of them, a sequence has a state: what is shared, and where it is not merely extended or
    cut within the window, takes a checkpoint."""
    has_cells: bool = True
    """Without cells a checkpoint is all that a resume takes."""
    grid: int = 1
    """Resume positions are multiples of this; `n_ubatch` in exact mode."""
    can_park: bool = False
    """What a slot holds and the prompt does not go on with is parked before the slot is used: nothing is lost."""


class Stored(Protocol):
    """What memory and disk have of a prompt's KV cells."""

    @property
    def is_end(self) -> bool:
        """Nothing that is stored goes on where the prompt leaves what is known."""
        ...

    def reach(self, held_tokens: int) -> int:
        """How far cells get, at least `held_tokens`, when what is stored is put behind those that are held."""
        ...


@dataclass(frozen=True, slots=True)
class Wait:
    """No slot can take the request now: the one asked for is busy, or (None) all are."""

    slot_id: SlotId | None


@dataclass(frozen=True, slots=True)
class Plan:
    """Run in `slot_id`, resume at `resume_tokens`; what the slot holds beyond that goes first.

    SLOT: cut it to `resume_tokens`. SHARED: erase it, then take [0, resume_tokens) of `donor_id`. CHECKPOINT: as one of
    these, and put the state back. HOST: as one of these for the first `held_tokens`, then put back cells that are
    stored, and the state where there is one. NONE: erase it.
    """

    slot_id: SlotId
    source: Source
    donor_id: SlotId | None
    resume_tokens: int
    held_tokens: int
    """How many of these are on the device, in the slot or in the donor."""
    matched_tokens: int
    """Longest common prefix with anything held in the namespace, whether or not it could be resumed."""
    reason: Reason
    position: int
    lost_tokens: int
    """Tokens that were held before and will be held by no slot afterwards."""


@dataclass(frozen=True, slots=True)
class _Holding:
    """A slot's content compared with the prompt."""

    view: SlotView
    matched: int
    """0 in another namespace."""
    direct: int
    """Where the prompt can resume in this slot without a checkpoint."""
    own: int
    """Where it can resume in this slot."""
    shared: int
    """Where it can resume in another slot that takes this one's cells."""
    held: int
    """Tokens of the prompt that it holds cells of, and could resume at as far as those go."""


@dataclass(frozen=True, slots=True)
class _Candidate:
    """An idle slot with the best it can do."""

    slot: _Holding
    resume: int
    donor: _Holding | None
    kept: int
    """Leading tokens of its own content that the slot holds when the prompt is in."""
    lost: int

    @property
    def held(self) -> int:
        return min(self.resume, (self.donor or self.slot).held)

    @property
    def rank(self) -> int:
        """0: the slot is merely extended. 1: it is empty. 2: something of it is given up."""
        n_held = len(self.slot.view.ids)
        return 0 if self.donor is None and 0 < self.kept == n_held else 1 if n_held == 0 else 2

    def cost(self, must_spare: bool) -> tuple[int, int, int, int, bool, int, int]:
        view = self.slot.view
        destroyed = self.lost if must_spare else 0
        new = self.resume - self.held
        return (destroyed, self.lost - self.resume, new, self.rank, not view.is_preferred, view.last_used, view.slot_id)

    def source(self, rules: Rules) -> Source:
        if self.resume == 0:
            return Source.NONE
        if rules.has_cells and self.held < self.resume:
            return Source.HOST
        if self.donor is not None:
            return Source.CHECKPOINT if rules.has_state else Source.SHARED
        return Source.SLOT if self.resume == self.slot.direct else Source.CHECKPOINT


def plan(
    ids: Ids,
    slots: Sequence[SlotView],
    *,
    rules: Rules,
    namespace: str,
    checkpoints: Sequence[int] = (),
    stored: Stored | None = None,
    slot_id: SlotId | None = None,
    cache_prompt: bool = True,
    store: bool = True,
) -> Plan | Wait:
    """Choose slot and resume position for a prompt of `ids`. Effects: none.

    `store=False` must not destroy: where memory cannot be cut anywhere, the slot that loses least is taken, whatever it
    could resume. Memory that cannot be cut everywhere cannot be cut back after the request either, so all that such a
    slot holds counts as lost.

    Args:
        checkpoints: ascending positions at which this prompt, in this namespace, has one.
    Raises:
        InternalError: `ids` is empty, or there is no slot `slot_id`; callers check both.
    """
    if len(ids) == 0 or not (slot_id is None or any(view.slot_id == slot_id for view in slots)):
        raise InternalError(f"plan for {len(ids)} tokens, slot {slot_id} of {len(slots)}")
    asked = [view for view in slots if slot_id in (None, view.slot_id) and not view.is_parked]
    if all(view.is_busy for view in asked):
        return Wait(slot_id)
    if not cache_prompt:
        checkpoints, stored = (), None
    holdings = [_compare(ids, view, rules, namespace, cache_prompt, checkpoints, stored) for view in slots]
    idle = [
        each
        for each in holdings
        if not (each.view.is_busy or each.view.is_parked) and slot_id in (None, each.view.slot_id)
    ]
    chosen = _choose(idle, holdings, rules, store)
    matched = max(each.matched for each in holdings)
    if stored is not None:
        matched = max(matched, *(stored.reach(each.matched) for each in holdings))
    if not rules.has_cells and checkpoints:
        matched = max(matched, checkpoints[-1])
    is_end = stored is not None and stored.is_end
    reason, position = _explain(len(ids), chosen, holdings, matched, rules, slot_id is not None, cache_prompt, is_end)
    return Plan(
        slot_id=chosen.slot.view.slot_id,
        source=chosen.source(rules),
        donor_id=chosen.donor.view.slot_id if chosen.donor else None,
        resume_tokens=chosen.resume,
        held_tokens=chosen.held,
        matched_tokens=matched,
        reason=reason,
        position=position,
        lost_tokens=chosen.lost,
    )


def _compare(
    ids: Ids,
    view: SlotView,
    rules: Rules,
    namespace: str,
    cache_prompt: bool,
    checkpoints: Sequence[int],
    stored: Stored | None,
) -> _Holding:
    is_ours = view.namespace == namespace and len(view.ids) > 0
    matched = common_prefix_len(ids, view.ids) if is_ours else 0
    if not cache_prompt:
        return _Holding(view, matched, 0, 0, 0, 0)
    held = min(matched, view.exact_tokens)
    on_grid = min(held, len(ids) - 1) // rules.grid * rules.grid
    reach = on_grid
    if stored is not None:
        reach = min(stored.reach(held), len(ids) - 1) // rules.grid * rules.grid
    direct = on_grid if matched and not view.is_parked and _can_cut(view, on_grid) else 0
    if not rules.has_state:
        own = reach if reach > on_grid else direct
        return _Holding(view, matched, direct, own, reach if rules.can_share else 0, held)
    upto = reach if rules.has_cells else len(ids) - 1
    deepest = max((position for position in checkpoints if position <= upto), default=0)
    return _Holding(view, matched, direct, max(direct, deepest), deepest if rules.can_share else 0, held)


def _can_cut(view: SlotView, n_tokens: int) -> bool:
    """Or keep whole: the floor is never above the length."""
    return n_tokens >= max(view.rewind_floor, 1)


def _forgets(view: SlotView) -> bool:
    return view.rewind_floor > 1


# ---- which slot ------------------------------------------------------------------------------------------------


def _choose(idle: Sequence[_Holding], holdings: Sequence[_Holding], rules: Rules, store: bool) -> _Candidate:
    must_spare = not store and (rules.has_state or not rules.can_share)
    donors = nlargest(2, holdings, key=lambda each: (each.shared, each.held))
    candidates = [_best_of(each, donors, must_spare, store) for each in idle]
    if rules.can_park and store:
        candidates = [replace(each, lost=0) for each in candidates]
    elif rules.can_share:
        furthest = max(each.resume for each in candidates)
        # an empty or merely extended slot cannot be beaten; any other may tie with one whose content is elsewhere
        if not any(each.lost == 0 and each.resume == furthest and each.rank < 2 for each in candidates):
            elsewhere = _held_elsewhere([each for each in holdings if not each.view.is_parked])
            candidates = [_spare(each, elsewhere) for each in candidates]
    return min(candidates, key=lambda each: each.cost(must_spare))


def _best_of(slot: _Holding, donors: Sequence[_Holding], must_spare: bool, store: bool) -> _Candidate:
    """The furthest a slot can resume, on its own content if that is no worse. The best two donors are enough."""
    donor = next((each for each in donors if each is not slot), None)
    if donor is None or (donor.shared, min(donor.held, donor.shared)) <= (slot.own, min(slot.held, slot.own)):
        donor = None
    resume = slot.own if donor is None else donor.shared
    if store:
        kept = slot.matched  # beyond the resume position, the prompt computes the same tokens again
    elif donor is not None or (must_spare and _forgets(slot.view)):
        kept = 0
    else:
        kept = min(slot.own, slot.matched)  # without cells it can resume beyond what it holds
    return _Candidate(slot, resume, donor, kept, len(slot.view.ids) - kept)


def _spare(candidate: _Candidate, elsewhere: Mapping[SlotId, int]) -> _Candidate:
    """The same candidate, less what it would lose but another slot holds as well."""
    view = candidate.slot.view
    lost = min(candidate.lost, len(view.ids) - elsewhere[view.slot_id])
    return replace(candidate, lost=lost)


def _held_elsewhere(holdings: Sequence[_Holding]) -> dict[SlotId, int]:
    """For each slot, how many of its leading tokens some other slot of its namespace holds too.

    In lexicographic order the longest common prefix is with a neighbour: n log n comparisons, not n squared.
    """
    held = {each.view.slot_id: 0 for each in holdings}
    ordered = sorted((each for each in holdings if len(each.view.ids)), key=cmp_to_key(_order))
    for one, other in pairwise(ordered):
        if one.view.namespace == other.view.namespace:
            n_common = _common(one, other)
            for each in (one.view.slot_id, other.view.slot_id):
                held[each] = max(held[each], n_common)
    return held


def _order(one: _Holding, other: _Holding) -> int:
    if one.view.namespace != other.view.namespace:
        return -1 if one.view.namespace < other.view.namespace else 1
    ours, theirs, n_common = one.view.ids, other.view.ids, _common(one, other)
    if n_common == min(len(ours), len(theirs)):
        return len(ours) - len(theirs)
    return -1 if ours[n_common] < theirs[n_common] else 1


def _common(one: _Holding, other: _Holding) -> int:
    """Common prefix of two slots of one namespace, starting from what is known of both against the prompt."""
    if one.matched != other.matched:
        return min(one.matched, other.matched)
    return one.matched + common_prefix_len(one.view.ids[one.matched :], other.view.ids[one.matched :])


# ---- why not more ----------------------------------------------------------------------------------------------


def _explain(
    n_tokens: int,
    chosen: _Candidate,
    holdings: Sequence[_Holding],
    matched: int,
    rules: Rules,
    is_asked: bool,
    cache_prompt: bool,
    is_end: bool,
) -> tuple[Reason, int]:
    """The table in the module's docstring, line by line."""
    if not cache_prompt:
        return Reason.DISABLED, 0
    if matched == 0:
        return Reason.COLD, 0
    furthest = min(matched, n_tokens - 1)
    holders = [each for each in holdings if each.matched == matched]
    if chosen.resume == furthest:
        ends = matched == n_tokens or is_end or not (rules.has_cells or holders)
        ends = ends or any(len(each.view.ids) == matched for each in holders)
        return Reason.HIT if ends else Reason.DIVERGED, furthest
    if rules.has_state:
        return _explain_state(chosen, holders, furthest, rules, is_asked)
    if rules.can_share and any(each is not chosen.slot for each in holders):
        return Reason.OFF_GRID, chosen.resume
    if chosen.slot not in holders:
        if is_asked:
            return Reason.OTHER_SLOT, furthest
        holders = [each for each in holders if not each.view.is_busy]
        if not holders:
            return Reason.SLOT_BUSY, furthest
        if any(each.own > chosen.resume for each in holders):
            return Reason.OTHER_SLOT, furthest
    else:
        holders = [chosen.slot]
    if any(_can_cut(each.view, furthest) for each in holders):
        return Reason.OFF_GRID, chosen.resume
    return Reason.NOT_REWINDABLE, furthest


def _explain_state(
    chosen: _Candidate, holders: Sequence[_Holding], furthest: int, rules: Rules, is_asked: bool
) -> tuple[Reason, int]:
    """Memory with a state: a checkpoint serves every slot, but what a slot can do without one it can do alone."""
    better = [each for each in holders if each is not chosen.slot and each.direct > chosen.resume]
    if better:
        is_free = is_asked or any(not each.view.is_busy for each in better)
        return Reason.OTHER_SLOT if is_free else Reason.SLOT_BUSY, furthest
    exact = max((min(furthest, each.view.exact_tokens) for each in holders), default=furthest)
    if chosen.resume >= exact // rules.grid * rules.grid:
        return Reason.OFF_GRID, chosen.resume
    return Reason.NO_CHECKPOINT, furthest
