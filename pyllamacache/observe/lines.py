"""The same as `display` for a terminal: plain lines. No text of a prompt in it unless it was asked for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ..request import Reason
from .display import MAX_MARKS, SlotPicture, owners_of, place_of
from .markup import duration, number, percent, printable, size, tokens

if TYPE_CHECKING:
    from ..prefix.tree import TreeNode
    from ..request import Completion
    from .metrics import Statistics


def _on_one_line(name: str) -> str:
    return printable(name).replace("\n", "\\n").replace("\t", "\\t")


def completion(answer: Completion) -> str:
    """One line: what was sent, reused and computed, and why not less."""
    usage, cache = answer.usage, answer.cache
    where = "" if cache.reason in (Reason.HIT, Reason.COLD) else f" at {number(cache.position)}"
    source = f" from {cache.source}" if usage.cached_tokens else ""
    return (
        f"{tokens(usage.prompt_tokens)}: {number(usage.cached_tokens)} reused{source}, "
        f"{number(cache.prefilled_tokens)} computed ({cache.reason}{where}); "
        f"{tokens(usage.completion_tokens)} generated ({answer.finish_reason}); "
        f"first token after {duration(answer.timings.ttft_s)}"
    )


def slots(pictures: Sequence[SlotPicture], n_ctx: int) -> str:
    """A line for each."""
    return "\n".join(
        f"slot {each.slot_id}  {'busy' if each.is_busy else 'idle'}  {each.n_tokens:>8,} of {n_ctx:,} tokens"
        + (f"  checkpoints at {_positions(each.checkpoints)}" if each.checkpoints else "")
        + (f"  namespace {_on_one_line(each.namespace)}" if each.namespace else "")
        for each in pictures
    )


def tree(namespaces: Sequence[tuple[str, Sequence[TreeNode]]]) -> str:
    """Shared prefixes, by namespace: a line for each stretch that everything below it has in common."""
    lines = []
    for name, roots in namespaces:
        lines.append(f"namespace {_on_one_line(name)}" if name else "namespace (default)")
        for root in roots:
            lines += _branch(root)
    return "\n".join(lines) if lines else "nothing is held"


def _branch(root: TreeNode) -> Iterator[str]:
    todo: list[tuple[str, str, TreeNode]] = [("", "  ", root)]
    while todo:
        sign, indent, node = todo.pop()
        yield f"{indent}{sign}{_node(node)}"
        below = indent + {"": "", "├─ ": "│  ", "└─ ": "   "}[sign]
        signs = ["├─ "] * (len(node.children) - 1) + ["└─ "]
        todo.extend((sign, below, child) for sign, child in reversed(list(zip(signs, node.children, strict=False))))


def _node(node: TreeNode) -> str:
    parts = [f"{number(node.start)}..{number(node.end)}", *(owners_of(node) or [place_of(node)[0]])]
    if node.host_bytes:
        parts.append(f"host {size(node.host_bytes)}")
    if node.disk_bytes:
        parts.append(f"disk {size(node.disk_bytes)}")
    if node.checkpoints:
        named = [
            f"{each.kind} {number(each.position)}{'' if each.in_memory else ' (disk)'}"
            for each in node.checkpoints[:MAX_MARKS]
        ]
        more = len(node.checkpoints) - MAX_MARKS
        parts.append("checkpoints " + ", ".join([*named, f"{more} more"] if more > 0 else named))
    if node.text is not None:
        parts.append(repr(node.text))
    return "  ".join(parts)


def _positions(positions: Sequence[int]) -> str:
    shown = ", ".join(map(number, positions[:MAX_MARKS]))
    more = len(positions) - MAX_MARKS
    return f"{shown} and {more} more" if more > 0 else shown


def statistics(now: Statistics) -> str:
    """Totals, a line for each kind."""
    return "\n".join(_totals(now))


def _totals(now: Statistics) -> Iterator[str]:
    yield (
        f"requests      {number(now.n_requests)} answered, {now.n_cancelled} cancelled, {now.n_failed} failed, "
        f"{now.n_running} running, {now.n_queued} waiting"
    )
    yield (
        f"prompts       {tokens(now.prompt_tokens)}: {number(now.cached_tokens)} reused "
        f"({percent(now.cached_tokens, now.prompt_tokens)}), {number(now.prefilled_tokens)} computed"
    )
    by_reason = sorted(now.requests_by_reason.items(), key=lambda each: -each[1])
    if by_reason:
        yield "reasons       " + ", ".join(f"{reason} {number(n)}" for reason, n in by_reason)
    by_source = sorted(now.cached_tokens_by_source.items(), key=lambda each: -each[1])
    if now.cached_tokens:
        yield "reused from   " + ", ".join(f"{source} {number(n)}" for source, n in by_source if n)
    tiers, checkpoints = now.tiers, now.checkpoints
    for name, used, limit in (
        ("KV cells", number(now.kv_tokens_used), now.kv_tokens and number(now.kv_tokens)),
        ("host memory", size(tiers.host_bytes), tiers.host_limit_bytes and size(tiers.host_limit_bytes)),
        ("checkpoints", size(checkpoints.held_bytes), checkpoints.limit_bytes and size(checkpoints.limit_bytes)),
        ("disk", size(tiers.disk_bytes), tiers.disk_limit_bytes and size(tiers.disk_limit_bytes)),
    ):
        if limit:
            yield f"{name:<14}{used} of {limit}"
    for name, value in (
        ("prefill", now.prefill),
        ("restore", now.restore),
        ("capture", checkpoints.capture),
        ("stall", checkpoints.stall),
    ):
        if value.count:
            mean, whole = duration(value.mean_s), duration(value.sum_s)
            yield f"{name:<14}{number(value.count)} of {mean} on average, {whole} in all"
