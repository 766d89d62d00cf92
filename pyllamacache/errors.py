"""The whole error tree of the package.

Every exception that pyllamacache raises on purpose derives from `PyLlamaCacheError`; where a builtin says the same
thing, the leaf derives from it too, so that ordinary `except ValueError` code works. Classes build their message
from facts: what happened, the numbers, what to change. Messages never contain prompt text or token ids.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection


class PyLlamaCacheError(Exception):
    """Root of the tree. Every error can be pickled and copied with its facts."""

    def __reduce__(self) -> tuple[object, ...]:
        # the constructors take facts and pass the message on; the default would call them with the message
        return _rebuild, (type(self), self.args, self.__dict__)


def _rebuild(kind: type[PyLlamaCacheError], args: tuple[object, ...], facts: dict[str, object]) -> PyLlamaCacheError:
    # kind.__new__ may name a base's that CPython refuses for it; of our builtins only OSError has one of its own
    new = OSError.__new__ if issubclass(kind, OSError) else Exception.__new__
    error: PyLlamaCacheError = new(kind, *args)
    error.args = args
    error.__dict__.update(facts)
    return error


class InternalError(PyLlamaCacheError):
    """An invariant of this library broke: please report it. Never caused by input."""


# ---- configuration ---------------------------------------------------------------------------------------------


class ConfigError(PyLlamaCacheError, ValueError):
    """A constructor or command was given a value it cannot take. Nothing was changed."""

    def __init__(self, field: str, value: object, expected: str) -> None:
        super().__init__(f"{field}={value!r}: expected {expected}")
        self.field = field
        self.value = value
        self.expected = expected


class CpuUnsupportedError(PyLlamaCacheError, ImportError):
    """This build of the extension uses instructions that the machine's CPU does not have."""

    def __init__(self, missing: tuple[str, ...]) -> None:
        super().__init__(
            f"this build needs the CPU instruction sets {', '.join(missing)}, which this machine does not report; "
            "build from source on this machine: pip install --no-binary pyllamacache pyllamacache"
        )
        self.missing = missing


class MissingExtraError(PyLlamaCacheError, ImportError):
    """Something needs a package that comes with an optional extra."""

    def __init__(self, what: str, package: str, extra: str) -> None:
        super().__init__(f"{what} needs {package}, which is not installed: pip install 'pyllamacache[{extra}]'")
        self.package = package
        self.extra = extra


# ---- models ----------------------------------------------------------------------------------------------------


class ModelError(PyLlamaCacheError):
    """A model could not be used."""


class ModelNotFoundError(ModelError, FileNotFoundError):
    """There is no such model file, locally or at the hub."""

    def __init__(self, where: str, hint: str) -> None:
        super().__init__(f"no model at {where}: {hint}")
        self.where = where


class ModelFormatError(ModelError, ValueError):
    """The file is not a GGUF file this library can read: `what` says where reading stopped."""

    def __init__(self, path: str, what: str) -> None:
        super().__init__(f"{path} is not a usable GGUF file: {what}")
        self.path = path
        self.what = what


class ModelLoadError(ModelError, RuntimeError):
    """llama.cpp refused the model; `log` is what it logged while refusing."""

    def __init__(self, path: str, log: str) -> None:
        super().__init__(f"llama.cpp could not load {path}: {log or 'no reason was logged'}")
        self.path = path
        self.log = log


class ModelUnsupportedError(ModelError, ValueError):
    """The model loads, but cannot do what was asked: no vocabulary, no decoder, no memory."""

    def __init__(self, what: str, why: str) -> None:
        super().__init__(f"{what}: {why}")


# ---- capacity --------------------------------------------------------------------------------------------------


class CapacityError(PyLlamaCacheError):
    """Something finite is full. Normal under load: what was there before is unchanged."""


class ContextTooLargeError(CapacityError, MemoryError):
    """llama.cpp could not create a context of this size."""

    def __init__(self, n_ctx: int, n_slots: int, log: str) -> None:
        super().__init__(
            f"no context of {n_ctx} tokens with {n_slots} slots: {log or 'out of memory'}; "
            "lower n_ctx, kv_tokens or n_slots"
        )
        self.n_ctx = n_ctx
        self.n_slots = n_slots


class CellsExhaustedError(CapacityError):
    """No KV cells are left for this request although everything idle was evicted."""

    def __init__(self, needed_tokens: int, free_tokens: int, kv_tokens: int) -> None:
        super().__init__(
            f"the request needs {needed_tokens} KV cells, {free_tokens} of {kv_tokens} can be had; "
            "raise kv_tokens, or send fewer long requests at once"
        )
        self.needed_tokens = needed_tokens
        self.free_tokens = free_tokens
        self.kv_tokens = kv_tokens


# ---- requests --------------------------------------------------------------------------------------------------


class RequestError(PyLlamaCacheError):
    """A request was wrong or was ended. It failed alone; other requests go on."""


class InvalidRequestError(RequestError, ValueError):
    """A request's argument is out of range or of the wrong kind."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field


class UnknownOptionError(InvalidRequestError, TypeError):
    """A request was given a keyword that does not exist."""

    def __init__(self, name: str, known: Collection[str] = ()) -> None:
        close = difflib.get_close_matches(name, known, n=1)
        super().__init__(name, f"no such option{f'; did you mean {close[0]}?' if close else ''}")


class RequestTooLongError(RequestError, ValueError):
    """prompt + max_tokens can never fit, whatever else is evicted."""

    def __init__(self, prompt_tokens: int, max_tokens: int, limit_tokens: int, limit_name: str) -> None:
        super().__init__(
            f"prompt of {prompt_tokens} tokens + max_tokens={max_tokens} is "
            f"{prompt_tokens + max_tokens} > {limit_name}={limit_tokens}; shorten the prompt, lower max_tokens "
            f"or raise {limit_name}"
        )
        self.prompt_tokens = prompt_tokens
        self.max_tokens = max_tokens
        self.limit_tokens = limit_tokens


class GrammarError(RequestError, ValueError):
    """The grammar does not parse, or sampling reached a point where it allows nothing."""

    def __init__(self, problem: str) -> None:
        super().__init__(f"grammar: {problem}")


class ChatTemplateError(RequestError, ValueError):
    """The model's chat template does not parse, or refuses these messages or tools. Nothing was sent.

    `problem` is what the template engine said, without the text of messages.
    """

    def __init__(self, problem: str) -> None:
        super().__init__(f"chat template: {problem}; check the messages, or give another template (chat_template=)")
        self.problem = problem


class ConversationError(RequestError, ValueError):
    """A conversation was asked for something that would break it, or its cache. It is as it was."""

    def __init__(self, problem: str) -> None:
        super().__init__(f"conversation: {problem}")
        self.problem = problem


class WrongThreadError(RequestError):
    """The engine was asked from its own scheduler thread: from a finalizer, a log handler or a listener."""

    def __init__(self) -> None:
        super().__init__("the engine cannot be asked from its own thread (a finalizer, log handler or listener)")


class SlotBusyError(RequestError):
    """The slot is running a request; its state cannot be saved, restored or erased now."""

    def __init__(self, slot_id: int, operation: str) -> None:
        super().__init__(f"slot {slot_id} is busy: cannot {operation} it; wait for its request or cancel it")
        self.slot_id = slot_id


class RequestTimeoutError(RequestError, TimeoutError):
    """`timeout_s` passed before the request finished. What was computed stays in the slot."""

    def __init__(self, timeout_s: float, prefilled_tokens: int, completion_tokens: int) -> None:
        super().__init__(
            f"not finished after {timeout_s:g} s: {prefilled_tokens} tokens prefilled, {completion_tokens} generated; "
            "what was computed stays in the slot, for a request that continues it"
        )
        self.timeout_s = timeout_s


class ResultTimeoutError(RequestError, TimeoutError):
    """`handle.result(timeout=)` gave up waiting. The request itself goes on."""

    def __init__(self, timeout_s: float) -> None:
        super().__init__(f"no result after {timeout_s:g} s; the request is still running, cancel() ends it")
        self.timeout_s = timeout_s


# ---- lifetime --------------------------------------------------------------------------------------------------


class ClosedError(PyLlamaCacheError):
    """The object was closed, or its owner was."""

    def __init__(self, what: str, why: str = "it was closed") -> None:
        super().__init__(f"{what} cannot be used: {why}")


class ForkedError(ClosedError):
    """The object belongs to the parent process: native handles and threads do not survive a fork."""

    def __init__(self, what: str) -> None:
        super().__init__(what, "it belongs to the parent process; create it again after the fork")


# ---- stored data -----------------------------------------------------------------------------------------------


class CacheDataError(PyLlamaCacheError):
    """Stored state cannot be used. The slot it was meant for keeps what it held."""


class CacheCorruptError(CacheDataError, ValueError):
    """The file is damaged, truncated or not one of ours."""

    def __init__(self, path: str, what: str) -> None:
        super().__init__(f"{path} is damaged or not a file of this library: {what}")
        self.path = path
        self.what = what


class CacheMismatchError(CacheDataError, ValueError):
    """The file is sound but was written under other conditions: `field` names the one that differs."""

    def __init__(self, path: str, field: str, expected: object, found: object) -> None:
        super().__init__(f"{path} does not fit this engine: {field} is {found!r} in the file, {expected!r} here")
        self.path = path
        self.field = field
        self.expected = expected
        self.found = found


class CacheFileError(CacheDataError, OSError):
    """The operating system refused to read or write the file; the previous file, if any, is unchanged."""

    def __init__(self, path: str, operation: str, why: str) -> None:
        super().__init__(f"cannot {operation} {path}: {why}")
        self.path = path


# ---- native ----------------------------------------------------------------------------------------------------


class NativeError(PyLlamaCacheError, RuntimeError):
    """A call into llama.cpp failed. `code` is its return value, `log` what it logged."""

    def __init__(self, call: str, code: int, log: str = "") -> None:
        super().__init__(f"{call} returned {code}{': ' + log if log else ''}")
        self.call = call
        self.code = code
        self.log = log


__all__ = [
    name for name, value in list(globals().items()) if isinstance(value, type) and issubclass(value, PyLlamaCacheError)
]
