"""Replies to messages, with a parser that gives up where it is told to."""

from __future__ import annotations

from typing import Any

import pytest

from pyllamacache.chat.reply import ReplyReader
from pyllamacache.errors import ChatTemplateError


class Parser:
    """Everything is content, after `thinks` characters of reasoning; fails from the `fails_at`-th call on."""

    def __init__(self, *, fails_at: int | None = None, thinks: int = 0) -> None:
        self._fails_at, self._thinks = fails_at, thinks
        self._n_calls = 0

    def feed(self, text: str, *, is_last: bool) -> dict[str, Any]:
        self._n_calls += 1
        if self._fails_at is not None and self._n_calls >= self._fails_at:
            raise ChatTemplateError("not in the format")
        thought, self._thinks = text[: self._thinks], max(0, self._thinks - len(text))
        return {"deltas": [{"content": text[len(thought) :], "reasoning_content": thought}]}


def read(reader: ReplyReader, *pieces: str) -> str:
    deltas = [delta for n, piece in enumerate(pieces) for delta in reader.feed(piece, is_last=n == len(pieces) - 1)]
    return "".join(delta.content or "" for delta in deltas)


@pytest.mark.parametrize("fails_at", [None, 1, 2, 3, 4])
def test_no_reply_is_lost_to_a_parser_that_gives_up(fails_at: int | None) -> None:
    reader = ReplyReader(Parser(fails_at=fails_at))
    assert read(reader, "one ", "two ", "three ", "four") == "one two three four"
    assert reader.message.content == "one two three four"
    assert reader.is_readable == (fails_at is None)


def test_what_was_read_as_reasoning_stays_reasoning() -> None:
    reader = ReplyReader(Parser(fails_at=3, thinks=4))
    assert read(reader, "hm. ", "so ", "it is", " four") == "so it is four"
    assert reader.message.reasoning_content == "hm. "
