"""Every error crosses process borders with its facts, and can be caught as the builtin it is."""

from __future__ import annotations

import copy
import inspect
import pickle
from typing import Any

import pytest

from pyllamacache import errors

KINDS = [
    value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, errors.PyLlamaCacheError)
]


def _example(kind: type[errors.PyLlamaCacheError]) -> errors.PyLlamaCacheError:
    """An instance with something for each argument of the constructor."""
    if kind.__init__ in (errors.PyLlamaCacheError.__init__, Exception.__init__):
        return kind("message")
    values: list[Any] = []
    for parameter in list(inspect.signature(kind.__init__).parameters.values())[1:]:
        annotation = str(parameter.annotation)
        kinds = {"int": 7, "float": 1.5, "tuple": ("a", "b")}
        values.append(next((value for name, value in kinds.items() if name in annotation), "x"))
    return kind(*values)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_an_error_survives_pickling_and_copying(kind: type[errors.PyLlamaCacheError]) -> None:
    """Old bug: one over-long prompt in a process pool's worker broke the whole pool."""
    error = _example(kind)
    for twin in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
        assert type(twin) is kind
        assert str(twin) == str(error)
        assert twin.args == error.args
        assert vars(twin) == vars(error)


@pytest.mark.parametrize(
    ("kind", "builtin"),
    [
        (errors.ConfigError, ValueError),
        (errors.ModelNotFoundError, FileNotFoundError),
        (errors.RequestTooLongError, ValueError),
        (errors.UnknownOptionError, TypeError),
        (errors.RequestTimeoutError, TimeoutError),
        (errors.ContextTooLargeError, MemoryError),
        (errors.CacheFileError, OSError),
        (errors.CpuUnsupportedError, ImportError),
    ],
)
def test_an_error_is_also_the_builtin_that_says_the_same(kind: type[Exception], builtin: type[Exception]) -> None:
    assert issubclass(kind, builtin)
    assert issubclass(kind, errors.PyLlamaCacheError)
