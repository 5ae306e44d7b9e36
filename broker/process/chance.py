"""Random numbers that nobody can guess. In virtual time they are drawn from the seed of the run."""

from __future__ import annotations

import secrets
from collections.abc import Callable

_bits: Callable[[int], int] = secrets.randbits


def bits(count: int) -> int:
    """Returns random bits as a number."""
    return _bits(count)


def hexadecimal(nbytes: int) -> str:
    """Returns random bytes, as two digits each."""
    return f"{bits(8 * nbytes):0{2 * nbytes}x}"


def use(source: Callable[[int], int]) -> Callable[[int], int]:
    """Has the bits come from ``source``; returns where they came from before."""
    global _bits
    before, _bits = _bits, source
    return before
