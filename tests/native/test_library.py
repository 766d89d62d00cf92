"""Loading, facts, log and the guard: what the rest of native/ stands on."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

import pytest

from pyllamacache.errors import ClosedError, CpuUnsupportedError
from pyllamacache.native import library

ROOT = Path(__file__).parents[2]


def test_what_was_compiled_in_is_what_the_checkout_says() -> None:
    info = library.info()
    series = [
        line.removesuffix(".patch")
        for line in (ROOT / "patches" / "series").read_text().splitlines()
        if line and not line.startswith("#")
    ]
    assert [name.removesuffix(".patch") for name in info.patches] == series
    assert info.llama_tag == "b11549"
    assert len(info.source_digest) == 64
    assert int(info.source_digest, 16)


def test_a_cpu_without_a_needed_instruction_set_is_refused_before_loading() -> None:
    with pytest.raises(CpuUnsupportedError, match="avx512f") as caught:
        library.check_cpu(("avx2", "avx512f"), frozenset({"avx2", "fma"}))
    assert caught.value.missing == ("avx512f",)
    library.check_cpu(("avx2",), frozenset({"avx2", "fma"}))
    library.check_cpu(("avx2",), None)


def test_there_is_a_cpu_device() -> None:
    assert any("CPU" in device.name for device in library.devices())


def test_native_records_reach_logging_with_their_level(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    from pyllamacache.errors import ModelLoadError
    from pyllamacache.native.model import ModelParams, NativeModel

    with caplog.at_level(logging.WARNING, logger="pyllamacache.llama"), pytest.raises(ModelLoadError) as caught:
        NativeModel(tmp_path / "none.gguf", ModelParams())
    assert caught.value.log
    assert any(record.levelno >= logging.WARNING for record in caplog.records)
    assert library.collect_log() == ""


def test_a_guard_waits_for_users_and_then_refuses() -> None:
    guard = library.Guard("thing")
    closed = threading.Event()
    order: list[str] = []

    def close() -> None:
        order.append(f"closed {guard.close()}")
        closed.set()

    with guard:
        thread = threading.Thread(target=close)
        thread.start()
        while not guard.is_closed:  # the closer has marked it and waits for us
            assert thread.is_alive()
        with pytest.raises(ClosedError), guard:
            pass
        order.append("used")
        assert not closed.is_set()
    thread.join()
    assert order == ["used", "closed True"]
    assert guard.close() is False


def test_every_declared_function_of_the_shim_has_a_definition() -> None:
    """cdef.h and shim.h agree: the compiler checks signatures, this checks that nothing is declared in one only."""
    import re

    native = ROOT / "pyllamacache" / "native"

    def names(text: str) -> set[str]:
        return set(re.findall(r"\b(plc_[a-z_]+)\(", re.sub(r"/\*.*?\*/|//[^\n]*", "", text, flags=re.DOTALL)))

    declared = names((native / "cdef.h").read_text()) - {"plc_on_progress"}
    assert declared == names((native / "shim.h").read_text())
    assert declared <= names("".join(path.read_text() for path in native.glob("*.cpp")))
