"""Builds of the capture driver: a folder per flavour in the user's cache, brought up to date before use.

The sources are copied there first, so that clones share what they do not change; shaders take minutes to compile.
"""

from __future__ import annotations

import ctypes.util
import fcntl
import filecmp
import hashlib
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from apply_patches import PATCHES, prepare, read_series
from fetch_llama import PIN_FILE, REPOSITORY, SOURCE, materialise, read_pin, tree_digest

from pyllamacache.store.fingerprint import user_cache_dir

HERE = Path(__file__).parent
NEWER_DEBIAN = {"bookworm": "trixie"}  # whose headers ggml's Vulkan backend needs
NEEDED_HEADERS = 309  # the patch level of 1.4 that is known to compile


class Unavailable(Exception):
    """This machine cannot build or run a flavour; the message says what it lacks."""


@dataclass(frozen=True)
class Flavour:
    """One way to compile llama.cpp and the driver."""

    name: str
    sanitizer: str = ""
    vulkan: bool = False


VULKAN = Flavour("vulkan", vulkan=True)
ADDRESS = Flavour("address", sanitizer="address")
THREAD = Flavour("thread", sanitizer="thread")
THREAD_VULKAN = Flavour("thread-vulkan", sanitizer="thread", vulkan=True)


def thread_flavour() -> Flavour:
    """The build for ThreadSanitizer: one serves CPU and device where Vulkan can be had."""
    try:
        vulkan_options(user_cache_dir() / "device")
    except Unavailable:
        return THREAD
    return THREAD_VULKAN


def build(flavour: Flavour) -> Path:
    """The driver of a flavour, compiled from the present sources. Raises Unavailable, or RuntimeError with the log."""
    if not shutil.which("cmake") or not (shutil.which("c++") or shutil.which("g++")):
        raise Unavailable("cmake and a C++ compiler are needed to build the driver")
    cache = user_cache_dir() / "device"
    cache.mkdir(parents=True, exist_ok=True)
    options = vulkan_options(cache) if flavour.vulkan else []
    environment = dict(os.environ)
    with locked(cache / "lock"):
        materialise(PIN_FILE, SOURCE)
        series = read_series(PATCHES, read_pin(PIN_FILE).tag, PIN_FILE.read_bytes())
        prepare(SOURCE, cache / "llama.cpp", series, read_pin(PIN_FILE))
        for file in (
            *HERE.glob("*.cpp"),
            HERE / "glslc",
            HERE / "CMakeLists.txt",
            *(REPOSITORY / "cmake").glob("*.cmake"),
        ):
            copy_if_changed(file, cache / file.relative_to(REPOSITORY))
        if flavour.vulkan:
            environment["GLSLC_STORE"] = str(shader_store(cache))
            options.append(f"-DVulkan_GLSLC_EXECUTABLE={cache / (HERE / 'glslc').relative_to(REPOSITORY)}")
        folder = cache / f"build-{flavour.name}"
        drop_if_orphaned(folder)
        generator = ["-G", "Ninja"] if shutil.which("ninja") else []
        configure = ["cmake", *generator, "-S", str(cache / HERE.relative_to(REPOSITORY)), "-B", str(folder)]
        configure += [f"-DLLAMA_DIR={cache / 'llama.cpp'}", f"-DDRIVER_SANITIZER={flavour.sanitizer}", *options]
        log = cache / f"build-{flavour.name}.log"
        run_logged(configure, log, environment)
        run_logged(["cmake", "--build", str(folder), "--parallel", str(os.cpu_count() or 1)], log, environment)
        return folder / "capture-driver"


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """One build at a time in this folder, over processes."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def drop_if_orphaned(folder: Path) -> None:
    """Drop a build folder that names programs of a virtual environment that is gone; ccache keeps what it compiled."""
    file = folder / "CMakeCache.txt"
    text = file.read_text(encoding="utf-8") if file.is_file() else ""
    programs = re.findall(r"^CMAKE_(?:COMMAND|MAKE_PROGRAM):\w+=(.+)$", text, re.MULTILINE)
    if any(not Path(program).exists() for program in programs):
        shutil.rmtree(folder)


def copy_if_changed(source: Path, target: Path) -> None:
    if not target.is_file() or not filecmp.cmp(source, target, shallow=False):
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, target)


def shader_store(cache: Path) -> Path:
    """The folder of compiled shaders for the present sources and compiler; those of other ones are dropped."""
    version = subprocess.run(["glslc", "--version"], capture_output=True, check=True).stdout
    shaders = tree_digest(cache / "llama.cpp/ggml/src/ggml-vulkan/vulkan-shaders")
    digest = hashlib.sha256(version + shaders.encode()).hexdigest()[:16]
    for old in (cache / "shaders").glob("*"):
        if old.name != digest:
            shutil.rmtree(old)
    store = cache / "shaders" / digest
    store.mkdir(parents=True, exist_ok=True)
    return store


def run_logged(command: list[str], log: Path, environment: dict[str, str]) -> None:
    result = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False, text=True
    )
    log.write_text(result.stdout)
    if result.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed; {log} ends with:\n{result.stdout[-4000:]}")


def vulkan_options(cache: Path) -> list[str]:
    """What CMake needs to find Vulkan. Fetches newer headers on a Debian whose own are too old."""
    lavapipe_driver()
    if not shutil.which("glslc"):
        raise Unavailable("glslc is not installed; it compiles ggml's Vulkan shaders")
    library = ctypes.util.find_library("vulkan")
    if not library:
        raise Unavailable("the Vulkan loader is not installed (Debian: libvulkan1)")
    places = [Path("/usr"), Path("/usr/local"), cache / "headers" / "usr"]
    root = next((place for place in places if has_headers(place)), None) or fetch_headers(cache / "headers")
    found = sorted(Path(path) for path in ("/usr/lib", "/usr/lib64", "/lib") if Path(path).is_dir())
    paths = [path for folder in found for path in (*folder.glob(f"*/{library}"), *folder.glob(library))]
    if not paths:
        raise Unavailable(f"{library} is loadable, but lies in no usual folder")
    return [
        "-DGGML_VULKAN=ON",
        f"-DVulkan_INCLUDE_DIR={root / 'include'}",
        f"-DVulkan_LIBRARY={paths[0]}",
        f"-DSPIRV-Headers_DIR={root / 'share/cmake/SPIRV-Headers'}",
    ]


def has_headers(root: Path) -> bool:
    """Whether new enough Vulkan and SPIR-V headers lie under this prefix."""
    core = root / "include/vulkan/vulkan_core.h"
    if not core.is_file() or not (root / "share/cmake/SPIRV-Headers").is_dir():
        return False
    text = core.read_text(encoding="utf-8")
    level = re.search(r"#define VK_HEADER_VERSION (\d+)", text)
    return "VK_API_VERSION_1_4" in text and level is not None and int(level[1]) >= NEEDED_HEADERS


def fetch_headers(target: Path) -> Path:
    """Unpack the headers of the next Debian release, from the mirror that this machine uses; returns their prefix."""
    release = re.search(r"^VERSION_CODENAME=(\w+)$", Path("/etc/os-release").read_text(encoding="utf-8"), re.MULTILINE)
    newer = NEWER_DEBIAN.get(release[1]) if release else None
    if not newer or not shutil.which("apt-get"):
        raise Unavailable("Vulkan headers 1.4.309 or newer and spirv-headers are not installed")
    listed = subprocess.run(
        ["apt-get", "indextargets", "--format", "$(CODENAME) $(COMPONENT) $(REPO_URI)"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    mirror = re.search(rf"^{release[1] if release else ''} main (\S+)$", listed.stdout, re.MULTILINE)
    if not mirror:
        raise Unavailable("apt knows no mirror of this Debian release to take newer Vulkan headers from")
    with locked(target.parent / "lock"):
        if not has_headers(target / "usr"):
            unpack_headers(target, mirror[1], newer)
    return target / "usr"


def unpack_headers(target: Path, mirror: str, release: str) -> None:
    # An apt of its own: lists, cache and sources in the target folder; nothing is installed.
    apt = target / "apt"
    for folder in ("lists/partial", "cache/archives/partial", "debs"):
        (apt / folder).mkdir(parents=True, exist_ok=True)
    keyring = "/usr/share/keyrings/debian-archive-keyring.gpg"
    (apt / "sources.list").write_text(f"deb [signed-by={keyring}] {mirror} {release} main\n")
    settings = [
        f"Dir::Etc::sourcelist={apt / 'sources.list'}", "Dir::Etc::sourceparts=/dev/null",
        f"Dir::State::lists={apt / 'lists'}", f"Dir::Cache={apt / 'cache'}", "APT::Sandbox::User=root",
    ]  # fmt: skip
    options = [word for setting in settings for word in ("-o", setting)]
    for command in (["update"], ["download", "libvulkan-dev", "spirv-headers"]):
        result = subprocess.run(
            ["apt-get", "-q", *options, *command], cwd=apt / "debs", capture_output=True, text=True, check=False
        )
        if result.returncode != 0:
            raise Unavailable(f"newer Vulkan headers could not be fetched: {(result.stdout + result.stderr)[-500:]}")
    for package in (apt / "debs").glob("*.deb"):
        subprocess.run(["dpkg-deb", "-x", str(package), str(target)], check=True)
    shutil.rmtree(apt)


def lavapipe_driver() -> Path:
    """The manifest of Mesa's software driver."""
    for folder in ("/usr/share/vulkan/icd.d", "/etc/vulkan/icd.d", "/usr/local/share/vulkan/icd.d"):
        for manifest in sorted(Path(folder).glob("lvp_icd*.json")):
            return manifest
    raise Unavailable("Mesa's lavapipe is not installed (Debian: mesa-vulkan-drivers)")


def lavapipe_environment() -> dict[str, str]:
    """What makes ggml run on lavapipe and on nothing else: a device of CPU type is otherwise left out."""
    manifest = str(lavapipe_driver())
    return {"GGML_VK_VISIBLE_DEVICES": "0", "VK_DRIVER_FILES": manifest, "VK_ICD_FILENAMES": manifest}
