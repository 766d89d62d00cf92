"""Replies that come back as text: their tokens are kept, and the result says so."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyllamacache import Engine, Model
from pyllamacache.errors import InvalidRequestError
from tests.flow.law import Pair, check_numbers
from tests.models import TOKENS

KINDS = ["full", "sliding", "hybrid", "recurrent"]
IM_END, EOS = TOKENS.id_of("<|im_end|>"), TOKENS.id_of("<|eos|>")
HEAD = "<|im_start|>user\nWhat did the fox do? 🙂<|im_end|>\n<|im_start|>assistant\n"
NEXT = "<|im_end|>\n<|im_start|>user\nAnd then?<|im_end|>\n<|im_start|>assistant\n"
SAID = "It ran in the other direction.\n\nThen it is on the hill"

NewEngine = Callable[..., Any]


def say(engine: Any, prompt: str, text: str = SAID, **options: Any) -> Any:
    """Have the model answer with `text`, in single bytes."""
    merged = {token: -math.inf for token in range(256, len(TOKENS)) if token != EOS}
    grammar = f"root ::= {json.dumps(text, ensure_ascii=False)}"
    options = {"parse_special": True, **options}
    reply = engine.complete(prompt, max_tokens=len(text.encode()) + 1, grammar=grammar, logit_bias=merged, **options)
    assert reply.text == text
    assert list(reply.token_ids) == [*text.encode(), EOS]
    return reply


def next_prompt(reply: Any) -> str:
    return str(HEAD + reply.text + NEXT)


def new_tokens(engine: Any) -> int:
    """What the next turn adds: it was sampled as nothing."""
    return len(engine.model.tokenize(NEXT, add_special=False, parse_special=True))


# ---- what it does ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_reply_sent_back_as_text_costs_what_is_new(kind: str, new_pair: Callable[..., Pair]) -> None:
    """S54. Logits are those of a cold run of the same ids, and the next turns say the same."""
    pair = new_pair(kind)
    engine = pair.warm
    reply = say(engine, HEAD)
    n_head = len(engine.model.tokenize(HEAD, parse_special=True))
    assert (reply.usage.prompt_tokens, reply.cache.retokenized_at, reply.cache.note) == (n_head, None, "")
    prompt = next_prompt(reply)
    for turn in range(3):
        again = engine.complete(prompt, parse_special=True, max_tokens=0 if turn else 3, return_logits=True)
        ids = again.prompt_token_ids
        pair.check(ids, again, 0)
        plain = engine.model.tokenize(prompt, parse_special=True)
        differs_at = int(np.flatnonzero(ids[: n_head + 9] != plain[: n_head + 9])[0])
        assert again.cache.retokenized_at == differs_at
        assert again.cache.note == "same text, other tokens"
        assert engine.model.detokenize(ids.tolist()) == engine.model.detokenize(plain)
        assert not turn or again.cache.prefilled_tokens <= 4
        if not turn:
            assert again.cache.prefilled_tokens == new_tokens(engine)
            assert ids[n_head : -new_tokens(engine)].tolist() == list(SAID.encode())


def test_without_it_the_reply_is_prefilled_again(new_engine: NewEngine) -> None:
    engine = new_engine("full")
    reply = say(engine, HEAD)
    plain = engine.model.tokenize(next_prompt(reply), parse_special=True)
    again = engine.complete(next_prompt(reply), parse_special=True, match_text=False, max_tokens=1)
    assert again.prompt_token_ids.tolist() == plain
    assert (again.cache.retokenized_at, again.cache.note) == (None, "")
    assert again.cache.prefilled_tokens > new_tokens(engine) + 20


def test_text_after_a_reply_keeps_all_of_it_without_a_template(new_engine: NewEngine) -> None:
    engine = new_engine("hybrid")
    reply = say(engine, "the fox: ", parse_special=False)
    again = engine.complete("the fox: " + reply.text + " and then", max_tokens=1)
    n_prompt = reply.usage.prompt_tokens
    assert again.prompt_token_ids[n_prompt : n_prompt + len(SAID)].tolist() == list(SAID.encode())
    assert again.cache.prefilled_tokens == again.usage.prompt_tokens - n_prompt - len(SAID)


def test_a_warm_up_uses_it_and_marks_find_their_place(new_engine: NewEngine) -> None:
    engine = new_engine("hybrid", n_slots=1)
    reply = say(engine, HEAD)
    prompt = next_prompt(reply)
    usage = engine.warm(prompt, parse_special=True, boundaries=["<|im_start|>user"])
    assert usage.cached_tokens == reply.usage.prompt_tokens + len(SAID)
    n_before = usage.cached_tokens + 2  # the end of the reply's turn
    assert n_before in engine.slots[0].checkpoints


def test_a_character_cut_off_comes_back_as_another_text(new_engine: NewEngine) -> None:
    engine = new_engine("full")
    grammar = {"grammar": 'root ::= "no 🙂"', "parse_special": True}
    reply = engine.complete(HEAD, max_tokens=5, logit_bias={}, **grammar)
    assert reply.text == "no \ufffd"
    for end in (reply.text, "no 🙂"):
        again = engine.complete(HEAD + end + NEXT, parse_special=True, max_tokens=1)
        check_numbers(again.prompt_token_ids, again)
        plain = engine.model.tokenize(HEAD + end + NEXT, parse_special=True)
        assert again.prompt_token_ids.tolist() == plain
        assert again.cache.retokenized_at is None


# ---- what it leaves alone --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_text_that_spells_a_control_token_stays_text(kind: str, new_engine: NewEngine) -> None:
    """S76: the template's own marker 100 times and an end of text, from a user; a template has them there."""
    engine = new_engine(kind, n_ctx=2048)
    text = HEAD + "<|im_start|>user\n" * 100 + "<|eos|>"
    engine.complete(HEAD + "<|im_start|>user\n" * 10, parse_special=True, max_tokens=2)
    for _ in range(2):
        reply = engine.complete(text, max_tokens=2)
        ids = reply.prompt_token_ids.tolist()
        assert ids == engine.model.tokenize(text)
        assert not {IM_END, EOS, TOKENS.id_of("<|im_start|>")}.intersection(ids)
        assert reply.cache.retokenized_at is None


def test_nothing_crosses_from_one_namespace_into_another(new_engine: NewEngine) -> None:
    engine = new_engine("full")
    reply = say(engine, HEAD, namespace="one")
    other = engine.complete(next_prompt(reply), parse_special=True, max_tokens=1, namespace="two")
    assert (other.cache.retokenized_at, other.usage.cached_tokens) == (None, 0)
    assert other.prompt_token_ids.tolist() == engine.model.tokenize(next_prompt(reply), parse_special=True)
    same = engine.complete(next_prompt(reply), parse_special=True, max_tokens=1, namespace="one")
    assert same.cache.prefilled_tokens == new_tokens(engine)


@pytest.mark.parametrize("options", [{"store": False}, {"namespace": "gone"}])
def test_what_is_not_stored_or_was_cleared_is_not_used(options: dict[str, Any], new_engine: NewEngine) -> None:
    engine = new_engine("full")
    reply = say(engine, HEAD, **options)
    state = engine._state
    engine._scheduler.inbox.call(lambda: state.transcripts.clear(options.get("namespace", "")))
    again = engine.complete(next_prompt(reply), parse_special=True, max_tokens=1)
    assert again.cache.retokenized_at is None


def test_a_prompt_that_reuses_nothing_is_plain(new_engine: NewEngine) -> None:
    engine = new_engine("full")
    reply = say(engine, HEAD)
    again = engine.complete(next_prompt(reply), parse_special=True, max_tokens=1, cache_prompt=False)
    assert again.prompt_token_ids.tolist() == engine.model.tokenize(next_prompt(reply), parse_special=True)


def test_exact_mode_takes_text_as_it_is(new_engine: NewEngine) -> None:
    engine = new_engine("full", exact=True)
    reply = say(engine, HEAD)
    again = engine.complete(next_prompt(reply), parse_special=True, max_tokens=1)
    assert again.prompt_token_ids.tolist() == engine.model.tokenize(next_prompt(reply), parse_special=True)
    assert again.cache.retokenized_at is None
    assert len(engine._state.transcripts) == 0


def test_prompts_of_ids_are_used_as_they_are(new_engine: NewEngine) -> None:
    engine = new_engine("full")
    reply = engine.complete([104, 101, 116], max_tokens=2)
    assert reply.prompt_token_ids.tolist() == [104, 101, 116]
    assert reply.prompt_token_ids.dtype == np.int32
    assert not reply.prompt_token_ids.flags.writeable
    assert len(engine._state.transcripts) == 0


def test_the_option_is_a_flag(new_engine: NewEngine) -> None:
    engine = new_engine("full")
    for call in (engine.complete, engine.warm):
        with pytest.raises(InvalidRequestError, match="match_text"):
            call("x", match_text=1)


# ---- a real vocabulary -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path) -> Iterator[Model]:
    with Model(smollm2_path, progress=False) as model:
        yield model


@pytest.mark.real
@pytest.mark.parametrize("text", [" Paris is nice.\n\nYes", "žluťoučký kůň 🙂.\n\nAno", "x = [1, 2]\n\n    return x"])
def test_a_real_reply_in_other_tokens_costs_what_is_new(text: str, smollm2: Model) -> None:
    """S54 on SmolLM2: what its tokenizer would take, the sampler must not."""
    plain = smollm2.tokenize(text, add_special=False)
    longer = {token: -math.inf for token in plain if len(smollm2.detokenize([token])) > 1}
    grammar = f"root ::= {json.dumps(text, ensure_ascii=False)}"
    with Engine(smollm2, n_ctx=1024, n_slots=2, n_threads=1, progress=False) as engine:
        reply = engine.complete(HEAD, parse_special=True, max_tokens=64, grammar=grammar, logit_bias=longer)
        assert reply.text == text
        assert list(reply.token_ids[: len(plain)]) != plain
        prompt = HEAD + text + NEXT
        other = engine.complete(prompt, parse_special=True, max_tokens=1, match_text=False, store=False)
        assert other.cache.prefilled_tokens > len(plain)
        again = engine.complete(prompt, parse_special=True, max_tokens=1)
        assert again.cache.prefilled_tokens == len(smollm2.tokenize(NEXT, parse_special=True))
        assert again.cache.retokenized_at == next(
            at
            for at, pair in enumerate(zip(again.prompt_token_ids, other.prompt_token_ids, strict=False))
            if pair[0] != pair[1]
        )
        assert smollm2.detokenize(again.prompt_token_ids.tolist(), special=True) == prompt
