"""Progress bars (tqdm) for what takes seconds: loading a model, prefilling a long prompt.

Shown when standard error is a terminal or the code runs in a notebook, unless switched on or off. Driven by the
thread that waits anyway; the scheduler only writes a number.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from typing_extensions import Self

PATIENCE_S = 2.0
"""A prefill shorter than this shows nothing."""

REFRESH_S = 0.1


def is_wanted(switch: bool | None) -> bool:
    """`switch`, or whether somebody would see a bar."""
    if switch is not None:
        return switch
    return _in_notebook() or bool(getattr(sys.stderr, "isatty", lambda: False)())


def _in_notebook() -> bool:
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return shell is not None and type(shell).__name__ == "ZMQInteractiveShell"


def _new_bar(**options: Any) -> Any:
    from tqdm.auto import tqdm  # slow to import, and mostly not needed

    return tqdm(leave=False, dynamic_ncols=True, **options)


class LoadBar:
    """`with LoadBar(name, switch) as bar`: `bar.update(fraction)`, from the loading thread."""

    def __init__(self, name: str, switch: bool | None) -> None:
        self._bar: Any = None
        if is_wanted(switch):
            self._bar = _new_bar(
                total=100,
                desc=f"Loading {name}",
                bar_format="{desc}: {percentage:3.0f}%|{bar}|",
            )

    def update(self, fraction: float) -> None:
        if self._bar is not None:
            self._bar.update(fraction * 100 - self._bar.n)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()


def watch_prefill(wait: Callable[[float], bool], done_tokens: Callable[[], int], total_tokens: int) -> None:
    """Show how far a prefill is until `wait(seconds)` says the request is done, or its prompt is in.

    Args:
        wait: waits up to so many seconds for the end of the request; true: it has ended.
        done_tokens: prompt tokens held so far.
    """
    if wait(PATIENCE_S) or done_tokens() >= total_tokens:
        return
    bar = _new_bar(total=total_tokens, initial=done_tokens(), desc="Prefill", unit="tok")
    try:
        while not wait(REFRESH_S) and done_tokens() < total_tokens:
            bar.update(done_tokens() - bar.n)
        bar.update(done_tokens() - bar.n)
    finally:
        bar.close()
