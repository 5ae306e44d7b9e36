"""Initial values of parameters that are never synchronised, to restore spoilt ones.

The run has no copy of them. Batch statistics that are not finite would make the next step not finite again, whatever
the global parameters and however fresh the optimizer, and the island would be refused for ever.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from islands.arguments import is_floating
from islands.arrays.placement import Leaf, from_host, here
from islands.hosts.regions import Spread


class InitialValues:
    """Copies on the host.

    Args:
        leaves: The unsynchronised parameters; waits until a device has computed them.
    """

    def __init__(self, leaves: Sequence[Leaf]) -> None:
        self._arrays = [_copied(here(leaf)) for leaf in leaves]

    def restored(self, leaves: Sequence[Leaf]) -> list[Leaf]:
        """Returns ``leaves``, in the same order, with those that can be spoilt as they were; never waits.

        Counters, masks and random keys cannot be infinite or NaN: they go on where they are.
        """
        return [
            from_host(array, leaf) if is_floating(array.dtype) or array.dtype.kind == "c" else leaf
            for array, leaf in zip(self._arrays, leaves, strict=True)
        ]


def _copied(value: npt.NDArray[Any] | Spread) -> npt.NDArray[Any] | Spread:
    if isinstance(value, Spread):
        return Spread(value.shape, value.dtype, {region: np.array(part) for region, part in value.parts.items()})
    return np.array(value)
