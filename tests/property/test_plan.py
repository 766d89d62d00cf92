"""The planner against its own rules, and against a twin that tries every option with plain loops."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from hypothesis import event, example, given
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
    checkpoints: tuple[int, ...] = ()

    def plan(self, slots: tuple[SlotView, ...] | None = None) -> Plan | Wait:
        return plan(
            self.ids,
            self.slots if slots is None else slots,
            rules=self.rules,
            namespace="a",
            checkpoints=self.checkpoints,
            slot_id=self.slot_id,
            cache_prompt=self.cache_prompt,
            store=self.store,
        )

    def view(self, slot_id: SlotId) -> SlotView:
        return next(view for view in self.slots if view.slot_id == slot_id)

    def matched(self, view: SlotView) -> int:
        return common(self.ids, view.ids) if view.namespace == "a" else 0

    @property
    def usable(self) -> tuple[int, ...]:
        """Checkpoints that the request may use."""
        return self.checkpoints if self.cache_prompt else ()

    @property
    def known(self) -> int:
        """How much of the prompt is held by anything; without cells checkpoints count by themselves."""
        matched = max(self.matched(view) for view in self.slots)
        return matched if self.rules.has_cells else max(matched, *self.usable, 0)


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


@dataclass(frozen=True)
class Memory:
    """Rules as an engine makes them, and where its slots can be cut: anywhere, nowhere, or above some floor."""

    can_share: bool
    floors: str
    has_state: bool = False
    has_cells: bool = True


FULL = Memory(can_share=True, floors="anywhere")
FULL_ALONE = Memory(can_share=False, floors="anywhere")
OTHER = Memory(can_share=False, floors="nowhere")
WINDOW_ONLY = Memory(can_share=False, floors="window")
SLIDING = Memory(can_share=True, floors="window", has_state=True)
SLIDING_ALONE = Memory(can_share=False, floors="window", has_state=True)
HYBRID = Memory(can_share=True, floors="nowhere", has_state=True)
HYBRID_ALONE = Memory(can_share=False, floors="nowhere", has_state=True)
RECURRENT = Memory(can_share=False, floors="nowhere", has_state=True, has_cells=False)
STATELESS = [FULL, FULL_ALONE, OTHER, WINDOW_ONLY]
STATEFUL = [SLIDING, SLIDING_ALONE, HYBRID, HYBRID_ALONE, RECURRENT]


@st.composite
def views(draw: st.DrawFn, index: int, memory: Memory, grid: int) -> SlotView:
    ids = draw(conversations())
    is_busy = draw(st.booleans())
    floors = {
        "anywhere": [0, 1, 1],
        "nowhere": [len(ids)],
        "window": [0, 1, len(ids), max(0, len(ids) - 3), max(0, len(ids) - 5)],
    }[memory.floors]
    floor = len(ids) if is_busy and memory.has_state else draw(st.sampled_from(floors))
    return SlotView(
        slot_id=SlotId(index),
        is_busy=is_busy,
        ids=ids,
        namespace=draw(st.sampled_from(["a", "a", "a", *OTHER_NAMESPACES])),
        rewind_floor=floor,
        exact_tokens=len(ids) if grid == 1 else draw(st.integers(0, len(ids))),
        last_used=draw(st.integers(0, 3)),
    )


@st.composite
def cases(draw: st.DrawFn, memories: Sequence[Memory] = (*STATELESS, *STATEFUL)) -> Case:
    memory = draw(st.sampled_from(memories))
    grid = draw(st.sampled_from([1, 1, 2, 4]))
    can_have_more = memory.can_share or not (memory.has_state and memory.has_cells)
    n_slots = draw(st.integers(1, 5)) if can_have_more else 1
    slots = tuple(draw(views(index, memory, grid)) for index in range(n_slots))
    ids = draw(conversations(shortest=1))
    checkpoints: set[int] = set()
    if memory.has_state:
        on_grid = range(grid, len(ids), grid)
        checkpoints = draw(st.sets(st.sampled_from(on_grid), max_size=4)) if on_grid else set()
    return Case(
        ids=ids,
        slots=slots,
        rules=Rules(memory.can_share, memory.has_state, memory.has_cells, grid),
        slot_id=draw(st.none() | st.sampled_from([view.slot_id for view in slots])),
        cache_prompt=draw(st.sampled_from([True, True, True, False])),
        store=draw(st.sampled_from([True, True, False])),
        checkpoints=tuple(sorted(checkpoints)),
    )


# ---- the twin --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Option:
    view: SlotView
    donor: SlotView | None
    resume: int
    kept: int
    lost: int


def direct_positions(case: Case, view: SlotView) -> Iterator[int]:
    """Where the slot's own memory can be, without a checkpoint."""
    yield 0
    for position in range(1, len(case.ids)):
        if position > case.matched(view) or position > view.exact_tokens or position % case.rules.grid:
            continue
        if position == len(view.ids) or position >= view.rewind_floor:
            yield position


def restored_positions(case: Case, holder: SlotView) -> Iterator[int]:
    """Where a checkpoint can be put back over the cells of `holder`; without cells, over nothing at all."""
    limit = min(case.matched(holder), holder.exact_tokens) if case.rules.has_cells else len(case.ids)
    yield from (position for position in case.usable if position <= min(limit, len(case.ids) - 1))


def own_positions(case: Case, view: SlotView) -> Iterator[int]:
    yield from direct_positions(case, view)
    yield from restored_positions(case, view)


def shared_positions(case: Case, donor: SlotView) -> Iterator[int]:
    if case.rules.has_state:
        yield from restored_positions(case, donor)
        return
    limit = min(case.matched(donor), donor.exact_tokens, len(case.ids) - 1)
    yield from (position for position in range(1, limit + 1) if position % case.rules.grid == 0)


def lost_tokens(case: Case, view: SlotView, kept: int) -> int:
    """Tokens beyond `kept` that no other slot of the namespace holds."""
    held = [kept]
    if case.rules.can_share:
        others = [each for each in case.slots if each is not view and each.namespace == view.namespace]
        held += [common(view.ids, each.ids) for each in others]
    return len(view.ids) - max(held)


def must_spare(case: Case) -> bool:
    """What the request leaves behind is taken away again, and what it replaced does not come back."""
    return not case.store and (case.rules.has_state or not case.rules.can_share)


def options(case: Case) -> Iterator[Option]:
    for view in case.slots:
        if view.is_busy or case.slot_id not in (None, view.slot_id):
            continue
        own = max(own_positions(case, view)) if case.cache_prompt else 0
        is_destroyed = must_spare(case) and view.rewind_floor > 1
        kept = case.matched(view) if case.store else 0 if is_destroyed else min(own, case.matched(view))
        yield Option(view, None, own, kept, lost_tokens(case, view, kept))
        if case.rules.can_share and case.cache_prompt:
            for donor in case.slots:
                for position in shared_positions(case, donor):
                    if donor is not view and position > own:
                        kept = case.matched(view) if case.store else 0
                        yield Option(view, donor, position, kept, lost_tokens(case, view, kept))


def best_cost(case: Case, option: Option) -> tuple[int, ...]:
    n_held = len(option.view.ids)
    rank = 0 if option.donor is None and option.kept == n_held > 0 else 1 if n_held == 0 else 2
    return (
        option.lost if must_spare(case) else 0,
        len(case.ids) - option.resume + option.lost,
        rank,
        option.view.last_used,
        option.view.slot_id,
    )


# ---- properties ------------------------------------------------------------------------------------------------


@given(cases())
@example(
    Case(
        ids=np.array([1, 2, 1], dtype=np.int32),
        slots=(
            SlotView(SlotId(0), False, np.array([1], dtype=np.int32), "a", 0, 0, 1),
            SlotView(SlotId(1), False, np.array([1, 1], dtype=np.int32), "a", 0, 0, 0),
            SlotView(SlotId(2), False, np.array([1, 1], dtype=np.int32), "a", 0, 0, 0),
            SlotView(SlotId(3), False, np.array([1, 2, 1, 1], dtype=np.int32), "a", 0, 2, 0),
        ),
        rules=Rules(can_share=True, has_state=False, has_cells=True, grid=2),
        slot_id=None,
        cache_prompt=True,
        store=True,
        checkpoints=(),
    )
)
def test_the_twin_chooses_the_same(case: Case) -> None:
    chosen = case.plan()
    tried = list(options(case))
    if isinstance(chosen, Wait):
        assert not tried
        assert chosen.slot_id == case.slot_id
        return
    best = min(tried, key=lambda option: best_cost(case, option))
    assert (chosen.slot_id, chosen.resume_tokens, chosen.lost_tokens) == (best.view.slot_id, best.resume, best.lost)
    assert (chosen.donor_id is not None) == (best.donor is not None)
    assert chosen.source is expected_source(case, best)
    event(f"{chosen.source} {chosen.reason}")


def expected_source(case: Case, option: Option) -> Source:
    if option.resume == 0:
        return Source.NONE
    if option.donor is not None:
        return Source.CHECKPOINT if case.rules.has_state else Source.SHARED
    return Source.SLOT if option.resume in direct_positions(case, option.view) else Source.CHECKPOINT


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
    assert case.cache_prompt or resume == 0
    holder = view if chosen.donor_id is None else case.view(chosen.donor_id)
    assert holder.slot_id != chosen.slot_id or chosen.donor_id is None
    if case.rules.has_cells or chosen.source is Source.SLOT:
        assert resume <= min(case.matched(holder), holder.exact_tokens) or resume == 0
    if chosen.source is Source.SLOT:
        assert resume == len(view.ids) or resume >= view.rewind_floor
    if chosen.source is Source.CHECKPOINT:
        assert case.rules.has_state
        assert resume in case.checkpoints
    if chosen.source is Source.SHARED:
        assert not case.rules.has_state
    if chosen.donor_id is not None:
        assert case.rules.can_share
        assert chosen.source in (Source.SHARED, Source.CHECKPOINT)
    else:
        assert chosen.source is not Source.SHARED
    assert 0 <= chosen.lost_tokens <= len(view.ids)


@given(cases(STATELESS))
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


@given(cases(STATEFUL))
def test_the_numbers_and_the_reason_are_honest_where_states_are_kept(case: Case) -> None:
    chosen = case.plan()
    if isinstance(chosen, Wait):
        return
    resume, furthest = chosen.resume_tokens, min(case.known, len(case.ids) - 1)
    assert chosen.matched_tokens == case.known
    assert resume <= chosen.position <= furthest or chosen.reason is Reason.DISABLED
    holders = [view for view in case.slots if case.matched(view) == case.known]
    others = [view for view in holders if view.slot_id != chosen.slot_id]
    better = [view for view in others if max(direct_positions(case, view)) > resume]
    assert (chosen.reason is Reason.DISABLED) == (not case.cache_prompt)
    assert (chosen.reason is Reason.COLD) == (case.cache_prompt and case.known == 0)
    match chosen.reason:
        case Reason.HIT:
            assert resume == chosen.position == furthest
            ends = [view for view in holders if len(view.ids) == case.known]
            assert ends or not holders or case.known == len(case.ids)
        case Reason.DIVERGED:
            assert resume == chosen.position == case.known
            assert holders
            assert all(view.ids[case.known] != case.ids[case.known] for view in holders)
        case Reason.OTHER_SLOT:
            assert chosen.position == furthest
            assert better
            assert case.slot_id is not None or any(not view.is_busy for view in better)
        case Reason.SLOT_BUSY:
            assert chosen.position == furthest
            assert better
            assert case.slot_id is None
            assert all(view.is_busy for view in better)
        case Reason.OFF_GRID:
            assert case.rules.grid > 1
            assert chosen.position == resume
            assert not better
            # no checkpoint anywhere could have done more
            limit = max((min(furthest, view.exact_tokens) for view in holders), default=furthest)
            assert limit - resume < case.rules.grid
        case Reason.NO_CHECKPOINT:
            assert chosen.position == furthest
            assert not better
            assert not any(resume < position <= furthest for position in reachable(case))
        case Reason.DISABLED | Reason.COLD:
            assert chosen.position == resume == 0
        case _:
            raise AssertionError(chosen.reason)


def reachable(case: Case) -> list[int]:
    """Where the request could have resumed in any slot it may run in."""
    allowed = [view for view in case.slots if not view.is_busy and case.slot_id in (None, view.slot_id)]
    holders = case.slots if case.rules.can_share else allowed
    return [position for view in holders for position in restored_positions(case, view)]


@given(cases(STATEFUL), st.integers(0, 9))
def test_one_more_checkpoint_never_shortens_what_is_resumed_in_the_end(case: Case, index: int) -> None:
    chosen = case.plan()
    missing = [each for each in range(case.rules.grid, len(case.ids), case.rules.grid) if each not in case.checkpoints]
    if isinstance(chosen, Wait) or not missing:
        return
    more = replace(case, checkpoints=tuple(sorted({*case.checkpoints, missing[index % len(missing)]})))
    again = more.plan()
    assert isinstance(again, Plan)
    if case.store:
        assert again.lost_tokens - again.resume_tokens <= chosen.lost_tokens - chosen.resume_tokens


@given(cases(), st.integers(1, 5))
def test_another_namespace_holding_the_prompt_changes_nothing(case: Case, offset: int) -> None:
    """Ids of other namespaces are replaced by others that agree with each other where they did before."""
    renamed = tuple(
        replace(view, ids=view.ids + np.int32(100 * offset)) if view.namespace != "a" else view for view in case.slots
    )
    assert case.plan() == case.plan(renamed)


@given(cases(STATEFUL))
def test_checkpoints_beyond_what_any_cells_hold_change_nothing(case: Case) -> None:
    """The KV cells before them are gone."""
    if case.rules.has_cells:
        held = max(case.matched(view) for view in case.slots)
        fewer = tuple(position for position in case.checkpoints if position <= held)
        assert replace(case, checkpoints=fewer).plan() == case.plan()


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
