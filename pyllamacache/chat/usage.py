"""One count of tokens in the forms that providers use. Fields: the types of the `openai` and `anthropic` packages.

`cached` are tokens whose forward pass was skipped. OpenAI counts them into the prompt; Anthropic's `input_tokens` are
only those neither read from the cache nor written to it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..request import Usage


def openai_chat(usage: Usage, *, reasoning_tokens: int | None = None) -> dict[str, Any]:
    """`usage` of OpenAI's chat completions."""
    shape: dict[str, Any] = {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.total_tokens,
        "prompt_tokens_details": {
            "cached_tokens": usage.cached_tokens,
            "cache_write_tokens": usage.cache_write_tokens,
        },
    }
    if reasoning_tokens is not None:
        shape["completion_tokens_details"] = {"reasoning_tokens": reasoning_tokens}
    return shape


def openai_responses(usage: Usage, *, reasoning_tokens: int | None = None) -> dict[str, Any]:
    """`usage` of OpenAI's responses, which requires an integer where nothing is known."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {
            "cached_tokens": usage.cached_tokens,
            "cache_write_tokens": usage.cache_write_tokens,
        },
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": reasoning_tokens or 0},
        "total_tokens": usage.total_tokens,
    }


def anthropic_messages(usage: Usage) -> dict[str, Any]:
    """`usage` of Anthropic's messages. Nothing kept here has a time to live by itself, so no split by it is given."""
    written = usage.cache_write_tokens
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens - written,
        "cache_read_input_tokens": usage.cached_tokens,
        "cache_creation_input_tokens": written,
        "output_tokens": usage.completion_tokens,
    }


def deepseek_chat(usage: Usage) -> dict[str, Any]:
    """`openai_chat` with DeepSeek's two counts, which sum to `prompt_tokens`."""
    return {
        **openai_chat(usage),
        "prompt_cache_hit_tokens": usage.cached_tokens,
        "prompt_cache_miss_tokens": usage.prompt_tokens - usage.cached_tokens,
    }
