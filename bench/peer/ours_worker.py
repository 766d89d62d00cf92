"""pyllamacache, as its users call it: `Engine.chat(stream=True)` in the same process. Run by `ours.py`."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from worker import Event, Say, serve

from pyllamacache import CacheConfig, Engine, Model

open_: dict[str, Any] = {}


def handle(command: Event, say: Say) -> Any:
    match command["op"]:
        case "start":
            start(command)
            return None
        case "chat":
            return chat(command, say)
        case other:
            raise ValueError(other)


def start(command: Event) -> None:
    template = command["chat_template"]
    disk_dir = command["disk_dir"]
    model = Model(command["model"], progress=False)
    open_["model"] = model
    open_["engine"] = Engine(
        model,
        n_ctx=command["n_ctx"],
        n_slots=command["n_slots"],
        kv_tokens=command["kv_tokens"],
        n_threads=command["n_threads"],
        chat_template=Path(template).read_text(encoding="utf-8") if template else None,
        cache=CacheConfig(disk_dir=disk_dir) if disk_dir else None,
        progress=False,
    )


def chat(command: Event, say: Say) -> Event:
    engine: Engine = open_["engine"]
    options: dict[str, Any] = {"max_tokens": command["max_tokens"], "tools": command["tools"] or None}
    if command["is_endless"]:
        options["logit_bias"] = {token: float("-inf") for token in open_["model"].eog_ids}
    text = ""
    first_s = answer = None
    start_s = time.perf_counter()
    for chunk in engine.chat(command["messages"], stream=True, **options):
        for choice in chunk.choices:
            delta = choice.delta
            if first_s is None and (delta.content or delta.reasoning_content or delta.tool_calls):
                first_s = time.perf_counter() - start_s
                say({"first": first_s})
            text += delta.content or ""
        answer = chunk.completion or answer
    total_s = time.perf_counter() - start_s
    assert answer is not None
    completion = answer.completion
    return {
        "text": text,
        "prompt_tokens": completion.usage.prompt_tokens,
        "prefilled_tokens": completion.cache.prefilled_tokens,
        "completion_tokens": completion.usage.completion_tokens,
        "ttft_s": total_s if first_s is None else first_s,
        "total_s": total_s,
        "engine_prefill_s": completion.timings.prefill_s + completion.timings.restore_s,
        "token_ids": [*map(int, completion.prompt_token_ids), *map(int, completion.token_ids)],
        "source": str(completion.cache.source),
        "reason": str(completion.cache.reason),
    }


def close() -> None:
    for name in ("engine", "model"):
        if name in open_:
            open_[name].close()


if __name__ == "__main__":
    serve(handle, at_end=close, threads=True)
