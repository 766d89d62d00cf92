"""Slot files under random content and random damage."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyllamacache.config import Layout
from pyllamacache.errors import CacheCorruptError, CacheMismatchError
from pyllamacache.store import slotfile
from pyllamacache.store.slotfile import Extra, SlotRecord, StoredCheckpoint, checkpoint_extras

short_text = st.text(max_size=20)
counts = st.integers(0, 2**31)
blobs = st.binary(max_size=200)
layouts = st.builds(
    Layout,
    memory=short_text,
    exact=st.booleans(),
    type_k=short_text,
    type_v=short_text,
    v_transposed=st.booleans(),
    n_ubatch=counts,
    rope=short_text,
    rotation=st.booleans(),
    adapters=short_text,
    backend=short_text,
    n_threads=counts,
    cpu=short_text,
    source=short_text,
    state_format=counts,
)
extras = st.dictionaries(st.from_regex(r"note(\.[a-z0-9_]{1,5}){0,2}", fullmatch=True), st.builds(Extra, blobs))


@st.composite
def checkpoints(draw: st.DrawFn, n_tokens: int) -> dict[str, Extra]:
    positions = draw(st.lists(st.integers(1, n_tokens), unique=True, max_size=4)) if n_tokens else []
    kinds = st.from_regex(r"[a-z_]{1,8}", fullmatch=True)
    return checkpoint_extras(
        [StoredCheckpoint(each, draw(kinds), draw(blobs)) for each in positions], n_tokens=n_tokens
    )


@st.composite
def records(draw: st.DrawFn) -> SlotRecord:
    ids = np.array(draw(st.lists(st.integers(-(2**31), 2**31 - 1), max_size=30)), dtype=np.int32)
    return SlotRecord(
        ids=ids,
        state=draw(blobs),
        exact_tokens=draw(st.integers(0, len(ids))),
        namespace=draw(short_text),
        fingerprint=draw(short_text),
        layout=draw(layouts),
        n_ctx=draw(counts),
        extras=draw(extras) | draw(checkpoints(len(ids))),
    )


def facts(record: SlotRecord) -> tuple[Any, ...]:
    stored = {name: (bytes(extra.data), extra.required) for name, extra in record.extras.items()}
    scalars = (record.exact_tokens, record.namespace, record.fingerprint, record.layout, record.n_ctx)
    return (record.ids.tolist(), bytes(record.state), stored, *scalars)


@pytest.fixture(scope="module")
def path() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder) / "slot"


@settings(deadline=None)
@given(record=records())
def test_round_trip(path: Path, record: SlotRecord) -> None:
    slotfile.write(path, record)
    assert facts(slotfile.read(path, max_tokens=30)) == facts(record)
    header = slotfile.read_header(path, verify=True)
    assert header.intact
    assert header.layout == record.layout
    positions = [each.position for each in record.checkpoints]
    assert positions == sorted(positions) == [each.position for each in header.checkpoints]


@settings(deadline=None)
@given(record=records(), data=st.data())
def test_damage_is_refused_or_harmless(path: Path, record: SlotRecord, data: st.DataObject) -> None:
    slotfile.write(path, record)
    good = path.read_bytes()
    start = data.draw(st.integers(0, len(good)))
    end = data.draw(st.integers(start, min(len(good), start + 40)))
    damaged = good[:start] + data.draw(st.one_of(blobs, st.just(bytes(end - start)))) + good[end:]
    path.write_bytes(damaged)
    try:
        found = slotfile.read(path, max_tokens=30)
    except (CacheCorruptError, CacheMismatchError):
        assert damaged != good
    else:
        assert facts(found) == facts(record)
