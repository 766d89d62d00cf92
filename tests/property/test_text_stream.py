"""Chunks against decoding everything at once, however the bytes are split."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pyllamacache.text.decode import TextStream

letters = st.text("ab→\U0001f600\ufffd", max_size=12)
any_bytes = st.lists(letters.map(str.encode) | st.binary(max_size=3), max_size=6).map(b"".join)
stop_lists = st.lists(st.text("ab→\ufffd", min_size=1, max_size=4), max_size=3)


@st.composite
def split(draw: st.DrawFn) -> list[bytes]:
    data = draw(any_bytes)
    cuts = sorted(draw(st.lists(st.integers(0, len(data)), max_size=8)))
    return [data[start:end] for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True)]


def cut_at_the_first_stop(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The first stop to be complete; of those complete at the same character, the longest."""
    for end in range(len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return text[: end - len(stop)], stop
    return text, None


@given(split(), stop_lists)
def test_chunks_add_up_to_the_text_before_the_first_stop(pieces: list[bytes], stops: list[str]) -> None:
    stream = TextStream(stops)
    text = "".join([stream.push(piece) for piece in pieces] + [stream.finish()])
    expected = cut_at_the_first_stop(b"".join(pieces).decode("utf-8", "replace"), stops)
    assert (text, stream.stop_string) == expected
    assert stream.stopped == (expected[1] is not None)


@given(split(), stop_lists)
def test_every_chunk_is_valid_and_no_more_is_held_than_could_be_a_stop(pieces: list[bytes], stops: list[str]) -> None:
    stream = TextStream(stops)
    text, seen = "", b""
    for piece in pieces:
        seen += piece
        chunk = stream.push(piece)
        chunk.encode("utf-8")
        text += chunk
        if stream.stopped:
            break
        # Without the incomplete sequence at the end, which waits for its rest.
        known = TextStream().push(seen)
        possible = [stop[:n] for stop in stops for n in range(1, len(stop)) if known.endswith(stop[:n])]
        assert text + max(possible, key=len, default="") == known


@given(split(), stop_lists)
def test_nothing_comes_after_a_stop(pieces: list[bytes], stops: list[str]) -> None:
    stream = TextStream(stops)
    for piece in pieces:
        was_stopped = stream.stopped
        chunk = stream.push(piece)
        assert not (was_stopped and chunk)
    assert not (stream.stopped and stream.finish())
