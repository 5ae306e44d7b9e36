"""Converts tensors to numpy arrays, and back.

bfloat16 and smaller floats pass through views of integers, since numpy knows them by ml_dtypes alone.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import torch

Array = npt.NDArray[Any]

#: dtype of torch -> dtype of numpy.
_NUMPY: dict[torch.dtype, np.dtype[Any]] = {
    torch.from_numpy(np.zeros(1, dtype)).dtype: np.dtype(dtype)
    for dtype in ["bool", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16"]
}
#: dtype of torch -> dtype of ml_dtypes, and the integer types as which both are viewed.
_BY_INTEGERS: dict[torch.dtype, tuple[np.dtype[Any], np.dtype[Any], torch.dtype]] = {
    torch.bfloat16: (np.dtype(ml_dtypes.bfloat16), np.dtype(np.int16), torch.int16),
    torch.float8_e4m3fn: (np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(np.uint8), torch.uint8),
    torch.float8_e5m2: (np.dtype(ml_dtypes.float8_e5m2), np.dtype(np.uint8), torch.uint8),
}


def numpy_dtype(dtype: torch.dtype) -> np.dtype[Any] | None:
    """Returns the numpy dtype of a torch dtype; None if there is none, as for quantised ones."""
    return _BY_INTEGERS[dtype][0] if dtype in _BY_INTEGERS else _NUMPY.get(dtype)


def as_array(tensor: torch.Tensor) -> Array:
    """Returns a tensor on the CPU as a numpy array that shares its memory."""
    tensor = tensor.detach()
    if tensor.dtype in _BY_INTEGERS:
        dtype, _, integers = _BY_INTEGERS[tensor.dtype]
        viewed: Array = tensor.view(integers).numpy().view(dtype)
        return viewed
    array: Array = tensor.resolve_conj().resolve_neg().numpy()
    return array


def as_tensor(array: Array, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Returns a numpy array as a CPU tensor, which shares writable memory and copies any other.

    Args:
        array: Of any dtype that torch has.
        dtype: The dtype of the tensor; None: as the array's.
    """
    array = np.array(array, order="C", copy=None if array.flags.writeable else True)
    by_integers = {known: (plain, name) for name, (known, plain, _) in _BY_INTEGERS.items()}
    if array.dtype in by_integers:
        plain, name = by_integers[array.dtype]
        tensor = torch.from_numpy(array.view(plain)).view(name)
    else:
        tensor = torch.from_numpy(array)
    return tensor if dtype is None else tensor.to(dtype)
