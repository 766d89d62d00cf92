"""What every engine is asked, and what it answers. Values only; the engines are in the files beside this one."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Setup:
    """The same for every engine of a run, as far as it has the notion."""

    model: Path
    n_slots: int
    n_ctx: int
    """Tokens of one sequence."""
    kv_tokens: int
    """KV cells of all sequences together."""
    n_threads: int
    folder: Path
    """The engine's own, empty at the first start; what it keeps over a restart lies there."""
    chat_template: Path | None = None
    """Instead of the model's own."""


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """Messages in OpenAI's shape. Greedy."""

    messages: Sequence[Message]
    max_tokens: int
    tools: Sequence[Any] = ()
    is_endless: bool = False
    """An end-of-generation token does not end the reply."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Seconds are the client's, from before the call: what the user of this engine waits."""

    text: str
    prompt_tokens: int
    prefilled_tokens: int
    """Counted by the engine; by llama-cpp-python, which does not count, from its calls of `eval`."""
    completion_tokens: int
    ttft_s: float
    total_s: float
    engine_prefill_s: float
    """As the engine has it, restores included; nan where it does not say."""
    token_ids: tuple[int, ...] = ()
    """Of the prompt and then of the reply, where the engine says them."""


@dataclass(slots=True)
class Pending:
    """A request on its way."""

    has_begun: threading.Event = field(default_factory=threading.Event)
    """Its first token is there."""
    done: threading.Event = field(default_factory=threading.Event)
    answer: Answer | None = None
    error: BaseException | None = None

    def finish(self, answer: Answer | None, error: BaseException | None = None) -> None:
        self.answer, self.error = answer, error
        self.done.set()
        self.has_begun.set()

    def result(self, timeout_s: float = 900.0) -> Answer:
        if not self.done.wait(timeout_s):
            raise TimeoutError(f"no answer within {timeout_s:.0f} s")
        if self.answer is None:
            raise self.error or RuntimeError("no answer")
        return self.answer


class Peer(Protocol):
    """An engine. `start`, any number of `send`, `stop`; then `start` again for a restart."""

    name: str

    @property
    def pid(self) -> int: ...

    def start(self, setup: Setup) -> None: ...

    def send(self, request: ChatRequest) -> Pending: ...

    def keep(self) -> None:
        """Write to `Setup.folder` whatever its users write explicitly before they stop it; nothing, for most."""

    def stop(self) -> None:
        """As a user would, so that it can put away what it puts away by itself. Repeatable."""


class EngineFailedError(RuntimeError):
    """The engine's process ended, or did not come up; the message has the end of its log."""
