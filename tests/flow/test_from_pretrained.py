"""`Model.from_pretrained`: from a hub on the loopback device to an answer, then again without the hub."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pyllamacache import Engine, Model
from pyllamacache.errors import ConfigError, ModelFormatError, ModelNotFoundError
from tests.fakes.hub import REPO, FakeHub
from tests.models import TinySpec


def test_a_model_of_a_repository_answers_online_and_offline(
    tiny_path: Callable[[TinySpec | str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    content = tiny_path("full").read_bytes()
    hub = FakeHub({"tiny-F32.gguf": content, "tiny-cut-F32.gguf": content[:-1000], "tiny-Q8_0.gguf": b"GGUF"})
    replies = []
    try:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)

        def load(filename: str) -> Model:
            return Model.from_pretrained(REPO, filename, cache_dir=tmp_path, token=False, progress=False)

        for is_online in (True, False):
            if not is_online:
                hub.close()
                monkeypatch.setenv("HF_HUB_OFFLINE", "1")
            with load("tiny-F*.gguf") as model, Engine(model, n_ctx=256, n_slots=1, n_threads=1) as engine:
                assert model.path.name == "tiny-F32.gguf"
                replies.append(engine.complete("hello", max_tokens=4).token_ids)
            if is_online:
                with pytest.raises(ModelFormatError):
                    load("*cut*")
                with pytest.raises(ConfigError, match=r"it fits tiny-F32\.gguf, tiny-Q8_0\.gguf, tiny-cut-F32\.gguf"):
                    load("*")
            else:
                with pytest.raises(ModelNotFoundError, match="this process is offline"):
                    load("tiny-Q8_0.gguf")
    finally:
        hub.close()
    assert replies[0] == replies[1]
