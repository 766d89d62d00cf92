"""What the kernel says of another process: its peak of memory, and whether it has come to rest. Linux only."""

from __future__ import annotations

import os
import time
from pathlib import Path

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def _read(pid: int, name: str) -> str:
    return Path(f"/proc/{pid}/{name}").read_text(encoding="ascii", errors="replace")


def cpu_s(pid: int) -> float:
    """Of all its threads since it began; nan where the kernel does not say."""
    try:
        fields = _read(pid, "stat").rpartition(")")[2].split()
    except OSError:
        return float("nan")
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


def forget_peak(pid: int) -> None:
    """From here on `peak_bytes` counts anew (/proc/PID/clear_refs)."""
    try:
        Path(f"/proc/{pid}/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return


def peak_bytes(pid: int) -> int:
    """The most resident memory since `forget_peak`, mapped files included; 0 where the kernel does not say."""
    try:
        lines = _read(pid, "status").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), 0)


def wait_until_quiet(pid: int, *, window_s: float = 0.1, limit_s: float = 60.0) -> float:
    """Wait until the process uses no CPU, so that the next engine is measured alone. CPU seconds it used meanwhile.

    Copies behind a request, spinning threads and freed memory are what it waits for.
    """
    began = last = cpu_s(pid)
    end = time.perf_counter() + limit_s
    while time.perf_counter() < end:
        time.sleep(window_s)
        now = cpu_s(pid)
        if not now > last:  # nan: nothing is known of it
            break
        last = now
    return last - began
