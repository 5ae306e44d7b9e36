"""Compiles a kernel by numba, or loads it from numba's cache.

The cache knows a kernel by the file that it is written in. So all functions that a kernel calls must be in that file,
too: a change elsewhere would leave old machine code in use.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pickle import UnpicklingError
from typing import Any

from numba import njit


def compile_kernel(function: Callable[..., Any], signature: str) -> Callable[..., Any]:
    """Returns the function compiled, from numba's cache if there is one: beside this file or ~/.cache.

    A cache that cannot be written or read costs some seconds at the start of each process, and nothing else.

    Args:
        function: To compile.
        signature: Types of the only variant to compile.
    """
    compiler: Callable[..., Any] = partial(njit, signature, nogil=True, error_model="numpy")
    # There is no place for it, or no space, or a file is cut short.
    with suppress(RuntimeError, OSError, EOFError, ValueError, UnpicklingError):
        return compiler(cache=True)(function)  # type: ignore[no-any-return]
    return compiler()(function)  # type: ignore[no-any-return]
