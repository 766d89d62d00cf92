"""Holds the package's imports to the table in pyllamacache/README.md, which is the only place they are written down."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "pyllamacache"
README = (PACKAGE / "README.md").read_text(encoding="utf-8")
NATIVE_NAMES = {"ffi", "_ffi", "_lib", "cffi"}
LOCKS = {"Lock", "RLock", "Condition", "Event", "Semaphore", "BoundedSemaphore", "Barrier"}


# ---- the table -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Allowance:
    """What a cell of the table allows: names, each for typing only or not; `everything` less `names` if set."""

    names: dict[str, bool]
    everything: bool = False

    def covers(self, name: str, *, for_typing: bool) -> bool:
        """`scheduler.backend` is covered by an entry for itself or for `scheduler`."""
        parts = name.split(".")
        entries = [".".join(parts[:n]) for n in range(1, len(parts) + 1)]
        if self.everything:
            return not any(entry in self.names for entry in entries)
        return any(entry in self.names and (for_typing or not self.names[entry]) for entry in entries)


@dataclass(frozen=True)
class Row:
    room: str
    rooms: Allowance
    third_parties: Allowance


def parse_allowance(cell: str) -> Allowance:
    names = {name: bool(types) for name, types in re.findall(r"`([\w.]+)`( \(types\))?", cell)}
    everything = cell.startswith("everything")
    assert names or everything or cell == "nothing", f"cannot read {cell!r}"
    return Allowance(names, everything)


def parse_table() -> dict[str, Row]:
    rows = {}
    for line in README.splitlines():
        cells = [cell.strip() for cell in line.strip("| ").split(" | ")]
        if len(cells) == 4 and cells[0].startswith("`"):
            room = cells[0].strip("`")
            rows[room] = Row(room, parse_allowance(cells[1]), parse_allowance(cells[2]))
    return rows


TABLE = parse_table()
OPEN_TO_ALL = parse_allowance(README.split("Open to all:")[1].split("\n\n")[0])
LOCK_FILES = set(re.findall(r"`([\w/]+\.py)`", README.split("Locks are made in")[1].split(" only")[0]))


# ---- the sources -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Import:
    """One imported module, absolute: `pyllamacache.prefix.plan` or `numpy`."""

    module: str
    line: int
    for_typing: bool


def sources() -> list[Path]:
    return sorted(path for path in PACKAGE.rglob("*.py") if "__pycache__" not in path.parts)


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def is_typing_guard(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def read(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imports_of(path: Path, tree: ast.Module) -> Iterator[Import]:
    package = ("pyllamacache", *path.relative_to(PACKAGE).parts[:-1])

    def walk(node: ast.AST, for_typing: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, node.lineno, for_typing)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*base, *([node.module] if node.module else [])])
            # `from . import x` names a module, and `from .room import x` may.
            yield from (Import(f"{module}.{alias.name}", node.lineno, for_typing) for alias in node.names)
        if is_typing_guard(node):
            assert isinstance(node, ast.If)
            for guarded in node.body:
                yield from walk(guarded, True)
            for other in node.orelse:
                yield from walk(other, for_typing)
        else:
            for child in ast.iter_child_nodes(node):
                yield from walk(child, for_typing)

    yield from walk(tree, False)


def violations_of(path: Path, tree: ast.Module) -> Iterator[str]:
    room = room_of(path)
    row = TABLE[room]
    for each in imports_of(path, tree):
        top, _, inner = each.module.partition(".")
        if top == "pyllamacache":
            target = inner or "__init__"
            allowed = target.split(".")[0] == room or row.rooms.covers(target, for_typing=each.for_typing)
        else:
            allowed = top in sys.stdlib_module_names or any(
                allowance.covers(top, for_typing=each.for_typing) for allowance in (row.third_parties, OPEN_TO_ALL)
            )
        if not allowed:
            yield f"{name_of(path)}:{each.line}: {room} may not import {each.module}"


# ---- tests -----------------------------------------------------------------------------------------------------


def test_the_table_and_the_folder_name_the_same_rooms() -> None:
    assert {room_of(path) for path in sources()} == set(TABLE)


def test_the_table_itself_allows_no_circle() -> None:
    """Rooms that name everything are the roof; below it, what a room may import must not lead back to it."""

    def reached(room: str, above: tuple[str, ...] = ()) -> None:
        assert room not in above, f"circle: {' -> '.join([*above, room])}"
        for name, for_typing in TABLE[room].rooms.names.items():
            # A protocol's own module is a floor of its own: `native` implements it, its room uses it.
            if not for_typing and "." not in name:
                reached(name, (*above, room))

    for room, row in TABLE.items():
        if not row.rooms.everything:
            reached(room)


@pytest.mark.parametrize("path", sources(), ids=name_of)
def test_a_module_imports_only_what_its_room_may(path: Path) -> None:
    assert list(violations_of(path, read(path))) == []


@pytest.mark.parametrize("path", [path for path in sources() if room_of(path) != "native"], ids=name_of)
def test_c_is_named_in_native_only(path: Path) -> None:
    found = set()
    for node in ast.walk(read(path)):
        names = {
            ast.Name: lambda node: [node.id],
            ast.Attribute: lambda node: [node.attr],
            ast.alias: lambda node: [*node.name.split("."), node.asname],
            ast.arg: lambda node: [node.arg],
        }.get(type(node), lambda node: [])(node)
        found |= NATIVE_NAMES.intersection(names)
    assert not found


@pytest.mark.parametrize(
    "path", [path for path in sources() if room_of(path) not in ("native", "__init__")], ids=name_of
)
def test_modules_are_imported_by_computed_names_nowhere_else(path: Path) -> None:
    called = {
        node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        for node in ast.walk(read(path))
        if isinstance(node, ast.Call)
    }
    assert not called & {"import_module", "__import__", "find_spec"}


def test_locks_are_made_where_the_map_says() -> None:
    makers = set()
    for path in sources():
        for node in ast.walk(read(path)):
            if isinstance(node, ast.Attribute) and node.attr in LOCKS and ast.unparse(node.value) == "threading":
                makers.add(name_of(path))
            if isinstance(node, ast.ImportFrom) and node.module == "threading":
                makers |= {name_of(path)} if LOCKS & {alias.name for alias in node.names} else set()
    assert makers <= LOCK_FILES


# ---- the checker itself ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("place", "source", "is_allowed"),
    [
        ("prefix/x.py", "from ..request import Reason", True),
        ("prefix/x.py", "from .match import common_prefix_len", True),
        ("prefix/x.py", "from .. import request", True),
        ("prefix/x.py", "import numpy.typing as npt", True),
        ("prefix/x.py", "import json", True),
        ("prefix/x.py", "from ..native import library", False),
        ("prefix/x.py", "from .. import native", False),
        ("prefix/x.py", "from ..store.budget import Budget", False),
        ("prefix/x.py", "import pyllamacache", False),
        ("prefix/x.py", "import torch", False),
        ("prefix/x.py", "def f():\n    from ..scheduler import loop", False),
        ("native/x.py", "from ..scheduler.backend import Feed", True),
        ("native/x.py", "from ..scheduler import backend", True),
        ("native/x.py", "from ..scheduler.loop import Scheduler", False),
        ("native/x.py", "from ..scheduler import loop", False),
        ("prefix/x.py", "from typing_extensions import Self", False),
        ("prefix/x.py", "if TYPE_CHECKING:\n    from typing_extensions import Self", True),
        ("request.py", "import numpy as np", False),
        ("request.py", "if TYPE_CHECKING:\n    import numpy as np", True),
        ("request.py", "if TYPE_CHECKING:\n    pass\nelse:\n    import numpy as np", False),
        ("scheduler/x.py", "if TYPE_CHECKING:\n    from ..native.context import NativeContext", False),
        ("engine.py", "from .native.context import NativeContext", True),
        ("engine.py", "from .__main__ import main", False),
    ],
)
def test_the_checker_sees_what_it_should(place: str, source: str, is_allowed: bool) -> None:
    found = list(violations_of(PACKAGE / place, ast.parse(source)))
    assert (found == []) is is_allowed, found
