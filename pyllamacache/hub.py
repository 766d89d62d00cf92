"""One model out of a Hugging Face repository: by exact name or glob, with all parts of a split one.

Knows names, revisions and the folder in which the hub's client keeps what it fetched; nothing of what is in a file.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from .errors import ConfigError, ModelNotFoundError

_PART = re.compile(r"(?P<stem>.+)-(?P<number>[0-9]{5})-of-(?P<count>[0-9]{5})(?P<suffix>\.gguf)", re.IGNORECASE)
_NAMES_SHOWN = 8


def fetch_model(
    repo_id: str,
    filename: str,
    *,
    revision: str | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    token: str | bool | None = None,
    local_files_only: bool | None = None,
) -> Path:
    """The path of a model in the hub's cache, downloaded if it is not there; of a split model, its first part.

    Args:
        filename: an exact name, or a glob over the names of the repository's GGUF files ("*" crosses "/"). The parts
            of a split model count as one model, and any of their names stands for all of them.
        local_files_only: use the cache and never the network; None or False: unless HF_HUB_OFFLINE is set.
    Raises:
        ModelNotFoundError: no such repository, revision or file; no access; offline and not in the cache.
        ConfigError: the glob fits several models, or `repo_id` cannot be one.
    Effects: writes into the hub's cache. The network is asked at the endpoint that HF_ENDPOINT names.
    """
    for field, value in (("repo_id", repo_id), ("filename", filename)):
        if not isinstance(value, str) or not value:
            raise ConfigError(field, value, "a name")
    repository = _Repository(repo_id, revision, None if cache_dir is None else Path(cache_dir).expanduser(), token)
    if local_files_only or _is_offline():
        return _fetch_cached(repository, filename, "this process is offline (HF_HUB_OFFLINE or local_files_only=True)")
    if not _is_glob(filename):
        return repository.download(_parts(filename))
    try:
        names = repository.list_files()
    except _UnreachableError as error:
        # As the hub's client does for an exact name.
        return _fetch_cached(repository, filename, str(error))
    return repository.download(_parts(_pick(names, filename, repository)))


def _fetch_cached(repository: _Repository, filename: str, why: str) -> Path:
    """The model as a previous download left it. `why` the network was not asked, for the message."""
    snapshot = repository.cached_snapshot()
    if snapshot is None:
        raise ModelNotFoundError(repository.place(filename), f"nothing of it is in the hub's cache, and {why}")
    if _is_glob(filename):
        names = (each.relative_to(snapshot).as_posix() for each in snapshot.rglob("*") if each.is_file())
        filename = _pick(names, filename, repository)
    parts = _parts(filename)
    for part in parts:
        if not (snapshot / part).is_file():
            raise ModelNotFoundError(repository.place(part), f"it is not in the hub's cache, and {why}")
    return snapshot / parts[0]


def _is_offline() -> bool:
    from huggingface_hub import constants

    # The client reads the variable once, when it is imported.
    return constants.HF_HUB_OFFLINE or os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")


# ---- names -----------------------------------------------------------------------------------------------------


def _is_glob(filename: str) -> bool:
    return any(sign in filename for sign in "*?[")


def _parts(name: str) -> list[str]:
    """The name, or those of all parts if it names one part of a split model."""
    match = _PART.fullmatch(name)
    if match is None or not 1 <= int(match["number"]) <= int(match["count"]):
        return [name]
    stem, count, suffix = match["stem"], match["count"], match["suffix"]
    return [f"{stem}-{number:05d}-of-{count}{suffix}" for number in range(1, int(count) + 1)]


def _first_part(name: str) -> str:
    match = _PART.fullmatch(name)
    return f"{match['stem']}-00001-of-{match['count']}{match['suffix']}" if match else name


def _pick(names: Iterable[str], pattern: str, repository: _Repository) -> str:
    """The one model among `names` that `pattern` fits; of a split one, its first part."""
    models = [name for name in names if name.lower().endswith(".gguf")]
    # A name may contain the signs of a glob itself.
    fitting = {_first_part(name) for name in models if name == pattern or fnmatchcase(name, pattern)}
    if len(fitting) == 1:
        return fitting.pop()
    if fitting:
        expected = f"a name or a glob that fits one model of {repository.repo_id}; it fits {_listed(fitting)}"
        raise ConfigError("filename", pattern, expected)
    there = f"GGUF files there: {_listed(map(_first_part, models))}" if models else "there are no GGUF files"
    raise ModelNotFoundError(repository.place(pattern), f"no file fits; {there}")


def _listed(names: Iterable[str]) -> str:
    ordered = sorted(set(names))
    shown = ", ".join(ordered[:_NAMES_SHOWN])
    return f"{shown} and {len(ordered) - _NAMES_SHOWN} more" if len(ordered) > _NAMES_SHOWN else shown


# ---- the hub ---------------------------------------------------------------------------------------------------


class _UnreachableError(Exception):
    """No usable answer from the hub, whose text goes on after "and". Never leaves this module."""


@dataclass(frozen=True, slots=True)
class _Repository:
    """A revision of a repository, at the hub and in its client's cache."""

    repo_id: str
    revision: str | None
    cache_dir: Path | None
    token: str | bool | None

    def place(self, filename: str) -> str:
        """For messages."""
        return f"{self.repo_id}/{filename}" + (f" (revision {self.revision})" if self.revision else "")

    def list_files(self) -> list[str]:
        """Every file of the revision. Raises _UnreachableError besides what `download` does."""
        from huggingface_hub import HfApi, constants

        with _translated(self.place(""), self.revision):
            info = HfApi(endpoint=_endpoint()).model_info(
                self.repo_id, revision=self.revision, token=self.token, timeout=constants.HF_HUB_ETAG_TIMEOUT
            )
        return [each.rfilename for each in info.siblings or ()]

    def download(self, parts: list[str]) -> Path:
        """Fetch files that are not in the cache yet, all of one commit; returns the path of the first."""
        first = self._download(parts[0], self.revision)
        commit = first.parents[parts[0].count("/")].name
        for part in parts[1:]:
            self._download(part, commit)
        return first

    def _download(self, name: str, revision: str | None) -> Path:
        from huggingface_hub import hf_hub_download

        try:
            with _translated(self.place(name), revision):
                path = hf_hub_download(
                    self.repo_id,
                    name,
                    revision=revision,
                    cache_dir=self.cache_dir,
                    token=self.token,
                    endpoint=_endpoint(),
                )
        except _UnreachableError as error:
            raise ModelNotFoundError(self.place(name), f"it is not in the hub's cache, and {error}") from error
        return Path(path)

    def cached_snapshot(self) -> Path | None:
        """The folder with what was fetched of this revision before; None if nothing was."""
        from huggingface_hub import constants
        from huggingface_hub.file_download import repo_folder_name

        folder = (self.cache_dir or Path(constants.HF_HUB_CACHE)) / repo_folder_name(
            repo_id=self.repo_id, repo_type="model"
        )
        revision = self.revision or constants.DEFAULT_REVISION
        try:
            commit = (folder / "refs" / revision).read_text(encoding="utf-8").strip()
        except (OSError, ValueError):
            commit = revision
        snapshot = folder / "snapshots" / commit
        return snapshot if snapshot.is_dir() else None


def _endpoint() -> str | None:
    # The client reads the variable once, when it is imported.
    return os.environ.get("HF_ENDPOINT", "").rstrip("/") or None


@contextmanager
def _translated(place: str, revision: str | None) -> Iterator[None]:
    """Turns what the hub's client raises into the errors of this package."""
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        yield
    except HFValidationError as error:
        raise ConfigError("repo_id", place, f"the name of a repository: {_one_line(error)}") from error
    except GatedRepoError as error:
        hint = "access is granted by its owners; ask for it on its page, then pass token="
        raise ModelNotFoundError(place, f"the repository is gated: {hint}") from error
    except RepositoryNotFoundError as error:
        raise ModelNotFoundError(place, "no such repository, or a private one that needs token=") from error
    except RevisionNotFoundError as error:
        raise ModelNotFoundError(place, f"the repository has no revision {revision!r}") from error
    except LocalEntryNotFoundError as error:  # the network failed, and then the cache
        raise _no_answer(place, error.__cause__ or error) from error
    except EntryNotFoundError as error:
        raise ModelNotFoundError(place, "the repository has no such file") from error
    except Exception as error:  # which HTTP library raises here depends on the client's version
        raise _no_answer(place, error) from error


def _no_answer(place: str, error: BaseException) -> Exception:
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status in (401, 403):
        return ModelNotFoundError(place, f"access denied ({status}): pass a token= that has access")
    if status is not None:
        return _UnreachableError(f"the hub answered {status}")
    return _UnreachableError(f"the hub cannot be reached: {_one_line(error)}")


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__
