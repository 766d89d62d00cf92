"""llama-server, as its users call it: POST /v1/chat/completions with `stream`, over loopback."""

from __future__ import annotations

import http.client
import json
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from bench.peer.peer import Answer, ChatRequest, EngineFailedError, Pending, Setup

_HOST = "127.0.0.1"
_START_LIMIT_S = 120.0
_SAVED = "kept.bin"


class LlamaServer:
    """The program of our own build. `flags` come after those that every engine gets: model, threads, cells, slots.

    With `n_slots` 4 the number is left to the server, which takes four over one unified cache by itself.
    """

    def __init__(self, name: str, program: Path, flags: Sequence[str] = (), *, saves_slots: bool = False) -> None:
        self.name = name
        self._program = program
        self._flags = tuple(flags)
        self._saves_slots = saves_slots
        self._process: subprocess.Popen[bytes] | None = None
        self._log: BinaryIO | None = None
        self._port = 0
        self._folder = Path()

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def command(self, setup: Setup) -> list[str]:
        """Its arguments, without the port."""
        words = [str(self._program), "-m", str(setup.model), "-c", str(setup.kv_tokens), "-t", str(setup.n_threads)]
        if setup.n_slots != 4:
            words += ["-np", str(setup.n_slots)]
        if setup.chat_template:
            words += ["--jinja", "--chat-template-file", str(setup.chat_template)]
        if self._saves_slots:
            words += ["--slot-save-path", str(setup.folder)]
        return [*words, *self._flags]

    def start(self, setup: Setup) -> None:
        self._folder = setup.folder
        self._port = _free_port()
        self._log = (setup.folder / "log.txt").open("ab")
        self._process = subprocess.Popen(
            [*self.command(setup), "--host", _HOST, "--port", str(self._port)],
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )
        self._wait_until_ready()

    def _wait_until_ready(self) -> None:
        end = time.monotonic() + _START_LIMIT_S
        while time.monotonic() < end:
            assert self._process is not None
            if self._process.poll() is not None:
                break
            try:
                if self._get("/health")[0] == http.HTTPStatus.OK:
                    return
            except OSError:
                pass
            time.sleep(0.05)
        tail = (self._folder / "log.txt").read_text(encoding="utf-8", errors="replace")[-2000:]
        self.stop()
        raise EngineFailedError(f"{self.name} did not start\n{tail}")

    def _get(self, path: str) -> tuple[int, Any]:
        return self._ask("GET", path)

    def _ask(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        connection = http.client.HTTPConnection(_HOST, self._port, timeout=_START_LIMIT_S)
        try:
            text = None if body is None else json.dumps(body)
            connection.request(method, path, text, {"Content-Type": "application/json"})
            response = connection.getresponse()
            return response.status, json.loads(response.read() or b"null")
        finally:
            connection.close()

    def send(self, request: ChatRequest) -> Pending:
        pending = Pending()
        restore_s = 0.0
        if self._saves_slots and (self._folder / _SAVED).exists():
            restore_s = self._restore()

        def run() -> None:
            try:
                pending.finish(self._chat(request, pending, restore_s))
            except (OSError, http.client.HTTPException, EngineFailedError, ValueError) as error:
                pending.finish(None, EngineFailedError(f"{self.name}: {error}"))

        threading.Thread(target=run, daemon=True).start()
        return pending

    def _chat(self, request: ChatRequest, pending: Pending, waited_s: float) -> Answer:
        body: dict[str, Any] = {
            "messages": list(request.messages),
            "max_tokens": request.max_tokens,
            "temperature": 0.0,
            "stream": True,
        }
        if request.tools:
            body["tools"] = list(request.tools)
        if request.is_endless:
            body["ignore_eos"] = True
        text, first_s, timings = "", None, {}
        start_s = time.perf_counter() - waited_s
        for event in self._events(body):
            timings = event.get("timings") or timings
            for choice in event.get("choices", ()):
                delta = choice.get("delta", {})
                if first_s is None and (
                    delta.get("content") or delta.get("reasoning_content") or delta.get("tool_calls")
                ):
                    first_s = time.perf_counter() - start_s
                    pending.has_begun.set()
                text += delta.get("content") or ""
        total_s = time.perf_counter() - start_s
        return Answer(
            text=text,
            prompt_tokens=timings["cache_n"] + timings["prompt_n"],
            prefilled_tokens=timings["prompt_n"],
            completion_tokens=timings["predicted_n"],
            ttft_s=total_s if first_s is None else first_s,
            total_s=total_s,
            engine_prefill_s=timings["prompt_ms"] / 1e3 + waited_s,
        )

    def _events(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        connection = http.client.HTTPConnection(_HOST, self._port, timeout=900)
        try:
            connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            if response.status != http.HTTPStatus.OK:
                raise EngineFailedError(f"{response.status}: {response.read(2000)!r}")
            for line in response:
                data = line.strip().removeprefix(b"data: ")
                if not data.startswith(b"{"):
                    continue
                event = json.loads(data)
                if "error" in event:
                    raise EngineFailedError(str(event["error"]))
                yield event
        finally:
            connection.close()

    # -- over a restart --

    def keep(self) -> None:
        """With `saves_slots`: the slot that holds the most, to a file, which the next request after a start reads."""
        if self._saves_slots:
            slots = self._get("/slots")[1]
            longest = max(slots, key=lambda slot: slot.get("n_prompt_tokens", 0))
            status, reply = self._ask("POST", f"/slots/{longest['id']}?action=save", {"filename": _SAVED})
            if status != http.HTTPStatus.OK:
                raise EngineFailedError(f"{self.name}: {reply}")

    def _restore(self) -> float:
        start_s = time.perf_counter()
        status, reply = self._ask("POST", "/slots/0?action=restore", {"filename": _SAVED})
        if status != http.HTTPStatus.OK:
            raise EngineFailedError(f"{self.name}: {reply}")
        elapsed_s = time.perf_counter() - start_s
        (self._folder / _SAVED).unlink()
        return elapsed_s

    def stop(self) -> None:
        if self._process is not None:
            if self._process.poll() is None:
                self._process.send_signal(signal.SIGINT)
                try:
                    self._process.wait(60)
                except subprocess.TimeoutExpired:
                    self._process.kill()
                    self._process.wait()
            self._process = None
        if self._log is not None:
            self._log.close()
            self._log = None


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((_HOST, 0))
        return int(probe.getsockname()[1])
