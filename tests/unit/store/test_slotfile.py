"""Slot files: what is written is read back, whatever is wrong is refused and told apart, and nothing is lost."""

from __future__ import annotations

import hashlib
import json
import os
import random
import stat
import threading
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open

from pyllamacache.config import Layout
from pyllamacache.errors import CacheCorruptError, CacheDataError, CacheFileError, CacheMismatchError, InternalError
from pyllamacache.store import slot_header, slotfile
from pyllamacache.store.slotfile import CheckpointPlace, Extra, SlotRecord, StoredCheckpoint

LAYOUT = Layout(
    memory="full",
    exact=True,
    type_k="f16",
    type_v="q8_0",
    v_transposed=False,
    n_ubatch=512,
    rope="none",
    rotation=True,
    adapters="",
    backend="CPU",
    n_threads=2,
    cpu="AVX2",
    source="ab" * 32,
    state_format=3,
)


def make_record(n_tokens: int = 7, state: Any = b"state of a sequence" * 3, **changes: Any) -> SlotRecord:
    values: dict[str, Any] = {
        "ids": np.arange(n_tokens, dtype=np.int32) * 31,
        "state": state,
        "exact_tokens": n_tokens // 2,
        "namespace": 'agents/\u00e4 \U0001f600 "digest":"',
        "fingerprint": "f" * 64,
        "layout": LAYOUT,
        "n_ctx": 4096,
    }
    return SlotRecord(**values | changes)


def facts(record: SlotRecord) -> tuple[Any, ...]:
    """Everything a record says, comparable."""
    extras = {name: (bytes(extra.data), extra.required) for name, extra in record.extras.items()}
    scalars = (record.exact_tokens, record.namespace, record.fingerprint, record.layout, record.n_ctx)
    return (record.ids.tolist(), bytes(record.state), extras, *scalars)


def resign(path: Path, change: Any) -> None:
    """Let `change` edit the header's JSON, then sign it again, as a hostile writer could."""
    raw = path.read_bytes()
    n_header = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + n_header])
    change(header)
    header["__metadata__"]["digest"] = "0" * 64
    text = json.dumps(header, separators=(",", ":")).encode()
    unsigned = len(text).to_bytes(8, "little") + text
    signed = unsigned.replace(b"0" * 64, hashlib.sha256(unsigned).hexdigest().encode(), 1)
    path.write_bytes(signed + raw[8 + n_header :])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "slot.safetensors"


@pytest.fixture
def written(path: Path) -> Path:
    slotfile.write(path, make_record())
    return path


class TestRoundTrip:
    @pytest.mark.parametrize(
        "record",
        [
            make_record(),
            make_record(n_tokens=0, state=b"", exact_tokens=0, namespace=""),
            make_record(state=b""),
            make_record(state=bytearray(range(256)) * 9000),
            make_record(namespace="\ud800 lone"),
        ],
        ids=["plain", "empty slot", "no state", "above one chunk", "lone surrogate"],
    )
    def test_what_was_written_is_read(self, path: Path, record: SlotRecord) -> None:
        size = slotfile.write(path, record)
        assert size == path.stat().st_size
        assert facts(slotfile.read(path, max_tokens=10)) == facts(record)

    def test_any_kind_of_buffer_is_taken(self, path: Path) -> None:
        state = np.arange(12, dtype=np.float32).reshape(3, 4)
        ids = np.arange(14, dtype=np.int64)[::2]
        for kind in (state, state.tobytes(), bytearray(state.tobytes())):
            slotfile.write(path, make_record(state=kind, ids=ids))
            assert bytes(slotfile.read(path, max_tokens=10).state) == state.tobytes()
        found = slotfile.read(path, max_tokens=10)
        assert found.ids.tolist() == ids.tolist()

    def test_ids_are_read_only_int32(self, written: Path) -> None:
        ids = slotfile.read(written, max_tokens=10).ids
        assert ids.dtype == np.int32
        assert not ids.flags.writeable

    def test_optional_extras_come_back(self, path: Path) -> None:
        record = make_record(extras={"note.1": Extra(b"abc"), "note.2": Extra(b"")})
        slotfile.write(path, record)
        assert facts(slotfile.read(path, max_tokens=10)) == facts(record)
        assert slotfile.read_header(path).extra_bytes == {"note.1": 3, "note.2": 0}

    def test_the_safetensors_library_reads_the_file(self, path: Path) -> None:
        record = make_record(namespace="plain", extras={"note": Extra(b"abc")})
        slotfile.write(path, record)
        with safe_open(path, "numpy") as file:
            assert file.get_tensor("token_ids").tolist() == record.ids.tolist()
            assert file.get_tensor("state").tobytes() == record.state
            assert file.get_tensor("note").tobytes() == b"abc"
            assert file.metadata()["fingerprint"] == record.fingerprint
            assert file.metadata()["layout.type_v"] == "q8_0"

    def test_the_header_says_everything_but_the_tensors(self, written: Path) -> None:
        record = make_record()
        header = slotfile.read_header(written, verify=True)
        assert header == slotfile.SlotHeader(
            format_version=slotfile.FORMAT_VERSION,
            size_bytes=written.stat().st_size,
            n_tokens=record.n_tokens,
            state_bytes=len(record.state),
            exact_tokens=record.exact_tokens,
            namespace=record.namespace,
            fingerprint=record.fingerprint,
            layout=LAYOUT,
            n_ctx=record.n_ctx,
            extra_bytes={},
            intact=True,
        )
        assert slotfile.read_header(written).intact is None

    def test_a_record_that_contradicts_itself_is_our_bug(self, path: Path) -> None:
        for record in (
            make_record(exact_tokens=8),
            make_record(extras={"state": Extra(b"")}),
            make_record(extras={"two words": Extra(b"")}),
        ):
            with pytest.raises(InternalError):
                slotfile.write(path, record)
        assert not path.exists()

    def test_a_header_too_long_to_be_read_is_not_written(self, path: Path) -> None:
        with pytest.raises(CacheFileError, match="header"):
            slotfile.write(path, make_record(namespace="n" * slot_header.MAX_HEADER_BYTES))
        assert not path.exists()

    def test_messages_and_reprs_hold_no_content(self) -> None:
        record = make_record(ids=np.array([987654321] * 7, np.int32), state=b"secret")
        assert "987654321" not in repr(record)
        assert "secret" not in repr(record)


class TestDamage:
    def test_every_flipped_byte_is_refused(self, written: Path) -> None:
        good = written.read_bytes()
        chance = random.Random(1)
        with open(written, "r+b", buffering=0) as file:
            for position, byte in enumerate(good):
                for mask in (0xFF, 1 << chance.randrange(8)):
                    os.pwrite(file.fileno(), bytes([byte ^ mask]), position)
                    with pytest.raises((CacheCorruptError, CacheMismatchError)):
                        slotfile.read(written, max_tokens=10)
                os.pwrite(file.fileno(), bytes([byte]), position)
        assert facts(slotfile.read(written, max_tokens=10)) == facts(make_record())

    def test_every_truncation_is_refused(self, written: Path) -> None:
        for length in reversed(range(written.stat().st_size)):
            os.truncate(written, length)
            with pytest.raises(CacheCorruptError):
                slotfile.read(written, max_tokens=10)
            with pytest.raises(CacheCorruptError):
                slotfile.read_header(written)

    @pytest.mark.parametrize("more", [b"\0", b" " * 8, b"x" * 5000])
    def test_appended_bytes_are_refused(self, written: Path, more: bytes) -> None:
        written.write_bytes(written.read_bytes() + more)
        with pytest.raises(CacheCorruptError, match="bytes long"):
            slotfile.read(written, max_tokens=10)

    def test_the_message_says_where_the_damage_is(self, written: Path) -> None:
        damaged = bytearray(written.read_bytes())
        damaged[-1] ^= 1
        written.write_bytes(damaged)
        with pytest.raises(CacheCorruptError, match=rf"checksum of state \(bytes \d+ to {len(damaged)}\)") as caught:
            slotfile.read(written, max_tokens=10)
        assert caught.value.path == str(written)
        assert slotfile.read_header(written, verify=True).intact is False

    @pytest.mark.parametrize(
        "content",
        [
            b"",
            b"GGUF" * 100,
            b"\xff" * 64,
            (64).to_bytes(8, "little") + b"[" * 64,
            (200_000).to_bytes(8, "little") + b"[" * 200_000,
            (2).to_bytes(8, "little") + b"{}",
            (2).to_bytes(8, "little") + b"[]",
            (20).to_bytes(8, "little") + b'{"__metadata__":null}'[:20],
            (7).to_bytes(8, "little") + b'{"a":1}',
            (5010).to_bytes(8, "little") + b'{"a":' + b"1" * 5004 + b"}",
        ],
        ids=range(10),
    )
    def test_files_of_other_kinds_are_refused(self, path: Path, content: bytes) -> None:
        path.write_bytes(content)
        with pytest.raises(CacheCorruptError):
            slotfile.read(path, max_tokens=10)

    @pytest.mark.parametrize(
        "change",
        [
            lambda header: header["state"].update(shape=[1 << 62], data_offsets=[28, 28 + (1 << 62)]),
            lambda header: header["state"].update(shape=[], data_offsets=[]),
            lambda header: header["state"].update(data_offsets=[28, 0]),
            lambda header: header["state"].update(data_offsets="no"),
            lambda header: header["state"].update(dtype="F32"),
            lambda header: header.update(state=None),
            lambda header: header.pop("state"),
            lambda header: header["token_ids"].update(data_offsets=[0, 27]),
            lambda header: header["token_ids"].update(data_offsets=[4, 28]),
            lambda header: header.update(more={"dtype": "U8", "shape": [0], "data_offsets": [85, 85]}),
            lambda header: header["__metadata__"].update(n_tokens="1000000000000"),
            lambda header: header["__metadata__"].update(n_tokens="07"),
            lambda header: header["__metadata__"].update(n_tokens="\u0667"),
            lambda header: header["__metadata__"].update(exact_tokens="8"),
            lambda header: header["__metadata__"].update(state_bytes="1"),
            lambda header: header["__metadata__"].update(required="checkpoint"),
            lambda header: header["__metadata__"].update({"layout.exact": "1"}),
            lambda header: header["__metadata__"].update({"layout.n_ubatch": "-1"}),
            lambda header: header["__metadata__"].update(namespace=None),
            lambda header: header["__metadata__"].pop("fingerprint"),
            lambda header: header["__metadata__"].pop("sha256.state"),
        ],
        ids=range(21),
    )
    def test_a_signed_header_that_lies_is_refused(self, written: Path, change: Any) -> None:
        resign(written, change)
        with pytest.raises(CacheCorruptError):
            slotfile.read(written, max_tokens=2**40)


class TestCheckpoints:
    CHECKPOINTS = (
        StoredCheckpoint(7, "end", b"seven"),
        StoredCheckpoint(2, "branch", b""),
        StoredCheckpoint(3, "a_b", b"3"),
    )
    PLACES = (CheckpointPlace(2, "branch", 0), CheckpointPlace(3, "a_b", 1), CheckpointPlace(7, "end", 5))

    @pytest.fixture
    def with_checkpoints(self, path: Path) -> Path:
        extras = slotfile.checkpoint_extras(self.CHECKPOINTS, n_tokens=7)
        slotfile.write(path, make_record(extras={"note": Extra(b"abc"), **extras}))
        return path

    def test_they_come_back_by_position(self, with_checkpoints: Path) -> None:
        record = slotfile.read(with_checkpoints, max_tokens=10)
        found = [(each.position, each.kind, bytes(each.data)) for each in record.checkpoints]
        assert found == [(2, "branch", b""), (3, "a_b", b"3"), (7, "end", b"seven")]
        assert bytes(record.extras["note"].data) == b"abc"
        assert slotfile.read_header(with_checkpoints).checkpoints == self.PLACES

    def test_a_file_without_them_is_as_before(self, written: Path) -> None:
        assert slotfile.read(written, max_tokens=10).checkpoints == ()
        assert slotfile.read_header(written).checkpoints == ()

    def test_a_reader_that_does_not_know_them_can_do_without(
        self, with_checkpoints: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(slotfile, "KNOWN_EXTRAS", frozenset())
        assert slotfile.read(with_checkpoints, max_tokens=10).n_tokens == 7

    def test_states_are_not_copied(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        data = np.arange(50, dtype=np.uint8)
        extras = slotfile.checkpoint_extras([StoredCheckpoint(1, "end", data)], n_tokens=7)
        assert make_record(extras=extras).checkpoints[0].data is data
        written: list[Any] = []

        def replace_file(where: str, pieces: list[Any]) -> int:
            written.extend(pieces)
            return 0

        monkeypatch.setattr(slotfile, "replace_file", replace_file)
        slotfile.write(path, make_record(extras=extras))
        assert any(isinstance(piece, np.ndarray) and np.shares_memory(piece, data) for piece in written)

    def test_every_flipped_byte_is_refused(self, with_checkpoints: Path) -> None:
        good = with_checkpoints.read_bytes()
        before = facts(slotfile.read(with_checkpoints, max_tokens=10))
        with open(with_checkpoints, "r+b", buffering=0) as file:
            for position, byte in enumerate(good):
                os.pwrite(file.fileno(), bytes([byte ^ (1 << position % 8)]), position)
                with pytest.raises((CacheCorruptError, CacheMismatchError)):
                    slotfile.read(with_checkpoints, max_tokens=10)
                os.pwrite(file.fileno(), bytes([byte]), position)
        assert facts(slotfile.read(with_checkpoints, max_tokens=10)) == before

    @pytest.mark.parametrize(
        "name",
        [
            "checkpoint", "checkpoint.3", "checkpoint.0.end", "checkpoint.8.end", "checkpoint.03.end",
            "checkpoint.-1.end", "checkpoint.3.end.more", "checkpoint.3.End", "checkpoint.3.", "checkpoint.3.e1",
            "checkpoint.3.branch", "checkpoint.\u0663.end", "checkpoint.99999999999999999999.end",
        ],
    )  # fmt: skip
    def test_a_signed_header_with_names_that_lie_is_refused(
        self, with_checkpoints: Path, name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def rename(header: dict[str, Any]) -> None:
            places, values = dict(header), header["__metadata__"]
            header.clear()
            header.update({name if key == "checkpoint.7.end" else key: value for key, value in places.items()})
            values[f"sha256.{name}"] = values.pop("sha256.checkpoint.7.end")

        resign(with_checkpoints, rename)
        monkeypatch.setattr(np, "empty", None)  # it is refused before anything is allocated
        with pytest.raises(CacheCorruptError, match="checkpoint"):
            slotfile.read(with_checkpoints, max_tokens=10)
        with pytest.raises(CacheCorruptError, match="checkpoint"):
            slotfile.read_header(with_checkpoints)

    @pytest.mark.parametrize(
        "checkpoints",
        [
            [StoredCheckpoint(0, "end", b"")],
            [StoredCheckpoint(8, "end", b"")],
            [StoredCheckpoint(-1, "end", b"")],
            [StoredCheckpoint(1, "", b"")],
            [StoredCheckpoint(1, "End", b"")],
            [StoredCheckpoint(1, "a.b", b"")],
            [StoredCheckpoint(1, "end", b""), StoredCheckpoint(1, "end", b"")],
            [StoredCheckpoint(1, "end", b""), StoredCheckpoint(1, "branch", b"")],
        ],
        ids=range(8),
    )
    def test_what_could_not_be_read_is_not_written(self, path: Path, checkpoints: list[StoredCheckpoint]) -> None:
        with pytest.raises(InternalError):
            slotfile.checkpoint_extras(checkpoints, n_tokens=7)
        with pytest.raises(InternalError):
            slotfile.write(path, make_record(extras={"checkpoint.8.end": Extra(b"")}))
        assert not path.exists()

    def test_the_caller_says_where_they_go(self, with_checkpoints: Path) -> None:
        asked: list[CheckpointPlace] = []
        memory = np.zeros(100, dtype=np.uint8)

        def room_for(place: CheckpointPlace) -> Any:
            asked.append(place)
            return None if place.position == 3 else memory[: place.size_bytes]

        record = slotfile.read(with_checkpoints, max_tokens=10, room_for=room_for)
        assert asked == list(reversed(self.PLACES))
        assert [each.position for each in record.checkpoints] == [2, 7]
        assert np.shares_memory(np.asarray(record.checkpoints[1].data), memory)
        assert memory[:6].tobytes() == b"seven\0"

    def test_memory_of_another_size_is_our_bug(self, with_checkpoints: Path) -> None:
        with pytest.raises(InternalError):
            slotfile.read(with_checkpoints, max_tokens=10, room_for=lambda place: np.zeros(99, dtype=np.uint8))

    def test_nothing_of_a_state_is_in_a_repr(self) -> None:
        assert "seven" not in repr(self.CHECKPOINTS[0])


class TestMismatch:
    def test_more_tokens_than_asked_for_are_not_loaded(self, written: Path) -> None:
        assert slotfile.read(written, max_tokens=7).n_tokens == 7
        with pytest.raises(CacheMismatchError) as caught:
            slotfile.read(written, max_tokens=6)
        assert (caught.value.field, caught.value.found) == ("n_tokens", 7)

    def test_a_newer_format_is_named_as_such(self, written: Path) -> None:
        resign(written, lambda header: header["__metadata__"].update(format_version="2"))
        with pytest.raises(CacheMismatchError) as caught:
            slotfile.read(written, max_tokens=10)
        assert (caught.value.field, caught.value.found) == ("format_version", 2)

    def test_required_extras_of_an_unknown_kind_are_refused_but_shown(self, path: Path) -> None:
        slotfile.write(path, make_record(extras={"sidecar.3": Extra(b"abc", required=True)}))
        with pytest.raises(CacheMismatchError) as caught:
            slotfile.read(path, max_tokens=10)
        assert caught.value.field == "tensor sidecar.3"
        assert slotfile.read_header(path).extra_bytes == {"sidecar.3": 3}

    @pytest.mark.parametrize("change", [lambda m: m.pop("layout.rope"), lambda m: m.update({"layout.new": "x"})])
    def test_another_set_of_layout_fields_is_another_layout(self, written: Path, change: Any) -> None:
        resign(written, lambda header: change(header["__metadata__"]))
        with pytest.raises(CacheMismatchError) as caught:
            slotfile.read(written, max_tokens=10)
        assert caught.value.field in ("rope", "new")

    @pytest.mark.parametrize("name", [item.name for item in fields(Layout)])
    def test_each_layout_field_counts(self, written: Path, name: str) -> None:
        there = getattr(LAYOUT, name)
        here = not there if isinstance(there, bool) else there + type(there)(1)
        change: dict[str, Any] = {name: here}
        layout = replace(LAYOUT, **change)
        for found in (slotfile.read_header(written), slotfile.read(written, max_tokens=10)):
            with pytest.raises(CacheMismatchError) as caught:
                slotfile.check_fits(found, path=written, fingerprint="f" * 64, layout=layout, n_ctx=7)
            assert (caught.value.field, caught.value.expected, caught.value.found) == (name, here, there)
            assert caught.value.path == str(written)

    def test_the_fingerprint_is_named_first_and_the_length_last(self, written: Path) -> None:
        found = slotfile.read_header(written)
        slotfile.check_fits(found, path=written, fingerprint="f" * 64, layout=LAYOUT, n_ctx=7)
        other = replace(LAYOUT, memory="hybrid", state_format=4)
        for fingerprint, layout, n_ctx, field in (
            ("e" * 64, other, 6, "fingerprint"),
            ("f" * 64, other, 6, "memory"),
            ("f" * 64, replace(LAYOUT, state_format=4), 6, "state_format"),
            ("f" * 64, LAYOUT, 6, "n_tokens"),
        ):
            with pytest.raises(CacheMismatchError) as caught:
                slotfile.check_fits(found, path=written, fingerprint=fingerprint, layout=layout, n_ctx=n_ctx)
            assert caught.value.field == field


class TestFiles:
    def test_missing(self, path: Path) -> None:
        with pytest.raises(CacheFileError, match="No such file"):
            slotfile.read(path, max_tokens=10)
        with pytest.raises(CacheFileError, match="No such file"):
            slotfile.write(path / "no" / "folder", make_record())

    def test_folders_are_refused_and_stay(self, tmp_path: Path) -> None:
        folder = tmp_path / "folder"
        folder.mkdir()
        for target in (folder, f"{folder}/", tmp_path / "folder" / ".."):
            with pytest.raises(CacheFileError, match="is a directory"):
                slotfile.write(target, make_record())
        with pytest.raises(CacheFileError, match="is a directory"):
            slotfile.read(folder, max_tokens=10)
        assert os.listdir(tmp_path) == ["folder"]
        assert os.listdir(folder) == []

    @pytest.mark.parametrize("exists", [True, False])
    def test_symbolic_links_are_neither_followed_nor_replaced(self, tmp_path: Path, path: Path, exists: bool) -> None:
        victim = tmp_path / "victim"
        if exists:
            slotfile.write(victim, make_record())
        path.symlink_to(victim)
        before = sorted(os.listdir(tmp_path)), victim.read_bytes() if exists else b""
        with pytest.raises(CacheFileError, match="symbolic link"):
            slotfile.write(path, make_record(n_tokens=3))
        with pytest.raises(CacheFileError, match="symbolic link"):
            slotfile.read(path, max_tokens=10)
        assert path.is_symlink()
        assert (sorted(os.listdir(tmp_path)), victim.read_bytes() if exists else b"") == before

    def test_a_folder_reached_through_a_link_is_fine(self, tmp_path: Path) -> None:
        (tmp_path / "real").mkdir()
        (tmp_path / "link").symlink_to(tmp_path / "real")
        slotfile.write(tmp_path / "link" / "slot", make_record())
        assert slotfile.read(tmp_path / "real" / "slot", max_tokens=10).n_tokens == 7

    def test_pipes_are_refused_without_waiting(self, path: Path) -> None:
        os.mkfifo(path)
        with pytest.raises(CacheFileError, match="not a regular file"):
            slotfile.read(path, max_tokens=10)
        with pytest.raises(CacheFileError, match="not a regular file"):
            slotfile.write(path, make_record())

    @pytest.mark.parametrize("name", ["a\0b", "\ud800", "x" * 300])
    def test_impossible_names(self, tmp_path: Path, name: str) -> None:
        for call in (slotfile.read_header, lambda path: slotfile.write(path, make_record())):
            with pytest.raises(CacheFileError):
                call(f"{tmp_path}/{name}")
        assert os.listdir(tmp_path) == []

    def test_a_name_of_full_length_works(self, tmp_path: Path) -> None:
        slotfile.write(tmp_path / ("x" * 255), make_record())
        assert os.listdir(tmp_path) == ["x" * 255]

    def test_relative_and_text_paths(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        slotfile.write("slot", make_record())
        assert slotfile.read_header(str(tmp_path / "slot")).n_tokens == 7

    @pytest.mark.parametrize("mask", [0, 0o022, 0o777])
    def test_only_the_owner_may_read_whatever_the_umask(self, path: Path, mask: int) -> None:
        before = os.umask(mask)
        try:
            slotfile.write(path, make_record())
        finally:
            os.umask(before)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600

    def test_replacing_a_file_others_could_read_makes_it_private(self, path: Path) -> None:
        path.write_bytes(b"old")
        path.chmod(0o666)
        slotfile.write(path, make_record())
        assert stat.S_IMODE(path.stat().st_mode) == 0o600

    def test_no_memory_for_the_state(self, written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def no_memory(*args: object, **kwargs: object) -> None:
            raise MemoryError

        monkeypatch.setattr(np, "empty", no_memory)
        with pytest.raises(CacheFileError, match="no memory"):
            slotfile.read(written, max_tokens=10)

    def test_all_failures_are_cache_data_errors(self, path: Path) -> None:
        with pytest.raises(CacheDataError):
            slotfile.read(path, max_tokens=1)

    def test_concurrent_writers_leave_one_whole_file(self, path: Path) -> None:
        records = [make_record(n_tokens=n, state=bytes([n]) * 300_000) for n in range(1, 9)]
        allowed = [facts(record) for record in records]
        slotfile.write(path, records[0])
        problems: list[Exception] = []
        start = threading.Barrier(len(records) + 1)

        def write(record: SlotRecord) -> None:
            try:
                start.wait()
                for _ in range(5):
                    slotfile.write(path, record)
            except Exception as error:  # noqa: BLE001  # whatever it is, the test must see it
                problems.append(error)

        threads = [threading.Thread(target=write, args=(record,)) for record in records]
        for thread in threads:
            thread.start()
        start.wait()
        while any(thread.is_alive() for thread in threads):
            assert facts(slotfile.read(path, max_tokens=10)) in allowed
        for thread in threads:
            thread.join()
        assert not problems
        assert os.listdir(path.parent) == [path.name]
        assert facts(slotfile.read(path, max_tokens=10)) in allowed
