"""Published bandwidth figures, and the same ones recomputed by :mod:`ops.planning.utilisation`. Pure.

*The table of Streaming DiLoCo* (https://arxiv.org/abs/2501.18512): the least Gbit/s that keeps accelerators busy for
50 to 99 % of the time, for two sizes and five methods. Of its assumptions the paper states the step times, the layers,
fragments of three layers and the grid of bandwidths. What else reproduces it was found by trying:

    two islands, H = 100, fragments strided over the layers, one step of overlap (tau = 1),
    a bucket per layer, released when that layer's backward pass is done,
    bfloat16; "FP4" is 4 bits and a float32 scale for 256 elements: 4.125 bits an element,
    0.834 of the nominal parameters on the link (:data:`PAYLOAD_SHARE`)

The last one is a fit without a known cause. One step of the grid is a factor of 1.207, and 0.834 of the payload is
nearly the same as listing the bandwidth one step *below* the first that suffices. With 1 in its place nearly every cell
comes out one step higher; the conclusions are the same.

*The pair of Decoupled DiLoCo* (https://arxiv.org/abs/2604.21428): 198 against 0.84 Gbit/s for eight data centres.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from ops.planning.utilisation import Float64Array, Traffic, by_layer, required_on_grid

UTILISATIONS = (0.50, 0.80, 0.90, 0.95, 0.99)

#: Gbit/s, as published: 0.1 to 1000 in 50 steps.
GRID: Float64Array = np.logspace(-1, 3, 50)

LAYERS_PER_FRAGMENT = 3
SYNC_INTERVAL_STEPS = 100
BF16_BITS, FP4_BITS = 16.0, 4.125

#: Of the nominal payload; fitted to the table (see above).
PAYLOAD_SHARE = 0.834


class Method(StrEnum):
    """Columns of the table."""

    DP = "data parallel"
    DILOCO = "DiLoCo"
    STREAMING = "streaming"
    OVERLAP = "+ overlap"
    FP4 = "+ FP4"


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Rows of the table: a model and its step time in seconds."""

    name: str
    parameters: float
    layers: int
    step_s: float


SIZES = (
    Size(name="1B", parameters=1e9, layers=24, step_s=0.1),
    Size(name="100B", parameters=1e11, layers=108, step_s=4.9),
)

#: Gbit/s for each of :data:`UTILISATIONS`.
PUBLISHED: dict[tuple[str, Method], tuple[float, ...]] = {
    ("1B", Method.DP): (86.8, 152.6, 184.2, 222.3, 569.0),
    ("1B", Method.DILOCO): (1.4, 6.2, 13.3, 23.3, 86.8),
    ("1B", Method.STREAMING): (1.4, 5.2, 9.1, 16.0, 28.1),
    ("1B", Method.OVERLAP): (1.4, 4.3, 6.2, 9.1, 11.0),
    ("1B", Method.FP4): (0.4, 0.9, 1.7, 2.0, 3.0),
    ("100B", Method.DP): (184.2, 323.8, 390.7, 390.7, 471.5),
    ("100B", Method.DILOCO): (3.0, 11.0, 23.3, 49.4, 184.2),
    ("100B", Method.STREAMING): (2.4, 6.2, 9.1, 11.0, 19.3),
    ("100B", Method.OVERLAP): (1.7, 3.6, 4.3, 5.2, 5.2),
    ("100B", Method.FP4): (0.5, 0.9, 1.1, 1.1, 1.4),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One figure: Gbit/s as published and as recomputed, and how many steps of the grid the latter is higher."""

    size: str
    method: Method
    utilisation: float
    published_gbps: float
    gbps: float
    steps_apart: int


def recompute(payload_share: float = PAYLOAD_SHARE) -> list[Cell]:
    """Returns the whole table, from simulations of 2,000 steps.

    Args:
        payload_share: Part of the nominal payload that crosses the link; 1 is the rules without the fit.
    """
    cells = []
    for size in SIZES:
        for method in Method:
            traffic = _traffic(size, method, payload_share)
            published = PUBLISHED[size.name, method]
            found = required_on_grid(traffic, UTILISATIONS, GRID)
            for utilisation, theirs, ours in zip(UTILISATIONS, published, found, strict=True):
                index = int(np.searchsorted(GRID, ours * (1 - 1e-9)))
                cells.append(
                    Cell(
                        size=size.name,
                        method=method,
                        utilisation=utilisation,
                        published_gbps=theirs,
                        gbps=ours,
                        steps_apart=min((index - k for k in _printed_as(theirs)), key=abs),
                    )
                )
    return cells


def _traffic(size: Size, method: Method, payload_share: float) -> Traffic:
    """The rules of a method. With two islands a ring moves each byte once: 2 (1 - 1/M) = 1."""
    bits = FP4_BITS if method is Method.FP4 else BF16_BITS
    whole = method in (Method.DP, Method.DILOCO)
    return Traffic(
        payload_gbit=size.parameters * bits / 1e9 * payload_share,
        step_s=size.step_s,
        releases=by_layer(size.layers, 1 if whole else size.layers // LAYERS_PER_FRAGMENT),
        sync_interval_steps=1 if method is Method.DP else SYNC_INTERVAL_STEPS,
        overlap_steps=1 if method in (Method.OVERLAP, Method.FP4) else 0,
    )


def _printed_as(published: float) -> list[int]:
    """Indices of the grid that are printed as ``published``.

    The table rounded twice, to two places and then to one: 0.954 became 0.95 and then 0.9, and 2.947 became 3.0.
    """
    exact = [k for k, gbps in enumerate(GRID) if round(round(float(gbps), 2), 1) == published]
    return exact or [int(np.argmin(np.abs(GRID - published)))]
