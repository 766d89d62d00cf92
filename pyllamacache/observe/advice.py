"""One suggestion for one prefill: the most specific that fits. Never a word of the prompt."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..request import Reason
from .difference import Change
from .places import TEMPLATE
from .volatile import Volatile

if TYPE_CHECKING:
    from .difference import Difference
    from .explanation import EngineFacts
    from .places import Place

VOLATILE_WORDS = {
    Volatile.TIMESTAMP: "the time",
    Volatile.TIME: "the time",
    Volatile.DATE: "the date",
    Volatile.UUID: "the UUID",
    Volatile.ID: "the id",
    Volatile.HASH: "the hash",
    Volatile.COUNTER: "the counter",
}

BREAKS = {
    Change.OTHER_TOKENS: "send the ids of replies back (prompt ids + reply.token_ids), or leave match_text on, so that "
    "text is spelled with the tokens it was generated as",
    Change.REORDERED_BLOCKS: "keep the order: sort such blocks once and send them so every time",
    Change.REMOVED_MIDDLE: "dropping old messages at every turn costs all that follows each time; compact once, at a "
    "boundary, down to well below the limit, and append again from there",
    Change.CUT_FRONT: "cutting the front at every turn costs everything each time; keep the header, and compact once "
    "down to well below the limit",
    Change.OTHER_HEADER: "keep one header for all requests that share the rest, and put what differs behind it",
    Change.INSERTED_SPAN: "append what is new at the end, or to the last message, instead of putting it in between",
    Change.CHANGED_SPAN: "put what changes behind what stays: at the end, or in the last message",
}
"""Changes of a prompt that cost what follows them."""

UNSTABLE_JSON = (
    "write JSON one way: the same order of keys and the same spaces every time, or send back the text that came"
)

_ENGINE = {
    Reason.DISABLED: "the request asked for it with cache_prompt=False",
    Reason.NOT_RUN: "the request was cancelled before it ran",
    Reason.LOST: "what was to be reused could not be put back; if this repeats, see engine.statistics() and the log",
    Reason.PREEMPTED: "raise kv_tokens, or run fewer long requests at once: running ones competed for cells",
    Reason.OTHER_SLOT: "leave slot= to the engine: another slot holds more of this prompt",
    Reason.SLOT_BUSY: "the slot that holds most of it was busy, and this memory cannot share it: send requests of one "
    "conversation one after the other, or raise n_slots",
    Reason.OFF_GRID: "exact mode reuses whole n_ubatch chunks only: a smaller n_ubatch loses less",
    Reason.NOT_REWINDABLE: "this memory cannot go back: only prompts that extend what is held are reused",
}
_NOTHING = "nothing to do: only what is new was prefilled"
_SLACK_TOKENS = 8
"""The last tokens of a reply are not held."""


def advise_on_prompt(difference: Difference, place: Place, old_place: Place, volatile: Volatile | None) -> str:
    """What the caller can do about a change of prompts; "" if nothing."""
    change = difference.change
    if change is Change.BRANCHED and volatile is not None and place.is_header:
        change = Change.CHANGED_SPAN
    if change not in BREAKS:
        return ""
    if volatile is not None and change is not Change.OTHER_TOKENS:
        where = f" out of {place.path}" if place.path not in ("", TEMPLATE) else ""
        return f"move {VOLATILE_WORDS[volatile]}{where}: to the end of the prompt or into the last message"
    if place.tool is not None or old_place.tool is not None:
        return _on_tools(change)
    if place.path == TEMPLATE and change is Change.CHANGED_SPAN:
        return (
            "the template writes earlier messages differently once more follow; keep what it drops (such as reasoning) "
            "out of history, or choose a template option that keeps it"
        )
    if place.role == "assistant" and change is Change.CHANGED_SPAN:
        return "send assistant messages back as they came: edited history costs all that follows"
    return BREAKS[change]


def _on_tools(change: Change) -> str:
    if change is Change.REORDERED_BLOCKS:
        return "sort the tools once, by name, and send them in that order every time; write their JSON one way"
    return "send the same tools every time: restrict them with tool_choice instead of adding, removing or editing them"


def advise_on_request(
    difference: Difference | None, engine: EngineFacts, on_prompt: str, *, n_checkpoints: int, min_gap_tokens: int
) -> str:
    """What is worth most: a change of prompts, of the engine's settings, or nothing."""
    if engine.reason in (Reason.DISABLED, Reason.NOT_RUN, Reason.LOST, Reason.PREEMPTED):
        return _ENGINE[engine.reason]
    n_again = engine.matched_tokens - engine.resumed_tokens
    n_behind = engine.resumed_tokens + engine.prefilled_tokens - engine.matched_tokens
    if difference is not None and difference.position > engine.matched_tokens + _SLACK_TOKENS:
        return _on_loss(difference, engine)
    if on_prompt and n_behind >= n_again:
        return on_prompt
    if engine.reason in (Reason.EVICTED, Reason.NO_CHECKPOINT):
        return _on_checkpoints(engine, n_again, n_checkpoints, min_gap_tokens)
    if on_prompt:
        return on_prompt
    if engine.reason in _ENGINE:
        return _ENGINE[engine.reason]
    if difference is None and engine.reason is Reason.COLD:
        return "nothing to do: the first prompt of its kind; engine.warm() prefills a header before it is needed"
    if difference is not None and difference.change is Change.UNRELATED:
        return "nothing to do: it has nothing in common with what was sent before"
    if difference is not None and difference.change is Change.BRANCHED:
        return "nothing to do: from there on this is another prompt"
    return _NOTHING


def _on_loss(difference: Difference, engine: EngineFacts) -> str:
    n_gone = difference.position - engine.matched_tokens
    return (
        f"{n_gone:,} tokens that both prompts begin with were no longer held: raise kv_tokens or host_bytes, pin the "
        "prefix, or set disk_dir"
    )


def _on_checkpoints(engine: EngineFacts, n_again: int, n_checkpoints: int, min_gap_tokens: int) -> str:
    if not n_checkpoints:
        return "this memory goes back to checkpoints only, and none are taken: set max_checkpoints and checkpoint_bytes"
    if engine.lost is not None or engine.reason is Reason.EVICTED:
        return (
            "a checkpoint was given up for want of room: raise max_checkpoints, checkpoint_bytes or host_bytes, or pin"
        )
    if n_again < min_gap_tokens:
        return (
            f"below minimum: {n_again} tokens from the checkpoint before, one at {engine.matched_tokens:,} would cost "
            f"more than it saves; boundaries=[{engine.matched_tokens}] asks for it all the same"
        )
    return (
        f"ask for a checkpoint where prompts part: boundaries=[{engine.matched_tokens}] in requests that begin so; the "
        "next prompt that leaves there finds the one taken now"
    )
