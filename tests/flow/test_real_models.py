"""Real models: SmolLM2-135M (dense) and Gemma 3 270M (sliding window). Numbers of quantised models need exact mode."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyllamacache import CacheConfig, Engine, Model
from tests.flow.hold import wait_for_chunk
from tests.flow.law import Ids, check_numbers, joined, random_ids

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]

HEADER = (
    "You are a careful assistant that answers in one short sentence. You work in an office with many files. "
    "When a question names a file, you say which tool would open it, and you never invent one. "
) * 4


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path) -> Iterator[Model]:
    with Model(smollm2_path, progress=False) as model:
        yield model


@pytest.fixture(scope="module")
def gemma3(gemma3_path: Path) -> Iterator[Model]:
    with Model(gemma3_path, progress=False) as model:
        yield model


def engine_of(model: Model, **options: Any) -> Engine:
    defaults: dict[str, Any] = {
        "n_ctx": 1024,
        "n_slots": 2,
        "n_batch": 256,
        "n_ubatch": 32,
        "n_threads": 1,
        "progress": False,
    }
    return Engine(model, **{**defaults, **options})


def ids_of(model: Model, text: str, n_tokens: int) -> Ids:
    ids = model.tokenize(text)
    assert len(ids) >= n_tokens
    return np.array(ids[:n_tokens], dtype=np.int32)


class ExactPair:
    """An engine that reuses beside one that does not; every answer is compared bit for bit."""

    def __init__(self, warm: Engine, cold: Engine) -> None:
        self.warm = warm
        self.cold = cold

    def ask(self, ids: Ids, *, cached: int, **options: Any) -> Any:
        reply = self.warm.complete(ids, max_tokens=3, return_logits=True, **options)
        cold = self.cold.complete(ids, max_tokens=3, return_logits=True, cache_prompt=False)
        check_numbers(ids, reply)
        assert reply.usage.cached_tokens == cached
        assert reply.logits is not None
        assert cold.logits is not None
        assert np.array_equal(reply.logits, cold.logits)
        assert reply.token_ids == cold.token_ids
        return reply


@pytest.fixture
def exact_pair() -> Iterator[Callable[[Model], ExactPair]]:
    made: list[Engine] = []

    def make(model: Model) -> ExactPair:
        options: dict[str, Any] = {"exact": True, "n_ctx": 512}
        made.extend((engine_of(model, **options), engine_of(model, **{**options, "n_slots": 1})))
        return ExactPair(*made[-2:])

    yield make
    for engine in made:
        engine.close()


# ---- SmolLM2 ---------------------------------------------------------------------------------------------------


def test_a_dense_model_keeps_the_law_bit_for_bit(smollm2: Model, exact_pair: Callable[[Model], ExactPair]) -> None:
    """Append, edit, repeat, and share from a busy slot; reuse ends on the grid of n_ubatch = 32."""
    pair = exact_pair(smollm2)
    ids = ids_of(smollm2, HEADER, 80)
    more = random_ids(1, 20, vocabulary=smollm2.n_vocab)
    pair.ask(ids, cached=0, slot=0)
    pair.ask(joined(ids, more), cached=64, slot=0)
    edited = ids.copy()
    edited[50] += 1
    pair.ask(joined(edited, more), cached=32, slot=0)
    pair.ask(joined(edited, more), cached=96, slot=0)
    busy = pair.warm.submit(ids, max_tokens=300, slot=0)
    wait_for_chunk(busy)
    shared = pair.ask(joined(ids, more[::-1]), cached=64)
    assert (shared.slot_id, shared.cache.source.value) == (1, "shared")
    busy.cancel()
    assert busy.result().usage.cached_tokens == 64  # what the edit overwrote in slot 0 waits in host memory


def test_a_growing_conversation_prefills_only_what_is_new(smollm2: Model) -> None:
    with engine_of(smollm2) as engine:
        ids = ids_of(smollm2, HEADER, 120)
        for turn in range(4):
            reply = engine.complete(ids, max_tokens=12)
            check_numbers(ids, reply)
            assert reply.cache.prefilled_tokens == (120 if turn == 0 else 21)
            assert reply.text == smollm2.detokenize(reply.token_ids)
            ids = joined(ids, reply.token_ids, random_ids(turn, 20, vocabulary=smollm2.n_vocab))


def test_answers_make_sense(smollm2: Model) -> None:
    with engine_of(smollm2, n_slots=3) as engine:
        prompts = {"The capital of France is": "Paris", "2, 4, 6, 8,": "10", "The opposite of hot is": "cold"}
        handles = {engine.submit(prompt, max_tokens=8): word for prompt, word in prompts.items()}
        for handle, word in handles.items():
            assert word in handle.result().text
        chat = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
        reply = engine.complete(chat, parse_special=True, max_tokens=60)
        assert "Paris" in reply.text
        assert reply.finish_reason == "stop"
        assert reply.token_ids[-1] in smollm2.eog_ids
        assert "<|im_end|>" not in reply.text


def test_real_text_arrives_whole_and_is_steered(smollm2: Model) -> None:
    with engine_of(smollm2) as engine:
        wanted = "žluťoučký kůň 🙂"
        chunks = list(engine.stream("Write Czech:", max_tokens=64, grammar=f'root ::= "{wanted}"'))
        assert "".join(chunk.text for chunk in chunks) == wanted
        assert all("\ufffd" not in chunk.text for chunk in chunks)
        stopped = engine.complete("Count: one, two, three,", max_tokens=40, stop=[" six", "\n"])
        assert "four" in stopped.text
        assert "six" not in stopped.text
        assert stopped.finish_reason == "stop"


# ---- Gemma 3 ---------------------------------------------------------------------------------------------------

WINDOW = 512
"""Gemma 3's sliding window in tokens."""


@pytest.mark.slow
def test_a_real_sliding_model_says_what_it_can_resume(gemma3: Model) -> None:
    """Append: all of it. An edit inside the window: there. An edit far back: nothing without checkpoints, and why."""
    assert gemma3.memory == "sliding"
    with engine_of(gemma3, n_ctx=2048, n_slots=1, n_ubatch=128, cache=CacheConfig(max_checkpoints=0)) as engine:
        n = 2 * WINDOW  # so long that the cells of the first tokens have been used again
        ids = random_ids(5, n, vocabulary=50_000)
        engine.complete(ids, max_tokens=0)
        longer = joined(ids, random_ids(6, 10, vocabulary=50_000))
        reply = engine.complete(longer, max_tokens=2)
        check_numbers(longer, reply)
        assert (reply.usage.cached_tokens, reply.cache.reason.value) == (n, "hit")
        near = joined(longer[: n + 5], [7, 8, 9])
        reply = engine.complete(near, max_tokens=1)
        check_numbers(near, reply)
        assert (reply.usage.cached_tokens, reply.cache.reason.value) == (n + 5, "diverged")
        far = joined(ids[:300], [7, 8, 9])
        reply = engine.complete(far, max_tokens=1)
        check_numbers(far, reply)
        assert (reply.usage.cached_tokens, reply.cache.matched_tokens) == (0, 300)
        assert (reply.cache.reason.value, reply.cache.position) == ("no_checkpoint", 300)


@pytest.mark.slow
def test_a_real_window_is_put_back_after_it_moved_on(gemma3: Model) -> None:
    """560 tokens, then 400 others, then back: what is asked can only be answered from the window that is gone.

    Exact mode keeps the whole window and takes no checkpoints of it; the answer is one that noise cannot turn.
    """
    fact = "The secret word of the house is Paris. Remember it well. "
    head = ids_of(gemma3, fact + HEADER * 8, 560)
    question = gemma3.tokenize(" The secret word of the house is", add_special=False)
    with engine_of(gemma3, n_ctx=1280, n_slots=1, n_ubatch=128) as engine:
        engine.complete(joined(head, random_ids(5, 400, vocabulary=50_000)), max_tokens=0, boundaries=[560])
        asked = joined(head, question)
        reply = engine.complete(asked, max_tokens=6, return_logits=True)
        check_numbers(asked, reply)
        assert (reply.usage.cached_tokens, reply.cache.source.value) == (560, "checkpoint")
        cold = engine.complete(asked, max_tokens=6, return_logits=True, cache_prompt=False)
    assert "Paris" in reply.text
    assert reply.token_ids == cold.token_ids
    assert reply.logits is not None
    assert cold.logits is not None
    # quantised: a neighbour moves these by 0.5, and the right answer leads by several times that
    best, second = np.sort(cold.logits)[-1], np.sort(cold.logits)[-2]
    assert np.abs(reply.logits - cold.logits).max() < 1.0 < (best - second)


def test_a_real_sliding_model_keeps_the_law_bit_for_bit(
    gemma3: Model, exact_pair: Callable[[Model], ExactPair]
) -> None:
    pair = exact_pair(gemma3)
    ids = ids_of(gemma3, HEADER, 70)
    more = random_ids(1, 20, vocabulary=50_000)
    pair.ask(ids, cached=0, slot=0)
    neighbour = pair.warm.submit(more, max_tokens=200, slot=1)
    wait_for_chunk(neighbour)
    pair.ask(joined(ids, more), cached=64, slot=0)
    edited = ids.copy()
    edited[50] += 1
    pair.ask(joined(edited, more), cached=32, slot=0)
    neighbour.cancel()
    neighbour.result()


def test_a_real_sliding_model_answers_sensibly(gemma3: Model) -> None:
    with engine_of(gemma3) as engine:
        reply = engine.complete("The Eiffel Tower is in the city of", max_tokens=8)
        assert "Paris" in reply.text
        assert reply.text == gemma3.detokenize(reply.token_ids)
