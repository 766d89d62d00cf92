"""Pictures with matplotlib, which the extra `notebook` brings: `pyllamacache.plot.turns(results)` and others.

Each draws into `ax`, or into a figure of its own that pyplot does not know, and returns the Axes. Those of its own are
shown by a notebook at the end of a cell. No text of a prompt is drawn.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from .errors import InvalidRequestError, MissingExtraError
from .observe.markup import AMBER, BLUE, GREEN, GREY, RED
from .observe.metrics import Statistics

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from .cache import Cache, CacheTree
    from .engine import Engine
    from .prefix.tree import TreeNode
    from .request import Completion
    from .slot import Slot

_MIB = 1 << 20


def turns(results: Iterable[Completion | Any], *, ax: Axes | None = None) -> Axes:
    """Tokens of each prompt, one bar a turn: reused, computed although they were held, and computed as new.

    Args:
        results: of one conversation, in order; `Completion`s, or anything that has one as `completion`.
    """
    ax = _axes(ax)
    answers = [getattr(each, "completion", each) for each in results]
    xs = list(range(1, len(answers) + 1))
    sent = [each.usage.prompt_tokens for each in answers]
    cached = [each.usage.cached_tokens for each in answers]
    known = [
        max(part, min(each.cache.matched_tokens, whole))
        for each, part, whole in zip(answers, cached, sent, strict=True)
    ]
    again = [end - start for start, end in zip(cached, known, strict=True)]
    new = [end - start for start, end in zip(known, sent, strict=True)]
    ax.bar(xs, cached, color=GREEN, label="reused")
    if any(again):
        ax.bar(xs, again, bottom=cached, color=RED, label="computed again")
    ax.bar(xs, new, bottom=known, color=AMBER, label="computed")
    ax.margins(y=0.15)
    for x, whole, part in zip(xs, sent, cached, strict=True):
        ax.annotate(f"{whole - part:,}", (x, whole), (0, 2), textcoords="offset points", ha="center", fontsize=8)
    total, reused = sum(sent), sum(cached)
    ax.set_title(f"{total:,} tokens sent, {total - reused:,} computed", fontsize=10)
    _label(ax, "turn", "prompt tokens")
    ax.locator_params(axis="x", integer=True)
    ax.legend(fontsize=8, frameon=False, loc="upper left")
    return ax


def checkpoints(what: Slot | Cache | CacheTree, *, ax: Axes | None = None) -> Axes:
    """Where along each conversation a checkpoint lies.

    Args:
        what: a slot: its content. A cache or its tree: a line for each end of what is held, named by who holds it.
    """
    from .slot import Slot

    if isinstance(what, Slot):
        ways = [(f"slot {what.id}", what.n_tokens, [(each, "checkpoint") for each in what.checkpoints])]
    else:
        tree = what.tree() if hasattr(what, "tree") else what
        ways = [way for _, roots in tree.namespaces for root in roots for way in _ways(root)]
    return _draw_ways(_axes(ax), ways)


def memory(what: Engine | Statistics | Sequence[Statistics], *, ax: Axes | None = None) -> Axes:
    """What is in use of each budget, in percent.

    Args:
        what: an engine or its statistics: a bar for each budget; several statistics: a line for each over the samples.
    """
    ax = _axes(ax)
    if isinstance(what, Statistics):
        samples = [what]
    else:
        samples = list(what) if isinstance(what, Sequence) else [what.statistics()]
    budgets = [_budgets(each) for each in samples]
    names = [name for name in _COLORS if any(each[name][1] for each in budgets)]
    ax.axhline(100, color=GREY, linewidth=1, linestyle="--")
    for x, name in enumerate(names):
        shares = [100 * used / limit if limit else 0.0 for used, limit in (each[name] for each in budgets)]
        if len(samples) == 1:
            ax.bar(x, shares[0], color=_COLORS[name], width=0.6)
            ax.annotate(_read(name, *budgets[0][name]), (x, shares[0]), (0, 2), **_CENTRED)
        else:
            width = 3.5 if name == "host memory" else 1.5  # checkpoints are in it, and often all of it
            ax.plot(range(1, len(shares) + 1), shares, color=_COLORS[name], label=name, linewidth=width)
    if len(samples) == 1:
        ax.set_xticks(range(len(names)), names)
        ax.margins(x=0.1)
    else:
        ax.locator_params(axis="x", integer=True)
        ax.legend(*ax.get_legend_handles_labels(), fontsize=8, frameon=False)
    ax.set_ylim(0, 112)
    _label(ax, "" if len(samples) == 1 else "sample", "% of the budget")
    return ax


# ---- what is drawn ---------------------------------------------------------------------------------------------

_COLORS = {"KV cells": BLUE, "host memory": AMBER, "checkpoints": RED, "disk": GREY}
_CENTRED: dict[str, Any] = {"textcoords": "offset points", "ha": "center", "fontsize": 8}
_KIND_COLORS = {"periodic": AMBER, "rolling": AMBER}

_Way = tuple[str, int, list[tuple[int, str]]]


def _budgets(now: Statistics) -> dict[str, tuple[int, int]]:
    """In use, and the most that may be."""
    tiers = now.tiers
    return {
        "KV cells": (now.kv_tokens_used, now.kv_tokens),
        "host memory": (tiers.host_bytes, tiers.host_limit_bytes),
        "checkpoints": (now.checkpoints.held_bytes, now.checkpoints.limit_bytes),
        "disk": (tiers.disk_bytes, tiers.disk_limit_bytes),
    }


def _read(name: str, used: int, limit: int) -> str:
    if name == "KV cells":
        return f"{used:,} of\n{limit:,}"
    return f"{used / _MIB:,.1f} of\n{limit / _MIB:,.0f} MiB"


def _ways(root: TreeNode) -> list[_Way]:
    """One for each leaf: who holds it, how long it is, and the checkpoints on the way to it."""
    ways: list[_Way] = []
    todo: list[tuple[TreeNode, list[tuple[int, str]]]] = [(root, [])]
    while todo:
        node, before = todo.pop()
        marks = before + [(each.position, each.kind.value) for each in node.checkpoints]
        todo.extend((child, marks) for child in reversed(node.children))
        if not node.children:
            owners = [f"slot {each}" for each in node.slots] + ["parked"] * bool(node.n_parked)
            stored = ["host"] * bool(node.host_tokens) + ["disk"] * bool(node.disk_tokens)
            ways.append((", ".join(owners or stored or ["no cells"]), node.end, marks))
    return ways


def _draw_ways(ax: Axes, ways: list[_Way]) -> Axes:
    seen = set()
    for y, (_, n_tokens, marks) in enumerate(ways):
        ax.barh(y, n_tokens, color=BLUE, alpha=0.35, height=0.5)
        for position, kind in marks:
            color = _KIND_COLORS.get(kind, RED)
            name = "second class" if color is AMBER else "checkpoint"
            label = None if name in seen else name
            seen.add(name)
            ax.plot([position, position], [y - 0.32, y + 0.32], color=color, linewidth=2, label=label)
    ax.set_yticks(range(len(ways)), [name for name, *_ in ways])
    ax.set_ylim(max(len(ways), 4) - 0.5, -0.5)
    _label(ax, "tokens", "")
    if seen:
        ax.legend(fontsize=8, frameon=False, loc="upper center", bbox_to_anchor=(0.5, 1.14), ncols=2)
    return ax


# ---- matplotlib ------------------------------------------------------------------------------------------------


def _axes(ax: Axes | None) -> Axes:
    """`ax`, or that of a new figure, which is drawn by its own canvas and is not pyplot's to keep or to close."""
    try:
        from matplotlib.axes import Axes
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingExtraError("plotting", "matplotlib", "notebook") from None

    class OwnAxes(Axes):
        """Shown by a notebook that is given them, which pyplot does for its figures only."""

        def _repr_png_(self) -> bytes:
            data = io.BytesIO()
            figure.savefig(data, format="png", dpi=110)
            return data.getvalue()

    if ax is None:
        figure = Figure(figsize=(6.4, 3.2), layout="constrained")
        FigureCanvasAgg(figure)
        return figure.add_subplot(axes_class=OwnAxes)
    if not isinstance(ax, Axes):
        raise InvalidRequestError("ax", f"{type(ax).__name__}: expected a matplotlib.axes.Axes, or None")
    return ax


def _label(ax: Axes, x: str, y: str) -> None:
    ax.set_xlabel(x, fontsize=9)
    ax.set_ylabel(y, fontsize=9)
    ax.tick_params(labelsize=8)
    ax.spines[["top", "right"]].set_visible(False)
