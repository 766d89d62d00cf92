"""Which prefixes exist and where: a radix tree over token ids, by namespace.

An edge holds the ids that everything below it shares, so a prefix that many have is stored once. What exists hangs on
the tree as marks at exact positions; a node ends only where prompts part:

    root --[2000 ids]--+--[56 ids: tail @2052, parked @2056]
           spans 0..7  `--[140 ids: branch @2010, tail @2096, end @2136, span 2048..2136]

    checkpoint  a state at exactly this position, in host memory or on disk
    span        the KV cells of [start, end) in host memory or on disk, start a multiple of the span length
    parked      a sequence that nobody runs holds the KV cells of [0, end) on the device

An engine has one of these for what is parked and in host memory, and one for what is on disk; a lookup walks both
(`stored`). Slots are in neither: their content changes with every token, and there are few of them.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING, Protocol, TypeVar

import numpy as np

from ..errors import InternalError
from .evicted import Evicted, EvictedPrefixes
from .match import common_prefix_len

if TYPE_CHECKING:
    from collections.abc import Iterator, KeysView, ValuesView

    from ..request import CheckpointKind, Ids, SlotId

_M = TypeVar("_M", bound="Mark")

SPAN_TOKENS = 256
"""Length of a stored span; the last one of a prefix may be shorter."""


class _Node:
    """Ids of [start, start + len(edge)), and the marks whose position lies in there, by position."""

    __slots__ = ("checkpoints", "children", "edge", "n_parked", "parent", "parked", "spans", "start")

    def __init__(self, start: int, edge: Ids, parent: _Node | None) -> None:
        self.start = start
        self.edge = edge
        self.parent = parent
        self.children: dict[int, _Node] = {}
        self.checkpoints: list[Checkpoint] = []
        self.spans: list[Span] = []
        self.parked: list[Parked] = []
        self.n_parked = 0
        """Here and below."""

    @property
    def end(self) -> int:
        return self.start + len(self.edge)

    def marks(self) -> Iterator[Mark]:
        yield from self.checkpoints
        yield from self.spans
        yield from self.parked

    @property
    def is_bare(self) -> bool:
        return not (self.checkpoints or self.spans or self.parked)


@dataclass(slots=True, eq=False)
class Mark:
    """Something that exists of the prefix [0, position)."""

    namespace: str
    position: int
    node: _Node | None = field(default=None, repr=False)
    """Where it hangs; None: not in the tree (any more)."""
    last_used: int = 0
    """Number of the latest request whose prompt went past it."""
    hits: int = 0
    """Requests that resumed from it."""
    priority: int = 0
    """Lower ones go first."""
    expires_s: float | None = None
    """On the scheduler's clock; after that it is the first to go."""
    n_pins: int = 0
    """While above 0 it is given up for nothing but a lower budget."""
    n_users: int = 0
    """Leases: somebody is about to use it, or does."""

    @property
    def is_free(self) -> bool:
        """May be given up for something better."""
        return not (self.n_users or self.n_pins)

    def refresh(self, priority: int, expires_s: float | None) -> None:
        """A request wants it kept: as long, and for as much, as whoever wants it most."""
        self.priority = max(self.priority, priority)
        if self.expires_s is not None:
            self.expires_s = None if expires_s is None else max(self.expires_s, expires_s)

    def edges(self) -> list[Ids]:
        """Put together and cut to `position`: its whole prefix. Not copied; the index replaces them, nobody writes."""
        edges = []
        node = self.node
        while node is not None:
            edges.append(node.edge)
            node = node.parent
        return edges[::-1]

    def ids(self) -> Ids:
        """Its whole prefix; a copy, shape (position,)."""
        edges = self.edges()
        return np.concatenate(edges)[: self.position] if edges else np.empty(0, dtype=np.int32)


@dataclass(slots=True, eq=False)
class Parked(Mark):
    """A sequence above those of the slots that holds the KV cells of [0, position), and no state."""

    seq_id: SlotId = field(kw_only=True)


@dataclass(slots=True, eq=False)
class Span(Mark):
    """The KV cells of [start, position), outside the device. Its bytes are the store's business."""

    start: int = field(kw_only=True)
    n_bytes: int = field(kw_only=True)
    parent: Span | None = field(default=None, repr=False)
    """The span that ends where this one starts."""
    n_children: int = 0
    """Spans that start where this one ends: it goes after them."""
    key: bytes = field(default=b"", repr=False)
    """Of the chain, where it was computed."""

    @property
    def n_tokens(self) -> int:
        return self.position - self.start


@dataclass(slots=True, eq=False)
class Checkpoint(Mark):
    """A state at exactly `position`. Its bytes are the store's business, which knows it by identity."""

    kind: CheckpointKind = field(kw_only=True)
    n_bytes: int = field(kw_only=True)
    parent: Checkpoint | None = field(default=None, repr=False)
    """The nearest checkpoint on the way to position 0; None: there is none."""
    children: list[Checkpoint] = field(default_factory=list, repr=False)
    is_ready: bool = False
    """Its bytes are whole."""
    key: bytes = field(default=b"", repr=False)

    @property
    def is_second_class(self) -> bool:
        """Gives way to any other kind. One that was of use has proved itself."""
        return self.kind.is_optional and not self.hits

    @property
    def start(self) -> int:
        """The nearest ancestor's position."""
        return 0 if self.parent is None else self.parent.position

    @property
    def gap(self) -> int:
        """Tokens to prefill again if only its nearest ancestor were there."""
        return self.position - self.start


@dataclass(frozen=True, slots=True)
class Match:
    """What the index knows of a prompt. Valid until the index changes."""

    n_tokens: int
    """How far the prompt is the start of anything."""
    checkpoints: tuple[Checkpoint, ...]
    """At prefixes of the prompt, the shallowest first."""
    spans: dict[int, Span]
    """By start: the one that covers most of what the prompt has from there on."""
    parked: Parked | None
    """The one that holds most of it."""
    parked_tokens: int
    """How much that is."""
    span_tokens: int
    shared_ends: dict[int, int] = field(default_factory=dict)
    """By start: how far the prompt agrees with a span of another branch."""
    is_end: bool = False
    """Nothing goes on where the prompt leaves the tree."""

    def usable_end(self, span: Span) -> int:
        """How far the prompt agrees with it, one of `spans`."""
        return min(span.position, self.shared_ends.get(span.start, self.n_tokens))

    def chain(self, held_tokens: int, upto: int) -> list[Span]:
        """Spans that, put after the first `held_tokens` of the prompt cut to their start, lead furthest below `upto`.

        The first one begins at or before `held_tokens`, so cells from there on are put back a second time.
        """
        found: list[Span] = []
        reach = held_tokens
        start = held_tokens // self.span_tokens * self.span_tokens
        while reach < upto:
            span = self.spans.get(start)
            if span is None or self.usable_end(span) <= reach:
                break
            found.append(span)
            reach = self.usable_end(span)
            if reach < start + self.span_tokens:
                break
            start = reach
        return found


class Watcher(Protocol):
    """Is told of checkpoints and spans, once they hang and once they no longer do."""

    def added(self, mark: Checkpoint | Span) -> None: ...
    def removed(self, mark: Checkpoint | Span) -> None: ...


_by_position = attrgetter("position")


class PrefixIndex:
    """Everything that exists, by namespace and prefix. Wrong calls raise InternalError. Thread: scheduler.

    Every call costs one comparison over the tokens matched, plus the number of marks and nodes on the way.
    """

    def __init__(self, *, span_tokens: int = SPAN_TOKENS) -> None:
        self.span_tokens = span_tokens
        self.watcher: Watcher | None = None
        self._roots: dict[str, _Node] = {}
        self._checkpoints: dict[Checkpoint, None] = {}
        self._spans: dict[Span, None] = {}
        self._parked: dict[SlotId, Parked] = {}
        self.evicted = EvictedPrefixes()

    # ---- looking -----------------------------------------------------------------------------------------------

    @property
    def checkpoints(self) -> KeysView[Checkpoint]:
        return self._checkpoints.keys()

    @property
    def spans(self) -> KeysView[Span]:
        return self._spans.keys()

    @property
    def parked(self) -> ValuesView[Parked]:
        return self._parked.values()

    def namespaces(self) -> KeysView[str]:
        """Those in which anything exists."""
        return self._roots.keys()

    def parked_by(self, seq_id: SlotId) -> Parked:
        """Raises InternalError where the sequence holds nothing."""
        if seq_id not in self._parked:
            raise InternalError(f"sequence {seq_id} is not parked")
        return self._parked[seq_id]

    def _walk(self, namespace: str, ids: Ids) -> tuple[list[_Node], int]:
        """Nodes on the way, the last one perhaps in part, and how many ids agree."""
        node = self._roots.get(namespace)
        if node is None:
            return [], 0
        path, at = [node], 0
        while at < len(ids):
            child = node.children.get(int(ids[at]))
            if child is None:
                break
            at += common_prefix_len(child.edge, ids[at : at + len(child.edge)])
            path.append(child)
            if at < child.end:
                break
            node = child
        return path, at

    def match(self, namespace: str, ids: Ids) -> Match:
        """All that is known of a prompt. Effects: none."""
        path, at = self._walk(namespace, ids)
        if not path:
            return Match(0, (), {}, None, 0, self.span_tokens)
        checkpoints = [each for node in path for each in node.checkpoints if each.position <= at]
        spans: dict[int, Span] = {}
        for node in path:
            for span in node.spans:
                if span.start < at:
                    _keep_longer(spans, span, at)
        shared_ends = self._add_overlapping(spans, path, at)
        parked, parked_tokens = _furthest_parked(path, at)
        is_end = at == path[-1].end and not path[-1].children
        return Match(at, tuple(checkpoints), spans, parked, parked_tokens, self.span_tokens, shared_ends, is_end)

    def _add_overlapping(self, spans: dict[int, Span], path: list[_Node], at: int) -> dict[int, int]:
        """The span in which the prompt leaves a branch may be there although the prompt's own is not."""
        shared_ends: dict[int, int] = {}
        for node in reversed(path):
            end = min(node.end, at)
            start = (end - 1) // self.span_tokens * self.span_tokens
            held = spans.get(start)
            if end and (held is None or min(held.position, shared_ends.get(start, at)) < end):
                span = _span_from(node, start, start + self.span_tokens)
                if span is not None:
                    spans[start], shared_ends[start] = span, end
        return shared_ends

    def path(self, namespace: str, ids: Ids) -> list[Checkpoint]:
        """Every checkpoint at a prefix of `ids`, the shallowest first."""
        nodes, at = self._walk(namespace, ids)
        return [each for node in nodes for each in node.checkpoints if each.position <= at]

    def path_to(self, mark: Mark) -> list[Checkpoint]:
        """Every checkpoint on the way to where a mark is, the shallowest first."""
        nodes = []
        node: _Node | None = _of(mark)
        while node is not None:
            nodes.append(node)
            node = node.parent
        return [each for node in reversed(nodes) for each in node.checkpoints if each.position <= mark.position]

    def is_parked(self, namespace: str, ids: Ids) -> bool:
        """Whether a parked sequence holds all of `ids`, or more."""
        nodes, at = self._walk(namespace, ids)
        if at < len(ids) or not nodes:
            return False
        return any(each.position >= at for each in nodes[-1].parked) or any(
            child.n_parked for child in nodes[-1].children.values()
        )

    def parked_within(self, namespace: str, ids: Ids) -> list[Parked]:
        """Parked sequences that hold a prefix of `ids` and nothing else."""
        nodes, at = self._walk(namespace, ids)
        return [each for node in nodes for each in node.parked if each.position <= at]

    def span_over(self, checkpoint: Checkpoint) -> Span | None:
        """A span that holds the last token before it; with those before that one, the cells it needs."""
        start = (checkpoint.position - 1) // self.span_tokens * self.span_tokens
        node = _of(checkpoint)
        at = bisect_left(node.spans, checkpoint.position, key=_by_position)
        if at < len(node.spans):
            return node.spans[at] if node.spans[at].start == start else None
        return _span_from(node, start, start + self.span_tokens)

    def span_before(self, mark: Mark) -> Span | None:
        """The last one on the way to where a mark is, which ends there or before."""
        node: _Node | None = _of(mark)
        while node is not None:
            at = bisect_right(node.spans, mark.position, key=_by_position)
            if at:
                return node.spans[at - 1]
            node = node.parent
        return None

    def checkpoints_over(self, span: Span) -> list[Checkpoint]:
        """Those whose last token it holds."""
        found: list[Checkpoint] = []
        node: _Node | None = _of(span)
        while node is not None and node.end > span.start:
            found += [each for each in node.checkpoints if span.start < each.position <= span.position]
            node = node.parent
        return found

    # ---- changing ----------------------------------------------------------------------------------------------

    def add_checkpoint(self, namespace: str, ids: Ids, kind: CheckpointKind, n_bytes: int) -> Checkpoint:
        """A new checkpoint at the end of `ids`, of which a part is copied. Raises InternalError if there is one."""
        checkpoint = Checkpoint(namespace, len(ids), kind=kind, n_bytes=n_bytes)
        nodes, at = self._walk(namespace, ids)
        above = (each for node in reversed(nodes) for each in reversed(node.checkpoints) if each.position <= at)
        parent = checkpoint.parent = next(above, None)
        if not checkpoint.gap:
            raise InternalError(f"a second checkpoint at position {checkpoint.position}")
        node = checkpoint.node = self._node_at(namespace, ids, nodes, at)
        _insert(node.checkpoints, checkpoint)
        if node.children or node.checkpoints[-1] is not checkpoint:
            checkpoint.children = [each for each in self._topmost(checkpoint, parent) if _is_below(each, checkpoint)]
        for each in checkpoint.children:
            if parent is not None:
                parent.children.remove(each)
            each.parent = checkpoint
        if parent is not None:
            parent.children.append(checkpoint)
        self._checkpoints[checkpoint] = None
        if self.watcher is not None:
            self.watcher.added(checkpoint)
        return checkpoint

    def _topmost(self, checkpoint: Checkpoint, parent: Checkpoint | None) -> list[Checkpoint]:
        """Those right below `parent`; without one, those of the checkpoint's subtree that have none."""
        if parent is not None:
            return parent.children
        found: list[Checkpoint] = []
        left = [checkpoint.node]
        while left:
            node = left.pop()
            if node is None:
                continue
            below = next((each for each in node.checkpoints if each is not checkpoint and each.parent is None), None)
            if below is None or below.position < checkpoint.position:
                left += reversed(node.children.values())
            else:
                found.append(below)
        return found

    def add_span(self, namespace: str, ids: Ids, n_bytes: int) -> tuple[Span, list[Span]]:
        """A new span that ends with `ids`, and the shorter ones from the same start that it makes useless.

        They are still in the tree; whoever has their bytes drops them and removes them.
        """
        if not len(ids):
            raise InternalError("an empty span")
        start = (len(ids) - 1) // self.span_tokens * self.span_tokens
        span = Span(namespace, len(ids), start=start, n_bytes=n_bytes)
        nodes, at = self._walk(namespace, ids)
        on_the_way = [each for node in nodes for each in node.spans if each.position <= at]
        if any(each.start == start and each.position == span.position for each in on_the_way):
            raise InternalError(f"a second span of [{start}, {span.position})")
        parent = next((each for each in on_the_way if each.position == start), None) if start else None
        self._hang(span, self._node_at(namespace, ids, nodes, at), parent)
        return span, [each for each in on_the_way if each.start == start]

    def add_spans(self, namespace: str, ids: Ids, n_bytes: int) -> list[Span]:
        """All whole spans of `ids` that are missing, the first one first, of `n_bytes` each. Shorter ones stay.

        Costs one look at `ids`, where adding them one by one costs as many.
        """
        whole = ids[: len(ids) // self.span_tokens * self.span_tokens]
        if not len(whole):
            return []
        nodes, at = self._walk(namespace, whole)
        held = {each.position: each for node in nodes for each in node.spans if each.position <= at}
        if len(whole) in held and len(held) * self.span_tokens == len(whole):
            return []
        node, added, parent = self._node_at(namespace, whole, nodes, at), [], None
        nodes = [node]
        while node.parent is not None:
            node = node.parent
            nodes.append(node)
        for end in range(self.span_tokens, len(whole) + 1, self.span_tokens):
            while end > nodes[-1].end:
                nodes.pop()
            span = held.get(end)
            if span is None:
                span = Span(namespace, end, start=end - self.span_tokens, n_bytes=n_bytes)
                self._hang(span, nodes[-1], parent)
                added.append(span)
            parent = span
        return added

    def _hang(self, span: Span, node: _Node, parent: Span | None) -> None:
        span.node, span.parent = node, parent
        _insert(node.spans, span)
        self._spans[span] = None
        if parent is not None:
            parent.n_children += 1
        if span.n_tokens == self.span_tokens and (node.children or node.spans[-1] is not span):
            self._adopt(span)
        if self.watcher is not None:
            self.watcher.added(span)

    def _adopt(self, span: Span) -> None:
        """Spans that were stored before the one they continue."""
        left = [span.node]
        while left:
            node = left.pop()
            if node is None:
                continue
            for each in node.spans:
                if each.start == span.position and each.parent is None:
                    each.parent = span
                    span.n_children += 1
            if node.end < span.position + self.span_tokens:
                left += node.children.values()

    def park(self, namespace: str, ids: Ids, seq_id: SlotId) -> Parked:
        """A parked sequence of `ids`, of which a part is copied."""
        if seq_id in self._parked or not len(ids):
            raise InternalError(f"sequence {seq_id} parked twice, or empty")
        parked = self._parked[seq_id] = Parked(namespace, len(ids), seq_id=seq_id)
        node = parked.node = self._node_at(namespace, ids, *self._walk(namespace, ids))
        _insert(node.parked, parked)
        _count_parked(node, 1)
        return parked

    def cut_parked(self, parked: Parked, n_tokens: int) -> None:
        """It holds less now; 0: nothing, and it is gone."""
        if not 0 <= n_tokens < parked.position:
            raise InternalError(f"sequence {parked.seq_id} cut from {parked.position} to {n_tokens}")
        ids = parked.ids()[:n_tokens]
        namespace, old = parked.namespace, _of(parked)
        old.parked.remove(parked)
        _count_parked(old, -1)
        parked.position = n_tokens
        if n_tokens:
            node = parked.node = self._node_at(namespace, ids, *self._walk(namespace, ids))
            _insert(node.parked, parked)
            _count_parked(node, 1)
        else:
            parked.node = None
            del self._parked[parked.seq_id]
        self._prune(namespace, old)

    def remove(
        self, mark: Checkpoint | Span | Parked, *, is_evicted: bool = False, reason: str = "", at_s: float = 0.0
    ) -> None:
        """Take it out. Evicted ones, and those with a reason, are remembered for a while."""
        if is_evicted or reason:
            self.evicted.add(mark.namespace, mark.ids(), Evicted(is_evicted, reason, at_s))
        if isinstance(mark, Parked):
            self.cut_parked(mark, 0)
            return
        node = _of(mark)
        if isinstance(mark, Checkpoint):
            del self._checkpoints[mark]
            _take_out(node.checkpoints, mark)
            self._hand_down(mark)
        else:
            del self._spans[mark]
            _take_out(node.spans, mark)
            if mark.parent is not None:
                mark.parent.n_children -= 1
            if mark.n_children:
                self._orphan(mark)
        mark.node = None
        self._prune(mark.namespace, node)
        if self.watcher is not None:
            self.watcher.removed(mark)

    @staticmethod
    def _hand_down(checkpoint: Checkpoint) -> None:
        """Its children become its parent's."""
        parent = checkpoint.parent
        if parent is not None:
            parent.children.remove(checkpoint)
            parent.children += checkpoint.children
        for child in checkpoint.children:
            child.parent = parent
        checkpoint.children = []

    def _orphan(self, span: Span) -> None:
        left = [_of(span)]
        while left and span.n_children:
            node = left.pop()
            for each in node.spans:
                if each.parent is span:
                    each.parent = None
                    span.n_children -= 1
            if node.end < span.position + self.span_tokens:
                left += node.children.values()

    # ---- nodes -------------------------------------------------------------------------------------------------

    def _node_at(self, namespace: str, ids: Ids, path: list[_Node], at: int) -> _Node:
        """The node in which the position len(ids) lies, made where it is not there; `path` and `at` from `_walk`."""
        if not path:
            path = [self._roots.setdefault(namespace, _Node(0, ids[:0].copy(), None))]
        node = path[-1]
        if at == len(ids):
            return node
        if at < node.end:
            node = self._split(node, at)
        elif node.parent is not None and not node.children:
            node.edge = np.concatenate([node.edge, ids[at:]])
            return node
        child = node.children[int(ids[at])] = _Node(at, ids[at:].copy(), node)
        return child

    @staticmethod
    def _split(node: _Node, at: int) -> _Node:
        """Make `at` the end of a node: a new one above, which is returned; `node` keeps what is below."""
        n = at - node.start
        upper = _Node(node.start, node.edge[:n].copy(), node.parent)
        assert node.parent is not None
        node.parent.children[int(node.edge[0])] = upper
        node.start, node.edge, node.parent = at, node.edge[n:].copy(), upper
        upper.children = {int(node.edge[0]): node}
        upper.n_parked = node.n_parked
        for name in ("checkpoints", "spans", "parked"):
            marks = getattr(node, name)
            above = [mark for mark in marks if mark.position <= at]
            setattr(upper, name, above)
            setattr(node, name, marks[len(above) :])
            for mark in above:
                mark.node = upper
        node.n_parked -= len(upper.parked)
        return upper

    def _prune(self, namespace: str, node: _Node) -> None:
        """Drop what no mark needs any more, and join what no longer parts."""
        while not node.children and node.is_bare:
            parent = node.parent
            if parent is None:
                self._roots.pop(namespace, None)
                return
            del parent.children[int(node.edge[0])]
            node = parent
        if node.parent is None:
            return
        if not node.children:
            end = max(marks[-1].position for marks in (node.checkpoints, node.spans, node.parked) if marks)
            if end < node.end:
                node.edge = _cut(node.edge, end - node.start)
        elif len(node.children) == 1:
            _merge(node, next(iter(node.children.values())))

    # ---- audit -------------------------------------------------------------------------------------------------

    def audit(self) -> None:
        """Recompute every count and pointer from the tree. Raises InternalError at the first that is wrong.

        Cost: everything that is held. For tests, and for an engine that has nothing to do.
        """
        seen: list[Mark] = []
        for namespace, root in self._roots.items():
            _require(root.start == 0 and not len(root.edge) and root.is_bare, "a root that is not empty")
            _require(bool(root.children), f"namespace {namespace!r} is empty but there")
            left = [root]
            while left:
                node = left.pop()
                _audit_node(node, namespace)
                seen += node.marks()
                left += node.children.values()
        known = [*self._checkpoints, *self._spans, *self._parked.values()]
        _require({id(mark) for mark in seen} == {id(mark) for mark in known}, "marks and tree differ")
        _require(len(seen) == len(known), "a mark hangs twice")
        for span in self._spans:
            children = sum(each.parent is span for each in self._spans)
            _require(children == span.n_children, f"a span counts {span.n_children} children of {children}")
        for checkpoint in self._checkpoints:
            path = self.path(checkpoint.namespace, checkpoint.ids())
            above = path[-2] if len(path) > 1 else None
            _require(path[-1] is checkpoint and above is checkpoint.parent, "a checkpoint with a wrong parent")
            _require(all(each.parent is checkpoint for each in checkpoint.children), "a child of two checkpoints")


def _require(is_right: bool, what: str) -> None:
    if not is_right:
        raise InternalError(f"the index is wrong: {what}")


def _audit_node(node: _Node, namespace: str) -> None:
    for first, child in node.children.items():
        _require(child.parent is node and child.start == node.end, "a child that does not begin where its parent ends")
        _require(len(child.edge) > 0 and int(child.edge[0]) == first, "a child under a wrong id")
    n_below = sum(child.n_parked for child in node.children.values())
    _require(node.n_parked == n_below + len(node.parked), "a wrong count of parked sequences")
    if node.parent is not None:
        _require(len(node.children) > 1 or (not node.children and not node.is_bare), "a node that nothing needs")
        deepest = max((mark.position for mark in node.marks()), default=0)
        _require(bool(node.children) or deepest == node.end, "ids that nothing needs")
    for mark in node.marks():
        _require(mark.node is node and mark.namespace == namespace, "a mark that hangs elsewhere")
        _require(node.start < mark.position <= node.end, "a mark outside its node")


def _of(mark: Mark) -> _Node:
    if mark.node is None:
        raise InternalError(f"what is at {mark.position} is not in the index")
    return mark.node


def _cut(edge: Ids, n_tokens: int) -> Ids:
    """Its start. A copy only where that frees half of what is held, so that many cuts cost no more than one copy."""
    held = edge if edge.base is None else edge.base
    return edge[:n_tokens].copy() if 2 * n_tokens < len(held) else edge[:n_tokens]


def _take_out(marks: list[_M], mark: _M) -> None:
    if marks[-1] is mark:
        marks.pop()
    else:
        marks.remove(mark)


def _insert(marks: list[_M], mark: _M) -> None:
    at = len(marks)
    while at and marks[at - 1].position > mark.position:
        at -= 1
    marks.insert(at, mark)


def _span_from(node: _Node, start: int, end: int) -> Span | None:
    """One below the node that holds [start, ...), which reaches no further than `end`."""
    left = list(node.children.values()) if node.end < end else []
    while left:
        node = left.pop()
        for span in node.spans:
            if span.start == start:
                return span
        if node.end < end:
            left += node.children.values()
    return None


def _keep_longer(spans: dict[int, Span], span: Span, at: int) -> None:
    held = spans.get(span.start)
    if held is None or min(held.position, at) < min(span.position, at):
        spans[span.start] = span


def _furthest_parked(path: list[_Node], at: int) -> tuple[Parked | None, int]:
    """The one that holds most of what was walked, and how much: at most up to where it leaves the way."""
    below: _Node | None = None
    for node in reversed(path):
        end = min(node.end, at)
        for each in reversed(node.parked):
            if each.position >= end:
                return each, end
        if node.n_parked > len(node.parked) + (0 if below is None else below.n_parked):
            branch = node
            while branch is node or not branch.parked:
                branch = next(each for each in branch.children.values() if each.n_parked and each is not below)
            return branch.parked[0], end
        if node.parked:
            return node.parked[-1], node.parked[-1].position
        below = node
    return None, 0


def _count_parked(node: _Node, change: int) -> None:
    above: _Node | None = node
    while above is not None:
        above.n_parked += change
        above = above.parent


def _is_below(each: Checkpoint, checkpoint: Checkpoint) -> bool:
    node: _Node | None = _of(each)
    if each is checkpoint or each.position < checkpoint.position:
        return False
    while node is not None and node is not checkpoint.node:
        node = node.parent
    return node is not None


def _merge(node: _Node, child: _Node) -> None:
    """The child takes over its parent's ids and marks."""
    assert node.parent is not None
    for name in ("checkpoints", "spans", "parked"):
        marks = getattr(node, name)
        setattr(child, name, marks + getattr(child, name))
        for mark in marks:
            mark.node = child
    child.start, child.edge, child.parent = node.start, np.concatenate([node.edge, child.edge]), node.parent
    child.n_parked = node.n_parked
    node.parent.children[int(node.edge[0])] = child
