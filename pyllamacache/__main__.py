"""The command line: `pyllamacache COMMAND`. Commands are modules of `cli`; this one parses, prints and sets exit codes.

Exit codes: 0; 1 for an error of this package, told in one line; 2 for wrong arguments; 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from . import __version__
from .cli import audit, cache, demo, doctor, explain, inspect_file
from .cli.lines import printable
from .errors import InternalError, PyLlamaCacheError

COMMANDS = (
    demo.COMMAND,
    inspect_file.COMMAND,
    cache.COMMAND,
    explain.COMMAND,
    audit.COMMAND,
    doctor.COMMAND,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code. Raises SystemExit for `--help` and wrong arguments, as argparse does."""
    arguments = build_parser().parse_args(argv)
    try:
        code: int = arguments.run(arguments, _say)
        return code
    except KeyboardInterrupt:
        return _fail("interrupted", 130)
    except BrokenPipeError:
        # Whoever read our output has seen enough; what is still buffered would fail again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except InternalError as error:
        return _fail(f"internal error, please report it: {error}", 1)
    except (PyLlamaCacheError, ImportError) as error:  # ImportError: the compiled module is not there
        return _fail(str(error), 1)


def build_parser() -> argparse.ArgumentParser:
    """The parser of the whole command line; `run` of what it returns is the command's."""
    parser = argparse.ArgumentParser(
        prog="pyllamacache", description="llama.cpp in a Python process, with a prefix cache that explains itself."
    )
    parser.add_argument("--version", action="version", version=f"pyllamacache {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in COMMANDS:
        subparser = commands.add_parser(command.name, help=command.help, description=command.help)
        command.add_arguments(subparser)
        subparser.set_defaults(run=command.run)
    return parser


def _say(line: str) -> None:
    print(line, flush=True)


def _fail(message: str, code: int) -> int:
    print(f"pyllamacache: {printable(' '.join(message.split()))}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
