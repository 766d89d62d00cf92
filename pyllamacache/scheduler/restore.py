"""Putting stored cells back into a job's slot, a few spans between two steps, so that the others go on.

    begin: device part --> [fetch from disk] --> append span by span --> end: state put back, slot cut to resume

Until `end` the slot holds cells and perhaps a stale state: it is busy, and `compose` leaves it alone. Whatever goes
wrong costs the rest of the reuse: the job resumes from what is there.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..errors import NativeError, PyLlamaCacheError
from ..prefix.budget import Newcomer
from ..prefix.evict import plan_cuts
from ..prefix.index import Checkpoint, Span
from ..prefix.retention import Eviction
from ..request import Reason, Source
from .placing import plan_captures

if TYPE_CHECKING:
    from ..prefix.plan import Plan
    from ..prefix.stored import StoredPrefix
    from ..store.host import Block
    from .jobs import Job
    from .state import SchedulerState

MAX_FETCHES = 3
"""Reads from disk at once: one is put back while the next is read."""
SPANS_PER_STEP = 2
"""Put back between two steps while others run."""


@dataclass(slots=True, eq=False)
class _Fetch:
    """Bytes on their way from disk."""

    block: Block
    future: Future[bool]
    started_s: float


@dataclass(slots=True, eq=False)
class Restore:
    """What is still to be put back into a job's slot."""

    spans: deque[Span]
    """In order, of host memory or of disk."""
    ends: dict[Span, int]
    """How far the prompt agrees with each."""
    checkpoint: Checkpoint | None
    """To be put back at the end; None: the memory has no state."""
    resume_tokens: int
    fetches: dict[Span | Checkpoint, _Fetch] = field(default_factory=dict)
    held: list[Span] = field(default_factory=list)
    """Leased: of host memory, not put back yet."""
    held_checkpoint: Checkpoint | None = None
    """Leased as well."""


def lease(state: SchedulerState, job: Job, stored: StoredPrefix) -> Restore | None:
    """What the job's plan takes from memory and disk, held until it was put back. None: it needs nothing of it."""
    chosen = job.plan
    checkpoint = stored.checkpoints().get(chosen.resume_tokens) if state.rules.has_state else None
    is_far = checkpoint is not None and not state.checkpoints.has(checkpoint)
    if chosen.source is not Source.HOST and not (chosen.source is Source.CHECKPOINT and is_far):
        return None
    spans = [span for span in stored.chain(chosen.held_tokens) if span.start < chosen.resume_tokens]
    if chosen.source is not Source.HOST:
        spans = []
    restore = Restore(deque(spans), {span: stored.usable_end(span) for span in spans}, checkpoint, chosen.resume_tokens)
    for span in spans:
        if span in state.spans.blocks:
            state.spans.hold(span)
            restore.held.append(span)
    if checkpoint is not None and not is_far:
        _hold_checkpoint(state, restore, checkpoint)
    job.source = Source.DISK if is_far or len(restore.held) < len(spans) else Source.HOST
    return restore


def cost(state: SchedulerState, chosen: Plan, stored: StoredPrefix) -> tuple[Source, int, float]:
    """Where what a plan reuses comes from, bytes to move and seconds for that. Effects: none."""
    checkpoint = stored.checkpoints().get(chosen.resume_tokens) if state.rules.has_state else None
    takes_state = chosen.source in (Source.HOST, Source.CHECKPOINT) and checkpoint is not None
    spans = stored.chain(chosen.held_tokens) if chosen.source is Source.HOST else []
    marks: list[Span | Checkpoint] = [span for span in spans if span.start < chosen.resume_tokens]
    if takes_state and checkpoint is not None:
        marks.append(checkpoint)
    source, load_s = chosen.source, 0.0
    for mark in marks:
        is_here = mark in state.spans.blocks if isinstance(mark, Span) else state.checkpoints.has(mark)
        load_s += state.checkpoints.rates.load_s("host" if is_here else "disk", mark.n_bytes)
        if not is_here:
            source = Source.DISK
    return source, sum(mark.n_bytes for mark in marks), load_s


def begin(state: SchedulerState, job: Job, restore: Restore) -> None:
    """Leave in the slot what the device has before the first span. Raises NativeError: then it holds anything."""
    chosen, slot = job.plan, job.slot
    job.restore = restore
    base = restore.spans[0].start if restore.spans else chosen.resume_tokens
    if not state.memory.has_cells:
        state.erase(slot)
    elif chosen.donor_id is not None:
        state.share_span(chosen.donor_id, slot, job.request.prompt.ids[:base])
    else:
        state.cut_span(slot, base)


def finish(state: SchedulerState, job: Job) -> None:
    """The slot is where the job resumes: note it, and decide where its prefill takes checkpoints."""
    job.resumed_tokens = len(job.slot)
    job.restored_s = state.clock() - job.restore_started_s
    job.outbox.prefilled_tokens = len(job.slot)
    plan_captures(state, job)
    job.prefill_started_s = state.clock()


def _hold_checkpoint(state: SchedulerState, restore: Restore, node: Checkpoint) -> None:
    state.checkpoints.hold(node)
    restore.held_checkpoint = node


def advance_all(state: SchedulerState) -> None:
    """Put back what is there. Between two steps."""
    restoring = [job for job in state.running if job.restore is not None]
    is_alone = len(restoring) == len(state.running)
    for job in restoring:
        if job.is_waiting:
            continue  # others compete for the cells that this would take
        _advance(state, job, 1 << 30 if is_alone else SPANS_PER_STEP)


def wait(state: SchedulerState) -> None:
    """Nothing else can go on: wait for the oldest read."""
    for job in state.running:
        if job.restore is not None:
            for fetch in job.restore.fetches.values():
                fetch.future.exception()
                return


def _advance(state: SchedulerState, job: Job, n_spans: int) -> None:
    restore = job.restore
    assert restore is not None
    _fetch_ahead(state, restore)
    while restore.spans and n_spans:
        span = restore.spans[0]
        if not _is_here(state, restore, span):
            if span in restore.fetches:
                _fetch_ahead(state, restore)
                return
            _cut_short(state, job, restore)
            break
        if not _append(state, job, restore, restore.spans.popleft()):
            _cut_short(state, job, restore)
            break
        n_spans -= 1
        _fetch_ahead(state, restore)
    if not restore.spans:
        _finish_with_state(state, job, restore)


# ---- from disk ---------------------------------------------------------------------------------------------------


def _fetch_ahead(state: SchedulerState, restore: Restore) -> None:
    """Have the next ones read that are on disk only, the state last."""
    wanted: list[Span | Checkpoint] = [*restore.spans]
    checkpoint = restore.checkpoint
    if checkpoint is not None and not state.checkpoints.has(checkpoint):
        wanted.append(checkpoint)
    for mark in wanted:
        if len(restore.fetches) >= MAX_FETCHES:
            return
        if mark in restore.fetches or mark in state.spans.blocks or state.disk is None:
            continue
        if isinstance(mark, Checkpoint):
            block = state.checkpoints.room_for(mark.n_bytes, mark.kind, mark.namespace)
        else:
            newcomer = Newcomer(mark.n_tokens, priority=mark.priority)
            block = state.room.allocate(mark.n_bytes, newcomer, mark.namespace)
        if block is None:
            return
        restore.fetches[mark] = _Fetch(block, state.disk.fetch(mark, block), state.clock())


def _is_here(state: SchedulerState, restore: Restore, span: Span) -> bool:
    """Whether the span is in host memory; takes it in when it has just been read."""
    if span in state.spans.blocks:
        return True
    fetch = restore.fetches.get(span)
    if fetch is None or not fetch.future.done():
        return False
    del restore.fetches[span]
    if not _was_read(state, span, fetch) or span.node is None:  # a longer one came meanwhile
        fetch.block.release()
        return False
    ids = span.ids()
    match = state.index.match(span.namespace, ids)
    there = match.spans.get(span.start)
    if there is not None and match.usable_end(there) >= span.position:  # another job was quicker
        fetch.block.release()
        here = there
    else:
        here = state.spans.put(span.namespace, ids, fetch.block)
        here.key, here.priority, here.expires_s = span.key, span.priority, span.expires_s
        state.room.retention.changed(here)
        state.expiry.note(here.expires_s)
    state.spans.hold(here)
    restore.held.append(here)
    restore.ends[here] = restore.ends.pop(span)
    restore.spans[0] = here
    return True


def _was_read(state: SchedulerState, mark: Span | Checkpoint, fetch: _Fetch) -> bool:
    disk = state.disk
    assert disk is not None
    # raised here the error would hold this frame, hence the future, itself and the bytes
    is_failed = isinstance(fetch.future.exception(), PyLlamaCacheError)
    is_there = not is_failed and fetch.future.result()
    disk.n_failed += is_failed
    if is_there:
        state.checkpoints.rates.loaded("disk", mark.n_bytes, state.clock() - fetch.started_s)
        disk.n_read += 1
    else:
        disk.forget(mark)
        disk.n_lost += 1
    return is_there


# ---- into the slot -----------------------------------------------------------------------------------------------


def _append(state: SchedulerState, job: Job, restore: Restore, span: Span) -> bool:
    """False: it could not be put back, and the slot holds what it held."""
    slot, end, block = job.slot, restore.ends[span], state.spans.blocks[span]
    started_s = state.clock()
    try:
        if not _has_cells(state, span.n_tokens):
            return False
        if len(slot) != span.start:  # another one was put in its place, which begins earlier
            state.cut_span(slot, span.start)
        try:
            state.backend.append_span(slot.slot_id, span.start, span.position, block.data)
        except NativeError:
            if span in state.spans.blocks:
                state.spans.drop(span, Eviction.BROKEN)
            return False
        slot.tokens.extend(job.request.prompt.ids[span.start : end])
        if end < span.position:
            state.backend.trim_span(slot.slot_id, end)
        if state.counts_cells:
            state.ledger.grow(slot.slot_id, end)
        slot.exact_tokens = end
        job.outbox.prefilled_tokens = end
        span.hits += 1
        span.last_used = state.checkpoints.now
        state.room.retention.used(span)
        state.checkpoints.rates.loaded("host", span.n_bytes, state.clock() - started_s)
        return True
    finally:
        if span in restore.held:
            restore.held.remove(span)
            state.spans.let_go(span)


def _has_cells(state: SchedulerState, n_tokens: int) -> bool:
    """Cut idle content for it. What the slot itself holds is not a victim: it is busy."""
    if not state.counts_cells or n_tokens <= state.free_cells:
        return True
    state.apply_cuts(plan_cuts(n_tokens, state.free_cells, state.victims(), state.ledger, slack=state.traits.n_ubatch))
    return n_tokens <= state.free_cells


def _cut_short(state: SchedulerState, job: Job, restore: Restore) -> None:
    """What the slot holds now is all: the state is one that it leads to."""
    _leave(state, restore)
    restore.spans.clear()
    restore.checkpoint = _deepest_state(state, job, restore)


def _deepest_state(state: SchedulerState, job: Job, restore: Restore) -> Checkpoint | None:
    """Of those that the slot could resume at; of two at one position, that in host memory."""
    if not state.rules.has_state:
        return None
    namespace, ids = job.request.namespace, job.request.prompt.ids[: _reach(state, job, restore)]
    found = state.checkpoints.path(namespace, ids)
    if state.disk is not None:
        found = [*state.disk.index.path(namespace, ids), *found]
    return max(reversed(found), key=lambda each: each.position, default=None)


def _reach(state: SchedulerState, job: Job, restore: Restore) -> int:
    return min(len(job.slot), restore.resume_tokens) if state.memory.has_cells else restore.resume_tokens


def _finish_with_state(state: SchedulerState, job: Job, restore: Restore) -> None:
    if state.rules.has_state and not _has_state(state, job, restore):
        return
    _end(state, job, restore)


def _has_state(state: SchedulerState, job: Job, restore: Restore) -> bool:
    """Whether the state is in host memory, or will never be. False: it is on its way."""
    checkpoint = restore.checkpoint
    if checkpoint is None or state.checkpoints.has(checkpoint):
        return True
    fetch = restore.fetches.get(checkpoint)
    if fetch is None:
        _fetch_ahead(state, restore)
        return checkpoint not in restore.fetches
    if not fetch.future.done():
        return False
    del restore.fetches[checkpoint]
    if _was_read(state, checkpoint, fetch):
        ids = job.request.prompt.ids[: checkpoint.position]
        node = state.checkpoints.put(checkpoint.namespace, ids, checkpoint.kind, fetch.block)
        if node is not None:
            node.key, node.priority, node.expires_s = checkpoint.key, checkpoint.priority, checkpoint.expires_s
            state.room.retention.changed(node)
            state.expiry.note(node.expires_s)
            _hold_checkpoint(state, restore, node)
        restore.checkpoint = node
        return True
    state.checkpoints.abandon(fetch.block)
    restore.checkpoint = _deepest_state(state, job, restore)  # the next one, now that this one is forgotten
    return _has_state(state, job, restore)


def _end(state: SchedulerState, job: Job, restore: Restore) -> None:
    """Bring the slot to the position it resumes at, or to the next one before that it can have."""
    slot = job.slot
    _leave(state, restore)
    job.restore = None
    reach = _reach(state, job, restore)
    if not state.rules.has_state:
        state.trim(slot, reach // state.rules.grid * state.rules.grid)
    elif not state.resume_before(slot, job.request.namespace, job.request.prompt.ids[:reach]):
        state.erase(slot)
    if len(slot) < restore.resume_tokens:
        job.reason, job.position = Reason.LOST, len(slot)
        if not len(slot):
            job.source = Source.NONE
    finish(state, job)


def _leave(state: SchedulerState, restore: Restore) -> None:
    """End every lease, and take in or drop what is still on its way."""
    for span in restore.held:
        state.spans.let_go(span)
    restore.held.clear()
    if restore.held_checkpoint is not None:
        state.checkpoints.let_go(restore.held_checkpoint)
        restore.held_checkpoint = None
    for mark, fetch in restore.fetches.items():
        fetch.future.exception()  # the reader writes to the block until then
        if isinstance(mark, Checkpoint):
            state.checkpoints.abandon(fetch.block)
        else:
            fetch.block.release()
    restore.fetches.clear()


def abandon(state: SchedulerState, job: Job) -> None:
    """The job ends or loses its slot before everything was put back. What can be used alone stays."""
    restore = job.restore
    if restore is None:
        return
    _leave(state, restore)
    job.restore = None
    if state.rules.has_state:
        state.erase(job.slot)
    if not len(job.slot):
        job.source = Source.NONE
    job.resumed_tokens = len(job.slot)
