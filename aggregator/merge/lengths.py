"""Squared lengths of a contribution's tensors, unit by unit, kept from its inspection for its merge.

RDA needs lengths before it can fold directions. Inspection reads every element anyway, so that merging does not have to
read all contributions once more for them. This is a memo of a pure function: a merge that finds nothing here computes
the same numbers, to the last bit.
"""

from __future__ import annotations

import math
import weakref

from aggregator.interface.events import Pieced
from aggregator.merge.layout import Source
from aggregator.merge.passes import Doubles, Target, fold
from aggregator.merge.resources import in_turn
from broker.wire.fragments import Kind, TensorSpec
from broker.wire.messages import Encoded

#: By identity, as bytes are not compared; what is no longer referred to leaves it.
_known: dict[int, Doubles] = {}


def units_of(tensor: TensorSpec) -> int:
    """Returns the number of a tensor's units that have a length: with RDA its own count, otherwise one."""
    return math.prod(tensor.shape[: tensor.unit_axes]) if tensor.kind is Kind.RDA else 1


def measure(tensor: TensorSpec, encoded: Encoded) -> Doubles:
    """Returns the squared length of each unit, float64 [units], kept as long as ``encoded`` lives.

    Args:
        tensor: Whole, and not empty.
        encoded: The elements, in the shape of the tensor.
    """
    units = units_of(tensor)
    found: Doubles = fold([Source(encoded)], None, 0, units, tensor.size // units, Target(), in_turn)[0]
    if id(encoded) not in _known:
        weakref.finalize(encoded, _known.pop, id(encoded), None).atexit = False
    _known[id(encoded)] = found
    return found


def known(tensor: Encoded | Pieced) -> Doubles | None:
    """Returns what :func:`measure` found, or None."""
    return _known.get(id(tensor))
