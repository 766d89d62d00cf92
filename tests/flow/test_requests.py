"""One request at a time: text, stop strings, ends, limits, numbers."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any

import pytest

from pyllamacache.errors import InvalidRequestError, ModelUnsupportedError, RequestTooLongError
from tests.flow.law import check_numbers, joined, random_ids
from tests.models import TOKENS, FullSpec, bytes_of

KINDS = ["full", "sliding", "hybrid", "recurrent"]
EOS = TOKENS.id_of("<|eos|>")
FOX = "the quick brown fox"

NewEngine = Callable[..., Any]


@pytest.fixture
def make(new_engine: NewEngine) -> NewEngine:
    return functools.partial(new_engine, n_threads=1)


def spelling(text: str) -> str:
    """A grammar whose only sentence is `text`."""
    return f"root ::= {json.dumps(text, ensure_ascii=False)}"


# ---- text ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_replies_are_the_same_every_time_and_spell_their_ids(kind: str, make: NewEngine) -> None:
    engine = make(kind)
    first = engine.complete(FOX, max_tokens=24)
    again = engine.complete(FOX, max_tokens=24, cache_prompt=False)
    assert again.token_ids == first.token_ids
    assert again.text == first.text == bytes_of(list(first.token_ids)).decode(errors="replace")
    assert engine.model.detokenize(first.token_ids) == first.text


@pytest.mark.parametrize("kind", KINDS)
def test_chunks_are_the_reply_one_token_at_a_time(kind: str, make: NewEngine) -> None:
    engine = make(kind)
    whole = engine.complete(FOX, max_tokens=24, logprobs=True)
    chunks = list(engine.stream(FOX, max_tokens=24, logprobs=True))
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert [token for chunk in chunks for token in chunk.token_ids] == list(whole.token_ids)
    assert [len(chunk.logprobs) for chunk in chunks] == [1] * 24
    assert [chunk.finish_reason for chunk in chunks] == [None] * 23 + ["length"]


def test_characters_split_over_tokens_arrive_whole(make: NewEngine) -> None:
    """The tiny vocabulary spells most characters byte by byte: "🙂" takes four tokens."""
    text = "žluťoučký 🙂 kůň"
    chunks = list(make().stream(FOX, max_tokens=64, grammar=spelling(text)))
    assert "".join(chunk.text for chunk in chunks) == text
    assert sum(len(chunk.token_ids) for chunk in chunks) > len(text)
    for chunk in chunks:
        assert "\ufffd" not in chunk.text
        assert len(chunk.text) <= 4
    assert chunks[-1].finish_reason == "stop"


def test_a_character_cut_off_by_max_tokens_becomes_a_replacement_character(make: NewEngine) -> None:
    reply = make().complete(FOX, max_tokens=2, grammar=spelling("🙂"))
    assert (reply.text, reply.finish_reason) == ("\ufffd", "length")


def test_control_tokens_add_no_text_and_tags_do(make: NewEngine) -> None:
    engine = make()
    for name, text in (("<|im_start|>", ""), ("<think>", "<think>")):
        reply = engine.complete(FOX, max_tokens=1, logit_bias={TOKENS.id_of(name): 1000.0})
        assert (reply.token_ids, reply.text) == ((TOKENS.id_of(name),), text)


# ---- stop strings ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sentence", "stop", "text"),
    [
        ("say END and more", "END", "say "),
        ("say END and more", ["more", "D a", "END and"], "say EN"),  # the first to be complete
        ("xxxyyy", ["y", "xyy"], "xxx"),
        ("aab aac", "aac", "aab "),
        ("přes 🙂 ano", "🙂", "přes "),
        ("přes 🙂 ano", "es 🙂 a", "př"),
        ("END", "END", ""),
        ("the end", ["\n", "nothing of this"], "the end"),
    ],
)
def test_a_reply_ends_before_the_first_stop_string(
    sentence: str, stop: str | list[str], text: str, make: NewEngine
) -> None:
    engine = make()
    options: dict[str, Any] = {"max_tokens": 64, "grammar": spelling(sentence), "stop": stop}
    reply = engine.complete(FOX, **options)
    assert (reply.text, reply.finish_reason) == (text, "stop")
    chunks = list(engine.stream(FOX, **options))
    assert "".join(chunk.text for chunk in chunks) == text
    assert tuple(token for chunk in chunks for token in chunk.token_ids) == reply.token_ids


def test_a_stop_string_at_the_very_first_token_leaves_no_text(make: NewEngine) -> None:
    engine = make()
    reply = engine.complete(FOX, max_tokens=9, grammar=spelling("xyz"), stop=["x"])
    assert (reply.text, len(reply.token_ids), reply.finish_reason) == ("", 1, "stop")
    assert engine.slots[reply.slot_id].n_tokens == reply.usage.prompt_tokens


def test_text_held_back_for_a_stop_string_that_never_comes_is_given_at_the_end(make: NewEngine) -> None:
    reply = make().complete(FOX, max_tokens=4, grammar=spelling("abcdef"), stop=["cdX", "bcdef!"])
    assert (reply.text, reply.finish_reason) == ("abcd", "length")


# ---- ends ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_an_end_token_ends_the_reply_and_is_its_last_id(kind: str, make: NewEngine) -> None:
    engine = make(kind)
    reply = engine.complete(FOX, max_tokens=9, logit_bias={EOS: 1000.0})
    assert (reply.text, reply.token_ids, reply.finish_reason) == ("", (EOS,), "stop")
    assert reply.usage.completion_tokens == 1
    assert engine.slots[reply.slot_id].n_tokens == reply.usage.prompt_tokens, "nobody needs its state"


def test_a_model_that_may_end_its_replies_does(make: NewEngine) -> None:
    engine = make(FullSpec(control_scale=1.0))
    replies = [engine.complete(random_ids(seed, 20), max_tokens=200, temperature=1.0, seed=seed) for seed in range(8)]
    ended = [reply for reply in replies if reply.finish_reason == "stop"]
    assert ended
    for reply in ended:
        assert reply.token_ids[-1] in engine.model.eog_ids
        assert not set(reply.token_ids[:-1]) & engine.model.eog_ids


def test_no_end_token_is_sampled_before_min_tokens(make: NewEngine) -> None:
    engine = make()
    reply = engine.complete(FOX, max_tokens=20, min_tokens=5, logit_bias={EOS: 1000.0})
    assert len(reply.token_ids) == 6
    assert reply.token_ids[-1] == EOS
    assert EOS not in reply.token_ids[:-1]
    assert reply.token_ids[:5] == engine.complete(FOX, max_tokens=5).token_ids


@pytest.mark.parametrize("kind", KINDS)
def test_max_tokens_of_none_and_one(kind: str, make: NewEngine) -> None:
    """A sampled token is in the slot only once the next one was computed."""
    engine = make(kind)
    ids = random_ids(1, 50)
    none = engine.complete(ids, max_tokens=0, return_logits=True)
    assert (none.text, none.token_ids, none.finish_reason) == ("", (), "length")
    assert none.logits.argmax() == engine.complete(ids, max_tokens=1, cache_prompt=False).token_ids[0]
    assert engine.slots[none.slot_id].token_ids == ids.tolist()
    (chunk,) = engine.stream(joined(ids, [1]), max_tokens=0)
    assert (chunk.text, chunk.token_ids, chunk.finish_reason) == ("", (), "length")


# ---- limits ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("exact", [False, True], ids=["default", "exact"])
def test_the_shortest_and_the_longest_prompt_there_can_be(kind: str, exact: bool, make: NewEngine) -> None:
    engine = make(kind, n_ctx=200, n_slots=2, exact=exact, **({} if exact else {"kv_tokens": 200}))
    for ids, max_tokens in ((random_ids(1, 1), 199), (random_ids(2, 190), 10), (random_ids(3, 200), 0)):
        reply = engine.complete(ids, max_tokens=max_tokens)
        check_numbers(ids, reply)
        assert (len(reply.token_ids), reply.finish_reason) == (max_tokens, "length")
    with pytest.raises(RequestTooLongError) as caught:
        engine.complete(random_ids(2, 190), max_tokens=11)
    assert (caught.value.prompt_tokens, caught.value.max_tokens, caught.value.limit_tokens) == (190, 11, 200)
    assert "201 > n_ctx=200" in str(caught.value)


def test_the_prompt_alone_may_be_too_long(make: NewEngine) -> None:
    engine = make(n_ctx=64, kv_tokens=64, n_batch=32)
    with pytest.raises(RequestTooLongError, match="65 > n_ctx=64"):
        engine.complete("x" * 65, max_tokens=0)
    assert engine.statistics().n_failed == 0, "nothing was sent"


# ---- numbers ---------------------------------------------------------------------------------------------------


def test_usage_adds_up_over_a_growing_prompt(make: NewEngine) -> None:
    engine = make()
    ids = random_ids(1, 40)
    written = 0
    for turn in range(4):
        reply = engine.complete(ids, max_tokens=6)
        check_numbers(ids, reply)
        assert reply.usage.completion_tokens == len(reply.token_ids) == 6
        assert reply.usage.total_tokens == len(ids) + 6
        written += reply.usage.cache_write_tokens
        ids = joined(ids, reply.token_ids, random_ids(9 + turn, 20))
    assert written == 40 + 3 * 21, "of a reply, all tokens but the last are there already; they were not the prompt's"
    statistics = engine.statistics()
    assert statistics.n_requests == 4
    assert statistics.cached_tokens + statistics.prefilled_tokens == statistics.prompt_tokens
    assert statistics.completion_tokens == 24


def test_times_are_in_order(make: NewEngine) -> None:
    times = make().complete(FOX, max_tokens=8).timings
    parts = (times.queue_s, times.restore_s, times.prefill_s, times.decode_s)
    assert all(part >= 0 for part in parts)
    assert times.queue_s + times.prefill_s <= times.ttft_s


# ---- a model without text --------------------------------------------------------------------------------------


def test_a_model_without_vocabulary_takes_ids_and_gives_ids(make: NewEngine) -> None:
    engine = make(FullSpec(vocabulary="none"))
    ids = random_ids(1, 30)
    reply = engine.complete(ids, max_tokens=8)
    assert (len(reply.token_ids), reply.text, reply.finish_reason) == (8, "", "length")
    longer = joined(ids, reply.token_ids, [5])
    assert engine.complete(longer, max_tokens=1).usage.cached_tokens == 37
    for options in ({"stop": "x"}, {"grammar": spelling("x")}):
        with pytest.raises(InvalidRequestError, match="no vocabulary"):
            engine.complete(ids, **options)
    with pytest.raises(ModelUnsupportedError, match="no vocabulary"):
        engine.complete("text")
    with pytest.raises(ModelUnsupportedError, match="no vocabulary"):
        engine.model.detokenize([1])
