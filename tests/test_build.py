"""Fetching the pinned sources: what is refused, what is named, and what is left behind."""

from __future__ import annotations

import hashlib
import io
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import fetch_llama
import pytest
from fetch_llama import PIN_FILE, REPOSITORY, Pin, SourceError, extract, materialise, read_pin, tree_digest

ROOT = "thing-1.0/llama.cpp"
FILES = {
    "CMakeLists.txt": b"project(x)\n",
    "src/a.cpp": b"int a;\n",
    "src/tests/big.bin": b"\0" * 10,
    "docs/no.md": b"no\n",
}


def make_archive(path: Path, files: dict[str, bytes], *extra: tarfile.TarInfo) -> Path:
    """An archive of `files` below ROOT, and of `extra` members as they are."""
    with tarfile.open(path, "w:gz") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(f"{ROOT}/{name}")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
        for member in extra:
            tar.addfile(member, io.BytesIO(b"\0" * member.size))
    return path


def write_pin(path: Path, archive: Path, **changes: str) -> Path:
    """A pin for `archive` that takes CMakeLists.txt and src without its tests."""
    fields = {
        "package": "thing",
        "version": "1.0",
        "sha256": hashlib.sha256(archive.read_bytes()).hexdigest(),
        "tag": "b1",
        "root": ROOT,
        "include": "CMakeLists.txt src",
        "exclude": "src/tests",
        "tree": "unknown",
        **changes,
    }
    path.write_text("# a pin\n\n" + "".join(f"{key} = {value}\n" for key, value in fields.items()))
    return path


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    return make_archive(tmp_path / "thing-1.0.tar.gz", FILES)


@pytest.fixture
def pin_file(tmp_path: Path, archive: Path) -> Path:
    """A pin whose tree digest is the right one."""
    pin_file = write_pin(tmp_path / "PIN", archive)
    extract(archive, read_pin(pin_file), tmp_path / "expected")
    return write_pin(pin_file, archive, tree=tree_digest(tmp_path / "expected"))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return tmp_path / "vendor" / "source"


def no_download(pin: Pin, folder: Path) -> Path:
    raise AssertionError(f"{pin.package} must not be downloaded into {folder}")


def test_takes_only_what_the_pin_includes(pin_file: Path, archive: Path, source: Path) -> None:
    materialise(pin_file, source, archive)
    found = {path.relative_to(source).as_posix() for path in source.rglob("*") if path.is_file()}
    assert found == {"CMakeLists.txt", "src/a.cpp"}
    assert (source / "src/a.cpp").read_bytes() == FILES["src/a.cpp"]
    assert list(source.parent.iterdir()) == [source]


def test_does_nothing_where_the_tree_is_there(
    pin_file: Path, archive: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    materialise(pin_file, source, archive)
    before = {path: path.stat().st_mtime_ns for path in source.rglob("*")}
    monkeypatch.setattr(fetch_llama, "download", no_download)
    materialise(pin_file, source)
    assert {path: path.stat().st_mtime_ns for path in source.rglob("*")} == before


@pytest.mark.parametrize("damage", ["edited", "added", "removed"])
def test_a_tree_that_differs_is_made_anew(pin_file: Path, archive: Path, source: Path, damage: str) -> None:
    materialise(pin_file, source, archive)
    if damage == "edited":
        (source / "src/a.cpp").write_text("int b;\n")
    elif damage == "added":
        (source / "src/b.cpp").write_text("int b;\n")
    else:
        (source / "src/a.cpp").unlink()
    materialise(pin_file, source, archive)
    assert tree_digest(source) == read_pin(pin_file).tree
    assert list(source.parent.iterdir()) == [source]


def test_a_wrong_hash_names_both_and_leaves_nothing(pin_file: Path, archive: Path, source: Path) -> None:
    recorded = read_pin(pin_file).sha256
    archive.write_bytes(archive.read_bytes() + b"\0")
    found = hashlib.sha256(archive.read_bytes()).hexdigest()
    with pytest.raises(SourceError) as caught:
        materialise(pin_file, source, archive)
    assert recorded in str(caught.value)
    assert found in str(caught.value)
    assert archive.name in str(caught.value)
    assert list(source.parent.iterdir()) == []


def test_a_wrong_tree_names_both_and_keeps_the_old_one(pin_file: Path, archive: Path, source: Path) -> None:
    source.mkdir(parents=True)
    (source / "old").write_text("old")
    right = read_pin(pin_file).tree
    write_pin(pin_file, archive, tree="0" * 64)
    with pytest.raises(SourceError, match=right) as caught:
        materialise(pin_file, source, archive)
    assert "0" * 64 in str(caught.value)
    assert (source / "old").read_text() == "old"
    assert list(source.parent.iterdir()) == [source]


def test_a_missing_file_is_named(tmp_path: Path, archive: Path, source: Path) -> None:
    pin_file = write_pin(tmp_path / "PIN", archive, include="CMakeLists.txt src include/llama.h")
    with pytest.raises(SourceError, match="include/llama\\.h"):
        materialise(pin_file, source, archive)
    assert not source.exists()


def test_a_missing_archive_is_named(pin_file: Path, tmp_path: Path, source: Path) -> None:
    with pytest.raises(SourceError, match=r"gone\.tar\.gz"):
        materialise(pin_file, source, tmp_path / "gone.tar.gz")


@pytest.mark.parametrize("key", ["package", "sha256", "tree", "include"])
def test_a_missing_key_of_the_pin_is_named(pin_file: Path, key: str) -> None:
    lines = pin_file.read_text().splitlines()
    pin_file.write_text("\n".join(line for line in lines if not line.startswith(key)))
    with pytest.raises(SourceError, match=key):
        read_pin(pin_file)


def link(name: str, kind: bytes, target: str) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type = kind
    member.linkname = target
    return member


@pytest.mark.parametrize(
    "member",
    [
        tarfile.TarInfo(f"{ROOT}/../../escaped"),
        tarfile.TarInfo(f"{ROOT}/src/../../../escaped"),
        tarfile.TarInfo("/tmp/escaped"),
        tarfile.TarInfo(f"{ROOT}/src\\..\\escaped"),
        link(f"{ROOT}/src/link", tarfile.SYMTYPE, "/etc/passwd"),
        link(f"{ROOT}/src/hard", tarfile.LNKTYPE, "../../../escaped"),
        link(f"{ROOT}/src/device", tarfile.CHRTYPE, ""),
    ],
    ids=["up", "up-inside", "absolute", "backslash", "symlink", "hardlink", "device"],
)
def test_a_member_that_could_leave_the_folder_is_refused(tmp_path: Path, source: Path, member: tarfile.TarInfo) -> None:
    archive = make_archive(tmp_path / "bad.tar.gz", FILES, member)
    pin_file = write_pin(tmp_path / "PIN", archive)
    with pytest.raises(SourceError, match="bad"):
        materialise(pin_file, source, archive)
    assert not source.exists()
    assert not (tmp_path / "escaped").exists()


class FakePip:
    """Stands in for subprocess.run: answers `pip --version` and `pip download`."""

    def __init__(self, version: int, download: int, archive: Path | None = None) -> None:
        self.codes = {"--version": version, "download": download}
        self.archive = archive
        self.calls: list[list[str]] = []

    def __call__(self, command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        self.calls.append(command)
        if command[3] == "download" and self.archive:
            shutil.copy(self.archive, command[command.index("--dest") + 1])
        return subprocess.CompletedProcess(command, self.codes[command[3]], "", "No matching distribution found")


def test_downloads_by_name_with_the_pip_of_this_interpreter(
    pin_file: Path, archive: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pip = FakePip(0, 0, archive)
    monkeypatch.setattr("fetch_llama.subprocess.run", pip)
    materialise(pin_file, source)
    assert pip.calls[-1][:4] == [sys.executable, "-m", "pip", "download"]
    assert pip.calls[-1][-1] == "thing==1.0"
    assert tree_digest(source) == read_pin(pin_file).tree


def test_without_pip_it_says_so(pin_file: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fetch_llama.subprocess.run", FakePip(1, 0))
    with pytest.raises(SourceError, match=r"pip.*install pip"):
        materialise(pin_file, source)


def test_without_an_index_it_repeats_what_pip_said(
    pin_file: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fetch_llama.subprocess.run", FakePip(0, 1))
    with pytest.raises(SourceError, match=r"(?s)thing==1\.0.*No matching distribution found"):
        materialise(pin_file, source)


def test_the_command_line_fails_in_one_paragraph(tmp_path: Path) -> None:
    script = REPOSITORY / "cmake" / "fetch_llama.py"
    wrong = tmp_path / "wrong.tar.gz"
    wrong.write_bytes(b"wrong")
    copy = tmp_path / "repository" / "cmake" / script.name
    copy.parent.mkdir(parents=True)
    shutil.copy(script, copy)
    (copy.parent.parent / "vendor" / "llama.cpp").mkdir(parents=True)
    shutil.copy(PIN_FILE, copy.parent.parent / "vendor" / "llama.cpp" / "PIN")
    result = subprocess.run(
        [sys.executable, copy, "--archive", wrong], capture_output=True, text=True, check=False, timeout=30
    )
    assert result.returncode == 1
    assert result.stderr.startswith("pyllamacache: wrong.tar.gz has the SHA-256")
    assert "Traceback" not in result.stderr


def test_the_pin_itself_is_complete() -> None:
    pin = read_pin(PIN_FILE)
    assert len(pin.sha256) == len(pin.tree) == 64
    assert pin.takes("src/llama.cpp")
    assert not pin.takes("tools/mtmd/tests/x")
    assert not pin.takes("srcs/llama.cpp")


def test_the_tree_that_git_ignores_is_named_for_the_source_distribution() -> None:
    assert "/vendor/llama.cpp/source/\n" in (REPOSITORY / ".gitignore").read_text()
    assert 'sdist.include = ["vendor/llama.cpp/source"]' in (REPOSITORY / "pyproject.toml").read_text()
