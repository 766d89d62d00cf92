from __future__ import annotations

import pytest

from pyllamacache.text.decode import TextStream


def chunks(stream: TextStream, *pieces: bytes) -> list[str]:
    return [stream.push(piece) for piece in pieces] + [stream.finish()]


def test_plain_text_comes_at_once() -> None:
    assert chunks(TextStream(), b"Hel", b"lo") == ["Hel", "lo", ""]


def test_an_incomplete_character_waits_for_its_rest() -> None:
    assert chunks(TextStream(), b"\xf0\x9f", b"\x98", b"\x80!") == ["", "", "\U0001f600!", ""]


def test_an_incomplete_character_at_the_end_is_replaced() -> None:
    assert chunks(TextStream(), b"a\xf0\x9f") == ["a", "\ufffd"]


def test_an_invalid_byte_is_replaced_and_what_follows_survives() -> None:
    assert chunks(TextStream(), b"a\xff", b"b") == ["a\ufffd", "b", ""]


def test_a_stop_string_over_three_tokens_ends_the_text_before_it() -> None:
    stream = TextStream(["STOP"])
    assert chunks(stream, b"abS", b"TO", b"P more", b"never") == ["ab", "", "", "", ""]
    assert stream.stopped
    assert stream.stop_string == "STOP"


def test_only_a_possible_beginning_is_held_back() -> None:
    assert chunks(TextStream(["\n\nUser"]), b"one\n", b"two\n\n", b"U", b"ser!") == ["one", "\ntwo", "", "", ""]


def test_what_turned_out_to_be_no_stop_comes_out() -> None:
    stream = TextStream(["STOP"])
    assert chunks(stream, b"ST", b"ART") == ["", "START", ""]
    assert not stream.stopped


def test_what_is_held_back_at_the_end_comes_with_finish() -> None:
    assert chunks(TextStream(["STOP"]), b"abST") == ["ab", "ST"]


def test_a_beginning_within_a_beginning_is_found() -> None:
    """The first "aa" of "aaab" is no start, the stop begins one character later."""
    assert chunks(TextStream(["aab"]), b"a", b"a", b"a", b"b") == ["", "", "a", "", ""]


def test_the_stop_that_is_complete_first_wins() -> None:
    stream = TextStream(["abcd", "c"])
    assert chunks(stream, b"xabcd") == ["xab", ""]
    assert stream.stop_string == "c"


def test_what_was_held_for_one_stop_comes_out_when_another_is_complete() -> None:
    assert chunks(TextStream(["abc", "x"]), b"zab", b"x") == ["z", "ab", ""]


@pytest.mark.parametrize("stops", [["bc", "c"], ["c", "bc"]])
def test_of_stops_that_end_together_the_longest_wins(stops: list[str]) -> None:
    stream = TextStream(stops)
    assert chunks(stream, b"ab", b"c") == ["a", "", ""]
    assert stream.stop_string == "bc"


def test_a_stop_string_of_several_bytes_a_character_may_be_split_within_one() -> None:
    stream = TextStream(["→end"])
    assert chunks(stream, b"go \xe2\x86", b"\x92e", b"nd") == ["go ", "", "", ""]
    assert stream.stopped


def test_a_stop_completed_by_the_replacement_of_the_last_bytes_counts() -> None:
    stream = TextStream(["x\ufffd"])
    assert chunks(stream, b"ax", b"\xe2\x86") == ["a", "", ""]
    assert stream.stopped


def test_finish_may_be_called_again() -> None:
    stream = TextStream(["STOP"])
    stream.push(b"ST")
    assert [stream.finish(), stream.finish()] == ["ST", ""]
