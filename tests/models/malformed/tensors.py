"""Files whose tensor records are wrong: names, dimensions, types, offsets."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

from gguf import GGMLQuantizationType as Quant

from ..image import Image, encode, small_images
from .file import MalformedFile, Native, Stage

_EMBEDDING, _QUERY, _NORM = "token_embd.weight", "blk.0.attn_q.weight", "blk.0.attn_norm.weight"
_ITEM_BYTES = {Quant.F16: 2, Quant.BF16: 2, Quant.I8: 1, Quant.I16: 2, Quant.I32: 4, Quant.I64: 8, Quant.F64: 8}
_NOT_FOR_WEIGHTS = "no tensor has the type I8, I16, I32, I64 or F64"
_F32_VECTORS = "tensors of one dimension, and those of state layers that are not matrices (ssm_*), are F32"


@lru_cache(maxsize=1)
def _images() -> dict[str, Image]:
    return small_images()


def _changed(case: str, tensor: str, /, **changes: Any) -> MalformedFile:
    return _edited(case, lambda image: image.changing_tensor(tensor, **changes))


def _retyped(
    name: str, tensor: str, quant: Quant, native: Native, stage: Stage, check: str, kind: str = "full"
) -> MalformedFile:
    def build() -> bytes:
        image = _images()[kind]
        data = bytes(len(image.tensor(tensor).data) // 4 * _ITEM_BYTES[quant])
        return encode(image.changing_tensor(tensor, type=int(quant), data=data))

    return MalformedFile(name, build, native, stage, check)


def _edited(name: str, edit: Callable[[Image], Image]) -> MalformedFile:
    return MalformedFile(name, lambda: encode(edit(_images()["full"])))


def _incomplete_state(tensor: str) -> MalformedFile:
    def build() -> bytes:
        return encode(_images()["hybrid"].dropping_tensor(f"blk.0.{tensor}.weight"))

    check = f"each recurrent layer of a hybrid has {tensor}: the loader takes it for optional, the graph does not"
    return MalformedFile(f"state-{tensor.replace('_', '-')}-missing", build, "crashes", "context", check)


def tensor_files() -> Iterator[MalformedFile]:
    yield from _records()
    yield from _offsets()
    yield from _types()


def _records() -> Iterator[MalformedFile]:
    yield _edited("tensor-missing", lambda image: image.dropping_tensor(_QUERY))
    yield _edited("embedding-missing", lambda image: image.dropping_tensor(_EMBEDDING))
    yield _changed("tensor-name-empty", _QUERY, name="")
    yield _changed("tensor-name-of-another", _QUERY, name=_NORM)
    yield _changed("tensor-name-too-long", _QUERY, name="x" * 64)
    yield _changed("tensor-name-huge", _QUERY, name="x" * 20_000)
    yield _changed("dims-none", _QUERY, dims=())
    yield _changed("dims-five", _QUERY, dims=(16, 16, 1, 1, 1))
    yield _changed("dims-zero", _QUERY, dims=(16, 0), data=b"")
    yield _changed("dims-negative", _QUERY, dims=(16, -16))
    yield _changed("dims-overflow", _QUERY, dims=(2**32, 2**32))
    yield _changed("dims-product-overflows-bytes", _QUERY, dims=(2**62, 1))
    yield _changed("dims-larger-than-file", _QUERY, dims=(16, 2**30))
    yield _changed("dims-one-row-short", _QUERY, dims=(16, 15))
    yield _changed("dims-swapped", _EMBEDDING, dims=(320, 16))
    yield _changed("dims-vector-as-matrix", _NORM, dims=(1, 16))
    yield _incomplete_state("attn_qkv")
    yield _incomplete_state("attn_gate")


def _offsets() -> Iterator[MalformedFile]:
    yield _changed("offset-past-end", _QUERY, offset=2**40)
    yield _changed("offset-wraps", _QUERY, offset=2**64 - 32)
    yield _changed("offset-of-another", _QUERY, offset=0)
    yield _changed("offset-unaligned", _QUERY, offset=20_481)


def _types() -> Iterator[MalformedFile]:
    for number in (4, 5, 31, 999, -1):  # removed types, then no types
        yield _changed(f"tensor-type-{number}", _QUERY, type=number)
    yield _changed("rows-not-whole-blocks", _QUERY, type=int(Quant.Q4_K))
    yield _changed("rows-not-whole-blocks-q8", _QUERY, type=int(Quant.Q8_0))
    for quant in (Quant.I8, Quant.I32, Quant.I64, Quant.F64):
        yield _retyped(f"matrix-{quant.name.lower()}", _QUERY, quant, "crashes", "decode", _NOT_FOR_WEIGHTS)
        yield _retyped(f"norm-{quant.name.lower()}", _NORM, quant, "aborts", "decode", _NOT_FOR_WEIGHTS)
        stage: Stage = "context" if quant == Quant.I32 else "decode"
        yield _retyped(f"embedding-{quant.name.lower()}", _EMBEDDING, quant, "aborts", stage, _NOT_FOR_WEIGHTS)
    for quant in (Quant.F16, Quant.BF16):
        yield _retyped(f"norm-{quant.name.lower()}", _NORM, quant, "aborts", "decode", _F32_VECTORS)
        for kind in ("hybrid", "recurrent"):
            name = f"{kind}-convolution-{quant.name.lower()}"
            yield _retyped(name, "blk.0.ssm_conv1d.weight", quant, "aborts", "decode", _F32_VECTORS, kind)
        name = f"recurrent-decay-{quant.name.lower()}"
        yield _retyped(name, "blk.0.ssm_a", quant, "aborts", "decode", _F32_VECTORS, "recurrent")
