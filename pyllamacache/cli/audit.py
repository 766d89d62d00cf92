"""`pyllamacache audit LOG`: the hit rate a prefix cache can reach over logged requests, and what breaks it."""

from __future__ import annotations

import argparse
import json

from .command import Command
from .explain import add_common_arguments, tokenizer
from .lines import Say, printable


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("log", metavar="LOG", help="requests as JSON, one a line")
    parser.add_argument(
        "--fail-under", metavar="RATE", type=_rate, help="exit with 1 where the hit rate is lower, 0 to 1"
    )
    parser.add_argument("--strict", action="store_true", help="a line that is not a request is an error")
    add_common_arguments(parser)


def _rate(text: str) -> float:
    try:
        rate = float(text)
    except ValueError:
        rate = -1.0
    if not 0 <= rate <= 1:
        raise argparse.ArgumentTypeError("expected a number from 0 to 1")
    return rate


def _run(arguments: argparse.Namespace, say: Say) -> int:
    from ..observe.audit_log import audit_log

    with tokenizer(arguments.model) as model:
        found = audit_log(arguments.log, model=model, strict=arguments.strict)
    if arguments.json:
        say(json.dumps(found.to_dict(), indent=2))
    else:
        for line in str(found).splitlines():
            say(printable(line))
    is_low = arguments.fail_under is not None and found.hit_rate < arguments.fail_under
    if is_low and not arguments.json:
        say(f"the hit rate is below {arguments.fail_under:.1%}")
    return 1 if is_low else 0


COMMAND = Command("audit", "say what hit rate a log of requests can reach, and what breaks it", _add_arguments, _run)
