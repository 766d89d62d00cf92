"""How tokens are chosen: every option against an oracle computed from the logits, or against what it promises."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from pyllamacache.errors import GrammarError, NativeError
from tests.flow.hold import held
from tests.flow.law import joined, random_ids
from tests.models import TOKENS

EOS = TOKENS.id_of("<|eos|>")
FOX = "the quick brown fox"
PROMPT = random_ids(11, 40)

NewEngine = Callable[..., Any]
Floats = npt.NDArray[np.float64]


@pytest.fixture
def make(new_engine: NewEngine) -> NewEngine:
    return functools.partial(new_engine, n_threads=1)


def log_softmax(logits: npt.NDArray[np.float32]) -> Floats:
    shifted = logits.astype(np.float64) - float(logits.max())
    normal: Floats = shifted - np.log(np.exp(shifted).sum())
    return normal


# ---- drawing ---------------------------------------------------------------------------------------------------


def test_a_seed_makes_a_draw_repeatable_and_another_seed_another_draw(make: NewEngine) -> None:
    engine = make()
    options: dict[str, Any] = {"max_tokens": 24, "temperature": 1.0, "top_p": 0.95, "min_p": 0.01}
    drawn = [engine.complete(FOX, seed=seed, **options).token_ids for seed in (1, 1, 2, 3, None, None)]
    assert drawn[0] == drawn[1]
    assert len(set(drawn)) == 5


def test_the_best_token_alone_is_greedy_at_any_temperature(make: NewEngine) -> None:
    engine = make()
    greedy = engine.complete(FOX, max_tokens=16).token_ids
    for options in ({"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}):
        assert engine.complete(FOX, max_tokens=16, temperature=5.0, seed=3, **options).token_ids == greedy
    assert engine.complete(FOX, max_tokens=16, temperature=1e-3, seed=3).token_ids == greedy


def test_draws_follow_the_distribution(make: NewEngine) -> None:
    """400 draws of one token: each frequency within five standard deviations, top_k tokens only."""
    engine = make(n_slots=8)
    logits = engine.complete(PROMPT, max_tokens=0, return_logits=True).logits
    best = np.argsort(-logits)[:4]
    weights = np.exp(log_softmax(logits)[best] / 2.0)
    weights /= weights.sum()
    options: dict[str, Any] = {"max_tokens": 1, "temperature": 2.0, "top_k": 4}
    n = 400
    handles = [engine.submit(PROMPT, seed=seed, **options) for seed in range(n)]
    drawn = [handle.result().token_ids[0] for handle in handles]
    for token, weight in zip(best.tolist(), weights.tolist(), strict=True):
        assert abs(drawn.count(token) / n - weight) < 5 * math.sqrt(weight * (1 - weight) / n)
    assert set(drawn) <= set(best.tolist())


# ---- bias and penalties ----------------------------------------------------------------------------------------


def test_bias_forbids_and_forces(make: NewEngine) -> None:
    engine = make()
    plain = engine.complete(PROMPT, max_tokens=12).token_ids
    forbidden = engine.complete(PROMPT, max_tokens=12, logit_bias={plain[0]: -math.inf}).token_ids
    assert plain[0] not in forbidden
    forced = engine.complete(PROMPT, max_tokens=12, logit_bias={65: 1000.0})
    assert (forced.token_ids, forced.text) == ((65,) * 12, "A" * 12)


def penalised(
    logits: npt.NDArray[np.float32], recent: list[int], repeat: float, presence: float, frequency: float
) -> int:
    """The best token after llama.cpp's penalties."""
    scores = logits.astype(np.float64)
    for token in set(recent):
        scores[token] = scores[token] * repeat if scores[token] <= 0 else scores[token] / repeat
        scores[token] -= recent.count(token) * frequency + presence
    return int(scores.argmax())


@pytest.mark.parametrize(
    ("repeat", "presence", "frequency"),
    [(3.0, 0.0, 0.0), (1.0, 4.0, 0.0), (1.0, 0.0, 2.0), (1.3, 1.0, 0.5), (0.5, -1.0, -0.5)],
)
@pytest.mark.parametrize("last_n", [0, 1, 4, 64, 1000])
def test_penalties_look_at_the_end_of_the_prompt(
    repeat: float, presence: float, frequency: float, last_n: int, make: NewEngine
) -> None:
    """The prompt ends with its own most probable continuations, the best one three times."""
    engine = make()
    first = engine.complete(PROMPT, max_tokens=0, return_logits=True)
    best = np.argsort(-first.logits)
    ids = joined(PROMPT, [best[2]], random_ids(3, 6), [best[1]], [best[0]] * 3)
    logits = engine.complete(ids, max_tokens=0, return_logits=True, cache_prompt=False).logits
    # make them the best three again, close together, so that every penalty decides
    bias = {int(token): float(logits.max() - logits[token] + 1.0 - rank / 4) for rank, token in enumerate(best[:3])}
    for token, value in bias.items():
        logits[token] += value
    expected = penalised(logits, ids[len(ids) - min(last_n, len(ids)) :].tolist(), repeat, presence, frequency)
    assert (expected == best[0]) == (last_n == 0 or repeat < 1), "the penalty decides nothing"
    reply = engine.complete(
        ids,
        max_tokens=1,
        logit_bias=bias,
        repeat_penalty=repeat,
        presence_penalty=presence,
        frequency_penalty=frequency,
        penalty_last_n=last_n,
    )
    assert reply.token_ids == (expected,)


def test_penalties_look_at_the_reply(make: NewEngine) -> None:
    """A favoured token comes again and again; a penalty on what was said ends that."""
    engine = make()
    bias = {65: 100.0, 66: 92.0}
    assert engine.complete(PROMPT, max_tokens=6, logit_bias=bias).token_ids == (65,) * 6
    varied = engine.complete(PROMPT, max_tokens=6, logit_bias=bias, frequency_penalty=16.0).token_ids
    assert {varied.count(65), varied.count(66)} == {3}


# ---- grammar ---------------------------------------------------------------------------------------------------

RECORD = r"""
root   ::= "{\"name\": " string ", \"tags\": [" string ("," " " string){0,2} "], \"count\": " number "}"
string ::= "\"" [a-zžě🙂]{1,6} "\""
number ::= [1-9] [0-9]{0,3}
"""


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_a_reply_conforms_to_its_grammar(temperature: float, make: NewEngine) -> None:
    engine = make()
    for seed in range(4):
        reply = engine.complete(
            random_ids(seed, 20), max_tokens=200, grammar=RECORD, temperature=temperature, seed=seed
        )
        record = json.loads(reply.text)
        assert reply.finish_reason == "stop"
        assert set(record) == {"name", "tags", "count"}
        assert 1 <= len(record["tags"]) <= 3


def test_a_grammar_keeps_its_place_while_neighbours_have_theirs(make: NewEngine) -> None:
    engine = make(n_slots=3)
    with held(engine):
        handles = [engine.submit(random_ids(seed, 30), max_tokens=99, grammar=RECORD, slot=seed) for seed in range(3)]
    for seed, handle in enumerate(handles):
        alone = engine.complete(random_ids(seed, 30), max_tokens=99, grammar=RECORD, cache_prompt=False)
        assert handle.result().text == alone.text


@pytest.mark.parametrize(
    ("grammar", "says"),
    [
        ("root ::= (", "expecting"),
        ("no root here", "expecting ::="),
        ('start ::= "x"', "root"),
        ("root ::= missing", "missing"),
        ("root ::= root", "left recursion"),
        ('root ::= "a', "unexpected end"),
        ('root ::= "a"{5,2}', "at least 5 repetitions, but at most 2"),
        ('root ::= "a"{100000}', "repetitions"),
        ("root ::= <nosuch>", "invalid token"),
    ],
)
def test_a_grammar_that_does_not_parse_fails_its_request_alone(
    grammar: str, says: str, make: NewEngine, capfd: pytest.CaptureFixture[str]
) -> None:
    """With the parser's reason in the error, and not on standard error."""
    engine = make()
    kept = engine.complete(FOX, max_tokens=4)
    with pytest.raises(GrammarError, match=says):
        engine.complete(FOX, grammar=grammar)
    assert engine.statistics().n_failed == 1
    assert engine.complete(FOX, max_tokens=4).token_ids == kept.token_ids
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    "grammar",
    [
        "root ::= " + "(" * 50_000 + '"a"' + ")" * 50_000,
        "root ::= r0\n" + "\n".join(f"r{i} ::= r{i + 1}" for i in range(50_000)) + '\nr50000 ::= "a"',
        'root ::= "' + "a" * 50_000 + '"',
    ],
    ids=["brackets", "rules", "letters"],
)
def test_a_grammar_of_any_depth_is_read(grammar: str, make: NewEngine) -> None:
    """The parser recurses once per bracket: 100,000 of them overflowed the stack and ended the process."""
    assert make().complete(FOX, max_tokens=1, grammar=grammar).text == "a"


def test_a_grammar_that_forbids_every_token_fails_its_request_alone(make: NewEngine) -> None:
    """Where the grammar wants an "x", logit_bias forbids every token that begins with one."""
    engine = make(n_slots=3)
    expected = engine.complete(FOX, max_tokens=30).token_ids
    bias = {TOKENS.id_of("x"): -math.inf}
    with held(engine):
        bystander = engine.submit(FOX, max_tokens=30, slot=1)
        doomed = engine.submit(PROMPT, max_tokens=9, slot=2, grammar='root ::= "ax"', logit_bias=bias)
    with pytest.raises(GrammarError, match="no token is allowed"):
        doomed.result()
    assert bystander.result().token_ids == expected
    assert engine.slots[2].token_ids == [*PROMPT.tolist(), TOKENS.id_of("a")], "what was computed stays"
    assert engine.complete(joined(PROMPT, [5]), max_tokens=1, slot=2).usage.cached_tokens == 40


def test_forbidding_every_token_without_a_grammar_fails_the_request_alone(make: NewEngine) -> None:
    engine = make()
    with pytest.raises(NativeError, match="no token is allowed"):
        engine.complete(FOX, logit_bias=dict.fromkeys(range(len(TOKENS)), -math.inf))
    assert len(engine.complete(FOX, max_tokens=4).token_ids) == 4


def test_a_grammar_may_not_end_before_min_tokens(make: NewEngine) -> None:
    engine = make()
    with pytest.raises(GrammarError, match="no token is allowed"):
        engine.complete(FOX, max_tokens=9, min_tokens=5, grammar='root ::= "ab"')
    reply = engine.complete(FOX, max_tokens=9, min_tokens=5, grammar='root ::= "a"+')
    assert set(reply.text) == {"a"}
    assert len(reply.token_ids) >= 5


# ---- logits ----------------------------------------------------------------------------------------------------


def test_logprobs_are_those_of_the_model_itself(make: NewEngine) -> None:
    engine = make()
    reply = engine.complete(PROMPT, max_tokens=6, logprobs=True, top_logprobs=5, return_logits=True)
    exact = log_softmax(reply.logits)
    first = reply.logprobs[0]
    assert first.logprob == pytest.approx(exact[first.token_id], abs=1e-5)
    assert [token for token, _ in first.top] == np.argsort(-exact, kind="stable")[:5].tolist()
    for sampled, token in zip(reply.logprobs, reply.token_ids, strict=True):
        values = [value for _, value in sampled.top]
        assert sampled.token_id == token == sampled.top[0][0]
        assert values == sorted(values, reverse=True)
        assert sum(map(math.exp, values)) <= 1 + 1e-6
    # samplers change what is drawn, not what is reported
    steered = engine.complete(PROMPT, max_tokens=1, logprobs=True, logit_bias={65: 1000.0}, temperature=1.0)
    assert steered.logprobs[0].token_id == 65
    assert steered.logprobs[0].logprob == pytest.approx(exact[65], abs=1e-3)
    assert steered.logprobs[0].top == ()
    assert engine.complete(PROMPT, max_tokens=1).logprobs is None


def test_logits_are_the_callers_own_copy(make: NewEngine) -> None:
    engine = make()
    one = engine.complete(PROMPT, max_tokens=3, return_logits=True)
    assert (one.logits.shape, one.logits.dtype) == ((engine.model.n_vocab,), np.float32)
    assert one.logits.argmax() == one.token_ids[0]
    kept = one.logits.copy()
    other = engine.complete(PROMPT, max_tokens=3, return_logits=True)
    other.logits[:] = 0
    assert np.array_equal(one.logits, kept)
    assert engine.complete(PROMPT, max_tokens=1).logits is None
