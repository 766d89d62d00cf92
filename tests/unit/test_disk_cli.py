"""`pyllamacache cache`: what a person learns about a folder, and what it does to one."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pyllamacache import __main__ as command_line
from pyllamacache.store.disk_files import INDEX
from tests.fakes.clock import FakeClock
from tests.fakes.disk import SCOPE, bytes_on_disk, get, names, open_store, put, spans, state

ACTIONS = ["ls", "check", "clear"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "cache"
    store = open_store(folder, clock=FakeClock(1.7e9))
    put(store, *spans(range(31000, 31012)), state(range(31000, 31010)))
    put(store, *spans(range(31000, 31004), namespace="agents/\x1b[31m"))
    store.set_pinned([("state", state(range(31000, 31010)).key)], True)
    store.close()
    other = open_store(folder, scope="77" * 16)
    put(other, *spans(range(4)))
    other.close()
    return folder


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Any:
    def run(*arguments: object) -> tuple[int, str, str]:
        try:
            code = command_line.main(["cache", *map(str, arguments)])
        except SystemExit as ended:
            code = int(ended.code or 0)
        return code, *capsys.readouterr()

    return run


def test_ls_tells_what_is_stored_and_no_ids(command: Any, folder: Path) -> None:
    code, out, err = command("ls", folder)
    assert (code, err) == (0, "")
    assert f"scope {SCOPE}" in out
    for expected in ("model", "tiny", "namespace by default", "agents/\\x1b[31m", "4: 3 spans, 1 states", "pinned"):
        assert expected in out
    assert "2023-11-14 22:13:20 UTC to 2023-11-14 22:13:20 UTC" in out
    assert "\x1b" not in out
    assert "31000" not in out


def test_ls_tells_it_as_json(command: Any, folder: Path) -> None:
    _, out, _ = command("ls", folder, "--json")
    groups = json.loads(out)
    assert [(each["scope"], each["n_spans"], each["n_states"], each["n_tokens"]) for each in groups] == [
        (SCOPE, 3, 1, 12),
        (SCOPE, 1, 0, 4),
        ("77" * 16, 1, 0, 4),
    ]
    assert sum(each["size_bytes"] for each in groups) == bytes_on_disk(folder)


def test_an_empty_cache_is_told(command: Any, folder: Path) -> None:
    command("clear", folder)
    assert command("ls", folder) == (0, "nothing is stored\n", "")
    assert json.loads(command("ls", folder, "--json")[1]) == []
    (folder / INDEX).unlink()
    assert command("ls", folder) == (0, "nothing is stored\n", "")


def test_check_is_content_with_a_sound_folder(command: Any, folder: Path) -> None:
    code, out, _ = command("check", folder)
    assert (code, out.splitlines()[-1]) == (0, "all is well")
    assert json.loads(command("check", folder, "--json")[1])["n_entries"] == 6


def test_check_finds_and_repairs(command: Any, folder: Path) -> None:
    damaged, missing, *_ = sorted(folder.glob(f"{SCOPE}/*/*"))
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    missing.unlink()
    stray = damaged.with_name(f"{'0' * 32}.span.{'0' * 16}.tmp")
    stray.write_bytes(b"half")
    code, out, _ = command("check", folder)
    assert code == 1
    assert {line.split(":")[0] for line in out.splitlines() if ": " in line} == {"damaged", "missing", "leftover"}
    assert damaged.exists()
    code, out, _ = command("check", folder, "--repair", "--json")
    assert code == 0
    assert len(json.loads(out)["problems"]) == 3
    assert not damaged.exists()
    assert not stray.exists()
    assert command("check", folder)[0] == 0
    assert bytes_on_disk(folder) == json.loads(command("check", folder, "--json")[1])["size_bytes"]


def test_check_says_what_is_left_when_it_cannot_repair(command: Any, folder: Path) -> None:
    path = next(iter(sorted(folder.glob(f"{SCOPE}/*/*"))))
    path.unlink()
    path.mkdir()
    assert command("check", folder)[0] == 1
    code, out, _ = command("check", folder, "--repair")
    assert code == 1
    assert out.splitlines()[-1] == "1 problems found, 1 left"


def test_check_repairs_an_index(command: Any, folder: Path) -> None:
    (folder / INDEX).write_bytes(b"not a database" * 1000)
    assert "check --repair" in command("ls", folder)[2]
    code, out, _ = command("check", folder)
    assert code == 1
    assert out.startswith(f"index: {INDEX}: ")
    assert command("check", folder, "--repair")[0] == 0
    store = open_store(folder)
    assert len(names(store)) == 5
    store.close()


def test_check_recounts(command: Any, folder: Path) -> None:
    import sqlite3

    connection = sqlite3.connect(folder / INDEX)
    with connection:
        connection.execute("UPDATE meta SET value = value + 7 WHERE name = 'total'")
        connection.execute("UPDATE entries SET children = 5 WHERE kind = 'span' AND start = 0")
    connection.close()
    code, out, _ = command("check", folder)
    assert (code, out.count("total: ")) == (1, 2)
    assert command("check", folder, "--repair")[0] == 0
    assert command("check", folder)[0] == 0


def test_clear_takes_all_or_what_it_is_told(command: Any, folder: Path) -> None:
    assert command("clear", folder, "--namespace", "agents/\x1b[31m") == (0, "1 entries removed\n", "")
    assert command("clear", folder, "--scope", "77", "--json") == (0, '{"removed": 1}\n', "")
    assert command("clear", folder, "--namespace", "") == (0, "4 entries removed\n", "")
    assert bytes_on_disk(folder) == 0
    code, _, err = command("clear", folder, "--scope", "5c")
    assert code == 1
    assert "--scope" in err


def test_clear_works_beside_an_open_store(command: Any, folder: Path) -> None:
    store = open_store(folder)
    entry = replace(spans(range(31000, 31004))[0])
    assert get(store, entry)
    command("clear", folder)
    assert not get(store, entry)
    assert put(store, entry) == [True]
    assert get(store, entry)
    store.close()


@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("place", ["empty", "other", "file", "missing", "nul\0", "link/below"])
def test_other_folders_are_left_alone(command: Any, tmp_path: Path, action: str, place: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "other" / SCOPE / "00").mkdir(parents=True)
    kept = tmp_path / "other" / SCOPE / "00" / f"{'0' * 32}.span.{'0' * 16}"
    kept.write_bytes(b"looks like ours")
    (tmp_path / "file").write_bytes(b"")
    code, out, err = command(action, tmp_path / place)
    assert (code, out) == (1, "")
    assert err.startswith("pyllamacache: cannot use ")
    assert err.count("\n") == 1
    assert kept.exists()
    assert list((tmp_path / "empty").iterdir()) == []


@pytest.mark.parametrize("arguments", [[], ["ls"], ["rm", "x"], ["clear", "x", "--all"]])
def test_wrong_arguments_exit_with_2(command: Any, arguments: list[str]) -> None:
    assert command(*arguments)[0] == 2


@pytest.mark.parametrize("action", ACTIONS)
def test_every_action_has_help(command: Any, action: str) -> None:
    assert command(action, "--help")[0] == 0
