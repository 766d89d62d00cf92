"""The patch series: order, failures, what is left behind, and what each patch carries."""

from __future__ import annotations

import os
import re
import shutil
from datetime import date
from pathlib import Path

import apply_patches
import pytest
from apply_patches import PATCHES, REQUIRED_FIELDS, PatchError, Series, header, prepare, read_series
from fetch_llama import PIN_FILE, Pin, SourceError, read_pin, tree_files

PIN = Pin("thing", "1.0", "", "b1", "", "", ("CMakeLists.txt", "include", "ggml", "common", "src"), ("src/tests",))
PROGRAMS = [name for name in ("git", "patch") if shutil.which(name)]


def body(path: str, line: int, old: str, new: str) -> str:
    """A patch that replaces one line."""
    return f"--- a/{path}\n+++ b/{path}\n@@ -{line} +{line} @@\n-{old}\n+{new}\n"


ONE_TO_TWO = body("src/a.cpp", 1, "one", "two")
TWO_TO_THREE = body("src/a.cpp", 1, "two", "three")
NEW_FILE = "--- /dev/null\n+++ b/src/new.cpp\n@@ -0,0 +1 @@\n+new\n"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A tree with the files that make it one of llama.cpp, and two sources."""
    source = tmp_path / "source"
    files = {
        "src/a.cpp": "one\n",
        "src/b.cpp": "b\n",
        "src/tests/skipped": "",
        "docs/skipped": "",
        "CMakeLists.txt": "",
        "include/llama.h": "",
        "ggml/CMakeLists.txt": "",
        "common/CMakeLists.txt": "",
    }
    for name, content in files.items():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(content)
    return source


@pytest.fixture
def patches(tmp_path: Path) -> Path:
    folder = tmp_path / "patches"
    folder.mkdir()
    (folder / "series").write_text("")
    return folder


def write(patches: Path, **contents: str) -> Series:
    """Put patches there under these names, listed in this order."""
    for name, content in contents.items():
        (patches / f"{name}.patch").write_text(content)
    (patches / "series").write_text("# order\n\n" + "".join(f"{name}.patch\n" for name in contents))
    return read_series(patches, "b1", b"pin")


def content(folder: Path) -> dict[str, str]:
    files = {path.relative_to(folder).as_posix(): path.read_text() for path in tree_files(folder)}
    files.pop(apply_patches.STAMP, None)
    return files


def times(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in tree_files(folder)}


@pytest.fixture(params=PROGRAMS)
def program(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each program that can apply a patch here, with the other one hidden."""
    found = shutil.which(request.param)
    monkeypatch.setattr("apply_patches.shutil.which", lambda name: found if name == request.param else None)
    return str(request.param)


@pytest.mark.usefixtures("program")
class TestApplying:
    def test_an_empty_series_copies_what_the_pin_takes(self, source: Path, patches: Path, tmp_path: Path) -> None:
        assert prepare(source, tmp_path / "copy", write(patches), PIN)
        assert content(tmp_path / "copy") == {k: v for k, v in content(source).items() if "skipped" not in k}

    def test_patches_are_applied_in_the_order_of_the_series(self, source: Path, patches: Path, tmp_path: Path) -> None:
        series = write(patches, zz=ONE_TO_TWO, aa=TWO_TO_THREE, new=NEW_FILE)
        prepare(source, tmp_path / "copy", series, PIN)
        assert (tmp_path / "copy/src/a.cpp").read_text() == "three\n"
        assert (tmp_path / "copy/src/new.cpp").read_text() == "new\n"
        assert (source / "src/a.cpp").read_text() == "one\n"

    def test_a_patch_that_does_not_apply_is_named_with_its_file(
        self, source: Path, patches: Path, tmp_path: Path
    ) -> None:
        with pytest.raises(PatchError, match=r"(?s)bad\.patch.*src/b\.cpp"):
            prepare(source, tmp_path / "copy", write(patches, good=ONE_TO_TWO, bad=body("src/b.cpp", 1, "x", "y")), PIN)
        assert not (tmp_path / "copy").exists()

    def test_a_patch_to_a_missing_file_is_named(self, source: Path, patches: Path, tmp_path: Path) -> None:
        with pytest.raises(PatchError, match=r"(?s)bad\.patch.*gone\.cpp"):
            prepare(source, tmp_path / "copy", write(patches, bad=body("src/gone.cpp", 1, "x", "y")), PIN)

    def test_a_failing_series_keeps_the_last_good_copy(self, source: Path, patches: Path, tmp_path: Path) -> None:
        good = write(patches, good=ONE_TO_TWO)
        prepare(source, tmp_path / "copy", good, PIN)
        before = content(tmp_path / "copy"), times(tmp_path / "copy")
        with pytest.raises(PatchError):
            prepare(source, tmp_path / "copy", write(patches, good=ONE_TO_TWO, new=NEW_FILE, bad=ONE_TO_TWO), PIN)
        assert (content(tmp_path / "copy"), times(tmp_path / "copy")) == before
        assert {path.name for path in tmp_path.iterdir()} == {"source", "patches", "copy"}
        assert not prepare(source, tmp_path / "copy", good, PIN)

    def test_only_what_a_new_patch_touches_gets_a_new_time(self, source: Path, patches: Path, tmp_path: Path) -> None:
        copy = tmp_path / "copy"
        prepare(source, copy, write(patches, first=NEW_FILE), PIN)
        for path in tree_files(copy):
            os.utime(path, (1, 1))
        prepare(source, copy, write(patches, first=NEW_FILE, second=ONE_TO_TWO), PIN)
        changed = {path.relative_to(copy).as_posix() for path, time in times(copy).items() if time != 1_000_000_000}
        assert changed == {"src/a.cpp", apply_patches.STAMP}

    def test_a_dropped_patch_is_undone(self, source: Path, patches: Path, tmp_path: Path) -> None:
        prepare(source, tmp_path / "copy", write(patches, new=NEW_FILE, a=ONE_TO_TWO), PIN)
        prepare(source, tmp_path / "copy", write(patches), PIN)
        assert not (tmp_path / "copy/src/new.cpp").exists()
        assert (tmp_path / "copy/src/a.cpp").read_text() == "one\n"

    def test_the_same_series_again_touches_nothing(self, source: Path, patches: Path, tmp_path: Path) -> None:
        series = write(patches, a=ONE_TO_TWO)
        prepare(source, tmp_path / "copy", series, PIN)
        before = times(tmp_path / "copy")
        assert not prepare(source, tmp_path / "copy", series, PIN)
        assert times(tmp_path / "copy") == before

    def test_a_copy_left_half_moved_is_finished(self, source: Path, patches: Path, tmp_path: Path) -> None:
        series = write(patches, a=ONE_TO_TWO)
        prepare(source, tmp_path / "copy", series, PIN)
        (tmp_path / "copy" / apply_patches.STAMP).unlink()
        (tmp_path / "copy/src/a.cpp").write_text("one\n")
        prepare(source, tmp_path / "copy", series, PIN)
        assert (tmp_path / "copy/src/a.cpp").read_text() == "two\n"

    def test_a_hunk_is_not_placed_where_its_context_differs(self, source: Path, patches: Path, tmp_path: Path) -> None:
        (source / "src/a.cpp").write_text("x\nother\none\nz\n")
        fuzzy = "--- a/src/a.cpp\n+++ b/src/a.cpp\n@@ -1,4 +1,4 @@\n x\n y\n-one\n+two\n z\n"
        with pytest.raises(PatchError, match=r"fuzzy\.patch"):
            prepare(source, tmp_path / "copy", write(patches, fuzzy=fuzzy), PIN)


def test_inside_another_repository_the_patch_still_arrives(
    source: Path, patches: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a subfolder of a repository, git apply takes paths from its top and skips all others without a word."""
    monkeypatch.setenv("GIT_DIR", str(tmp_path / ".git"))
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "HEAD").write_text("ref: refs/heads/main\n")
    for folder in ("objects", "refs"):
        (tmp_path / ".git" / folder).mkdir()
    prepare(source, tmp_path / "build" / "copy", write(patches, a=ONE_TO_TWO), PIN)
    assert (tmp_path / "build/copy/src/a.cpp").read_text() == "two\n"


def test_without_git_and_patch_it_says_what_to_install(
    source: Path, patches: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("apply_patches.shutil.which", lambda _: None)
    with pytest.raises(PatchError, match="git nor patch"):
        prepare(source, tmp_path / "copy", write(patches, a=ONE_TO_TWO), PIN)


def test_a_name_without_a_file_is_refused(patches: Path) -> None:
    (patches / "series").write_text("gone.patch\n")
    with pytest.raises(PatchError, match=r"gone\.patch"):
        read_series(patches, "b1", b"pin")


def test_a_folder_that_is_not_llama_cpp_is_refused(source: Path, patches: Path, tmp_path: Path) -> None:
    (source / "include/llama.h").unlink()
    with pytest.raises(SourceError, match="include/llama\\.h is missing"):
        prepare(source, tmp_path / "copy", write(patches), PIN)


def test_the_digest_changes_with_each_input(patches: Path) -> None:
    base = write(patches, a=ONE_TO_TWO, b=NEW_FILE)
    digests = {
        base.digest,
        read_series(patches, "b1", b"other pin").digest,
        write(patches, b=NEW_FILE, a=ONE_TO_TWO).digest,
        write(patches, a=ONE_TO_TWO).digest,
        write(patches, a=ONE_TO_TWO, b=NEW_FILE + "\n").digest,
        write(patches, a=ONE_TO_TWO, c=NEW_FILE).digest,
    }
    assert len(digests) == 6
    assert write(patches, a=ONE_TO_TWO, b=NEW_FILE).digest == base.digest


def test_an_edit_in_a_checkout_is_seen(source: Path) -> None:
    before = apply_patches.tree_digest_of_checkout(source, PIN)
    (source / "docs/skipped").write_text("not built")
    assert apply_patches.tree_digest_of_checkout(source, PIN) == before
    (source / "src/b.cpp").write_text("edited\n")
    assert apply_patches.tree_digest_of_checkout(source, PIN) != before


def test_the_facts_are_what_cmake_reads(patches: Path) -> None:
    series = write(patches, a=ONE_TO_TWO, b=NEW_FILE)
    assert apply_patches.describe(series).splitlines() == [
        'set(PLC_LLAMA_TAG "b1")',
        f'set(PLC_SOURCE_DIGEST "{series.digest}")',
        'set(PLC_PATCHES "a.patch,b.patch")',
    ]


# --- Our own series ---------------------------------------------------------------------------------------------------

SERIES = read_series(PATCHES, "", PIN_FILE.read_bytes())


def test_series_and_folder_agree() -> None:
    assert sorted(SERIES.names) == sorted(path.name for path in PATCHES.glob("*.patch"))
    assert len(set(SERIES.names)) == len(SERIES.names)
    others = {path.name for path in PATCHES.iterdir() if path.suffix != ".patch"}
    assert others == {"series", "README.md"}


@pytest.mark.parametrize("patch", SERIES.patches, ids=lambda patch: patch.stem)
def test_every_patch_says_where_it_comes_from_and_when_it_goes(patch: Path) -> None:
    fields = header(patch)
    assert [name for name in REQUIRED_FIELDS if not fields.get(name)] == []
    assert set(fields) == set(REQUIRED_FIELDS)
    assert date.fromisoformat(fields["Last-Update"])
    assert re.fullmatch(r"[a-z][a-z0-9-]*", patch.stem)


@pytest.mark.parametrize("patch", SERIES.patches, ids=lambda patch: patch.stem)
def test_every_patch_touches_only_files_that_are_taken(patch: Path) -> None:
    touched = re.findall(r"^\+\+\+ b/(\S+)", patch.read_text(encoding="utf-8"), re.MULTILINE)
    assert touched
    assert [path for path in touched if not read_pin(PIN_FILE).takes(path)] == []
