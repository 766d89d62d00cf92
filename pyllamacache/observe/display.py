"""How results, slots, statistics and the cache draw themselves in a notebook: frozen values in, HTML out.

No text of a prompt or reply is in any of it unless it was asked for. What comes from users, names of namespaces
included, is escaped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..request import CheckpointKind, Reason, Source
from . import markup
from .markup import AMBER, BLUE, GREEN, GREY, RED, Part, Tick, bar, box, duration, number, percent, size, table, tokens

if TYPE_CHECKING:
    from ..prefix.tree import TreeCheckpoint, TreeNode
    from ..request import Completion, SlotId
    from .histogram import Histogram
    from .metrics import Statistics

MAX_ROWS = 80
"""Of a tree; what is beyond is counted."""
MAX_MARKS = 4
"""Checkpoints that are named in one row."""

SOURCES: Mapping[Source, str] = {
    Source.NONE: "nothing was reused",
    Source.SLOT: "the slot held it",
    Source.SHARED: "shared with another slot or a parked prefix",
    Source.HOST: "put back from host memory",
    Source.DISK: "put back from disk",
    Source.CHECKPOINT: "a checkpoint was put back",
}
REASONS: Mapping[Reason, str] = {
    Reason.HIT: "all that was known of it was reused",
    Reason.COLD: "nothing held starts like it",
    Reason.DIVERGED: "it differs there from what is held",
    Reason.NO_CHECKPOINT: "it leaves there what is held, and the state has no checkpoint there",
    Reason.EVICTED: "the checkpoint there was given up for want of room",
    Reason.NOT_REWINDABLE: "it leaves there what is held, and this memory cannot go back",
    Reason.OFF_GRID: "exact mode reuses whole chunks only",
    Reason.SLOT_BUSY: "a busy slot holds more, which cannot be shared",
    Reason.OTHER_SLOT: "another slot holds more, which cannot be shared",
    Reason.NOT_RUN: "it was cancelled before it had a slot",
    Reason.DISABLED: "cache_prompt=False",
    Reason.LOST: "what was to be reused was lost there",
    Reason.PREEMPTED: "it gave its cells back and began again",
}
PLACES = (("in a slot", BLUE), ("parked", GREEN), ("host memory only", AMBER), ("disk only", GREY))
_STRANDED = "no KV cells"


@dataclass(frozen=True, slots=True)
class SlotPicture:
    """A slot at one instant, without its tokens."""

    slot_id: SlotId
    is_busy: bool
    namespace: str
    n_tokens: int
    checkpoints: tuple[int, ...]


# ---- one result ------------------------------------------------------------------------------------------------


def completion(answer: Completion, *, title: str = "Completion", with_text: bool = False) -> str:
    """A request's answer: what was reused of its prompt, why not more, and where the time went.

    Args:
        with_text: the reply as well, which is text.
    """
    usage, cache = answer.usage, answer.cache
    head = (
        f"{markup.strong(tokens(usage.prompt_tokens))} sent, "
        f"{markup.strong(number(usage.cached_tokens))} reused ({percent(usage.cached_tokens, usage.prompt_tokens)}), "
        f"{markup.strong(number(cache.prefilled_tokens))} computed; {tokens(usage.completion_tokens)} generated"
    )
    parts = [
        markup.line(head),
        _prompt_bar(answer),
        _prompt_legend(answer),
        table([_why(answer), *_facts(answer)]),
    ]
    if with_text:
        style = "white-space:pre-wrap;border-left:3px solid rgba(127,127,127,.35);margin:6px 0;padding-left:10px"
        parts.append(f'<div style="{style}">{markup.text(answer.text)}</div>')
    return box(title, *parts)


def _known_end(answer: Completion) -> int:
    """Where what was computed although it was held ends."""
    return max(answer.usage.cached_tokens, min(answer.cache.matched_tokens, answer.usage.prompt_tokens))


def _prompt_bar(answer: Completion) -> str:
    n, cached, known = answer.usage.prompt_tokens, answer.usage.cached_tokens, _known_end(answer)
    parts = [
        Part(0, cached, GREEN, f"{tokens(cached)} reused"),
        Part(cached, known, RED, f"{tokens(known - cached)} computed again, although held", 0.75),
        Part(known, n, AMBER, f"{tokens(n - known)} computed for the first time"),
    ]
    cache, ticks = answer.cache, []
    if cache.reason is not Reason.HIT and 0 < cache.position < n:
        ticks.append(Tick(cache.position, RED, f"{cache.reason} at {number(cache.position)}"))
    label = f"{cached} of {n} prompt tokens reused"
    return bar(parts, n, ticks=ticks, label=label)


def _prompt_legend(answer: Completion) -> str:
    n, cached, known = answer.usage.prompt_tokens, answer.usage.cached_tokens, _known_end(answer)
    keys = [
        (GREEN, "reused", cached),
        (RED, "computed again", known - cached),
        (AMBER, "computed", n - known),
    ]
    return markup.line(markup.muted("".join(markup.key(color, words) for color, words, there in keys if there)))


def _why(answer: Completion) -> tuple[str, str]:
    cache = answer.cache
    where = "" if cache.reason in (Reason.HIT, Reason.COLD) else f" at {number(cache.position)}"
    why = f"{markup.code(cache.reason)}{where} {markup.muted('- ' + markup.text(REASONS[cache.reason]))}"
    if cache.note:
        why += " " + markup.muted(f"({markup.text(cache.note)})")
    return "why not more", why


def _facts(answer: Completion) -> Iterable[tuple[str, str]]:
    cache, times = answer.cache, answer.timings
    yield "reused from", f"{markup.code(cache.source)} {markup.muted('- ' + markup.text(SOURCES[cache.source]))}"
    seconds = {
        "queue": times.queue_s,
        "restore": times.restore_s,
        "prefill": times.prefill_s,
        "first token": times.ttft_s,
        "decode": times.decode_s,
    }
    yield "time", " &nbsp; ".join(f"{markup.muted(name)} {duration(value)}" for name, value in seconds.items())
    slot = "none" if answer.slot_id is None else f"slot {answer.slot_id}"
    yield "ended", f"{markup.code(answer.finish_reason)} {markup.muted('in ' + slot)}"


# ---- slots -----------------------------------------------------------------------------------------------------


def slots(pictures: Sequence[SlotPicture], n_ctx: int) -> str:
    """What each slot holds, of the `n_ctx` tokens that a request may have."""
    rows = []
    for each in pictures:
        color = AMBER if each.is_busy else BLUE
        ticks = [Tick(position, RED, f"checkpoint at {number(position)}") for position in each.checkpoints]
        held = bar([Part(0, each.n_tokens, color, tokens(each.n_tokens))], n_ctx, ticks=ticks, width="22em")
        rows.append(
            (
                str(each.slot_id),
                markup.chip("busy" if each.is_busy else "idle", color),
                number(each.n_tokens),
                held,
                number(len(each.checkpoints)),
                markup.code(each.namespace) if each.namespace else markup.muted("default"),
            )
        )
    head = ("slot", "", "tokens", f"of {number(n_ctx)}", "checkpoints", "namespace")
    keys = markup.key(BLUE, "idle") + markup.key(AMBER, "busy") + markup.key(RED, "checkpoint", is_mark=True)
    title = "Slot" if len(pictures) == 1 else f"{len(pictures)} slots"
    return box(title, table(rows, head, frozenset({2, 4})), markup.line(markup.muted(keys)))


# ---- the tree --------------------------------------------------------------------------------------------------


def tree(namespaces: Sequence[tuple[str, Sequence[TreeNode]]], *, title: str = "Cache", below: str = "") -> str:
    """Shared prefixes, by namespace: each row a stretch that everything below it has in common.

    Args:
        below: HTML.
    """
    nodes = [(name, depth, node) for name, roots in namespaces for root in roots for depth, node in root.walk()]
    whole = max((node.end for *_, node in nodes), default=1)
    with_text = any(node.text is not None for *_, node in nodes)
    rows: list[tuple[str, ...]] = []
    names = len(namespaces) > 1 or any(name for name, _ in namespaces)
    last = None
    for name, depth, node in nodes[:MAX_ROWS]:
        if names and name != last:
            last = name
            rows.append((f"namespace {markup.code(name) if name else markup.muted('default')}",))
        rows.append(_tree_row(node, depth, whole, with_text=with_text))
    if not nodes:
        return box(title, markup.line(markup.muted("nothing is held")), below)
    head: tuple[str, ...] = ("tokens", f"0 to {number(whole)}", "held by", "host", "disk", "checkpoints")
    more = len(nodes) - MAX_ROWS
    rest = markup.line(markup.muted(f"and {more} more")) if more > 0 else ""
    if with_text:
        head = (head[0], "begins with", *head[1:])
    numbers = frozenset({4, 5} if with_text else {3, 4})
    return box(title, table(rows, head, numbers), rest, markup.line(markup.muted(_tree_keys())), below, is_wide=True)


def _tree_row(node: TreeNode, depth: int, whole: int, *, with_text: bool) -> tuple[str, ...]:
    branch = f'<span style="padding-left:{1.1 * min(depth, 12):.1f}em"></span>{"└ " if depth else ""}'
    place, color = place_of(node)
    title = f"{number(node.start)} to {number(node.end)}: {tokens(node.n_tokens)}, {place}"
    part = Part(node.start, node.end, color, title, 0.3 if place == _STRANDED else 1.0)
    ticks = [Tick(each.position, _mark_color(each), _mark(each)) for each in node.checkpoints]
    owners = "".join(markup.chip(each, color) for each in owners_of(node)) or markup.muted(place)
    begins = (markup.clipped(node.text or "", "16em"),) if with_text else ()
    return (
        f"{branch}{number(node.n_tokens)}",
        *begins,
        bar([part], whole, ticks=ticks, width="18em", label=title),
        owners,
        size(node.host_bytes) if node.host_bytes else "",
        size(node.disk_bytes) if node.disk_bytes else "",
        _marks(node.checkpoints),
    )


def place_of(node: TreeNode) -> tuple[str, str]:
    """Where its KV cells are, as far as the fastest of its places goes, and the colour of that."""
    index = 0 if node.slots else 1 if node.n_parked else 2 if node.host_tokens else 3 if node.disk_tokens else 4
    return (_STRANDED, GREY) if index == 4 else PLACES[index]


def owners_of(node: TreeNode) -> list[str]:
    """Slots and parked prefixes that hold it, and whether it is pinned."""
    owners = [f"slot {each}" for each in node.slots]
    if node.n_parked:
        owners.append("parked" if node.n_parked == 1 else f"parked × {node.n_parked}")  # noqa: RUF001  # a times sign
    return [*owners, "pinned"] if node.is_pinned else owners


def _mark(each: TreeCheckpoint) -> str:
    where = (" on disk too" if each.in_memory else " on disk") if each.on_disk else ""
    pinned = ", pinned" if each.is_pinned else ""
    return f"{each.kind} at {number(each.position)}{where}: {size(each.n_bytes)}, {each.hits} hits{pinned}"


def _mark_color(each: TreeCheckpoint) -> str:
    if not each.in_memory:
        return GREY
    return AMBER if CheckpointKind(each.kind).is_optional else RED


def _marks(checkpoints: Sequence[TreeCheckpoint]) -> str:
    named = [
        f'<span title="{markup.text(_mark(each))}">{markup.text(each.kind)} {number(each.position)}</span>'
        for each in checkpoints[:MAX_MARKS]
    ]
    if len(checkpoints) > MAX_MARKS:
        named.append(markup.muted(f"and {len(checkpoints) - MAX_MARKS} more"))
    return f'<span style="font-size:12px">{", ".join(named)}</span>'


def _tree_keys() -> str:
    marks = (("checkpoint", RED), ("one of the second class", AMBER), ("one on disk only", GREY))
    return "".join(markup.key(color, words) for words, color in PLACES) + "".join(
        markup.key(color, words, is_mark=True) for words, color in marks
    )


# ---- statistics ------------------------------------------------------------------------------------------------


def statistics(now: Statistics) -> str:
    """Totals of an engine: tokens, requests by source and reason, memory against its limits, durations."""
    head = (
        f"{markup.strong(number(now.n_requests))} requests answered, {now.n_running} running, {now.n_queued} waiting; "
        f"{markup.strong(tokens(now.prompt_tokens))} sent, {markup.strong(format(now.hit_rate, '.0%'))} reused"
    )
    failed = [f"{n} {what}" for n, what in ((now.n_cancelled, "cancelled"), (now.n_failed, "failed")) if n]
    parts = [
        Part(0, now.cached_tokens, GREEN, f"{tokens(now.cached_tokens)} reused"),
        Part(now.cached_tokens, now.prompt_tokens, AMBER, f"{tokens(now.prefilled_tokens)} computed"),
    ]
    keys = markup.key(GREEN, f"{number(now.cached_tokens)} reused") + markup.key(
        AMBER, f"{number(now.prefilled_tokens)} computed"
    )
    return box(
        "Statistics",
        markup.line(head + (markup.muted(f" ({', '.join(failed)})") if failed else "")),
        bar(parts, now.prompt_tokens, label=f"{now.cached_tokens} of {now.prompt_tokens} prompt tokens reused"),
        markup.line(markup.muted(keys)),
        _reasons(now),
        memory(now),
        _durations(now),
    )


def _reasons(now: Statistics) -> str:
    sources = [(source, n) for source, n in now.cached_tokens_by_source.items() if n]
    reasons = [(reason, n) for reason, n in now.requests_by_reason.items() if n]
    rows = [
        (
            markup.code(source),
            number(now.requests_by_source.get(source, 0)),
            f"{number(n)} reused",
            markup.muted(SOURCES[source]),
        )
        for source, n in sorted(sources, key=lambda each: -each[1])
    ]
    rows += [
        (
            markup.code(reason),
            number(n),
            f"{number(now.prefilled_tokens_by_reason.get(reason, 0))} computed",
            markup.muted(REASONS[reason]),
        )
        for reason, n in sorted(reasons, key=lambda each: -each[1])
    ]
    return table(rows, ("source, reason", "requests", "tokens", ""), frozenset({1, 2})) if rows else ""


def memory(now: Statistics) -> str:
    """What is in use of each budget."""
    rows = [
        (
            name,
            bar([Part(0, used, color, read(used))], limit or 1, width="14em"),
            f"{read(used)} of {read(limit)}",
            more,
        )
        for name, used, limit, color, read, more in _budgets(now)
        if limit
    ]
    return table(rows, ("memory", "", "in use", "")) if rows else ""


def _budgets(now: Statistics) -> Iterable[tuple[str, int, int, str, Callable[[float], str], str]]:
    tiers, checkpoints = now.tiers, now.checkpoints
    parked = f"{tokens(tiers.parked_tokens)} parked in {tiers.parked}" if tiers.parked else ""
    spans = f"{tiers.spans} spans, {size(tiers.span_bytes)}" if tiers.spans else ""
    yield "KV cells", now.kv_tokens_used, now.kv_tokens, BLUE, number, markup.muted(parked)
    yield "host memory", tiers.host_bytes, tiers.host_limit_bytes, AMBER, size, markup.muted(spans)
    count = f"{checkpoints.held} of at most {checkpoints.max_held}"
    yield "checkpoints", checkpoints.held_bytes, checkpoints.limit_bytes, RED, size, markup.muted(count)
    entries = f"{tiers.disk_entries} entries known"
    yield "disk", tiers.disk_bytes, tiers.disk_limit_bytes, GREY, size, markup.muted(entries)


def _durations(now: Statistics) -> str:
    rows = [
        (name, number(value.count), duration(value.mean_s), duration(value.sum_s), _shape(value))
        for name, value in (
            ("prefill", now.prefill),
            ("restore", now.restore),
            ("capture", now.checkpoints.capture),
            ("stall", now.checkpoints.stall),
        )
        if value.count
    ]
    ends = f"{duration(0.0001)} to {duration(100)}, and more"
    return table(rows, ("seconds", "count", "mean", "sum", ends), frozenset({1, 2, 3})) if rows else ""


def _shape(value: Histogram) -> str:
    ends = [f"up to {duration(bound)}" for bound in value.bounds] + [f"over {duration(value.bounds[-1])}"]
    return markup.columns(value.counts, [f"{n}: {end}" for n, end in zip(value.counts, ends, strict=True)])
