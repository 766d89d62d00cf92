"""llama.cpp's prefix cache for people who write agents. Start with `Model` and `Engine`; see the README.

Names are resolved when first used, so that importing the package loads neither numpy nor the compiled module.
"""

from __future__ import annotations

import importlib
import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import errors, plot
    from .cache import Cache, CacheEntry, CachePrefix, CacheTree
    from .chat.conversation import Conversation
    from .chat.options import ChatOptions
    from .chat.shapes import ChatChunk, ChatCompletion
    from .config import CacheConfig, Layout, Memory
    from .engine import Engine
    from .errors import PyLlamaCacheError
    from .model import Model
    from .observe.histogram import Histogram
    from .observe.metrics import CheckpointCounts, Statistics, TierCounts
    from .observe.prometheus import register_metrics
    from .request import (
        CacheReport,
        CheckpointKind,
        Chunk,
        Completion,
        Reason,
        RenderedChat,
        ReusePlan,
        Source,
        Timings,
        TokenLogprob,
        Usage,
    )
    from .scheduler.handle import Handle
    from .slot import Slot, Slots
    from .text.options import RequestOptions

__version__ = "0.1.0"

_HOMES = {
    "Audit": "observe.audit",
    "Cache": "cache",
    "CacheConfig": "config",
    "CacheEntry": "cache",
    "CachePrefix": "cache",
    "CacheReport": "request",
    "CacheTree": "cache",
    "Change": "observe.difference",
    "ChatChunk": "chat.shapes",
    "ChatCompletion": "chat.shapes",
    "ChatOptions": "chat.options",
    "CheckpointCounts": "observe.metrics",
    "CheckpointKind": "request",
    "Chunk": "request",
    "Completion": "request",
    "Conversation": "chat.conversation",
    "Engine": "engine",
    "Explanation": "observe.explanation",
    "Finding": "observe.audit",
    "Handle": "scheduler.handle",
    "Histogram": "observe.histogram",
    "Layout": "config",
    "LogAudit": "observe.audit_log",
    "Memory": "config",
    "Model": "model",
    "PyLlamaCacheError": "errors",
    "Reason": "request",
    "RenderedChat": "request",
    "RequestOptions": "text.options",
    "ReusePlan": "request",
    "Slot": "slot",
    "Slots": "slot",
    "Source": "request",
    "Statistics": "observe.metrics",
    "TierCounts": "observe.metrics",
    "Timings": "request",
    "TokenLogprob": "request",
    "Usage": "request",
    "audit": "observe.audit",
    "audit_log": "observe.audit_log",
    "explain": "observe.explain",
    "register_metrics": "observe.prometheus",
}

__all__ = [
    "Audit",
    "Cache",
    "CacheConfig",
    "CacheEntry",
    "CachePrefix",
    "CacheReport",
    "CacheTree",
    "Change",
    "ChatChunk",
    "ChatCompletion",
    "ChatOptions",
    "CheckpointCounts",
    "CheckpointKind",
    "Chunk",
    "Completion",
    "Conversation",
    "Engine",
    "Explanation",
    "Finding",
    "Handle",
    "Histogram",
    "Layout",
    "LogAudit",
    "Memory",
    "Model",
    "PyLlamaCacheError",
    "Reason",
    "RenderedChat",
    "RequestOptions",
    "ReusePlan",
    "Slot",
    "Slots",
    "Source",
    "Statistics",
    "TierCounts",
    "Timings",
    "TokenLogprob",
    "Usage",
    "__version__",
    "audit",
    "audit_log",
    "errors",
    "explain",
    "plot",
    "register_metrics",
]

logging.getLogger(__name__).addHandler(logging.NullHandler())


def __getattr__(name: str) -> Any:
    if name in ("errors", "plot"):
        return importlib.import_module(f".{name}", __name__)
    if name in _HOMES:
        value = getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
