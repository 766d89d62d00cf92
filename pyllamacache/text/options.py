"""What a caller may say about a request: one list of options for every way to send one, and the way to a `Request`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, TypedDict, cast

import numpy as np

from ..errors import InvalidRequestError, RequestTooLongError, UnknownOptionError
from ..request import Prompt, RenderedChat, Request, RequestId, SamplingParams
from .validate import (
    check_boundaries,
    check_cache_key,
    check_flag,
    check_ids,
    check_max_tokens,
    check_namespace,
    check_priority,
    check_sampling,
    check_slot,
    check_stop,
    check_text,
    check_timeout,
)

if TYPE_CHECKING:
    from ..request import Ids
    from .transcripts import TextMatcher

    PromptInput = str | Sequence[int] | Ids | RenderedChat
    """Text, token ids, or messages that a template has rendered (`Engine.render`)."""


class PromptOptions(TypedDict, total=False):
    """What says which prefix a prompt is, as in `RequestOptions`."""

    namespace: str
    add_special: bool
    parse_special: bool
    match_text: bool


class RequestOptions(TypedDict, total=False):
    """The keyword arguments of `complete`, `stream`, `submit`, `acomplete`, `astream` and, where they apply, `warm`."""

    max_tokens: int
    """Tokens to generate at most; default 64. 0 prefills, and returns logits if asked to."""
    stop: str | Sequence[str]
    """The reply ends before the first of these strings; they may span tokens."""
    timeout_s: float | None
    """Seconds from submission after which the request fails with RequestTimeoutError."""

    cache_prompt: bool
    """Reuse what is held; default True."""
    store: bool
    """Leave the result in the slot for later requests; default True."""
    priority: int
    """-100 to 100, default 0: what a request of lower priority leaves is given up first, in every tier."""
    ttl_s: float | None
    """Seconds after which what the request leaves is given up, unless a later one uses it; default: never."""
    slot: int | None
    """Run in this slot, waiting for it if it is busy; default: the one that serves best."""
    prompt_cache_key: str | None
    """Of slots that serve equally well, take the one that ran this key last: a hint, which isolates nothing."""
    namespace: str
    """Nothing is shared between namespaces; default ""."""

    boundaries: Sequence[int | str]
    """Where the caller wants checkpoints: token offsets, or texts before each of whose occurrences in a text prompt one
    is wanted. The first and the last are taken, those between where they are `n_ubatch` tokens apart."""

    add_special: bool
    """Text prompts: add what the model wants at the start (BOS); default True."""
    parse_special: bool
    """Text prompts: read control tokens that the text spells; default False. Never for text of strangers."""
    match_text: bool
    """Text prompts: where an earlier request of the namespace spelled the same with other tokens, as sampled replies
    do, go on with those; default True. Needs `cache_prompt`; never in exact mode."""

    temperature: float
    """0, the default, takes the most probable token."""
    top_k: int
    top_p: float
    min_p: float
    repeat_penalty: float
    presence_penalty: float
    frequency_penalty: float
    penalty_last_n: int
    """How many recent tokens, prompt included, the penalties look at; default 64."""
    seed: int | None
    """0 to 2**32 - 2; None, the default, draws one."""
    logit_bias: Mapping[int, float]
    """Added to logits by token id; -inf forbids a token."""
    min_tokens: int
    """No end-of-generation token before this many."""
    grammar: str | None
    """GBNF; its rule `root` is what the reply must be."""

    logprobs: bool | None
    """Return the log-probability of each sampled token under the model's own distribution."""
    top_logprobs: int
    """And those of this many most probable tokens, 0 to 20."""
    return_logits: bool
    """Return the logits of the last prompt token."""


_SAMPLING = frozenset(item.name for item in fields(SamplingParams))
_WARM = frozenset(
    {
        "timeout_s",
        "cache_prompt",
        "store",
        "priority",
        "ttl_s",
        "slot",
        "prompt_cache_key",
        "namespace",
        "boundaries",
        "add_special",
        "parse_special",
        "match_text",
    }
)

DEFAULT_MAX_TOKENS = 64

CHAT_MAX_TOKENS = 1024
"""The default for chats, less where the context has no room for it."""

MAX_MARKS = 16
"""Places in a prompt that texts in `boundaries` can mark."""


def build_request(
    prompt: PromptInput,
    options: RequestOptions,
    *,
    request_id: RequestId,
    tokenize: Callable[[str, bool, bool], Ids],
    has_vocab: bool,
    n_vocab: int,
    n_slots: int,
    n_ctx: int,
    generate: bool = True,
    texts: TextMatcher | None = None,
    matches_texts: bool = True,
) -> Request:
    """Check everything a caller said, tokenize, and freeze it. Runs on the caller's thread.

    Without `texts`, a text is what plain tokenization makes of it; `matches_texts` False: with them too, but that what
    spells a control token in a chat's messages stays text.

    Raises:
        InvalidRequestError, UnknownOptionError: an argument.
        RequestTooLongError: prompt and reply can never fit into `n_ctx`.
        ModelUnsupportedError: text for a model without vocabulary.
    """
    _check_names(options, generate)
    given: dict[str, Any] = dict(options)
    chat = prompt if isinstance(prompt, RenderedChat) else None
    tokenized = _tokenized(prompt, given, tokenize, n_vocab, texts, matches_texts=matches_texts)
    fits = DEFAULT_MAX_TOKENS if chat is None else max(1, min(CHAT_MAX_TOKENS, n_ctx - len(tokenized)))
    max_tokens = check_max_tokens(given.get("max_tokens", fits)) if generate else 0
    sampling = check_sampling(
        n_vocab=n_vocab,
        max_tokens=max_tokens,
        **{name: given[name] for name in _SAMPLING & given.keys()},
    )
    if chat is not None and chat.constraint is not None and sampling.grammar is None:
        sampling = replace(sampling, constraint=chat.constraint)
    stop = check_stop(given.get("stop")) + (() if chat is None else chat.stops)
    if not has_vocab and (stop or sampling.grammar is not None):
        raise InvalidRequestError(
            "stop" if stop else "grammar",
            "the model has no vocabulary, so its replies have no text",
        )
    request = Request(
        request_id=request_id,
        prompt=tokenized,
        max_tokens=max_tokens,
        sampling=sampling,
        stop=stop,
        cache_prompt=check_flag(given.get("cache_prompt", True), field="cache_prompt"),
        slot=check_slot(given.get("slot"), n_slots),
        cache_key=check_cache_key(given.get("prompt_cache_key")),
        namespace=check_namespace(given.get("namespace", "")),
        store=check_flag(given.get("store", True), field="store"),
        boundaries=_boundaries(tokenized, given, tokenize, () if chat is None else chat.boundaries),
        marks=() if chat is None else _positions(tokenized, chat.marks, tokenize),
        return_logits=check_flag(given.get("return_logits", False), field="return_logits"),
        generate=generate,
        timeout_s=check_timeout(given.get("timeout_s")),
        priority=check_priority(given.get("priority", 0)),
        ttl_s=check_timeout(given.get("ttl_s"), field="ttl_s"),
        spells_controls=chat is not None,
    )
    if len(request.prompt) + max_tokens > n_ctx:
        raise RequestTooLongError(len(request.prompt), max_tokens, n_ctx, "n_ctx")
    return request


def _boundaries(
    prompt: Prompt,
    given: Mapping[str, object],
    tokenize: Callable[[str, bool, bool], Ids],
    wanted_bytes: Sequence[int] = (),
) -> tuple[int, ...]:
    """Token positions inside the prompt, ascending; `wanted_bytes` are offsets in its text."""
    found = set(_positions(prompt, wanted_bytes, tokenize))
    starts: set[int] = set()
    add_special, parse_special = bool(given.get("add_special", True)), bool(given.get("parse_special", False))
    for boundary in check_boundaries(given.get("boundaries", ())):
        if isinstance(boundary, int):
            found.add(boundary)
            continue
        if prompt.text is None:
            raise InvalidRequestError("boundaries", "a text marks a place in a text prompt only; this one is token ids")
        starts.update(_occurrences(prompt.text, boundary))
    for start in _ends_of(sorted(starts)):
        if prompt.spelling is not None and prompt.retokenized_at is not None:
            n_bytes = len(str(prompt.text)[:start].encode())
            found.add(int(np.searchsorted(prompt.spelling.ends, n_bytes, side="right")))
            continue
        # what another prompt with the same text up to there has in common with this one
        head = tokenize(str(prompt.text)[:start], add_special, parse_special)
        found.add(_common(head, prompt.ids))
    return tuple(sorted(position for position in found if 0 < position < len(prompt)))


def _positions(prompt: Prompt, offsets: Sequence[int], tokenize: Callable[[str, bool, bool], Ids]) -> tuple[int, ...]:
    """The tokens of a chat's prompt that end at or before these bytes; inside the prompt, ascending."""
    found = set()
    for offset in offsets:
        if prompt.spelling is not None:
            found.add(int(np.searchsorted(prompt.spelling.ends, offset, side="right")))
        else:
            head = tokenize(str(prompt.text).encode()[:offset].decode(errors="ignore"), True, True)
            found.add(_common(head, prompt.ids))
    return tuple(sorted(position for position in found if 0 < position < len(prompt)))


def _common(head: Ids, ids: Ids) -> int:
    n_tokens = min(len(head), len(ids))
    differs = np.flatnonzero(head[:n_tokens] != ids[:n_tokens])
    return int(differs[0]) if len(differs) else n_tokens


def _occurrences(text: str, mark: str) -> list[int]:
    starts = []
    start = text.find(mark)
    while start >= 0:
        starts.append(start)
        start = text.find(mark, start + len(mark))
    return starts


def _ends_of(starts: list[int]) -> list[int]:
    """The first one and the last ones: each costs tokenizing what is before it."""
    return starts if len(starts) <= MAX_MARKS else starts[:1] + starts[1 - MAX_MARKS :]


def _check_names(options: Mapping[str, object], generate: bool) -> None:
    known = RequestOptions.__annotations__.keys() if generate else _WARM
    for name in options:
        if name not in known:
            raise UnknownOptionError(name, known)


def _tokenized(
    prompt: PromptInput,
    given: Mapping[str, object],
    tokenize: Callable[[str, bool, bool], Ids],
    n_vocab: int,
    texts: TextMatcher | None,
    *,
    matches_texts: bool,
) -> Prompt:
    chat = prompt if isinstance(prompt, RenderedChat) else None
    add_special = check_flag(given.get("add_special", True), field="add_special")
    parse_special = check_flag(given.get("parse_special", chat is not None), field="parse_special")
    match = check_flag(given.get("match_text", True), field="match_text")
    if chat is None and not isinstance(prompt, str):
        return Prompt(check_ids(cast("Sequence[int]", prompt), n_vocab))
    text = check_text(cast("str", prompt)) if chat is None else chat.text
    if texts is None or (chat is None and not matches_texts):
        return Prompt(check_ids(tokenize(text, add_special, parse_special), n_vocab), text)
    tokenized = texts.prompt(
        text,
        check_namespace(given.get("namespace", "")),
        add_special,
        parse_special,
        match=match and matches_texts and check_flag(given.get("cache_prompt", True), field="cache_prompt"),
        inputs=() if chat is None else chat.outline.inputs,
    )
    return replace(tokenized, ids=check_ids(tokenized.ids, n_vocab), outline=None if chat is None else chat.outline)
