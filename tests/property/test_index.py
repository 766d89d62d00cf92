"""The index against a twin that keeps whole prefixes in dictionaries."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pyllamacache.errors import InternalError
from pyllamacache.prefix.index import Checkpoint, Parked, PrefixIndex, Span
from pyllamacache.request import CheckpointKind, SlotId

if TYPE_CHECKING:
    from pyllamacache.request import Ids

SPAN = 3
NAMESPACES = ("", "other")
TRUNKS = ([1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 2, 3, 9, 9, 9, 9], [2, 2])
Prefix = tuple[int, ...]
Key = tuple[str, Prefix]


@st.composite
def prefixes(draw: st.DrawFn) -> Prefix:
    trunk = draw(st.sampled_from(TRUNKS))
    return (*trunk[: draw(st.integers(0, len(trunk)))], *draw(st.lists(st.integers(1, 3), max_size=3)))


def as_ids(values: Prefix) -> Ids:
    return np.array(values, dtype=np.int32)


def common(a: Prefix, b: Prefix) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


namespaces = st.sampled_from(NAMESPACES)
indexes = st.integers(0, 99)


class IndexMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex(span_tokens=SPAN)
        self.checkpoints: dict[Key, Checkpoint] = {}
        self.spans: dict[Key, Span] = {}
        self.parked: dict[int, tuple[Key, Parked]] = {}
        self.evicted: set[Key] = set()

    # -- changes --

    @rule(namespace=namespaces, ids=prefixes(), kind=st.sampled_from(CheckpointKind))
    def add_checkpoint(self, namespace: str, ids: Prefix, kind: CheckpointKind) -> None:
        key = (namespace, ids)
        if key in self.checkpoints or not ids:
            with pytest.raises(InternalError):
                self.index.add_checkpoint(namespace, as_ids(ids), kind, 1)
            return
        self.checkpoints[key] = self.index.add_checkpoint(namespace, as_ids(ids), kind, 1)

    @rule(namespace=namespaces, ids=prefixes())
    def add_span(self, namespace: str, ids: Prefix) -> None:
        key, start = (namespace, ids), (len(ids) - 1) // SPAN * SPAN
        if key in self.spans or not ids:
            with pytest.raises(InternalError):
                self.index.add_span(namespace, as_ids(ids), 1)
            return
        span, replaced = self.index.add_span(namespace, as_ids(ids), 1)
        shorter = [(namespace, ids[:end]) for end in range(start + 1, len(ids)) if (namespace, ids[:end]) in self.spans]
        assert replaced == [self.spans[each] for each in shorter]
        for each in shorter:
            self.index.remove(self.spans.pop(each))
        self.spans[key] = span

    @rule(namespace=namespaces, ids=prefixes())
    def add_spans(self, namespace: str, ids: Prefix) -> None:
        added = self.index.add_spans(namespace, as_ids(ids), 1)
        ends = range(SPAN, len(ids) + 1, SPAN)
        missing = [(namespace, ids[:end]) for end in ends if (namespace, ids[:end]) not in self.spans]
        assert [span.position for span in added] == [len(key[1]) for key in missing]
        self.spans.update(zip(missing, added, strict=True))

    @rule(at=indexes)
    def cover(self, at: int) -> None:
        """A checkpoint's last span is one that agrees with all of it, and each knows the other."""
        for key, checkpoint in sorted(self.checkpoints.items())[at % 3 :: 3]:
            over = [
                self.spans[each]
                for each in self.spans
                if each[0] == key[0]
                and each[1][: len(key[1])] == key[1]
                and (len(each[1]) - 1) // SPAN == (len(key[1]) - 1) // SPAN
            ]
            found = self.index.span_over(checkpoint)
            assert found in over if over else found is None
            assert all(checkpoint in self.index.checkpoints_over(span) for span in over)

    @rule(namespace=namespaces, ids=prefixes(), seq_id=st.integers(0, 4))
    def park(self, namespace: str, ids: Prefix, seq_id: int) -> None:
        if seq_id in self.parked or not ids:
            with pytest.raises(InternalError):
                self.index.park(namespace, as_ids(ids), SlotId(seq_id))
            return
        self.parked[seq_id] = ((namespace, ids), self.index.park(namespace, as_ids(ids), SlotId(seq_id)))

    @precondition(lambda self: self.parked)
    @rule(at=indexes, n_tokens=st.integers(0, 9))
    def cut_parked(self, at: int, n_tokens: int) -> None:
        seq_id = sorted(self.parked)[at % len(self.parked)]
        (namespace, ids), parked = self.parked.pop(seq_id)
        n_tokens = min(n_tokens, len(ids) - 1)
        self.index.cut_parked(parked, n_tokens)
        if n_tokens:
            self.parked[seq_id] = ((namespace, ids[:n_tokens]), parked)

    @rule(which=st.sampled_from(["checkpoints", "spans"]), at=indexes, is_evicted=st.booleans())
    def remove(self, which: str, at: int, is_evicted: bool) -> None:
        twin = getattr(self, which)
        if not twin:
            return
        key = sorted(twin)[at % len(twin)]
        mark = twin.pop(key)
        self.index.remove(mark, is_evicted=is_evicted)
        if is_evicted:
            self.evicted.add(key)
        with pytest.raises(InternalError):
            self.index.remove(mark)

    @rule(namespace=st.sampled_from([*NAMESPACES, None]))
    def forget_evicted(self, namespace: str | None) -> None:
        self.index.evicted.forget(namespace)
        self.evicted = {key for key in self.evicted if namespace not in (None, key[0])}

    # -- questions --

    @rule(namespace=namespaces, ids=prefixes())
    def match(self, namespace: str, ids: Prefix) -> None:
        match = self.index.match(namespace, as_ids(ids))
        held = [key[1] for key in (*self.checkpoints, *self.spans) if key[0] == namespace]
        held += [key[1] for key, _ in self.parked.values() if key[0] == namespace]
        at = max((common(ids, each) for each in held), default=0)
        assert match.n_tokens == at
        ends = [(namespace, ids[:end]) for end in range(1, len(ids) + 1)]
        assert list(match.checkpoints) == [self.checkpoints[key] for key in ends if key in self.checkpoints]
        assert list(match.checkpoints) == self.index.path(namespace, as_ids(ids))
        parked = max((common(ids, key[1]) for key, _ in self.parked.values() if key[0] == namespace), default=0)
        assert match.parked_tokens == parked
        if match.parked is not None:
            assert common(ids, tuple(match.parked.ids().tolist())) == parked
        is_parked = any(key[0] == namespace and key[1][: len(ids)] == ids for key, _ in self.parked.values())
        assert not ids or self.index.is_parked(namespace, as_ids(ids)) == is_parked
        within = {id(mark) for key, mark in self.parked.values() if key in ends}
        assert {id(mark) for mark in self.index.parked_within(namespace, as_ids(ids))} == within

    @rule(namespace=namespaces, ids=prefixes(), held=st.integers(0, 9), upto=st.integers(0, 12))
    def chain(self, namespace: str, ids: Prefix, held: int, upto: int) -> None:
        """As far as any choice of spans leads."""
        held, upto = min(held, len(ids)), min(upto, len(ids))
        match = self.index.match(namespace, as_ids(ids))
        chain = match.chain(held, upto)
        reach, at = held, held // SPAN * SPAN
        while at <= reach < upto:
            ends = [
                common(ids, key[1])
                for key in self.spans
                if key[0] == namespace and (len(key[1]) - 1) // SPAN * SPAN == at and common(ids, key[1]) > reach
            ]
            if not ends:
                break
            reach = max(ends)
            at += SPAN
        assert (match.usable_end(chain[-1]) if chain else held) == reach
        assert [span.start for span in chain] == [held // SPAN * SPAN + SPAN * i for i in range(len(chain))]

    @rule(namespace=namespaces, ids=prefixes(), after=st.integers(0, 12), upto=st.integers(0, 12))
    def deepest_evicted(self, namespace: str, ids: Prefix, after: int, upto: int) -> None:
        ends = [end for end in range(1, len(ids) + 1) if after < end <= upto and (namespace, ids[:end]) in self.evicted]
        assert self.index.evicted.deepest(namespace, as_ids(ids), after, upto) == max(ends, default=0)

    @invariant()
    def everything_is_where_the_twin_says(self) -> None:
        self.index.audit()
        assert {id(each) for each in self.index.checkpoints} == {id(each) for each in self.checkpoints.values()}
        assert {id(each) for each in self.index.spans} == {id(each) for each in self.spans.values()}
        assert {id(each) for each in self.index.parked} == {id(each) for _, each in self.parked.values()}
        marks = [*self.checkpoints.items(), *self.spans.items(), *self.parked.values()]
        for (namespace, ids), mark in marks:
            assert (mark.namespace, tuple(mark.ids().tolist()), mark.position) == (namespace, ids, len(ids))
        for (namespace, ids), span in self.spans.items():
            above = self.spans.get((namespace, ids[: span.start])) if span.start else None
            assert span.parent is above


TestIndex = IndexMachine.TestCase
TestIndex.settings = settings(stateful_step_count=40, deadline=None)
