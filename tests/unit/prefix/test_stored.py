"""What host memory and disk have of a prompt, seen as one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pyllamacache.prefix.index import Checkpoint, PrefixIndex, Span
from pyllamacache.prefix.key import chain_key, next_key, root_key
from pyllamacache.prefix.rates import Rates
from pyllamacache.prefix.stored import StoredPrefix
from pyllamacache.request import CheckpointKind

if TYPE_CHECKING:
    from pyllamacache.request import Ids

S = 4
PROMPT = np.arange(1, 23, dtype=np.int32)


def index_of(*ends: int, ids: Ids = PROMPT) -> PrefixIndex:
    index = PrefixIndex(span_tokens=S)
    for end in ends:
        index.add_span("", ids[:end], 10)
    return index


def stored_of(*indexes: PrefixIndex, prompt: Ids = PROMPT) -> StoredPrefix:
    return StoredPrefix(tuple(index.match("", prompt) for index in indexes))


def reached(stored: StoredPrefix, held: int) -> tuple[int, list[int]]:
    return stored.reach(held), [span.start for span in stored.chain(held)]


def test_spans_go_on_where_the_device_ends_and_begin_at_or_before_it() -> None:
    stored = stored_of(index_of(4, 8, 12))
    assert reached(stored, 0) == (12, [0, 4, 8])
    assert reached(stored, 6) == (12, [4, 8])
    assert reached(stored, 8) == (12, [8])
    assert reached(stored, 12) == (12, [])
    assert reached(stored, 20) == (20, [])


def test_a_gap_ends_the_chain_and_the_device_may_bridge_it() -> None:
    stored = stored_of(index_of(4, 12, 16))
    assert reached(stored, 0) == (4, [0])
    assert reached(stored, 8) == (16, [8, 12])


def test_another_tier_bridges_a_gap_and_the_faster_one_wins_a_tie() -> None:
    host, disk = index_of(4, 12), index_of(4, 8, 12, 14)
    stored = stored_of(host, disk)
    assert reached(stored, 0) == (14, [0, 4, 8, 12])
    assert [span in host.spans for span in stored.chain(0)] == [True, False, True, False]


def test_a_longer_span_of_a_slower_tier_is_worth_the_way() -> None:
    host, disk = index_of(4, 6), index_of(4, 8)
    assert reached(stored_of(host, disk), 0) == (8, [0, 4])
    assert stored_of(host, disk).chain(0)[1] in disk.spans


def test_a_span_is_used_as_far_as_the_prompt_agrees() -> None:
    other = PROMPT.copy()
    other[6:] = 99
    stored = stored_of(index_of(4, 8, 12, ids=other))
    assert reached(stored, 0) == (6, [0, 4])
    assert not stored.is_end
    assert stored_of(index_of(4, 8)).is_end


def test_what_is_not_worth_fetching_ends_the_chain() -> None:
    index = index_of(4, 8, 12)

    def is_small(mark: Span | Checkpoint, n_tokens: int) -> bool:
        assert n_tokens == S
        return mark.position != 8

    stored = StoredPrefix((index.match("", PROMPT),), is_small)
    assert reached(stored, 0) == (4, [0])
    assert reached(stored, 8) == (12, [8])


def test_states_are_those_whose_bytes_are_whole_the_fastest_tier_first() -> None:
    host, disk = index_of(4), index_of(4)
    in_flight = host.add_checkpoint("", PROMPT[:3], CheckpointKind.TAIL, 1)
    here = host.add_checkpoint("", PROMPT[:5], CheckpointKind.TAIL, 1)
    here.is_ready = True
    for end in (3, 5, 7):
        disk.add_checkpoint("", PROMPT[:end], CheckpointKind.TAIL, 1).is_ready = True
    found = stored_of(host, disk).checkpoints()
    assert sorted(found) == [3, 5, 7]
    assert found[5] is here
    assert found[3] is not in_flight


def test_a_state_has_to_be_worth_its_way_beside_the_one_before_it() -> None:
    disk = index_of(4)
    for end in (3, 5, 16):
        disk.add_checkpoint("", PROMPT[:end], CheckpointKind.TAIL, 1).is_ready = True
    stored = StoredPrefix((disk.match("", PROMPT),), lambda _, n_tokens: n_tokens > 2)
    assert sorted(stored.checkpoints()) == [3, 16]


# ---- keys --------------------------------------------------------------------------------------------------------


def test_a_key_depends_on_scope_namespace_and_every_id_before_it() -> None:
    roots = {root_key(scope, namespace) for scope in ("ab", "cd") for namespace in ("", "a", "b")}
    assert len(roots) == 6
    root = root_key("ab", "")
    keys = {chain_key(root, PROMPT[:end], span_tokens=S) for end in range(len(PROMPT) + 1)}
    assert len(keys) == len(PROMPT) + 1
    changed = PROMPT.copy()
    changed[1] += 1
    assert chain_key(root, changed, span_tokens=S) not in keys


def test_a_chain_is_made_of_its_spans() -> None:
    root = root_key("ab", "")
    key = next_key(next_key(root, PROMPT[:4]), PROMPT[4:8])
    assert chain_key(root, PROMPT[:8], span_tokens=S) == key
    assert chain_key(root, PROMPT[:10], span_tokens=S) == next_key(key, PROMPT[8:10])
    assert chain_key(root, PROMPT[:10].astype(np.int64), span_tokens=S) == next_key(key, PROMPT[8:10])


# ---- rates -------------------------------------------------------------------------------------------------------


def test_nothing_is_held_against_a_tier_before_it_was_tried() -> None:
    rates = Rates()
    assert rates.is_worth_loading("disk", 1 << 40, 1)
    rates.prefilled(100, 1.0)
    assert rates.is_worth_loading("disk", 1 << 40, 1)
    assert rates.load_s("disk", 1 << 40) == 0.0


def test_the_median_of_recent_loads_decides_for_each_tier_alone() -> None:
    rates = Rates()
    rates.prefilled(100, 1.0)  # 10 ms a token
    for seconds in (0.5, 2.0, 100.0):
        rates.loaded("disk", 1000, seconds)
    assert rates.load_s("disk", 1000) == 2.0
    assert rates.is_worth_loading("disk", 1000, 201)
    assert not rates.is_worth_loading("disk", 1000, 200)
    assert rates.is_worth_loading("host", 1000, 1)
