"""Chain keys: a digest of everything before a position, by which other processes and later ones find it again."""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING

from .index import SPAN_TOKENS

if TYPE_CHECKING:
    from ..request import Ids

KEY_BYTES = 16


def root_key(scope: str, namespace: str) -> bytes:
    """Of the empty prefix. `scope`: what else has to be the same (weights, adapters, layout)."""
    space = namespace.encode()
    return blake2b(scope.encode() + b"\0" + space, digest_size=KEY_BYTES, person=b"plc-root").digest()


def next_key(parent: bytes, ids: Ids) -> bytes:
    """Of the prefix that `ids`, at most a span of them, make of the one that `parent` is the key of."""
    digest = blake2b(parent, digest_size=KEY_BYTES, person=b"plc-span")
    digest.update(ids.astype("<i4", copy=False).tobytes())
    return digest.digest()


def chain_key(root: bytes, ids: Ids, *, span_tokens: int = SPAN_TOKENS) -> bytes:
    """Of all of `ids`, in whole spans and a rest. One pass over them: 3 ms for a million."""
    key = root
    for start in range(0, len(ids), span_tokens):
        key = next_key(key, ids[start : start + span_tokens])
    return key
