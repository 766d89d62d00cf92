"""What identifies a model: a digest over every byte of its files, so over weights, tokenizer and configuration.

A file is read once: its digest is kept in memory and, in the user's cache folder, under the file's identity. That
store may be damaged, old or not writable at any time; then the file is read again.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass
from io import FileIO
from pathlib import Path

import numpy as np

from ..errors import ModelFormatError
from .atomic import open_regular, replace_file
from .model_file import opened_model

FILE_NAME = "fingerprints.json"
MAX_ENTRIES = 512

_VERSION = b"pyllamacache fingerprint 1"
_CHUNK_BYTES = 1 << 20
_MAX_FILE_BYTES = 1 << 20
_SETTLED_NS = 2_000_000_000
"""A file changed less than this before it was hashed may change again within the same tick of its clock, unseen."""


@dataclass(frozen=True, slots=True)
class _Identity:
    """What changes when a file's content does."""

    device: int
    inode: int
    size_bytes: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> _Identity:
        return cls(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)

    @property
    def key(self) -> str:
        return "-".join(map(str, astuple(self)))


_known: dict[_Identity, str] = {}
"""The one value this module keeps: the same file has the same digest whoever asks."""


def user_cache_dir() -> Path:
    """This package's folder for what can be made again. It may not exist yet."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(base):
        return Path(base, "pyllamacache")
    try:
        return Path.home() / ".cache" / "pyllamacache"
    except RuntimeError:  # a container's user without a home
        return Path(tempfile.gettempdir(), f"pyllamacache-{os.getuid()}")


def fingerprint(paths: Sequence[Path], *, cache_dir: Path | None, on_bytes: Callable[[int], None] | None = None) -> str:
    """The hex digest of a model: of its file, or of the files of a split one in order.

    Args:
        cache_dir: where digests are kept between processes; None: in memory only.
        on_bytes: called with the length of each piece that was hashed; not at all for a file that is known.
    Raises:
        ModelNotFoundError: a file is missing.
        ModelFormatError: a file cannot be read, or changed meanwhile.
    Thread: any.
    """
    combined = hashlib.sha256(_VERSION)
    for path in paths:
        combined.update(bytes.fromhex(_digest(os.fspath(path), cache_dir, on_bytes)))
    return combined.hexdigest()


def _digest(path: str, cache_dir: Path | None, on_bytes: Callable[[int], None] | None) -> str:
    with opened_model(path) as file:
        identity = _Identity.of(os.fstat(file.fileno()))
        known = _known.get(identity) or (_load(cache_dir).get(identity.key) if cache_dir else None)
        digest = known or _hash(file, identity.size_bytes, on_bytes)
        # By path, so that a file that was replaced shows as well.
        if _Identity.of(os.stat(path)) != identity:
            raise ModelFormatError(path, "it changed while it was read")
    if time.time_ns() - identity.ctime_ns > _SETTLED_NS:
        _known[identity] = digest
        if cache_dir and not known:
            _store(cache_dir, identity.key, digest)
    return digest


def _hash(file: FileIO, size_bytes: int, on_bytes: Callable[[int], None] | None) -> str:
    # hashlib.file_digest (3.11) is no faster, cannot tell how far it is, and follows a file that grows for ever.
    digest = hashlib.sha256()
    buffer = np.empty(_CHUNK_BYTES, dtype=np.uint8)  # no memoryview, see slotfile.py
    while size_bytes > 0 and (n_read := file.readinto(buffer[:size_bytes].data)):
        digest.update(buffer[:n_read].data)
        size_bytes -= n_read
        if on_bytes:
            on_bytes(n_read)
    return digest.hexdigest()


def _load(cache_dir: Path) -> dict[str, str]:
    """The stored digests, oldest first; none if the file is missing, damaged or somebody else's."""
    try:
        fd = open_regular(str(cache_dir / FILE_NAME))
    except (OSError, ValueError):
        return {}
    with FileIO(fd) as file:
        if os.fstat(fd).st_uid != os.geteuid():
            return {}
        try:
            parsed = json.loads(file.read(_MAX_FILE_BYTES))
        except (OSError, ValueError, RecursionError):
            return {}
    entries = parsed.get("entries") if isinstance(parsed, dict) else None
    if not isinstance(entries, dict) or parsed.get("sha256") != _checksum(entries):
        return {}
    return {
        key: value for key, value in entries.items() if isinstance(value, str) and re.fullmatch(r"[0-9a-f]{64}", value)
    }


def _store(cache_dir: Path, key: str, digest: str) -> None:
    """Add a digest. Of two processes that do so at once, one may lose its entry: that costs one more reading."""
    entries = _load(cache_dir) | {key: digest}
    newest = dict(list(entries.items())[-MAX_ENTRIES:])
    with suppress(OSError, ValueError):
        cache_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        text = json.dumps({"sha256": _checksum(newest), "entries": newest}, indent=1)
        replace_file(str(cache_dir / FILE_NAME), [text.encode()])


def _checksum(entries: dict[str, str]) -> str:
    return hashlib.sha256(_VERSION + json.dumps(entries).encode()).hexdigest()
