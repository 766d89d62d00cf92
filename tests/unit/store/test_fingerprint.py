"""A model's fingerprint: every byte counts, a file is hashed once, and stored digests are not trusted blindly."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pyllamacache.errors import ModelFormatError, ModelNotFoundError
from pyllamacache.store import fingerprint as module
from pyllamacache.store.fingerprint import FILE_NAME, fingerprint, user_cache_dir


class Clock:
    """Stands for `time`: by default every file was changed long ago."""

    def __init__(self) -> None:
        self.ahead_ns = 3600 * 10**9

    def time_ns(self) -> int:
        return time.time_ns() + self.ahead_ns


class Reads:
    """Counts what was hashed."""

    def __init__(self) -> None:
        self.n_bytes = 0

    def __call__(self, n_bytes: int) -> None:
        self.n_bytes += n_bytes


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


@pytest.fixture(autouse=True)
def empty_memory(clock: Clock) -> Iterator[None]:
    module._known.clear()
    yield
    module._known.clear()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model.gguf"
    path.write_bytes(bytes(range(256)) * 5000)
    return path


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "pyllamacache"


def hashed_bytes(paths: list[Path], cache: Path | None) -> int:
    reads = Reads()
    fingerprint(paths, cache_dir=cache, on_bytes=reads)
    return reads.n_bytes


def test_every_byte_counts(model: Path) -> None:
    seen = {fingerprint([model], cache_dir=None)}
    content = model.read_bytes()
    for position in (0, 1, 1 << 20, len(content) - 1):
        changed = bytearray(content)
        changed[position] ^= 1
        model.write_bytes(changed)
        seen.add(fingerprint([model], cache_dir=None))
    model.write_bytes(content + b"\0")
    seen.add(fingerprint([model], cache_dir=None))
    assert len(seen) == 6
    model.write_bytes(content)
    assert fingerprint([model], cache_dir=None) in seen


def test_known_answer(tmp_path: Path) -> None:
    """printf 'pyllamacache fingerprint 1' | cat - <(sha256sum <(printf abc) | xxd -r -p) | sha256sum"""
    path = tmp_path / "abc"
    path.write_bytes(b"abc")
    assert fingerprint([path], cache_dir=None) == "5ba1684243989d838bd9cb33e989666933b962acdbdf5b3f0e9828d9b0d7d77e"


def test_the_order_and_number_of_parts_count(tmp_path: Path) -> None:
    a, b, both = tmp_path / "a", tmp_path / "b", tmp_path / "both"
    a.write_bytes(b"a")
    b.write_bytes(b"b")
    both.write_bytes(b"ab")
    assert len({fingerprint(paths, cache_dir=None) for paths in ([a, b], [b, a], [a], [both], [a, a])}) == 5


def test_name_and_place_do_not_count(model: Path, tmp_path: Path) -> None:
    copy, link = tmp_path / "copy", tmp_path / "link"
    copy.write_bytes(model.read_bytes())
    link.symlink_to(model)
    assert len({fingerprint([path], cache_dir=None) for path in (model, copy, link)}) == 1


def test_a_file_is_hashed_once_per_process(model: Path) -> None:
    assert hashed_bytes([model], None) == model.stat().st_size
    assert hashed_bytes([model, model], None) == 0


def test_a_file_is_hashed_once_per_user(model: Path, cache: Path) -> None:
    first = fingerprint([model], cache_dir=cache)
    module._known.clear()
    assert hashed_bytes([model], cache) == 0
    assert fingerprint([model], cache_dir=cache) == first
    assert (cache / FILE_NAME).stat().st_mode & 0o777 == 0o600


def test_a_changed_file_is_hashed_again(model: Path, cache: Path) -> None:
    fingerprint([model], cache_dir=cache)
    times = model.stat().st_atime_ns, model.stat().st_mtime_ns
    model.write_bytes(model.read_bytes()[::-1])
    os.utime(model, ns=times)
    assert hashed_bytes([model], cache) == model.stat().st_size


def test_a_replaced_file_is_hashed_again(model: Path, cache: Path, tmp_path: Path) -> None:
    fingerprint([model], cache_dir=cache)
    other = tmp_path / "other"
    other.write_bytes(model.read_bytes()[::-1])
    os.utime(other, ns=(model.stat().st_atime_ns, model.stat().st_mtime_ns))
    os.replace(other, model)
    assert hashed_bytes([model], cache) == model.stat().st_size


def test_a_file_changed_just_now_is_not_remembered(model: Path, cache: Path, clock: Clock) -> None:
    """It could change again within the same tick of the file system's clock."""
    clock.ahead_ns = 0
    size = model.stat().st_size
    assert [hashed_bytes([model], cache) for _ in range(2)] == [size, size]
    assert not cache.exists()


@pytest.mark.parametrize("how", ["written", "replaced"])
def test_a_file_that_changes_while_it_is_read(model: Path, cache: Path, tmp_path: Path, how: str) -> None:
    def change(n_bytes: int) -> None:
        if how == "written":
            with open(model, "ab") as file:
                file.write(b"more")
        else:
            other = tmp_path / "other"
            other.write_bytes(b"other")
            os.replace(other, model)

    with pytest.raises(ModelFormatError, match="changed while it was read"):
        fingerprint([model], cache_dir=cache, on_bytes=change)
    assert not cache.exists()
    assert not module._known


@pytest.mark.parametrize(
    "damage",
    [
        lambda raw: b"",
        lambda raw: raw[: len(raw) // 2],
        lambda raw: b"[" * 100_000,
        lambda raw: b"\xff" * 100,
        lambda raw: b"[]",
        lambda raw: b'{"entries": 3}',
        lambda raw: b'{"entries": {"a": 3}, "sha256": null}',
        lambda raw: raw.replace(b'": "0', b'": "1').replace(b'": "f', b'": "e'),
        lambda raw: raw + b" " * (2 << 20),
    ],
    ids=range(9),
)
def test_a_damaged_store_is_replaced(model: Path, cache: Path, damage: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        module, "_hash", lambda file, size_bytes, on_bytes: (on_bytes(1) if on_bytes else None) or "0" * 64
    )
    good = fingerprint([model], cache_dir=cache)
    stored = cache / FILE_NAME
    damaged = damage(stored.read_bytes())  # type: ignore[operator]
    assert damaged != stored.read_bytes()
    stored.write_bytes(damaged)
    module._known.clear()
    reads = Reads()
    assert fingerprint([model], cache_dir=cache, on_bytes=reads) == good
    module._known.clear()
    if len(damaged) < 1 << 20:
        assert reads.n_bytes == 1
        assert hashed_bytes([model], cache) == 0


def test_entries_that_are_no_digests_are_ignored(model: Path, cache: Path) -> None:
    good = fingerprint([model], cache_dir=cache)
    stored = cache / FILE_NAME
    (key,) = json.loads(stored.read_text())["entries"]
    for value in (3, "g" * 64, "0" * 63):
        entries = {key: value}
        stored.write_text(json.dumps({"entries": entries, "sha256": module._checksum(entries)}))  # type: ignore[arg-type]
        module._known.clear()
        assert fingerprint([model], cache_dir=cache) == good


def test_a_store_that_cannot_be_written_is_no_failure(model: Path, tmp_path: Path) -> None:
    good = fingerprint([model], cache_dir=None)
    file = tmp_path / "file"
    file.write_bytes(b"")
    link = tmp_path / "linked"
    link.mkdir()
    (link / FILE_NAME).symlink_to(file)
    for cache in (file, file / "below", link, Path("/proc/none"), Path("a\0b")):
        module._known.clear()
        assert fingerprint([model], cache_dir=cache) == good
    assert file.read_bytes() == b""


def test_another_users_store_is_not_believed(model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fingerprint([model], cache_dir=cache)
    module._known.clear()
    monkeypatch.setattr(os, "geteuid", lambda: os.stat(model).st_uid + 1)
    assert hashed_bytes([model], cache) == model.stat().st_size


def test_the_store_is_bounded_and_forgets_the_oldest(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_ENTRIES", 3)
    paths = [tmp_path / str(number) for number in range(5)]
    for path in paths:
        path.write_text(path.name)
        fingerprint([path], cache_dir=cache)
    module._known.clear()
    assert [hashed_bytes([path], cache) for path in reversed(paths)][:3] == [0, 0, 0]
    assert len(json.loads((cache / FILE_NAME).read_text())["entries"]) == 3


def test_files_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "nowhere").symlink_to(tmp_path / "missing")
    os.mkfifo(tmp_path / "pipe")
    for path, error, text in (
        (tmp_path / "missing", ModelNotFoundError, "no such file"),
        (tmp_path / "nowhere", ModelNotFoundError, "leads nowhere"),
        (Path("a\0b"), ModelNotFoundError, "name"),
        (tmp_path, ModelFormatError, "directory"),
        (tmp_path / "pipe", ModelFormatError, "not a regular file"),
    ):
        with pytest.raises(error, match=text):
            fingerprint([path], cache_dir=None)


def test_the_users_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert user_cache_dir() == tmp_path / "pyllamacache"
    monkeypatch.setenv("HOME", "/home/somebody")
    for value in ("", "relative/is/ignored"):
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert user_cache_dir() == Path("/home/somebody/.cache/pyllamacache")

    def no_home() -> Path:
        raise RuntimeError

    monkeypatch.setattr(Path, "home", no_home)
    assert user_cache_dir().name == f"pyllamacache-{os.getuid()}"
