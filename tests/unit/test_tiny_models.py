"""The tiny models themselves: same bytes for the same spec, readable, small, written once and whole or not at all."""

from __future__ import annotations

import dataclasses
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader

from tests.models import (
    TOKENS,
    EncoderSpec,
    FullSpec,
    HybridSpec,
    ModelCache,
    RecurrentSpec,
    SlidingSpec,
    TinySpec,
    bytes_of,
    default_specs,
    hybrid_27b_state,
    write_model,
)
from tests.models import writer as writer_module
from tests.models.image import encode, image_of, small_images
from tests.models.malformed import malformed_files
from tests.models.tensors import tensors
from tests.models.vocabulary import MERGES

ALL_SPECS = (*default_specs(), EncoderSpec(), FullSpec(vocabulary="none"))


def named(spec: TinySpec) -> str:
    return f"{spec.kind}-{spec.vocabulary}"


@pytest.mark.parametrize("spec", ALL_SPECS, ids=named)
def test_the_same_spec_gives_the_same_bytes(spec: TinySpec, tmp_path: Path) -> None:
    write_model(spec, tmp_path / "a.gguf")
    write_model(dataclasses.replace(spec), tmp_path / "b.gguf")
    assert (tmp_path / "a.gguf").read_bytes() == (tmp_path / "b.gguf").read_bytes()


@pytest.mark.parametrize("spec", default_specs(), ids=named)
def test_another_seed_gives_other_weights_in_the_same_geometry(spec: TinySpec, tmp_path: Path) -> None:
    write_model(spec, tmp_path / "a.gguf")
    write_model(dataclasses.replace(spec, seed=1), tmp_path / "b.gguf")
    first, second = GGUFReader(tmp_path / "a.gguf"), GGUFReader(tmp_path / "b.gguf")
    for a, b in zip(first.tensors, second.tensors, strict=True):
        assert (a.name, list(a.shape)) == (b.name, list(b.shape))
        is_drawn = not a.name.endswith((".ssm_a", ".ssm_dt.bias"))
        assert np.array_equal(a.data, b.data) != is_drawn, a.name


@pytest.mark.parametrize("spec", ALL_SPECS, ids=named)
def test_a_file_is_small_and_says_what_it_is(spec: TinySpec, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_model(spec, path)
    assert path.stat().st_size < 2_000_000
    reader = GGUFReader(path)
    assert reader.fields["general.architecture"].contents() == spec.architecture
    assert reader.fields[f"{spec.architecture}.block_count"].contents() == spec.n_layer
    assert reader.fields[f"{spec.architecture}.context_length"].contents() == spec.n_ctx_train
    assert ("tokenizer.ggml.tokens" in reader.fields) == (spec.vocabulary == "bpe")
    assert all(tensor.tensor_type == GGMLQuantizationType.F32 for tensor in reader.tensors)
    assert all(np.isfinite(tensor.data).all() for tensor in reader.tensors)


def test_parameters_reach_the_file(tmp_path: Path) -> None:
    write_model(SlidingSpec(window=7, n_layer=6, full_every=3), tmp_path / "sliding.gguf")
    fields = GGUFReader(tmp_path / "sliding.gguf").fields
    assert fields["gemma3.attention.sliding_window"].contents() == 7
    assert fields["gemma3.attention.sliding_window_pattern"].contents() == 3


@pytest.mark.parametrize("spec", ALL_SPECS, ids=named)
def test_the_hand_made_encoder_agrees_with_the_gguf_package(spec: TinySpec, tmp_path: Path) -> None:
    write_model(spec, tmp_path / "model.gguf")
    assert encode(image_of(spec)) == (tmp_path / "model.gguf").read_bytes()


@pytest.mark.parametrize("kind", [FullSpec, HybridSpec])
def test_a_readable_model_says_nothing_but_printable_ascii(kind: type[TinySpec], tiny_models: Any) -> None:
    from pyllamacache import Engine

    model = tiny_models(kind(is_readable=True))
    with Engine(model, n_ctx=512, n_slots=1, n_threads=1, progress=False) as engine:
        for prompt in ("one", "two", "three"):
            text = engine.complete(prompt, max_tokens=60).text
            assert text
            assert all(" " <= character <= "~" or character == "\n" for character in text), text


def test_no_two_specs_share_a_file() -> None:
    specs: list[TinySpec] = [*ALL_SPECS, *default_specs(1), hybrid_27b_state()]
    specs += [FullSpec(n_layer=2), FullSpec(n_ctx_train=128), SlidingSpec(window=16), HybridSpec(state_size=64)]
    specs += [FullSpec(control_scale=1.0), FullSpec(add_bos=True), RecurrentSpec(groups=2)]
    specs += [FullSpec(is_readable=True)]
    assert len({spec.file_name for spec in specs}) == len(specs)


def test_the_27b_shape_has_the_state_of_the_real_one() -> None:
    spec = hybrid_27b_state()
    assert spec.state_bytes == 48 * (48 * 128 * 128 + 3 * 10240) * 4
    assert round(spec.state_bytes / 2**20, 2) == 149.62
    assert sum(tensor.nbytes for tensor in tensors(spec)) < 160e6


# ---- vocabulary -------------------------------------------------------------------------------------------------


def test_the_vocabulary_covers_all_bytes_and_all_merges() -> None:
    assert len(TOKENS) == len(set(TOKENS.texts)) == 320
    assert bytes_of(list(range(256))) == bytes(range(256))
    known = set(TOKENS.texts)
    for merge in MERGES:
        left, right = merge.split(" ")
        assert {left, right, left + right} <= known


def test_control_tokens_spell_nothing() -> None:
    assert bytes_of([72, 105, *TOKENS.control_ids]) == b"Hi"
    assert bytes_of([TOKENS.id_of("<think>")]) == b"<think>"


# ---- cache ------------------------------------------------------------------------------------------------------


def test_a_model_is_written_once(tmp_path: Path) -> None:
    cache = ModelCache(tmp_path / "not" / "there" / "yet")
    path = cache.path(FullSpec())
    before = path.stat()
    assert ModelCache(cache.folder).path(FullSpec()) == path
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert cache.path(FullSpec(seed=1)) != path


def test_a_failed_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail_half_way(spec: TinySpec, path: Path) -> None:
        path.write_bytes(b"GGUF")
        raise OSError("disk full")

    monkeypatch.setattr(writer_module, "write_model", fail_half_way)
    with pytest.raises(OSError, match="disk full"):
        ModelCache(tmp_path).path(FullSpec())
    assert list(tmp_path.iterdir()) == []


def test_writers_at_once_get_one_whole_file(tmp_path: Path) -> None:
    cache, spec, seen = ModelCache(tmp_path), FullSpec(), []
    threads = [threading.Thread(target=lambda: seen.append(cache.path(spec).read_bytes())) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(seen) == 6
    assert set(seen) == {encode(image_of(spec))}
    assert [path.name for path in tmp_path.iterdir()] == [spec.file_name]


# ---- malformed files --------------------------------------------------------------------------------------------


def test_malformed_files_are_small_different_and_named_once(tmp_path: Path) -> None:
    files = malformed_files()
    sound = {encode(image) for image in small_images().values()}
    assert len({file.name for file in files}) == len(files) > 200
    for file in files:
        data = file.build()
        assert data not in sound, file.name
        assert data is None or len(data) < 65_536, file.name
        assert file.write(tmp_path).exists() == (data is not None)


def test_what_native_code_does_not_survive_has_a_check() -> None:
    assert [file.name for file in malformed_files() if file.must_be_caught_first != bool(file.check)] == []
