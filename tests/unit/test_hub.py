"""Models from a hub: a server on the loopback device speaks what its client asks, then is gone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pyllamacache.errors import ConfigError, ModelNotFoundError
from pyllamacache.hub import fetch_model
from tests.fakes.hub import COMMIT, REPO, FakeHub

SPLIT = [f"big-Q8_0-0000{number}-of-00003.gguf" for number in (1, 2, 3)]
FILES = {
    "README.md": b"# tiny",
    "tiny-Q4_K_M.gguf": b"GGUF four bits",
    "tiny-Q8_0.gguf": b"GGUF eight bits",
    "sub/tiny-F16.gguf": b"GGUF sixteen bits",
    **{name: f"GGUF {name}".encode() for name in SPLIT},
}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    for name in ("HF_HUB_OFFLINE", "HF_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # the client waits before it tries again
    fake = FakeHub(dict(FILES))
    monkeypatch.setenv("HF_ENDPOINT", fake.url)
    yield fake
    fake.close()


@pytest.fixture
def fetch(tmp_path: Path) -> Any:
    """`fetch_model` with a cache of this test."""

    def fetch_here(filename: str, repo_id: str = REPO, **options: Any) -> Path:
        return fetch_model(repo_id, filename, cache_dir=tmp_path / "cache", **{"token": False, **options})

    return fetch_here


# ---- online ----------------------------------------------------------------------------------------------------


def test_an_exact_name_is_downloaded_once(hub: FakeHub, fetch: Any) -> None:
    path = fetch("tiny-Q8_0.gguf")
    assert path.name == "tiny-Q8_0.gguf"
    assert path.read_bytes() == FILES["tiny-Q8_0.gguf"]
    assert fetch("tiny-Q8_0.gguf") == path
    assert hub.downloads == ["tiny-Q8_0.gguf"]


def test_an_exact_name_needs_no_list_of_files(hub: FakeHub, fetch: Any) -> None:
    fetch("sub/tiny-F16.gguf")
    assert not [path for _, path in hub.requests if path.startswith("/api/")]


@pytest.mark.parametrize(
    ("pattern", "name"),
    [("*Q4_K_M.gguf", "tiny-Q4_K_M.gguf"), ("*F16*", "sub/tiny-F16.gguf"), ("tiny-Q8_[0-9].gguf", "tiny-Q8_0.gguf")],
)
def test_a_glob_finds_its_model(hub: FakeHub, fetch: Any, pattern: str, name: str) -> None:
    assert fetch(pattern).read_bytes() == FILES[name]
    assert hub.downloads == [name]


@pytest.mark.parametrize("filename", [*SPLIT, "big*", "*-00002-of-*"])
def test_every_part_of_a_split_model_comes_with_it(hub: FakeHub, fetch: Any, filename: str) -> None:
    first = fetch(filename)
    assert first.name == SPLIT[0]
    assert [first.with_name(name).read_bytes() for name in SPLIT] == [FILES[name] for name in SPLIT]


def test_parts_come_from_one_commit(hub: FakeHub, fetch: Any) -> None:
    """A repository that changes during the download must not give a mixture."""
    fetch("big*")
    revisions = [path.split("/")[4] for method, path in hub.requests if method == "GET" and "/resolve/" in path]
    assert revisions == ["main", COMMIT, COMMIT]


def test_a_name_with_the_signs_of_a_glob_fits_itself(hub: FakeHub, fetch: Any) -> None:
    hub.files["odd[1].gguf"] = b"GGUF odd"
    assert fetch("odd[1].gguf").read_bytes() == b"GGUF odd"


def test_a_glob_that_fits_several_models_lists_them(hub: FakeHub, fetch: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        fetch("*Q*.gguf")
    assert str(caught.value).endswith("it fits big-Q8_0-00001-of-00003.gguf, tiny-Q4_K_M.gguf, tiny-Q8_0.gguf")
    assert hub.downloads == []


def test_the_list_of_models_is_bounded(hub: FakeHub, fetch: Any) -> None:
    hub.files.update({f"many-{number:03d}.gguf": b"" for number in range(100)})
    with pytest.raises(ConfigError, match=r"many-007\.gguf and 92 more$"):
        fetch("many*")


def test_a_revision_can_be_a_commit(hub: FakeHub, fetch: Any) -> None:
    assert fetch("tiny-Q8_0.gguf", revision=COMMIT).read_bytes() == FILES["tiny-Q8_0.gguf"]


def test_what_is_cached_serves_while_the_hub_is_down(hub: FakeHub, fetch: Any) -> None:
    paths = [fetch("tiny-Q8_0.gguf"), fetch("*Q8_0*-00001-*")]
    hub.refuse = (503, None)
    assert [fetch("tiny-Q8_0.gguf"), fetch("*Q8_0*-00001-*")] == paths


# ---- refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("repo_id", "filename", "options", "expected"),
    [
        (REPO, "none.gguf", {}, "org/tiny-GGUF/none.gguf: the repository has no such file"),
        (REPO, "big-00001-of-00002.gguf", {}, "org/tiny-GGUF/big-00001-of-00002.gguf: the repository has no such file"),
        (REPO, "*Q2*", {}, "no file fits; GGUF files there: big-Q8_0-00001-of-00003.gguf, sub/tiny-F16.gguf, tiny-Q4"),
        (REPO, "*.md", {}, "no file fits"),
        (REPO, "tiny-Q8_0.gguf", {"revision": "v9"}, "(revision v9): the repository has no revision 'v9'"),
        (REPO, "*Q8*", {"revision": "v9"}, "the repository has no revision 'v9'"),
        ("org/none", "a.gguf", {}, "org/none/a.gguf: no such repository, or a private one that needs token="),
        ("org/none", "*.gguf", {}, "no such repository, or a private one that needs token="),
    ],
)
def test_what_is_not_there_is_named(
    hub: FakeHub, fetch: Any, repo_id: str, filename: str, options: dict[str, Any], expected: str
) -> None:
    with pytest.raises(ModelNotFoundError) as caught:
        fetch(filename, repo_id, **options)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_part_of_a_split_model_is_named(hub: FakeHub, fetch: Any) -> None:
    del hub.files[SPLIT[1]]
    with pytest.raises(ModelNotFoundError, match=f"{SPLIT[1]}: the repository has no such file"):
        fetch("big*")


@pytest.mark.parametrize("filename", ["tiny-Q8_0.gguf", "*Q4*"])
@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ((401, "GatedRepo"), "the repository is gated: .* token="),
        ((403, "GatedRepo"), "the repository is gated: .* token="),
        ((401, "RepoNotFound"), "a private one that needs token="),
        ((401, None), "token="),
        ((403, None), "token="),
        ((500, None), "hub"),
    ],
)
def test_no_access_says_what_helps(
    hub: FakeHub, fetch: Any, filename: str, answer: tuple[int, str | None], expected: str
) -> None:
    hub.refuse = answer
    with pytest.raises(ModelNotFoundError, match=expected):
        fetch(filename)


def test_a_token_opens_a_private_repository(hub: FakeHub, fetch: Any) -> None:
    hub.refuse, hub.token = (401, "RepoNotFound"), "hf_secret"
    with pytest.raises(ModelNotFoundError) as caught:
        fetch("*Q4*", token="hf_wrong")
    assert "hf_wrong" not in str(caught.value)
    assert fetch("*Q4*", token="hf_secret").read_bytes() == FILES["tiny-Q4_K_M.gguf"]


@pytest.mark.parametrize("repo_id", ["", "a/b/c", "-bad-", "a b", 7, None])
def test_an_impossible_repository_is_a_config_error(hub: FakeHub, fetch: Any, repo_id: Any) -> None:
    with pytest.raises(ConfigError, match="repo_id"):
        fetch("x.gguf", repo_id)


@pytest.mark.parametrize("filename", ["", None, 7])
def test_an_impossible_name_is_a_config_error(hub: FakeHub, fetch: Any, filename: Any) -> None:
    with pytest.raises(ConfigError, match="filename"):
        fetch(filename)


# ---- offline ---------------------------------------------------------------------------------------------------


@pytest.fixture
def cached(hub: FakeHub, fetch: Any) -> list[Path]:
    """Fetches an ordinary and a split model, and stops the server."""
    paths = [fetch("tiny-Q4_K_M.gguf"), fetch("big*"), fetch("sub/*")]
    hub.close()
    hub.requests.clear()
    return paths


@pytest.mark.parametrize("how", ["argument", "variable"])
def test_exact_names_and_globs_are_answered_from_the_cache(
    cached: list[Path], hub: FakeHub, fetch: Any, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if how == "variable":
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    options = {"local_files_only": True} if how == "argument" else {}
    for filenames, path in zip(
        (["tiny-Q4_K_M.gguf", "*Q4*"], [*SPLIT, "big*"], ["sub/tiny-F16.gguf"]), cached, strict=True
    ):
        assert {fetch(filename, **options) for filename in filenames} == {path}
    assert fetch("*Q4*", revision=COMMIT, **options) == cached[0]
    assert hub.requests == []


def test_without_the_switch_a_hub_that_is_gone_still_leaves_the_cache(cached: list[Path], fetch: Any) -> None:
    assert fetch("tiny-Q4_K_M.gguf") == cached[0]
    assert fetch("*Q4*") == cached[0]


@pytest.mark.parametrize("options", [{"local_files_only": True}, {}], ids=["offline", "unreachable"])
@pytest.mark.parametrize(
    ("repo_id", "filename", "revision", "expected"),
    [
        (REPO, "tiny-Q8_0.gguf", None, "it is not in the hub's cache, and "),
        (REPO, "*Q8_0.gguf", None, "no file fits; GGUF files there: big-Q8_0-00001-of-00003.gguf, sub/tiny-F16.gguf, "),
        (REPO, "*Q4*", "v9", "(revision v9): nothing of it is in the hub's cache, and "),
        ("org/none", "*", None, "org/none/*: nothing of it is in the hub's cache, and "),
    ],
)
def test_what_is_not_cached_is_told_apart(
    cached: list[Path], fetch: Any, options: dict[str, Any], repo_id: str, filename: str, revision: str, expected: str
) -> None:
    with pytest.raises(ModelNotFoundError) as caught:
        fetch(filename, repo_id, revision=revision, **options)
    assert expected in str(caught.value)


def test_a_part_that_is_not_cached_is_named(cached: list[Path], fetch: Any) -> None:
    cached[1].with_name(SPLIT[2]).unlink()
    with pytest.raises(
        ModelNotFoundError, match=f"{SPLIT[2]}: it is not in the hub's cache, and this process is offline"
    ):
        fetch("big*", local_files_only=True)
