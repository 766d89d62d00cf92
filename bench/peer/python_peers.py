"""The two engines that run inside a Python process: pyllamacache and llama-cpp-python, each behind a `Worker`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from bench.peer.peer import Answer, ChatRequest, EngineFailedError, Pending, Setup
from bench.peer.worker import Event, Worker

_HERE = Path(__file__).parent


class PythonPeer:
    """A script of this folder in some interpreter."""

    def __init__(self, name: str, interpreter: Path, script: str) -> None:
        self.name = name
        self._command = (interpreter, _HERE / script)
        self._worker: Worker | None = None

    @property
    def pid(self) -> int:
        return self._running.pid

    @property
    def _running(self) -> Worker:
        assert self._worker is not None
        return self._worker

    def start(self, setup: Setup) -> None:
        self._worker = Worker(self._command, log=setup.folder / "log.txt")
        try:
            self._worker.call(
                {
                    "op": "start",
                    "model": str(setup.model),
                    "n_ctx": setup.n_ctx,
                    "n_slots": setup.n_slots,
                    "kv_tokens": setup.kv_tokens,
                    "n_threads": setup.n_threads,
                    "chat_template": str(setup.chat_template) if setup.chat_template else None,
                    "disk_dir": str(setup.folder / "cache"),
                }
            )
        except RuntimeError as error:
            self.stop()
            raise EngineFailedError(f"{self.name} did not start: {error}") from error

    def send(self, request: ChatRequest) -> Pending:
        pending = Pending()

        def note(event: Event) -> None:
            if "first" in event:
                pending.has_begun.set()
            elif "error" in event:
                pending.finish(None, EngineFailedError(f"{self.name}: {event['error']}"))
            elif "done" in event:
                pending.finish(_answer(event["done"]))

        self._running.post(
            {
                "op": "chat",
                "messages": list(request.messages),
                "tools": list(request.tools),
                "max_tokens": request.max_tokens,
                "is_endless": request.is_endless,
            },
            note,
        )
        return pending

    def keep(self) -> None:
        """Nothing: what pyllamacache keeps goes to disk by itself, and llama-cpp-python keeps nothing."""

    def stop(self) -> None:
        if self._worker is not None:
            self._worker.close()
            self._worker = None


def _answer(given: dict[str, Any]) -> Answer:
    names = [name for name in Answer.__dataclass_fields__ if name in given]
    return Answer(**{**{name: given[name] for name in names}, "token_ids": tuple(given.get("token_ids", ()))})


def pyllamacache(name: str = "pyllamacache") -> PythonPeer:
    return PythonPeer(name, Path(sys.executable), "ours_worker.py")


def llama_cpp_python(interpreter: Path, name: str = "llama-cpp-python") -> PythonPeer:
    """`interpreter`: of a virtual environment that has the package and need have nothing else."""
    return PythonPeer(name, interpreter, "llama_cpp_worker.py")
