"""Opening a model's file: links are followed (the hub's cache is made of them), anything but a file is refused."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO

from ..errors import ModelFormatError, ModelNotFoundError


@contextmanager
def opened_model(path: str) -> Iterator[FileIO]:
    """The file, unbuffered; what goes wrong while it is open becomes one of the errors below, too.

    Raises:
        ModelNotFoundError: nothing is there.
        ModelFormatError: something is there that cannot be read as a file.
    """
    try:
        # A pipe would block open() for ever.
        if not stat.S_ISREG(mode := os.stat(path).st_mode):
            raise ModelFormatError(path, "it is a directory" if stat.S_ISDIR(mode) else "it is not a regular file")
        with FileIO(path) as file:
            yield file
    except (FileNotFoundError, NotADirectoryError):
        hint = "the link leads nowhere" if os.path.islink(path) else "there is no such file"
        raise ModelNotFoundError(path, hint) from None
    except OSError as error:
        raise ModelFormatError(path, f"it cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        if isinstance(error, ModelFormatError):
            raise
        raise ModelNotFoundError(repr(path), "no file can have this name") from None
