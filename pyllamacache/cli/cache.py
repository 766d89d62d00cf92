"""`pyllamacache cache ls | check | clear DIR`: the folder of a disk cache, from outside and while others use it.

It holds what transcripts hold. What is printed are names, sizes, counts and times: no ids, no text.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict
from datetime import datetime, timezone
from itertools import groupby
from typing import TYPE_CHECKING

from ..errors import ConfigError
from .command import Command
from .lines import Say, fact_lines, printable, size

if TYPE_CHECKING:
    from ..store.disk_check import DiskCheck, DiskGroup


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True, dest="action")
    ls = actions.add_parser("ls", help="say what is stored, by scope and namespace")
    check = actions.add_parser("check", help="read every file and compare it with checksums and index; 1 if one is bad")
    check.add_argument("--repair", action="store_true", help="drop what is bad; 1 if something bad is left")
    clear = actions.add_parser("clear", help="remove what is stored, without asking")
    clear.add_argument("--namespace", metavar="NAME", help="only of this namespace; the default one is ''")
    clear.add_argument("--scope", metavar="HEX", help="only of the scope that begins so")
    for each in (ls, check, clear):
        each.add_argument("folder", metavar="DIR", help="what disk_dir was set to")
        each.add_argument("--json", action="store_true", help="print JSON")


def _run(arguments: argparse.Namespace, say: Say) -> int:
    return {"ls": _ls, "check": _check, "clear": _clear}[arguments.action](arguments, say)


# ---- ls --------------------------------------------------------------------------------------------------------


def _ls(arguments: argparse.Namespace, say: Say) -> int:
    from ..store import disk_check

    groups = disk_check.groups(arguments.folder)
    if arguments.json:
        say(json.dumps([asdict(each) for each in groups], indent=2))
        return 0
    if not groups:
        say("nothing is stored")
    for scope, members in groupby(groups, key=lambda each: each.scope):
        for line in _scope_lines(scope, list(members)):
            say(line)
    return 0


def _scope_lines(scope: str, groups: list[DiskGroup]) -> Iterator[str]:
    yield f"scope {printable(scope)}"
    yield from fact_lines(
        {printable(name): printable(value) or "none" for name, value in groups[0].facts.items()}, indent="  "
    )
    for group in groups:
        yield f"  namespace {printable(group.namespace) or 'by default'}"
        yield from fact_lines(_group_facts(group), indent="    ")


def _group_facts(group: DiskGroup) -> dict[str, str]:
    facts = {
        "entries": f"{group.n_spans + group.n_states:,}: {group.n_spans:,} spans, {group.n_states:,} states",
        "tokens": f"{group.n_tokens:,}",
        "size": size(group.size_bytes),
        "last used": f"{_time(group.oldest_use_s)} to {_time(group.newest_use_s)}",
    }
    return facts | {"pinned": f"{group.n_pinned:,}"} if group.n_pinned else facts


def _time(seconds: float) -> str:
    try:
        return datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (ValueError, OverflowError, OSError):
        return "unknown"


# ---- check and clear -------------------------------------------------------------------------------------------


def _check(arguments: argparse.Namespace, say: Say) -> int:
    from ..store import disk_check

    found = disk_check.check(arguments.folder, repair=arguments.repair)
    if arguments.json:
        say(json.dumps(asdict(found), indent=2))
    else:
        for line in _check_lines(found, is_repairing=arguments.repair):
            say(line)
    return 1 if found.remaining else 0


def _check_lines(found: DiskCheck, *, is_repairing: bool) -> Iterator[str]:
    for problem in found.problems:
        yield f"{problem.kind}: {printable(problem.name)}: {printable(problem.what)}"
    yield f"{found.n_entries:,} entries, {size(found.size_bytes)}"
    if not found.problems:
        yield "all is well"
    elif is_repairing:
        yield f"{len(found.problems):,} problems found, {len(found.remaining):,} left"
    else:
        yield f"{len(found.problems):,} problems found; --repair drops what is bad"


def _clear(arguments: argparse.Namespace, say: Say) -> int:
    from ..store import disk_check

    scope = None if arguments.scope is None else _full_scope(arguments.folder, arguments.scope)
    n_entries = disk_check.clear(arguments.folder, namespace=arguments.namespace, scope=scope)
    say(json.dumps({"removed": n_entries}) if arguments.json else f"{n_entries:,} entries removed")
    return 0


def _full_scope(folder: str, start: str) -> str:
    from ..store import disk_check

    scopes = {each.scope for each in disk_check.groups(folder) if each.scope.startswith(start)}
    if len(scopes) != 1:
        raise ConfigError("--scope", start, f"the beginning of one stored scope, not of {len(scopes)}")
    return scopes.pop()


COMMAND = Command("cache", "look at, check or clear the folder of a disk cache", _add_arguments, _run)
