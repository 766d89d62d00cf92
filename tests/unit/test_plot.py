"""The plots: what is drawn is what there is, into the axes that were given, and pyplot knows nothing of it."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import pyllamacache
from pyllamacache import CacheConfig, plot
from pyllamacache.errors import InvalidRequestError, MissingExtraError
from pyllamacache.request import Completion

NewEngine = Callable[..., Any]


@pytest.fixture(autouse=True)
def pyplot() -> Iterator[Any]:
    """With Agg, and with nothing left behind."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    before = (plt.get_fignums(), dict(mpl.rcParams))
    yield plt
    plt.close("all")
    assert (plt.get_fignums(), dict(mpl.rcParams)) == before


@pytest.fixture
def engine(new_engine: NewEngine) -> Any:
    return new_engine("hybrid", cache=CacheConfig(max_checkpoints=16, host_bytes="8MiB"))


@pytest.fixture
def results(engine: Any) -> list[Completion]:
    """A conversation whose third turn changes an earlier one."""
    ids = np.random.default_rng(1).integers(0, 200, 600, dtype=np.int32)
    prompts = [ids[:200], ids[:300], np.append(ids[:250], ids[400:500])]
    return [engine.complete(prompt, max_tokens=4) for prompt in prompts]


def heights(ax: Any) -> dict[str, list[float]]:
    return {each.get_label(): [bar.get_height() for bar in each] for each in ax.containers}


def drawn(ax: Any) -> None:
    ax.figure.canvas.draw()


# ---- turns -----------------------------------------------------------------------------------------------------


def test_turns_stack_to_the_tokens_sent(results: list[Completion]) -> None:
    ax = plot.turns(results)
    bars = heights(ax)
    assert bars["reused"] == [each.usage.cached_tokens for each in results]
    again = bars.get("computed again", [0] * 3)
    sums = [sum(parts) for parts in zip(bars["reused"], again, bars["computed"], strict=True)]
    assert sums == [each.usage.prompt_tokens for each in results]
    computed = [one + other for one, other in zip(again, bars["computed"], strict=True)]
    assert computed == [each.cache.prefilled_tokens for each in results]
    assert again[2] > 0
    assert ax.get_title() == f"{sum(sums):,} tokens sent, {sum(computed):,} computed"
    drawn(ax)


def test_turns_take_whatever_has_a_completion(results: list[Completion]) -> None:
    @dataclass
    class Chat:
        completion: Completion

    assert heights(plot.turns([Chat(each) for each in results])) == heights(plot.turns(results))


def test_no_turns_are_no_bars() -> None:
    drawn(plot.turns([]))


# ---- checkpoints -----------------------------------------------------------------------------------------------


def marks(ax: Any) -> list[tuple[int, int]]:
    """Row and position."""
    lines = [(round(float(np.mean(each.get_ydata()))), int(each.get_xdata()[0])) for each in ax.lines]
    return sorted(lines)


def test_a_slot_shows_its_own_checkpoints(engine: Any, results: list[Completion]) -> None:
    slot = engine.slots[results[-1].slot_id]
    ax: Any = plot.checkpoints(slot)
    assert marks(ax) == [(0, position) for position in slot.checkpoints]
    assert [bar.get_width() for bar in ax.patches] == [slot.n_tokens]
    assert [each.get_text() for each in ax.get_yticklabels()] == [f"slot {slot.id}"]


@pytest.mark.parametrize("what", [lambda cache: cache, lambda cache: cache.tree()])
def test_a_cache_shows_each_conversation(engine: Any, results: list[Completion], what: Callable[[Any], Any]) -> None:
    ax = plot.checkpoints(what(engine.cache))
    entries = {each.position for each in engine.cache.entries()}
    assert {position for _, position in marks(ax)} == entries
    assert len(ax.patches) == sum(not node.children for node in engine.cache.tree().nodes())
    drawn(ax)


def test_nothing_held_can_be_drawn(engine: Any) -> None:
    drawn(plot.checkpoints(engine.cache))
    drawn(plot.checkpoints(engine.slots[0]))


# ---- memory ----------------------------------------------------------------------------------------------------


def test_memory_is_in_percent_of_each_budget(engine: Any, results: list[Completion]) -> None:
    now = engine.statistics()
    ax: Any
    for ax in (plot.memory(engine), plot.memory(now)):
        assert [each.get_text() for each in ax.get_xticklabels()] == ["KV cells", "host memory", "checkpoints"]
        assert [bar.get_height() for bar in ax.patches] == [
            100 * now.kv_tokens_used / now.kv_tokens,
            100 * now.tiers.host_bytes / now.tiers.host_limit_bytes,
            100 * now.checkpoints.held_bytes / now.checkpoints.limit_bytes,
        ]


def test_samples_are_lines(engine: Any) -> None:
    samples = []
    for n in range(1, 4):
        engine.complete(list(range(n * 60)), max_tokens=2)
        samples.append(engine.statistics())
    ax: Any = plot.memory(samples)
    lines = {each.get_label(): list(each.get_ydata()) for each in ax.lines}
    assert lines["KV cells"] == [100 * each.kv_tokens_used / each.kv_tokens for each in samples]
    drawn(ax)


def test_no_samples_can_be_drawn() -> None:
    drawn(plot.memory([]))


# ---- axes ------------------------------------------------------------------------------------------------------


def test_axes_that_are_given_are_drawn_into(engine: Any, results: list[Completion], pyplot: Any) -> None:
    _, axes = pyplot.subplots(1, 3)
    assert plot.turns(results, ax=axes[0]) is axes[0]
    assert plot.checkpoints(engine.cache, ax=axes[1]) is axes[1]
    assert plot.memory(engine, ax=axes[2]) is axes[2]
    assert all(each.patches for each in axes)


def test_axes_of_its_own_show_themselves_in_a_notebook(results: list[Completion]) -> None:
    assert plot.turns(results)._repr_png_()[:8] == b"\x89PNG\r\n\x1a\n"  # type: ignore[attr-defined]


def test_something_else_than_axes_is_refused(results: list[Completion]) -> None:
    with pytest.raises(InvalidRequestError, match="Axes"):
        plot.turns(results, ax="left")  # type: ignore[arg-type]


def test_without_matplotlib_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.axes", None)
    with pytest.raises(MissingExtraError, match=re.escape("pip install 'pyllamacache[notebook]'")):
        plot.turns([])


def test_it_is_found_by_its_name_and_imports_nothing_heavy() -> None:
    assert pyllamacache.plot is plot
    program = "import sys, pyllamacache; pyllamacache.plot; print({'matplotlib', 'numpy'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd="/")
    assert done.stdout.strip() == "set()"
