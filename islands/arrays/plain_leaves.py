"""Converts plain Python values in an optimizer's state to arrays and back. Pure.

A number is an array of shape (), as it always was. Text, bytes, and integers of more than 64 bits (the state of numpy's
random generators has some) are their bytes, in one dimension.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from islands.interface.arguments import is_floating

Array = npt.NDArray[Any]

#: Types carried beside arrays; None is an empty container. No subclasses: their additions would be lost.
PLAIN: dict[str, type[Any]] = {each.__name__: each for each in (bool, int, float, complex, str, bytes)}
_NUMBERS = {bool: "b", int: "i", float: "f", complex: "c"}


def is_plain(leaf: Any) -> bool:
    """Returns whether a leaf is a plain Python value that a checkpoint carries."""
    return type(leaf) in PLAIN.values()


def as_array(leaf: Any) -> Array:
    """Returns a plain value encoded as an array."""
    match leaf:
        case str():
            return np.frombuffer(leaf.encode("utf-8", "surrogatepass"), np.uint8)
        case bytes():
            return np.frombuffer(leaf, np.uint8)
        case int() if not -(1 << 63) <= leaf < 1 << 63:
            return as_array(hex(leaf))
    return np.asarray(leaf)


def value_of(array: Array, sort: type[Any]) -> Any:
    """Returns the plain value that :func:`as_array` encoded.

    Raises:
        ValueError: The array encodes no such value.
    """
    if array.shape == ():
        if number_in(array) != _NUMBERS.get(sort, "none"):
            raise ValueError(f"{array.dtype} is no {sort.__name__}")
        return sort(array.item())
    if array.dtype != np.uint8 or array.ndim != 1 or sort not in (int, str, bytes):
        raise ValueError(f"{array.dtype}{list(array.shape)} is no {sort.__name__}")
    if sort is bytes:
        return array.tobytes()
    text = array.tobytes().decode("utf-8", "surrogatepass")
    return text if sort is str else int(text, 16)


def number_in(leaf: Any) -> str:
    """Returns the kind of number in a leaf of shape (), as ``b``, ``i``, ``f`` or ``c``; empty for none.

    A step count begins as a Python integer, and is an array once a jitted step has returned it: both are one.
    """
    if type(leaf) in _NUMBERS:
        return _NUMBERS[type(leaf)]
    if getattr(leaf, "shape", None) != ():
        return ""
    try:
        dtype = np.dtype(leaf.dtype)
    except TypeError:  # a random key
        return ""
    if dtype.kind in "bifc":
        return str(dtype.kind)
    return "i" if dtype.kind == "u" else "f" if is_floating(dtype) else ""
