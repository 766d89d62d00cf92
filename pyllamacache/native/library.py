"""Loading the extension, its log, its facts, and the guard that makes closing a shared handle safe.

`load()` is the only way to `ffi` and `lib`. It checks the CPU first where the build promised to, because a missing
instruction set is a signal, not an exception. Log records come from native threads at any time into a C ring
(`shim.cpp`) and are moved to Python's `logging` by whoever calls `collect_log`.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
import platform
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ..errors import ClosedError, CpuUnsupportedError, ForkedError

logger = logging.getLogger("pyllamacache.llama")

_RECORD_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Device:
    """One compute device as ggml names it. `total_bytes` is 0 where the backend does not say."""

    name: str
    description: str
    free_bytes: int
    total_bytes: int
    is_gpu: bool
    """Layers can be put there."""


@dataclass(frozen=True, slots=True)
class LibraryInfo:
    """What was compiled in, for `doctor`, file headers and bug reports."""

    llama_tag: str
    source_digest: str
    """SHA-256 over pin, series and patches."""
    patches: tuple[str, ...]
    portable: bool
    cpu_features: tuple[str, ...]
    """Instruction sets the extension was compiled for."""
    system_info: str
    """What ggml found on this machine."""


def cpu_flags() -> frozenset[str] | None:
    """The CPU's feature names in Linux's spelling, or None where they cannot be read."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return None
    try:
        with open("/proc/cpuinfo", encoding="ascii", errors="replace") as lines:
            for line in lines:
                if line.startswith("flags"):
                    return frozenset(line.partition(":")[2].split())
    except OSError:
        pass
    return None


def check_cpu(needed: tuple[str, ...], present: frozenset[str] | None) -> None:
    """Raise CpuUnsupportedError if an instruction set the extension was compiled for is known to be missing."""
    if present is not None:
        missing = tuple(name for name in needed if name not in present)
        if missing:
            raise CpuUnsupportedError(missing)


def _build_info() -> Any:
    return importlib.import_module("._build_info", __package__)


@functools.lru_cache(maxsize=1)
def load() -> Any:
    """The compiled module: `.ffi` and `.lib`. Thread: any. Raises CpuUnsupportedError, ImportError."""
    try:
        info = _build_info()
    except ModuleNotFoundError as error:
        raise ImportError(
            "pyllamacache's compiled module is missing. In a checkout, install it first (pip install -e .) and do not "
            "run Python from the repository's root without that; see 'Working in a checkout' in the README."
        ) from error
    check_cpu(info.CPU_FEATURES, cpu_flags())
    module = importlib.import_module("._lib", __package__)
    module.lib.plc_init(module.lib.GGML_LOG_LEVEL_WARN)
    return module


def tune_log_level() -> None:
    """Keep native records from the level that somebody listens to; called before loading a model or a context."""
    lib = load().lib
    if logger.isEnabledFor(logging.DEBUG):
        lib.plc_log_level(lib.GGML_LOG_LEVEL_DEBUG)
    elif logger.isEnabledFor(logging.INFO):
        lib.plc_log_level(lib.GGML_LOG_LEVEL_INFO)
    else:
        lib.plc_log_level(lib.GGML_LOG_LEVEL_WARN)


def collect_log() -> str:
    """Move what is in the ring to `logging`; returns the warnings and errors, for an exception's text. Thread: any."""
    ffi, lib = load().ffi, load().lib
    levels = {
        lib.GGML_LOG_LEVEL_DEBUG: logging.DEBUG,
        lib.GGML_LOG_LEVEL_INFO: logging.INFO,
        lib.GGML_LOG_LEVEL_WARN: logging.WARNING,
        lib.GGML_LOG_LEVEL_ERROR: logging.ERROR,
    }
    problems: list[str] = []
    if not lib.plc_log_pending():
        return ""
    buffer = ffi.new("char[]", _RECORD_BYTES)
    while native_level := lib.plc_log_next(buffer, _RECORD_BYTES):
        text = ffi.string(buffer).decode("utf-8", "replace").rstrip()
        level = levels.get(native_level, logging.INFO)
        if text:
            with suppress(Exception):  # a user's broken filter must not cost an engine its thread
                logger.log(level, "%s", text)
            if level >= logging.WARNING:
                problems.append(text)
    return "; ".join(problems)


def info() -> LibraryInfo:
    """Facts about the compiled module. Thread: any. Effects: none."""
    ffi, lib = load().ffi, load().lib

    def text(value: Any) -> str:
        return str(ffi.string(value).decode("utf-8", "replace"))

    return LibraryInfo(
        llama_tag=text(lib.plc_llama_tag()),
        source_digest=text(lib.plc_source_digest()),
        patches=tuple(filter(None, text(lib.plc_patches()).split(","))),
        portable=bool(lib.plc_is_portable()),
        cpu_features=tuple(_build_info().CPU_FEATURES),
        system_info=text(lib.llama_print_system_info()).strip(),
    )


def devices() -> tuple[Device, ...]:
    """Every device ggml found. Thread: any. Effects: none."""
    ffi, lib = load().ffi, load().lib
    found = []
    for index in range(lib.ggml_backend_dev_count()):
        device = lib.ggml_backend_dev_get(index)
        free, total = ffi.new("size_t *"), ffi.new("size_t *")
        is_gpu = lib.ggml_backend_dev_type(device) in (
            lib.GGML_BACKEND_DEVICE_TYPE_GPU,
            lib.GGML_BACKEND_DEVICE_TYPE_IGPU,
        )
        lib.ggml_backend_dev_memory(device, free, total)
        found.append(
            Device(
                ffi.string(lib.ggml_backend_dev_name(device)).decode(),
                ffi.string(lib.ggml_backend_dev_description(device)).decode("utf-8", "replace"),
                int(free[0]),
                int(total[0]),
                is_gpu,
            )
        )
    return tuple(found)


class Guard:
    """Lets many threads use a handle and one close it: `with guard:` around each use, `close()` waits for them.

    A handle that crossed a fork raises ForkedError and is never freed: the memory belongs to the parent's threads too.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._pid = os.getpid()
        self._condition = threading.Condition(threading.Lock())
        self._n_users = 0
        self._closed = False

    @property
    def is_forked(self) -> bool:
        return os.getpid() != self._pid

    @property
    def is_closed(self) -> bool:
        return self._closed

    def __enter__(self) -> None:
        if self.is_forked:
            raise ForkedError(self._what)
        with self._condition:
            if self._closed:
                raise ClosedError(self._what)
            self._n_users += 1

    def __exit__(self, *_: object) -> None:
        with self._condition:
            self._n_users -= 1
            if not self._n_users:
                self._condition.notify_all()

    def close(self) -> bool:
        """Refuse further use and wait for the present ones. True for the one call that may free the handle."""
        if self.is_forked:
            return False
        with self._condition:
            if self._closed:
                return False
            self._closed = True
            while self._n_users:
                self._condition.wait()
            return True
