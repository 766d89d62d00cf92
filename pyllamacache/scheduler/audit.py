"""Recompute from scratch what the books say: cells, parked sequences, spans, checkpoints, leases, bytes.

For tests, and for whoever doubts the books: it costs everything that is held, and changes nothing.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from ..errors import InternalError
from ..request import SlotId

if TYPE_CHECKING:
    from ..prefix.index import Mark
    from ..store.host import Block
    from .state import SchedulerState


def audit(state: SchedulerState) -> None:
    """Raises InternalError at the first thing that is wrong. Between two steps."""
    state.index.audit()
    if state.disk is not None:
        state.disk.index.audit()
    _audit_sequences(state)
    _audit_cells(state)
    _audit_bytes(state)
    _audit_leases(state)


def _require(is_right: bool, what: str) -> None:
    if not is_right:
        raise InternalError(f"the audit found {what}")


def _audit_sequences(state: SchedulerState) -> None:
    """Slots and parked sequences are as long in the backend as in the books."""
    for slot in state.slots:
        is_whole = slot.job is None or slot.job.restore is None
        n_held = state.backend.length(slot.slot_id) if is_whole else None
        if not is_whole and state.memory.has_cells:
            n_held = state.backend.span_length(slot.slot_id)
        if is_whole or state.memory.has_cells:
            _require(n_held == len(slot), f"slot {slot.slot_id} of {n_held} tokens, {len(slot)} in the books")
    parked = {each.seq_id: each for each in state.index.parked}
    for seq_id in map(SlotId, range(len(state.slots), len(state.slots) + state.traits.n_parked)):
        n_booked = parked[seq_id].position if seq_id in parked else 0
        n_held = state.backend.span_length(seq_id)
        _require(n_held == n_booked, f"parked sequence {seq_id} of {n_held} cells, {n_booked} in the books")


def _audit_cells(state: SchedulerState) -> None:
    """The ledger's count is that of distinct cells over all holders, each as long as it is."""
    if not state.counts_cells:
        return
    ledger = state.ledger
    lengths = {slot.slot_id: len(slot) for slot in state.slots}
    lengths.update((each.seq_id, each.position) for each in state.index.parked)
    for seq_id, n_tokens in lengths.items():
        _require(ledger.length(seq_id) == n_tokens, f"sequence {seq_id} of {n_tokens} tokens, another number of cells")
    _require(ledger.used() == ledger.used_if(lengths), "a count of used cells that is not that of the holders")
    _require(ledger.used() <= state.traits.kv_tokens, "more cells in use than there are")


def _blocks(state: SchedulerState) -> list[Block]:
    blocks = [*state.spans.blocks.values(), *state.spans.orphans, *state.checkpoints.all_blocks()]
    for job in state.running:
        if job.restore is not None:  # those of states are pending in `checkpoints`
            blocks += [fetch.block for fetch in job.restore.fetches.values() if fetch.block not in blocks]
    return blocks


def _audit_bytes(state: SchedulerState) -> None:
    """Host memory in use is that of the blocks and of the staging, and within its limits."""
    spans, checkpoints, pool = state.spans, state.checkpoints, state.room.pool
    _require(set(spans.blocks) == set(state.index.spans), "spans without bytes, or bytes without a span")
    _require(spans.used_bytes == sum(span.n_bytes for span in spans.blocks), "a wrong sum of span bytes")
    nodes = list(state.index.checkpoints)
    _require(all(checkpoints.has(node) for node in nodes), "a checkpoint without bytes")
    _require(checkpoints.used_bytes == sum(node.n_bytes for node in nodes), "a wrong sum of checkpoint bytes")
    budget = checkpoints.budget
    _require(len(nodes) <= budget.max_checkpoints, "more checkpoints than the budget has")
    _require(checkpoints.used_bytes <= budget.checkpoint_bytes, "more checkpoint bytes than the budget has")
    in_use = sum(block.size_bytes for block in _blocks(state)) + checkpoints.counts().staging_bytes
    _require(pool.used_bytes == in_use, f"{pool.used_bytes} bytes of host memory in use, {in_use} of them known")
    _require(pool.resident_bytes <= pool.limit_bytes, "more host memory than the budget has")
    if state.disk is not None:
        index = state.disk.index
        on_disk = [span.n_bytes for span in index.spans] + [node.n_bytes for node in index.checkpoints]
        _require(state.disk.n_bytes == sum(on_disk), "a wrong sum of bytes on disk")
        _require(state.disk.n_entries == len(on_disk), "a wrong count of entries on disk")


def _audit_leases(state: SchedulerState) -> None:
    """Whoever is leased is leased by somebody who will end it."""
    leased: Counter[Mark] = Counter()
    for job in state.running:
        if job.restore is not None:
            leased.update(job.restore.held)
            if job.restore.held_checkpoint is not None:
                leased[job.restore.held_checkpoint] += 1
    if state.disk is not None:
        leased.update(state.disk.being_written)
    leased.update(state.checkpoints.held_for_files)
    for mark in (*state.index.spans, *state.index.checkpoints, *state.index.parked):
        _require(
            mark.n_users == leased[mark], f"{mark.n_users} leases at {mark.position}, {leased[mark]} of them known"
        )
