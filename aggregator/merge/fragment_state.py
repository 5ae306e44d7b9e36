"""One fragment of the global model at one version: its vectors, and how a new version is named. Pure."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from aggregator.interface.events import Computed
from broker.wire.messages import Encoded

Vector = NDArray[np.float32]
#: Of a cosine, in what is reported: more is noise of sums in float32.
DIGITS = 6


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


class Made(NamedTuple):
    """A version that exists in memory only, and the name of its bytes.

    ``difference`` is what is to be added to the version before; None for one that travels whole. ``cosines`` and
    ``momentum_cosine`` are as :class:`aggregator.merge.kernels.MergedFragment` has them.
    """

    state: FragmentState
    digest: str
    difference: tuple[Encoded, ...] | None = None
    cosines: tuple[float, ...] = ()
    momentum_cosine: float | None = None

    def reported(self, fragment_id: int) -> Computed:
        """Returns the event that reports this version to the core."""
        return Computed(
            fragment_id=fragment_id,
            fragment_version=self.state.version,
            digest=self.digest,
            cosines=self.cosines,
            momentum_cosine=None if self.momentum_cosine is None else round(self.momentum_cosine, DIGITS),
        )
