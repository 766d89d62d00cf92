from __future__ import annotations

import math
from array import array
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from pyllamacache.errors import InvalidRequestError
from pyllamacache.request import SamplingParams
from pyllamacache.text import validate

N_VOCAB = 100
INF, NAN = math.inf, math.nan


def sampling(**options: Any) -> SamplingParams:
    return validate.check_sampling(**{"n_vocab": N_VOCAB, "max_tokens": 8, **options})


# ---- sampling --------------------------------------------------------------------------------------------------


def test_the_defaults_are_those_of_the_value() -> None:
    assert sampling() == SamplingParams()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", 0),
        ("temperature", 2.5),
        ("temperature", np.float32(0.5)),
        ("temperature", Fraction(1, 2)),
        ("top_k", 0),
        ("top_k", np.int64(40)),
        ("top_p", 1),
        ("top_p", 0.1),
        ("min_p", 0),
        ("min_p", 1.0),
        ("repeat_penalty", 1.3),
        ("presence_penalty", -5.0),
        ("frequency_penalty", 5),
        ("penalty_last_n", 0),
        ("seed", 0),
        ("seed", 2**32 - 2),
        ("seed", None),
        ("min_tokens", 8),
        ("grammar", 'root ::= "a"'),
        ("grammar", None),
        ("logprobs", True),
    ],
)
def test_values_in_range_are_taken(field: str, value: object) -> None:
    assert getattr(sampling(**{field: value}), field) == value


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("temperature", [-0.1, NAN, INF, -INF, "1", None, True, 1e39, 10**400, 1j, b"1"]),
        ("top_k", [-1, 1.0, "40", None, True, 2**31, 10**5000]),
        ("top_p", [0, -0.1, 1.01, NAN, INF, "1", None, True, 1e-60]),
        ("min_p", [-0.1, 1.01, NAN, INF, "1", None, True]),
        ("repeat_penalty", [0, -1, NAN, INF, "1", None, True, 1e-60]),
        ("presence_penalty", [NAN, INF, -INF, "1", None, True]),
        ("frequency_penalty", [NAN, INF, -INF, "1", None, True, -(10**400)]),
        ("penalty_last_n", [-1, 1.0, None, True, 2**31]),
        ("seed", [-1, 2**32 - 1, 1.0, "0", True]),
        ("min_tokens", [-1, 9, 1.0, None, True]),
        ("grammar", ["", " \n", 5, b"root", "root ::= \0", "root ::= \ud800"]),
        ("logprobs", [1, 0, 5, "yes"]),
        ("top_logprobs", [-1, 21, 1.0, None, True]),
        ("logit_bias", [[1], "1", {1: NAN}, {2: "x"}, {3: True}, {100: 1}, {-1: 1}, {"5": 1}, {True: 1}, {1.0: 1}]),
    ],
)
def test_values_out_of_range_are_refused_by_name(field: str, values: list[object]) -> None:
    for value in values:
        with pytest.raises(InvalidRequestError) as caught:
            sampling(**{"logprobs": True, field: value})
        assert caught.value.field.startswith(field)
        assert len(str(caught.value)) < 150


def test_bias_may_forbid_a_token_but_not_force_one() -> None:
    assert sampling(logit_bias={3: -INF, np.int32(4): np.float64(2.5)}).logit_bias == {3: -INF, 4: 2.5}
    with pytest.raises(InvalidRequestError, match=r"logit_bias\[3\]"):
        sampling(logit_bias={3: INF})


def test_the_bias_kept_is_a_copy() -> None:
    bias = {3: 1.0}
    checked = sampling(logit_bias=bias)
    bias[4] = 2.0
    assert checked.logit_bias == {3: 1.0}


def test_top_logprobs_needs_logprobs() -> None:
    assert sampling(logprobs=True, top_logprobs=20).top_logprobs == 20
    for off in (None, False):
        with pytest.raises(InvalidRequestError, match="top_logprobs"):
            sampling(logprobs=off, top_logprobs=1)


def test_the_message_gives_the_limit_and_the_value() -> None:
    with pytest.raises(InvalidRequestError, match="min_tokens: expected an integer from 0 to max_tokens=8, got 9"):
        sampling(min_tokens=9)
    with pytest.raises(InvalidRequestError, match="top_p: expected a number above 0 and at most 1, got 0"):
        sampling(top_p=0)


# ---- request ---------------------------------------------------------------------------------------------------


def test_max_tokens_is_a_count() -> None:
    assert validate.check_max_tokens(0) == 0
    for value in (-1, 1.0, None, True, "5"):
        with pytest.raises(InvalidRequestError, match="max_tokens"):
            validate.check_max_tokens(value)


def test_one_stop_string_is_one_stop() -> None:
    assert validate.check_stop("ab") == ("ab",)
    assert validate.check_stop(None) == validate.check_stop(()) == ()
    assert validate.check_stop(["b", "a", "b"]) == ("b", "a")


@pytest.mark.parametrize("value", ["", [""], ["a", ""], [1], b"a", [b"a"], 5, {"a"}, iter("ab")])
def test_stops_that_are_no_strings_are_refused(value: object) -> None:
    with pytest.raises(InvalidRequestError, match="stop"):
        validate.check_stop(value)


def test_a_namespace_is_a_string() -> None:
    assert validate.check_namespace("") == ""
    for value in (None, 5, b"a", "\ud800"):
        with pytest.raises(InvalidRequestError, match="namespace"):
            validate.check_namespace(value)


def test_a_timeout_is_positive_or_none() -> None:
    assert validate.check_timeout(None) is None
    assert validate.check_timeout(INF) is None
    assert validate.check_timeout(10**400) is None
    assert validate.check_timeout(2) == 2.0
    for value in (0, -1, NAN, -INF, "1", True):
        with pytest.raises(InvalidRequestError, match="timeout_s"):
            validate.check_timeout(value)


def test_a_slot_is_one_of_the_engine_s() -> None:
    assert validate.check_slot(None, 4) is None
    assert validate.check_slot(np.int8(3), 4) == 3
    for value in (4, -1, 1.0, True, "0"):
        with pytest.raises(InvalidRequestError, match="slot"):
            validate.check_slot(value, 4)


def test_a_flag_is_a_bool() -> None:
    assert validate.check_flag(np.bool_(True), field="store") is True
    for value in (1, None, "no"):
        with pytest.raises(InvalidRequestError, match="store"):
            validate.check_flag(value, field="store")


# ---- prompt ----------------------------------------------------------------------------------------------------


def test_text_must_be_there_and_be_text() -> None:
    assert validate.check_text("a") == "a"
    for value in ("", None, b"a", "a\ud800"):
        with pytest.raises(InvalidRequestError, match="prompt"):
            validate.check_text(value)


@pytest.mark.parametrize(
    "ids",
    [
        [1, 2, 99],
        (1, 2, 99),
        [np.int32(1), 2, np.uint8(99)],
        array("i", [1, 2, 99]),
        array("Q", [1, 2, 99]),
        np.array([1, 2, 99], dtype=np.uint64),
        np.array([1, 2, 99], dtype=np.int8),
        np.array([1, 0, 2, 0, 99, 0])[::2],
        np.array([1, 2, 99], dtype=">i4"),
    ],
)
def test_ids_of_any_integer_kind_become_read_only_int32(ids: object) -> None:
    checked = validate.check_ids(ids, N_VOCAB)
    assert checked.dtype == np.int32
    assert checked.tolist() == [1, 2, 99]
    assert checked.flags.c_contiguous
    assert not checked.flags.writeable


def test_a_range_is_a_sequence_of_ids() -> None:
    assert validate.check_ids(range(5), N_VOCAB).tolist() == [0, 1, 2, 3, 4]


def test_the_caller_s_array_is_not_the_one_that_is_kept() -> None:
    ids = np.array([1, 2], dtype=np.int32)
    checked = validate.check_ids(ids, N_VOCAB)
    ids[0] = 7
    assert checked.tolist() == [1, 2]


@pytest.mark.parametrize(
    "ids",
    [
        [],
        (),
        np.array([], dtype=np.int32),
        [1, True],
        [1.0],
        [1, None],
        [[1]],
        ["1"],
        "1",
        b"1",
        bytearray(b"1"),
        memoryview(b"1"),
        None,
        5,
        {1, 2},
        iter([1]),
        array("d", [1.0]),
        np.array([1.0]),
        np.array([True]),
        np.array([[1]]),
        np.array(1),
        np.array([1], dtype=object),
    ],
)
def test_what_is_no_list_of_integers_is_refused(ids: object) -> None:
    with pytest.raises(InvalidRequestError, match="prompt"):
        validate.check_ids(ids, N_VOCAB)


@pytest.mark.parametrize(
    ("ids", "shown"),
    [
        ([5, 100], "token id 100 at index 1"),
        ([5, -1], "token id -1 at index 1"),
        (np.array([2**63 + 5], dtype=np.uint64), f"token id {2**63 + 5} at index 0"),
        (np.array([-1], dtype=np.int8), "token id -1 at index 0"),
        ([2**62], f"token id {2**62} at index 0"),
        ([2**32 + 1], f"token id {2**32 + 1} at index 0"),
        ([0, 2**64], "at index 1"),
        ([0, 10**5000], "at index 1"),
    ],
)
def test_an_id_out_of_range_is_shown_with_its_index(ids: object, shown: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        validate.check_ids(ids, N_VOCAB)
    assert shown in str(caught.value)
    assert len(str(caught.value)) < 150


def test_the_field_can_be_named() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        validate.check_ids([], N_VOCAB, field="token_ids")
    assert caught.value.field == "token_ids"
