"""Progress bars appear where somebody would see them, late, and count what the scheduler has done."""

from __future__ import annotations

import io
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from pyllamacache.observe import progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def bars(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Every bar that is made, as a recorder instead of tqdm's."""
    made: list[Any] = []

    def new_bar(**options: Any) -> Any:
        bar = SimpleNamespace(options=options, n=options.get("initial", 0), updates=[], is_closed=False)

        def update(delta: float) -> None:
            bar.n += delta
            bar.updates.append(bar.n)

        def close() -> None:
            bar.is_closed = True

        bar.update, bar.close = update, close
        made.append(bar)
        return bar

    monkeypatch.setattr(progress, "_new_bar", new_bar)
    return made


def test_a_bar_is_wanted_on_a_terminal_and_in_a_notebook_and_as_switched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    assert not progress.is_wanted(None)
    assert progress.is_wanted(True)
    monkeypatch.setattr(sys, "stderr", Terminal())
    assert progress.is_wanted(None)
    assert not progress.is_wanted(False)
    monkeypatch.setattr(sys, "stderr", None)
    assert not progress.is_wanted(None)
    shell = type("ZMQInteractiveShell", (), {})()
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    assert progress.is_wanted(None)


def test_a_prefill_that_is_done_in_time_shows_nothing(bars: list[Any]) -> None:
    progress.watch_prefill(lambda _: True, lambda: 0, 1000)
    progress.watch_prefill(lambda _: False, lambda: 1000, 1000)
    assert bars == []


def test_a_long_prefill_is_counted_to_its_end(bars: list[Any]) -> None:
    done = iter([100, 100, 100, 300, 300, 600, 600, 1000, 1000, 1000, 1000, 1000])
    waits: list[float] = []

    def wait(seconds: float) -> bool:
        waits.append(seconds)
        return False

    progress.watch_prefill(wait, lambda: next(done), 1000)
    (bar,) = bars
    assert bar.n == 1000
    assert bar.updates == sorted(bar.updates)
    assert bar.is_closed
    assert waits[0] == progress.PATIENCE_S


def test_a_bar_is_closed_when_the_wait_is_interrupted(bars: list[Any]) -> None:
    calls = iter([False])

    def wait(_: float) -> bool:
        try:
            return next(calls)
        except StopIteration:
            raise KeyboardInterrupt from None

    with pytest.raises(KeyboardInterrupt):
        progress.watch_prefill(wait, lambda: 10, 1000)
    assert bars[0].is_closed


def test_loading_shows_a_percentage_and_closes_its_bar(bars: list[Any]) -> None:
    with progress.LoadBar("model.gguf", True) as bar:
        bar.update(0.25)
        bar.update(1.0)
    assert (bars[0].updates, bars[0].is_closed) == ([25.0, 100.0], True)
    with progress.LoadBar("model.gguf", False) as bar:
        bar.update(0.5)
    assert len(bars) == 1
