"""What a command is."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass

from .lines import Say


@dataclass(frozen=True, slots=True)
class Command:
    """`run` prints through what it is given, returns the exit code, and raises the errors of this package."""

    name: str
    help: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace, Say], int]
