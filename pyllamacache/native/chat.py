"""Chat templates, as llama-common renders and parses them. Safe to use from any thread.

Knows JSON in OpenAI's shapes; decides nothing about what is sent or kept.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from ..errors import ChatTemplateError
from .library import Guard, load

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .model import NativeModel


def _take(module: Any, text: Any, error: Any) -> dict[str, Any]:
    """The JSON that came out; both texts are freed. Raises ChatTemplateError with what `error` says."""
    ffi, lib = module.ffi, module.lib
    try:
        if not text:
            problem = ffi.string(error[0]).decode("utf-8", "replace") if error[0] else "no memory"
            raise ChatTemplateError(problem)
        found: dict[str, Any] = json.loads(ffi.string(text))
        return found
    finally:
        lib.plc_text_free(text)
        lib.plc_text_free(error[0])


class NativeTemplates:
    """Owns a `plc_chat *`. Source: common_chat_templates_init."""

    def __init__(
        self, model: NativeModel | None, source: str | None = None, *, bos: str | None = None, eos: str | None = None
    ) -> None:
        """`source`, `bos` and `eos` in place of the model's own; without a model they have to be given.

        Raises:
            ChatTemplateError: the template does not parse.
        """
        self._module = module = load()
        self._guard = Guard("chat templates")
        self._model = model
        self._chat: Any = None
        error = module.ffi.new("char **")
        texts = [module.ffi.NULL if text is None else _c_string(module, text) for text in (source, bos, eos)]
        with model.guard if model is not None else self._guard:
            pointer = model.pointer if model is not None else module.ffi.NULL
            chat = module.lib.plc_chat_new(pointer, *texts, error)
        if not chat:
            _take(module, module.ffi.NULL, error)
        self._chat = chat

    def facts(self) -> dict[str, Any]:
        """`source`, `is_own` (False: the model has none, and ChatML stands in), `caps`."""
        error = self._module.ffi.new("char **")
        with self._guard:
            return _take(self._module, self._module.lib.plc_chat_facts(self._chat, error), error)

    def render(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """`prompt` and `parts`. Fields in and out: plc_chat_render in shim.h. Raises ChatTemplateError."""
        return self._render(request, self._module.ffi.NULL)

    def open(self, request: Mapping[str, Any]) -> tuple[dict[str, Any], NativeReply]:
        """`render`, and what reads the reply. Raises ChatTemplateError."""
        slot = self._module.ffi.new("struct plc_chat_reply **")
        rendered = self._render(request, slot)
        return rendered, NativeReply(self._module, slot[0])

    def _render(self, request: Mapping[str, Any], slot: Any) -> dict[str, Any]:
        module = self._module
        text = _c_string(module, json.dumps(request, ensure_ascii=False))
        error = module.ffi.new("char **")
        with self._guard:
            if self._model is None:
                out = module.lib.plc_chat_render(self._chat, module.ffi.NULL, text, slot, error)
            else:
                with self._model.guard:
                    out = module.lib.plc_chat_render(self._chat, self._model.pointer, text, slot, error)
        return _take(module, out, error)

    def close(self) -> None:
        """Free the templates; replies go on. Repeatable."""
        if self._guard.close() and self._chat is not None:
            chat, self._chat = self._chat, None
            self._module.lib.plc_chat_free(chat)

    def __del__(self) -> None:
        if getattr(self, "_chat", None) is not None and not self._guard.is_forked:
            self.close()


class NativeReply:
    """Owns a `plc_chat_reply *`: reads one reply as it comes. Source: common_chat_session."""

    def __init__(self, module: Any, pointer: Any) -> None:
        self._module = module
        self._guard = Guard("chat reply")
        self._pointer: Any = pointer

    def feed(self, text: str, *, is_last: bool) -> dict[str, Any]:
        """`message` so far and the `deltas` that `text` brought. Nothing can follow the last.

        Raises:
            ChatTemplateError: the reply is not in the template's format.
        """
        data = text.encode()
        error = self._module.ffi.new("char **")
        with self._guard:
            out = self._module.lib.plc_chat_feed(self._pointer, data, len(data), is_last, error)
            return _take(self._module, out, error)

    def close(self) -> None:
        """Free it; repeatable."""
        if self._guard.close() and self._pointer is not None:
            pointer, self._pointer = self._pointer, None
            self._module.lib.plc_chat_reply_free(pointer)

    def __del__(self) -> None:
        if getattr(self, "_pointer", None) is not None and not self._guard.is_forked:
            self.close()


def _c_string(module: Any, text: str) -> Any:
    return module.ffi.new("char[]", text.encode())
