"""The planner against its own rules, and against a twin that tries every option with plain loops."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from hypothesis import event, given
from hypothesis import strategies as st

from pyllamacache.prefix.plan import Plan, Rules, SlotView, Wait, plan
from pyllamacache.request import Reason, SlotId, Source

if TYPE_CHECKING:
    from pyllamacache.request import Ids

OTHER_NAMESPACES = ("b", "c")


@dataclass(frozen=True)
class Case:
    ids: Ids
    slots: tuple[SlotView, ...]
    rules: Rules
    slot_id: SlotId | None
    cache_prompt: bool
    store: bool

    def plan(self, slots: tuple[SlotView, ...] | None = None) -> Plan | Wait:
        return plan(
            self.ids,
            self.slots if slots is None else slots,
            rules=self.rules,
            namespace="a",
            slot_id=self.slot_id,
            cache_prompt=self.cache_prompt,
            store=self.store,
        )

    def view(self, slot_id: SlotId) -> SlotView:
        return next(view for view in self.slots if view.slot_id == slot_id)

    def matched(self, view: SlotView) -> int:
        return common(self.ids, view.ids) if view.namespace == "a" else 0


def as_ids(values: list[int]) -> Ids:
    return np.array(values, dtype=np.int32)


def common(a: Ids, b: Ids) -> int:
    n_common = 0
    while n_common < min(len(a), len(b)) and a[n_common] == b[n_common]:
        n_common += 1
    return n_common


@st.composite
def conversations(draw: st.DrawFn, shortest: int = 0) -> Ids:
    """Few distinct trunks, cut anywhere and continued: prefixes are shared often and part at any depth."""
    trunk = draw(st.sampled_from([[1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 2, 3, 9, 9, 9, 9, 9]]))
    return as_ids(trunk[: draw(st.integers(shortest, 9))] + draw(st.lists(st.integers(1, 2), max_size=3)))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    can_share = draw(st.booleans())
    grid = draw(st.sampled_from([1, 1, 2, 4]))
    views = []
    for index in range(draw(st.integers(1, 5))):
        ids = draw(conversations())
        floors = [0, 1, 1, len(ids), max(0, len(ids) - 3)]
        views.append(
            SlotView(
                slot_id=SlotId(index),
                is_busy=draw(st.booleans()),
                ids=ids,
                namespace=draw(st.sampled_from(["a", "a", "a", *OTHER_NAMESPACES])),
                rewind_floor=draw(st.sampled_from(floors)),
                exact_tokens=len(ids) if grid == 1 else draw(st.integers(0, len(ids))),
                last_used=draw(st.integers(0, 3)),
            )
        )
    return Case(
        ids=draw(conversations(shortest=1)),
        slots=tuple(views),
        rules=Rules(can_share=can_share, grid=grid),
        slot_id=draw(st.none() | st.sampled_from([view.slot_id for view in views])),
        cache_prompt=draw(st.sampled_from([True, True, True, False])),
        store=draw(st.sampled_from([True, True, False])),
    )


# ---- the twin --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Option:
    view: SlotView
    donor: SlotView | None
    resume: int
    kept: int
    lost: int


def own_positions(case: Case, view: SlotView) -> Iterator[int]:
    yield 0
    for position in range(1, len(case.ids)):
        if position > case.matched(view) or position > view.exact_tokens or position % case.rules.grid:
            continue
        if position == len(view.ids) or position >= view.rewind_floor:
            yield position


def shared_positions(case: Case, donor: SlotView) -> Iterator[int]:
    limit = min(case.matched(donor), donor.exact_tokens, len(case.ids) - 1)
    yield from (position for position in range(1, limit + 1) if position % case.rules.grid == 0)


def lost_tokens(case: Case, view: SlotView, kept: int) -> int:
    """Tokens beyond `kept` that no other slot of the namespace holds."""
    held = [kept]
    if case.rules.can_share:
        others = [each for each in case.slots if each is not view and each.namespace == view.namespace]
        held += [common(view.ids, each.ids) for each in others]
    return len(view.ids) - max(held)


def options(case: Case) -> Iterator[Option]:
    for view in case.slots:
        if view.is_busy or case.slot_id not in (None, view.slot_id):
            continue
        own = max(own_positions(case, view)) if case.cache_prompt else 0
        is_destroyed = not case.store and not case.rules.can_share and view.rewind_floor > 1
        kept = case.matched(view) if case.store else 0 if is_destroyed else own
        yield Option(view, None, own, kept, lost_tokens(case, view, kept))
        if case.rules.can_share and case.cache_prompt:
            for donor in case.slots:
                for position in shared_positions(case, donor):
                    if donor is not view and position > own:
                        kept = case.matched(view) if case.store else 0
                        yield Option(view, donor, position, kept, lost_tokens(case, view, kept))


def best_cost(case: Case, option: Option) -> tuple[int, ...]:
    must_spare = not case.store and not case.rules.can_share
    n_held = len(option.view.ids)
    rank = 0 if option.donor is None and option.kept == n_held > 0 else 1 if n_held == 0 else 2
    return (
        option.lost if must_spare else 0,
        len(case.ids) - option.resume + option.lost,
        rank,
        option.view.last_used,
        option.view.slot_id,
    )


# ---- properties ------------------------------------------------------------------------------------------------


@given(cases())
def test_the_twin_chooses_the_same(case: Case) -> None:
    chosen = case.plan()
    tried = list(options(case))
    if isinstance(chosen, Wait):
        assert not tried
        assert chosen.slot_id == case.slot_id
        return
    best = min(tried, key=lambda option: best_cost(case, option))
    assert (chosen.slot_id, chosen.resume_tokens, chosen.lost_tokens) == (best.view.slot_id, best.resume, best.lost)
    assert (chosen.source is Source.SHARED) == (best.donor is not None)
    event(f"{chosen.source} {chosen.reason}")


@given(cases())
def test_what_is_planned_is_there_and_allowed(case: Case) -> None:
    chosen = case.plan()
    if isinstance(chosen, Wait):
        return
    view, resume = case.view(chosen.slot_id), chosen.resume_tokens
    assert not view.is_busy
    assert case.slot_id in (None, chosen.slot_id)
    assert 0 <= resume < len(case.ids)
    assert resume % case.rules.grid == 0
    assert (chosen.source is Source.NONE) == (resume == 0)
    assert (chosen.source is Source.SHARED) == (chosen.donor_id is not None)
    holder = view if chosen.donor_id is None else case.view(chosen.donor_id)
    assert holder.slot_id != chosen.slot_id or chosen.donor_id is None
    assert resume <= min(case.matched(holder), holder.exact_tokens) or resume == 0
    if chosen.source is Source.SLOT:
        assert resume == len(view.ids) or resume >= view.rewind_floor
    if chosen.source is Source.SHARED:
        assert case.rules.can_share
    assert 0 <= chosen.lost_tokens <= len(view.ids)


@given(cases())
def test_the_numbers_and_the_reason_are_honest(case: Case) -> None:
    chosen = case.plan()
    if isinstance(chosen, Wait):
        return
    matched = max(case.matched(view) for view in case.slots)
    furthest = min(matched, len(case.ids) - 1)
    assert chosen.matched_tokens == matched
    assert chosen.resume_tokens <= chosen.position <= furthest or chosen.reason is Reason.DISABLED
    holders = [view for view in case.slots if case.matched(view) == matched]
    idle = [view for view in holders if not view.is_busy]
    # The ones whose limits count: the slot itself if it is a holder, else all that could have been taken.
    limited = [view for view in idle if view.slot_id == chosen.slot_id] or idle
    is_holder = chosen.slot_id in {view.slot_id for view in holders}
    match chosen.reason:
        case Reason.DISABLED:
            assert not case.cache_prompt
        case Reason.COLD:
            assert matched == 0
        case Reason.HIT:
            assert chosen.resume_tokens == furthest
        case Reason.DIVERGED:
            assert chosen.resume_tokens == chosen.position == matched
            assert all(view.ids[matched] != case.ids[matched] for view in holders)
        case Reason.OTHER_SLOT:
            assert not case.rules.can_share
            assert not is_holder
            assert case.slot_id is not None or any(max(own_positions(case, v)) > chosen.resume_tokens for v in idle)
        case Reason.SLOT_BUSY:
            assert not case.rules.can_share
            assert not idle
            assert case.slot_id is None
        case Reason.OFF_GRID:
            assert case.rules.grid > 1
            assert chosen.position == chosen.resume_tokens
            assert case.rules.can_share or any(view.rewind_floor <= furthest for view in limited)
        case Reason.NOT_REWINDABLE:
            assert limited
            assert all(view.rewind_floor > furthest for view in limited)
        case _:
            raise AssertionError(chosen.reason)


@given(cases(), st.integers(1, 5))
def test_another_namespace_holding_the_prompt_changes_nothing(case: Case, offset: int) -> None:
    """Ids of other namespaces are replaced by others that agree with each other where they did before."""
    renamed = tuple(
        replace(view, ids=view.ids + np.int32(100 * offset)) if view.namespace != "a" else view for view in case.slots
    )
    assert case.plan() == case.plan(renamed)


@given(cases(), st.randoms(use_true_random=False))
def test_the_order_in_which_slots_are_listed_does_not_matter(case: Case, random: object) -> None:
    shuffled = list(case.slots)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    one, other = case.plan(), case.plan(tuple(shuffled))
    if isinstance(one, Plan) and isinstance(other, Plan):
        other = replace(other, donor_id=one.donor_id)  # equally good donors are interchangeable
    assert one == other


@given(cases())
def test_once_carried_out_the_same_prompt_and_one_more_token_extends_it(case: Case) -> None:
    """For any memory, and losing nothing."""
    chosen = case.plan()
    if isinstance(chosen, Wait) or not case.store:
        return
    ran = replace(
        case.view(chosen.slot_id),
        ids=case.ids,
        namespace="a",
        exact_tokens=len(case.ids),
        rewind_floor=len(case.ids),
        last_used=9,
    )
    slots = tuple(ran if view.slot_id == chosen.slot_id else view for view in case.slots)
    longer = as_ids([*case.ids, 7])
    again = plan(longer, slots, rules=replace(case.rules, grid=1), namespace="a", slot_id=chosen.slot_id)
    assert isinstance(again, Plan)
    assert again.resume_tokens == len(case.ids)
    assert again.lost_tokens == 0
