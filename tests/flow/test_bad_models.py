"""Model files that are missing, strange or malformed: each is refused with one of our errors, none ends the process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pyllamacache import Engine, Model
from pyllamacache.errors import ModelError, ModelFormatError, ModelNotFoundError
from tests.flow.hold import LIMIT_S
from tests.models.malformed import malformed_files

TRY_EACH = """
import sys
import pyllamacache as plc
for path in sys.stdin.read().splitlines():
    print(path, end=" ", flush=True)
    try:
        with plc.Model(path, progress=False) as model:
            with plc.Engine(model, n_ctx=256, n_slots=1, n_threads=1, progress=False) as engine:
                engine.complete("some text", max_tokens=2)
    except plc.errors.PyLlamaCacheError as error:
        print(type(error).__name__, flush=True)
    else:
        print("answered", flush=True)
"""


def test_no_malformed_file_ends_the_process(tmp_path: Path) -> None:
    paths = [file.write(tmp_path) for file in malformed_files()]
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", TRY_EACH],
        input="\n".join(map(str, paths)), capture_output=True, text=True, check=False, timeout=LIMIT_S, cwd=tmp_path,
    )  # fmt: skip
    outcomes = dict(line.rsplit(" ", 1) for line in ran.stdout.splitlines())
    assert (ran.returncode, ran.stderr) == (0, ""), f"after {ran.stdout[-200:]}"
    assert len(outcomes) == len(paths) > 100
    refused = {"ModelFormatError", "ModelLoadError", "ModelNotFoundError"}
    others = {Path(path).name: outcome for path, outcome in outcomes.items() if outcome not in refused}
    assert others == {"sentencepiece-without-bytes.gguf": "InvalidRequestError"}, "a fault that only text can show"


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.gguf")
    (tmp_path / "loop.gguf").symlink_to("loop.gguf")
    (tmp_path / "nowhere.gguf").symlink_to("gone.gguf")
    (tmp_path / "file").write_bytes(b"")
    for name, error, says in (
        ("missing.gguf", ModelNotFoundError, "no such file"),
        ("missing/model.gguf", ModelNotFoundError, "no such file"),
        ("file/model.gguf", ModelNotFoundError, "no such file"),
        ("nowhere.gguf", ModelNotFoundError, "leads nowhere"),
        ("loop.gguf", ModelFormatError, "symbolic links"),
        ("", ModelFormatError, "directory"),
        ("pipe.gguf", ModelFormatError, "not a regular file"),
        ("x" * 300 + ".gguf", ModelFormatError, "too long"),
        ("nul\0.gguf", ModelNotFoundError, "no file can have this name"),
    ):
        with pytest.raises(error, match=says) as caught:
            Model(tmp_path / name, progress=False)
        assert isinstance(caught.value, ModelError)
    assert isinstance(ModelNotFoundError("x", "y"), FileNotFoundError)


def test_a_file_that_may_not_be_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "secret.gguf"
    path.write_bytes(b"GGUF")
    path.chmod(0)
    is_root = os.geteuid() == 0
    if is_root:  # root may read everything, so be somebody else for a moment
        os.seteuid(65534)
    try:
        with pytest.raises(ModelFormatError, match="ermission"):
            Model(path, progress=False)
    finally:
        if is_root:
            os.seteuid(0)


@pytest.mark.parametrize(
    "name", ["ža žluťoučký.gguf", "new\nline.gguf", os.fsdecode(b"not \xff utf-8.gguf"), "a 'quoted\" $x.gguf"]
)
def test_a_sound_model_loads_under_any_name_and_through_a_link(
    name: str, tiny_path: Callable[[str], Path], tmp_path: Path
) -> None:
    path = tmp_path / name
    path.symlink_to(tiny_path("full"))
    with Model(path, progress=False) as model, Engine(model, n_ctx=256, n_threads=1, progress=False) as engine:
        assert len(engine.complete("text", max_tokens=2).token_ids) == 2
        assert len(model.fingerprint) == len(Model(str(path), progress=False).fingerprint)


def test_a_file_that_was_replaced_while_it_was_used_is_another_model(
    tiny_path: Callable[[str], Path], tmp_path: Path
) -> None:
    """Scenario S28: same path, other weights. The fingerprint follows the bytes, not the name."""
    path = tmp_path / "model.gguf"
    path.write_bytes(tiny_path("full").read_bytes())
    one = Model(path, progress=False)
    before = one.fingerprint
    data = bytearray(path.read_bytes())
    data[-100] ^= 1
    replacement = tmp_path / "new.gguf"
    replacement.write_bytes(data)
    os.replace(replacement, path)
    other = Model(path, progress=False)
    assert other.fingerprint != before
    one.close()
    other.close()
