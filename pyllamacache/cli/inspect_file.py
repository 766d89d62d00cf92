"""`pyllamacache inspect FILE`: what a GGUF model or a slot file says about itself, without loading it.

A slot file holds what a transcript holds: its token ids are shown only when they are asked for, its text never.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ..errors import CacheCorruptError, ConfigError
from .command import Command
from .lines import Say, fact_lines, printable, size

if TYPE_CHECKING:
    from ..store.gguf_check import GgufSummary
    from ..store.slotfile import SlotHeader

_MAX_VALUE_CHARS = 80


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="a GGUF model (of a split one: any part) or a slot file")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--ids", action="store_true", help="slot files: print the token ids, too")


def _run(arguments: argparse.Namespace, say: Say) -> int:
    from ..store import gguf_check

    if gguf_check.is_gguf(arguments.file):
        if arguments.ids:
            raise ConfigError("--ids", arguments.file, "a slot file; a model holds no token ids")
        return _inspect_model(arguments, say)
    return _inspect_slot(arguments, say)


# ---- models ----------------------------------------------------------------------------------------------------


def _inspect_model(arguments: argparse.Namespace, say: Say) -> int:
    from ..store.gguf_check import check_gguf

    summary = check_gguf(arguments.file)
    metadata = dict(sorted(summary.metadata.items()))
    if arguments.json:
        named = {name: _json_value(value) for name, value in metadata.items()}
        say(json.dumps(_model_values(summary) | {"metadata": named}, indent=2))
        return 0
    for line in fact_lines(_model_facts(summary)):
        say(line)
    say("")
    for line in fact_lines({printable(name): _value_words(value) for name, value in metadata.items()}):
        say(line)
    return 0


def _model_values(summary: GgufSummary) -> dict[str, Any]:
    return {
        "kind": "model",
        "gguf_version": summary.version,
        "architecture": summary.architecture,
        "name": summary.name,
        "n_params": summary.n_params,
        "n_tensors": summary.n_tensors,
        "size_bytes": summary.size_bytes,
        "context_length": summary.context_length,
        "split_no": summary.split_no,
        "split_count": summary.split_count,
    }


def _model_facts(summary: GgufSummary) -> dict[str, str]:
    facts = {
        "kind": f"GGUF model, version {summary.version}",
        "architecture": printable(summary.architecture) or "given in the first part",
        "name": printable(summary.name) if summary.name else "none given",
        "parameters": f"{summary.n_params:,} in {summary.n_tensors:,} tensors",
        "size": size(summary.size_bytes),
        "context": f"{summary.context_length:,} tokens" if summary.context_length else "not given",
    }
    if summary.split_count > 1:
        facts["split"] = f"part {summary.split_no + 1} of {summary.split_count}; sizes are this part's"
    return facts


def _json_value(value: object) -> object:
    # JSON has no word for these.
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _value_words(value: object) -> str:
    return printable(value, max_chars=_MAX_VALUE_CHARS) if isinstance(value, str) else str(value)


# ---- slot files ------------------------------------------------------------------------------------------------


def _inspect_slot(arguments: argparse.Namespace, say: Say) -> int:
    from ..store import slotfile

    header = slotfile.read_header(arguments.file, verify=True)
    ids: list[int] | None = None
    if arguments.ids and header.intact:
        ids = slotfile.read(arguments.file, max_tokens=header.n_tokens).ids.tolist()
    if arguments.json:
        shown = {} if ids is None else {"token_ids": ids}
        say(json.dumps(_slot_values(header) | shown, indent=2))
    else:
        for line in fact_lines(_slot_facts(header)):
            say(line)
        if ids is not None:
            say(f"\n{' '.join(map(str, ids))}")
    if not header.intact:
        raise CacheCorruptError(arguments.file, "a checksum does not hold")
    return 0


def _slot_values(header: SlotHeader) -> dict[str, Any]:
    return {
        "kind": "slot",
        "format_version": header.format_version,
        "size_bytes": header.size_bytes,
        "n_tokens": header.n_tokens,
        "exact_tokens": header.exact_tokens,
        "state_bytes": header.state_bytes,
        "extra_bytes": dict(header.extra_bytes),
        "checkpoints": [asdict(each) for each in header.checkpoints],
        "n_ctx": header.n_ctx,
        "namespace": header.namespace,
        "fingerprint": header.fingerprint,
        "layout": header.layout.to_dict(),
        "intact": header.intact,
    }


def _slot_facts(header: SlotHeader) -> dict[str, str]:
    layout = {f"  {name}": _layout_words(value) for name, value in header.layout.to_dict().items()}
    facts = {
        "kind": f"slot file, format {header.format_version}",
        "tokens": f"{header.n_tokens:,}",
        "size": f"{size(header.size_bytes)}, of which state {size(header.state_bytes)}",
        "checksums": "hold" if header.intact else "DO NOT HOLD: the file is damaged",
        "namespace": printable(header.namespace) or "the default one",
        "n_ctx": f"{header.n_ctx:,} when it was saved",
        "fingerprint": printable(header.fingerprint),
    }
    if header.exact_tokens:
        facts["exact tokens"] = f"{header.exact_tokens:,}"
    known = {each.name for each in header.checkpoints}
    extras = {name: n_bytes for name, n_bytes in header.extra_bytes.items() if name not in known}
    if extras:
        facts["extras"] = ", ".join(f"{name} {size(n_bytes)}" for name, n_bytes in extras.items())
    if header.checkpoints:
        total = sum(each.size_bytes for each in header.checkpoints)
        facts["checkpoints"] = f"{len(header.checkpoints):,}, together {size(total)}"
        facts |= {f"  {each.position:,}": f"{each.kind}, {size(each.size_bytes)}" for each in header.checkpoints}
    return facts | {"layout": ""} | layout


def _layout_words(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return (printable(value) or "none") if isinstance(value, str) else str(value)


COMMAND = Command("inspect", "describe a GGUF model or a slot file, without loading it", _add_arguments, _run)
