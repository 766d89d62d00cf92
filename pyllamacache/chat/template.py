"""What `chat` needs of a template engine. `native.chat` is the real one; tests have a small one of their own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol


class ReplyParser(Protocol):
    """Reads one reply as it comes."""

    def feed(self, text: str, *, is_last: bool) -> dict[str, Any]:
        """`message` so far (content, reasoning_content, tool_calls) and the `deltas` that `text` brought.

        Raises:
            ChatTemplateError: the reply is not in the template's format.
        """


class Templates(Protocol):
    """Renders messages. Any thread."""

    def render(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """`prompt`, and `parts`: pairs (came from the request, bytes of the prompt). Raises ChatTemplateError."""

    def open(self, request: Mapping[str, Any]) -> tuple[dict[str, Any], ReplyParser]:
        """`render` with `generation_prompt`, `stops` and `constraint` as well, and what reads the reply."""


@dataclass(frozen=True, slots=True)
class TemplateOptions:
    """What a template is told besides messages and tools. All of it can change the prompt."""

    tool_choice: str = "auto"
    """"auto", "required" or "none"."""
    parallel_tool_calls: bool = True
    json_schema: Mapping[str, Any] | None = None
    enable_thinking: bool = True
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    now_s: int = 0
    """Seconds since 1970 UTC; what templates take the date from."""

    def request(
        self,
        messages: tuple[Mapping[str, Any], ...],
        tools: tuple[Mapping[str, Any], ...],
        *,
        generates: bool = True,
    ) -> dict[str, Any]:
        """As `Templates` takes it."""
        return {
            "messages": list(messages),
            "tools": list(tools),
            "tool_choice": self.tool_choice,
            "parallel_tool_calls": self.parallel_tool_calls,
            "json_schema": self.json_schema,
            "enable_thinking": self.enable_thinking,
            "template_kwargs": dict(self.template_kwargs),
            "now_s": self.now_s,
            "add_generation_prompt": generates,
        }
