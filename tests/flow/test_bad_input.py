"""Every wrong thing a caller can say raises one of our errors, alone: the engine answers, other slots are untouched."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyllamacache import Engine, Model
from pyllamacache.errors import (
    ConfigError,
    ContextTooLargeError,
    GrammarError,
    InvalidRequestError,
    ModelLoadError,
    ModelUnsupportedError,
    NativeError,
    PyLlamaCacheError,
    RequestTooLongError,
    UnknownOptionError,
)
from tests.flow.law import joined, random_ids
from tests.models import TOKENS, EncoderSpec, FullSpec, write_model

KINDS = ["full", "sliding", "hybrid", "recurrent"]
HELD = random_ids(1, 60)
PROMPT = random_ids(2, 30)

NewEngine = Callable[..., Any]


@pytest.fixture
def make(new_engine: NewEngine) -> NewEngine:
    return functools.partial(new_engine, n_threads=1)


# ---- requests --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bad:
    """A request that must fail, and how."""

    error: type[PyLlamaCacheError]
    says: str
    prompt: Any = field(default_factory=lambda: PROMPT)
    options: dict[str, Any] = field(default_factory=dict)


def value(name: str, wrong: Any, says: str = "") -> Bad:
    return Bad(InvalidRequestError, says or name, options={name: wrong})


BAD_PROMPTS = {
    "no text": Bad(InvalidRequestError, "prompt: is empty", ""),
    "no ids": Bad(InvalidRequestError, "prompt: is empty", []),
    "no ids in an array": Bad(InvalidRequestError, "prompt: is empty", np.array([], dtype=np.int32)),
    "an id below zero": Bad(InvalidRequestError, "token id -1 at index 1 is outside", [5, -1]),
    "an id beyond the vocabulary": Bad(InvalidRequestError, r"320 at index 2 is outside \[0, 320\)", [5, 6, 320]),
    "an id beyond 32 bits": Bad(InvalidRequestError, "outside", [2**31]),
    "an id beyond 64 bits": Bad(InvalidRequestError, "64 bits", [2**70]),
    "unsigned ids": Bad(InvalidRequestError, "outside", np.array([2**64 - 1], dtype=np.uint64)),
    "numbers that are no ids": Bad(InvalidRequestError, "float", [1.0, 2.0]),
    "an array of numbers": Bad(InvalidRequestError, "float32", np.ones(4, dtype=np.float32)),
    "two dimensions": Bad(InvalidRequestError, "one dimension", np.ones((2, 2), dtype=np.int32)),
    "truth values": Bad(InvalidRequestError, "bool", [True, False]),
    "texts": Bad(InvalidRequestError, "str", ["a", "b"]),
    "bytes": Bad(InvalidRequestError, "bytes", b"text"),
    "nothing": Bad(InvalidRequestError, "prompt", None),
    "a set": Bad(InvalidRequestError, "prompt", {1, 2}),
    "a generator": Bad(InvalidRequestError, "prompt", (i for i in (1, 2))),
    "half a surrogate pair": Bad(InvalidRequestError, "surrogate", "a\ud83d"),
    "too long for the context": Bad(RequestTooLongError, r"1025 > n_ctx=1024", random_ids(1, 1024), {"max_tokens": 1}),
    "far too long": Bad(RequestTooLongError, "n_ctx", "word " * 50_000),
}

BAD_OPTIONS = {
    "an unknown keyword": Bad(UnknownOptionError, "did you mean temperature", options={"temprature": 1.0}),
    "an option of another library": Bad(UnknownOptionError, "no such option", options={"echo_logits_xyz": True}),
    "a negative limit": value("max_tokens", -1),
    "half a token": value("max_tokens", 1.5),
    "a limit that is a truth value": value("max_tokens", True),
    "a limit beyond 32 bits": value("max_tokens", 2**31),
    "a limit beyond the context": Bad(RequestTooLongError, "max_tokens=1000", options={"max_tokens": 1000}),
    "more least tokens than most": Bad(InvalidRequestError, "min_tokens", options={"max_tokens": 4, "min_tokens": 5}),
    "an empty stop string": value("stop", ["a", ""]),
    "a stop string that is none": value("stop", [7]),
    "stop strings as bytes": value("stop", b"a"),
    "no time": value("timeout_s", 0),
    "negative time": value("timeout_s", -1.0),
    "no number of seconds": value("timeout_s", math.nan),
    "a slot that is not there": value("slot", 3),
    "a negative slot": value("slot", -1),
    "a namespace that is no text": value("namespace", 5),
    "a flag that is none": value("store", 1),
    "another flag that is none": value("cache_prompt", "yes"),
    "logits that are no flag": value("return_logits", None),
    "special that is no flag": value("add_special", 0),
    "a negative temperature": value("temperature", -0.1),
    "an infinite temperature": value("temperature", math.inf),
    "a temperature that is no number": value("temperature", "hot"),
    "a negative top_k": value("top_k", -1),
    "top_p of nothing": value("top_p", 0.0),
    "top_p of more than all": value("top_p", 1.1),
    "min_p of more than all": value("min_p", 2.0),
    "a penalty of zero": value("repeat_penalty", 0.0),
    "a penalty that is no number": value("presence_penalty", math.nan),
    "a penalty beyond float32": value("frequency_penalty", 1e300),
    "a negative window": value("penalty_last_n", -1),
    "a seed beyond 32 bits": value("seed", 2**32),
    "a negative seed": value("seed", -1),
    "a bias for no token": value("logit_bias", {320: 1.0}),
    "a bias that is no number": value("logit_bias", {1: math.nan}),
    "a bias without end": value("logit_bias", {1: math.inf}),
    "biases in a list": value("logit_bias", [1, 2]),
    "a grammar of nothing": value("grammar", "  "),
    "a grammar with a NUL": value("grammar", 'root ::= "a\0"'),
    "a grammar that does not parse": Bad(GrammarError, "grammar", options={"grammar": "root ::= ("}),
    "a grammar that forbids everything": Bad(
        GrammarError,
        "no token is allowed",
        options={"grammar": 'root ::= "x"', "logit_bias": {TOKENS.id_of("x"): -math.inf}},
    ),
    "no token at all": Bad(
        NativeError, "no token is allowed", options={"logit_bias": dict.fromkeys(range(len(TOKENS)), -math.inf)}
    ),
    "top logprobs without logprobs": value("top_logprobs", 3),
    "too many top logprobs": Bad(InvalidRequestError, "top_logprobs", options={"logprobs": True, "top_logprobs": 21}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_bad_request_fails_alone(kind: str, make: NewEngine) -> None:
    """After each, the same request of before gets the same answer, and what slots held they hold."""
    engine = make(kind, n_slots=3)
    engine.warm(HELD, slot=0)
    expected = engine.complete(PROMPT, max_tokens=2, slot=1, cache_prompt=False).token_ids
    held = [engine.slots[index].token_ids for index in (0, 1)]
    for name, bad in (BAD_PROMPTS | BAD_OPTIONS).items():
        options = {"slot": 2, **bad.options}
        for send in (
            engine.complete,
            lambda *a, **o: engine.submit(*a, **o).result(),
            lambda *a, **o: list(engine.stream(*a, **o)),
        ):
            with pytest.raises(bad.error, match=bad.says):
                send(bad.prompt, **options)
        assert [engine.slots[index].token_ids for index in (0, 1)] == held, name
    assert engine.complete(PROMPT, max_tokens=2, slot=1, cache_prompt=False).token_ids == expected
    resumed = engine.complete(joined(held[0], [7]), max_tokens=0, slot=0)
    assert resumed.usage.cached_tokens == len(held[0])
    assert engine.statistics().n_running == engine.statistics().n_queued == 0


def test_no_message_contains_the_prompt(make: NewEngine) -> None:
    """Errors are logged and sent about: they name lengths and positions, never text."""
    engine = make()
    secret = "the password is Rumpelstiltskin " * 200
    for options in ({}, {"max_tokens": -1}, {"stop": [""]}, {"temprature": 1}):
        with pytest.raises(PyLlamaCacheError) as caught:
            engine.complete(secret, **options)
        assert "Rumpel" not in str(caught.value)


def test_a_token_that_the_grammar_forbids_is_not_sampled_however_much_it_is_wanted(make: NewEngine) -> None:
    reply = make().complete(PROMPT, max_tokens=5, grammar='root ::= "abc"', logit_bias={TOKENS.id_of("z"): 1e6})
    assert reply.text == "abc"


@pytest.mark.parametrize("text", [5, None, b"text", ["a"], "a\ud83d"])
def test_only_text_is_tokenized(text: Any, tiny_models: Callable[[str], Any]) -> None:
    with pytest.raises(InvalidRequestError, match="text"):
        tiny_models("full").tokenize(text)


def test_only_ids_of_the_vocabulary_are_detokenized(tiny_models: Callable[[str], Any]) -> None:
    for ids in ([320], [-1], [2**40], [1.5], ["a"]):
        with pytest.raises(InvalidRequestError, match="ids"):
            tiny_models("full").detokenize(ids)


# ---- engines ---------------------------------------------------------------------------------------------------

BAD_SETTINGS: list[tuple[str, Any, dict[str, Any]]] = [
    *(("n_ctx", wrong, {}) for wrong in (0, -5, 8193, 1.5, "8192", True, 2**31)),
    *(("n_slots", wrong, {}) for wrong in (0, -1, 256, 2.0, None)),
    *(("kv_tokens", wrong, {"n_ctx": 512}) for wrong in (0, 511, -1, "all", 2**31)),
    ("kv_tokens", 4096, {"exact": True}),
    *(("n_batch", wrong, {}) for wrong in (0, -1, 3, 1.5, "2048")),  # four slots need four rows
    *(("n_ubatch", wrong, {}) for wrong in (0, -1, "32", None)),
    *(("n_threads", wrong, {}) for wrong in (0, -1, 513, 1.5)),
    *(("type_k", wrong, {}) for wrong in ("f15", "", None, 1)),
    *(("type_v", wrong, {}) for wrong in ("Q8_0", 8)),
    ("type_v", "q8_0", {"flash_attention": "off"}),
    *(("flash_attention", wrong, {}) for wrong in ("yes", True, None)),
    *(("adapters", wrong, {}) for wrong in ("lora.gguf", 5, [5], ["/nowhere/lora.gguf"], [("/nowhere", 1.0)])),
    *(("exact", wrong, {}) for wrong in (1, "yes", None)),
    ("offload_kqv", 0, {}),
    *(("rope_scaling", wrong, {}) for wrong in ("cubic", 2)),
    *(("rope_freq_base", wrong, {}) for wrong in (-1.0, math.nan, math.inf, "10000")),
    *(("rope_freq_scale", wrong, {}) for wrong in (-1.0, math.nan, True)),
]


@pytest.mark.parametrize(("name", "wrong", "others"), BAD_SETTINGS, ids=lambda part: str(part)[:20])
def test_a_bad_setting_is_named(
    name: str, wrong: Any, others: dict[str, Any], tiny_models: Callable[[str], Any]
) -> None:
    with pytest.raises(ConfigError, match=name) as caught:
        Engine(tiny_models("full"), **{**others, name: wrong})
    assert caught.value.field == name
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("wrong", ["model.gguf", None, 5])
def test_an_engine_is_made_of_a_model(wrong: Any) -> None:
    with pytest.raises(ConfigError, match="model="):
        Engine(wrong)


def memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def refuses_memory() -> bool:
    overcommit = Path("/proc/sys/vm/overcommit_memory")
    return overcommit.exists() and overcommit.read_text().strip() != "1"


def test_a_file_that_is_no_adapter_is_refused(tiny_models: Callable[[str], Any], tmp_path: Path) -> None:
    path = tmp_path / "lora.gguf"
    for content in (b"", b"GGUF" + bytes(60), tiny_models("full").path.read_bytes()):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match="adapters"):
            Engine(tiny_models("full"), adapters=[path], progress=False)
    assert Engine(tiny_models("full"), n_ctx=256, n_threads=1, progress=False).complete("x", max_tokens=1).token_ids


@pytest.mark.skipif(not refuses_memory(), reason="this kernel promises memory that it does not have")
def test_more_context_than_there_is_memory_is_refused(tiny_models: Callable[..., Any]) -> None:
    """What llama.cpp cannot allocate raises, and the model goes on. A token takes 48 KiB here."""
    model = tiny_models(FullSpec(n_head=8, n_head_kv=8, head_dim=256, n_layer=3))
    n_ctx = 4 * memory_bytes() // (48 * 1024)
    with pytest.raises(ContextTooLargeError, match="lower n_ctx") as caught:
        Engine(model, n_ctx=n_ctx, n_slots=1, rope_scaling="linear", rope_freq_scale=0.5, type_k="f32", type_v="f32")
    assert isinstance(caught.value, MemoryError)
    assert caught.value.n_ctx == n_ctx
    with Engine(model, n_ctx=256, n_threads=1, progress=False) as engine:
        assert engine.complete(PROMPT, max_tokens=1).token_ids


# ---- models ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        *(("n_gpu_layers", wrong) for wrong in (1.5, "all", True, 2**31)),
        *(("main_gpu", wrong) for wrong in (None, "0")),
        *((flag, wrong) for flag in ("use_mmap", "use_mlock", "check_tensors") for wrong in (1, "yes")),
    ],
)
def test_a_bad_option_of_a_model_is_named(name: str, wrong: Any, tiny_path: Callable[[str], Path]) -> None:
    with pytest.raises(ConfigError, match=name):
        Model(tiny_path("full"), progress=False, **{name: wrong})


def test_an_encoder_is_refused(tiny_models: Callable[..., Any]) -> None:
    encoder = tiny_models(EncoderSpec())
    for use in (lambda: Engine(encoder, progress=False), lambda: encoder.memory):
        with pytest.raises(ModelUnsupportedError, match="cannot generate"):
            use()
    assert encoder.tokenize("its vocabulary can be used")


class StrangeSpec(FullSpec):
    """A sound file of an architecture that llama.cpp does not know."""

    architecture = "nosucharch"


def test_a_model_that_llama_cpp_cannot_load_is_refused_with_its_words(tmp_path: Path) -> None:
    path = tmp_path / "strange.gguf"
    write_model(StrangeSpec(), path)
    with pytest.raises(ModelLoadError, match="unknown model architecture: 'nosucharch'") as caught:
        Model(path, progress=False)
    assert "nosucharch" in caught.value.log
