"""One fragment of the global model at one version: its vectors. Pure."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float32]


class FragmentState(NamedTuple):
    """One fragment of the global model at one version; its arrays are never written to any more."""

    params: Vector  # float32 [elements of the fragment], tensors in manifest order
    momentum: Vector  # float32, same shape: optax's trace
    version: int  # merges applied
    residual: Vector | None = None  # float32, same shape: the exact parameters less ``params``; None: there is none

    @property
    def exact(self) -> Vector:
        """The parameters as the outer steps have led to them, before any was rounded for the wire."""
        return self.params if self.residual is None else self.params + self.residual


def seeded(params: Vector) -> FragmentState:
    """Returns version 0 of a fragment: the given parameters at rest."""
    momentum = np.zeros(params.shape, np.float32)  # not zeros_like, which takes memory for each zero
    return FragmentState(params=params, momentum=momentum, version=0)
