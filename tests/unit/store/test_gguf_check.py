"""GGUF files: sound ones are summed up, and whatever llama.cpp would end the process on is refused before."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pyllamacache.errors import ModelFormatError, ModelNotFoundError
from pyllamacache.store.gguf_check import GgufSummary, check_gguf, check_model, is_gguf
from tests.fakes.gguf_file import (
    ARRAY,
    BOOL,
    F32,
    I32,
    STRING,
    U8,
    U16,
    U32,
    U64,
    Entry,
    GgufFile,
    Tensor,
    array,
    small_model,
)
from tests.models.malformed import MalformedFile, malformed_files


@pytest.fixture
def check(tmp_path: Path) -> Callable[[GgufFile | bytes], GgufSummary]:
    def check(file: GgufFile | bytes) -> GgufSummary:
        path = tmp_path / "model.gguf"
        path.write_bytes(file if isinstance(file, bytes) else file.to_bytes())
        return check_gguf(path)

    return check


Check = Callable[[GgufFile | bytes], GgufSummary]

# A vocabulary without byte tokens is usable for the text it has tokens for; what it throws, the shim catches.
FATAL = [file for file in malformed_files() if file.must_be_caught_first and file.name != "sentencepiece-without-bytes"]


class TestSummary:
    def test_a_sound_file_is_summed_up(self, check: Check) -> None:
        summary = check(small_model())
        assert summary.version == 3
        assert (summary.architecture, summary.name) == ("llama", "Small \u00e4")
        assert (summary.n_tensors, summary.n_params) == (4, 64 * 100 + 64 + 64 * 64 + 64)
        assert (summary.split_no, summary.split_count) == (0, 1)
        assert summary.context_length == 512
        assert summary.size_bytes == len(small_model().to_bytes())
        assert summary.metadata["llama.some.flag"] is True
        assert summary.metadata["llama.some.long"] == 2**63
        assert summary.metadata["tokenizer.chat_template"] == "x" * 200 + "…"
        assert "tokenizer.ggml.tokens" not in summary.metadata

    @pytest.mark.parametrize("kind", ["full", "sliding", "hybrid", "recurrent"])
    def test_the_tiny_models_are_sound(self, tiny_path: Callable[[str], Path], kind: str) -> None:
        summary, paths = check_model(tiny_path(kind))
        assert summary.n_params > 100_000
        assert paths == (tiny_path(kind),)

    def test_version_2_and_a_file_without_tensors(self, check: Check) -> None:
        assert check(replace(small_model(), version=2, tensors=())).n_tensors == 0

    def test_other_alignments(self, check: Check) -> None:
        for alignment in (32, 64, 4096):
            file = replace(small_model(), alignment=alignment)
            assert check(file.with_entry("general.alignment", U32, alignment)).n_tensors == 4

    def test_the_magic(self, tmp_path: Path) -> None:
        path = tmp_path / "file"
        for content, answer in ((b"GGUF", True), (b"GGU", False), (b"", False), (b"\x08\0\0\0\0\0\0\0", False)):
            path.write_bytes(content)
            assert is_gguf(path) is answer
        assert not is_gguf(tmp_path)
        assert not is_gguf(tmp_path / "missing")


class TestFiles:
    def test_missing(self, tmp_path: Path) -> None:
        for path in (tmp_path / "missing", tmp_path / "missing" / "below", Path("a\0b")):
            with pytest.raises(ModelNotFoundError):
                check_gguf(path)

    def test_a_folder(self, tmp_path: Path) -> None:
        with pytest.raises(ModelFormatError, match="it is a directory"):
            check_gguf(tmp_path)

    def test_a_pipe_does_not_block(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "pipe")
        with pytest.raises(ModelFormatError, match="not a regular file"):
            check_gguf(tmp_path / "pipe")

    def test_links_are_followed(self, tmp_path: Path) -> None:
        """The hub's cache is made of links."""
        (tmp_path / "blob").write_bytes(small_model().to_bytes())
        (tmp_path / "model.gguf").symlink_to(tmp_path / "blob")
        assert check_gguf(tmp_path / "model.gguf").n_tensors == 4

    def test_no_permission(self, tmp_path: Path) -> None:
        code = (
            "import os, sys; from pyllamacache.store.gguf_check import check_gguf\n"
            "if os.geteuid() == 0: os.setuid(65534)\n"
            "try: check_gguf(sys.argv[1])\n"
            "except ValueError as error: print(error)"
        )
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        command = [sys.executable, "-c", code, "/proc/1/mem" if os.geteuid() else str(tmp_path / "secret")]
        (tmp_path / "secret").write_bytes(b"GGUF")
        (tmp_path / "secret").chmod(0)
        result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=20, check=True)
        assert "Permission denied" in result.stdout


class TestStructure:
    @pytest.mark.parametrize(
        ("content", "problem"),
        [
            (b"", "empty"),
            (b"GG", "ends inside its first bytes"),
            (b"GGUF", "ends inside its version"),
            (b"PK\3\4" + bytes(100), "does not begin with GGUF"),
            (bytes(100), "does not begin with GGUF"),
            (b"GGUF" + struct.pack("<I", 1) + bytes(100), "version is 1"),
            (b"GGUF" + struct.pack("<I", 0) + bytes(100), "byte order"),
            (b"GGUF" + struct.pack(">I", 3) + bytes(100), "byte order"),
            (b"GGUF" + struct.pack("<I", 4) + bytes(100), "version is 4"),
            (b"GGUF" + struct.pack("<IQQ", 3, 2**63, 0), "tensors are too many"),
            (b"GGUF" + struct.pack("<IQQ", 3, 1, 0), "tensors are too many"),
            (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**64 - 1), "keys are too many"),
        ],
    )
    def test_the_first_bytes(self, check: Check, content: bytes, problem: str) -> None:
        with pytest.raises(ModelFormatError, match=problem):
            check(content)

    def test_every_truncation_is_refused(self, tmp_path: Path) -> None:
        file = replace(small_model(), tensors=(Tensor("blk.0.attn_norm.weight", (8,)),)).without(
            "tokenizer.chat_template"
        )
        path = tmp_path / "model.gguf"
        path.write_bytes(file.to_bytes())
        check_gguf(path)
        for length in reversed(range(path.stat().st_size)):
            os.truncate(path, length)
            with pytest.raises(ModelFormatError):
                check_gguf(path)

    @pytest.mark.parametrize(
        ("entry", "problem"),
        [
            (Entry.of("", U32, 1), "empty"),
            (Entry.of(b"llama.block_count\0", U32, 1), "control characters"),
            (Entry.of("a\x1b[31m", U32, 1), "control characters"),
            (Entry.of("k" * 1025, U32, 1), "1025 bytes long"),
            (Entry("k", 13, b""), "unknown type 13"),
            (Entry("k", 2**32 - 1, b""), "unknown type"),
            (Entry("k", STRING, struct.pack("<Q", 2**63)), "ends inside k"),
            (Entry("k", STRING, struct.pack("<Q", 2**64 - 1)), "ends inside k"),
            (Entry("k", ARRAY, struct.pack("<IQ", ARRAY, 1)), "unknown item type 9"),
            (Entry("k", ARRAY, struct.pack("<IQ", 13, 0)), "unknown item type 13"),
            (Entry("k", ARRAY, array(U8, [1], 2**62)), "ends inside k"),
            (Entry("k", ARRAY, array(U64, [1], 2**61)), "ends inside k"),
            (Entry("k", ARRAY, array(U32, [1], 1000)), "ends inside k"),
            (Entry("k", ARRAY, array(STRING, ["a"], 2**61)), "too long"),
            (Entry("k", ARRAY, array(STRING, ["a"], 50)), "too long"),
            (Entry("k", ARRAY, array(STRING, ["a" * 20, "b"], 3)), "ends inside k"),
            (Entry("k", ARRAY, array(STRING, ["a" * (1 << 16)])), "more than"),
        ],
    )
    def test_entries(self, check: Check, entry: Entry, problem: str) -> None:
        file = replace(small_model(), tensors=())
        with pytest.raises(ModelFormatError, match=problem):
            check(replace(file, entries=(*file.entries, entry)))

    def test_a_key_that_appears_twice(self, check: Check) -> None:
        file = small_model()
        with pytest.raises(ModelFormatError, match=r"'llama\.block_count' appears twice"):
            check(replace(file, entries=(*file.entries, Entry.of("llama.block_count", U32, 2))))

    @pytest.mark.parametrize("value", [0, 3, 48, 2**32 - 1])
    def test_alignment_that_is_no_power_of_two(self, check: Check, value: int) -> None:
        with pytest.raises(ModelFormatError, match="power of two"):
            check(small_model().with_entry("general.alignment", U32, value))

    def test_alignment_of_another_type(self, check: Check) -> None:
        for entry in (Entry.of("general.alignment", U64, 32), Entry("general.alignment", ARRAY, array(U32, [32]))):
            with pytest.raises(ModelFormatError, match="uint32"):
                check(small_model().with_raw(entry))

    def test_tensors_that_cannot_be_mapped(self, check: Check) -> None:
        file = replace(small_model(), alignment=8).with_entry("general.alignment", U32, 8)
        file = replace(file, tensors=(Tensor("a.weight", (2, 1)), Tensor("b.weight", (2, 1))))
        with pytest.raises(ModelFormatError, match="mapped to memory"):
            check(file)

    @pytest.mark.parametrize(
        ("tensor", "problem"),
        [
            (Tensor("", (1,)), "empty"),
            (Tensor(b"a\0b", (1,)), "control characters"),
            (Tensor("a" * 64, (1,)), "64 bytes long"),
            (Tensor("output_norm.weight", (1,)), "appears twice"),
            (Tensor("a.weight", (1, 1, 1, 1, 1)), "5 dimensions"),
            (Tensor("a.weight", (0,)), "impossible shape"),
            (Tensor("a.weight", (2**64 - 1,), n_bytes=4), "impossible shape"),
            (Tensor("a.weight", (2**32, 2**32, 0), n_bytes=4), "impossible shape"),
            (Tensor("a.weight", (2**32, 2**31), n_bytes=4), "impossible shape"),
            (Tensor("a.weight", (2**31, 2**31), n_bytes=4), "cut off"),
            (Tensor("a.weight", (32, 1), 4, n_bytes=20), "unknown type 4"),
            (Tensor("a.weight", (32, 1), 31, n_bytes=20), "unknown type 31"),
            (Tensor("a.weight", (32, 1), 43, n_bytes=20), "unknown type 43"),
            (Tensor("a.weight", (32, 1), 2**32 - 1, n_bytes=20), "unknown type"),
            (Tensor("a.weight", (33, 1), 8, n_bytes=34), "rows of 33"),
            (Tensor("a.weight", (128, 1), 12, n_bytes=144), "rows of 128"),
            (Tensor("a.weight", (1,), offset=0), "instead of"),
            (Tensor("a.weight", (1,), offset=2**64 - 32), "instead of"),
        ],
    )
    def test_tensors(self, check: Check, tensor: Tensor, problem: str) -> None:
        with pytest.raises(ModelFormatError, match=problem):
            check(small_model().with_tensor(tensor))

    @pytest.mark.parametrize(
        ("name", "shape", "kind"),
        [
            ("blk.1.attn_norm.weight", (32,), 1),
            ("blk.1.attn_norm.weight", (32, 1), 30),
            ("blk.1.attn_q.bias", (32,), 1),
            ("blk.1.ssm_a", (1, 32), 1),
            ("blk.1.ssm_conv1d.weight", (4, 32), 1),
            ("blk.1.attn_q.weight", (32, 32), 24),
            ("blk.1.attn_q.weight", (32, 32), 26),
            ("blk.1.attn_q.weight", (32, 32), 28),
            ("blk.1.attn_q.weight", (32, 32), 9),
        ],
    )
    def test_types_that_no_operation_takes(self, check: Check, name: str, shape: tuple[int, ...], kind: int) -> None:
        with pytest.raises(ModelFormatError, match=f"tensor {name} has the type {kind}"):
            check(small_model().with_tensor(Tensor(name, shape, kind, n_bytes=64 * 64 * 8)))

    def test_types_that_tables_may_have(self, check: Check) -> None:
        assert check(small_model().with_tensor(Tensor("d2t", (32,), 27, n_bytes=256))).n_tensors == 5

    def test_a_gated_delta_layer_without_its_projection(self, check: Check) -> None:
        """llama.cpp takes the projection for optional and reads it all the same."""
        with pytest.raises(ModelFormatError, match=r"blk\.1\.attn_qkv\.weight"):
            check(small_model().with_tensor(Tensor("blk.1.ssm_alpha.weight", (32, 4))))


class TestMeasured:
    """Files that were seen to end a process that runs llama.cpp."""

    @pytest.mark.parametrize("file", FATAL, ids=[file.name for file in FATAL])
    def test_what_llama_cpp_does_not_survive(self, tmp_path: Path, file: MalformedFile) -> None:
        with pytest.raises(ModelFormatError):
            check_gguf(file.write(tmp_path))


class TestRules:
    @pytest.mark.parametrize("value", ["", "a b", "llama\0x", "../x", "x" * 65])
    def test_names_of_architectures(self, check: Check, value: str) -> None:
        with pytest.raises(ModelFormatError, match=r"general\.architecture"):
            check(small_model().with_entry("general.architecture", STRING, value))

    def test_no_architecture(self, check: Check) -> None:
        for file in (
            small_model().without("general.architecture"),
            small_model().with_entry("general.architecture", U32, 1),
        ):
            with pytest.raises(ModelFormatError, match=r"general\.architecture"):
                check(file)

    @pytest.mark.parametrize(
        ("key", "kind", "value"),
        [
            ("block_count", U32, 0),
            ("block_count", U32, 513),
            ("block_count", F32, 2.0),
            ("block_count", STRING, "2"),
            ("context_length", U32, 0),
            ("context_length", U32, 2**31),
            ("embedding_length", U32, 0),
            ("vocab_size", U32, 2**32 - 1),
            ("expert_count", U32, 1025),
            ("expert_count", U32, 8),
            ("expert_used_count", U32, 1),
            ("expert_group_count", U32, 1),
            ("nextn_predict_layers", U32, 3),
            ("pooling_type", U32, 9),
            ("full_attention_interval", U32, 0),
            ("attention.head_count", I32, -1),
            ("attention.head_count_kv", U32, 3),
            ("attention.head_count_kv", U32, 8),
            ("attention.key_length", U32, 0),
            ("attention.key_length", U32, 15),
            ("attention.head_count", U32, 65),
            ("attention.sliding_window", U32, 2**31 - 1),
            ("attention.causal", BOOL, False),
            ("attention.layer_norm_rms_epsilon", F32, -1.0),
            ("attention.layer_norm_rms_epsilon", F32, float("inf")),
            ("rope.freq_base", F32, float("nan")),
            ("rope.dimension_count", U32, 0),
            ("rope.dimension_count", U32, 15),
            ("rope.dimension_count", U32, 18),
            ("rope.scaling.type", STRING, "cubic"),
            ("rope.scaling.type", U32, 1),
            ("classifier.activation", STRING, "relu"),
            ("attention.value_length", U32, 0),
            ("wkv.head_size", U32, 63),
        ],
    )
    def test_values_that_llama_cpp_cannot_act_on(self, check: Check, key: str, kind: int, value: Any) -> None:
        with pytest.raises(ModelFormatError):
            check(small_model().with_entry(f"llama.{key}", kind, value))

    def test_arrays_are_checked_layer_by_layer(self, check: Check) -> None:
        with pytest.raises(ModelFormatError, match="share 3 KV heads"):
            check(small_model().with_raw(Entry("llama.attention.head_count_kv", ARRAY, array(U32, [2, 3]))))
        heads = small_model().with_raw(Entry("llama.attention.head_count", ARRAY, array(U32, [4, 0])))
        assert check(heads).n_tensors == 4

    def test_a_mixture_of_experts(self, check: Check) -> None:
        def model(n_experts: int, n_used: int, n_groups: int, n_groups_used: int) -> GgufFile:
            return (
                small_model()
                .with_entry("llama.expert_count", U32, n_experts)
                .with_entry("llama.expert_used_count", U32, n_used)
                .with_entry("llama.expert_group_count", U32, n_groups)
                .with_entry("llama.expert_group_used_count", U32, n_groups_used)
            )

        assert check(model(8, 2, 4, 2))
        for numbers in ((8, 9, 4, 2), (8, 2, 3, 2), (8, 2, 4, 4), (8, 2, 8, 2), (8, 0, 4, 2)):
            with pytest.raises(ModelFormatError):
                check(model(*numbers))

    @pytest.mark.parametrize("pattern", [Entry.of("p", U32, 1), Entry("p", ARRAY, array(BOOL, [False, False]))])
    def test_a_sliding_model_without_a_sliding_layer(self, check: Check, pattern: Entry) -> None:
        file = small_model().with_raw(replace(pattern, key="llama.attention.sliding_window_pattern"))
        assert check(file)
        with pytest.raises(ModelFormatError, match="no layer with a window"):
            check(file.with_entry("llama.attention.sliding_window", U32, 32))

    def test_zero_for_what_an_architecture_does_not_have(self, check: Check) -> None:
        """llama.cpp writes these when it saves a model."""
        names = ("ssm.conv_kernel", "ssm.inner_size", "ssm.group_count", "wkv.head_size", "attention.key_length_mla")
        file = small_model().with_entry("llama.pooling_type", U32, 2**32 - 1)
        for name in names:
            file = file.with_entry(f"llama.{name}", U32, 0)
        file = file.with_raw(Entry("llama.rope.dimension_sections", ARRAY, array(I32, [0, 0, 0, 0])))
        assert check(file)

    @pytest.mark.parametrize(
        ("architecture", "key"),
        [("mamba2", "ssm.conv_kernel"), ("falcon-h1", "ssm.group_count"), ("rwkv7", "wkv.head_size")],
    )
    def test_zero_for_what_an_architecture_divides_by(self, check: Check, architecture: str, key: str) -> None:
        file = small_model().with_entry("general.architecture", STRING, architecture)
        with pytest.raises(ModelFormatError, match=key):
            check(file.with_entry(f"{architecture}.{key}", U32, 0))

    @pytest.mark.parametrize("sections", [[-1, 4, 0, 0], [8, 8, 0, 0]])
    def test_rope_sections(self, check: Check, sections: list[int]) -> None:
        key = "llama.rope.dimension_sections"
        assert check(small_model().with_raw(Entry(key, ARRAY, array(I32, [4, 2, 2, 0]))))
        with pytest.raises(ModelFormatError, match="no parts of 8 pairs"):
            check(small_model().with_raw(Entry(key, ARRAY, array(I32, sections))))

    def test_an_encoder_may_be_looked_at(self, check: Check) -> None:
        file = small_model().with_entry("general.architecture", STRING, "gemma-embedding")
        assert check(file.with_entry("gemma-embedding.attention.causal", BOOL, False))

    def test_state_space_sizes(self, check: Check) -> None:
        def model(n_inner: int, n_heads: int, n_groups: int) -> GgufFile:
            file = small_model().with_entry("llama.ssm.inner_size", U32, n_inner)
            return file.with_entry("llama.ssm.time_step_rank", U32, n_heads).with_entry(
                "llama.ssm.group_count", U32, n_groups
            )

        assert check(model(128, 8, 2))
        for numbers in ((128, 8, 3), (129, 8, 1), (128, 6, 4)):
            with pytest.raises(ModelFormatError):
                check(model(*numbers))


class TestVocabulary:
    def vocabulary(self, tokens: list[str | bytes]) -> GgufFile:
        file = small_model().without("tokenizer.ggml.scores").without("tokenizer.ggml.token_type")
        return file.with_raw(Entry("tokenizer.ggml.tokens", ARRAY, array(STRING, tokens)))

    @pytest.mark.parametrize("n_tokens", [3, 300, 30_000])
    def test_a_token_that_appears_twice(self, check: Check, n_tokens: int) -> None:
        tokens: list[str | bytes] = [f"token {number}" for number in range(n_tokens)]
        assert check(self.vocabulary(tokens))
        tokens[-1] = tokens[1]
        with pytest.raises(ModelFormatError, match=f"tokens 1 and {n_tokens - 1} of"):
            check(self.vocabulary(tokens))

    def test_tokens_that_look_like_lengths(self, check: Check) -> None:
        """The fast scan must not take text for the start of a string."""
        tokens: list[str | bytes] = [
            (b"\x05" + bytes(7)) * (number % 7) + str(number).encode() + bytes(number % 9) for number in range(20_000)
        ]
        assert check(self.vocabulary(tokens))
        tokens[19_999] = tokens[10_000]
        with pytest.raises(ModelFormatError, match="tokens 10000 and 19999"):
            check(self.vocabulary(tokens))

    def test_long_tokens(self, check: Check) -> None:
        tokens: list[str | bytes] = [b"x" * number for number in range(1, 700)]
        assert check(self.vocabulary(tokens))
        with pytest.raises(ModelFormatError, match="tokens 599 and 699"):
            check(self.vocabulary([*tokens, b"x" * 600]))

    def test_empty_tokens_are_renamed(self, check: Check) -> None:
        assert check(self.vocabulary(["a", "", "", "b"]))
        assert check(self.vocabulary(["a", "", "[EMPTY_0]", "[EMPTY_7]", "[EMPTY_01]", "[EMPTY_]"]))
        for tokens in (["[EMPTY_2]", "a", ""], ["", "a", "[EMPTY_0]"]):
            with pytest.raises(ModelFormatError, match="tokens 0 and 2"):
                check(self.vocabulary([*tokens, *(f"token {number}" for number in range(200))]))

    def test_no_tokens(self, check: Check) -> None:
        with pytest.raises(ModelFormatError, match="0 string items"):
            check(self.vocabulary([]))
        with pytest.raises(ModelFormatError, match="uint32 items"):
            check(small_model().with_raw(Entry("tokenizer.ggml.tokens", ARRAY, array(U32, [1]))))

    def test_byte_tokens_in_a_tokenizer_of_words(self, check: Check) -> None:
        tokens: list[str | bytes] = [f"token {number}" for number in range(30_000)]
        file = self.vocabulary(tokens).with_entry("tokenizer.ggml.model", STRING, "bert")

        def types(last: int) -> GgufFile:
            return file.with_raw(Entry("tokenizer.ggml.token_type", ARRAY, array(I32, [1] * 29_999 + [last])))

        assert check(types(3))
        with pytest.raises(ModelFormatError, match="bytes"):
            check(types(6))

    def test_a_pre_tokenizer_of_another_tokenizer(self, check: Check) -> None:
        with pytest.raises(ModelFormatError, match="whitespace"):
            check(small_model().with_entry("tokenizer.ggml.pre", STRING, "whitespace"))

    @pytest.mark.parametrize("name", ["scores", "token_type"])
    def test_fewer_scores_or_types_than_tokens(self, check: Check, name: str) -> None:
        kind = F32 if name == "scores" else I32
        with pytest.raises(ModelFormatError, match="99 items for 100 tokens"):
            check(small_model().with_raw(Entry(f"tokenizer.ggml.{name}", ARRAY, array(kind, [0] * 99))))

    def test_a_token_that_is_added_must_exist(self, check: Check) -> None:
        file = small_model().with_entry("tokenizer.ggml.model", STRING, "rwkv").without("tokenizer.ggml.bos_token_id")
        assert check(file)
        with pytest.raises(ModelFormatError, match="bos"):
            check(file.with_entry("tokenizer.ggml.add_bos_token", BOOL, True))
        with pytest.raises(ModelFormatError, match="eos"):
            check(file.with_entry("tokenizer.ggml.add_eos_token", BOOL, True))
        # 11 where the file names none, of which there are too few tokens here.
        small = self.vocabulary(["a", "b"]).without("tokenizer.ggml.bos_token_id")
        small = small.with_entry("tokenizer.ggml.model", STRING, "gpt2").with_entry(
            "tokenizer.ggml.add_bos_token", BOOL, True
        )
        with pytest.raises(ModelFormatError, match="bos"):
            check(small)
        assert check(small.with_entry("tokenizer.ggml.bos_token_id", U32, 1))


class TestSplits:
    def parts(self, folder: Path, count: int = 3) -> list[Path]:
        paths = []
        for number in range(count):
            entries = (Entry.of("split.no", U16, number), Entry.of("split.count", U16, count))
            base = small_model() if number == 0 else GgufFile(tensors=(Tensor(f"blk.{number}.attn_q.weight", (8, 8)),))
            file = replace(base, entries=(*base.entries, *entries))
            file = file.with_entry("split.tensors.count", I32, 4 + count - 1)
            path = folder / f"model-{number + 1:05d}-of-{count:05d}.gguf"
            path.write_bytes(file.to_bytes())
            paths.append(path)
        return paths

    def test_all_parts_in_order(self, tmp_path: Path) -> None:
        paths = self.parts(tmp_path)
        summary, found = check_model(paths[0])
        assert (summary.split_no, summary.split_count, summary.n_tensors) == (0, 3, 6)
        assert summary.size_bytes == sum(path.stat().st_size for path in paths)
        assert found == tuple(paths)
        assert check_gguf(paths[2]).split_no == 2

    def test_another_part_than_the_first(self, tmp_path: Path) -> None:
        with pytest.raises(ModelFormatError, match="give its first part"):
            check_model(self.parts(tmp_path)[1])

    def test_a_missing_part(self, tmp_path: Path) -> None:
        paths = self.parts(tmp_path)
        paths[1].unlink()
        with pytest.raises(ModelNotFoundError, match="00002-of-00003"):
            check_model(paths[0])

    def test_a_part_in_the_wrong_place(self, tmp_path: Path) -> None:
        paths = self.parts(tmp_path)
        paths[2].write_bytes(paths[1].read_bytes())
        with pytest.raises(ModelFormatError, match="not part 3 of 3"):
            check_model(paths[0])

    def test_a_part_with_other_tensors(self, tmp_path: Path) -> None:
        paths = self.parts(tmp_path)
        base = GgufFile(entries=(Entry.of("split.no", U16, 2), Entry.of("split.count", U16, 3)))
        paths[2].write_bytes(base.to_bytes())
        with pytest.raises(ModelFormatError, match="do not hold the 6 tensors"):
            check_model(paths[0])

    def test_a_renamed_first_part(self, tmp_path: Path) -> None:
        path = self.parts(tmp_path)[0].rename(tmp_path / "model.gguf")
        with pytest.raises(ModelFormatError, match=r"-00001-of-00003\.gguf"):
            check_model(path)

    def test_numbers_of_another_type(self, check: Check) -> None:
        """llama.cpp ends the process on these."""
        for key in ("split.no", "split.count"):
            with pytest.raises(ModelFormatError, match="uint16"):
                check(small_model().with_entry(key, U32, 0))
        with pytest.raises(ModelFormatError, match="part 3 of 2"):
            check(small_model().with_entry("split.no", U16, 2).with_entry("split.count", U16, 2))
