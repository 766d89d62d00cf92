"""llama-cpp-python, as its users call it: `Llama.create_chat_completion(stream=True)`. Run by `python_peers.py`.

Runs in a virtual environment that has llama-cpp-python and nothing of this project. The library does not say how many
tokens it computed, so its `eval` is counted: up to the first token sampled, that is the prefill.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from worker import Event, Say, serve

open_: dict[str, Any] = {}


def counting(llama_class: type) -> type:
    class CountingLlama(llama_class):  # type: ignore[misc,valid-type]
        n_evaluated = 0
        n_prefilled: int | None = None

        def eval(self, tokens: Any) -> Any:
            tokens = list(tokens)
            self.n_evaluated += len(tokens)
            return super().eval(tokens)

        def sample(self, *args: Any, **options: Any) -> Any:
            if self.n_prefilled is None:
                self.n_prefilled = self.n_evaluated
            return super().sample(*args, **options)

    return CountingLlama


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
    from llama_cpp import Llama
    from llama_cpp.llama_chat_format import Jinja2ChatFormatter

    llama = counting(Llama)(
        model_path=command["model"],
        n_ctx=command["n_ctx"],
        n_threads=command["n_threads"],
        n_threads_batch=command["n_threads"],
        verbose=False,
    )
    if command["chat_template"]:
        source = Path(command["chat_template"]).read_text(encoding="utf-8")
        spelled = [llama.detokenize([token], special=True).decode() for token in (llama.token_eos(), llama.token_bos())]
        llama.chat_handler = Jinja2ChatFormatter(source, *spelled).to_chat_handler()
    open_["llama"] = llama


def chat(command: Event, say: Say) -> Event:
    llama = open_["llama"]
    llama.n_evaluated, llama.n_prefilled = 0, None
    options: dict[str, Any] = {"max_tokens": command["max_tokens"], "temperature": 0.0, "stream": True}
    if command["tools"]:
        options["tools"] = command["tools"]
    if command["is_endless"]:
        options["logit_bias"] = {llama.token_eos(): -1e9}
    text, n_chunks, first_s = "", 0, None
    start_s = time.perf_counter()
    for chunk in llama.create_chat_completion(command["messages"], **options):
        content = chunk["choices"][0]["delta"].get("content")
        if content:
            n_chunks += 1
            text += content
            if first_s is None:
                first_s = time.perf_counter() - start_s
                say({"first": first_s})
    total_s = time.perf_counter() - start_s
    n_completion = max(n_chunks, 1 if llama.n_prefilled is not None else 0)
    return {
        "text": text,
        "prompt_tokens": int(llama.n_tokens) - (llama.n_evaluated - (llama.n_prefilled or 0)),
        "prefilled_tokens": llama.n_prefilled or 0,
        "completion_tokens": n_completion,
        "ttft_s": total_s if first_s is None else first_s,
        "total_s": total_s,
        "engine_prefill_s": float("nan"),
    }


def close() -> None:
    if "llama" in open_:
        open_["llama"].close()


if __name__ == "__main__":
    serve(handle, at_end=close, threads=False)
