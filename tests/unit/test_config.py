"""Settings checked against each other, sizes in words, budgets, layouts compared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyllamacache.config import MAX_BYTES, CacheBudget, CacheConfig, EngineSettings, Layout, resolve_flash_attention
from pyllamacache.errors import ConfigError

GOOD: dict[str, Any] = {
    "n_ctx_train": 2048,
    "n_ctx": 1024,
    "n_slots": 4,
    "kv_tokens": None,
    "n_batch": 512,
    "n_ubatch": 128,
    "n_threads": None,
    "type_k": "f16",
    "type_v": "f16",
    "flash_attention": "auto",
    "adapters": (),
    "exact": False,
    "offload_kqv": True,
    "rope_scaling": None,
    "rope_freq_base": 0.0,
    "rope_freq_scale": 0.0,
}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n_ctx", 0),
        ("n_ctx", 4096),
        ("n_ctx", 12.0),
        ("n_slots", 0),
        ("n_slots", 256),
        ("n_slots", True),
        ("kv_tokens", 512),
        ("n_batch", 0),
        ("n_batch", 3),
        ("n_ubatch", 0),
        ("n_threads", 0),
        ("type_k", "f17"),
        ("type_v", None),
        ("flash_attention", "maybe"),
        ("adapters", "file"),
        ("adapters", ["no such file"]),
        ("exact", 1),
        ("offload_kqv", None),
        ("rope_scaling", "cubic"),
        ("rope_freq_base", -1.0),
        ("rope_freq_base", 1e-300),
        ("rope_freq_scale", float("nan")),
        ("rope_freq_scale", 1e300),
    ],
)
def test_a_setting_out_of_range_is_named(field: str, value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineSettings.check(**{**GOOD, field: value})
    assert caught.value.field == field


def test_settings_that_exclude_each_other_are_named() -> None:
    with pytest.raises(ConfigError, match="kv_tokens"):
        EngineSettings.check(**{**GOOD, "exact": True, "kv_tokens": 4096})
    with pytest.raises(ConfigError, match="n_ctx"):
        EngineSettings.check(**{**GOOD, "n_ctx": 4096, "rope_scaling": "none"})
    with pytest.raises(ConfigError, match="type_v"):
        EngineSettings.check(**{**GOOD, "flash_attention": "off", "type_v": "q8_0"})


def test_defaults_follow_the_model_and_batches_are_whole_chunks() -> None:
    settings = EngineSettings.check(**{**GOOD, "n_ctx": None, "n_batch": 500})
    assert (settings.n_ctx, settings.kv_tokens, settings.n_batch, settings.n_ubatch) == (2048, 2048, 384, 128)
    assert EngineSettings.check(**{**GOOD, "n_ctx": None, "n_ctx_train": 10**6}).n_ctx == 32768
    assert EngineSettings.check(**{**GOOD, "n_ctx": 4096, "rope_scaling": "yarn"}).n_ctx == 4096


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, "auto"),
        ({"exact": True}, "off"),
        ({"exact": True, "choice": "on"}, "on"),
        ({"exact": True, "on_cpu": False}, "auto"),
        ({"exact": True, "type_v": "q8_0"}, "auto"),
        ({"exact": True, "kv_tokens": 10**6}, "auto"),
        ({"choice": "off"}, "off"),
    ],
)
def test_auto_flash_attention_is_off_in_exact_mode_on_the_cpu_where_it_can_be(
    changed: dict[str, Any], expected: str
) -> None:
    facts: dict[str, Any] = {"on_cpu": True, "exact": False, "type_v": "f16", "n_head": 9, "n_ubatch": 512}
    facts["kv_tokens"] = 8192
    facts.update(changed)
    choice = facts.pop("choice", "auto")
    assert resolve_flash_attention(choice, **facts) == expected


# ---- the cache's budget ----------------------------------------------------------------------------------------

GIB = 1 << 30


@pytest.mark.parametrize(
    ("words", "n_bytes"),
    [
        (0, 0),
        (123, 123),
        (np.int64(7), 7),
        ("0 B", 0),
        ("17b", 17),
        ("1KB", 1000),
        ("1 KiB", 1024),
        ("512MiB", 512 << 20),
        ("2GiB", 2 * GIB),
        (" 2 gib ", 2 * GIB),
        ("1.5 GB", 1_500_000_000),
        ("0.1 KiB", 102),
        ("0.000000001 GB", 1),
        ("1TiB", 1 << 40),
    ],
)
def test_sizes_may_be_words(words: Any, n_bytes: int) -> None:
    config = CacheConfig(checkpoint_bytes=words, host_bytes=words)
    assert (config.checkpoint_bytes, config.host_bytes) == (n_bytes, n_bytes)
    assert config == CacheConfig(checkpoint_bytes=n_bytes, host_bytes=n_bytes)
    assert type(config.host_bytes) is int


@pytest.mark.parametrize("field", ["checkpoint_bytes", "host_bytes"])
@pytest.mark.parametrize(
    "value",
    [
        -1, 1.5, True, float("inf"), b"1GB", (1,), (1 << 60) + 1, "", "12", "GiB", "-1 GB", "1e3 MB", "1,5 GB", "1 XB",
        "1 i", "1 ib", "1 Gi", "1  GB", "1 GB\n1", ".5 GB", "5. GB", "\u0661 GB", "9999999 TiB", "1" * 5000 + " B",
    ],
)  # fmt: skip
def test_a_size_that_is_none_is_named(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match="2GiB") as caught:
        CacheConfig(**{field: value})
    assert (caught.value.field, caught.value.value) == (field, value)


@pytest.mark.parametrize("value", [-1, 2**31, 1.0, "32", None, True])
def test_a_number_of_checkpoints_that_is_none_is_named(value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        CacheConfig(max_checkpoints=value)
    assert (caught.value.field, caught.value.value) == ("max_checkpoints", value)


@pytest.mark.parametrize(
    ("config", "machine_bytes", "expected"),
    [
        (CacheConfig(), 64 * GIB, CacheBudget(32, 8 * GIB, 8 * GIB)),
        (CacheConfig(), 8 * GIB, CacheBudget(32, 2 * GIB, 2 * GIB)),
        (CacheConfig(), 0, CacheBudget(32, GIB, GIB)),
        (CacheConfig(max_checkpoints=0), 8 * GIB, CacheBudget(0, 2 * GIB, 2 * GIB)),
        (CacheConfig(checkpoint_bytes="1GiB"), 64 * GIB, CacheBudget(32, GIB, 8 * GIB)),
        (CacheConfig(checkpoint_bytes=0), 64 * GIB, CacheBudget(32, 0, 8 * GIB)),
        (CacheConfig(checkpoint_bytes="9GiB"), 64 * GIB, CacheBudget(32, 8 * GIB, 8 * GIB)),
        (CacheConfig(host_bytes="100 MiB"), 64 * GIB, CacheBudget(32, 100 << 20, 100 << 20)),
        (CacheConfig(host_bytes="20 GiB"), 8 * GIB, CacheBudget(32, 20 * GIB, 20 * GIB)),
        (CacheConfig(host_bytes=0), 8 * GIB, CacheBudget(32, 0, 0)),
    ],
    ids=range(10),
)
def test_a_budget_follows_the_machine(config: CacheConfig, machine_bytes: int, expected: CacheBudget) -> None:
    assert config.resolve(machine_bytes) == expected


def test_a_namespace_has_no_more_than_there_is() -> None:
    for given, expected in (("1GiB", GIB), (0, 0), ("9GiB", 8 * GIB), (None, MAX_BYTES)):
        assert CacheConfig(namespace_bytes=given).resolve(64 * GIB).namespace_bytes == expected
    assert CacheConfig(max_parked=3).resolve(64 * GIB).max_parked == 3


def test_a_folder_is_a_path_and_its_home_is_known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert CacheConfig(disk_dir="~/cache").disk_dir == str(tmp_path / "cache")
    assert CacheConfig(disk_dir=tmp_path).disk_dir == str(tmp_path)
    assert CacheConfig().resolve_disk() == 20 * GIB
    with pytest.raises(ConfigError, match="disk_bytes"):
        CacheConfig(disk_bytes=None)  # type: ignore[arg-type]
    for value in ("", 5, True, b"folder", "nul\0"):
        with pytest.raises(ConfigError, match="disk_dir"):
            CacheConfig(disk_dir=value)  # type: ignore[arg-type]


# ---- layouts ---------------------------------------------------------------------------------------------------


def test_layouts_name_every_field_in_which_they_differ() -> None:
    layout = Layout(
        memory="full",
        exact=False,
        type_k="f16",
        type_v="f16",
        v_transposed=True,
        n_ubatch=0,
        rope="",
        rotation=False,
        adapters="",
        backend="CPU",
        n_threads=0,
        cpu="",
        source="",
        state_format=1,
    )
    other = {**layout.to_dict(), "type_k": "q8_0"}
    del other["backend"]
    assert layout.differences(layout.to_dict()) == []
    assert layout.differences(other) == [("type_k", "f16", "q8_0"), ("backend", "CPU", None)]
