"""A prefix belongs to nobody: busy slots donate, what arrives together is computed once, what is finished is kept."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pyllamacache import CacheConfig, Engine, Model
from pyllamacache.errors import NativeError
from tests.flow.hold import held, on_chunk, wait_for_chunk
from tests.flow.law import Pair, check_numbers, joined, random_ids
from tests.flow.tiers import EVERY_KIND, MODES, WITH_CELLS, always_load, audit, store_behind, stores
from tests.native.faults import damage, on_scheduler

NewPair = Callable[..., Pair]

N_UBATCH = 32
K = 4


HEADER = random_ids(1, 600)


# ---- a busy slot donates -----------------------------------------------------------------------------------------


def ask_beside(pair: Pair, first: Any, prompts: list[Any], **options: Any) -> tuple[Any, list[Any]]:
    """Send `first`, and once it generates the others, one after the other; it is running when the last one ends.

    Everything is sent from the scheduler's thread, so that it does not matter how fast this one is.
    """
    handles: list[Any] = []
    was_running: list[bool] = []

    def send_next() -> None:
        if handles and not handles[-1].done:
            return
        was_running.append(not donor.done)
        if len(handles) < len(prompts):
            handle = pair.warm.submit(prompts[len(handles)], max_tokens=2, return_logits=True)
            handles.append(handle)
            on_chunk(handle, send_next)

    with held(pair.warm):
        donor = pair.warm.submit(first, max_tokens=300, **options)
        on_chunk(donor, lambda: None if handles else send_next())
    reply = donor.result()
    assert was_running == [True] * (len(prompts) + 1), "the donor was not busy: the test shows nothing"
    replies = [handle.result() for handle in handles]
    for ids, each in zip(prompts, replies, strict=True):
        pair.check(ids, each, 2)
    assert len(reply.token_ids) == 300
    return reply, replies


@MODES
@EVERY_KIND
def test_a_second_agent_prefills_its_own_tokens_while_the_first_generates(
    kind: str, exact: bool, new_pair: NewPair
) -> None:
    """The first time memory with a state has no checkpoint where the two part: one n_ubatch more. Then it has."""
    pair = new_pair(kind, exact=exact, n_slots=4, n_batch=N_UBATCH)
    _, seconds = ask_beside(
        pair, joined(HEADER, random_ids(2, 40)), [joined(HEADER, random_ids(i, 30)) for i in (3, 4)]
    )
    grid = N_UBATCH if exact else 1
    reach = len(HEADER) // grid * grid
    if kind == "full":
        for reply in seconds:
            assert (reply.usage.cached_tokens, reply.cache.source.value) == (reach, "shared")
    elif not stores(kind, exact):
        assert [reply.cache.source.value for reply in seconds] == ["none", "slot"]
        assert seconds[0].cache.reason.value == "slot_busy"
    else:
        assert seconds[0].cache.prefilled_tokens <= 30 + K + N_UBATCH
        assert (seconds[1].usage.cached_tokens, seconds[1].cache.source.value) == (reach, "checkpoint")
    audit(pair.warm)


@WITH_CELLS
def test_with_a_boundary_the_second_agent_prefills_its_own_tokens_the_first_time(kind: str, new_pair: NewPair) -> None:
    pair = new_pair(kind)
    ids = joined(HEADER, random_ids(2, 40))
    _, (reply,) = ask_beside(pair, ids, [joined(HEADER, random_ids(3, 30))], boundaries=[len(HEADER)])
    assert (reply.cache.prefilled_tokens, reply.cache.resumed_tokens) == (30, len(HEADER))
    audit(pair.warm)


@WITH_CELLS
def test_a_donor_goes_on_as_if_nobody_had_taken_anything(kind: str, new_pair: NewPair) -> None:
    pair = new_pair(kind, n_slots=3)
    ids = joined(HEADER, random_ids(2, 40))
    alone = pair.cold.complete(ids, max_tokens=60, cache_prompt=False, store=False).token_ids
    first = pair.warm.submit(ids, max_tokens=60)
    wait_for_chunk(first)
    others = [pair.warm.submit(joined(HEADER, random_ids(3 + i, 30)), max_tokens=20) for i in range(2)]
    for other in others:
        other.cancel()
        other.result()
    assert first.result().token_ids == alone
    pair.ask(joined(ids, alone, [5]), max_tokens=2)
    audit(pair.warm)


@WITH_CELLS
def test_a_donor_that_is_cancelled_takes_nothing_with_it(kind: str, new_pair: NewPair) -> None:
    pair = new_pair(kind, n_slots=2)
    first = pair.warm.submit(joined(HEADER, random_ids(2, 40)), max_tokens=300, boundaries=[len(HEADER)], slot=0)
    wait_for_chunk(first)
    second_ids = joined(HEADER, random_ids(3, 30))
    second = pair.warm.submit(second_ids, max_tokens=40, return_logits=True)
    wait_for_chunk(second)
    first.cancel()
    first.result()
    pair.warm.slots[0].erase()
    pair.check(second_ids, second.result(), 40)
    audit(pair.warm)


# ---- together ----------------------------------------------------------------------------------------------------


@MODES
@EVERY_KIND
def test_branches_that_start_together_prefill_their_trunk_once(kind: str, exact: bool, new_pair: NewPair) -> None:
    pair = new_pair(kind, exact=exact, n_slots=4)
    prompts = [joined(HEADER, random_ids(10 + i, 40)) for i in range(4)]
    with held(pair.warm):
        handles = [pair.warm.submit(ids, max_tokens=8, return_logits=True) for ids in prompts]
    replies = [handle.result() for handle in handles]
    for ids, reply in zip(prompts, replies, strict=True):
        pair.check(ids, reply, 8)
    total = sum(reply.cache.prefilled_tokens for reply in replies)
    if not stores(kind, exact):
        assert total == 4 * 640
    else:
        off_grid = len(HEADER) % N_UBATCH if exact else 0
        assert total <= 600 + 4 * 40 + 3 * off_grid + 3 * K
        assert sum(reply.usage.cached_tokens for reply in replies) >= 3 * (600 - off_grid - K)
    audit(pair.warm)


@EVERY_KIND
def test_one_that_waits_for_a_prefix_goes_on_when_the_other_is_cancelled(kind: str, new_pair: NewPair) -> None:
    """It prefills what is left itself, from as far as the other got."""
    pair = new_pair(kind)
    prompts = [joined(HEADER, random_ids(10 + i, 40)) for i in range(2)]
    with held(pair.warm):
        first = pair.warm.submit(prompts[0], max_tokens=8)
        second = pair.warm.submit(prompts[1], max_tokens=8, return_logits=True)
        backend, calls = pair.warm._state.backend, iter(range(100))
        step = backend.step

        def counted(groups: Any) -> Any:
            if next(calls) == 1:
                first.cancel()
            return step(groups)

        backend.step = counted
    assert first.result().finish_reason == "cancelled"
    reply = second.result()
    backend.step = step
    pair.check(prompts[1], reply, 8)
    assert reply.usage.cached_tokens <= 3 * 128
    audit(pair.warm)


@EVERY_KIND
def test_requests_without_a_common_prefix_wait_for_nobody(kind: str, new_pair: NewPair) -> None:
    pair = new_pair(kind, n_slots=2)
    running: list[int] = []
    with held(pair.warm):
        handles = [pair.warm.submit(random_ids(10 + i, 300), max_tokens=8) for i in range(2)]
        on_chunk(handles[0], lambda: running.append(len(pair.warm._state.running)))
    for handle in handles:
        assert handle.result().usage.cached_tokens == 0
    assert running[0] == 2


# ---- finished ----------------------------------------------------------------------------------------------------


@MODES
@EVERY_KIND
def test_eight_agents_in_turn_on_two_slots_prefill_only_what_is_new(kind: str, exact: bool, new_pair: NewPair) -> None:
    """From the second round on: the last sampled token, 25 new ones and, on the grid, what lies off it."""
    n_states = 32 if kind != "recurrent" and not exact else 128
    pair = new_pair(kind, exact=exact, cache=CacheConfig(max_checkpoints=n_states))
    always_load(pair.warm)
    talks = [joined(HEADER[:300], random_ids(20 + i, 60)) for i in range(8)]
    spare = K + (2 * N_UBATCH + 9 if exact else 0)
    for turn in range(3):
        for i, ids in enumerate(talks):
            reply = pair.ask(ids, max_tokens=9)
            if turn and stores(kind, exact):
                assert reply.cache.prefilled_tokens <= 26 + spare, (turn, i, reply.cache)
            talks[i] = joined(ids, reply.token_ids, random_ids(100 * turn + i, 25))
    audit(pair.warm)


@WITH_CELLS
def test_a_finished_conversation_is_parked_while_cells_are_free(kind: str, new_pair: NewPair) -> None:
    """Six conversations in one slot: each of them is on the device, and none was copied."""
    pair = new_pair(kind, n_slots=1)
    talks = [random_ids(30 + i, 200) for i in range(6)]
    lengths = [200 + len(pair.ask(ids, max_tokens=5).token_ids) - 1 for ids in talks]
    assert pair.warm.statistics().kv_tokens_used == sum(lengths)
    assert pair.warm._state.spans.n_saved == 0
    for ids in talks:
        reply = pair.ask(joined(ids, [7, 8, 9]), max_tokens=2)
        assert reply.cache.prefilled_tokens <= 3 + K
        assert reply.cache.source.value in ("shared", "checkpoint", "slot")
    audit(pair.warm)


@WITH_CELLS
def test_what_grew_is_parked_once(kind: str, new_pair: NewPair) -> None:
    """A conversation that was parked and goes on leaves its earlier self nowhere."""
    pair = new_pair(kind, n_slots=1)
    ids = random_ids(31, 100)
    for turn in range(5):
        ids = joined(ids, pair.ask(ids, max_tokens=5).token_ids, random_ids(40 + turn, 20))
        pair.ask(random_ids(50 + turn, 30), max_tokens=2)
    parked = [len(each.ids()) for each in pair.warm._state.index.parked]
    assert sum(n > 50 for n in parked) == 1
    audit(pair.warm)


@WITH_CELLS
def test_tails_of_what_was_used_longest_ago_go_first(kind: str, new_pair: NewPair) -> None:
    """Four conversations of 220 tokens in 1,024 cells; the next one takes what it needs and little more."""
    pair = new_pair(kind, n_slots=1, n_ctx=512, kv_tokens=1024, cache=CacheConfig(host_bytes=0))
    talks = [random_ids(60 + i, 220) for i in range(5)]
    for ids in talks[:4]:
        pair.warm.complete(ids, max_tokens=1)
    pair.warm.complete(talks[4], max_tokens=1)
    (cut,) = [each for each in pair.warm._state.index.parked if each.position < 220]
    assert cut.ids().tolist() == talks[0][: cut.position].tolist()
    assert cut.position >= 220 - (5 * 220 - 1024) - 3 * N_UBATCH
    if kind == "full":
        assert pair.ask(joined(talks[0], [1]), max_tokens=1).usage.cached_tokens == cut.position
    audit(pair.warm)


@WITH_CELLS
def test_what_is_cut_goes_to_host_memory_first(kind: str, new_pair: NewPair) -> None:
    pair = new_pair(kind, n_slots=1, n_ctx=1024, kv_tokens=1024)
    always_load(pair.warm)
    talks = [random_ids(70 + i, 520) for i in range(4)]
    for ids in talks:
        pair.ask(ids, max_tokens=3)
    for ids in talks:
        reply = pair.ask(joined(ids, [1, 2]), max_tokens=3)
        assert reply.cache.prefilled_tokens <= 2 + K
    audit(pair.warm)


@WITH_CELLS
def test_a_running_request_takes_every_idle_cell_before_it_fails(kind: str, new_pair: NewPair) -> None:
    """Parked prefixes, those in idle slots, pinned ones of higher priority: all go for one that runs."""
    pair = new_pair(kind, n_slots=3, n_ctx=512, kv_tokens=512, cache=CacheConfig(host_bytes=0))
    for i in range(6):
        pair.warm.complete(random_ids(80 + i, 70), max_tokens=3)

    def pin() -> None:
        for each in pair.warm._state.index.parked:
            each.n_pins += 1

    pair.warm._scheduler.inbox.call(pin)
    ids = random_ids(90, 400)
    reply = pair.warm.complete(ids, max_tokens=112, return_logits=True)
    assert len(reply.token_ids) == 112
    pair.check(ids, reply, 0)
    assert sum(each.position for each in pair.warm._state.index.parked) <= 1  # the last token is not fed
    audit(pair.warm)


@WITH_CELLS
def test_running_requests_that_compete_for_cells_all_end(kind: str, new_pair: NewPair) -> None:
    """Beside a lot of idle content; whoever has to give way is prefilled again and says so."""
    pair = new_pair(kind, n_slots=4, n_ctx=256, kv_tokens=256)
    for i in range(4):
        pair.warm.complete(random_ids(80 + i, 60), max_tokens=3)
    prompts = [random_ids(100 + i, 60) for i in range(4)]
    with held(pair.warm):
        handles = [pair.warm.submit(ids, max_tokens=100, return_logits=True) for ids in prompts]
    for ids, handle in zip(prompts, handles, strict=True):
        reply = handle.result()
        assert len(reply.token_ids) == 100
        pair.check(ids, reply, 100)
    audit(pair.warm)


@EVERY_KIND
def test_one_that_has_to_fail_fails_alone(kind: str, new_pair: NewPair) -> None:
    """Its native calls fail again and again; the neighbours and what is parked are what they were."""
    pair = new_pair(kind, n_slots=2)
    kept = random_ids(110, 150)
    pair.ask(kept, max_tokens=4)
    pair.ask(random_ids(111, 90), max_tokens=4)
    backend = pair.warm._state.backend
    step, marked = backend.step, random_ids(112, 64)

    def failing(groups: Any) -> Any:
        for group in groups:
            for feed in group:
                if list(feed.tokens[:8]) == marked[:8].tolist():
                    damage(pair.warm).fail_decode(1, -3)
        return step(groups)

    on_scheduler(pair.warm, lambda: setattr(backend, "step", failing))
    with pytest.raises(NativeError):
        pair.warm.complete(marked, max_tokens=4)
    backend.step = step
    reply = pair.ask(joined(kept, [5]), max_tokens=4)
    assert reply.usage.cached_tokens >= 150 - K
    audit(pair.warm)


# ---- a real model ------------------------------------------------------------------------------------------------


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_smollm2_shares_a_header_of_two_thousand_tokens_with_a_second_agent(smollm2_path: Path) -> None:
    with (
        Model(smollm2_path, progress=False) as model,
        Engine(model, n_ctx=4096, kv_tokens=8192, n_slots=4, n_threads=2, progress=False) as engine,
    ):
        header = random_ids(1, 2000, vocabulary=model.n_vocab)
        first = engine.submit(joined(header, random_ids(2, 50)), max_tokens=400)
        wait_for_chunk(first)
        ids = joined(header, random_ids(3, 60))
        reply = engine.complete(ids, max_tokens=2)
        assert not first.done
        check_numbers(ids, reply)
        assert (reply.cache.prefilled_tokens, reply.cache.source.value) == (60, "shared")
        first.cancel()
        with held(engine):
            trunk = random_ids(9, 500, vocabulary=model.n_vocab)
            handles = [engine.submit(joined(trunk, random_ids(10 + i, 30)), max_tokens=2) for i in range(4)]
        assert sum(handle.result().cache.prefilled_tokens for handle in handles) == 500 + 4 * 30
        store_behind(engine)
        audit(engine)
