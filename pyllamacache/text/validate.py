"""What a caller passed in, checked: the first stage of a request. Afterwards nobody looks at these arguments again.

Every problem is an InvalidRequestError that names the argument and what it takes.
"""

from __future__ import annotations

import math
import os
from array import array
from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import InvalidRequestError
from ..request import SamplingParams, SlotId

if TYPE_CHECKING:
    from ..request import Ids

MAX_SEED = 2**32 - 2
"""llama.cpp draws a seed of its own for 2**32 - 1."""
MAX_TOP_LOGPROBS = 20
MAX_BOUNDARIES = 4096
_MAX_INT32 = 2**31 - 1
_MAX_FLOAT32 = float(np.finfo(np.float32).max)
_MIN_FLOAT32 = float(np.finfo(np.float32).tiny)


# ---- sampling --------------------------------------------------------------------------------------------------


def check_sampling(
    *,
    n_vocab: int,
    max_tokens: int,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repeat_penalty: float = 1.0,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
    penalty_last_n: int = 64,
    seed: int | None = None,
    logit_bias: Mapping[int, float] | None = None,
    min_tokens: int = 0,
    grammar: str | None = None,
    logprobs: bool | None = None,
    top_logprobs: int = 0,
) -> SamplingParams:
    """Sampling arguments as one value. Numbers must also survive as float32, which is what llama.cpp computes in.

    Raises:
        InvalidRequestError: a value is of the wrong kind or out of its range.
    """
    wants_logprobs = logprobs is not None and check_flag(logprobs, field="logprobs")
    n_top = _integer(top_logprobs, "top_logprobs", 0, MAX_TOP_LOGPROBS)
    if n_top and not wants_logprobs:
        raise InvalidRequestError("top_logprobs", f"{n_top} asked for without logprobs=True")
    return SamplingParams(
        temperature=_number(temperature, "temperature", 0.0, _MAX_FLOAT32),
        top_k=_integer(top_k, "top_k", 0, _MAX_INT32),
        top_p=_number(top_p, "top_p", _MIN_FLOAT32, 1.0),
        min_p=_number(min_p, "min_p", 0.0, 1.0),
        repeat_penalty=_number(repeat_penalty, "repeat_penalty", _MIN_FLOAT32, _MAX_FLOAT32),
        presence_penalty=_number(presence_penalty, "presence_penalty", -_MAX_FLOAT32, _MAX_FLOAT32),
        frequency_penalty=_number(frequency_penalty, "frequency_penalty", -_MAX_FLOAT32, _MAX_FLOAT32),
        penalty_last_n=_integer(penalty_last_n, "penalty_last_n", 0, _MAX_INT32),
        seed=None if seed is None else _integer(seed, "seed", 0, MAX_SEED),
        logit_bias=_check_logit_bias(logit_bias, n_vocab),
        min_tokens=_integer(min_tokens, "min_tokens", 0, max_tokens, "max_tokens"),
        grammar=_check_grammar(grammar),
        logprobs=wants_logprobs,
        top_logprobs=n_top,
    )


def _check_logit_bias(value: object, n_vocab: int) -> dict[int, float]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise InvalidRequestError("logit_bias", f"expected a mapping of token id to number, got {_kind(value)}")
    checked: dict[int, float] = {}
    for key, bias in value.items():
        token_id = _integer(key, "logit_bias", 0, n_vocab - 1, what="a token id")
        is_forbidden = isinstance(bias, Real) and _float(bias) == -math.inf
        field = f"logit_bias[{token_id}]"
        checked[token_id] = -math.inf if is_forbidden else _number(bias, field, -_MAX_FLOAT32, _MAX_FLOAT32)
    return checked


def _check_grammar(value: object) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str) or not value.strip():
        raise InvalidRequestError("grammar", f"expected a GBNF grammar with a rule named root, got {_kind(value)}")
    if "\0" in value:
        raise InvalidRequestError("grammar", "contains a NUL character")
    return _encodable(value, "grammar")


# ---- request ---------------------------------------------------------------------------------------------------


def check_max_tokens(value: object) -> int:
    """How many tokens to sample at most; 0 is a prompt that is only computed."""
    return _integer(value, "max_tokens", 0, _MAX_INT32)


def check_stop(value: object) -> tuple[str, ...]:
    """Stop strings without repetitions, in the caller's order. One string is one stop; None is none."""
    if value is None:
        return ()
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, Sequence) or isinstance(stops, (bytes, bytearray, memoryview)):
        raise InvalidRequestError("stop", f"expected a string or a sequence of strings, got {_kind(value)}")
    for index, stop in enumerate(stops):
        if not isinstance(stop, str):
            raise InvalidRequestError("stop", f"item {index} is of type {type(stop).__name__}, expected str")
        if not stop:
            raise InvalidRequestError("stop", f"item {index} is empty")
    return tuple(dict.fromkeys(stops))


def check_namespace(value: object) -> str:
    """Any text; the empty one is a namespace like others."""
    if not isinstance(value, str):
        raise InvalidRequestError("namespace", f"expected a string, got {_kind(value)}")
    return _encodable(value, "namespace")


def check_cache_key(value: object) -> str | None:
    """None, or any text."""
    if value is None:
        return None
    if not isinstance(value, str):
        raise InvalidRequestError("prompt_cache_key", f"expected a string or None, got {_kind(value)}")
    return _encodable(value, "prompt_cache_key")


def check_priority(value: object) -> int:
    """How long what a request leaves is kept beside that of others."""
    return _integer(value, "priority", -100, 100)


def check_timeout(value: object, *, field: str = "timeout_s") -> float | None:
    """Seconds above zero, or None for no limit. Infinity is no limit."""
    if value is None:
        return None
    seconds = math.nan if isinstance(value, bool) or not isinstance(value, Real) else _float(value)
    if not seconds > 0:
        raise InvalidRequestError(field, f"expected seconds above 0, or None, got {_kind(value)}")
    return None if math.isinf(seconds) else seconds


def check_slot(value: object, n_slots: int) -> SlotId | None:
    """One of the engine's slots, or None for whichever the planner takes."""
    return None if value is None else SlotId(_integer(value, "slot", 0, n_slots - 1))


def check_boundaries(value: object) -> tuple[int | str, ...]:
    """Token offsets, or text at which a boundary lies, in the order given.

    Raises:
        InvalidRequestError: anything else, more than MAX_BOUNDARIES, or an empty text.
    """
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
        raise InvalidRequestError("boundaries", f"a sequence of token offsets or texts, not {_kind(value)}")
    if len(value) > MAX_BOUNDARIES:
        raise InvalidRequestError("boundaries", f"{len(value)} of them; at most {MAX_BOUNDARIES} are allowed")
    checked: list[int | str] = []
    for item in value:
        if isinstance(item, str):
            if not item:
                raise InvalidRequestError("boundaries", "an empty text marks no place")
            checked.append(check_text(item, field="boundaries"))
        else:
            checked.append(_integer(item, "boundaries", 0, _MAX_INT32))
    return tuple(checked)


def check_path(value: object, *, field: str = "path") -> str:
    """A path of a file, as the operating system takes it."""
    if not isinstance(value, (str, bytes, os.PathLike)) or not os.fspath(value):
        raise InvalidRequestError(field, f"expected a path, got {_kind(value)}")
    return os.fsdecode(value)


def check_flag(value: object, *, field: str) -> bool:
    """A bool, of Python or numpy; no other value has a truth here."""
    if not isinstance(value, (bool, np.bool_)):
        raise InvalidRequestError(field, f"expected True or False, got {_kind(value)}")
    return bool(value)


# ---- prompt ----------------------------------------------------------------------------------------------------


def check_text(value: object, *, field: str = "prompt") -> str:
    """Text that can be tokenized: not empty, no lone surrogates."""
    if not isinstance(value, str):
        raise InvalidRequestError(field, f"expected a string, got {_kind(value)}")
    if not value:
        raise InvalidRequestError(field, "is empty")
    return _encodable(value, field)


def check_ids(ids: object, n_vocab: int, *, field: str = "prompt") -> Ids:
    """Token ids as a read-only int32 array of shape (n_tokens,), the library's own copy.

    Takes a list, tuple or other sequence of ints, an `array.array`, or a numpy array of integers with one dimension.

    Raises:
        InvalidRequestError: empty, not integers (bool and float are not), or an id outside [0, n_vocab).
    """
    values = _integers(ids, field)
    if len(values) == 0:
        raise InvalidRequestError(field, "is empty")
    outside = (values < 0) | (values >= n_vocab)
    if outside.any():
        index = int(outside.argmax())
        raise InvalidRequestError(field, f"token id {values[index]} at index {index} is outside [0, {n_vocab})")
    checked = values.astype(np.int32)
    checked.flags.writeable = False
    return checked


def _integers(ids: object, field: str) -> np.ndarray[Any, np.dtype[Any]]:
    if isinstance(ids, (str, bytes, bytearray, memoryview)):
        raise InvalidRequestError(field, f"expected token ids, got {type(ids).__name__}")
    if isinstance(ids, array):
        ids = np.array(ids) if ids.typecode in "bBhHiIlLqQ" else list(ids)
    if isinstance(ids, np.ndarray):
        if ids.dtype.kind not in "iu" or ids.ndim != 1:
            raise InvalidRequestError(
                field, f"expected integers in one dimension, got {ids.dtype} of shape {ids.shape}"
            )
        # Narrow types cannot be compared with n_vocab in every numpy version; uint64 does not fit in int64.
        return ids if ids.dtype == np.uint64 else ids.astype(np.int64)
    if not isinstance(ids, Sequence):
        raise InvalidRequestError(field, f"expected a sequence of token ids, got {type(ids).__name__}")
    for kind in set(map(type, ids)):
        if issubclass(kind, (bool, np.bool_)) or not issubclass(kind, Integral):
            index = next(at for at, item in enumerate(ids) if type(item) is kind)
            raise InvalidRequestError(field, f"item {index} is of type {kind.__name__}, expected int")
    try:
        return np.array(ids, dtype=np.int64)
    except OverflowError:
        index = next(at for at, item in enumerate(ids) if not -(2**63) <= int(item) < 2**63)
        raise InvalidRequestError(field, f"the number at index {index} is no token id: it exceeds 64 bits") from None


# ---- one value -------------------------------------------------------------------------------------------------


def _integer(value: object, field: str, low: int, high: int, high_name: str = "", what: str = "") -> int:
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise InvalidRequestError(field, f"expected {what or 'an integer'}, got {_kind(value)}")
    if not low <= int(value) <= high:
        limit = f"{high_name}={high}" if high_name else str(high)
        raise InvalidRequestError(field, f"expected {what or 'an integer'} from {low} to {limit}, got {_kind(value)}")
    return int(value)


def _number(value: object, field: str, low: float, high: float) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise InvalidRequestError(field, f"expected a number, got {_kind(value)}")
    number = _float(value)
    if not low <= number <= high:
        raise InvalidRequestError(field, f"expected a number {_range(low, high)}, got {_kind(value)}")
    return number


def _float(value: Real) -> float:
    try:
        return float(value)
    except OverflowError:
        return -math.inf if value < 0 else math.inf


def _range(low: float, high: float) -> str:
    if low == -_MAX_FLOAT32:
        return "that is finite"
    lower = "above 0" if low == _MIN_FLOAT32 else f"of at least {low:g}"
    return f"{lower} and finite" if high == _MAX_FLOAT32 else f"{lower} and at most {high:g}"


def _encodable(value: str, field: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError as error:
        problem = f"the character at {error.start} is a lone surrogate, which UTF-8 cannot express"
        raise InvalidRequestError(field, problem) from None
    return value


def _kind(value: object) -> str:
    """A value in a message: the value itself if it is a number of reasonable size, never the caller's text."""
    if isinstance(value, Integral):
        return str(value) if abs(int(value)) < 2**64 else "an integer beyond 64 bits"
    return repr(value) if value is None or isinstance(value, float) else type(value).__name__
