"""`pyllamacache doctor`: what is installed, what it was compiled for, and what it finds on this machine.

Tells as much as it can before it fails: a module that does not load is what it is asked about most.
"""

from __future__ import annotations

import argparse
import json
import platform
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from .. import __version__
from ..errors import PyLlamaCacheError
from .command import Command
from .lines import Say, fact_lines, printable, size

_DEPENDENCIES = ("cffi", "numpy", "safetensors", "huggingface-hub", "tqdm")


@dataclass(frozen=True, slots=True)
class Cpu:
    """Instruction sets, by the names Linux has for them. `missing` is None where the machine does not tell."""

    compiled: tuple[str, ...]
    missing: tuple[str, ...] | None


@dataclass(frozen=True, slots=True)
class Findings:
    """Everything the command says. `extension` and `cpu` are None if the compiled module is not there or not usable."""

    package: str
    python: str
    platform: str
    dependencies: dict[str, str]
    cpu: Cpu | None
    extension: dict[str, Any] | None
    devices: list[dict[str, Any]]
    cache_dir: str
    cache_bytes: int
    error: str | None


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")


def _run(arguments: argparse.Namespace, say: Say) -> int:
    failure: Exception | None = None
    extension: dict[str, Any] | None = None
    devices: list[dict[str, Any]] = []
    try:
        extension, devices = _extension()
    except (PyLlamaCacheError, ImportError) as error:
        failure = error
    findings = _findings(extension, devices, failure)
    if arguments.json:
        say(json.dumps(asdict(findings), indent=2))
    else:
        for line in fact_lines(_facts(findings)):
            say(line)
    if failure is not None:
        raise failure
    return 0


def _extension() -> tuple[dict[str, Any], list[dict[str, Any]]]:
    from ..native import library

    facts = asdict(library.info())
    del facts["cpu_features"]
    return facts, [asdict(device) for device in library.devices()]


def _findings(extension: dict[str, Any] | None, devices: list[dict[str, Any]], failure: Exception | None) -> Findings:
    from ..store.fingerprint import user_cache_dir

    cache_dir = user_cache_dir()
    return Findings(
        package=__version__,
        python=f"{platform.python_implementation()} {platform.python_version()}",
        platform=platform.platform(),
        dependencies={name: _version(name) for name in _DEPENDENCIES},
        cpu=_cpu(),
        extension=extension,
        devices=devices,
        cache_dir=str(cache_dir),
        cache_bytes=_bytes_below(cache_dir),
        error=None if failure is None else str(failure),
    )


def _cpu() -> Cpu | None:
    from ..native import library

    try:
        from ..native._build_info import CPU_FEATURES
    except ImportError:
        return None
    present = library.cpu_flags()
    missing = None if present is None else tuple(name for name in CPU_FEATURES if name not in present)
    return Cpu(tuple(CPU_FEATURES), missing)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _bytes_below(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.lstat().st_size if path.is_file() else 0
        except OSError:
            continue
    return total


# ---- for people ------------------------------------------------------------------------------------------------


def _facts(findings: Findings) -> dict[str, str]:
    facts = {
        "pyllamacache": findings.package,
        "python": f"{findings.python} on {findings.platform}",
        "packages": ", ".join(f"{name} {number}" for name, number in findings.dependencies.items()),
    }
    if findings.cpu is not None:
        facts["compiled for"] = ", ".join(findings.cpu.compiled) or "any CPU of this kind"
        facts["this CPU"] = _cpu_words(findings.cpu)
    if findings.extension is not None:
        facts |= _extension_facts(findings.extension)
    for number, device in enumerate(findings.devices):
        facts[f"device {number}"] = _device_words(device)
    return facts | {"cache folder": f"{printable(findings.cache_dir)} ({size(findings.cache_bytes)})"}


def _cpu_words(cpu: Cpu) -> str:
    if cpu.missing is None:
        return "does not say which instruction sets it has"
    return f"lacks {', '.join(cpu.missing)}" if cpu.missing else "has all of these"


def _extension_facts(extension: dict[str, Any]) -> dict[str, str]:
    return {
        "llama.cpp": extension["llama_tag"],
        "source digest": extension["source_digest"],
        "patches": ", ".join(extension["patches"]) or "none",
        "build": "portable" if extension["portable"] else "for the CPU of the machine that built it",
        "system info": printable(extension["system_info"]),
    }


def _device_words(device: dict[str, Any]) -> str:
    words = f"{printable(device['name'])}: {printable(device['description'])}"
    if not device["total_bytes"]:
        return words
    return f"{words}, {size(device['free_bytes'])} of {size(device['total_bytes'])} free"


COMMAND = Command(
    "doctor",
    "say what is installed, compiled in and found on this machine; exit code 1 if the compiled module cannot load",
    _add_arguments,
    _run,
)
