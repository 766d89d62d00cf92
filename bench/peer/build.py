"""Getting the peers: llama-server and the bench programs from the pinned sources, llama-cpp-python from its package."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path

from bench.harness import find_tool

ROOT = Path(__file__).parents[2]
TOOLS = ROOT / "build" / "tools"
ENVIRONMENT = ROOT / "build" / "llama-cpp-python"
PACKAGE = "llama-cpp-python==0.3.36"


def tools_folder(given: Path | None, *, is_server_needed: bool = True) -> Path:
    """Where llama-server, llama-bench and llama-batched-bench are; built first where they are not.

    Raises SystemExit with what is missing.
    """
    name = "llama-server" if is_server_needed else "llama-bench"
    found = find_tool(given, name, is_quiet=given is None)
    if found is None:
        if given is not None:
            raise SystemExit(f"{given} has no {name}")
        print("building llama-server and llama-bench from the pinned sources: some minutes", file=sys.stderr)
        configure = ["cmake", "-S", ROOT, "-B", TOOLS, "-G", "Ninja", "-DPYLLAMACACHE_TOOLS=ON"]
        _run([*configure, f"-DPython_EXECUTABLE={sys.executable}"], log=ROOT / "build" / "tools.log")
        _run(["cmake", "--build", TOOLS, "--target", "tools"], log=ROOT / "build" / "tools.log")
        found = TOOLS / "bin" / name
    return found.parent


def python_with_llama_cpp(environment: Path = ENVIRONMENT) -> Path | None:
    """Its interpreter, in a virtual environment made for it; None, and a word on standard error, where it cannot be."""
    python = environment / "bin" / "python"
    marker = environment / "installed.txt"
    if marker.is_file() and marker.read_text(encoding="utf-8") == PACKAGE:
        return python
    print(f"building {PACKAGE} in its own environment: some minutes", file=sys.stderr)
    log = ROOT / "build" / "llama-cpp-python.log"
    try:
        venv.create(environment, with_pip=True, clear=True)
        _run([python, "-m", "pip", "install", PACKAGE], log=log)
        _run([python, "-c", "import llama_cpp"], log=log)
    except (OSError, subprocess.CalledProcessError, SystemExit) as error:
        print(f"without llama-cpp-python: {error}", file=sys.stderr)
        return None
    marker.write_text(PACKAGE, encoding="utf-8")
    return python


def _run(command: list[str | Path], *, log: Path) -> None:
    log.parent.mkdir(exist_ok=True)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])  # cmake and ninja of the bench extra
    with log.open("ab") as file:
        run = subprocess.run(command, stdout=file, stderr=file, env={**os.environ, "PATH": path}, check=False)
    if run.returncode:
        tail = log.read_text(encoding="utf-8", errors="replace")[-1500:]
        raise SystemExit(f"{command[0]} failed; the end of {log.relative_to(ROOT)}:\n{tail}")
