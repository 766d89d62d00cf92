"""Slots saved and restored: any slot, another engine, another number of slots, another process."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyllamacache.errors import CacheCorruptError, CacheFileError, CacheMismatchError, NativeError, SlotBusyError
from tests.flow.law import joined, random_ids
from tests.models import FullSpec

KINDS = ["full", "sliding", "hybrid", "recurrent"]
HELD = random_ids(1, 160)
MORE = random_ids(2, 30)


def _filled(engine: Any, exact: bool) -> Any:
    if exact:
        engine.warm(HELD, slot=0)
    else:
        engine.complete(HELD, max_tokens=0, slot=0)
    return engine


@pytest.mark.parametrize("exact", [False, True], ids=["default", "exact"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_restored_slot_answers_like_the_one_that_was_saved(
    kind: str, exact: bool, new_engine: Callable[..., Any], tmp_path: Path
) -> None:
    """Into another slot of an engine with another number of slots; equal bits where the law promises them."""
    options = {"exact": exact, "flash_attention": "off"}
    engine = _filled(new_engine(kind, **options), exact)
    path = tmp_path / "slot"
    assert engine.slots[0].save(path) == path.stat().st_size
    ids = joined(HELD, MORE)
    saved = engine.complete(ids, max_tokens=4, return_logits=True, slot=0)
    other = new_engine(kind, **{**options, "n_slots": 3})
    assert other.slots[2].restore(path) == 160
    assert other.slots[2].token_ids == HELD.tolist()
    restored = other.complete(ids, max_tokens=4, return_logits=True, slot=2)
    assert saved.usage.cached_tokens == 160
    # window cells come back in another order of their ring, which exact mode may not build on
    assert restored.usage.cached_tokens == (0 if exact and kind == "sliding" else 160)
    if exact:
        assert np.array_equal(restored.logits, saved.logits)
        assert restored.token_ids == saved.token_ids
    else:
        assert np.abs(restored.logits - saved.logits).max() < 1e-3


@pytest.mark.parametrize("kind", KINDS)
def test_a_slot_survives_its_process(kind: str, tiny_path: Callable[..., Path], tmp_path: Path) -> None:
    """Scenario S22 without checkpoints: the next process prefills only what is new."""
    script = (
        "import sys, numpy as np, pyllamacache as plc\n"
        "model, path, mode = sys.argv[1:]\n"
        "engine = plc.Engine(plc.Model(model, progress=False), n_ctx=512, n_slots=2, n_threads=1, progress=False)\n"
        "ids = np.random.default_rng(1).integers(0, 256, 200, dtype=np.int32)\n"
        "if mode == 'save':\n"
        "    engine.complete(ids[:160], max_tokens=0, slot=0); engine.slots[0].save(path)\n"
        "else:\n"
        "    engine.slots[1].restore(path); r = engine.complete(ids, max_tokens=2)\n"
        "    print(r.usage.cached_tokens, r.cache.prefilled_tokens)\n"
    )
    outputs = [
        subprocess.run(
            [sys.executable, "-W", "error", "-c", script, str(tiny_path(kind)), str(tmp_path / "slot"), mode],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for mode in ("save", "restore")
    ]
    assert outputs == ["", "160 40\n"]


def _untouched(engine: Any, slot: int) -> None:
    """Scenario S25: after a refused restore the old state is intact, to the last token."""
    assert engine.slots[slot].token_ids == HELD.tolist()
    assert engine.complete(joined(HELD, [9]), max_tokens=1, slot=slot).cache.prefilled_tokens == 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_refused_file_leaves_the_slot_as_it_was(kind: str, new_engine: Callable[..., Any], tmp_path: Path) -> None:
    engine = _filled(new_engine(kind), exact=False)
    good = tmp_path / "good"
    engine.slots[0].save(good)
    data = good.read_bytes()
    bad = {
        "missing": None,
        "empty": b"",
        "half": data[: len(data) // 2],
        "flipped": data[:-5000] + bytes([data[-5000] ^ 1]) + data[-4999:],
        "text": b"not a slot file" * 10,
    }
    for name, content in bad.items():
        path = tmp_path / name
        if content is not None:
            path.write_bytes(content)
        with pytest.raises((CacheCorruptError, CacheFileError)):
            engine.slots[0].restore(path)
        assert engine.slots[0].token_ids == HELD.tolist()
    with pytest.raises(CacheFileError):
        engine.slots[0].restore(tmp_path)
    link = tmp_path / "link"
    link.symlink_to(good)
    with pytest.raises(CacheFileError):
        engine.slots[0].restore(link)
    _untouched(engine, 0)


def test_a_file_written_under_other_conditions_names_the_field_that_differs(
    new_engine: Callable[..., Any], tmp_path: Path
) -> None:
    path = tmp_path / "slot"
    _filled(new_engine("full"), exact=False).slots[0].save(path)
    for spec, options, field in (
        (FullSpec(seed=7), {}, "fingerprint"),
        ("full", {"type_k": "f16"}, "type_k"),
        ("full", {"type_v": "f16"}, "type_v"),
        ("full", {"flash_attention": "on"}, "v_transposed"),
        ("full", {"exact": True}, "exact"),
        ("full", {"rope_freq_base": 5000.0}, "rope"),
        ("full", {"n_ctx": 100, "n_batch": 64}, "n_tokens"),
    ):
        engine = new_engine(spec, **options)
        with pytest.raises(CacheMismatchError) as caught:
            engine.slots[0].restore(path)
        assert caught.value.field == field, caught.value
        assert field in str(caught.value)
        assert engine.slots[0].token_ids == []


@pytest.mark.parametrize("kind", KINDS)
def test_state_bytes_that_native_code_refuses_leave_the_slot_as_it_was(
    kind: str, new_engine: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file whose checksums hold but whose state is nonsense: written by whoever can compute a checksum."""
    from pyllamacache.store import slotfile

    engine = _filled(new_engine(kind), exact=False)
    good = tmp_path / "good"
    engine.slots[0].save(good)
    record = slotfile.read(good, max_tokens=1024)
    rng = np.random.default_rng(5)
    for index in range(60):
        state = bytearray(record.state)
        if index < 4:
            state = state[: len(state) * index // 4]
        else:
            at = int(rng.integers(0, min(len(state), 400))) // 4 * 4
            state[at : at + 4] = int(rng.choice([0, 1, 2, 3, 255, 2**31 - 1, 2**31, 2**32 - 1])).to_bytes(4, "little")
        forged = tmp_path / "forged"
        slotfile.write(
            forged,
            slotfile.SlotRecord(
                ids=record.ids,
                state=bytes(state),
                exact_tokens=record.exact_tokens,
                namespace=record.namespace,
                fingerprint=record.fingerprint,
                layout=record.layout,
                n_ctx=record.n_ctx,
            ),
        )
        if index < 4:
            with pytest.raises(NativeError):
                engine.slots[0].restore(forged)
        else:  # a changed word may be one that nothing depends on
            with contextlib.suppress(NativeError):
                engine.slots[0].restore(forged)
                engine.slots[0].restore(good)
        assert engine.slots[0].token_ids == HELD.tolist()
    _untouched(engine, 0)


def test_a_busy_slot_is_neither_saved_nor_restored_nor_erased(new_engine: Callable[..., Any], tmp_path: Path) -> None:
    engine = _filled(new_engine("full"), exact=False)
    path = tmp_path / "slot"
    engine.slots[0].save(path)
    handle = engine.submit(random_ids(3, 20), max_tokens=900, slot=1)
    next(iter_chunks := iter(handle))
    for operation in (
        lambda: engine.slots[1].save(tmp_path / "other"),
        lambda: engine.slots[1].restore(path),
        engine.slots[1].erase,
    ):
        with pytest.raises(SlotBusyError):
            operation()
    assert engine.slots[1].state == "busy"
    iter_chunks.close()
    handle.result()
    assert engine.slots[1].restore(path) == 160


def test_an_empty_slot_saves_and_restores_as_empty(new_engine: Callable[..., Any], tmp_path: Path) -> None:
    engine = _filled(new_engine("full"), exact=False)
    engine.slots[1].save(tmp_path / "empty")
    assert engine.slots[0].restore(tmp_path / "empty") == 0
    assert engine.slots[0].token_ids == []


def test_restoring_makes_room_and_never_takes_cells_of_a_running_request(
    new_engine: Callable[..., Any], tmp_path: Path
) -> None:
    from pyllamacache.errors import CellsExhaustedError

    engine = _filled(new_engine("full", n_ctx=256, kv_tokens=256, n_slots=3), exact=False)
    path = tmp_path / "slot"
    engine.slots[0].save(path)
    assert engine.slots[1].restore(path) == 160
    assert engine.statistics().kv_tokens_used <= 256
    running = engine.submit(random_ids(4, 40), max_tokens=150, slot=2)
    next(iter(chunks := iter(running)))
    with pytest.raises(CellsExhaustedError):
        engine.slots[0].restore(path)
    assert sum(len(chunk.token_ids) for chunk in chunks) == 149
