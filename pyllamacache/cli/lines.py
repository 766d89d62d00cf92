"""Facts as lines for a terminal. What comes out of a file may say anything, so nothing unprintable passes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

Say = Callable[[str], None]
"""Prints one line, at once."""

_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")


def printable(text: str, *, max_chars: int | None = None) -> str:
    """`text` on one line, control characters escaped, so that a name in a file cannot drive the terminal."""
    shown = "".join(sign if sign.isprintable() else sign.encode("unicode_escape").decode() for sign in text)
    if max_chars is None or len(shown) <= max_chars:
        return shown
    return f"{shown[:max_chars]}..."


def size(n_bytes: int) -> str:
    """`98362432` as `93.8 MiB`."""
    value, unit = float(n_bytes), _UNITS[0]
    for larger in _UNITS[1:]:
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{n_bytes:,} {unit}" if unit == _UNITS[0] else f"{value:,.1f} {unit}"


def fact_lines(facts: Mapping[str, str], *, indent: str = "") -> Iterator[str]:
    """`name   value`, values aligned."""
    width = max(map(len, facts), default=0)
    return (f"{indent}{name:<{width}}  {value}" for name, value in facts.items())
