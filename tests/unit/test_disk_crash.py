"""Processes that end at any instant lose what they were writing, and nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fakes.disk import assert_sound, bytes_on_disk, get, open_store, put, spans

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), *sys.path])),
    "PYTHONWARNINGS": "error",
    "OPENBLAS_NUM_THREADS": "1",  # it forks
}
ENDS_WHILE_WRITING = """
import os, signal, sys
from pathlib import Path
from tests.fakes.disk import open_store, put, spans
step = sys.argv[2]
store = open_store(Path(sys.argv[1]), before_step=lambda name: name == step and os.kill(os.getpid(), signal.SIGKILL))
put(store, *spans(range(8)))
"""


@pytest.mark.slow
def test_every_end(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.fakes.disk_crash", str(tmp_path / "cache")]
    ended = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=120, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
    counts = {name: int(count) for name, count in (each.split("=") for each in ended.stdout.split())}
    assert all(count >= 5 for count in counts.values()), counts


def test_a_living_store_gives_up_what_an_ended_one_was_writing(tmp_path: Path) -> None:
    store = open_store(tmp_path / "cache")
    for step in ("file.write", "index.publish"):
        command = [sys.executable, "-c", ENDS_WHILE_WRITING, str(tmp_path / "cache"), step]
        assert subprocess.run(command, env=ENVIRONMENT, timeout=60, check=False).returncode == -9
        entry = spans(range(4))[0]
        assert not get(store, entry)
        assert store.size_bytes > 0
        assert put(store, entry) == [True]
        assert get(store, entry)
        assert bytes_on_disk(tmp_path / "cache") == store.size_bytes
        store.clear()
    store.close()
    assert_sound(tmp_path / "cache")
