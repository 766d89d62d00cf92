"""The option `boundaries`: token offsets and marks in the text, as positions inside the prompt."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from pyllamacache.errors import InvalidRequestError
from pyllamacache.request import Request, RequestId
from pyllamacache.text.options import MAX_MARKS, build_request
from pyllamacache.text.validate import MAX_BOUNDARIES, check_boundaries

if TYPE_CHECKING:
    from pyllamacache.request import Ids
    from pyllamacache.text.options import PromptInput

BOS, MERGED = 256, 257
N_VOCAB = 300


class Tokenizer:
    """Bytes; "th" is one token, as merges make of letters on both sides of a seam; BOS where it is asked for."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def __call__(self, text: str, add_special: bool, parse_special: bool) -> Ids:
        self.texts.append(text)
        data = text.replace("<bos>", "") if parse_special else text
        ids = [MERGED if each == "\x00" else ord(each) for each in data.replace("th", "\x00")]
        return np.array([BOS, *ids] if add_special else ids, dtype=np.int32)


def request(
    prompt: PromptInput, boundaries: object = (), *, tokenizer: Tokenizer | None = None, **options: Any
) -> Request:
    given: Any = {"boundaries": boundaries, **options}
    return build_request(
        prompt,
        given,
        request_id=RequestId(1),
        tokenize=tokenizer or Tokenizer(),
        has_vocab=True,
        n_vocab=N_VOCAB,
        n_slots=1,
        n_ctx=100_000,
    )


def positions(prompt: PromptInput, boundaries: object, **options: Any) -> tuple[int, ...]:
    found = request(prompt, boundaries, **options).boundaries
    assert all(type(position) is int for position in found)
    return found


# ---- token offsets ---------------------------------------------------------------------------------------------


def test_there_are_none_unless_the_caller_says_so() -> None:
    assert request("abc").boundaries == ()
    assert positions("abc", []) == ()
    assert positions("abc", np.array([], dtype=np.int64)) == ()


@pytest.mark.parametrize(
    "boundaries",
    [
        [7, 3, 3],
        (3, 7),
        range(3, 8, 4),
        np.array([7, 3]),
        np.array([3, 7], dtype=np.uint8),
        [np.int64(3), np.int32(7)],
    ],
)
def test_offsets_of_any_integer_kind_become_ascending_positions(boundaries: object) -> None:
    assert positions(list(range(10)), boundaries) == (3, 7)


def test_an_offset_outside_the_prompt_marks_nothing() -> None:
    """A caller may say where messages end without looking at what is last."""
    assert positions(list(range(10)), [0, 1, 9, 10, 11, 2**31 - 1]) == (1, 9)
    assert positions([5], [0, 1]) == ()


def test_offsets_count_the_tokens_of_a_text_prompt_bos_included() -> None:
    assert positions("ab", [1, 2, 3]) == (1, 2)
    assert positions("ab", [1, 2, 3], add_special=False) == (1,)


@pytest.mark.parametrize(
    "boundaries",
    [5, None, "abc", b"ab", {3}, {3: 4}, iter([3]), np.array(3), object()],
    ids=lambda value: type(value).__name__,
)
def test_what_is_no_sequence_is_refused(boundaries: object) -> None:
    with pytest.raises(InvalidRequestError, match="boundaries: a sequence of token offsets or texts") as caught:
        request("abc", boundaries)
    assert caught.value.field == "boundaries"
    assert len(str(caught.value)) < 150


@pytest.mark.parametrize(
    "boundaries",
    [
        [-1],
        [1.0],
        [True],
        [None],
        [b"a"],
        [[1]],
        [2**31],
        [10**5000],
        np.array([1.5]),
        np.array([[1]]),
        np.array([True]),
    ],
)
def test_what_is_no_offset_is_refused(boundaries: object) -> None:
    with pytest.raises(InvalidRequestError, match="boundaries") as caught:
        request("abc", boundaries)
    assert len(str(caught.value)) < 150


def test_so_many_are_taken_and_no_more() -> None:
    assert len(check_boundaries(range(MAX_BOUNDARIES))) == MAX_BOUNDARIES
    with pytest.raises(InvalidRequestError, match=rf"{MAX_BOUNDARIES + 1} of them; at most {MAX_BOUNDARIES}"):
        check_boundaries(range(MAX_BOUNDARIES + 1))


# ---- marks in the text -----------------------------------------------------------------------------------------


def test_a_text_marks_the_place_before_each_of_its_occurrences() -> None:
    assert positions("ab#cd#ef", ["#"]) == (3, 6)
    assert positions("ab#cd#ef", ["#"], add_special=False) == (2, 5)
    assert positions("ab#cd#ef", ["#c", "#e"]) == (3, 6)


def test_offsets_and_texts_may_be_mixed() -> None:
    assert positions("ab#cd#ef", [7, "#", 3]) == (3, 6, 7)


def test_a_mark_that_is_not_there_marks_nothing() -> None:
    assert positions("abc", ["xyz", "abcd"]) == ()


def test_a_mark_at_the_start_or_longer_than_the_rest_is_a_place_too() -> None:
    """Before the first character is after BOS, where there is one."""
    assert positions("ab", ["ab"]) == (1,)
    assert positions("ab", ["ab"], add_special=False) == ()


def test_occurrences_do_not_overlap() -> None:
    assert positions("aaaaa", ["aa"], add_special=False) == (2,)


def test_a_mark_inside_a_token_counts_as_the_place_before_it() -> None:
    """What another prompt with the same text up to there has in common: "t" alone is another token than "th"."""
    assert positions("abth", ["h"], add_special=False) == (2,)
    assert positions("abthcd", ["c"], add_special=False) == (3,)


def test_a_text_marks_no_place_among_ids() -> None:
    with pytest.raises(InvalidRequestError, match="this one is token ids"):
        request([1, 2, 3], [1, "#"])


@pytest.mark.parametrize("mark", ["", "a\ud800"])
def test_an_empty_or_broken_mark_is_refused(mark: str) -> None:
    with pytest.raises(InvalidRequestError, match="boundaries"):
        request("abc", [mark])


def test_of_many_places_the_first_and_the_last_ones_are_marked() -> None:
    text = "x#" * 60
    found = positions(text, ["#"], add_special=False)
    every = [2 * index + 1 for index in range(60)]
    assert found == (every[0], *every[1 - MAX_MARKS :])
    assert len(found) == MAX_MARKS
    assert len(positions("x#" * MAX_MARKS, ["#"])) == MAX_MARKS


def test_each_place_costs_one_tokenization_of_what_is_before_it() -> None:
    tokenizer = Tokenizer()
    request("ab#cd#ef", ["#"], tokenizer=tokenizer)
    assert tokenizer.texts == ["ab#cd#ef", "ab", "ab#cd"]
    tokenizer = Tokenizer()
    request("x#" * 1000, ["#"], tokenizer=tokenizer)
    assert len(tokenizer.texts) == 1 + MAX_MARKS


def test_what_is_before_a_mark_is_read_as_the_prompt_is() -> None:
    seen: list[tuple[bool, bool]] = []
    tokenizer = Tokenizer()

    def noted(text: str, add_special: bool, parse_special: bool) -> Ids:
        seen.append((add_special, parse_special))
        return tokenizer(text, add_special, parse_special)

    found = build_request(
        "<bos>ab#c",
        {"boundaries": ["#"], "add_special": False, "parse_special": True},
        request_id=RequestId(1),
        tokenize=noted,
        has_vocab=True,
        n_vocab=N_VOCAB,
        n_slots=1,
        n_ctx=100,
    )
    assert found.boundaries == (2,)
    assert set(seen) == {(False, True)}


def test_a_warm_up_takes_boundaries_too() -> None:
    found = build_request(
        "ab#c",
        {"boundaries": ["#", 1]},
        request_id=RequestId(1),
        tokenize=Tokenizer(),
        has_vocab=True,
        n_vocab=N_VOCAB,
        n_slots=1,
        n_ctx=100,
        generate=False,
    )
    assert found.boundaries == (1, 3)
