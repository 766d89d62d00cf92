"""The law over random conversations: what is answered with reuse is what the same ids give on a fresh backend.

A rule machine drives the scheduler's stages over the fake backend: all memory kinds, exact and default, tiny budgets,
every kind of prompt, cancels, timeouts, failing calls, slot files, several captures in flight, budgets that change.
`Driver` checks the books after every turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from pyllamacache.config import CacheBudget, Memory
from pyllamacache.errors import (
    CapacityError,
    CellsExhaustedError,
    GrammarError,
    NativeError,
    RequestTimeoutError,
    SlotBusyError,
)
from pyllamacache.prefix.index import Checkpoint
from pyllamacache.prefix.match import common_prefix_len
from pyllamacache.scheduler.backend import Traits
from pyllamacache.store.host import Block
from tests.fakes import EOG, Culprit, Driver, FakeBackend, GroupFault, Sequences, Ticket, every_fault, make_traits
from tests.fakes.driver import Saved
from tests.fakes.planted import ForeignDonor, LateCapture, LateState, ShortShare, StaleTail
from tests.fakes.store import FakeStore

if TYPE_CHECKING:
    from pyllamacache.request import Ids

N_CTX = 40
NAMESPACES = ("", "", "", "other")
TRUNKS = (list(range(1, 25)), [1, 2, 3, 4, *[9] * 14], [5])
EOGS = frozenset({EOG, *range(0, 250, 25)})
"""One reply token in 23."""
FAILING_CALLS = (
    "trim",
    "trim_raises",
    "share",
    "share_span",
    "span_size",
    "save_span",
    "append_span",
    "load_state",
    "new_sampler",
    "state_bytes",
    "begin_capture",
    "capture",
    "resume",
)
small_ids = st.lists(st.integers(1, 3), min_size=1, max_size=9)
indexes = st.integers(0, 9)
NEVER = 10**9
"""Polls: a capture is done when it is waited for."""


@st.composite
def traits_of(draw: st.DrawFn, memories: Sequence[Memory]) -> Traits:
    n_ubatch = draw(st.sampled_from([1, 2, 4]))
    n_slots = draw(st.sampled_from([1, 2, 4]))
    memory, exact = draw(st.sampled_from(memories)), draw(st.booleans())
    can_park = memory.can_park and not exact
    n_batch = max(n_ubatch * draw(st.sampled_from([1, 2, 4])), -(-n_slots // n_ubatch) * n_ubatch)
    return make_traits(
        memory,
        exact=exact,
        n_slots=n_slots,
        n_ctx=N_CTX,
        kv_tokens=draw(st.sampled_from([N_CTX, N_CTX + 7, 2 * N_CTX])),
        n_batch=n_batch,
        n_ubatch=n_ubatch,
        eog_ids=EOGS,
        n_parked=draw(st.sampled_from([0, 1, 3, 8])) if can_park else 0,
    )


class LawMachine(RuleBasedStateMachine):
    sequences_type: type[Sequences] = Sequences
    is_strict = True
    memories: Sequence[Memory] = tuple(Memory)
    has_faults = True
    """Also: files are read and written, and budgets change."""

    @initialize(data=st.data(), n_swa=st.sampled_from([2, 3, 6]))
    def start(self, data: st.DataObject, n_swa: int) -> None:
        traits = data.draw(traits_of(self.memories))
        backend = FakeBackend(traits, n_swa=n_swa, is_strict=self.is_strict, sequences_type=self.sequences_type)
        if self.has_faults:
            max_checkpoints = data.draw(st.sampled_from([0, 1, 2, 3, 4, 6, 32]))
            checkpoint_bytes = data.draw(st.sampled_from([None, None, None, 700, 100]))
            backend.capture_polls = data.draw(st.sampled_from([0, 0, 3, NEVER, NEVER]))
            backend.max_captures = data.draw(st.sampled_from([1, 1, 2, 4]))
            backend.staging = data.draw(st.sampled_from([0, 0, 300]))
        else:
            max_checkpoints, checkpoint_bytes = 32, None
        self.driver = Driver(backend, max_checkpoints=max_checkpoints, checkpoint_bytes=checkpoint_bytes)
        self.driver.stores_behind = self.has_faults and data.draw(st.booleans())
        self.driver.state.index.span_tokens = data.draw(st.sampled_from([256, 1, 4, 7]))
        self.store: FakeStore | None = None
        if self.has_faults and data.draw(st.booleans()):
            self.store = FakeStore(data.draw(st.sampled_from([1 << 20, 2000, 300])))
            self.driver.attach_store(self.store, n_polls=data.draw(st.sampled_from([0, 2, NEVER])))
        self.read: list[tuple[Checkpoint, bytes]] = []
        """Checkpoints that are being written to a file, with their bytes."""
        self.incoming: list[tuple[Saved, dict[int, tuple[str, Block]]]] = []
        self.saved: list[Saved] = []
        self.culprits: set[int] = set()
        self.has_failed_groups = False

    def known_prompts(self) -> list[list[int]]:
        """Trunks, what was asked before, that with its answer, and what the slots hold."""
        prompts = [list(trunk) for trunk in TRUNKS]
        for ticket in self.driver.tickets[-4:]:
            prompts.append(ticket.ids)
            if ticket.is_done and ticket.error is None:
                prompts.append(ticket.ids + list(ticket.completion.token_ids))
        held = [self.driver.held(slot.slot_id) for slot in self.driver.state.slots]
        return prompts + [ids for ids in held if ids]

    # -- requests --

    @rule(
        base=indexes,
        change=st.sampled_from(["append", "append", "edit", "branch", "cut", "repeat", "unrelated"]),
        at=st.sampled_from([1.0, 1.0, 0.0]) | st.floats(0, 1),
        ids=small_ids,
        max_tokens=st.integers(0, 6),
        namespace=st.sampled_from(NAMESPACES),
        options=st.fixed_dictionaries(
            {},
            optional={
                "slot": st.integers(0, 3),
                "store": st.just(False),
                "cache_prompt": st.just(False),
                "return_logits": st.just(True),
                "timeout_s": st.sampled_from([0.5, 3.0]),
                "min_tokens": st.just(2),
                "boundaries": st.lists(st.integers(1, 30), max_size=3).map(lambda each: tuple(sorted(set(each)))),
                "stop": st.sampled_from([("e",), ("\ufffd", "a")]),
                "logprobs": st.just(True),
                "grammar": st.sampled_from(["unparsable", "fail at 1", "fine"]),
            },
        ),
        n_turns=st.integers(0, 6),
    )
    def submit(
        self,
        base: int,
        change: str,
        at: float,
        ids: list[int],
        max_tokens: int,
        namespace: str,
        options: dict[str, object],
        n_turns: int,
    ) -> None:
        prompts = self.known_prompts()
        prompt = prompts[-1 - base % len(prompts)]
        position = round(at * (len(prompt) - 1))
        if change == "append":
            prompt = prompt + ids
        elif change == "edit":
            prompt = [*prompt[:position], 7, *prompt[position + 1 :]]
        elif change == "branch":
            prompt = [*prompt[:position], 7, *ids]
        elif change == "cut":
            prompt = prompt[: position + 1]
        elif change == "unrelated":
            prompt = ids
        if "slot" in options:
            options["slot"] = int(str(options["slot"])) % self.driver.traits.n_slots
        prompt = prompt[: N_CTX - max_tokens]
        self.driver.submit(prompt, max_tokens=max_tokens, namespace=namespace, **options)
        self.step(n_turns)

    @rule(base=indexes, n_tokens=st.integers(1, N_CTX), namespace=st.sampled_from(NAMESPACES))
    def warm(self, base: int, n_tokens: int, namespace: str) -> None:
        prompts = self.known_prompts()
        prompt = prompts[-1 - base % len(prompts)][:n_tokens]
        self.driver.submit(prompt[:N_CTX], generate=False, namespace=namespace)

    @precondition(lambda self: any(slot.is_held and not slot.is_busy for slot in self.driver.state.slots))
    @rule(index=indexes, at=st.floats(0, 1), max_tokens=st.integers(0, 3))
    def leave_a_slot_that_waits(self, index: int, at: float, max_tokens: int) -> None:
        """Back to somewhere in what it holds, whose end is not captured yet."""
        waiting = [slot for slot in self.driver.state.slots if slot.is_held and not slot.is_busy]
        slot = waiting[index % len(waiting)]
        prompt = [*self.driver.held(slot.slot_id)[: 1 + round(at * len(slot))], 7][: N_CTX - max_tokens]
        self.driver.submit(prompt, max_tokens=max_tokens, namespace=slot.namespace, slot=slot.slot_id)
        self.driver.turn()

    @rule(index=indexes)
    def cancel(self, index: int) -> None:
        if self.driver.tickets:
            self.driver.tickets[-1 - index % len(self.driver.tickets)].cancel()

    # -- time --

    @rule(n_turns=st.integers(1, 9))
    def step(self, n_turns: int) -> None:
        for _ in range(n_turns):
            self.driver.turn()
        self.driver.clock.advance(0.25)

    @rule()
    def finish_everything(self) -> None:
        self.driver.run()
        self.check_answers()

    # -- faults --

    @precondition(lambda self: self.has_faults)
    @rule(nth=st.integers(1, 6), fault=st.sampled_from(every_fault()))
    def fail_a_group(self, nth: int, fault: GroupFault) -> None:
        self.has_failed_groups = True
        self.driver.backend.fail_group(nth, fault)

    @precondition(lambda self: self.has_faults)
    @rule(calls=st.lists(st.sampled_from([*FAILING_CALLS, "sample"])))
    def fail_some_calls(self, calls: list[str]) -> None:
        if "sample" in calls:
            self.driver.backend.fail_sampling(2)
        self.driver.backend.faults.calls = calls  # type: ignore[assignment]

    @precondition(lambda self: self.has_faults)
    @rule(
        seq_id=st.integers(0, 3), fault=st.none() | st.sampled_from(every_fault()), at=st.sampled_from([0, 3, 14, 25])
    )
    def break_or_mend_a_sequence(self, seq_id: int, fault: GroupFault | None, at: int) -> None:
        seq_id %= self.driver.traits.n_slots
        self.driver.backend.faults.culprit = None if fault is None else Culprit(seq_id, fault, at)
        self.culprits.add(seq_id)

    @precondition(lambda self: self.store is not None)
    @rule(calls=st.lists(st.sampled_from(["write", "read", "corrupt", "scan"])), lost=st.none() | indexes)
    def trouble_with_the_disk(self, calls: list[str], lost: int | None) -> None:
        assert self.store is not None
        self.store.fails = calls
        if lost is not None:
            self.store.lose(lost)

    @precondition(lambda self: self.store is not None and not self.driver.state.running)
    @rule()
    def forget_everything_but_the_disk(self) -> None:
        """As after a restart."""
        state = self.driver.state
        assert state.disk is not None
        state.disk.settle()
        for slot in state.slots:
            if not slot.is_busy:
                state.erase(slot)
        state.parking.clear()
        state.spans.clear()
        if not self.read:
            state.checkpoints.clear()

    # -- slots --

    @rule(slot_id=st.integers(0, 3), operation=st.sampled_from(["erase", "save", "copy", "restore"]), index=indexes)
    def use_slot(self, slot_id: int, operation: str, index: int) -> None:
        slot_id %= self.driver.traits.n_slots
        before = self.driver.held(slot_id)
        try:
            if operation == "erase":
                self.driver.erase(slot_id)
            elif operation == "save":
                self.saved.append(self.driver.save(slot_id))
            elif operation == "copy":
                self.driver.restore(slot_id, self.driver.save(index % self.driver.traits.n_slots))
            elif self.saved:
                self.driver.restore(slot_id, self.saved[index % len(self.saved)])
        except (SlotBusyError, CellsExhaustedError, NativeError):
            assert self.driver.held(slot_id) == before

    @precondition(lambda self: self.has_faults and self.saved)
    @rule(index=indexes)
    def begin_to_read_a_file(self, index: int) -> None:
        saved = self.saved[index % len(self.saved)]
        self.incoming.append((saved, self.driver.read(saved)))

    @precondition(lambda self: self.incoming)
    @rule(slot_id=st.integers(0, 3))
    def have_read_a_file(self, slot_id: int) -> None:
        saved, blocks = self.incoming.pop()
        slot_id %= self.driver.traits.n_slots
        before = self.driver.held(slot_id)
        try:
            self.driver.put(slot_id, saved, blocks)
        except (SlotBusyError, CellsExhaustedError, NativeError):
            assert self.driver.held(slot_id) == before

    # -- the cache --

    @precondition(lambda self: self.has_faults)
    @rule(
        max_checkpoints=st.sampled_from([0, 1, 3, 32]),
        checkpoint_bytes=st.sampled_from([10**6, 10**6, 700, 100]),
        host_bytes=st.sampled_from([10**6, 10**6, 2000]),
    )
    def change_the_budget(self, max_checkpoints: int, checkpoint_bytes: int, host_bytes: int) -> None:
        self.driver.state.checkpoints.set_budget(
            CacheBudget(max_checkpoints, min(checkpoint_bytes, host_bytes), host_bytes)
        )

    @precondition(lambda self: self.driver.state.spans.is_on and not self.driver.state.running)
    @rule(n_tokens=st.integers(1, 40))
    def store_behind(self, n_tokens: int) -> None:
        self.driver.state.spans.save_some(n_tokens)

    @precondition(lambda self: self.has_faults)
    @rule(namespace=st.sampled_from([None, *NAMESPACES]))
    def clear(self, namespace: str | None) -> None:
        before = list(self.driver.state.checkpoints.index.checkpoints)
        cleared = [node for node in before if namespace in (None, node.namespace)]
        assert self.driver.state.checkpoints.clear(namespace) == len(cleared)
        assert len(self.driver.state.checkpoints.index.checkpoints) == len(before) - len(cleared)

    @precondition(lambda self: self.has_faults)
    @rule(slot_id=st.integers(0, 3))
    def begin_to_write_a_file(self, slot_id: int) -> None:
        checkpoints = self.driver.state.checkpoints
        for node in checkpoints.held_by(self.driver.slot(slot_id % self.driver.traits.n_slots)):
            checkpoints.hold(node)
            self.driver.leases_of_tests += 1
            self.read.append((node, checkpoints.data(node).data.tobytes()))

    @precondition(lambda self: self.read)
    @rule()
    def have_written_the_files(self) -> None:
        """What was read all the while is what was there at first, whether or not it was given up."""
        checkpoints = self.driver.state.checkpoints
        for node, before in self.read:
            block = checkpoints.data(node) if checkpoints.has(node) else checkpoints._orphans[node]
            assert block.data.tobytes() == before
            checkpoints.let_go(node)
            self.driver.leases_of_tests -= 1
        self.read.clear()

    # -- the law --

    @invariant()
    def books_agree(self) -> None:
        self.driver.check()

    def check_answers(self) -> None:
        for ticket in self.driver.tickets:
            assert ticket.is_done
            if ticket.error is None:
                self.driver.check_answer(ticket)
            else:
                self.check_error(ticket, ticket.error)

    def check_error(self, ticket: Ticket, error: BaseException) -> None:
        assert isinstance(error, (NativeError, GrammarError, RequestTimeoutError, CapacityError))
        if isinstance(error, NativeError) and error.call == "llama_decode" and not self.has_failed_groups:
            assert self.driver.ran_in(ticket) in self.culprits, "a bystander failed"

    def teardown(self) -> None:
        if hasattr(self, "driver"):
            self.driver.run()
            self.check_answers()
            self.driver.check()
            self.have_written_the_files()
            while self.incoming:
                self.have_read_a_file(0)
            self.driver.backend.faults.calls = []
            if self.store is not None:
                self.store.fails = []
            self.driver.close()


@pytest.mark.timeout(900)  # seconds; a failure is shrunk before it is shown
@pytest.mark.parametrize("memory", list(Memory))
def test_every_answer_is_that_of_a_cold_run(memory: Memory) -> None:
    n_examples = settings().max_examples * (2 if memory is Memory.FULL else 1) // 2
    run_state_machine_as_test(
        type("LawMachineOfOneKind", (LawMachine,), {"memories": [memory]}),
        settings=settings(max_examples=n_examples, stateful_step_count=40, deadline=None, print_blob=True),
    )


# ---- planted faults: the law finds them ------------------------------------------------------------------------


def run_law(sequences_type: type[Sequences], memory: Memory, *, is_strict: bool = False) -> None:
    attributes = {"sequences_type": sequences_type, "memories": [memory], "is_strict": is_strict, "has_faults": False}
    run_state_machine_as_test(
        type("PlantedMachine", (LawMachine,), attributes),
        settings=settings(
            max_examples=1500,
            stateful_step_count=30,
            phases=[Phase.generate],
            derandomize=True,
            database=None,
            deadline=None,
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
        ),
    )


PLANTED = [(StaleTail, Memory.FULL), (StaleTail, Memory.SLIDING), (ShortShare, Memory.FULL)]
LATE = [(LateState, memory) for memory in (Memory.HYBRID, Memory.RECURRENT, Memory.OTHER)]


@pytest.mark.parametrize(("planted", "memory"), PLANTED)
def test_a_wrong_read_is_refused_when_it_happens(planted: type[Sequences], memory: Memory) -> None:
    with pytest.raises(AssertionError, match="cells read are not exactly"):
        run_law(planted, memory, is_strict=True)


@pytest.mark.parametrize(("planted", "memory"), [*PLANTED, *LATE])
def test_a_wrong_read_shows_in_the_answers(planted: type[Sequences], memory: Memory) -> None:
    with pytest.raises(AssertionError, match="a cold run"):
        run_law(planted, memory)


CAPTURED: list[tuple[type[Sequences], Memory]] = [(LateCapture, memory) for memory in Memory if memory.has_state]
CAPTURED += [(ForeignDonor, Memory.HYBRID), (ForeignDonor, Memory.SLIDING)]


@pytest.mark.parametrize(
    ("planted", "memory"),
    [
        pytest.param(*each, marks=[] if each == (LateCapture, Memory.HYBRID) else [pytest.mark.slow])
        for each in CAPTURED
    ],
)
def test_a_wrong_checkpoint_shows_in_the_answers(planted: type[Sequences], memory: Memory) -> None:
    with pytest.raises(AssertionError, match="a cold run"):
        run_law(planted, memory)


SEARCHED_LONG = [Memory.RECURRENT, Memory.OTHER]
"""There it takes an example in which nearly everything a slot holds is met again."""


@pytest.mark.parametrize(
    "memory",
    [pytest.param(each, marks=[pytest.mark.slow] if each in SEARCHED_LONG else []) for each in Memory],
)
def test_a_resume_position_that_is_off_by_one_is_found(memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    def one_too_far(a: Ids, b: Ids) -> int:
        return min(common_prefix_len(a, b) + 1, len(a), len(b))

    monkeypatch.setattr("pyllamacache.prefix.plan.common_prefix_len", one_too_far)
    monkeypatch.setattr("tests.fakes.driver.common_prefix_len", one_too_far)
    with pytest.raises(AssertionError, match=r"a cold run|holds other"):
        run_law(Sequences, memory)
