"""The scheduler's stages over a fake backend, without a thread; the books are held to the memory after every turn."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any

import numpy as np

from pyllamacache.config import CacheBudget
from pyllamacache.observe.metrics import Metrics, Statistics
from pyllamacache.prefix.match import common_prefix_len
from pyllamacache.request import Chunk, Completion, Prompt, Request, RequestId, SamplingParams, SlotId
from pyllamacache.scheduler.admit import admit
from pyllamacache.scheduler.backend import Traits
from pyllamacache.scheduler.behind import store_when_idle
from pyllamacache.scheduler.disk import DiskTier
from pyllamacache.scheduler.inbox import Outbox, Submission
from pyllamacache.scheduler.publish import end_overdue
from pyllamacache.scheduler.slot_files import idle_slot, kind_of, put_checkpoints, put_state
from pyllamacache.scheduler.slots import SlotState
from pyllamacache.scheduler.state import SchedulerState
from pyllamacache.scheduler.step import run_step
from pyllamacache.store.host import Block, HostPool

from .backend import FakeBackend, make_traits
from .clock import FakeClock
from .oracle import GREEDY, cold_logits, cold_run
from .store import FakeStore, LazyExecutor
from .vocabulary import ByteVocab

if TYPE_CHECKING:
    from pyllamacache.request import Ids
    from pyllamacache.scheduler.jobs import Job
    from pyllamacache.scheduler.restore import Restore


@dataclass(eq=False)
class Ticket:
    """A request on its way, as the test sees it."""

    request: Request
    outbox: Outbox

    @property
    def ids(self) -> list[int]:
        return [int(token) for token in self.request.prompt.ids]

    @property
    def is_done(self) -> bool:
        return self.outbox.is_done

    @property
    def error(self) -> BaseException | None:
        return self.outbox._error

    @property
    def completion(self) -> Completion:
        return self.outbox.result(0)

    @property
    def chunks(self) -> list[Chunk]:
        """Those that came since the last call."""
        return list(iter(self.outbox.poll, None))

    def cancel(self) -> None:
        self.outbox.cancel()


_request_ids = count(1)


def make_request(ids: Sequence[int], *, sampling: SamplingParams | None = None, **options: Any) -> Request:
    """A request as `text.options` would build it; unknown names of options are those of SamplingParams."""
    fields = Request.__dataclass_fields__
    params = {name: options.pop(name) for name in list(options) if name not in fields}
    array = np.array(ids, dtype=np.int32)
    array.flags.writeable = False
    slot = options.pop("slot", None)
    options.setdefault("max_tokens", 4 if options.get("generate", True) else 0)
    return Request(
        RequestId(next(_request_ids)),
        Prompt(array),
        sampling=sampling or SamplingParams(**params),
        slot=None if slot is None else SlotId(slot),
        **options,
    )


@dataclass(frozen=True)
class Saved:
    """What a slot file holds."""

    ids: Ids
    state: bytes
    exact_tokens: int
    namespace: str
    checkpoints: tuple[tuple[int, str, bytes], ...] = ()
    """Position, kind, bytes."""


class Driver:
    """One engine without a thread. `turn` is one round of the loop."""

    def __init__(
        self,
        backend: FakeBackend | Traits | None = None,
        *,
        n_swa: int = 6,
        max_checkpoints: int = 0,
        checkpoint_bytes: int | None = None,
        host_bytes: int = 1 << 24,
    ) -> None:
        self.backend = (
            backend if isinstance(backend, FakeBackend) else FakeBackend(backend or make_traits(), n_swa=n_swa)
        )
        self.traits = self.backend.traits
        self.clock = FakeClock()
        self.metrics = Metrics(self.traits.kv_tokens)
        self.pool = HostPool(host_bytes)
        limit = host_bytes if checkpoint_bytes is None else min(checkpoint_bytes, host_bytes)
        self.budget = CacheBudget(max_checkpoints, limit, host_bytes)
        self.state = SchedulerState(self.backend, self.metrics, self.clock, ByteVocab().piece, self.pool, self.budget)
        self.leases_of_tests = 0
        """Leases that a test holds itself, which the books know nothing of."""
        self.stores_behind = False
        """Copy what is idle to host memory whenever nothing runs."""
        self.tickets: list[Ticket] = []
        self._namespaces = {slot.slot_id: "" for slot in self.state.slots}
        """Where each slot's content comes from, kept apart from the scheduler's own record."""
        self._once_held: dict[str, set[tuple[int, ...]]] = {}
        """By namespace: what slots held after a turn."""
        self._ran_in: dict[RequestId, SlotId] = {}

    # -- doing --

    def submit(self, ids: Sequence[int], **options: Any) -> Ticket:
        request = make_request(ids, **options)
        assert len(request.prompt) + request.max_tokens <= self.traits.n_ctx
        ticket = Ticket(request, Outbox(keeps_chunks=True))
        self.tickets.append(ticket)
        self.state.queue.append(Submission(request, ticket.outbox, self.clock()))
        return ticket

    def turn(self) -> None:
        """One round of the loop. Raises AssertionError where it did nothing, or where the books are wrong after it."""
        n_calls, n_ended, n_finished = len(self.backend.calls), self.n_ended, self.backend.n_finished_captures
        end_overdue(self.state)
        self._admit()
        assert self.state.running or not self.state.queue, "requests wait although nothing runs"
        if self.stores_behind and not self.state.running:
            store_when_idle(self.state)
        if self.state.running:
            running = list(self.state.running)
            n_restoring = sum(job.restore is not None for job in running)
            run_step(self.state)
            self._check_left_behind([job for job in running if job not in self.state.running])
            did_something = len(self.backend.calls) > n_calls or self.n_ended > n_ended
            did_something = did_something or self.backend.n_finished_captures > n_finished or n_restoring > 0
            assert did_something, f"a busy loop with {len(running)} running requests"
        self.check()

    def _admit(self) -> None:
        """`admit`, and nothing crosses from one namespace into another."""
        held = {slot.slot_id: slot.tokens.ids.copy() for slot in self.state.slots}
        homes = dict(self._namespaces)
        parked: dict[str, list[Ids]] = {}
        for each in self.state.index.parked:
            parked.setdefault(each.namespace, []).append(each.ids())
        stored: dict[str, list[Ids]] = {}
        for span in self.state.index.spans:
            stored.setdefault(span.namespace, []).append(span.ids())
        before = list(self.state.running)
        admit(self.state)
        disk = None if self.state.disk is None else self.state.disk.index  # which admission has brought up to date
        for mark in () if disk is None else (*disk.spans, *disk.checkpoints):
            stored.setdefault(mark.namespace, []).append(mark.ids())
        for job in self.state.running:
            if job in before:
                continue
            request, plan = job.request, job.plan
            if job.resumed_tokens:
                holder = job.slot.slot_id if plan.donor_id is None else plan.donor_id
                if job.plan.held_tokens and (self.traits.memory.has_cells or job.source != "checkpoint"):
                    # a parked donor may hold something else by now
                    is_ours = holder >= self.traits.n_slots or self._namespaces[holder] == request.namespace
                    assert is_ours, "content of another namespace was reused"
                assert request.cache_prompt
            known = [held[slot_id] for slot_id in held if homes[slot_id] == request.namespace]
            known += stored.get(request.namespace, [])
            known += parked.get(request.namespace, [])
            if not self.traits.memory.has_cells:  # there, checkpoints outlive what they were taken of
                known += [np.array(ids, dtype=np.int32) for ids in self._once_held.get(request.namespace, ())]
            assert plan.matched_tokens <= max((common_prefix_len(request.prompt.ids, ids) for ids in known), default=0)
            assert request.slot in (None, job.slot.slot_id)
            self._namespaces[job.slot.slot_id] = request.namespace
            self._ran_in[request.request_id] = job.slot.slot_id

    @staticmethod
    def _check_left_behind(ended: Sequence[Job]) -> None:
        """`store=False` leaves nothing that was not there before."""
        for job in ended:
            kept = job.resumed_tokens if job.source == "slot" else 0
            assert job.request.store or len(job.slot) <= kept, "store=False left something behind"

    def erase(self, slot_id: int) -> None:
        self.state.erase(idle_slot(self.state, SlotId(slot_id), "erase"))
        self.check()

    def save(self, slot_id: int) -> Saved:
        slot = idle_slot(self.state, SlotId(slot_id), "save")
        checkpoints = self.state.checkpoints
        stored = tuple(
            (node.position, str(node.kind), checkpoints.data(node).data.tobytes()) for node in checkpoints.held_by(slot)
        )
        state = self.backend.save_state(slot_id) if len(slot) else bytearray()
        return Saved(slot.tokens.ids.copy(), bytes(state), slot.exact_tokens, self._namespaces[slot.slot_id], stored)

    def restore(self, slot_id: int, saved: Saved) -> None:
        """As an engine does: memory for the checkpoints first, which is what their bytes are read into."""
        idle_slot(self.state, SlotId(slot_id), "restore")
        self.put(slot_id, saved, self.read(saved))

    def read(self, saved: Saved) -> dict[int, tuple[str, Block]]:
        """Its checkpoints, as far as there is room for them; to be `put` later."""
        blocks: dict[int, tuple[str, Block]] = {}
        for position, kind, data in saved.checkpoints:
            block = self.state.checkpoints.room_for(len(data), kind_of(kind))
            if block is not None:
                block.data[:] = np.frombuffer(data, dtype=np.uint8)
                blocks[position] = (kind, block)
        self.check()
        return blocks

    def put(self, slot_id: int, saved: Saved, blocks: dict[int, tuple[str, Block]]) -> None:
        """On any error the slot keeps what it held, and the checkpoints are let go."""
        try:
            put_state(
                self.state,
                SlotId(slot_id),
                ids=saved.ids,
                data=saved.state,
                exact_tokens=saved.exact_tokens,
                namespace=saved.namespace,
            )
            put_checkpoints(self.state, SlotId(slot_id), blocks)
        finally:
            for _, block in blocks.values():
                self.state.checkpoints.abandon(block)
        self._namespaces[SlotId(slot_id)] = saved.namespace
        self.check()

    def close(self) -> None:
        """As the loop ends when nothing runs any more. Nothing may be left."""
        assert not self.state.running
        if self.state.disk is not None:
            self.state.disk.close()
        self.state.spans.clear()
        self.state.checkpoints.close()
        self.backend.close()
        assert len(self.state.checkpoints.index.checkpoints) == self.state.checkpoints.used_bytes == 0
        assert self.pool.used_bytes == self.state.checkpoints.counts().staging_bytes

    def run(self, max_turns: int = 1000) -> None:
        """Until everything has ended."""
        for _ in range(max_turns):
            if not self.state.running and not self.state.queue:
                return
            self.turn()
        raise AssertionError(f"not done after {max_turns} turns")

    def run_until(self, ticket: Ticket, n_tokens: int) -> None:
        """Until the request has `n_tokens` of its reply."""
        for _ in range(1000):
            if any(job.outbox is ticket.outbox and len(job.generated) >= n_tokens for job in self.state.running):
                return
            assert not ticket.is_done, "it ended before"
            self.turn()
        raise AssertionError("it never got there")

    def attach_store(self, store: FakeStore, *, n_polls: int = 0) -> None:
        """From now on there is a disk."""
        executors = (LazyExecutor(1), LazyExecutor(1))
        for each in executors:
            each.n_polls = n_polls
        disk = DiskTier(store, kind_of=kind_of, wall_clock=self.clock, clock=self.clock, executors=executors)
        disk.index.span_tokens = self.state.index.span_tokens
        disk.refresh()
        self.state.attach_disk(disk)

    def complete(self, ids: Sequence[int], **options: Any) -> Completion:
        ticket = self.submit(ids, **options)
        self.run()
        return ticket.completion

    def complete_beside(self, ids: Sequence[int], **options: Any) -> Completion:
        """Others may still run when it has ended."""
        ticket = self.submit(ids, **options)
        for _ in range(1000):
            if ticket.is_done:
                return ticket.completion
            self.turn()
        raise AssertionError("it never ended")

    def step_only(self) -> None:
        """One round of the loop without a look at the books, for tests that count what is done."""
        end_overdue(self.state)
        admit(self.state)
        run_step(self.state)

    def warm(self, ids: Sequence[int], **options: Any) -> Completion:
        return self.complete(ids, generate=False, **options)

    # -- looking --

    @property
    def n_ended(self) -> int:
        return sum(ticket.is_done for ticket in self.tickets)

    def slot(self, slot_id: int) -> SlotState:
        return self.state.slots[slot_id]

    def ran_in(self, ticket: Ticket) -> SlotId | None:
        """The slot it was admitted to, if it was."""
        return self._ran_in.get(ticket.request.request_id)

    def held(self, slot_id: int) -> list[int]:
        return [int(token) for token in self.slot(slot_id).tokens.ids]

    @property
    def statistics(self) -> Statistics:
        return self.metrics.snapshot()

    def cold(self, ids: Sequence[int] | Ids, n_tokens: int, sampling: SamplingParams = GREEDY) -> tuple[int, ...]:
        return cold_run(self.traits, list(map(int, ids)), n_tokens, sampling, n_swa=self.backend.sequences.n_swa)

    # -- holding to the law --

    def check(self) -> None:
        """Slots, ledger and memory agree."""
        state, backend = self.state, self.backend
        for slot in state.slots:
            is_restoring = slot.job is not None and slot.job.restore is not None
            n_held = (
                backend.span_length(slot.slot_id)
                if is_restoring and self.traits.memory.has_cells
                else backend.length(slot.slot_id)
            )
            assert n_held == len(slot), f"slot {slot.slot_id} and its memory differ in length"
            assert backend.content(slot.slot_id) in (None, self.held(slot.slot_id)), f"slot {slot.slot_id} holds other"
            assert 0 <= slot.exact_tokens <= len(slot)
            assert slot.is_busy == any(job.slot is slot for job in state.running)
            if len(slot):
                self._once_held.setdefault(self._namespaces[slot.slot_id], set()).add(tuple(self.held(slot.slot_id)))
        self._check_checkpoints()
        self._check_parked()
        if not self.leases_of_tests:
            state.audit()
        if state.counts_cells:
            assert state.ledger.used() == backend.n_used_cells()
            assert state.ledger.used() <= self.traits.kv_tokens
        assert backend.n_open_samplers() == sum(job.sampler is not None for job in state.running)

    def _check_parked(self) -> None:
        """What the index says is parked is what the memory holds, in a namespace where it was once held."""
        state, n_slots = self.state, self.traits.n_slots
        state.index.audit()
        parked = {each.seq_id: each for each in state.index.parked}
        for seq_id in (SlotId(n_slots + i) for i in range(self.traits.n_parked)):
            ids = parked[seq_id].ids().tolist() if seq_id in parked else []
            assert self.backend.content(seq_id) == ids, f"parked sequence {seq_id} holds other"
            assert state.ledger.length(seq_id) == len(ids)
            if ids:
                once = self._once_held.get(parked[seq_id].namespace, ())
                assert any(each[: len(ids)] == tuple(ids) for each in once), "parked in a namespace it is not of"
            assert seq_id not in parked or not parked[seq_id].n_users, "a lease that nobody ended"

    def _check_spans(self, restoring: Sequence[Restore]) -> None:
        """Host memory holds exactly the spans of the index, leased by nobody but restores and the disk's writer."""
        state, spans = self.state, self.state.spans
        assert set(spans.blocks) == set(state.index.spans)
        assert spans.used_bytes == sum(span.n_bytes for span in spans.blocks)
        leased: Counter[object] = Counter(span for each in restoring for span in each.held)
        leased.update(offer.mark for offer, _ in (state.disk._writing if state.disk is not None else ()))
        for span in (*spans.blocks, *spans._orphans):
            assert span.n_users == leased[span], "a lease that nobody holds"

    def _check_checkpoints(self) -> None:
        """The budget holds, blocks are where checkpoints are, and each is at the prefix it says."""
        checkpoints = self.state.checkpoints
        nodes = list(checkpoints.index.checkpoints)
        budget, elsewhere = checkpoints.budget, [*checkpoints._pending, *checkpoints._orphans.values()]
        assert len(nodes) == len(checkpoints.index.checkpoints) <= budget.max_checkpoints
        assert checkpoints.used_bytes == sum(node.n_bytes for node in nodes) <= budget.checkpoint_bytes
        assert self.pool.resident_bytes <= self.pool.limit_bytes or elsewhere  # which others are reading or writing
        assert all(checkpoints.has(node) for node in nodes)
        seen = set()
        for node in nodes:
            ids = node.ids()
            assert len(ids) == node.position
            assert node.gap > 0
            assert checkpoints.index.path(node.namespace, ids)[-1] is node
            seen.add((node.namespace, ids.tobytes()))
        assert len(seen) == len(nodes), "two checkpoints of one prefix"
        counts = checkpoints.counts()
        assert counts.in_flight == sum(not node.is_ready for node in nodes)
        pending = checkpoints._pending
        blocks = [*checkpoints._blocks.values(), *checkpoints._orphans.values(), *pending]
        spans = self.state.spans
        blocks += [*spans.blocks.values(), *spans._orphans.values()]
        restoring = [job.restore for job in self.state.running if job.restore is not None]
        blocks += [
            fetch.block for each in restoring for mark, fetch in each.fetches.items() if fetch.block not in pending
        ]
        self._check_spans(restoring)
        assert len(checkpoints._blocks) == len(nodes)
        known_bytes = sum(block.size_bytes for block in blocks) + counts.staging_bytes
        if self.pool.used_bytes != known_bytes:
            gc.collect()  # views that exceptions hold in cycles count until then
        assert self.pool.used_bytes == known_bytes
        waiting = [slot for slot in self.state.slots if slot.is_held]
        assert checkpoints.is_waiting == bool(waiting)

    def check_answer(self, ticket: Ticket) -> None:
        """The promises to one request that has ended without an error."""
        request, result = ticket.request, ticket.completion
        usage, cache = result.usage, result.cache
        was_cut_short = result.finish_reason == "cancelled"
        assert usage.cached_tokens == cache.resumed_tokens
        assert cache.resumed_tokens + cache.prefilled_tokens == usage.prompt_tokens
        assert cache.prefilled_tokens >= 0
        if not was_cut_short and request.generate:
            assert usage.prompt_tokens == len(request.prompt)
        assert cache.resumed_tokens <= len(request.prompt) - 1
        assert usage.cache_write_tokens <= cache.prefilled_tokens
        assert usage.completion_tokens == len(result.token_ids)
        assert (cache.resumed_tokens > 0) == (cache.source != "none")
        n_tokens = len(result.token_ids) if was_cut_short or request.stop else request.max_tokens
        expected = self.cold(request.prompt.ids, n_tokens, request.sampling)
        assert result.token_ids == expected, f"{result.token_ids}, but a cold run gives {expected}"
        assert not any(stop in result.text for stop in request.stop)
        assert result.logprobs is None or tuple(each.token_id for each in result.logprobs) == result.token_ids
        if result.logits is not None:
            logits = cold_logits(self.traits, ticket.ids, n_swa=self.backend.sequences.n_swa)
            assert np.array_equal(result.logits, logits), "other logits than those of a cold run"

    def check_answers(self, *, may_fail: bool = False) -> None:
        """Every request so far has ended, and every one with an answer has the right one."""
        for ticket in self.tickets:
            assert ticket.is_done
            if ticket.error is None:
                self.check_answer(ticket)
            else:
                assert may_fail, ticket.error
