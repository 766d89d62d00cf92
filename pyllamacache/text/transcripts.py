"""What texts of earlier requests were spelled with, and prompts that go on with those tokens.

A reply that comes back as text can split into other tokens than were sampled, and then nothing behind them is reused.
So the ids of text prompts and their replies are kept beside the text that they spell. Where a later prompt says the
same, their ids are used, and the rest is tokenized.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from ..request import Prompt, Spelling
from .marked import MarkedTokenizer, Ranges, agrees_upto

if TYPE_CHECKING:
    from ..request import Ids
    from .spelling import Speller, Tokenize

MAX_TRANSCRIPTS = 256
MAX_BYTES = 32 << 20
"""Text and arrays of all transcripts; about 12 bytes a token, so some 2.5 million tokens."""

_FIRST_BLOCK = 256
_GROWTH = 8


@dataclass(frozen=True, slots=True)
class Transcript:
    """A text prompt and its reply, as far as it adds to the text.

    `retokenized_at` is the prompt's, as in `CacheReport`. `ids` has shape (n_tokens,).
    """

    namespace: str
    ids: Ids
    spelling: Spelling
    retokenized_at: int | None = None
    n_prompt: int = 1 << 62
    """Tokens of the prompt; `retokenized_at` says nothing of those behind."""

    @property
    def size_bytes(self) -> int:
        spelling = self.spelling
        return len(spelling.data) + self.ids.nbytes + spelling.ends.nbytes + spelling.controls.nbytes

    def serves(self, namespace: str, add_special: bool, parse_special: bool) -> bool:
        """Whether a prompt made so may use it: control tokens in it are those that the same text would give there."""
        mine = self.spelling
        return (self.namespace, mine.add_special, mine.parse_special) == (namespace, add_special, parse_special)

    def covers(self, other: Transcript) -> bool:
        """Whether it begins with all of `other`."""
        mine, its = self.spelling, other.spelling
        return (
            self.serves(other.namespace, its.add_special, its.parse_special)
            and len(self.ids) >= len(other.ids)
            and mine.data.startswith(its.data)
            and np.array_equal(self.ids[: len(other.ids)], other.ids)
        )

    def absorb(self, others: Sequence[Transcript]) -> Transcript:
        """Itself, with the ends of replies that others it covers know of."""
        ends = set(self.spelling.reply_ends).union(*(other.spelling.reply_ends for other in others))
        return replace(self, spelling=replace(self.spelling, reply_ends=tuple(sorted(ends))))


def transcribe(
    namespace: str,
    prompt: Prompt,
    generated: Sequence[int],
    piece: Callable[[int], bytes],
    control_text: Callable[[int], bytes],
    ends_reply: frozenset[int],
) -> Transcript | None:
    """The transcript of a request that ended. None: its prompt has no spelling.

    A token in `ends_reply` ends it: sent back as text, it comes from a template. So does one that adds nothing to the
    text, unless control tokens that the text spells are parsed.
    """
    known = prompt.spelling
    if known is None:
        return None
    tokens: list[int] = []
    pieces: list[bytes] = []
    controls: list[int] = []
    for token in generated:
        spelled = b"" if token in ends_reply else piece(token)
        if not spelled and known.parse_special and token not in ends_reply:
            spelled = control_text(token)
            controls.append(len(prompt.ids) + len(tokens))
        if not spelled:
            break
        tokens.append(token)
        pieces.append(spelled)
    if not tokens:
        return Transcript(namespace, prompt.ids, known, prompt.retokenized_at)
    ids = np.concatenate([prompt.ids, np.array(tokens, dtype=np.int32)])
    lengths = np.fromiter(map(len, pieces), np.int32, len(pieces))
    ends = np.concatenate([known.ends, len(known.data) + np.cumsum(lengths, dtype=np.int32)])
    spelling = replace(
        known,
        data=known.data + b"".join(pieces),
        ends=ends,
        controls=np.concatenate([known.controls, np.array(controls[: len(tokens)], dtype=np.int32)]),
        reply_ends=(*known.reply_ends, len(ids)),
    )
    return Transcript(namespace, ids, spelling, prompt.retokenized_at, len(prompt.ids))


class Transcripts:
    """Those of the last requests, the oldest first. One thread writes; others may read at any time, without a lock.

    A request that uses one leaves another with the same beginning, so the oldest is the one least recently used. What
    a newer one covers is dropped for it. Bytes and count are limits at every instant.
    """

    def __init__(self, max_transcripts: int = MAX_TRANSCRIPTS, max_bytes: int = MAX_BYTES) -> None:
        self._max_transcripts = max_transcripts
        self._max_bytes = max_bytes
        self._all: tuple[Transcript, ...] = ()  # never changed, only replaced: readers keep the one they saw

    def __len__(self) -> int:
        return len(self._all)

    @property
    def size_bytes(self) -> int:
        return sum(each.size_bytes for each in self._all)

    def add(self, new: Transcript) -> None:
        """As the newest, unless it is too large."""
        if new.size_bytes > self._max_bytes:
            return
        kept: list[Transcript] = []
        covered: list[Transcript] = []
        for each in self._all:
            if each.covers(new):
                covered.append(new)
                new = each  # goes on from here as the newest
            elif new.covers(each):
                covered.append(each)
            else:
                kept.append(each)
        kept.append(new.absorb(covered) if covered else new)
        n_bytes = sum(each.size_bytes for each in kept)
        n_dropped = 0
        while n_bytes > self._max_bytes or len(kept) - n_dropped > self._max_transcripts:
            n_bytes -= kept[n_dropped].size_bytes
            n_dropped += 1
        self._all = tuple(kept[n_dropped:])

    def clear(self, namespace: str | None = None) -> None:
        """Drop those of a namespace, or (None) all."""
        self._all = tuple(each for each in self._all if namespace not in (None, each.namespace))

    def match(
        self, data: bytes, namespace: str, add_special: bool, parse_special: bool
    ) -> tuple[Transcript, int] | None:
        """The one that has most of its beginning in common with `data`, the newest of equals, and how many bytes."""
        best: Transcript | None = None
        n_best = 0
        for each in reversed(self._all):
            if not each.serves(namespace, add_special, parse_special):
                continue
            # most differ where they would have to be better, so few are compared from the start
            last = slice(max(0, n_best - _FIRST_BLOCK), n_best + 1)
            if len(each.spelling.data) <= n_best or each.spelling.data[last] != data[last]:
                continue
            n_common = _common_prefix(each.spelling.data, data)
            if n_common > n_best:
                best, n_best = each, n_common
            if n_best == len(data):
                break
        return None if best is None else (best, n_best)


@dataclass(frozen=True, slots=True)
class _Tail:
    """Tokens of a text from a byte on. `ends` count from the beginning of the text, `controls` from that of `ids`."""

    start: int
    ids: Ids
    ends: Ids
    controls: Ids
    literals: Ranges = ()

    def control_starts(self) -> Ids:
        """Where the control tokens begin."""
        return np.concatenate([[np.int32(self.start)], self.ends])[self.controls]

    def n_ending_at(self, offset: int) -> int:
        """Tokens up to the first that ends at `offset`; one that spells nothing belongs to what follows."""
        return 0 if offset <= self.start else int(np.searchsorted(self.ends, offset)) + 1


class TextMatcher:
    """Text prompts to ids, with those of transcripts where they spell the same. Runs on the callers' threads."""

    def __init__(self, transcripts: Transcripts, tokenize: Tokenize, speller: Speller) -> None:
        self._transcripts = transcripts
        self._tokenizer = MarkedTokenizer(tokenize, speller)

    def prompt(
        self,
        text: str,
        namespace: str,
        add_special: bool,
        parse_special: bool,
        *,
        match: bool,
        inputs: Ranges = (),
    ) -> Prompt:
        """`text` as a prompt. `match` False is plain tokenization.

        What spells a control token in `inputs`, ranges of its UTF-8, stays text.
        """
        data = text.encode()
        found = self._transcripts.match(data, namespace, add_special, parse_special) if match else None
        if found is not None:
            prompt = self._continue(*found, text, data, inputs)
            if prompt is not None:
                return prompt
        ids, spelling = self._tokenizer.whole(text, data, inputs, add_special, parse_special)
        return Prompt(ids, text, spelling)

    def _continue(self, known: Transcript, n_common: int, text: str, data: bytes, inputs: Ranges) -> Prompt | None:
        """`data`, whose first `n_common` bytes `known` begins with. None: its plain tokens do not spell it.

        Plain tokenization is made from a place where it begins anew, whatever came before: the last control token in
        the common part, or the beginning. The transcript is left for it at the last place where both have a token
        end: from there on the ids are the plain ones. The end of a reply is kept even if a plain token crosses it.
        """
        spelling = known.spelling
        n_common = agrees_upto(spelling, inputs, n_common)
        n_before, plain = self._plain(known, n_common, text, data, inputs)
        if plain is None:
            return None
        mine = _tail_of(known, n_before)
        limit = _first_other_control(mine, plain, n_common)
        cut, rest = _last_common_end(mine, plain, limit, data), plain
        reply_end = _last_reply_end(spelling, limit, data)
        if reply_end > cut:
            follows = self._tokens_from(reply_end, data, inputs, spelling.parse_special)
            if follows is not None:
                cut, rest = _last_common_end(mine, follows, limit, data), follows
        n_kept = n_before + mine.n_ending_at(cut)
        ids = np.concatenate([known.ids[:n_kept], rest.ids[rest.n_ending_at(cut) :]])
        differs_at = known.retokenized_at
        if differs_at is None or differs_at >= n_before:
            differs_at = _first_difference(ids, plain.ids, n_before)
        return Prompt(ids, text, _joined(spelling, n_kept, rest, rest.n_ending_at(cut), data), differs_at)

    def _plain(
        self, known: Transcript, n_common: int, text: str, data: bytes, inputs: Ranges
    ) -> tuple[int, _Tail | None]:
        """Plain tokens of `data` from some token of `known` on, and which one it is."""
        spelling = known.spelling
        n_controls = int(np.searchsorted(spelling.ends[spelling.controls], n_common, side="right"))
        n_controls = min(n_controls, int(np.searchsorted(spelling.controls, known.n_prompt)))
        if n_controls:
            index = int(spelling.controls[n_controls - 1])
            tail = self._tokens_from(_tail_of(known, index).start, data, inputs, spelling.parse_special)
            if tail is not None and tail.ids[0] == known.ids[index]:
                return index, tail
        ids, whole = self._tokenizer.whole(text, data, inputs, spelling.add_special, spelling.parse_special)
        return 0, None if whole is None else _Tail(0, ids, whole.ends, whole.controls, whole.literals)

    def _tokens_from(self, start: int, data: bytes, inputs: Ranges, parse_special: bool) -> _Tail | None:
        """`data` from a byte on, tokenized by itself; None where its tokens do not spell it."""
        tail = self._tokenizer.tail(start, data, inputs, parse_special)
        if tail is None:
            return None
        ids, ends, controls, literals = tail
        return _Tail(start, ids, ends + np.int32(start), controls, literals)


def _tail_of(known: Transcript, n_before: int) -> _Tail:
    spelling = known.spelling
    start = int(spelling.ends[n_before - 1]) if n_before else 0
    controls = spelling.controls[int(np.searchsorted(spelling.controls, n_before)) :] - np.int32(n_before)
    return _Tail(start, known.ids[n_before:], spelling.ends[n_before:], controls)


def _first_other_control(mine: _Tail, plain: _Tail, limit: int) -> int:
    """`limit`, or where before it the first control token begins that only one of both has.

    What spells a control token in a prompt that is parsed for them is one, also where a reply spelled it otherwise.
    """
    only_one = np.setxor1d(mine.control_starts(), plain.control_starts(), assume_unique=True)
    return min(limit, int(only_one[0])) if len(only_one) else limit


def _last_common_end(mine: _Tail, other: _Tail, limit: int, data: bytes) -> int:
    """The last byte, `limit` at most, at which both have a token end, and no character is cut."""
    ends = mine.ends[: int(np.searchsorted(mine.ends, limit, side="right"))]
    ends = ends[int(np.searchsorted(ends, other.start, side="right")) :]
    places = np.minimum(np.searchsorted(other.ends, ends), len(other.ends) - 1)
    for end in reversed(ends[other.ends[places] == ends].tolist()):
        if _is_between_characters(data, end):
            return int(end)
    return other.start


def _last_reply_end(spelling: Spelling, limit: int, data: bytes) -> int:
    """The last byte, `limit` at most, at which a reply ended between two characters; else 0."""
    for n_tokens in reversed(spelling.reply_ends):
        end = int(spelling.ends[n_tokens - 1])
        if end <= limit and _is_between_characters(data, end):
            return end
    return 0


def _joined(known: Spelling, n_kept: int, rest: _Tail, n_skipped: int, data: bytes) -> Spelling:
    controls = known.controls[: int(np.searchsorted(known.controls, n_kept))]
    others = rest.controls[int(np.searchsorted(rest.controls, n_skipped)) :]
    literals = [each for each in known.literals if each[1] <= rest.start]
    return replace(
        known,
        data=data,
        ends=np.concatenate([known.ends[:n_kept], rest.ends[n_skipped:]]),
        controls=np.concatenate([controls, others + np.int32(n_kept - n_skipped)]),
        reply_ends=tuple(n_tokens for n_tokens in known.reply_ends if n_tokens <= n_kept),
        literals=(*literals, *rest.literals),
    )


def _first_difference(ids: Ids, plain: Ids, n_before: int) -> int | None:
    """Position at which `ids` differ from `n_before` equal ones and then the plain ones; None: nowhere."""
    ids = ids[n_before:]
    n_tokens = min(len(ids), len(plain))
    differs = np.flatnonzero(ids[:n_tokens] != plain[:n_tokens])
    if len(differs):
        return n_before + int(differs[0])
    return None if len(ids) == len(plain) else n_before + n_tokens


def _is_between_characters(data: bytes, offset: int) -> bool:
    return offset >= len(data) or data[offset] & 0xC0 != 0x80


def _common_prefix(a: bytes, b: bytes) -> int:
    """Number of leading bytes that both share; in growing blocks, since slices of bytes compare as fast as memory."""
    n_bytes = min(len(a), len(b))
    start, block = 0, _FIRST_BLOCK
    while start < n_bytes and a[start : start + block] == b[start : start + block]:
        start, block = start + block, block * _GROWTH
    if start >= n_bytes:
        return n_bytes
    end = min(start + block, n_bytes)
    while end - start > 1:
        middle = (start + end) // 2
        if a[start:middle] == b[start:middle]:
            start = middle
        else:
            end = middle
    return start + (a[start : start + 1] == b[start : start + 1])
