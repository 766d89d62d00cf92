"""Why a prompt is prefilled again: from what an engine knew, or from two prompts beside each other."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import InvalidRequestError
from ..request import CacheReport
from .advice import advise_on_prompt, advise_on_request
from .difference import common_length, compare_spelled, overlap
from .explanation import EngineFacts, Explanation, Windows
from .inputs import explain_inputs, read
from .places import Place, locate
from .windows import MAX_SHOWN_IDS, Seen, shown, volatile_at

if TYPE_CHECKING:
    from ..request import Prompt, Spelling
    from .difference import Difference
    from .evidence import Evidence, Recent
    from .inputs import Tokenizer

_SHORT_SHARE = 0.25
"""With less in common at the front, the most similar of the recent prompts is looked for."""
_MIN_OVERLAP = 0.05


def explain(
    old: Any,
    new: Any = None,
    *,
    model: Tokenizer | None = None,
    tools: object = None,
    old_tools: object = None,
    show_text: bool = False,
) -> Explanation:
    """What of `new` a prefix cache that has seen `old` cannot reuse, and why.

    Args:
        old: token ids, text, a list of messages, or a request body with "messages" and "tools". Alone, a reply or its
            `cache` report, which the engine's own account goes into.
        new: the same kind of thing.
        model: counts in tokens; without one, texts and messages are counted in bytes.
        tools: those of `new`, or of both if `old_tools` is not given.
        show_text: with what was there and what is there now.

    Raises:
        InvalidRequestError: not two of a kind, or not messages.
    """
    if new is None:
        report = getattr(getattr(old, "completion", old), "cache", old)
        if not isinstance(report, CacheReport):
            raise InvalidRequestError("new", "is missing; alone, only a reply or its cache report is explained")
        return explain_report(report, show_text=show_text)
    before = read(old, "old", tools if old_tools is None else old_tools, model)
    after = read(new, "new", tools, model)
    if (before.data is None) is not (after.data is None):
        raise InvalidRequestError("new", "is not of the same kind as old: ids are compared with ids")
    return explain_inputs(before, after, show_text=show_text)


def explain_report(report: CacheReport, *, show_text: bool = False) -> Explanation:
    """What became of a request, by what the engine knew then."""
    evidence = report.evidence
    if evidence is None:
        return _by_numbers(_facts(report, None, None), show_text=show_text)
    old, prompt = _closest(evidence), evidence.prompt
    per_token = evidence.prefill_s_per_token
    cost_s = evidence.prefill_s if per_token is None else report.prefilled_tokens * per_token
    difference = None if old is None else compare_spelled(old.ids, prompt.ids, old.spelling, prompt.spelling)
    if old is None or difference is None or report.matched_tokens > difference.position:
        found = _by_numbers(_facts(report, evidence, None), evidence, show_text=show_text)
        return replace(found, cost_s=cost_s)
    engine, seen = _facts(report, evidence, old), _look(old, prompt, difference)
    on_prompt = advise_on_prompt(difference, seen.place, seen.old_place, seen.volatile)
    n_checkpoints, min_gap = evidence.n_checkpoints, evidence.min_gap_tokens
    return Explanation(
        unit="tokens",
        difference=difference,
        position=difference.position,
        place=seen.place,
        old_place=seen.old_place,
        volatile=seen.volatile,
        cost=report.prefilled_tokens,
        cost_s=cost_s,
        suggestion=advise_on_request(
            difference, engine, on_prompt, n_checkpoints=n_checkpoints, min_gap_tokens=min_gap
        ),
        engine=engine,
        shows_text=show_text,
        windows=seen.windows,
    )


def _facts(report: CacheReport, evidence: Evidence | None, old: Recent | None) -> EngineFacts:
    facts = EngineFacts(
        report.matched_tokens,
        report.resumed_tokens,
        report.prefilled_tokens,
        report.source,
        report.reason,
        report.position,
    )
    if evidence is None:
        return facts
    return replace(
        facts,
        has_state=evidence.has_state,
        checkpoint=evidence.checkpoint,
        lost=evidence.lost,
        compared_age_s=None if old is None else evidence.at_s - old.at_s,
    )


def _by_numbers(engine: EngineFacts, evidence: Evidence | None = None, *, show_text: bool) -> Explanation:
    """Without an earlier prompt to compare with: what the engine matched is all there is."""
    place = Place()
    if evidence is not None:
        place = _place_of(evidence.prompt, min(engine.matched_tokens, len(evidence.prompt) - 1))
    n_checkpoints, min_gap = (1, 0) if evidence is None else (evidence.n_checkpoints, evidence.min_gap_tokens)
    return Explanation(
        unit="tokens",
        difference=None,
        position=engine.matched_tokens,
        place=place if engine.matched_tokens else Place(),
        old_place=Place(),
        volatile=None,
        cost=engine.prefilled_tokens,
        cost_s=None,
        suggestion=advise_on_request(None, engine, "", n_checkpoints=n_checkpoints, min_gap_tokens=min_gap),
        engine=engine,
        shows_text=show_text,
    )


# ---- the engine's side -----------------------------------------------------------------------------------------


def _closest(evidence: Evidence) -> Recent | None:
    """The recent request that the prompt has most in common with, the newest of equals."""
    ids = evidence.prompt.ids
    if not evidence.recent:
        return None
    newest_first = evidence.recent[::-1]
    common = [common_length(each.ids, ids) for each in newest_first]
    best = int(np.argmax(common))
    if common[best] >= _SHORT_SHARE * len(ids):
        return newest_first[best]
    similar = [overlap(each.ids, ids) for each in newest_first]
    most = int(np.argmax(similar))
    return newest_first[most] if similar[most] >= _MIN_OVERLAP else newest_first[best]


def _look(old: Recent, prompt: Prompt, found: Difference) -> Seen:
    """Where the change is, and what is there."""
    first, at = found.hunks[0] if found.hunks else None, found.position
    old_span = (at, at + found.old_changed) if first is None else (first.old_start, first.old_end)
    new_span = (at, at + found.new_changed) if first is None else (first.new_start, first.new_end)
    mine, its = prompt.spelling, old.spelling
    old_text, new_text = _spelled(its, old_span), _spelled(mine, new_span)
    place = _place_of(prompt, min(at, len(prompt) - 1), _common_bytes(its, mine, at)) if len(prompt) else Place()
    if at >= old.n_prompt:
        old_place = Place("reply") if at < len(old.ids) else Place()
    else:
        old_place = _place_in(old, at, _common_bytes(its, mine, at))
    volatile = None
    if mine is not None and its is not None:
        volatile = volatile_at(its.data, _byte_span(its, old_span), mine.data, _byte_span(mine, new_span))
    windows = Windows(
        tuple(map(int, old.ids[slice(*old_span)][:MAX_SHOWN_IDS])),
        tuple(map(int, prompt.ids[slice(*new_span)][:MAX_SHOWN_IDS])),
        old_text,
        new_text,
    )
    return Seen(place, old_place, volatile, windows)


def _place_of(prompt: Prompt, token: int, at_least: int = 0) -> Place:
    if prompt.outline is None or prompt.spelling is None:
        return Place()
    return locate(prompt.outline, prompt.spelling.data, max(at_least, _start_byte(prompt.spelling, token)))


def _place_in(old: Recent, token: int, at_least: int) -> Place:
    if old.outline is None or old.spelling is None:
        return Place()
    return locate(old.outline, old.spelling.data, max(at_least, _start_byte(old.spelling, token)))


def _common_bytes(old: Spelling | None, new: Spelling | None, token: int) -> int:
    """The first byte that differs, where it lies within the token that does: what a token begins with may be equal."""
    if old is None or new is None or token >= min(len(old.ends), len(new.ends)):
        return 0
    start = _start_byte(new, token)
    end = min(int(old.ends[token]), int(new.ends[token]))
    mine, its = (np.frombuffer(each.data[start:end], dtype=np.uint8) for each in (new, old))
    n_common = common_length(its, mine)
    return start + n_common if n_common < end - start else start


def _start_byte(spelling: Spelling, token: int) -> int:
    return int(spelling.ends[min(token, len(spelling.ends)) - 1]) if token and len(spelling.ends) else 0


def _byte_span(spelling: Spelling, span: tuple[int, int]) -> tuple[int, int]:
    return _start_byte(spelling, span[0]), _start_byte(spelling, span[1])


def _spelled(spelling: Spelling | None, span: tuple[int, int]) -> str | None:
    if spelling is None or span[1] > len(spelling.ends):
        return None
    return shown(spelling.data, _byte_span(spelling, span))
