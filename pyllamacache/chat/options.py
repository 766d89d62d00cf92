"""The options of a chat request: OpenAI's names, and those of this library that every request has."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict

from ..errors import InvalidRequestError, UnknownOptionError
from .template import TemplateOptions


class TemplateChoices(TypedDict, total=False):
    """What changes how messages are rendered: the options of `Engine.render`, and those of `chat` too."""

    tools: Sequence[Any] | None
    """Functions in OpenAI's shape, rendered in the order given."""
    tool_choice: str | Mapping[str, Any] | None
    """"auto", "required", "none", or `{"type": "function", "function": {"name": ...}}`. The prompt stays the same."""
    parallel_tool_calls: bool | None
    response_format: Mapping[str, Any] | None
    """`{"type": "text" | "json_object"}`, or `{"type": "json_schema", "json_schema": {"schema": ...}}`."""
    chat_template_kwargs: Mapping[str, Any] | None
    """Handed to the template as they are, e.g. `enable_thinking`, `preserve_reasoning`, `date_string`."""
    reasoning_effort: str | None
    """"none" turns thinking off; other values are for the template."""
    now_s: float | None
    """Seconds since 1970: the time templates that write a date are given; default: now. A new date is a new header."""


class ChatOptions(TemplateChoices, total=False):
    """The keyword arguments of `Engine.chat` and `achat`."""

    max_tokens: int | None
    """Default: 1024, or what the context has room for. 0 prefills and generates nothing."""
    max_completion_tokens: int | None
    """OpenAI's newer name of `max_tokens`."""
    stop: str | Sequence[str] | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    seed: int | None
    presence_penalty: float | None
    frequency_penalty: float | None
    repeat_penalty: float | None
    penalty_last_n: int | None
    min_tokens: int | None
    logit_bias: Mapping[Any, float] | None
    logprobs: bool | None
    top_logprobs: int | None
    n: int | None
    """1 is all there is."""
    stream_options: Mapping[str, Any] | None
    """`{"include_usage": True}`: a last chunk without choices carries the usage."""
    user: str | None
    """Accepted; means nothing here."""
    metadata: Mapping[str, Any] | None
    """Accepted; means nothing here."""
    model: str | None
    """Accepted; means nothing here."""

    prompt_cache_key: str | None
    """Of slots that serve equally well, take the one that ran this key last: a hint, which isolates nothing."""
    cache_salt: str | None
    """Another name of `namespace`: nothing is shared between salts."""
    namespace: str | None
    cache_prompt: bool | None
    store: bool | None
    """Leave the result in the cache."""
    priority: int | None
    ttl_s: float | None
    slot: int | None
    timeout_s: float | None
    match_text: bool | None
    """Replies that come back are spelled as they were generated, also where a template would write the same tool call
    another way; default True."""


TEMPLATE_NAMES = frozenset(TemplateChoices.__annotations__)
NAMES = frozenset(ChatOptions.__annotations__)

_SAME = frozenset(
    {
        "stop",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "seed",
        "presence_penalty",
        "frequency_penalty",
        "repeat_penalty",
        "penalty_last_n",
        "min_tokens",
        "logprobs",
        "top_logprobs",
        "cache_prompt",
        "store",
        "priority",
        "ttl_s",
        "slot",
        "prompt_cache_key",
        "timeout_s",
        "match_text",
    }
)

Kind = Literal["text", "json_object", "json_schema"]


def template_options(choices: Mapping[str, Any], now_s: float) -> TemplateOptions:
    """The part that the template sees. Raises InvalidRequestError."""
    given = {key: value for key, value in choices.items() if value is not None}
    kwargs = given.get("chat_template_kwargs", {})
    if not isinstance(kwargs, Mapping) or not all(isinstance(key, str) for key in kwargs):
        raise InvalidRequestError("chat_template_kwargs", "expected an object")
    _check_kwargs(kwargs)
    kwargs = {"preserve_reasoning": True, **kwargs}
    thinks = kwargs.get("enable_thinking", True)
    if not isinstance(thinks, bool):
        raise InvalidRequestError("chat_template_kwargs.enable_thinking", "expected True or False")
    effort = given.get("reasoning_effort")
    if effort is not None and not isinstance(effort, str):
        raise InvalidRequestError("reasoning_effort", f"expected a text, got {type(effort).__name__}")
    if effort == "none":
        thinks = False
    elif effort is not None:
        kwargs["reasoning_effort"] = effort
    now = given.get("now_s", now_s)
    if isinstance(now, bool) or not isinstance(now, (int, float)) or not 0 <= now < 2**38:
        raise InvalidRequestError("now_s", "expected seconds since 1970")
    parallel = given.get("parallel_tool_calls", True)
    if not isinstance(parallel, bool):
        raise InvalidRequestError("parallel_tool_calls", "expected True or False")
    return TemplateOptions(
        tool_choice=_tool_choice(given.get("tool_choice", "auto"))[0],
        parallel_tool_calls=parallel,
        json_schema=_schema(given.get("response_format")),
        enable_thinking=thinks,
        template_kwargs=kwargs,
        now_s=int(now),
    )


def _check_kwargs(kwargs: Mapping[str, Any]) -> None:
    try:
        json.dumps(kwargs, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        raise InvalidRequestError("chat_template_kwargs", "holds something that JSON cannot say") from None


def wanted_function(choices: Mapping[str, Any]) -> str | None:
    """The one function that `tool_choice` names, if it names one."""
    return _tool_choice(choices.get("tool_choice") or "auto")[1]


def check_names(options: Mapping[str, object], known: frozenset[str]) -> None:
    """Raises UnknownOptionError."""
    for name in options:
        if name not in known:
            raise UnknownOptionError(name, known)


def request_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """As `Engine.submit` takes them.

    Raises:
        InvalidRequestError: also where two names of one thing disagree.
    """
    given = {key: value for key, value in options.items() if value is not None}
    made = {key: value for key, value in given.items() if key in _SAME}
    limits = [given[name] for name in ("max_tokens", "max_completion_tokens") if name in given]
    if len(set(map(repr, limits))) > 1:
        raise InvalidRequestError("max_tokens", "differs from max_completion_tokens")
    if limits:
        made["max_tokens"] = limits[0]
    spaces = [given[name] for name in ("namespace", "cache_salt") if name in given]
    if len(set(map(repr, spaces))) > 1:
        raise InvalidRequestError("cache_salt", "differs from namespace")
    if spaces:
        made["namespace"] = spaces[0]
    if given.get("n", 1) != 1:
        raise InvalidRequestError("n", "only 1 is supported; send the request again for another reply")
    if "logit_bias" in given:
        made["logit_bias"] = _bias(given["logit_bias"])
    return made


def includes_usage(options: Mapping[str, Any]) -> bool:
    """Raises InvalidRequestError for `stream_options` of another form."""
    stream_options = options.get("stream_options") or {}
    if not isinstance(stream_options, Mapping):
        raise InvalidRequestError("stream_options", "expected an object")
    return bool(stream_options.get("include_usage", False))


def _bias(bias: object) -> dict[int, float]:
    if not isinstance(bias, Mapping):
        raise InvalidRequestError("logit_bias", "expected an object of token ids and numbers")
    try:
        return {int(key): value for key, value in bias.items()}
    except (TypeError, ValueError):
        raise InvalidRequestError("logit_bias", "a key is no token id") from None


def _tool_choice(choice: object) -> tuple[str, str | None]:
    if isinstance(choice, str) and choice in ("auto", "required", "none"):
        return choice, None
    if isinstance(choice, Mapping) and choice.get("type") == "function":
        function = choice.get("function", choice)
        name = function.get("name") if isinstance(function, Mapping) else None
        if isinstance(name, str) and name:
            return "required", name
    raise InvalidRequestError("tool_choice", 'expected "auto", "required", "none" or a function by its name')


def _schema(response_format: object) -> Mapping[str, Any] | None:
    if response_format is None:
        return None
    kind = response_format.get("type") if isinstance(response_format, Mapping) else None
    if not isinstance(response_format, Mapping) or kind not in ("text", "json_object", "json_schema"):
        raise InvalidRequestError("response_format", "expected a type of text, json_object or json_schema")
    if kind == "text":
        return None
    if kind == "json_object":
        schema = response_format.get("schema", {"type": "object"})
    else:
        wrapper = response_format.get("json_schema")
        schema = wrapper.get("schema") if isinstance(wrapper, Mapping) else None
    if not isinstance(schema, Mapping):
        raise InvalidRequestError("response_format", "the schema is missing")
    return schema
