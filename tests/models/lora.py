"""A LoRA adapter for a tiny model: random low-rank changes of two projections, by seed."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

from .spec import TinySpec

RANK = 4


def write_lora(spec: TinySpec, path: Path, *, seed: int = 0, scale: float = 1.0) -> Path:
    """An adapter for layer 0's query and output projections of a `FullSpec` model."""
    rng = np.random.default_rng(seed)
    heads = spec.n_head * spec.head_dim
    writer = gguf.GGUFWriter(path, spec.architecture)
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", float(RANK))
    for name, rows, columns in (("attn_q", heads, spec.n_embd), ("attn_output", spec.n_embd, heads)):
        a = rng.normal(0.0, scale / np.sqrt(columns), (RANK, columns)).astype(np.float32)
        b = rng.normal(0.0, 1.0, (rows, RANK)).astype(np.float32)
        writer.add_tensor(f"blk.0.{name}.weight.lora_a", a)
        writer.add_tensor(f"blk.0.{name}.weight.lora_b", b)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
