"""Writing a tiny model's file, one tensor at a time, and keeping files per spec."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter

from .metadata import metadata
from .spec import TinySpec
from .tensors import tensors


def write_model(spec: TinySpec, path: Path) -> None:
    """Write the model to `path`. The same spec gives the same bytes. Holds one tensor in memory at a time."""
    writer = GGUFWriter(path, spec.architecture)
    for entry in metadata(spec):
        if entry.key != "general.architecture":  # the writer put it there itself
            writer.add_key_value(entry.key, entry.value, entry.type, entry.item_type)
    all_tensors = tensors(spec)
    for tensor in all_tensors:
        writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.float32), tensor.nbytes, GGMLQuantizationType.F32)
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for tensor in all_tensors:
            writer.write_tensor_data(tensor.values(spec.seed))
    finally:
        writer.close()


def write_split_model(spec: TinySpec, folder: Path, *, tensors_per_part: int = 8) -> list[Path]:
    """The same model in several files, as llama.cpp names them, first part first."""
    writer = GGUFWriter(folder / "split.gguf", spec.architecture, split_max_tensors=tensors_per_part)
    for entry in metadata(spec):
        if entry.key != "general.architecture":
            writer.add_key_value(entry.key, entry.value, entry.type, entry.item_type)
    for tensor in tensors(spec):
        writer.add_tensor(tensor.name, tensor.values(spec.seed).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return sorted(folder.glob("split-*.gguf"))


class ModelCache:
    """A folder of tiny models, each written once per spec and writer version.

    Several processes may share the folder: a file appears under its name only when it is complete.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, spec: TinySpec) -> Path:
        """The file of this spec, written now if it is not there."""
        path = self.folder / spec.file_name
        if path.exists():
            return path
        self.folder.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(prefix=f".{spec.file_name}.", suffix=".part", dir=self.folder)
        os.close(descriptor)
        try:
            write_model(spec, Path(name))
            os.replace(name, path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
        return path
