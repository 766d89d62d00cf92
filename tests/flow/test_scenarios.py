"""Reports of real users, replayed on tiny models; the numbers S01 to S76 are those of the project's scenario list.

Every reply goes through the law's checker: the same answer as a cold run, honest numbers, a reason with a position.
Those of checkpoints are in test_checkpoint_scenarios.py; entries that need tiers or chat come with those.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pyllamacache import CacheConfig
from tests.flow.law import Pair, check_numbers, joined, random_ids

ALL_KINDS = ["full", "sliding", "hybrid", "recurrent"]
STATEFUL = ["hybrid", "recurrent"]


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_s01_an_append_only_chat_prefills_only_what_is_new(kind: str, new_pair: Callable[..., Pair]) -> None:
    pair = new_pair(kind)
    ids = random_ids(1, 100)
    reply = pair.ask(ids, max_tokens=8)
    for turn in range(5):
        new = random_ids(10 + turn, 40)
        ids = joined(ids, reply.token_ids, new)
        reply = pair.ask(ids, max_tokens=8)
        # the last sampled token was never fed, so it is prefilled with the new ones
        assert reply.cache.prefilled_tokens == 41
        assert reply.cache.reason.value == "hit"


@pytest.mark.parametrize("n", [1, 4, 5, 16, 40, 63, 64, 65])
@pytest.mark.parametrize("kind", ALL_KINDS)
def test_s02_a_short_prompt_is_never_an_error(kind: str, n: int, new_pair: Callable[..., Pair]) -> None:
    pair = new_pair(kind)
    ids = random_ids(2, n)
    pair.ask(ids, max_tokens=8)
    pair.ask(joined(ids[: max(1, n - 3)], random_ids(3, 3)), max_tokens=8)


@pytest.mark.parametrize("kind", ALL_KINDS)
@pytest.mark.parametrize("max_checkpoints", [0, 32])
def test_s11_an_identical_prompt_twice_is_answered_twice(
    kind: str, max_checkpoints: int, new_pair: Callable[..., Pair]
) -> None:
    pair = new_pair(kind, cache=CacheConfig(max_checkpoints=max_checkpoints))
    ids = random_ids(4, 500)
    first = pair.ask(ids, max_tokens=8)
    again = pair.ask(ids, max_tokens=8)
    assert again.token_ids == first.token_ids
    if kind == "full":
        assert again.cache.prefilled_tokens == 1
    elif kind == "sliding":
        assert (again.cache.prefilled_tokens, again.cache.reason.value) == (1, "hit")
    else:
        assert again.cache.prefilled_tokens == (4 if max_checkpoints else 500)
        assert again.cache.reason.value == ("other_slot" if kind == "sliding" else "no_checkpoint")
        assert again.cache.position == 499
    pair.ask(ids, max_tokens=0)


@pytest.mark.parametrize("kind", STATEFUL)
@pytest.mark.parametrize(("max_checkpoints", "cached"), [(0, 0), (32, 128)])
def test_s15_s71_a_divergence_falls_back_to_a_checkpoint_or_to_nothing_and_says_why(
    kind: str, max_checkpoints: int, cached: int, new_pair: Callable[..., Pair]
) -> None:
    """The state is only where it is; with checkpoints, that of the first n_batch is the deepest before the change."""
    pair = new_pair(kind, cache=CacheConfig(max_checkpoints=max_checkpoints))
    ids = random_ids(5, 200)
    pair.ask(ids)
    edited = ids.copy()
    edited[150] = (edited[150] + 1) % 256
    reply = pair.ask(edited, slot=0)
    assert (reply.usage.cached_tokens, reply.cache.reason.value) == (cached, "no_checkpoint")
    assert (reply.cache.position, reply.cache.matched_tokens) == (150, 150)


def test_s17_a_window_that_still_holds_everything_is_rewound(new_pair: Callable[..., Pair]) -> None:
    """Shorter than the window of 32: diverging at 15 of 20 costs what is new, as on dense memory."""
    pair = new_pair("sliding")
    ids = random_ids(6, 20)
    pair.ask(ids, max_tokens=4)
    reply = pair.ask(joined(ids[:15], random_ids(7, 5)), max_tokens=4)
    assert reply.usage.cached_tokens == 15


def test_s17_the_full_size_window_of_exact_mode_rewinds_anywhere_on_the_grid(new_pair: Callable[..., Pair]) -> None:
    pair = new_pair("sliding", exact=True)
    ids = random_ids(8, 400)
    pair.ask(ids)
    assert pair.ask(joined(ids[:100], random_ids(9, 40)), slot=0).usage.cached_tokens == 96


@pytest.mark.parametrize(("max_checkpoints", "cached"), [(0, 0), (32, 128)])
def test_a_window_whose_beginning_is_gone_is_not_resumed(
    max_checkpoints: int, cached: int, new_pair: Callable[..., Pair]
) -> None:
    """`seq_rm` answers true here, and what follows would be garbage: the rule decides, not the answer."""
    pair = new_pair("sliding", cache=CacheConfig(max_checkpoints=max_checkpoints))
    ids = random_ids(10, 600)
    pair.ask(ids)
    reply = pair.ask(joined(ids[:200], random_ids(11, 40)), slot=0)
    assert (reply.usage.cached_tokens, reply.cache.reason.value) == (cached, "no_checkpoint")
    assert reply.cache.position == 200


def test_s33_every_conversation_can_be_saved_not_only_the_last(new_engine: Callable[..., Any], tmp_path: Any) -> None:
    """A small side request that ran last does not push the main conversation out of what is saved."""
    engine = new_engine("full")
    main, side = random_ids(12, 800), random_ids(13, 60)
    engine.complete(main, max_tokens=4)
    engine.complete(side, max_tokens=4)
    for slot in engine.slots:
        slot.save(tmp_path / str(slot.id))
    engine.close()
    again = new_engine("full")
    for slot in again.slots:
        slot.restore(tmp_path / str(slot.id))
    for ids in (main, side):
        assert again.complete(joined(ids, random_ids(14, 10)), max_tokens=1).cache.prefilled_tokens <= 11


@pytest.mark.parametrize("n_slots", [1, 2])
def test_s40_a_side_request_spares_the_main_conversations_tail_where_a_slot_is_free(
    n_slots: int, new_pair: Callable[..., Pair]
) -> None:
    pair = new_pair("full", n_slots=n_slots)
    system = random_ids(15, 400)
    main = joined(system, random_ids(16, 300))
    pair.ask(main)
    side = pair.ask(joined(system, random_ids(17, 50)))
    assert side.usage.cached_tokens == 400
    back = pair.ask(joined(main, random_ids(18, 10)))
    assert back.cache.prefilled_tokens <= (11 if n_slots == 2 else 311)


def test_s45_new_requests_never_continue_a_strangers_text(new_pair: Callable[..., Pair]) -> None:
    pair = new_pair("full")
    for seed in range(6):
        pair.warm.complete(random_ids(100 + seed, 80), max_tokens=10)
    for seed in range(10):
        prompts = [random_ids(200 + 2 * seed + i, 60) for i in range(2)]
        handles = [pair.warm.submit(ids, max_tokens=6, return_logits=True) for ids in prompts]
        for ids, handle in zip(prompts, handles, strict=True):
            reply = handle.result()
            pair.check(ids, reply, 6)
            assert reply.token_ids == pair.cold_answer(ids, 6).token_ids


@pytest.mark.parametrize("kind", ["full", "hybrid"])
def test_s50_a_changing_header_costs_what_comes_after_it_and_is_named(kind: str, new_pair: Callable[..., Pair]) -> None:
    pair = new_pair(kind, n_slots=1)
    front, rest = random_ids(20, 20), random_ids(21, 900)
    pair.ask(joined(front, [1, 2, 3], rest))
    reply = pair.ask(joined(front, [4, 5, 6], rest))
    assert reply.cache.position == 20
    assert reply.usage.cached_tokens == (20 if kind == "full" else 0)
    assert reply.cache.reason.value == ("diverged" if kind == "full" else "no_checkpoint")
    third = pair.ask(joined(front, [7, 8, 9], rest))  # from the second on, the state at 20 is known
    assert (third.usage.cached_tokens, third.cache.reason.value) == (20, "diverged")


@pytest.mark.parametrize("position", [20, 480, 496])
def test_s51_a_clock_in_the_system_prompt_costs_the_rest_of_it(position: int, new_pair: Callable[..., Pair]) -> None:
    pair = new_pair("full")
    system = random_ids(22, 500)
    for clock in range(3):
        ids = system.copy()
        ids[position : position + 4] = clock
        reply = pair.ask(ids)
        if clock:
            assert (reply.usage.cached_tokens, reply.cache.reason.value) == (position, "diverged")


def test_s52_tools_in_another_order_reuse_what_is_before_the_first_difference(new_pair: Callable[..., Pair]) -> None:
    pair = new_pair("full")
    a, b, c, d = (random_ids(30 + i, 50) for i in range(4))
    tail = random_ids(34, 300)
    pair.ask(joined(a, b, c, d, tail))
    assert pair.ask(joined(a, c, b, d, tail)).usage.cached_tokens == 50


def test_s54_the_generated_ids_sent_back_are_reused_to_the_last(new_pair: Callable[..., Pair]) -> None:
    pair = new_pair("full")
    ids = random_ids(35, 120)
    reply = pair.ask(ids, max_tokens=20)
    following = pair.ask(joined(ids, reply.token_ids, [7]), max_tokens=2)
    assert following.cache.prefilled_tokens == 2


def test_s56_a_dropped_oldest_turn_is_named_at_the_right_token(new_pair: Callable[..., Pair]) -> None:
    pair = new_pair("full", n_ctx=512, kv_tokens=1024)
    system = random_ids(36, 100)
    turns = [random_ids(40 + i, 30) for i in range(14)]
    pair.ask(joined(system, *turns[:12]), max_tokens=1)
    for first in (1, 2):
        reply = pair.ask(joined(system, *turns[first : 12 + first]), max_tokens=1)
        assert (reply.usage.cached_tokens, reply.cache.reason.value, reply.cache.position) == (100, "diverged", 100)


@pytest.mark.slow
@pytest.mark.parametrize(("type_k", "type_v"), [("f16", "f16"), ("q8_0", "q8_0")])
@pytest.mark.parametrize("n_threads", [1, 2])
def test_s65_exact_mode_reproduces_the_cold_run_bit_for_bit(
    type_k: str, type_v: str, n_threads: int, new_pair: Callable[..., Pair]
) -> None:
    """Default mode is allowed noise; exact mode is not, whatever threads, cache types and split points."""
    pair = new_pair("full", exact=True, n_threads=n_threads, type_k=type_k, type_v=type_v, flash_attention="on")
    ids = random_ids(50, 300)
    for split in (1, 7, 64, 299, 300, 300):
        pair.ask(ids[:split], max_tokens=1)
        pair.ask(ids, max_tokens=3)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ALL_KINDS)
def test_s68_a_probe_answers_the_same_before_between_and_after_others(
    kind: str, new_engine: Callable[..., Any], tmp_path: Any
) -> None:
    engine = new_engine(kind, n_slots=3, flash_attention="off")
    probe = random_ids(60, 90)
    expected = engine.complete(probe, max_tokens=12).token_ids
    handles = [
        engine.submit(joined([n], random_ids(61 + n, 20 + 5 * n)), max_tokens=5, namespace=str(n % 2))
        for n in range(36)
    ]
    assert engine.complete(probe, max_tokens=12).token_ids == expected
    for handle in handles:
        handle.result()
    engine.complete(probe, max_tokens=12, slot=0)
    engine.slots[0].save(tmp_path / "slot")
    engine.slots[1].restore(tmp_path / "slot")
    assert engine.complete(probe, max_tokens=12).token_ids == expected


def test_s73_states_load_in_any_order_and_into_fragmented_cells(new_engine: Callable[..., Any], tmp_path: Any) -> None:
    engine = new_engine("full", n_slots=3, n_ctx=320, kv_tokens=640)
    small, large = random_ids(70, 50), random_ids(71, 200)
    engine.complete(small, max_tokens=0, slot=0)
    engine.slots[0].save(tmp_path / "small")
    engine.complete(large, max_tokens=0, slot=0)
    engine.slots[0].save(tmp_path / "large")
    for seed in range(12):  # leaves holes: interleaved growth and cuts in two other slots
        handles = [engine.submit(random_ids(80 + seed + 50 * i, 40 + seed), max_tokens=6, slot=i) for i in (1, 2)]
        for handle in handles:
            handle.result()
    for order in (("small", "large"), ("large", "small"), ("large", "large")):
        for name in order:
            engine.slots[0].restore(tmp_path / name)
            ids = joined(small if name == "small" else large, [3])
            reply = engine.complete(ids, max_tokens=2, slot=0)
            check_numbers(ids, reply)
            assert reply.cache.prefilled_tokens == 1


def test_s74_a_namespace_sees_nothing_of_another(new_pair: Callable[..., Pair]) -> None:
    pair = new_pair("full", n_slots=4)
    ids = random_ids(90, 200)
    pair.ask(ids, namespace="one")
    stranger = pair.ask(ids, namespace="two")
    assert (stranger.usage.cached_tokens, stranger.cache.matched_tokens, stranger.cache.reason.value) == (0, 0, "cold")
    assert pair.ask(ids, namespace="two").usage.cached_tokens == 199
    assert pair.ask(ids, namespace="one").usage.cached_tokens == 199


def test_s75_nothing_that_is_shown_contains_prompt_text(new_engine: Callable[..., Any], tmp_path: Any) -> None:
    engine = new_engine("full")
    marker = "xyzzy-plugh-marker"
    reply = engine.complete(marker * 3, max_tokens=4)
    shown = [repr(reply), repr(engine), repr(engine.slots[0]), repr(engine.statistics()), repr(engine.model)]
    path = tmp_path / "slot"
    engine.slots[0].save(path)
    assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(Exception, match="n_ctx") as caught:
        engine.complete(marker * 500, max_tokens=4)
    shown.append(str(caught.value))
    assert not any(marker in text or marker[:8] in text for text in shown)


def test_s76_text_that_spells_control_tokens_stays_text(new_engine: Callable[..., Any]) -> None:
    model = new_engine("full").model
    marker = "<|im_start|>"
    assert len(model.tokenize(marker, add_special=False)) > 1
    assert len(model.tokenize(marker, add_special=False, parse_special=True)) == 1
    assert model.detokenize(model.tokenize(marker * 3, add_special=False)) == marker * 3
