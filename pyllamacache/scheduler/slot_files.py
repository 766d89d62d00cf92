"""Taking a slot's state out and putting one in, between two steps. Reading and writing files is not done here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..config import Memory
from ..errors import CellsExhaustedError, InternalError, NativeError, SlotBusyError
from ..prefix.evict import plan_cuts
from ..request import CheckpointKind

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from ..request import Ids, SlotId
    from ..store.host import Block
    from .slots import SlotState
    from .state import SchedulerState


def idle_slot(state: SchedulerState, slot_id: SlotId, operation: str) -> SlotState:
    """The slot. Raises SlotBusyError."""
    slot = state.slots[slot_id]
    if slot.is_busy:
        raise SlotBusyError(slot_id, operation)
    return slot


def kind_of(name: str) -> CheckpointKind:
    """A kind as a file names it; one of a newer version counts as the caller's."""
    try:
        return CheckpointKind(name)
    except ValueError:
        return CheckpointKind.BOUNDARY


def put_checkpoints(state: SchedulerState, slot_id: SlotId, blocks: dict[int, tuple[str, Block]]) -> None:
    """Take over a slot's checkpoints, by position; the slot holds what they belong to."""
    slot = state.slots[slot_id]
    for position, (kind, block) in sorted(blocks.items()):
        state.checkpoints.put(slot.namespace, slot.tokens.slice(0, position), kind_of(kind), block)
    state.report_checkpoints()


def put_state(
    state: SchedulerState,
    slot_id: SlotId,
    *,
    ids: Ids,
    data: bytes | bytearray | npt.NDArray[np.uint8],
    exact_tokens: int,
    namespace: str,
) -> None:
    """Replace the slot's content by a saved state. On any error it keeps what it held.

    Idle slots are cut for its cells, least recently used first; the slot's own cells come free as well.

    Raises:
        SlotBusyError, CellsExhaustedError, NativeError.
    """
    slot = idle_slot(state, slot_id, "restore")
    state.checkpoints.settle(slot)
    n_tokens = len(ids)
    if not n_tokens:
        state.erase(slot)
        slot.namespace = namespace
        return
    if state.counts_cells:
        _make_room(state, slot, n_tokens)
    n_before = len(slot)
    try:
        state.backend.load_state(slot_id, data, n_tokens)
    except NativeError:
        if state.backend.length(slot_id) != n_before:
            state.erase(slot)  # nobody knows what is there now
            raise InternalError("a refused state was not undone") from None
        _rebuilt(state, slot, n_before)
        raise
    slot.truncate(0)
    slot.tokens.extend(ids)
    slot.exact_tokens = exact_tokens
    slot.namespace = namespace
    _rebuilt(state, slot, n_tokens)
    state.touch(slot)


def _rebuilt(state: SchedulerState, slot: SlotState, n_tokens: int) -> None:
    """Loading gives the slot cells of its own, whether it worked or put the old content back."""
    if state.memory is Memory.SLIDING:
        slot.exact_tokens = 0  # window cells lie in another order of the ring now, and that is another rounding
    if state.counts_cells:
        state.ledger.erase(slot.slot_id)
        state.ledger.grow(slot.slot_id, n_tokens)


def _make_room(state: SchedulerState, slot: SlotState, n_tokens: int) -> None:
    # what the slot holds is needed again if the state is refused, unless it alone fills the cells
    needed = max(n_tokens, len(slot))
    after = state.ledger.copy()
    after.erase(slot.slot_id)  # it does not keep alive what it shares with a victim
    victims = [victim for victim in state.victims() if victim.slot_id != slot.slot_id]
    cuts = plan_cuts(needed, state.traits.kv_tokens - after.used(), victims, after)
    for cut in cuts:
        after.trim(cut.slot_id, cut.n_tokens)
    lengths = {job.slot.slot_id: job.total_tokens for job in state.running}
    free = state.traits.kv_tokens - max(after.used(), after.used_if(lengths))
    if free < needed:
        raise CellsExhaustedError(needed, max(0, free), state.traits.kv_tokens)
    state.apply_cuts(cuts)
