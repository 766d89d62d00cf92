"""A Python engine in a process of its own, spoken to in lines of JSON.

The parent's half is `Worker`, the child's `serve`. The child imports this file from its path, in whatever virtual
environment it runs, so nothing outside the standard library is imported here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

Event = dict[str, Any]
Say = Callable[[Event], None]


class Worker:
    """The child process. Commands get a number; events of the same number go to the command's callback."""

    def __init__(self, command: Sequence[str | Path], *, log: Path) -> None:
        self._log = log
        self._file = log.open("ab")
        self._process = subprocess.Popen(
            [str(part) for part in command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._file,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
        self._lock = threading.Lock()
        self._callbacks: dict[int, Callable[[Event], None]] = {}
        self._n_sent = 0
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def post(self, command: Event, callback: Callable[[Event], None]) -> None:
        """`callback` runs on the reader's thread for every event, the last of which has `done` or `error`."""
        stdin = self._process.stdin
        assert stdin is not None
        with self._lock:
            self._n_sent += 1
            self._callbacks[self._n_sent] = callback
            stdin.write(json.dumps({"n": self._n_sent, **command}).encode() + b"\n")
            stdin.flush()

    def call(self, command: Event, timeout_s: float = 600.0) -> Event:
        """Post, and wait for the last event."""
        last: list[Event] = []
        is_over = threading.Event()

        def note(event: Event) -> None:
            if "done" in event or "error" in event:
                last.append(event)
                is_over.set()

        self.post(command, note)
        if not is_over.wait(timeout_s):
            raise TimeoutError(f"{command.get('op')}: no answer within {timeout_s:.0f} s")
        if "error" in last[0]:
            raise RuntimeError(last[0]["error"])
        return last[0]

    def _read(self) -> None:
        stdout = self._process.stdout
        assert stdout is not None
        for line in stdout:
            if not line.startswith(b"{"):
                continue  # a library that prints
            event = json.loads(line)
            callback = self._callbacks.get(event["n"])
            if callback is not None:
                callback(event)
        tail = self._log.read_text(encoding="utf-8", errors="replace")[-2000:]
        for callback in list(self._callbacks.values()):
            callback({"error": f"the process ended\n{tail}"})

    def close(self, timeout_s: float = 120.0) -> None:
        """Ask it to stop, and wait; repeatable."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join(timeout_s)
        self._process.stdout.close()
        self._file.close()


def serve(handle: Callable[[Event, Say], Any], *, at_end: Callable[[], None], threads: bool) -> None:
    """The child's loop: one command a line until the input ends; with `threads`, each on a thread of its own.

    `handle` says events on its way and returns what is said last.
    """
    out = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # what native code prints goes to the log
    lock = threading.Lock()
    running: list[threading.Thread] = []

    def run(command: Event) -> None:
        def say(event: Event) -> None:
            with lock:
                out.write(json.dumps({"n": command["n"], **event}).encode() + b"\n")

        try:
            say({"done": handle(command, say)})
        except Exception as error:  # noqa: BLE001  # whatever it was, the parent hears of it
            traceback.print_exc()
            say({"error": f"{type(error).__name__}: {error}"})

    for line in sys.stdin.buffer:
        command = json.loads(line)
        if threads:
            thread = threading.Thread(target=run, args=(command,))
            thread.start()
            running = [each for each in running if each.is_alive()] + [thread]
        else:
            run(command)
    for thread in running:
        thread.join()
    at_end()
