"""Put the pinned llama.cpp sources into vendor/llama.cpp/source, or say what is missing.

Knows the pin and the archive it names; knows nothing of patches or of the build. Needs only the standard library.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

REPOSITORY = Path(__file__).resolve().parent.parent
PIN_FILE = REPOSITORY / "vendor" / "llama.cpp" / "PIN"
SOURCE = PIN_FILE.parent / "source"


class SourceError(Exception):
    """The sources cannot be prepared; the message names what is wrong and what to do."""


@dataclass(frozen=True)
class Pin:
    """One reading of the PIN file."""

    package: str
    version: str
    sha256: str
    tag: str
    root: str
    tree: str
    include: tuple[str, ...]
    exclude: tuple[str, ...]

    def takes(self, path: str) -> bool:
        """Whether a path inside llama.cpp (with forward slashes) is among those needed."""
        return _under(path, self.include) and not _under(path, self.exclude)


def _under(path: str, folders: tuple[str, ...]) -> bool:
    return any(path == folder or path.startswith(folder + "/") for folder in folders)


def read_pin(pin_file: Path) -> Pin:
    """Read a PIN file; raises SourceError naming the file and the missing key."""
    fields = {}
    for line in pin_file.read_text(encoding="utf-8").splitlines():
        if line.strip() and not line.startswith("#"):
            key, _, value = line.partition("=")
            fields[key.strip()] = value.strip()
    try:
        return Pin(
            package=fields["package"],
            version=fields["version"],
            sha256=fields["sha256"],
            tag=fields["tag"],
            root=fields["root"],
            tree=fields["tree"],
            include=tuple(fields["include"].split()),
            exclude=tuple(fields["exclude"].split()),
        )
    except KeyError as missing:
        raise SourceError(f"{pin_file}: the key {missing} is missing") from None


def tree_files(folder: Path) -> list[Path]:
    """All files below a folder in a fixed order."""
    return sorted(path for path in folder.rglob("*") if path.is_file())


def tree_digest(folder: Path) -> str:
    """SHA-256 over the relative names and the contents of all files below a folder."""
    digest = hashlib.sha256()
    for path in tree_files(folder):
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        digest.update(f"{content}  {path.relative_to(folder).as_posix()}\n".encode())
    return digest.hexdigest()


def download(pin: Pin, folder: Path) -> Path:
    """Fetch the archive by name through pip as the user has configured it; returns its path."""
    requirement = f"{pin.package}=={pin.version}"
    arguments = ["download", "--no-deps", "--no-binary", pin.package, "--dest", str(folder), requirement]
    pip = [sys.executable, "-m", "pip"]
    if subprocess.run([*pip, "--version"], capture_output=True, check=False).returncode != 0:
        raise SourceError(
            f"the llama.cpp sources ({requirement}) are fetched with pip, and {sys.executable} has none: install pip, "
            "build with isolation, install from our own source distribution, or set PYLLAMACACHE_LLAMA_DIR"
        )
    print(f"pyllamacache: fetching llama.cpp {pin.tag} ({requirement})", flush=True)
    result = subprocess.run([*pip, *arguments], capture_output=True, text=True, check=False)
    archives = list(folder.glob("*.tar.gz"))
    if result.returncode != 0 or len(archives) != 1:
        tail = "\n".join((result.stdout + result.stderr).strip().splitlines()[-15:])
        raise SourceError(
            f"pip could not download the source distribution {requirement}: is the package index reachable and "
            "configured for pip? Without a network, install from our own source distribution, or set "
            f"PYLLAMACACHE_LLAMA_DIR to a llama.cpp checkout at {pin.tag}. pip said:\n{tail}"
        )
    return archives[0]


def check_archive(archive: Path, pin: Pin) -> None:
    """Raise SourceError unless the archive has the recorded SHA-256."""
    if not archive.is_file():
        raise SourceError(f"the archive {archive} does not exist")
    found = hashlib.sha256(archive.read_bytes()).hexdigest()
    if found != pin.sha256:
        raise SourceError(f"{archive.name} has the SHA-256 {found}, but PIN records {pin.sha256}: it is not used")


def extract(archive: Path, pin: Pin, target: Path) -> None:
    """Write the needed files below `target`; links, devices and paths that leave it are refused."""
    taken: set[str] = set()
    with tarfile.open(archive, "r:gz") as tar:
        for member in tar:
            parts = PurePosixPath(member.name)
            if parts.is_absolute() or ".." in parts.parts or "\\" in member.name:
                raise SourceError(f"{archive.name} holds the path {member.name!r}, which leaves its folder")
            if not parts.is_relative_to(pin.root):
                continue
            path = parts.relative_to(pin.root).as_posix()
            if member.isdir() or not pin.takes(path):
                continue
            content = tar.extractfile(member) if member.isreg() else None
            if content is None:
                raise SourceError(f"{archive.name} holds {member.name!r}, which is not a plain file")
            place = target / path
            place.parent.mkdir(parents=True, exist_ok=True)
            with content, place.open("wb") as file:
                shutil.copyfileobj(content, file)
            taken.add(path)
    for wanted in pin.include:
        if not any(_under(path, (wanted,)) for path in taken):
            raise SourceError(f"{archive.name} lacks {pin.root}/{wanted}, which the build needs")


def materialise(pin_file: Path, source: Path, archive: Path | None = None) -> None:
    """Make `source` the pinned tree; does nothing where it already is, and never leaves half of it."""
    pin = read_pin(pin_file)
    if source.is_dir():
        if tree_digest(source) == pin.tree:
            return
        print(f"pyllamacache: {source} is not the tree that PIN records; making it anew", flush=True)
    source.parent.mkdir(parents=True, exist_ok=True)
    # Beside the target: only within one file system is the rename at the end atomic.
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=source.parent) as scratch:
        archive = archive or download(pin, Path(scratch))
        check_archive(archive, pin)
        fresh = Path(scratch) / "tree"
        extract(archive, pin, fresh)
        found = tree_digest(fresh)
        if found != pin.tree:
            raise SourceError(f"the tree taken from {archive.name} has the digest {found}, but PIN records {pin.tree}")
        if source.exists():
            os.replace(source, Path(scratch) / "old")
        try:
            os.replace(fresh, source)
        except OSError:
            # A build in the same checkout was faster; its tree is as good as ours.
            if tree_digest(source) != pin.tree:
                raise


def main() -> int:
    """Command line used by CMakeLists.txt; failures go to stderr in one paragraph."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--archive", type=Path, help="use this source distribution instead of downloading it")
    arguments = parser.parse_args()
    try:
        materialise(PIN_FILE, SOURCE, arguments.archive)
    except (SourceError, OSError, tarfile.TarError) as error:
        print(f"pyllamacache: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
