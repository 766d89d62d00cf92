"""What an engine is made with: validated settings and the layout that stored state depends on. Pure values."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from decimal import Decimal
from enum import Enum
from numbers import Integral
from typing import Any

from .errors import ConfigError

MAX_SLOTS = 255
"""llama.cpp's LLAMA_MAX_SEQ is 256; one id is kept free."""


MAX_PARKED = 128
"""Prefixes kept in KV cells beside those of the slots. llama.cpp has ids for more, but bookkeeping grows with them."""


class Memory(str, Enum):
    """What a model remembers of a sequence, by llama.cpp's memory class."""

    FULL = "full"
    """Every layer keeps KV cells: can be cut and shared anywhere."""
    SLIDING = "sliding"
    """Some layers keep a window only: can be cut where the window before the cut is still there."""
    HYBRID = "hybrid"
    """Attention beside a recurrent state: the state cannot be rewound."""
    RECURRENT = "recurrent"
    """A state only: cannot be rewound."""
    OTHER = "other"
    """A memory class this library does not know: reuse by extension only."""

    __str__ = str.__str__

    @property
    def has_cells(self) -> bool:
        """Whether sequences compete for KV cells."""
        return self is not Memory.RECURRENT

    @property
    def can_park(self) -> bool:
        """Whether a sequence that does not run can hold KV cells, and no state."""
        return self in (Memory.FULL, Memory.SLIDING, Memory.HYBRID)

    @property
    def is_shareable(self) -> bool:
        """Whether one sequence's prefix can become another's without a checkpoint."""
        return self is Memory.FULL

    @property
    def has_state(self) -> bool:
        """Whether a part of it exists at one position only: going back takes a checkpoint."""
        return self in (Memory.SLIDING, Memory.HYBRID, Memory.RECURRENT)

    @property
    def splits_steps(self) -> bool:
        """Whether decode rows and prefill chunks must go in separate native calls (unequal rows cost ubatches)."""
        return self in (Memory.HYBRID, Memory.RECURRENT, Memory.OTHER)


@dataclass(frozen=True, slots=True)
class Layout:
    """Everything besides the weights that stored state depends on. Two layouts that differ cannot exchange state."""

    memory: str
    exact: bool
    type_k: str
    type_v: str
    v_transposed: bool
    """Set when flash attention is off: V lies transposed in the cache."""
    n_ubatch: int
    """Part of the key in exact mode only (0 otherwise): chunk boundaries decide bits."""
    rope: str
    rotation: bool
    """Whether llama.cpp rotates the heads of a quantised cache (`LLAMA_ATTN_ROT_DISABLE` switches it off)."""
    adapters: str
    backend: str
    n_threads: int
    """Part of the key in exact mode only (0 otherwise)."""
    cpu: str
    """Instruction sets in use, exact mode only ("" otherwise)."""
    source: str
    """Digest of pin and patches, exact mode only ("" otherwise)."""
    state_format: int
    """Number of the byte format of a sequence's state; files of an equal number can be read."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def differences(self, other: dict[str, Any]) -> list[tuple[str, Any, Any]]:
        """(field, here, there) for each field in which `other` differs or is missing."""
        return [
            (item.name, getattr(self, item.name), other.get(item.name))
            for item in fields(self)
            if getattr(self, item.name) != other.get(item.name)
        ]


DEFAULT_HOST_BYTES = 8 << 30
UNKNOWN_HOST_BYTES = 1 << 30
"""Where nothing says how much memory the process may use."""
MAX_BYTES = 1 << 60

_UNITS = {
    unit: scale**power
    for scale, suffix in ((1000, "b"), (1024, "ib"))
    for power, unit in enumerate(("b", *(letter + suffix for letter in "kmgt")))
}
_SIZE = re.compile(r"([0-9]{1,19}(?:\.[0-9]{1,9})?) ?([kmgt]?i?b)")


def _check_bytes(field: str, value: object) -> int:
    """A size as a whole number of bytes. Words round down: "1.5 GB" is 1,500,000,000, "512MiB" 536,870,912."""
    n_bytes = -1
    if isinstance(value, str):
        found = _SIZE.fullmatch(value.strip().lower())
        if found and found[2] in _UNITS:
            n_bytes = int(Decimal(found[1]) * _UNITS[found[2]])
    elif isinstance(value, Integral) and not isinstance(value, bool):
        n_bytes = int(value)
    if not 0 <= n_bytes <= MAX_BYTES:
        raise ConfigError(field, value, "a number of bytes, or a size such as '2GiB', '512MiB' or '1.5 GB'")
    return n_bytes


@dataclass(frozen=True, slots=True)
class CacheBudget:
    """What the cache may hold: limits at every instant. Sizes in bytes."""

    max_checkpoints: int
    checkpoint_bytes: int
    """For checkpoints, within `host_bytes`."""
    host_bytes: int
    """The whole pool of host memory: checkpoints, spans, captures in flight, staging."""
    namespace_bytes: int = MAX_BYTES
    """For the checkpoints and spans of one namespace, within `host_bytes`."""
    max_parked: int = MAX_PARKED
    """Prefixes parked on the device."""


def _check_folder(value: object) -> str:
    try:
        path = os.fspath(value)  # type: ignore[call-overload]
    except Exception:  # noqa: BLE001  # whatever an object of the caller's does
        path = None
    if not isinstance(path, str) or not path or "\0" in path:
        raise ConfigError("disk_dir", value, "the path of a folder, or None")
    return os.path.expanduser(path)


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """How much of the past an engine may keep besides its context. Sizes are bytes, or words such as "2GiB".

    Raises:
        ConfigError: naming the field, what it was given and what it takes.
    """

    max_checkpoints: int = 32
    """Checkpoints of all slots together; 0: none are taken."""
    max_parked: int = MAX_PARKED
    """Prefixes that keep their KV cells when they leave their slot, 0 to 128. Attention of every request runs over all
    cells in use, so on a CPU a cache full of them slows replies down; what is not parked goes to host memory."""
    checkpoint_bytes: int | str | None = None
    """Bytes of states; None: `max_checkpoints` of them, however large. Never more than `host_bytes`."""
    host_bytes: int | str | None = None
    """Host memory for everything; None: the smaller of 8 GiB and a quarter of what the process may use."""
    namespace_bytes: int | str | None = None
    """Host memory for any one namespace; None: they share it all, so that one can tell from what it lost that another
    was busy."""
    disk_dir: str | os.PathLike[str] | None = None
    """A folder in which prefixes outlive the process; None: there is none. Made if it is not there; processes may share
    it. What it holds tells what a transcript tells."""
    disk_bytes: int | str = "20GiB"
    """Files in that folder, of all processes and models together."""

    def __post_init__(self) -> None:
        checked = _check_int("max_checkpoints", self.max_checkpoints, 0)
        object.__setattr__(self, "max_checkpoints", checked)
        object.__setattr__(self, "max_parked", _check_int("max_parked", self.max_parked, 0, MAX_PARKED))
        if self.disk_dir is not None:
            object.__setattr__(self, "disk_dir", _check_folder(self.disk_dir))
        for field in ("checkpoint_bytes", "host_bytes", "namespace_bytes", "disk_bytes"):
            value = getattr(self, field)
            if value is not None or field == "disk_bytes":  # words become numbers, so that equal limits are equal
                object.__setattr__(self, field, _check_bytes(field, value))

    def resolve_disk(self) -> int:
        """`disk_bytes` as a number."""
        return _check_bytes("disk_bytes", self.disk_bytes)

    def resolve(self, machine_bytes: int) -> CacheBudget:
        """The limits in numbers. `machine_bytes` is what the process may use (`store.machine`), 0: unknown."""
        host_bytes = min(DEFAULT_HOST_BYTES, machine_bytes // 4) if machine_bytes else UNKNOWN_HOST_BYTES
        if self.host_bytes is not None:
            host_bytes = _check_bytes("host_bytes", self.host_bytes)
        checkpoint_bytes = host_bytes
        if self.checkpoint_bytes is not None:
            checkpoint_bytes = min(host_bytes, _check_bytes("checkpoint_bytes", self.checkpoint_bytes))
        namespace_bytes = MAX_BYTES
        if self.namespace_bytes is not None:
            namespace_bytes = min(host_bytes, _check_bytes("namespace_bytes", self.namespace_bytes))
        return CacheBudget(self.max_checkpoints, checkpoint_bytes, host_bytes, namespace_bytes, self.max_parked)


KV_TYPES = ("f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl")
"""Types llama.cpp takes for the K and V cache, by its names."""
FLASH_ATTENTION = ("auto", "on", "off")
ROPE_SCALING = (None, "none", "linear", "yarn", "longrope")
DEFAULT_N_CTX = 32768
DEFAULT_N_BATCH = 2048

MAX_KV_TOKENS = 1 << 26
"""Beyond any model's context; llama.cpp would touch tens of gigabytes of bookkeeping before it failed."""

MAX_SCORE_BYTES = 1 << 30
"""Attention scores that "auto" lets exact mode hold at once rather than use flash attention."""


def resolve_flash_attention(
    choice: str, *, on_cpu: bool, exact: bool, type_v: str, n_head: int, n_ubatch: int, kv_tokens: int
) -> str:
    """What "auto" means: llama.cpp's choice, and "off" in exact mode on the CPU.

    With flash attention the CPU passes over cells that a token does not see; without, every token pays for all cells in
    use, whoever holds them. Six prompts of 700 tokens of SmolLM2-135M one after the other, each parked: 1.6 to 1.8 s
    each with it, 1.8 to 4.0 s without (b11549, two cores with AVX-512). Fewer than 64 rows at great depth lose: 40
    tokens on 4,000 take 370 ms with it and 180 to 300 without.

    It splits the cells over threads, so sums depend on how many are in use, which exact mode rules out. Without it the
    scores of an ubatch are held in memory, so very long contexts keep it; a quantised V cannot do without.
    """
    if choice != "auto" or not (on_cpu and exact) or type_v not in ("f32", "f16", "bf16"):
        return choice
    return "off" if n_head * n_ubatch * kv_tokens * 4 <= MAX_SCORE_BYTES else "auto"


def _check_int(field: str, value: object, low: int, high: int = 2**31 - 1) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral) or not low <= int(value) <= high:
        raise ConfigError(field, value, f"an integer from {low} to {high}")
    return int(value)


def _check_choice(field: str, value: object, choices: tuple[object, ...]) -> None:
    if value not in choices:
        raise ConfigError(field, value, f"one of {', '.join(map(repr, choices))}")


def _check_factor(field: str, value: object, low: float, high: float) -> float:
    """A RoPE setting: 0 leaves it to the model. llama.cpp computes in float32, where more would be 0 or infinite."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not (value == 0 or low <= value <= high):
        raise ConfigError(field, value, f"0 (the model's own), or a number from {low:g} to {high:g}")
    return float(value)


def _check_adapters(value: object) -> tuple[tuple[str, float], ...]:
    if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
        raise ConfigError("adapters", value, "a sequence of paths or (path, scale) pairs")
    checked = []
    for item in value:
        path, scale = item if isinstance(item, tuple) and len(item) == 2 else (item, 1.0)
        if not isinstance(path, (str, os.PathLike)) or not os.path.isfile(path):
            raise ConfigError(
                "adapters",
                item,
                "a path of a LoRA file that exists, or a (path, scale) pair",
            )
        if isinstance(scale, bool) or not isinstance(scale, (int, float)) or not abs(scale) <= 1e6:
            raise ConfigError("adapters", item, "a number from -1e6 to 1e6 as scale")
        checked.append((os.path.abspath(path), float(scale)))
    return tuple(checked)


def usable_cores() -> int:
    """Physical cores this process may use: hyperthreads share what llama.cpp needs."""
    try:
        cpus = os.sched_getaffinity(0)
    except AttributeError:  # macOS
        return os.cpu_count() or 1
    cores = set()
    for cpu in cpus:
        try:
            with open(
                f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list",
                encoding="ascii",
            ) as file:
                cores.add(file.read().strip())
        except OSError:
            cores.add(str(cpu))
    return max(1, len(cores))


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """An engine's settings, checked against each other and against the model's trained length."""

    n_ctx: int
    n_slots: int
    kv_tokens: int
    n_batch: int
    n_ubatch: int
    n_threads: int
    type_k: str
    type_v: str
    flash_attention: str
    adapters: tuple[tuple[str, float], ...]
    exact: bool
    offload_kqv: bool
    rope_scaling: str | None
    rope_freq_base: float
    rope_freq_scale: float

    @classmethod
    def check(
        cls,
        *,
        n_ctx_train: int,
        on_cpu: bool = True,
        n_ctx: int | None,
        n_slots: int,
        kv_tokens: int | None,
        n_batch: int | None,
        n_ubatch: int,
        n_threads: int | None,
        type_k: str,
        type_v: str,
        flash_attention: str,
        adapters: object,
        exact: bool,
        offload_kqv: bool,
        rope_scaling: str | None,
        rope_freq_base: float,
        rope_freq_scale: float,
    ) -> EngineSettings:
        """Raises ConfigError naming the field."""
        for field, flag in (("exact", exact), ("offload_kqv", offload_kqv)):
            if not isinstance(flag, bool):
                raise ConfigError(field, flag, "True or False")
        _check_choice("type_k", type_k, KV_TYPES)
        _check_choice("type_v", type_v, KV_TYPES)
        _check_choice("flash_attention", flash_attention, FLASH_ATTENTION)
        _check_choice("rope_scaling", rope_scaling, ROPE_SCALING)
        if flash_attention == "off" and type_v not in ("f32", "f16", "bf16"):
            raise ConfigError("type_v", type_v, "f32, f16 or bf16 while flash_attention is 'off'")
        if n_ctx is None:
            n_ctx = min(n_ctx_train, DEFAULT_N_CTX) if n_ctx_train > 0 else DEFAULT_N_CTX
        _check_int("n_ctx", n_ctx, 1, MAX_KV_TOKENS)
        changes_rope = rope_scaling not in (None, "none") or rope_freq_base != 0 or rope_freq_scale != 0
        if 0 < n_ctx_train < n_ctx and not changes_rope:
            raise ConfigError(
                "n_ctx",
                n_ctx,
                f"at most the trained length {n_ctx_train}, unless rope_scaling says how to go beyond",
            )
        n_slots = _check_int("n_slots", n_slots, 1, MAX_SLOTS)
        if exact and kv_tokens is not None:
            raise ConfigError(
                "kv_tokens",
                kv_tokens,
                "None in exact mode, where each slot has n_ctx cells of its own",
            )
        kv_tokens = n_ctx if kv_tokens is None else _check_int("kv_tokens", kv_tokens, 1, MAX_KV_TOKENS)
        if kv_tokens < n_ctx:
            raise ConfigError(
                "kv_tokens",
                kv_tokens,
                f"at least n_ctx={n_ctx}, or no request could use its context",
            )
        n_ubatch = _check_int("n_ubatch", n_ubatch, 1)
        if n_batch is None:
            n_batch = max(n_ubatch, n_slots) if on_cpu else max(DEFAULT_N_BATCH, n_ubatch)
            n_batch = -(-n_batch // n_ubatch) * n_ubatch
        n_batch = _check_int("n_batch", n_batch, 1)
        if n_batch < n_slots:
            raise ConfigError("n_batch", n_batch, f"at least one row for each of {n_slots} slots")
        n_ubatch = min(n_ubatch, n_batch)
        return cls(
            n_ctx=n_ctx,
            n_slots=n_slots,
            kv_tokens=kv_tokens,
            n_batch=n_batch // n_ubatch * n_ubatch,
            n_ubatch=n_ubatch,
            n_threads=usable_cores() if n_threads is None else _check_int("n_threads", n_threads, 1, 512),
            type_k=type_k,
            type_v=type_v,
            flash_attention=flash_attention,
            adapters=_check_adapters(adapters),
            exact=exact,
            offload_kqv=offload_kqv,
            rope_scaling=rope_scaling,
            rope_freq_base=_check_factor("rope_freq_base", rope_freq_base, 1.0, 1e12),
            rope_freq_scale=_check_factor("rope_freq_scale", rope_freq_scale, 1e-6, 1e6),
        )
