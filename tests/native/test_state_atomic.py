"""A state that is refused leaves its sequence as it was; one that is taken is all there. What the native library does
by itself, before any check of ours."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pyllamacache.errors import NativeError
from pyllamacache.native.context import NativeContext
from tests.conftest import KINDS as SPECS
from tests.native.contexts import KINDS, NewContext, feed, next_logits
from tests.native.faults import ON_DEVICE, PARTIAL_ONLY, Damage
from tests.native.states import Field, damaged, fields_of, replaced, value_of

MODES = [0, PARTIAL_ONLY]
N_DONOR = 6
N_BEFORE = 40


class Pair:
    """A sequence that is attacked, and a twin of its context that is not."""

    def __init__(self, new_context: Callable[[], NativeContext], *, neighbour: bool) -> None:
        self._new_context = new_context
        self._neighbour = neighbour
        self._start()

    def _start(self) -> None:
        self.victim, self.twin = self._new_context(), self._new_context()
        for context in (self.victim, self.twin):
            feed(context, 0, 0, N_BEFORE)
            if self._neighbour:
                feed(context, 1, 0, 10)
        self._length = N_BEFORE

    def check_untouched(self, what: str) -> None:
        """The next token's logits are bit-equal in both."""
        assert next_logits(self.victim, 0, self._length) == next_logits(self.twin, 0, self._length), what
        self._length += 1
        if self._length % 16 == 0:
            assert all_states(self.victim) == all_states(self.twin), what
        if self._length == 480:
            self._start()

    def start_again(self) -> None:
        self.victim.close()
        self._start()


def all_states(context: NativeContext) -> list[bytearray]:
    return [Damage(context).read_state(seq_id, 0) for seq_id in (0, 1)]


@pytest.fixture(params=[False, True], ids=["unified", "streams"])
def exact(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture(params=[(kind, flags) for kind in KINDS for flags in MODES], ids=lambda case: f"{case[0]}-{case[1]}")
def case(request: pytest.FixtureRequest) -> tuple[str, int]:
    kind, flags = request.param
    return str(kind), int(flags)


def donor_state(context: NativeContext, flags: int, n_tokens: int = N_DONOR) -> bytes:
    feed(context, 0, 0, n_tokens)
    return bytes(Damage(context).read_state(0, flags))


def fields(state: bytes, kind: str, flags: int) -> list[Field]:
    return fields_of(state, kind, SPECS[kind], partial=flags == PARTIAL_ONLY)


def logits_after(context: NativeContext, state: bytes, flags: int, position: int) -> Any:
    """The next token on a sequence that had the rest of the memory, if the state is not all of it."""
    assert Damage(context).write_state(0, state, flags) == len(state)
    return next_logits(context, 0, position)


def test_damaged_bytes_are_refused_and_change_nothing(
    case: tuple[str, int], exact: bool, new_context: NewContext
) -> None:
    kind, flags = case
    state = donor_state(new_context(kind, exact=exact), flags)
    pair = Pair(lambda: new_context(kind, exact=exact), neighbour=not exact)
    n_refused = 0
    for what, bad in damaged(state, fields(state, kind, flags), seed=7):
        if Damage(pair.victim).write_state(0, bad, flags) == 0:
            n_refused += 1
            pair.check_untouched(what)
            continue
        # it is not damaged enough to be told from a state: then it is all there, and no neighbour has changed
        read = bytes(Damage(pair.victim).read_state(0, flags))
        fresh = new_context(kind, exact=exact)
        assert Damage(fresh).write_state(0, bad, flags) == len(bad), what
        assert bytes(Damage(fresh).read_state(0, flags)) == read, what
        assert pair.victim.length(1) == pair.twin.length(1)
        fresh.close()
        pair.start_again()
    assert n_refused > 80


def test_a_state_replaces_what_was_there(case: tuple[str, int], exact: bool, new_context: NewContext) -> None:
    kind, flags = case
    state = donor_state(new_context(kind, exact=exact), flags)
    plain, target = new_context(kind, exact=exact), new_context(kind, exact=exact)
    if flags == PARTIAL_ONLY and kind in ("sliding", "hybrid"):
        feed(plain, 0, 0, N_DONOR)
        feed(target, 0, 0, N_DONOR)
    else:
        feed(target, 0, 0, 100)
    assert logits_after(target, state, flags, N_DONOR) == logits_after(plain, state, flags, N_DONOR)


@pytest.mark.parametrize("position", [-1, -(2**31), 2**31 - 1, 2**31 - 2, 10**6])
@pytest.mark.parametrize("kind", KINDS)
def test_positions_that_cannot_be_are_refused(kind: str, position: int, new_context: NewContext) -> None:
    context = new_context(kind)
    state = donor_state(context, 0)
    for field in fields(state, kind, 0):
        if field.name == "position":
            written = Damage(context).write_state(1, replaced(state, field, position), 0)
            # what only counts, and does not lie in a cell, may be anywhere
            assert (written > 0) == (kind == "recurrent" and 0 <= position < 2**31 - 1), field
            assert (context.length(1) == 0) == (written == 0)


@pytest.mark.parametrize("kind", ["full", "sliding", "hybrid"])
def test_a_position_that_is_there_twice_is_refused(kind: str, new_context: NewContext) -> None:
    """With M-RoPE, cells of an image share a position and differ in their places within the image."""
    context = new_context(kind)
    state = donor_state(context, 0)
    cells = [field for field in fields(state, kind, 0) if field.name in ("position", "x", "y")]
    (one, other) = ([field for field in cells if field.name == "position"])[:2]
    twice = replaced(state, other, value_of(state, one))
    if kind == "hybrid":
        assert Damage(context).write_state(1, twice, 0) == len(twice)
        same = {field.name: value_of(twice, field) for field in cells[:3]}
        for field in cells[3:6]:
            twice = replaced(twice, field, same[field.name])
    assert Damage(context).write_state(1, twice, 0) == 0


def test_a_token_outside_the_vocabulary_is_refused(new_context: NewContext) -> None:
    context = new_context("hybrid")
    state = donor_state(context, 0)
    (token, *_) = [field for field in fields(state, "hybrid", 0) if field.name == "token"]
    assert value_of(state, token) >= 0
    for value in (-2, 10**6):
        assert Damage(context).write_state(1, replaced(state, token, value), 0) == 0
    assert Damage(context).write_state(1, replaced(state, token, -1), 0) == len(state)


@pytest.mark.parametrize("kind", KINDS)
def test_an_empty_state_empties_the_sequence(kind: str, new_context: NewContext) -> None:
    context = new_context(kind)
    empty = bytes(Damage(context).read_state(0, 0))
    feed(context, 0, 0, 20)
    assert Damage(context).write_state(0, empty, 0) == len(empty)
    assert context.length(0) == 0


def test_a_window_restore_that_fails_gives_back_the_cells_it_took_from_others(new_context: NewContext) -> None:
    """A unified window cache is small, so a restore takes cells that lie behind the window of another sequence."""
    pair = []
    for _ in range(2):
        context = new_context("sliding", n_slots=2)
        for start in range(0, 480, 120):
            feed(context, 0, start, start + 120)
        pair.append(context)
    victim, twin = pair
    donor = new_context("sliding")
    for start in range(0, 120, 30):
        feed(donor, 0, start, start + 30)
    state = bytes(Damage(donor).read_state(0, PARTIAL_ONLY))
    before = bytes(Damage(victim).read_all())
    for _ in range(20):
        assert Damage(victim).write_state(1, state[:-1], PARTIAL_ONLY) == 0
    assert bytes(Damage(victim).read_all()) == before
    assert next_logits(victim, 0, 480) == next_logits(twin, 0, 480)


@pytest.mark.parametrize("seq_id", [-(2**31), -2, -1, 256, 2**31 - 1])
@pytest.mark.parametrize("kind", KINDS)
def test_an_id_that_cannot_be_is_refused(
    kind: str, seq_id: int, exact: bool, new_context: NewContext, tmp_path: Path
) -> None:
    context = new_context(kind, exact=exact)
    damage = Damage(context)
    state = donor_state(context, 0)
    for flags in (0, PARTIAL_ONLY, ON_DEVICE):
        assert damage.read_state(seq_id, flags) == b""
        assert damage.write_state(seq_id, state, flags) == 0
    assert damage.save_file(0, tmp_path / "state") > len(state) - 8
    assert damage.save_file(seq_id, tmp_path / "other") == 0
    assert damage.load_file(seq_id, tmp_path / "state") == 0
    assert damage.read_state(0, 0) == state


@pytest.mark.parametrize("seq_id", [2, 100, 255])
@pytest.mark.parametrize("kind", KINDS)
def test_an_id_beyond_the_slots_is_taken_or_refused_but_never_fatal(
    kind: str, seq_id: int, exact: bool, new_context: NewContext
) -> None:
    context = new_context(kind, exact=exact)
    state = donor_state(context, 0)
    written = Damage(context).write_state(seq_id, state, 0)
    assert (written > 0) == (not exact and kind in ("full", "sliding"))
    assert Damage(context).read_state(0, 0) == state


def test_a_state_kept_on_the_device_is_checked(case: tuple[str, int], new_context: NewContext) -> None:
    kind, flags = case[0], case[1] | ON_DEVICE
    pair = Pair(lambda: new_context(kind), neighbour=True)
    damage = Damage(pair.victim)
    state = bytes(damage.read_state(1, flags))
    for bad in (b"", state[:3], state[:7], b"\0" * 4 + state[4:], state[:4] + b"\x07\0\0\0" + state[8:]):
        assert damage.write_state(0, bad, flags) == 0
        pair.check_untouched("header")
    for bad in (state[:-1], state + b"\0"):
        assert damage.write_state(0, bad, flags) == 0
        pair.check_untouched("length")
    feed(pair.victim, 1, 10, 12)
    feed(pair.twin, 1, 10, 12)
    longer = bytes(damage.read_state(1, flags))
    if kind == "full" or (kind != "recurrent" and flags == ON_DEVICE) or kind == "sliding":
        # the header of the state before, and the data of the one after it
        assert damage.write_state(0, state, flags) == 0
        pair.check_untouched("data of another state")
    assert damage.write_state(0, longer, flags) == len(longer)


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_is_loaded_whole_or_not_at_all(kind: str, exact: bool, new_context: NewContext, tmp_path: Path) -> None:
    donor = new_context(kind, exact=exact)
    state = donor_state(donor, 0)
    path, damaged_path = tmp_path / "state", tmp_path / "damaged"
    assert Damage(donor).save_file(0, path) > 0
    data = path.read_bytes()
    head = len(data) - (len(state) - 8)  # files carry a header of their own
    assert data[head:] == state[8:]
    pair = Pair(lambda: new_context(kind, exact=exact), neighbour=not exact)
    positions = [field for field in fields(state, kind, 0) if field.name == "position"]
    bad = [data[:-1], data[: head + 4], data[:head], data[:5], b""]
    bad += [data[:head] + replaced(state, positions[-1], -5)[8:]]
    for content in bad:
        damaged_path.write_bytes(content)
        assert Damage(pair.victim).load_file(0, damaged_path) == 0
        pair.check_untouched("file")
    assert Damage(pair.victim).load_file(0, path) == len(data)
    assert pair.victim.length(0) == N_DONOR
    damaged_path.write_bytes(data + b"SCKP and the checkpoints of llama-server")
    assert Damage(pair.victim).load_file(0, damaged_path) == len(data)  # which reads on from there
    assert pair.victim.length(0) == N_DONOR


@pytest.mark.parametrize("kind", KINDS)
def test_a_whole_context_is_restored_or_emptied(kind: str, exact: bool, new_context: NewContext) -> None:
    donor = new_context(kind, exact=exact)
    feed(donor, 0, 0, 5)
    feed(donor, 1, 0, 9)
    state = bytes(Damage(donor).read_all())
    target = new_context(kind, exact=exact)
    feed(target, 0, 0, 30)
    assert Damage(target).write_all(b"\xf0\xff\xff\xff" + state[4:]) == 0  # the length of a name
    assert target.length(0) == 30
    assert Damage(target).write_all(state[:-1]) == 0
    assert (target.length(0), target.length(1)) == (0, 0)
    assert Damage(target).write_all(state) == len(state)
    assert (target.length(0), target.length(1)) == (5, 9)
    assert next_logits(target, 1, 9) == next_logits(donor, 1, 9)


def damaged_whole(state: bytes) -> Iterator[bytes]:
    """The first cell of a whole context of one sequence: position, number of ids, id."""
    name_length = int.from_bytes(state[:4], "little")
    cell = 4 + name_length + 4 + 4
    for offset, value in ((0, -1), (0, 2**31 - 1), (4, 0), (4, 2), (8, -1), (8, 77)):
        changed = bytearray(state)
        changed[cell + offset : cell + offset + 4] = value.to_bytes(4, "little", signed=True)
        yield bytes(changed)


def test_a_whole_context_with_cells_that_cannot_be_is_refused(new_context: NewContext) -> None:
    donor, target = new_context("full"), new_context("full")
    feed(donor, 0, 0, 5)
    state = bytes(Damage(donor).read_all())
    for bad in damaged_whole(state):
        assert Damage(target).write_all(bad) == 0
        assert target.length(0) == 0
    assert Damage(target).write_all(state) == len(state)


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_of_another_length_is_refused_in_time(kind: str, exact: bool, new_context: NewContext) -> None:
    """Our own check sees the positions before the state takes effect."""
    donor = new_context(kind, exact=exact)
    feed(donor, 0, 0, N_DONOR)
    state = donor.save_state(0)
    pair = Pair(lambda: new_context(kind, exact=exact), neighbour=not exact)
    for n_tokens in (N_DONOR - 1, N_DONOR + 1, 1, 512):
        with pytest.raises(NativeError):
            pair.victim.load_state(0, state, n_tokens)
        pair.check_untouched(str(n_tokens))
    pair.victim.load_state(0, state, N_DONOR)
    assert pair.victim.length(0) == N_DONOR


def test_what_a_share_still_owes_is_in_the_state(new_context: NewContext) -> None:
    """Between streams a share copies its data with the next decode; a state taken before had the old data."""
    context, donor = new_context("full", exact=True), new_context("full", exact=True)
    feed(context, 0, 0, 64)
    feed(donor, 0, 0, 80)
    context.share(0, 1, 64)
    shared = context.save_state(1)
    feed(context, 0, 64, 65)
    assert context.save_state(1) == shared
    context.erase(1)
    context.share(0, 1, 64)
    context.load_state(1, donor.save_state(0), 80)
    loaded = context.save_state(1)
    feed(context, 0, 65, 66)
    assert context.save_state(1) == loaded


def test_a_donor_may_take_another_state_right_after_a_share(new_context: NewContext) -> None:
    context, twin, other = (new_context("full", exact=True) for _ in range(3))
    for one in (context, twin):
        feed(one, 0, 0, 64)
        one.share(0, 1, 64)
    feed(other, 0, 0, 80)
    feed(twin, 0, 64, 65)
    context.load_state(0, other.save_state(0), 80)
    feed(context, 0, 80, 81)
    assert next_logits(context, 1, 64) == next_logits(twin, 1, 64)
