"""The example notebooks run from start to end, without a warning, and show what they promise. Outputs are not kept."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from tests.models import TinySpec

FOLDER = Path(__file__).resolve().parents[2] / "examples"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
DRAWN = {
    "agent_turns": ["first", "last", "plot", "with-clock", "plot-clock", "statistics"],
    "cache_and_budgets": ["slots", "cache", "checkpoints", "memory", "limit", "over-time"],
}
STRICT = "import warnings\nwarnings.simplefilter('error')\nwarnings.filterwarnings('default', module='ipykernel')"

# What the tools of notebooks themselves warn of.
pytestmark = pytest.mark.filterwarnings("default")


def run(name: str, model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Any]]:
    """Outputs by cell. In an empty folder: in the checkout's root the package without its extension would be found."""
    monkeypatch.setenv("PYLLAMACACHE_MODEL", str(model))
    monkeypatch.setenv("JUPYTER_PLATFORM_DIRS", "1")
    monkeypatch.setenv("IPYTHONDIR", str(folder / "ipython"))
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    notebook = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    notebook.cells.insert(0, nbformat.v4.new_code_cell(STRICT))
    NotebookClient(
        notebook, timeout=240, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
    ).execute()
    return {cell.id: cell.outputs for cell in notebook.cells if cell.cell_type == "code"}


def text_of(outputs: list[Any]) -> str:
    return "".join(each.get("text", "") for each in outputs if each.output_type == "stream" and each.name == "stdout")


def check_shown(name: str, shown: dict[str, list[Any]]) -> None:
    for cell in DRAWN[name]:
        kinds = {kind for each in shown[cell] for kind in each.get("data", {})}
        assert kinds & {"text/html", "image/png"}, f"{cell} shows {kinds or 'nothing'}"
    errors = [each for outputs in shown.values() for each in outputs if each.get("name") == "stderr"]
    assert not errors


def check_turns(shown: dict[str, list[Any]]) -> None:
    lines = text_of(shown["header"]).splitlines()
    assert [line.split()[0] for line in lines] == ["1", "2", "3", "4", "5"]
    assert all("reused from" in line for line in lines[1:])
    assert "diverged at" in text_of(shown["position"]) or "no_checkpoint at" in text_of(shown["position"])


def check_budgets(shown: dict[str, list[Any]]) -> None:
    assert "You are one of three clerks" in text_of(shown["with-text"])
    assert "Clerk" not in "".join(each["data"]["text/html"] for each in shown["cache"])
    assert "pyllamacache:prefix_cache_hits_total" in text_of(shown["export"])
    assert not text_of(shown["pinned"]).startswith("0 ")


CHECKS = {"agent_turns": check_turns, "cache_and_budgets": check_budgets}


@pytest.mark.parametrize("name", ["agent_turns", pytest.param("cache_and_budgets", marks=pytest.mark.slow)])
def test_it_runs_on_a_tiny_model(
    name: str, tiny_path: Callable[[TinySpec | str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = run(name, tiny_path("hybrid"), tmp_path, monkeypatch)
    check_shown(name, shown)
    CHECKS[name](shown)


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.parametrize("name", CHECKS)
def test_it_runs_on_the_model_that_it_names(
    name: str, smollm2_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = run(name, smollm2_path, tmp_path, monkeypatch)
    check_shown(name, shown)
    CHECKS[name](shown)


def test_every_notebook_is_run() -> None:
    assert [path.stem for path in NOTEBOOKS] == sorted(CHECKS) == sorted(DRAWN)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_kept_without_outputs(path: Path) -> None:
    notebook = json.loads(path.read_text(encoding="utf-8"))
    nbformat.validate(nbformat.from_dict(notebook))
    assert notebook["metadata"]["kernelspec"]["name"] == "python3"
    for cell in notebook["cells"]:
        assert cell["metadata"] == {}
        if cell["cell_type"] == "code":
            assert (cell["outputs"], cell["execution_count"]) == ([], None)
