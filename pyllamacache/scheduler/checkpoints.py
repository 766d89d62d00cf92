"""Checkpoints of an engine while it runs: taken, put back and given up, within a budget of bytes and a count.

    take --> room? --> block --> backend.begin_capture --> in flight --> ready
              |no: refused         |busy: a wanted one waits here, its slot held; an optional one is dropped

The index says which there are, the pool where their bytes are. Scheduler thread only.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import NativeError
from ..observe.histogram import Recorder
from ..observe.metrics import CheckpointCounts
from ..prefix.budget import Newcomer
from ..prefix.index import Checkpoint, PrefixIndex
from ..prefix.rates import Rates
from ..prefix.retention import Eviction, Holdings, choose_victim
from ..request import CheckpointKind

if TYPE_CHECKING:
    from ..config import CacheBudget
    from ..request import CaptureMode, Ids, SlotId
    from ..store.host import Block
    from .backend import Backend, Capture
    from .room import Room
    from .slots import SlotState


MAX_IN_FLIGHT = 2
"""As many as llama_state_capture_begin has slots for."""


@dataclass(slots=True, eq=False)
class _InFlight:
    node: Checkpoint
    capture: Capture
    began_s: float
    attended_s: float | None
    """Since when the scheduler's thread has been at it; None: it does other things meanwhile."""
    stall_s: float = 0.0
    """What the thread spent on it before that."""

    def leave(self, now_s: float) -> None:
        """The thread turns to other things."""
        if self.attended_s is not None:
            self.stall_s += now_s - self.attended_s
            self.attended_s = None


@dataclass(slots=True, eq=False)
class _Wanted:
    """A first-class checkpoint of a held slot, for which no capture was free."""

    slot: SlotState
    kind: CheckpointKind


class Checkpoints:
    """The checkpoints of one engine over all its slots. `slots` is the scheduler's own list."""

    def __init__(
        self,
        backend: Backend,
        slots: Sequence[SlotState],
        room: Room,
        budget: CacheBudget,
        clock: Callable[[], float],
        index: PrefixIndex,
    ) -> None:
        self._backend = backend
        self._slots = slots
        self._room = room
        self._pool = room.pool
        self.on_ready: Callable[[Checkpoint], None] | None = None
        """Is told of those whose bytes have just become whole."""
        self._clock = clock
        self._blocks: dict[Checkpoint, Block] = {}
        self._pending: list[Block] = []
        """Of checkpoints that are being read from a file."""
        self.held_for_files: Counter[Checkpoint] = Counter()
        """Leases of slot files that are being written."""
        self._orphans: dict[Checkpoint, Block] = {}
        """Of checkpoints that were given up while somebody read them."""
        self._taken_s: dict[Checkpoint, float] = {}
        self._in_flight: deque[_InFlight] = deque()
        self.n_ended = 0
        """Captures that came to their end: what is there has changed."""
        self._wanted: deque[_Wanted] = deque()
        self._state_bytes = 0
        """Size of the latest state: what the next is taken to be."""
        self.budget = budget
        self.is_on = backend.traits.has_state and budget.max_checkpoints > 0
        self.is_unprepared = self.is_on
        """Until `prepare`, which needs a sequence to look at."""
        self.index = index
        self.rates = Rates()
        self.now = 0
        """Number of the latest request."""
        self.used_bytes = 0
        """Charged for checkpoints, in flight or ready."""
        self.has_changed = True
        """Since `has_changed` was last set to False: its reader tells the statistics."""
        self._mode: CaptureMode = "none"
        self._staging_bytes = 0
        self._n_waited = 0
        self._n_restored = 0
        self._taken: Counter[str] = Counter()
        self._refused: Counter[str] = Counter()
        self._evicted: Counter[str] = Counter()
        self._stall_s = 0.0
        self._capture, self._stall = Recorder(), Recorder()

    # ---- asking ----

    def path(self, namespace: str, ids: Ids) -> list[Checkpoint]:
        """Those at a prefix of `ids` whose bytes are there, the shallowest first."""
        if not len(self._blocks):
            return []
        self.poll()
        return [node for node in self.index.path(namespace, ids) if node.is_ready]

    def held_by(self, slot: SlotState) -> list[Checkpoint]:
        return self.path(slot.namespace, slot.tokens.ids) if len(slot) else []

    @property
    def can_hold_one(self) -> bool:
        """Whether a state of the latest size finds room at all."""
        return self.is_on and self._state_bytes <= min(self.budget.checkpoint_bytes, self._pool.limit_bytes)

    @property
    def n_free(self) -> int:
        """How many more states of the latest size find room without anything being given up."""
        if not self.is_on:
            return 0
        n = self.budget.max_checkpoints - len(self._blocks)
        if self._state_bytes:
            n = min(n, (self.budget.checkpoint_bytes - self.used_bytes) // self._state_bytes)
        return max(0, n)

    @property
    def min_gap_tokens(self) -> int:
        return self.rates.min_gap_tokens(self._state_bytes) if self._state_bytes else 0

    def has(self, node: Checkpoint) -> bool:
        """Whether its bytes are in host memory, or on the way there, and it has not been given up."""
        return node in self._blocks

    def age_s(self, node: Checkpoint) -> float:
        return self._clock() - self._taken_s[node]

    @property
    def is_waiting(self) -> bool:
        """A slot is held until a capture in flight is done."""
        return bool(self._wanted)

    @property
    def is_capturing(self) -> bool:
        return bool(self._in_flight)

    def counts(self) -> CheckpointCounts:
        """For the statistics."""
        return CheckpointCounts(
            held=len(self._blocks),
            held_bytes=self.used_bytes,
            in_flight=len(self._in_flight),
            max_held=self.budget.max_checkpoints if self.is_on else 0,
            limit_bytes=self.budget.checkpoint_bytes if self.is_on else 0,
            captured=dict(self._taken),
            refused=dict(self._refused),
            evicted=dict(self._evicted),
            waited=self._n_waited,
            restored=self._n_restored,
            mode=self._mode,
            staging_bytes=self._staging_bytes,
            stall_s=self._stall_s,
            capture=self._capture.value(),
            stall=self._stall.value(),
        )

    # ---- taking ----

    def prepare(self, slot: SlotState) -> None:
        """Learn from a slot that holds something how large a state is, and have memory for the first touched."""
        self.is_unprepared = False
        with suppress(NativeError):
            self._state_bytes = self._backend.state_bytes(slot.slot_id)
            self._expect()

    def _expect(self) -> None:
        if self._state_bytes and self.n_free:
            self._pool.expect(self._state_bytes)

    def take(self, slot: SlotState, kind: CheckpointKind) -> Checkpoint | None:
        """Take one of what the slot holds now, unless there is one. None: refused, or it has to wait."""
        if not self.is_on or not len(slot):
            return None
        ids = slot.tokens.ids
        path = self.index.path(slot.namespace, ids)
        if path and path[-1].position == len(slot):
            return self._meet(path[-1], kind)
        started_s = self._clock()
        try:
            return self._begin(slot, kind, ids, path, started_s)
        except NativeError:
            self._refuse("failed")
            return None
        finally:
            now_s = self._clock()
            self._stall_s += now_s - started_s
            for each in self._in_flight:
                each.leave(now_s)

    def _meet(self, node: Checkpoint, kind: CheckpointKind) -> Checkpoint:
        """There is one where another kind is wanted: it serves both."""
        node.last_used = self.now
        if node.kind.is_optional and not kind.is_optional:
            node.kind = kind
        return node

    def _begin(
        self, slot: SlotState, kind: CheckpointKind, ids: Ids, path: list[Checkpoint], started_s: float
    ) -> Checkpoint | None:
        self.poll()
        if len(self._in_flight) >= MAX_IN_FLIGHT:
            self._want(slot, kind)
            return None
        n_bytes = self._state_bytes = self._backend.state_bytes(slot.slot_id)
        if not self._reserve_staging(n_bytes):
            self._refuse("no_room")
            return None
        block = self._find_room(n_bytes, kind, path, len(ids), slot.slot_id, slot.namespace)
        if block is None:
            return None
        if self._mode != "host":  # which it stays
            self._mode = self._backend.capture_mode(slot.slot_id)
        try:
            began_s = self._clock()
            capture = self._backend.begin_capture(slot.slot_id, block.data)
            self.rates.captured(n_bytes, self._clock() - began_s)
        except NativeError:
            block.release()
            raise
        if capture is None:
            block.release()
            self.poll()
            self._want(slot, kind)
            return None
        node = self._add(slot.namespace, ids, kind, block)
        node.priority, node.expires_s = slot.priority, slot.expires_s
        self._room.retention.changed(node)
        self._in_flight.append(_InFlight(node, capture, began_s, started_s))
        self.poll()
        self._expect()
        return node if node in self._blocks else None

    def _reserve_staging(self, n_bytes: int) -> bool:
        """What the backend is about to allocate counts before it is there."""
        more = self._backend.staging_bytes(n_bytes) - self._staging_bytes
        if more <= 0:
            return True
        if not self._pool.reserve(more):
            return False
        self._staging_bytes += more
        return True

    def _want(self, slot: SlotState, kind: CheckpointKind) -> None:
        if kind.is_optional:
            self._refuse("busy")
        elif not slot.is_held:
            slot.is_held = True
            self._wanted.append(_Wanted(slot, kind))
            self._n_waited += 1
            self.has_changed = True

    def put(self, namespace: str, ids: Ids, kind: CheckpointKind, block: Block) -> Checkpoint | None:
        """Take over a block that `room_for` gave as a checkpoint at the end of `ids`. None: the budget shrank since."""
        path = self.index.path(namespace, ids)
        is_there = bool(path) and path[-1].position == len(ids)
        if is_there or block not in self._pending or self._is_over():
            self.abandon(block)
            return path[-1] if is_there else None
        self._pending.remove(block)
        node = self._add(namespace, ids, kind, block)
        self._has_become_ready(node)
        return node

    def _has_become_ready(self, node: Checkpoint) -> None:
        node.is_ready = True
        if self.on_ready is not None:
            self.on_ready(node)

    def _add(self, namespace: str, ids: Ids, kind: CheckpointKind, block: Block) -> Checkpoint:
        node = self.index.add_checkpoint(namespace, ids, kind, len(block.data))
        node.last_used = self.now
        self._blocks[node] = block
        self._taken_s[node] = self._clock()
        self.used_bytes += node.n_bytes
        self._room.charge(node.namespace, node.n_bytes)
        self.has_changed = True
        return node

    def _remove(self, node: Checkpoint, *, is_evicted: bool = False, reason: str = "") -> None:
        self.index.remove(node, is_evicted=is_evicted, reason=reason, at_s=self._clock())
        del self._taken_s[node]
        self.used_bytes -= node.n_bytes
        self._room.charge(node.namespace, -node.n_bytes)
        block = self._blocks.pop(node)
        if node.n_users:
            self._orphans[node] = block
        else:
            block.release()
        self.has_changed = True

    def all_blocks(self) -> list[Block]:
        """Memory of all of them, of those given up while somebody reads them, and of those being read from a file."""
        return [*self._blocks.values(), *self._orphans.values(), *self._pending]

    def hold(self, node: Checkpoint) -> None:
        """Its bytes stay where they are until it is let go, even if it is given up meanwhile."""
        node.n_users += 1

    def let_go(self, node: Checkpoint) -> None:
        node.n_users -= 1
        if not node.n_users and node in self._orphans:
            self._orphans.pop(node).release()

    def has_room_for(self, n_bytes: int) -> bool:
        """Whether nothing has to be given up for it."""
        return (
            self.is_on and self._has_budget_for(n_bytes) and n_bytes <= self._pool.limit_bytes - self._pool.used_bytes
        )

    def room_for(self, n_bytes: int, kind: CheckpointKind, namespace: str = "") -> Block | None:
        """Memory for a checkpoint that comes from elsewhere; counted until it is `put` or `abandon`ed."""
        block = self._find_room(n_bytes, kind, [], 0, namespace=namespace) if self.is_on else None
        if block is not None:
            self._pending.append(block)
        return block

    def abandon(self, block: Block) -> None:
        """It was not needed after all; repeatable."""
        if block in self._pending:
            self._pending.remove(block)
            block.release()

    # ---- room ----

    def _refuse(self, reason: str) -> None:
        self._refused[reason] += 1
        self.has_changed = True

    def _charged(self) -> tuple[int, int]:
        """Count and bytes, those that are being read from a file included."""
        return len(self._blocks) + len(self._pending), self.used_bytes + sum(len(block.data) for block in self._pending)

    def _has_budget_for(self, n_bytes: int) -> bool:
        n_charged, charged_bytes = self._charged()
        return n_charged < self.budget.max_checkpoints and charged_bytes + n_bytes <= self.budget.checkpoint_bytes

    def _is_over(self) -> bool:
        n_charged, charged_bytes = self._charged()
        is_over = n_charged > self.budget.max_checkpoints or charged_bytes > self.budget.checkpoint_bytes
        return is_over or self._pool.resident_bytes > self._pool.limit_bytes

    def _find_room(
        self,
        n_bytes: int,
        kind: CheckpointKind,
        path: list[Checkpoint],
        position: int,
        taker: SlotId | None = None,
        namespace: str = "",
    ) -> Block | None:
        """The count and the bytes of checkpoints are theirs alone; the pool they share with spans."""
        if n_bytes > min(self.budget.checkpoint_bytes, self._pool.limit_bytes):
            self._refuse("larger_than_budget")
            return None
        gap = position - (path[-1].position if path else 0)
        holdings = None
        while True:
            priority = 0 if taker is None else self._slots[taker].priority
            if self._has_budget_for(n_bytes):
                newcomer = Newcomer(gap, kind.is_optional, priority, path, taker)
                block = self._room.allocate(n_bytes, newcomer, namespace)
                if block is None:
                    self._refuse("no_room")
                return block
            holdings = holdings or self.holdings()
            victim = choose_victim(
                self._blocks,
                holdings,
                now=self.now,
                newcomer=path,
                taker=taker,
                is_optional=kind.is_optional,
                gap=gap,
                priority=priority,
            )
            if victim is None:
                self._refuse("no_room")
                return None
            node, reason = victim
            self.drop(node, reason)
            if node in path:
                path.remove(node)

    def holdings(self) -> Holdings:
        """What the device has, in slots and parked."""
        paths = {slot.slot_id: self.index.path(slot.namespace, slot.tokens.ids) for slot in self._slots if len(slot)}
        paths.update((each.seq_id, self.index.path_to(each)) for each in self.index.parked)
        return Holdings(
            paths,
            frozenset(slot.slot_id for slot in self._slots if slot.is_busy),
            needs_span=self._backend.traits.memory.has_cells,
            marks={slot.slot_id: slot.marks for slot in self._slots if slot.marks},
            n_shielded=max(2, len(self._blocks) // (2 * max(1, sum(1 for slot in self._slots if len(slot))))),
        )

    def drop(self, node: Checkpoint, reason: Eviction) -> None:
        """Give one up. One in flight is cancelled."""
        for each in [each for each in self._in_flight if each.node is node]:
            each.capture.cancel()
            self._in_flight.remove(each)
            self.n_ended += 1
        is_missed = reason in (Eviction.STRANDED, Eviction.THINNED, Eviction.OUTVALUED)
        self._remove(node, is_evicted=is_missed and node.is_ready, reason=reason.value if node.is_ready else "")
        self._evicted[reason.value] += 1

    # ---- in flight ----

    def poll(self) -> None:
        """Take in the captures that are done. No cost while there are none."""
        for each in [each for each in self._in_flight if each.capture.is_ready]:
            self._end(each)

    def _end(self, each: _InFlight) -> None:
        self._in_flight.remove(each)
        self.n_ended += 1
        self.has_changed = True
        if each.capture.finish():
            now_s = self._clock()
            each.leave(now_s)
            self._capture.add(now_s - each.began_s)
            self._stall.add(each.stall_s)
            self._taken[each.node.kind.value] += 1
            self._has_become_ready(each.node)
        else:
            self._refuse("failed")
            self._remove(each.node)

    def serve(self) -> None:
        """Begin what was waiting, as far as captures have come free. Between steps."""
        self.poll()
        for _ in range(len(self._wanted)):
            if len(self._in_flight) >= MAX_IN_FLIGHT:
                return
            each = self._wanted.popleft()
            each.slot.is_held = False
            self.take(each.slot, each.kind)
            self._n_waited -= each.slot.is_held  # it goes on waiting

    def finish_all(self) -> None:
        """Wait for whatever is in flight or wanted: there is nothing else to do."""
        while self._in_flight or self._wanted:
            self.wait()

    def wait(self) -> None:
        """Wait for the oldest capture in flight: nothing else can go on."""
        started_s = self._clock()
        if self._in_flight:
            self._in_flight[0].attended_s = started_s
            self._end(self._in_flight[0])
        self._stall_s += self._clock() - started_s
        self.serve()

    def settle(self, slot: SlotState) -> None:
        """Before the slot's content changes: have what it is held for captured."""
        while slot.is_held:
            if not self._in_flight:  # then it was not for want of a capture
                self._wanted = deque(each for each in self._wanted if each.slot is not slot)
                slot.is_held = False
                return
            self.wait()

    # ---- putting back ----

    def resume(self, donor_id: SlotId | None, slot: SlotState, node: Checkpoint) -> None:
        """Put the state back. Raises NativeError; the checkpoint is given up then."""
        started_s = self._clock()
        try:
            self._backend.resume(donor_id, slot.slot_id, node.position, self._blocks[node].data)
        except NativeError:
            self.drop(node, Eviction.BROKEN)
            raise
        self.rates.restored(node.n_bytes, self._clock() - started_s)
        node.hits += 1
        self._room.retention.used(node)
        self._n_restored += 1
        self.has_changed = True

    def data(self, node: Checkpoint) -> Block:
        """Where its bytes are; the block stays the checkpoint's."""
        return self._blocks[node]

    def touch(
        self,
        nodes: Iterable[Checkpoint],
        boundaries: Collection[int] = (),
        *,
        priority: int = 0,
        expires_s: float | None = None,
    ) -> None:
        """The latest request's prompt goes past them, and its caller wants some of them."""
        for node in nodes:
            node.refresh(priority, expires_s)
            self._room.retention.changed(node)
            self._meet(node, CheckpointKind.BOUNDARY if node.position in boundaries else node.kind)

    # ---- budget ----

    def set_budget(self, budget: CacheBudget) -> None:
        """Give up what no longer fits, the least valuable first, and return the memory to the system."""
        self.budget = budget
        self.has_changed = True
        self._room.set_namespace_bytes(budget.namespace_bytes)
        self.is_on = self._backend.traits.has_state and budget.max_checkpoints > 0
        self._pool.set_limit(budget.host_bytes)
        while len(self._blocks) > budget.max_checkpoints or self.used_bytes > budget.checkpoint_bytes:
            victim = choose_victim(self._blocks, self.holdings(), now=self.now, newcomer=(), is_optional=False, gap=0)
            self.drop(victim[0] if victim else next(iter(self._blocks)), Eviction.CLEARED)
        self._room.fit_limit()
        self._pool.set_limit(self._pool.used_bytes)  # what is idle goes back to the system now
        self._pool.set_limit(budget.host_bytes)
        self.is_unprepared = self.is_on and not self._state_bytes
        self._expect()

    def clear(self, namespace: str | None = None) -> int:
        """Give up all of a namespace, or (None) all. Returns how many."""
        nodes = [node for node in self._blocks if namespace in (None, node.namespace)]
        for node in nodes:
            self.drop(node, Eviction.CLEARED)
        self.index.evicted.forget(namespace)
        return len(nodes)

    def close(self) -> None:
        """End the captures in flight; before the backend is closed."""
        for each in list(self._in_flight):
            self.drop(each.node, Eviction.CLEARED)
        self._wanted.clear()
        for block in list(self._pending):
            self.abandon(block)
        for node in list(self._blocks):
            self.drop(node, Eviction.CLEARED)
        self._pool.close()
