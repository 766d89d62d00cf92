"""What importing the package costs and needs: nothing that is compiled, until something compiled is used."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
PURE_ROOMS = ["errors", "config", "request", "prefix", "text", "store", "observe", "scheduler"]

IMPORT_EVERY_MODULE_OF = """
    import importlib, pkgutil

    def import_all(name):
        room = importlib.import_module(name)
        for each in pkgutil.walk_packages(getattr(room, "__path__", []), name + "."):
            importlib.import_module(each.name)
"""

BLOCK_THE_EXTENSION = """
    import sys

    class Blocked:
        def find_spec(self, name, path=None, target=None):
            if name.startswith("pyllamacache.native") or name.split(".")[0] in ("cffi", "_cffi_backend"):
                raise ImportError(f"{name} was asked for")

    sys.meta_path.insert(0, Blocked())
"""


def run(*parts: str) -> str:
    """Run the parts as one program in a fresh interpreter of this environment; returns what it printed.

    Not from the checkout's root, where the folder without the compiled module would be found first.
    """
    program = "\n".join(textwrap.dedent(part) for part in parts)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, cwd=HERE, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def loaded_after(statement: str) -> set[str]:
    return set(run(statement, "import sys", "print(*sys.modules)").split())


def test_importing_the_package_loads_nothing_heavy() -> None:
    loaded = loaded_after("import pyllamacache")
    assert "pyllamacache" in loaded
    assert not loaded & {"pyllamacache.native", "pyllamacache.native._lib", "cffi", "_cffi_backend"}
    assert not loaded & {"numpy", "huggingface_hub", "safetensors", "tqdm", "asyncio"}


@pytest.mark.parametrize("room", PURE_ROOMS)
def test_a_pure_room_imports_without_the_extension(room: str) -> None:
    run(BLOCK_THE_EXTENSION, IMPORT_EVERY_MODULE_OF, f"import_all('pyllamacache.{room}')")


def test_the_block_is_one() -> None:
    """Or the tests above prove nothing."""
    blocked = "try:\n    import pyllamacache.native\nexcept ImportError:\n    print('blocked')"
    assert run(BLOCK_THE_EXTENSION, blocked).strip() == "blocked"


def test_every_exported_name_resolves() -> None:
    run("import pyllamacache", "for name in pyllamacache.__all__: getattr(pyllamacache, name)")


def test_exported_names_are_listed_before_they_are_loaded() -> None:
    run("import pyllamacache", "assert set(pyllamacache.__all__) <= set(dir(pyllamacache))")


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    run(
        "import pyllamacache",
        "try:\n    pyllamacache.no_such_name\nexcept AttributeError as error:\n    assert 'no_such_name' in str(error)",
        "else:\n    raise SystemExit('no AttributeError')",
    )
