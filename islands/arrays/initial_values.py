"""Initial values of parameters that are never synchronised, to restore spoilt ones.

The run has no copy of them. Batch statistics that are not finite would make the next step not finite again, whatever
the global parameters and however fresh the optimizer, and the island would be refused for ever.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from islands.arrays.placement import Leaf, from_host, to_host

#: Kinds of numpy's dtypes that cannot be infinite or NaN: counters and the data of random keys go on where they are.
_ALWAYS_FINITE = "iub"


class InitialValues:
    """Copies on the host.

    Args:
        leaves: The unsynchronised parameters; waits until a device has computed them.
    """

    def __init__(self, leaves: Sequence[Leaf]) -> None:
        self._arrays: list[npt.NDArray[Any]] = [np.array(to_host(leaf)) for leaf in leaves]

    def restored(self, leaves: Sequence[Leaf]) -> list[Leaf]:
        """Returns ``leaves``, in the same order, with those that can be spoilt as they were; never waits."""
        return [
            leaf if array.dtype.kind in _ALWAYS_FINITE else from_host(array, leaf)
            for array, leaf in zip(self._arrays, leaves, strict=True)
        ]
