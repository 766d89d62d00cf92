"""Pieces of HTML for notebooks, and numbers as people read them.

Tables and inline SVG with inline styles: no script, no style sheet, nothing that a light or a dark notebook makes
unreadable. Text goes through `text`, which escapes it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

GREEN, AMBER, BLUE, GREY, RED = "#2f9e68", "#d9822b", "#4a82d9", "#8a8f98", "#cf5148"
"""Of middling lightness, so that they stand out from white and from black."""

_LINE = "1px solid rgba(127,127,127,.35)"
_CELL = "padding:2px 10px 2px 0;text-align:left;vertical-align:middle;border:none;white-space:nowrap;background:none"
_FONT = "font-family:system-ui,sans-serif;font-size:13px;line-height:1.5;color:inherit"


# ---- numbers ---------------------------------------------------------------------------------------------------


def number(n: float) -> str:
    """With separators, in whole."""
    return f"{n:,.0f}"


def tokens(n: int) -> str:
    """With the word."""
    return f"{n:,} token" if n == 1 else f"{n:,} tokens"


def percent(part: float, whole: float) -> str:
    """In whole percent; of nothing, 0%."""
    return f"{part / whole:.0%}" if whole else "0%"


def size(n_bytes: float) -> str:
    """In binary units: "5.6 MiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(n_bytes) < 1024 or unit == "GiB":
            break
        n_bytes /= 1024
    return f"{n_bytes:,.0f} {unit}" if unit == "B" or n_bytes >= 100 else f"{n_bytes:,.1f} {unit}"


def duration(seconds: float) -> str:
    """As in "31 ms" and "1.25 s"; a dash for nan, which stands for none."""
    if math.isnan(seconds):
        return "-"
    if seconds < 0.001:
        return f"{seconds * 1e6:.0f} µs" if seconds else "0"
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms" if seconds < 0.1 else f"{seconds * 1e3:.0f} ms"
    return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:,.1f} s"


def printable(value: str) -> str:
    """Control characters but line ends and tabs spelled out."""
    if value.isprintable():
        return value
    return "".join(
        each if each.isprintable() or each in "\n\t" else each.encode("unicode_escape").decode() for each in value
    )


# ---- HTML ------------------------------------------------------------------------------------------------------


def text(value: object) -> str:
    """Escaped, for content and for attributes; what a terminal or a parser would act on is spelled out."""
    return escape(printable(str(value)), quote=True)


def box(title: str, *parts: str, is_wide: bool = False) -> str:
    """A block of its own under a title, which is text; `parts` are HTML."""
    head = f'<div style="font-weight:600;margin-bottom:4px">{text(title)}</div>'
    width = "overflow-x:auto" if is_wide else "max-width:60em"
    return f'<div style="{_FONT};margin:4px 0 8px;{width}">{head}{"".join(parts)}</div>'


def line(content: str) -> str:
    """HTML on a line of its own."""
    return f'<div style="margin:2px 0">{content}</div>'


def muted(content: str) -> str:
    """HTML that matters less."""
    return f'<span style="opacity:.65">{content}</span>'


def strong(value: object) -> str:
    """Text that matters more."""
    return f'<b style="font-weight:600">{text(value)}</b>'


def code(value: object) -> str:
    """Text that is spelled so."""
    return f'<code style="background:none;color:inherit;padding:0;font-size:12px">{text(value)}</code>'


def clipped(value: object, width: str) -> str:
    """Text that is spelled so, cut where it is too wide; whole under the pointer."""
    style = f"display:inline-block;max-width:{width};overflow:hidden;text-overflow:ellipsis;vertical-align:bottom"
    return f'<span style="{style}" title="{text(value)}">{code(value)}</span>'


def chip(value: object, color: str) -> str:
    """A word in a coloured frame."""
    return (
        f'<span style="border:1px solid {color};border-radius:3px;padding:0 5px;margin-right:4px;font-size:12px">'
        f"{text(value)}</span>"
    )


def key(color: str, words: str, *, is_mark: bool = False) -> str:
    """An entry of a legend: a swatch, or the sign of a mark."""
    shape = "width:3px;height:12px" if is_mark else "width:11px;height:11px;border-radius:2px"
    swatch = f'<span style="display:inline-block;{shape};background:{color};margin:0 5px -1px 0"></span>'
    return f'<span style="margin-right:14px;white-space:nowrap">{swatch}{text(words)}</span>'


def table(rows: Iterable[Sequence[str]], head: Sequence[str] = (), right: frozenset[int] = frozenset()) -> str:
    """Cells are HTML, headings text; the cell of a row that has only one goes all the way. `right`: numbers."""

    def cell(kind: str, column: int, content: str, style: str = "") -> str:
        align = "text-align:right;font-variant-numeric:tabular-nums;" if column in right else ""
        return f'<{kind} style="{_CELL};{align}{style}">{content}</{kind}>'

    top = f"font-weight:600;border-bottom:{_LINE}"
    titles = "".join(cell("th", column, text(each), top) for column, each in enumerate(head))
    body = ""
    for row in rows:
        cells = "".join(cell("td", column, each) for column, each in enumerate(row))
        if len(row) == 1 and head:
            cells = f'<td colspan="{len(head)}" style="{_CELL};padding-top:6px">{row[0]}</td>'
        body += f'<tr style="background:none">{cells}</tr>'
    heads = f"<thead><tr>{titles}</tr></thead>" if head else ""
    style = "border-collapse:collapse;border:none;margin:2px 0 6px;color:inherit;font:inherit"
    return f'<table style="{style}">{heads}<tbody>{body}</tbody></table>'


# ---- SVG -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Part:
    """A stretch of a bar."""

    start: float
    end: float
    color: str
    title: str
    """Shown under the pointer; text."""
    opacity: float = 1.0


@dataclass(frozen=True, slots=True)
class Tick:
    """A mark in a bar."""

    at: float
    color: str
    title: str


def bar(
    parts: Sequence[Part], whole: float, *, ticks: Sequence[Tick] = (), width: str = "100%", label: str = ""
) -> str:
    """Stretches of `whole`, on a track. `label` is what a screen reader says."""
    whole = max(whole, 1e-12)

    def x(value: float) -> str:
        return f"{100 * min(1.0, max(0.0, value / whole)):.3f}%"

    shapes = ['<rect x="0" y="4" width="100%" height="10" rx="2" fill="#808080" fill-opacity=".16"/>']
    for each in parts:
        if each.end > each.start:
            wide = 100 * (min(each.end, whole) - max(0.0, each.start)) / whole
            shapes.append(
                f'<rect x="{x(each.start)}" y="4" width="{max(wide, 0.15):.3f}%" height="10" rx="1" '
                f'fill="{each.color}" fill-opacity="{each.opacity:g}"><title>{text(each.title)}</title></rect>'
            )
    for tick in ticks:
        shapes.append(
            f'<line x1="{x(tick.at)}" x2="{x(tick.at)}" y1="0" y2="18" stroke="{tick.color}" stroke-width="2.5">'
            f"<title>{text(tick.title)}</title></line>"
        )
    return (
        f'<svg role="img" aria-label="{text(label)}" width="{width}" height="18" overflow="visible" '
        f'style="display:block;min-width:8em">{"".join(shapes)}</svg>'
    )


def columns(heights: Sequence[float], titles: Sequence[str], color: str = BLUE) -> str:
    """A small bar chart, of one column for each height."""
    most, width = max([*heights, 1e-12]), 7
    shapes = []
    for index, (height, title) in enumerate(zip(heights, titles, strict=True)):
        high = max(1.0, 24 * height / most) if height else 0.5
        opacity = 1 if height else 0.4
        shapes.append(
            f'<rect x="{index * width}" y="{26 - high:.1f}" width="{width - 1}" height="{high:.1f}" fill="{color}" '
            f'fill-opacity="{opacity}"><title>{text(title)}</title></rect>'
        )
    return f'<svg width="{width * len(heights)}" height="26" style="display:block">{"".join(shapes)}</svg>'
