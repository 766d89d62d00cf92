"""Getting the peers: llama-server and the bench programs from the pinned sources, llama-cpp-python from its package."""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

from bench.harness import find_tool

ROOT = Path(__file__).parents[2]
TOOLS = ROOT / "build" / "tools"
ENVIRONMENT = ROOT / "build" / "llama-cpp-python"
PACKAGE = "llama-cpp-python==0.3.36"


def tools_folder(given: Path | None) -> Path:
    """Where llama-server, llama-bench and llama-batched-bench are; built first where they are not.

    Raises SystemExit with what is missing.
    """
    name = "llama-server"
    found = find_tool(given, name, is_quiet=given is None)
    if found is None:
        if given is not None:
            raise SystemExit(f"{given} has no {name}")
        print("building llama-server and llama-bench from the pinned sources: some minutes", file=sys.stderr)
        log, programs = ROOT / "build" / "tools.log", _cmake_folder()
        cmake, ninja = programs / "cmake", programs / "ninja"
        configure = [cmake, "-S", ROOT, "-B", TOOLS, "-G", "Ninja", "-DPYLLAMACACHE_TOOLS=ON"]
        _run([*configure, f"-DCMAKE_MAKE_PROGRAM={ninja}", f"-DPython_EXECUTABLE={sys.executable}"], log=log)
        _run([cmake, "--build", TOOLS, "--target", "tools"], log=log)
        found = TOOLS / "bin" / name
    return found.parent


def _cmake_folder() -> Path:
    """Where a cmake that can build this and ninja are: beside this interpreter, or in an environment made for them.

    Debian 12's cmake is too old, and the tests' environment has none.
    """
    own = Path(sys.executable).parent
    if (own / "cmake").is_file() and (own / "ninja").is_file():
        return own
    folder = ROOT / "build" / "cmake"
    if not (folder / "bin" / "ninja").is_file():
        venv.create(folder, with_pip=True, clear=True)
        _run(
            [folder / "bin" / "python", "-m", "pip", "install", "cmake>=4.0", "ninja"], log=ROOT / "build" / "cmake.log"
        )
    return folder / "bin"


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
    with log.open("ab") as file:
        run = subprocess.run(command, stdout=file, stderr=file, check=False)
    if run.returncode:
        tail = log.read_text(encoding="utf-8", errors="replace")[-1500:]
        raise SystemExit(f"{command[0]} failed; the end of {log.relative_to(ROOT)}:\n{tail}")
