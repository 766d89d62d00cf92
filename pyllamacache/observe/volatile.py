"""Text that is another one at the next call: clocks, dates, ids, hashes, counters. Found by how it is written.

What many prompts say for good is left alone: versions, examples of a format, dates without a word like "today" beside
them, steps of a recipe. Knows no prompts, only texts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum


class Volatile(str, Enum):
    """What kind of text will change."""

    TIMESTAMP = "timestamp"
    """Date and time, or seconds since 1970."""
    TIME = "time"
    """A time of day."""
    DATE = "date"
    """Today's date, or that of an update."""
    UUID = "uuid"
    ID = "id"
    """Of a request, session, trace, run, ..."""
    HASH = "hash"
    """A digest, a commit, a nonce."""
    COUNTER = "counter"
    """Turns, messages, tokens used or left."""

    __str__ = str.__str__


@dataclass(frozen=True, slots=True)
class Sighting:
    """`text[start:end]`. `is_sure`: a text written so is hardly ever constant."""

    kind: Volatile
    start: int
    end: int
    is_sure: bool


_MONTH = r"(?:jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]{0,6}\.?"
_DAY = r"(?:(?:mon|tues|wednes|thurs|fri|satur|sun)day,?\s+)?"
_ISO_DAY = r"(?:19|20)\d\d-(?:0\d|1[0-2])-(?:[0-2]\d|3[01])"
_CLOCK = r"(?:[01]?\d|2[0-3]):[0-5]\d(?::[0-5]\d(?:[.,]\d+)?)?"
_ZONE = r"(?:\s?(?:Z\b|UTC\b|GMT\b|[A-Z]{2,4}T\b|[+-]\d\d:?\d\d\b))?"
_HEX = "[0-9a-f]"

_NOW = re.compile(
    r"\b(now|today\w*|tonight|current(ly)?|as of|date|time|clock|timestamp|generated|updated|refreshed|synced|started|"
    r"since|uptime|it is|it's)\b[^\n]{0,32}$",
    re.IGNORECASE,
)
_EXAMPLE = re.compile(
    r"\b(e\.?g\.?|examples?|for instance|such as|like|format(ted)?|version|released?|cut-?off|since|before|until|after|"
    r"between|from)\b[^\n]{0,40}$",
    re.IGNORECASE,
)
_LOOK_BACK_CHARS = 60
_EXAMPLE_UUIDS = ("00000000-0000-0000-0000-000000000000", "123e4567-e89b-12d3-a456-426614174000")


@dataclass(frozen=True, slots=True)
class _Pattern:
    kind: Volatile
    regex: re.Pattern[str]
    needs_now: bool = False
    """Only beside a word that says it is about the present."""
    is_sure: bool = True


def _pattern(
    kind: Volatile, regex: str, *, needs_now: bool = False, is_sure: bool = True, cased: bool = False
) -> _Pattern:
    return _Pattern(kind, re.compile(regex, 0 if cased else re.IGNORECASE), needs_now, is_sure)


_PATTERNS = (
    _pattern(Volatile.TIMESTAMP, rf"\b{_ISO_DAY}[T ]{_CLOCK}{_ZONE}", cased=True),
    _pattern(Volatile.TIMESTAMP, rf"\b{_DAY}{_MONTH}\s+\d{{1,2}}(?:st|nd|rd|th)?,?\s+20\d\d,?(?:\s+at)?\s+{_CLOCK}"),
    _pattern(Volatile.TIMESTAMP, r"\b1[5-9]\d{8}(?:\d{3})?(?:\.\d+)?\b", needs_now=True),
    _pattern(Volatile.TIME, rf"\b{_CLOCK}(?:\s?[ap]\.?m\b)?{_ZONE}", needs_now=True),
    _pattern(Volatile.TIME, r"\b(?:[01]\d|2[0-3]):[0-5]\d:[0-5]\d(?:[.,]\d+)?\b", is_sure=False),
    _pattern(Volatile.DATE, rf"\b{_ISO_DAY}\b", needs_now=True),
    _pattern(Volatile.DATE, rf"\b{_DAY}{_MONTH}\s+\d{{1,2}}(?:st|nd|rd|th)?,?\s+20\d\d\b", needs_now=True),
    _pattern(Volatile.DATE, rf"\b{_DAY}\d{{1,2}}(?:st|nd|rd|th)?\s+{_MONTH},?\s+20\d\d\b", needs_now=True),
    _pattern(Volatile.DATE, r"\b(?:[0-3]?\d)[./](?:[0-3]?\d)[./]20\d\d\b", needs_now=True),
    _pattern(Volatile.UUID, rf"\b{_HEX}{{8}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{12}}\b"),
    _pattern(
        Volatile.ID,
        r"\b(?:request|session|trace|span|correlation|run|conversation|thread|execution|invocation|job)"
        r"[ _-]?id\b[\"']?(?:\s+is)?\s*[:=]?\s*[\"'`]?(?=[\w-]*\d)[\w-]{5,}",
    ),
    _pattern(Volatile.ID, r"\b(?:req|sess|run|trace|conv|thread|chatcmpl|resp)[_-](?=[A-Za-z0-9]*\d)[A-Za-z0-9]{8,}\b"),
    _pattern(
        Volatile.HASH, rf"\b(?=[0-9]*[a-f])(?=[a-f]*[0-9])(?:{_HEX}{{32}}|{_HEX}{{40}}|{_HEX}{{64}})\b", is_sure=False
    ),
    _pattern(
        Volatile.HASH,
        rf"\b(?:commit|head|revision|sha\d*|digest|checksum|etag|nonce|cch)\b[\"']?\s*(?:is|[:=@])?\s*[\"'`]?"
        rf"(?=[0-9]*[a-f])(?=[a-f]*[0-9]){_HEX}{{5,64}}\b",
        is_sure=False,
    ),
    _pattern(
        Volatile.COUNTER, r"\b(?:turn|message|iteration|round|attempt|request|step)\s*#?\s*\d+\s*(?:of|/)\s*\d+\b"
    ),
    _pattern(
        Volatile.COUNTER, r"\b(?:(?:current|this is)\s+)?(?:turn|iteration)(?:\s+(?:number|count))?\s*[#:=]?\s*\d+\b"
    ),
    _pattern(
        Volatile.COUNTER,
        r"\b(?:tokens?|messages?|requests?|calls?|turns?|credits?|budget|context|cost)\s+"
        r"(?:used|left|remaining|spent|so far|consumed)\b(?:\s+(?:is|so far))?\s*[:=]?\s*[$€]?\d[\d,.]*%?",
    ),
    _pattern(
        Volatile.COUNTER,
        r"[$€]?\b\d[\d,.]*%?\s*(?:/\s*\d[\d,.]*\s*)?(?:tokens?|messages?|requests?|calls?|turns?|credits?)?\s+"
        r"(?:tokens?\s+)?(?:used so far|used|left|remaining|spent so far)\b",
        is_sure=False,
    ),
)


def find_volatile(text: str) -> list[Sighting]:
    """What of `text` will change, in order; nothing overlaps."""
    found: list[Sighting] = []
    for each in sorted(_matches(text), key=lambda each: (each.start, -each.end)):
        if not found or each.start >= found[-1].end:
            found.append(each)
    return found


def _matches(text: str) -> Iterator[Sighting]:
    for pattern in _PATTERNS:
        for match in pattern.regex.finditer(text):
            before = text[max(0, match.start() - _LOOK_BACK_CHARS) : match.start()]
            is_about_now = _NOW.search(before) is not None
            if pattern.needs_now and not is_about_now:
                continue
            if _EXAMPLE.search(before) is not None or match.group().lower() in _EXAMPLE_UUIDS:
                continue
            is_sure = pattern.is_sure and (pattern.kind is not Volatile.TIMESTAMP or is_about_now)
            yield Sighting(pattern.kind, match.start(), match.end(), is_sure)
