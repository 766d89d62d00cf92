"""Make the patched copy of llama.cpp that the build compiles.

Applies patches/series to a scratch copy, then moves over only the files whose content differs, so that a new patch
recompiles what it touches and nothing else. A series that does not apply leaves the copy of the last good one.
"""

from __future__ import annotations

import argparse
import filecmp
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from fetch_llama import PIN_FILE, REPOSITORY, SOURCE, Pin, SourceError, read_pin, tree_digest, tree_files

PATCHES = REPOSITORY / "patches"
REQUIRED_FIELDS = ("Description", "Origin", "Forwarded", "Last-Update", "Remove-When")
STAMP = ".patched"


class PatchError(SourceError):
    """The series cannot be read or applied; the message names the patch."""


@dataclass(frozen=True)
class Series:
    """What goes into the build: where the sources come from, and the patches in their order."""

    tag: str
    origin: bytes
    order: bytes
    patches: tuple[Path, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(patch.name for patch in self.patches)

    @property
    def digest(self) -> str:
        """SHA-256 over pin, series and patches: one name for the exact sources of a build."""
        digest = hashlib.sha256()
        parts = [("pin", self.origin), ("series", self.order), *((p.name, p.read_bytes()) for p in self.patches)]
        for name, content in parts:
            digest.update(f"{name} {len(content)}\n".encode() + content)
        return digest.hexdigest()


def read_series(patches: Path, tag: str, origin: bytes) -> Series:
    """Read patches/series; raises PatchError for a name without a file."""
    order = (patches / "series").read_bytes()
    lines = (line.strip() for line in order.decode().splitlines())
    files = tuple(patches / line for line in lines if line and not line.startswith("#"))
    for file in files:
        if not file.is_file():
            raise PatchError(f"patches/series names {file.name}, but there is no such file in {patches}")
    return Series(tag, origin, order, files)


def header(patch: Path) -> dict[str, str]:
    """The fields above the first hunk; lines that begin with a space continue the field before."""
    fields: dict[str, str] = {}
    name = ""
    for line in patch.read_text(encoding="utf-8").splitlines():
        if line.startswith(("diff ", "--- ", "Index: ")):
            break
        if line.startswith(" "):
            fields[name] = f"{fields.get(name, '')}\n{line.strip()}".strip()
        elif ":" in line:
            name, value = line.split(":", 1)
            fields[name] = value.strip()
    return fields


def patch_command() -> list[str]:
    """The program that applies a patch from its standard input: git where it is there, else patch."""
    # Neither may guess: git apply knows no fuzz, and patch is told to use none.
    if shutil.which("git"):
        return ["git", "apply", "--whitespace=nowarn", "-p1", "-"]
    if shutil.which("patch"):
        return ["patch", "-p1", "-F0", "-N", "-f", "-s"]
    raise PatchError("neither git nor patch is installed, and one of them is needed to apply patches/: install one")


def apply(patch: Path, tree: Path) -> None:
    """Apply one patch to a tree; raises PatchError with what the program said, which names file and hunk."""
    # The ceiling keeps git from taking an outer repository for the tree's own (it would skip every file in silence),
    # and its configuration files could rewrite line ends.
    environment = os.environ | {
        "GIT_CEILING_DIRECTORIES": str(tree.resolve().parent),
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_CONFIG_NOSYSTEM": "1",
    }
    for variable in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX"):
        environment.pop(variable, None)
    command = patch_command()
    result = subprocess.run(
        command, cwd=tree, env=environment, input=patch.read_bytes(), capture_output=True, check=False
    )
    if result.returncode != 0:
        said = (result.stdout + result.stderr).decode(errors="replace").strip()
        raise PatchError(f"the patch {patch.name} does not apply. {command[0]} said:\n{said}")


def copy(source: Path, target: Path, pin: Pin) -> None:
    """Copy the needed files; a checkout may hold much else, and may lack what its version does not have."""
    for name in ("CMakeLists.txt", "include/llama.h", "ggml/CMakeLists.txt", "common/CMakeLists.txt"):
        if not (source / name).is_file():
            raise SourceError(f"{source} is not a llama.cpp source tree: {name} is missing")
    for wanted in pin.include:
        place = source / wanted
        for file in tree_files(place) if place.is_dir() else [place]:
            path = file.relative_to(source)
            if file.is_file() and pin.takes(path.as_posix()):
                (target / path.parent).mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, target / path)


def move_over(fresh: Path, target: Path) -> None:
    """Make `target` equal to `fresh`, leaving alone every file that already is."""
    target.mkdir(parents=True, exist_ok=True)
    (target / STAMP).unlink(missing_ok=True)
    wanted = {file.relative_to(fresh) for file in tree_files(fresh)}
    for file in tree_files(target):
        if file.relative_to(target) not in wanted:
            file.unlink()
    for path in sorted(wanted):
        place = target / path
        if not place.is_file() or not filecmp.cmp(fresh / path, place, shallow=False):
            place.parent.mkdir(parents=True, exist_ok=True)
            os.replace(fresh / path, place)


def prepare(source: Path, target: Path, series: Series, pin: Pin) -> bool:
    """Make `target` the patched copy of `source`; returns whether anything had to be done."""
    stamp = target / STAMP
    if stamp.is_file() and stamp.read_text(encoding="ascii") == series.digest:
        return False
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".patching-", dir=target.parent) as scratch:
        fresh = Path(scratch) / "tree"
        copy(source, fresh, pin)
        for patch in series.patches:
            apply(patch, fresh)
        # Written by patch where a hunk applies at an offset.
        for leftover in fresh.rglob("*.orig"):
            leftover.unlink()
        move_over(fresh, target)
    stamp.write_text(series.digest, encoding="ascii")
    return True


def describe(series: Series) -> str:
    """The facts that CMakeLists.txt compiles in."""
    lines = {"PLC_LLAMA_TAG": series.tag, "PLC_SOURCE_DIGEST": series.digest, "PLC_PATCHES": ",".join(series.names)}
    return "".join(f'set({name} "{value}")\n' for name, value in lines.items())


def main() -> int:
    """Command line used by CMakeLists.txt; failures go to stderr in one paragraph."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, required=True, help="folder of the patched copy")
    parser.add_argument("--checkout", type=Path, help="take llama.cpp from here instead of vendor/llama.cpp/source")
    parser.add_argument("--facts", type=Path, help="write what the build compiles in as a CMake file")
    arguments = parser.parse_args()
    try:
        pin = read_pin(PIN_FILE)
        if arguments.checkout:
            tag, origin = "checkout", f"checkout {tree_digest_of_checkout(arguments.checkout, pin)}".encode()
        else:
            tag, origin = pin.tag, PIN_FILE.read_bytes()
        series = read_series(PATCHES, tag, origin)
        prepare(arguments.checkout or SOURCE, arguments.target, series, pin)
        if arguments.facts:
            arguments.facts.write_text(describe(series), encoding="utf-8")
    except (SourceError, OSError) as error:
        print(f"pyllamacache: {error}", file=sys.stderr)
        return 1
    return 0


def tree_digest_of_checkout(checkout: Path, pin: Pin) -> str:
    """SHA-256 over what the build takes from a checkout, so that an edit in it is seen."""
    with tempfile.TemporaryDirectory(prefix="pyllamacache-") as scratch:
        copy(checkout, Path(scratch), pin)
        return tree_digest(Path(scratch))


if __name__ == "__main__":
    sys.exit(main())
