"""What needs a process of its own: interpreter exit, Ctrl-C, fork, and what appears on standard error."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.flow.hold import LIMIT_S

BEGIN = """
import gc, logging, os, sys, threading
import numpy as np
import pyllamacache as plc

def new_engine():
    return plc.Engine(model, n_ctx=8192, n_slots=2, n_batch=128, n_ubatch=32, n_threads=1, progress=False)

def begun(handle):
    while handle.prefilled_tokens < 100:
        assert not handle.done
    return handle

model = plc.Model(sys.argv[1], progress=False)
engine = new_engine()
ids = np.random.default_rng(1).integers(0, 256, 100, dtype=np.int32)
"""

NewScript = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(tiny_path: Callable[[str], Path], tmp_path: Path) -> NewScript:
    """Start a script in an interpreter of its own, in which every warning is an error."""
    environment = {**os.environ, "PYTHONPATH": ""}

    def start(script: str, *, begin: str = BEGIN, options: tuple[str, ...] = ("-W", "error")) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, *options, "-c", begin + script, str(tiny_path("full"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
            env=environment,
        )

    return start


def outcome(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    output, errors = process.communicate(timeout=LIMIT_S)
    return process.returncode, output, errors


# ---- exit ------------------------------------------------------------------------------------------------------

EXITS = {
    "an idle engine in a module's globals": "engine.complete(ids, max_tokens=2)",
    "a running request": "handle = begun(engine.submit(ids, max_tokens=8000))",
    "running and queued requests": "begun(engine.submit(ids, max_tokens=8000)); [engine.submit(ids) for _ in 'abc']",
    "a half-read stream": "chunks = engine.stream(ids, max_tokens=8000); next(chunks)",
    "an engine that only a running request holds": "handle = begun(new_engine().submit(ids, max_tokens=8000))",
    "a dropped engine": "begun(engine.submit(ids, max_tokens=8000)); del engine",
    "an engine in a cycle": "c = [new_engine()]; c.append(c); begun(c[0].submit(ids, max_tokens=8000)); del c",
    "a closed engine": "handle = begun(engine.submit(ids, max_tokens=8000)); engine.close()",
    "a closed model": "handle = begun(engine.submit(ids, max_tokens=8000)); model.close()",
    "two engines": "both = [begun(each.submit(ids, max_tokens=8000)) for each in (engine, new_engine())]",
    "an exit in the middle": "begun(engine.submit(ids, max_tokens=8000)); sys.exit(0)",
    "a slot and nothing else": "slot = engine.slots[0]; begun(engine.submit(ids, max_tokens=8000)); del engine, model",
    "a request in a thread": "threading.Thread(target=lambda: engine.complete(ids, max_tokens=300)).start()",
    "an asyncio task": (
        "import asyncio\n"
        "async def main():\n"
        "    task = asyncio.create_task(engine.acomplete(ids, max_tokens=8000))\n"
        "    await asyncio.sleep(0)\n"
        "asyncio.run(main())"
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", EXITS)
def test_the_interpreter_exits_silently_whatever_is_going_on(what: str, start: NewScript) -> None:
    assert outcome(start(EXITS[what])) == (0, "", "")


# ---- Ctrl-C ----------------------------------------------------------------------------------------------------

INTERRUPTED = """
step, n_steps = engine._state.backend.step, 0
def counting(groups):
    global n_steps
    n_steps += 1
    if n_steps == 5:
        print("generating", flush=True)
    return step(groups)
engine._state.backend.step = counting
"""

AFTERWARDS = """
reply = engine.complete(ids, max_tokens=4)
print(reply.finish_reason, reply.usage.cached_tokens, engine.statistics().n_cancelled)
"""

WAYS = {
    "complete": "engine.complete(ids, max_tokens=8000)",
    "stream": "for chunk in engine.stream(ids, max_tokens=8000): pass",
    "result": "engine.submit(ids, max_tokens=8000).result()",
    "result with a limit": "engine.submit(ids, max_tokens=8000).result(timeout=600)",
    "acomplete": "import asyncio; asyncio.run(engine.acomplete(ids, max_tokens=8000))",
}


@pytest.mark.parametrize("way", WAYS)
def test_ctrl_c_ends_the_request_and_the_engine_goes_on(way: str, start: NewScript) -> None:
    """What was computed before it is resumed by the next request."""
    caught = f"try:\n    {WAYS[way]}\nexcept KeyboardInterrupt:\n    print('interrupted')\n"
    process = start(INTERRUPTED + caught + AFTERWARDS)
    assert process.stdout is not None
    assert process.stdout.readline() == "generating\n"
    process.send_signal(signal.SIGINT)
    assert outcome(process) == (0, "interrupted\nlength 99 1\n", "")


def test_ctrl_c_that_nobody_catches_ends_the_process_as_it_does_elsewhere(start: NewScript) -> None:
    process = start(INTERRUPTED + WAYS["complete"])
    assert process.stdout is not None
    assert process.stdout.readline() == "generating\n"
    process.send_signal(signal.SIGINT)
    code, output, errors = outcome(process)
    assert (code, output) == (-signal.SIGINT, "")
    assert errors.rstrip().endswith("KeyboardInterrupt")
    assert "Exception ignored" not in errors


# ---- fork ------------------------------------------------------------------------------------------------------

FORKED = """
class Trap:
    def __getattr__(self, name):
        os.write(1, f"child calls {name}\\n".encode())
        os._exit(9)

engine.complete(ids, max_tokens=2, slot=1)
path = os.path.join(os.getcwd(), "slot")
engine.slots[1].save(path)
handle = begun(engine.submit(ids, max_tokens=8000, temperature=1.0, seed=1, slot=0))
queued = engine.submit(ids, slot=0)
chunks = iter(handle)
next(chunks)
pid = os.fork()
if pid == 0:
    for each in gc.get_objects():
        if str(type(each).__module__).startswith("pyllamacache.native") and hasattr(each, "_lib"):
            each._lib = Trap()
    import asyncio
    slot = engine.slots[1]
    uses = [
        lambda: engine.complete(ids), lambda: engine.complete("text"), lambda: engine.submit(ids),
        lambda: next(iter(engine.stream(ids))), lambda: engine.warm(ids), lambda: asyncio.run(engine.acomplete(ids)),
        lambda: engine.statistics(), lambda: slot.state, lambda: slot.token_ids, lambda: slot.save(path + "2"),
        lambda: slot.restore(path), lambda: slot.erase(), lambda: handle.result(), lambda: handle.result(timeout=0),
        lambda: next(chunks), lambda: next(iter(handle)), lambda: list(queued), lambda: asyncio.run(queued.wait()),
        lambda: model.tokenize("text"), lambda: model.detokenize([1]), lambda: new_engine(), lambda: model.memory,
    ]
    for index, use in enumerate(uses):
        try:
            use()
            print("use", index, "raised nothing")
        except plc.errors.ForkedError as error:
            assert "parent process" in str(error)
    handle.cancel(), queued.cancel()
    engine.close(), model.close()
    del chunks, handle, queued, slot, uses, engine, model
    gc.collect()
    sys.exit(0)
_, status = os.waitpid(pid, 0)
handle.cancel()
handle.result()
reply = engine.complete(ids, max_tokens=4, slot=1)
print("status", status, "cached", reply.usage.cached_tokens)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="fork is a POSIX call")
def test_after_a_fork_the_child_is_told_and_the_parent_goes_on(start: NewScript) -> None:
    """The child calls nothing native, not even to free, and exits cleanly; a request was running all the while."""
    code, output, errors = outcome(start(FORKED, options=()))
    assert (code, output) == (0, "status 0 cached 99\n"), errors
    assert "Traceback" not in errors
    assert "Exception ignored" not in errors


@pytest.mark.skipif(not hasattr(os, "fork"), reason="fork is a POSIX call")
def test_a_child_that_touches_nothing_exits_cleanly_and_can_make_its_own_model(start: NewScript) -> None:
    script = (
        "handle = begun(engine.submit(ids, max_tokens=8000))\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    with plc.Model(sys.argv[1], progress=False) as model:\n"
        "        print(len(new_engine().complete(ids, max_tokens=3).token_ids), flush=True)\n"
        "    sys.exit(0)\n"
        "print(os.waitpid(pid, 0)[1])\n"
    )
    code, output, errors = outcome(start(script, options=()))
    assert (code, output) == (0, "3\n0\n"), errors
    assert "Traceback" not in errors


# ---- standard error --------------------------------------------------------------------------------------------


def test_nothing_is_printed_unless_somebody_asks(start: NewScript) -> None:
    assert outcome(start("engine.complete(ids, max_tokens=2)\nengine.close()")) == (0, "", "")


@pytest.mark.parametrize("level", ["INFO", "DEBUG"])
def test_llama_cpps_log_goes_to_its_logger_when_its_level_is_low_enough(level: str, start: NewScript) -> None:
    listen = (
        "import logging\n"
        "class Count(logging.Handler):\n"
        "    def emit(self, record):\n"
        "        seen.append((record.levelname, record.getMessage()))\n"
        "seen = []\n"
        "logger = logging.getLogger('pyllamacache.llama')\n"
        f"logger.setLevel('{level}'); logger.addHandler(Count())\n"
    )
    script = (
        "names = {name for name, _ in seen}\n"
        "print('INFO' in names, 'DEBUG' in names, any('llama_model_loader' in text for _, text in seen))\n"
        "print(any('\\n' in text for _, text in seen))\n"
    )
    expected = f"True {level == 'DEBUG'} True\nFalse\n"
    assert outcome(start(script, begin=listen + BEGIN)) == (0, expected, "")


def test_a_running_program_with_logging_configured_sees_warnings_only(start: NewScript) -> None:
    begin = "import logging\nlogging.basicConfig(level=logging.WARNING, format='%(levelname)s %(name)s')\n" + BEGIN
    code, output, errors = outcome(start("engine.complete(ids, max_tokens=2)", begin=begin))
    assert (code, output) == (0, "")
    assert {line for line in errors.splitlines() if line} <= {"WARNING pyllamacache.llama"}
