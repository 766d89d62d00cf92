"""Write the C source of the extension module from cdef.h; CMakeLists.txt runs this at build time.

Usage: python build_ffi.py OUTPUT.c
"""

from __future__ import annotations

import sys
from pathlib import Path

from cffi import FFI

NAME = "pyllamacache.native._lib"


def main() -> None:
    """Generate the file named on the command line."""
    ffi = FFI()
    ffi.cdef((Path(__file__).parent / "cdef.h").read_text(encoding="utf-8"))
    ffi.set_source(NAME, '#include "shim.h"')
    ffi.emit_c_code(sys.argv[1])


if __name__ == "__main__":
    main()
