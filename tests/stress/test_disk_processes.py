"""Processes that write, read and evict in one folder, each under its own limit, some of them killed."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from pyllamacache.store import disk_check
from tests.fakes.disk import assert_sound, bytes_on_disk, get, open_store

pytestmark = pytest.mark.stress

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), *sys.path]))}
N_PROCESSES, N_LIVES, N_OPERATIONS = 4, 24, 120
LIMITS = [20_000, 40_000, 60_000]

CLIENT = """
import random, sys, time
from pathlib import Path
from tests.fakes.disk import bytes_on_disk, get, open_store, put, spans, state

folder, limit, seed, n_operations = Path(sys.argv[1]), *map(int, sys.argv[2:])
draw = random.Random(seed)
store = open_store(folder, limit, clock=time.time)
for _ in range(n_operations):
    start = 1000 * draw.randrange(6)
    ids = range(start, start + 4 * draw.randint(1, 8))
    entries = [*spans(ids, priority=draw.randint(-1, 1)), state(ids, n_bytes=draw.randint(1, 8000))]
    for entry in entries:
        choice = draw.random()
        if choice < 0.5:
            put(store, entry)
        elif choice < 0.85:
            get(store, entry)
        elif choice < 0.95:
            store.touch([(entry.kind, entry.key)], 1)
        else:
            store.remove([(entry.kind, entry.key)])
    assert store.size_bytes <= 60000
    print("done", flush=True)
store.close()
assert store.statistics.corrupt == store.statistics.failed == 0
"""


def start(folder: Path, limit: int, seed: int) -> subprocess.Popen[str]:
    arguments = map(str, (folder, limit, seed, N_OPERATIONS))
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", CLIENT, *arguments],
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("seed", [1, 2])
def test_processes_share_a_folder(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    folder = tmp_path / "cache"
    observer = open_store(folder, max(LIMITS))
    lives = [(draw.choice(LIMITS), draw.randrange(1 << 30)) for _ in range(N_LIVES)]
    running = [start(folder, *lives.pop()) for _ in range(N_PROCESSES)]
    n_killed = 0
    while running:
        process = running.pop(draw.randrange(len(running)))
        assert process.stdout is not None
        for _ in range(draw.randrange(N_OPERATIONS)):
            if not process.stdout.readline():
                break
            assert observer.size_bytes <= max(LIMITS)
        if draw.random() < 0.6:
            process.kill()
            n_killed += 1
        _, errors = process.communicate(timeout=250)
        assert process.returncode in (0, -9), errors
        if lives:
            running.append(start(folder, *lives.pop()))
    observer.close()
    assert n_killed > 3
    last = open_store(folder, min(LIMITS))
    assert bytes_on_disk(folder) == last.size_bytes <= min(LIMITS)
    for entry in last.scan()[0]:
        assert get(last, entry)
    last.close()
    assert_sound(folder)
    assert disk_check.clear(folder) > 0
    assert bytes_on_disk(folder) == 0
