"""Ranges of a sequence's KV cells, stored and added again: bit for bit, in every layout, and nothing else touched."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pyllamacache.errors import NativeError
from pyllamacache.native.context import NativeContext
from tests.native.contexts import NewContext, feed, next_logits
from tests.native.faults import PARTIAL_ONLY, Damage
from tests.native.states import damaged, span_fields

KINDS = ["full", "sliding", "hybrid"]
LAYOUTS = [("f32", "off"), ("f16", "off"), ("f16", "on"), ("q8_0", "on")]
"""V is stored transposed exactly where flash attention is off."""

N_TOKENS = 300
CUTS = [(0, 256, 300), (0, 1, 2, 300), (0, 31, 32, 33, 300), (0, 100, 101, 257, 299, 300), (0, 300)]


@pytest.fixture(params=[False, True], ids=["unified", "streams"])
def exact(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def fill(context: NativeContext, seq_id: int, n_tokens: int, start: int = 0) -> None:
    for begin in range(start, n_tokens, 32):
        feed(context, seq_id, begin, min(begin + 32, n_tokens))


def move_span(source: NativeContext, target: NativeContext, seq_id: int, cuts: tuple[int, ...]) -> None:
    """Sequence 0's cells, range by range."""
    for start, end in itertools.pairwise(cuts):
        target.append_span(seq_id, start, end, source.save_span(0, start, end))


def move_state(kind: str, source: NativeContext, target: NativeContext, seq_id: int) -> None:
    if kind != "full":
        state = Damage(source).read_state(0, PARTIAL_ONLY)
        assert Damage(target).write_state(seq_id, state, PARTIAL_ONLY) == len(state)


@pytest.mark.parametrize(("type_kv", "flash_attention"), LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_sequence_put_together_from_ranges_goes_on_bit_for_bit(
    kind: str, type_kv: str, flash_attention: str, exact: bool, new_context: NewContext
) -> None:
    options = {"exact": exact, "type_kv": type_kv, "flash_attention": flash_attention}
    source = new_context(kind, **options)
    fill(source, 0, N_TOKENS)
    if kind == "sliding":
        # a window that was restored lies in other cells, whichever way it came
        filled, source = source, new_context(kind, **options)
        source.load_state(0, filled.save_state(0), N_TOKENS)
    targets = []
    for cuts in CUTS:
        target = new_context(kind, **options)
        move_span(source, target, 0, cuts)
        move_state(kind, source, target, 0)
        assert target.length(0) == N_TOKENS
        targets.append(target)
    for position in range(N_TOKENS, N_TOKENS + 4):
        expected = next_logits(source, 0, position)
        for cuts, target in zip(CUTS, targets, strict=True):
            assert next_logits(target, 0, position) == expected, cuts


@pytest.mark.parametrize("kind", KINDS)
def test_a_range_goes_behind_what_is_there(kind: str, exact: bool, new_context: NewContext) -> None:
    """The beginning computed here, the rest from elsewhere."""
    source, target = new_context(kind, exact=exact), new_context(kind, exact=exact)
    fill(source, 0, N_TOKENS)
    fill(target, 0, 96)
    move_span(source, target, 0, (96, 200, N_TOKENS))
    move_state(kind, source, target, 0)
    logits, expected = next_logits(target, 0, N_TOKENS), next_logits(source, 0, N_TOKENS)
    if kind == "sliding":  # the cells of a restored window lie elsewhere, and sums take another order
        assert np.allclose(np.frombuffer(logits, "f4"), np.frombuffer(expected, "f4"), rtol=0, atol=1e-4)
    else:
        assert logits == expected


@pytest.mark.parametrize("kind", KINDS)
def test_the_bytes_do_not_depend_on_sequence_and_place(kind: str, exact: bool, new_context: NewContext) -> None:
    """The target's free cells are scattered."""
    source, target = new_context(kind, exact=exact), new_context(kind, exact=exact, n_slots=3)
    fill(source, 0, N_TOKENS)
    for begin in range(0, 60, 6):
        feed(target, 0, begin, begin + 3)
        feed(target, 0, begin + 3, begin + 6)
        feed(target, 1, begin, begin + 6)
    target.erase(0)
    kept = Damage(target).read_state(1, 0)
    move_span(source, target, 2, (0, 37, N_TOKENS))
    assert np.array_equal(target.save_span(2, 10, 290), source.save_span(0, 10, 290))
    assert Damage(target).read_state(1, 0) == kept


@pytest.mark.parametrize("kind", KINDS)
def test_neighbours_go_on_as_if_nothing_happened(kind: str, new_context: NewContext) -> None:
    source, target, twin = (new_context(kind, exact=True) for _ in range(3))
    fill(source, 0, N_TOKENS)
    for context in (target, twin):
        fill(context, 0, 50)
    move_span(source, target, 1, (0, 256, N_TOKENS))
    assert next_logits(target, 0, 50) == next_logits(twin, 0, 50)
    target.erase(1)
    assert next_logits(target, 0, 51) == next_logits(twin, 0, 51)


@pytest.mark.parametrize(
    ("start", "end"),
    [(-1, 5), (-5, -1), (5, 5), (5, 4), (0, 2**31 - 1), (290, 301), (300, 310), (-(2**31), 2**31 - 1)],
)
@pytest.mark.parametrize("kind", KINDS)
def test_a_range_that_is_not_there_cannot_be_saved(kind: str, start: int, end: int, new_context: NewContext) -> None:
    context = new_context(kind)
    fill(context, 0, N_TOKENS)
    for call in (context.span_size, context.save_span):
        with pytest.raises(NativeError):
            call(0, start, end)
        with pytest.raises(NativeError):
            call(1, 0, 1)


def test_a_range_with_a_hole_cannot_be_saved(new_context: NewContext) -> None:
    context = new_context("full")
    fill(context, 0, 100)
    assert Damage(context).remove(0, 50, 51)
    for start, end in ((0, 100), (0, 51), (50, 60), (50, 51)):
        with pytest.raises(NativeError):
            context.save_span(0, start, end)
    assert len(context.save_span(0, 0, 50)) == context.span_size(0, 0, 50) > len(context.save_span(0, 51, 100))


@pytest.mark.parametrize("seq_id", [-1, 2, 255, 256])
def test_unknown_sequences_are_refused(seq_id: int, new_context: NewContext) -> None:
    context = new_context("full")
    fill(context, 0, 20)
    data = context.save_span(0, 0, 20)
    with pytest.raises(NativeError):
        context.save_span(seq_id, 0, 1)
    with pytest.raises(NativeError):
        context.append_span(seq_id, 0, 20, data)


def test_memory_without_a_span_has_no_ranges(new_context: NewContext) -> None:
    context, source = new_context("recurrent"), new_context("full")
    fill(context, 0, 20)
    fill(source, 0, 20)
    for call in (context.span_size, context.save_span):
        with pytest.raises(NativeError):
            call(0, 0, 20)
    with pytest.raises(NativeError):
        context.append_span(1, 0, 20, source.save_span(0, 0, 20))


class Growing:
    """A sequence that ranges are offered to, and a twin of its context that is left alone."""

    def __init__(self, kind: str, exact: bool, new_context: NewContext) -> None:
        self._new_context: Callable[[], NativeContext] = lambda: new_context(kind, exact=exact)
        self.start()

    def start(self) -> None:
        self.target, self._twin = self._new_context(), self._new_context()
        for context in (self.target, self._twin):
            fill(context, 0, 40)
        self.length = 40

    def accepts(self, start: int, end: int, data: Any) -> bool:
        """Whether it is added; if not, the next token's logits are bit-equal in both."""
        try:
            self.target.append_span(0, start, end, data)
        except NativeError:
            assert next_logits(self.target, 0, self.length) == next_logits(self._twin, 0, self.length)
            self.length += 1
            if self.length == 400:
                self.start()
            return False
        return True


def at_position(data: bytes, start: int, old: bytes) -> bytes:
    """Bytes of 20 cells, made to be of the range that begins at `start`, unless that is what was damaged."""
    if data[4:12] != old[4:12]:
        return data
    return data[:4] + np.array([start, start + 20], dtype="<i4").tobytes() + data[12:]


@pytest.mark.parametrize("kind", KINDS)
def test_a_range_that_does_not_fit_is_refused_and_changes_nothing(
    kind: str, exact: bool, new_context: NewContext
) -> None:
    source = new_context(kind, exact=exact)
    fill(source, 0, N_TOKENS)
    data = source.save_span(0, 40, 60)
    sequence = Growing(kind, exact, new_context)
    for start, end in ((39, 59), (41, 61), (0, 20), (40, 61), (40, 59), (-40, -20), (60, 40), (40, 40), (48, 68)):
        assert not sequence.accepts(start, end, data)
    assert not sequence.accepts(40, 60, data)  # the sequence has grown
    sequence.start()
    assert sequence.accepts(40, 60, data)


@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_range_is_refused_and_changes_nothing(kind: str, exact: bool, new_context: NewContext) -> None:
    source = new_context(kind, exact=exact)
    fill(source, 0, 60)
    data = source.save_span(0, 40, 60).tobytes()
    sequence = Growing(kind, exact, new_context)
    n_refused = 0
    for what, bad in damaged(data, span_fields(data, 20, with_ext=kind == "hybrid"), seed=3):
        start = sequence.length
        offered = at_position(bad, start, data)
        if not sequence.accepts(start, start + 20, offered):
            n_refused += 1
            continue
        # not damaged enough to be told from a range: then it is all there
        added = sequence.target.save_span(0, start, start + 20).tobytes()
        assert added == at_position(added, start, data), what
        assert len(added) == len(offered), what
        assert sum(x != y for x, y in zip(added, offered, strict=True)) <= 4, what  # true is written as 1
        sequence.start()
    assert n_refused > 50


@pytest.mark.parametrize("kind", KINDS)
def test_ranges_of_another_layout_are_refused(kind: str, exact: bool, new_context: NewContext) -> None:
    contexts = [new_context(kind, exact=exact, type_kv=type_kv, flash_attention=fa) for type_kv, fa in LAYOUTS]
    for source in contexts:
        fill(source, 0, 20)
        data = source.save_span(0, 0, 20)
        for target in contexts:
            if target is not source:
                with pytest.raises(NativeError):
                    target.append_span(1, 0, 20, data)
                assert target.length(1) in (0, None)


def test_a_range_without_room_is_refused_and_fits_later(new_context: NewContext) -> None:
    context = new_context("full", n_slots=3)
    for seq_id in (0, 1):
        fill(context, seq_id, 480)
    data = context.save_span(0, 0, 256)
    kept = [Damage(context).read_state(seq_id, 0) for seq_id in (0, 1)]
    with pytest.raises(NativeError):
        context.append_span(2, 0, 256, data)
    assert context.length(2) == 0
    assert [Damage(context).read_state(seq_id, 0) for seq_id in (0, 1)] == kept
    context.erase(1)
    context.append_span(2, 0, 256, data)
    assert np.array_equal(context.save_span(2, 0, 256), data)


def test_a_range_behind_a_share_outlives_the_copy_that_the_share_owes(new_context: NewContext) -> None:
    context, plain = new_context("full", exact=True), new_context("full", exact=True)
    fill(plain, 0, 128)
    fill(context, 0, 64)
    context.share(0, 1, 64)
    move_span(plain, context, 1, (64, 128))
    feed(context, 0, 64, 65)
    assert next_logits(context, 1, 128) == next_logits(plain, 0, 128)
