"""Recorded agent conversations through `chat`, on a real model: what a prefix cache can reuse is reused."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.flow.chat import FOLDER, TEMPLATE, Replay, TimedEngine, tau_bench
from pyllamacache import Model
from tests.flow.chats import template_source

pytestmark = [pytest.mark.slow, pytest.mark.real, pytest.mark.timeout(900)]


@pytest.mark.skipif(not FOLDER.is_dir(), reason=f"no traces in {FOLDER}")
def test_hit_rate_is_the_ideal(smollm2_path: Path) -> None:
    replay = Replay()
    with (
        Model(smollm2_path, progress=False) as model,
        TimedEngine(model, n_ctx=8192, progress=False, chat_template=template_source(TEMPLATE)) as engine,
    ):
        replay.run(engine, tau_bench(3))
    assert len(replay.sent) > 20
    for sent in replay.sent:
        usage, cache = sent.completion.usage, sent.completion.cache
        assert usage.cached_tokens + cache.prefilled_tokens == usage.prompt_tokens == len(sent.ids), sent
    assert abs(replay.ideal_percent - replay.hit_percent) <= 1
