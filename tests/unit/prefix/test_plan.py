from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from pyllamacache.errors import InternalError
from pyllamacache.prefix.plan import Plan, Rules, SlotView, Wait, plan
from pyllamacache.request import Reason, SlotId, Source

FULL = Rules(can_share=True)
SINGLE = Rules(can_share=False)
HEADER = list(range(100, 150))


def slot(
    slot_id: int,
    ids: Sequence[int] = (),
    *,
    busy: bool = False,
    namespace: str = "",
    floor: int | None = 1,
    exact: int | None = None,
    used: int = 0,
) -> SlotView:
    """`floor=None`: extension only."""
    return SlotView(
        slot_id=SlotId(slot_id),
        is_busy=busy,
        ids=np.array(ids, dtype=np.int32),
        namespace=namespace,
        rewind_floor=len(ids) if floor is None else floor,
        exact_tokens=len(ids) if exact is None else exact,
        last_used=used,
    )


def planned(ids: Sequence[int], *slots: SlotView, rules: Rules = FULL, **options: Any) -> Plan:
    result = plan(np.array(ids, dtype=np.int32), slots, rules=rules, namespace="", **options)
    assert isinstance(result, Plan)
    return result


def outcome(result: Plan) -> tuple[int, Source, int, Reason, int]:
    return (result.slot_id, result.source, result.resume_tokens, result.reason, result.position)


# ---- which slot ------------------------------------------------------------------------------------------------


def test_the_slot_that_the_prompt_extends_is_taken_before_an_empty_one() -> None:
    result = planned([*HEADER, 1], slot(0), slot(1, HEADER, used=9))
    assert outcome(result) == (1, Source.SLOT, 50, Reason.HIT, 50)
    assert result.lost_tokens == 0


def test_an_empty_slot_shares_the_prefix_of_an_idle_one() -> None:
    result = planned([*HEADER, 1, 2], slot(0, [*HEADER, 7, 8, 9]), slot(1))
    assert outcome(result) == (1, Source.SHARED, 50, Reason.DIVERGED, 50)
    assert result.donor_id == 0
    assert result.lost_tokens == 0


def test_an_empty_slot_shares_the_prefix_of_a_busy_one() -> None:
    result = planned([*HEADER, 1], slot(0, HEADER, busy=True), slot(1))
    assert outcome(result) == (1, Source.SHARED, 50, Reason.HIT, 50)


def test_an_empty_slot_is_taken_before_one_that_would_lose_something() -> None:
    result = planned([1, 2, 3], slot(0, [7, 8]), slot(1, used=5), rules=SINGLE)
    assert result.slot_id == 1


def test_without_an_empty_slot_the_one_that_loses_least_is_taken() -> None:
    assert planned([1, 2, 3], slot(0, [7, 8, 9]), slot(1, [7, 8])).slot_id == 1


def test_what_another_slot_holds_too_is_not_lost() -> None:
    """A is long but held twice; B is shorter and unique."""
    result = planned([1, 2], slot(0, [*HEADER, 5]), slot(1, HEADER, busy=True), slot(2, [9, 9, 9]))
    assert result.slot_id == 0
    assert result.lost_tokens == 1


def test_what_another_slot_holds_too_is_lost_where_it_cannot_be_shared() -> None:
    result = planned([1, 2], slot(0, [*HEADER, 5]), slot(1, HEADER, busy=True), slot(2, [9, 9, 9]), rules=SINGLE)
    assert result.slot_id == 2
    assert result.lost_tokens == 3


def test_what_another_namespace_holds_too_is_lost_all_the_same() -> None:
    slots = [slot(0, [*HEADER, 5]), slot(1, HEADER, busy=True, namespace="other"), slot(2, [9, 9, 9])]
    assert planned([1, 2], *slots).slot_id == 2


def test_the_longest_copy_is_found_among_many_slots() -> None:
    """Whatever their order: only the slot whose content is held twice loses nothing."""
    contents = [[8, 1, 2, 3], [9, 1, 2], [7, 5], [9, 1, 2, 4], [8, 2, 2], [7, 6], [9, 1], [7, 5, 5]]
    for first in range(len(contents)):
        ordered = contents[first:] + contents[:first]
        result = planned([1], *(slot(index, ids, used=-len(ids)) for index, ids in enumerate(ordered)))
        assert result.lost_tokens == 0
        assert ordered[result.slot_id] == [9, 1, 2]


def test_cutting_a_short_tail_beats_computing_a_long_prefix_in_an_empty_slot() -> None:
    result = planned([*HEADER, 1], slot(0), slot(1, [*HEADER, 7, 8]), rules=SINGLE)
    assert outcome(result) == (1, Source.SLOT, 50, Reason.DIVERGED, 50)
    assert result.lost_tokens == 2


def test_own_content_is_preferred_to_an_equally_long_shared_prefix() -> None:
    result = planned([*HEADER, 1], slot(0, [*HEADER, 1, 2, 3]), slot(1, HEADER), slot_id=SlotId(1))
    assert result.source is Source.SLOT


def test_a_longer_shared_prefix_replaces_own_content() -> None:
    result = planned([*HEADER, 1, 2], slot(0, [*HEADER, 1], busy=True), slot(1, [*HEADER, 9]))
    assert outcome(result) == (1, Source.SHARED, 51, Reason.HIT, 51)
    assert result.lost_tokens == 1


@pytest.mark.parametrize("cache_prompt", [True, False])
def test_ties_go_to_the_least_recently_used_and_then_to_the_lowest_id(cache_prompt: bool) -> None:
    assert planned([1], slot(0, [5], used=3), slot(1, [6], used=2), cache_prompt=cache_prompt).slot_id == 1
    assert planned([1], slot(1, used=2), slot(0, used=2), cache_prompt=cache_prompt).slot_id == 0


def test_a_slot_of_another_namespace_is_only_something_to_lose() -> None:
    result = planned([*HEADER, 1], slot(0, HEADER, namespace="other"), slot(1, [7], busy=True))
    assert outcome(result) == (0, Source.NONE, 0, Reason.COLD, 0)
    assert result.matched_tokens == 0
    assert result.lost_tokens == 50


# ---- waiting and asking ----------------------------------------------------------------------------------------


def test_with_all_slots_busy_a_request_waits() -> None:
    busy = slot(0, [1], busy=True)
    assert plan(busy.ids, [busy], rules=FULL, namespace="") == Wait(None)


def test_a_request_waits_for_the_slot_it_asked_for() -> None:
    slots = [slot(0, [1], busy=True), slot(1)]
    assert plan(slots[0].ids, slots, rules=FULL, namespace="", slot_id=SlotId(0)) == Wait(SlotId(0))


def test_the_slot_asked_for_is_taken_however_much_it_loses() -> None:
    assert planned([1], slot(0, HEADER), slot(1), slot_id=SlotId(0)).slot_id == 0


def test_an_unknown_slot_and_an_empty_prompt_are_errors_of_the_caller() -> None:
    with pytest.raises(InternalError, match="slot 5"):
        planned([1], slot(0), slot_id=SlotId(5))
    with pytest.raises(InternalError, match="0 tokens"):
        planned([], slot(0))


# ---- why not more ----------------------------------------------------------------------------------------------


def test_nothing_alike_is_cold() -> None:
    assert outcome(planned([1, 2], slot(0, [2, 1]))) == (0, Source.NONE, 0, Reason.COLD, 0)


def test_an_identical_prompt_is_a_hit_up_to_its_last_token() -> None:
    result = planned(HEADER, slot(0, HEADER))
    assert outcome(result) == (0, Source.SLOT, 49, Reason.HIT, 49)
    assert result.matched_tokens == 50
    assert result.lost_tokens == 0


def test_a_prompt_that_is_a_prefix_of_what_is_held_is_a_hit() -> None:
    assert outcome(planned(HEADER[:20], slot(0, HEADER))) == (0, Source.SLOT, 19, Reason.HIT, 19)


def test_one_held_token_is_never_enough_to_skip_a_prompt_of_one() -> None:
    assert outcome(planned([1], slot(0, [1]))) == (0, Source.NONE, 0, Reason.HIT, 0)


def test_disabled_reuses_nothing_and_still_reports_what_matched() -> None:
    result = planned([*HEADER, 1], slot(0, HEADER), slot(1, HEADER, busy=True), cache_prompt=False)
    assert outcome(result) == (0, Source.NONE, 0, Reason.DISABLED, 0)
    assert result.matched_tokens == 50
    assert result.lost_tokens == 0


def test_a_state_that_cannot_go_back_says_where_the_prompt_left_it() -> None:
    held = slot(0, [*HEADER, 7, 8], floor=None)
    assert outcome(planned([*HEADER, 1], held, rules=SINGLE)) == (0, Source.NONE, 0, Reason.NOT_REWINDABLE, 50)
    empty = slot(1)
    assert outcome(planned([*HEADER, 1], held, empty, rules=SINGLE)) == (1, Source.NONE, 0, Reason.NOT_REWINDABLE, 50)


def test_an_identical_prompt_cannot_go_back_by_its_last_token() -> None:
    result = planned(HEADER, slot(0, HEADER, floor=None), rules=SINGLE)
    assert outcome(result) == (0, Source.NONE, 0, Reason.NOT_REWINDABLE, 49)


def test_a_state_is_resumed_where_the_prompt_extends_it() -> None:
    result = planned([*HEADER, 1], slot(0, HEADER, floor=None), slot(1), rules=SINGLE)
    assert outcome(result) == (0, Source.SLOT, 50, Reason.HIT, 50)


def test_a_window_is_cut_down_to_its_floor_and_no_further() -> None:
    assert planned([*HEADER[:40], 1], slot(0, HEADER, floor=40), rules=SINGLE).resume_tokens == 40
    result = planned([*HEADER[:39], 1], slot(0, HEADER, floor=40), rules=SINGLE)
    assert outcome(result) == (0, Source.NONE, 0, Reason.NOT_REWINDABLE, 39)


def test_a_busy_holder_that_cannot_share_is_named() -> None:
    result = planned([*HEADER, 1], slot(0, HEADER, busy=True), slot(1), rules=SINGLE)
    assert outcome(result) == (1, Source.NONE, 0, Reason.SLOT_BUSY, 50)
    assert result.matched_tokens == 50


def test_a_match_in_another_slot_than_the_one_asked_for_is_named() -> None:
    result = planned([*HEADER, 1], slot(0, HEADER), slot(1), rules=SINGLE, slot_id=SlotId(1))
    assert outcome(result) == (1, Source.NONE, 0, Reason.OTHER_SLOT, 50)


def test_the_slot_asked_for_is_the_reason_even_if_the_holder_is_busy() -> None:
    result = planned([*HEADER, 1], slot(0, HEADER, busy=True), slot(1), rules=SINGLE, slot_id=SlotId(1))
    assert outcome(result) == (1, Source.NONE, 0, Reason.OTHER_SLOT, 50)


def test_a_holder_that_was_asked_for_answers_for_itself() -> None:
    held = [*HEADER, 7, 8]
    result = planned([*HEADER, 1], slot(0, held, floor=None), slot(1, held), rules=SINGLE, slot_id=SlotId(0))
    assert outcome(result) == (0, Source.NONE, 0, Reason.NOT_REWINDABLE, 50)


def test_a_match_that_would_lose_too_much_is_in_another_slot() -> None:
    result = planned([1, 2, 3], slot(0, [1, 2, *HEADER]), slot(1), rules=SINGLE)
    assert outcome(result) == (1, Source.NONE, 0, Reason.OTHER_SLOT, 2)


# ---- exact mode ------------------------------------------------------------------------------------------------


def test_only_whole_chunks_are_resumed() -> None:
    result = planned([*HEADER, 1], slot(0, HEADER), rules=Rules(can_share=False, grid=16))
    assert outcome(result) == (0, Source.SLOT, 48, Reason.OFF_GRID, 48)
    assert result.lost_tokens == 0


def test_reply_tokens_are_prefilled_again() -> None:
    result = planned([*HEADER, 1], slot(0, HEADER, exact=20), rules=Rules(can_share=False, grid=16))
    assert outcome(result) == (0, Source.SLOT, 16, Reason.OFF_GRID, 16)


def test_a_match_shorter_than_a_chunk_is_off_the_grid() -> None:
    result = planned(HEADER[:9], slot(0, HEADER), rules=Rules(can_share=False, grid=16))
    assert outcome(result) == (0, Source.NONE, 0, Reason.OFF_GRID, 0)


def test_a_state_off_the_grid_cannot_be_resumed() -> None:
    rules = Rules(can_share=False, grid=16)
    assert outcome(planned([*HEADER, 1], slot(0, HEADER, floor=None), rules=rules)) == (
        (0, Source.NONE, 0, Reason.OFF_GRID, 0)
    )
    assert outcome(planned([*HEADER, 1], slot(0, HEADER[:48], floor=None), rules=rules)) == (
        (0, Source.SLOT, 48, Reason.HIT, 48)
    )


def test_a_shared_prefix_is_whole_chunks_as_well() -> None:
    rules = Rules(can_share=True, grid=16)
    result = planned([*HEADER, 1], slot(0, HEADER, exact=40, busy=True), slot(1), rules=rules)
    assert outcome(result) == (1, Source.SHARED, 32, Reason.OFF_GRID, 32)


# ---- store=False -----------------------------------------------------------------------------------------------


def test_without_storing_a_state_is_not_extended_while_a_slot_is_empty() -> None:
    result = planned([*HEADER, 1], slot(0, HEADER, floor=None), slot(1, used=9), rules=SINGLE, store=False)
    assert outcome(result) == (1, Source.NONE, 0, Reason.OTHER_SLOT, 50)
    assert result.lost_tokens == 0


def test_without_storing_the_state_that_loses_least_is_given_up() -> None:
    result = planned([*HEADER, 1], slot(0, HEADER, floor=None), slot(1, [7, 8], floor=None), rules=SINGLE, store=False)
    assert result.slot_id == 1
    assert result.lost_tokens == 2


def test_without_storing_a_state_that_must_go_anyway_is_used() -> None:
    result = planned([*HEADER, 1], slot(0, HEADER, floor=None), rules=SINGLE, store=False)
    assert outcome(result) == (0, Source.SLOT, 50, Reason.HIT, 50)
    assert result.lost_tokens == 50


def test_without_storing_a_memory_that_can_be_cut_back_is_extended_as_usual() -> None:
    assert planned([*HEADER, 1], slot(0, HEADER), slot(1), store=False).slot_id == 0
    assert planned([*HEADER, 1], slot(0, HEADER), slot(1), rules=SINGLE, store=False).slot_id == 0


# ---- memory with a state ---------------------------------------------------------------------------------------

STATE = Rules(can_share=True, has_state=True)
STATE_ONLY = Rules(can_share=False, has_state=True, has_cells=False)
LONG = list(range(100, 160))
"""The header and ten tokens more."""


def hybrid(slot_id: int, ids: Sequence[int] = (), **options: Any) -> SlotView:
    return slot(slot_id, ids, floor=None, **options)


def test_a_state_goes_back_to_the_deepest_checkpoint_before_the_change() -> None:
    result = planned([*HEADER, 1], hybrid(0, LONG), rules=STATE, checkpoints=(20, 46))
    assert outcome(result) == (0, Source.CHECKPOINT, 46, Reason.NO_CHECKPOINT, 50)
    assert (result.donor_id, result.matched_tokens, result.lost_tokens) == (None, 50, 10)


def test_a_checkpoint_just_where_the_prompt_leaves_is_all_that_can_be_had() -> None:
    result = planned([*HEADER, 1], hybrid(0, LONG), rules=STATE, checkpoints=(20, 50))
    assert outcome(result) == (0, Source.CHECKPOINT, 50, Reason.DIVERGED, 50)


def test_a_prompt_that_extends_the_slot_needs_no_checkpoint() -> None:
    result = planned([*LONG, 1], hybrid(0, LONG), hybrid(1), rules=STATE, checkpoints=(20, 60))
    assert outcome(result) == (0, Source.SLOT, 60, Reason.HIT, 60)


def test_a_checkpoint_beyond_what_the_cells_hold_is_of_no_use() -> None:
    result = planned([*HEADER, 1, 2, 3], hybrid(0, HEADER[:30]), rules=STATE, checkpoints=(20, 51))
    assert outcome(result) == (0, Source.SLOT, 30, Reason.HIT, 30)
    result = planned([*HEADER, 1, 2, 3], hybrid(0, [*HEADER[:30], 7]), rules=STATE, checkpoints=(20, 51))
    assert outcome(result) == (0, Source.CHECKPOINT, 20, Reason.NO_CHECKPOINT, 30)


def test_an_empty_slot_takes_cells_of_another_one_and_a_checkpoint() -> None:
    result = planned([*HEADER, 1], hybrid(0, LONG, used=1), hybrid(1), rules=STATE, checkpoints=(46,))
    assert outcome(result) == (1, Source.CHECKPOINT, 46, Reason.NO_CHECKPOINT, 50)
    assert (result.donor_id, result.lost_tokens) == (0, 0)


def test_a_busy_slot_gives_its_cells_too() -> None:
    result = planned([*HEADER, 1], hybrid(0, LONG, busy=True), hybrid(1), rules=STATE, checkpoints=(50,))
    assert outcome(result) == (1, Source.CHECKPOINT, 50, Reason.DIVERGED, 50)
    assert result.donor_id == 0


def test_what_only_the_holder_itself_could_extend_is_in_a_busy_slot_or_in_another_one() -> None:
    busy = planned([*HEADER, 1], hybrid(0, HEADER, busy=True), hybrid(1), rules=STATE, checkpoints=(20,))
    assert outcome(busy) == (1, Source.CHECKPOINT, 20, Reason.SLOT_BUSY, 50)
    asked = planned([*HEADER, 1], hybrid(0, HEADER), hybrid(1), rules=STATE, checkpoints=(20,), slot_id=SlotId(1))
    assert outcome(asked) == (1, Source.CHECKPOINT, 20, Reason.OTHER_SLOT, 50)


def test_what_would_be_lost_by_extending_is_in_another_slot() -> None:
    """A window that can be cut, but with much behind the cut."""
    held = slot(0, [*HEADER[:4], *range(300, 360)], floor=1)
    result = planned([*HEADER[:4], 1], held, hybrid(1), rules=STATE)
    assert outcome(result) == (1, Source.NONE, 0, Reason.OTHER_SLOT, 4)


def test_without_a_checkpoint_everything_is_computed_again() -> None:
    result = planned([*HEADER, 1], hybrid(0, LONG), hybrid(1), rules=STATE)
    assert outcome(result) == (1, Source.NONE, 0, Reason.NO_CHECKPOINT, 50)


def test_a_window_is_cut_where_it_can_be_and_restored_where_it_cannot() -> None:
    held = slot(0, LONG, floor=40)
    assert outcome(planned([*HEADER[:45], 1], held, rules=STATE, checkpoints=(20,))) == (
        (0, Source.SLOT, 45, Reason.DIVERGED, 45)
    )
    assert outcome(planned([*HEADER[:39], 1], held, rules=STATE, checkpoints=(20,))) == (
        (0, Source.CHECKPOINT, 20, Reason.NO_CHECKPOINT, 39)
    )
    assert planned([*HEADER[:45], 1], held, rules=STATE, checkpoints=(45,)).source is Source.SLOT


def test_an_identical_prompt_goes_back_to_its_tail() -> None:
    result = planned(HEADER, hybrid(0, LONG), rules=STATE, checkpoints=(46,))
    assert outcome(result) == (0, Source.CHECKPOINT, 46, Reason.NO_CHECKPOINT, 49)
    assert outcome(planned(HEADER, hybrid(0, LONG), rules=STATE, checkpoints=(46, 49))) == (
        (0, Source.CHECKPOINT, 49, Reason.HIT, 49)
    )


def test_nothing_alike_is_cold_whatever_is_stored() -> None:
    assert outcome(planned([5, 6], hybrid(0, LONG), hybrid(1), rules=STATE)) == (1, Source.NONE, 0, Reason.COLD, 0)


def test_a_checkpoint_whose_cells_nobody_holds_is_nothing_known() -> None:
    assert outcome(planned(HEADER, hybrid(0), rules=STATE, checkpoints=(20,))) == (0, Source.NONE, 0, Reason.COLD, 0)


def test_without_cells_a_checkpoint_is_all_it_takes() -> None:
    result = planned([*HEADER, 1], hybrid(0, [7, 8, 9]), hybrid(1), rules=STATE_ONLY, checkpoints=(20, 46))
    assert outcome(result) == (1, Source.CHECKPOINT, 46, Reason.HIT, 46)
    assert (result.matched_tokens, result.donor_id) == (46, None)


def test_without_cells_content_beyond_the_checkpoint_still_tells_what_was_missed() -> None:
    result = planned([*HEADER, 1], hybrid(0, LONG), hybrid(1), rules=STATE_ONLY, checkpoints=(20, 46))
    assert outcome(result) == (1, Source.CHECKPOINT, 46, Reason.NO_CHECKPOINT, 50)
    assert result.matched_tokens == 50


def test_disabled_uses_no_checkpoint_and_counts_none() -> None:
    result = planned([*HEADER, 1], hybrid(0, LONG), rules=STATE, checkpoints=(50,), cache_prompt=False)
    assert outcome(result) == (0, Source.NONE, 0, Reason.DISABLED, 0)
    alone = planned(HEADER, hybrid(0), rules=STATE_ONLY, checkpoints=(20,), cache_prompt=False)
    assert (alone.resume_tokens, alone.matched_tokens) == (0, 0)


def test_without_storing_a_state_is_copied_and_not_consumed() -> None:
    """The holder could extend; but then its state would be gone."""
    result = planned([*HEADER, 1], hybrid(0, HEADER), hybrid(1), rules=STATE, checkpoints=(46,), store=False)
    assert outcome(result) == (1, Source.CHECKPOINT, 46, Reason.OTHER_SLOT, 50)
    assert result.lost_tokens == 0


def test_in_exact_mode_a_checkpoint_counts_up_to_the_last_whole_chunk() -> None:
    rules = Rules(can_share=True, has_state=True, grid=16)
    on_grid = planned([*HEADER, 1], hybrid(0, LONG, exact=48), rules=rules, checkpoints=(16, 48))
    assert outcome(on_grid) == (0, Source.CHECKPOINT, 48, Reason.OFF_GRID, 48)
    reply = planned([*HEADER, 1], hybrid(0, LONG, exact=32), rules=rules, checkpoints=(16, 48))
    assert outcome(reply) == (0, Source.CHECKPOINT, 16, Reason.NO_CHECKPOINT, 50)
    missing = planned([*HEADER, 1], hybrid(0, LONG, exact=48), rules=rules, checkpoints=(16,))
    assert outcome(missing) == (0, Source.CHECKPOINT, 16, Reason.NO_CHECKPOINT, 50)
    short = planned([*HEADER[:9], 1], hybrid(0, LONG, exact=48), rules=rules)
    assert outcome(short) == (0, Source.NONE, 0, Reason.OFF_GRID, 0)


def test_without_cells_nothing_is_lost_where_nothing_was() -> None:
    """What a slot resumes from a checkpoint it did not hold before: minus 46 tokens were lost."""
    for slots in ([hybrid(0)], [hybrid(0), hybrid(1, [7], used=-1)]):
        result = planned([*HEADER, 1], *slots, rules=STATE_ONLY, checkpoints=(46,), store=False)
        assert (result.slot_id, result.resume_tokens, result.lost_tokens) == (0, 46, 0)
