"""Recorded agent conversations through `chat`, on a real model: what a prefix cache can reuse is reused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench.flow.chat import FOLDER, TEMPLATE, Replay, TimedEngine, context_for, tau_bench
from pyllamacache import Model
from tests.flow.chats import template_source

pytestmark = [pytest.mark.slow, pytest.mark.real, pytest.mark.timeout(1800)]


@pytest.mark.skipif(not FOLDER.is_dir(), reason=f"no traces in {FOLDER}")
def test_hit_rate_is_the_ideal(smollm2_path: Path) -> None:
    replay, recording = Replay(), tau_bench(3)
    with Model(smollm2_path, progress=False) as model:
        options: dict[str, Any] = {"chat_template": template_source(TEMPLATE)}
        options |= context_for(model, options, recording)
        with TimedEngine(model, progress=False, **options) as engine:
            replay.run(engine, recording)
    assert len(replay.sent) > 20
    for sent in replay.sent:
        usage, cache = sent.completion.usage, sent.completion.cache
        assert usage.cached_tokens + cache.prefilled_tokens == usage.prompt_tokens == len(sent.ids), sent
    assert abs(replay.ideal_percent - replay.hit_percent) <= 1
