"""Computes accelerator utilisation on a link in closed form. Pure.

Time is counted in inner steps of one step time T; a step is one third forward pass and two thirds backward pass.
The traffic is cut into *buckets*, which are released during the backward pass and cross a FIFO link one
after the other. Whatever was released in step k must have crossed by the end of step k + tau (the deadline); where
it has not, the next step starts late, and that is the only way to lose time. With d = payload of one transfer /
(bandwidth * T) steps on the link, g steps from the start of the releasing step until the last bucket has crossed an
idle link, and a transfer every h = H / P steps:

    utilisation = min(1, h / d, h / (h + mean(max(0, g - (tau + 1)))))

The second term is a link that never rests; the third is an idle one that still misses the deadline. Tested against a
simulation of every bucket: within 0.3 points where H / P is whole, within 5 % where fragments cannot be spaced evenly.

    data parallel      every step, all parameters, tau = 0
    DiLoCo             every H steps, all parameters, tau = 0
    streaming DiLoCo   every H / P steps, one fragment of P, tau steps of overlap

Reference: Streaming DiLoCo, https://arxiv.org/abs/2501.18512; the rules are those of its first author's simulator.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Float64Array = npt.NDArray[np.float64]

#: Share of a step that the forward pass takes: nothing is released in it.
FORWARD = 1 / 3

#: Buckets that gradients are cut into where nothing is known of the layers.
BUCKETS = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """The traffic on one site's link, and its deadlines."""

    payload_gbit: float  # all fragments once, with the codec and the traffic count (ring or hub) in it
    step_s: float  # T, seconds of computing per inner step
    # Per fragment, when each of its buckets is released, in steps from the start of the releasing step, ascending.
    # Buckets are of equal size over all fragments.
    releases: tuple[tuple[float, ...], ...]
    sync_interval_steps: int = 1  # H, inner steps between two transfers of one fragment
    overlap_steps: int = 0  # tau, whole steps after the releasing one that may pass before the transfer is needed

    @property
    def spacing_steps(self) -> float:
        """Steps between two transfers, h = H / P."""
        return self.sync_interval_steps / len(self.releases)

    @property
    def buckets(self) -> int:
        """Buckets of all fragments together."""
        return sum(map(len, self.releases))


def released(parts: int = BUCKETS, *, within: float = 0.5) -> tuple[float, ...]:
    """Returns the release times of equal parts of the backward pass: in their middle, or at ``within``.

    The middle is fitted: with the end of its part, one of two published figures for data-parallel training (198 and 104
    Gbit/s) was missed by a point of their grid.
    """
    return tuple(FORWARD + (1 - FORWARD) * (i + within) / parts for i in range(parts))


def crossing_steps(traffic: Traffic, gbps: Float64Array) -> list[Float64Array]:
    """Returns g of each fragment: steps from the start of its releasing step to arrival on an idle link.

    With buckets released at r_1 <= r_2 <= ... <= r_n that take s each: g = max over i of r_i + (n - i + 1) * s.
    """
    per_bucket = traffic.payload_gbit / traffic.buckets / (gbps * traffic.step_s)
    crossed = {
        releases: np.max(np.array(releases)[:, None] + np.outer(np.arange(len(releases), 0, -1), per_bucket), axis=0)
        for releases in set(traffic.releases)  # most fragments are alike
    }
    return [crossed[releases] for releases in traffic.releases]


def closed_form(traffic: Traffic, gbps: npt.ArrayLike) -> Float64Array:
    """Returns the utilisation for each bandwidth, by the formula at the top of this module."""
    bandwidth = np.atleast_1d(np.asarray(gbps, np.float64))
    h = traffic.spacing_steps
    d = traffic.payload_gbit / len(traffic.releases) / (bandwidth * traffic.step_s)
    deadline = traffic.overlap_steps + 1
    missed = np.mean([np.maximum(0.0, g - deadline) for g in crossing_steps(traffic, bandwidth)], axis=0)
    utilisation: Float64Array = np.minimum(1.0, np.minimum(h / d, h / (h + missed)))
    return utilisation


def required_gbps(traffic: Traffic, utilisation: float) -> float:
    """Returns the least bandwidth, to 1 in 10^12, with at least ``utilisation`` (0 to 1) in closed form.

    For gradients of b bits in many buckets (data parallel) that is N * b * 2 (1 - 1/M) / (T * (1/u - 1/3)), and for
    fragments whose transfers fill the interval N * b * u / (H * T).
    """
    low, high = np.full(1, 1e-12), np.full(1, 1e-12)
    while closed_form(traffic, high)[0] < utilisation:
        low, high = high, high * 16
    for _ in range(100):
        middle = np.sqrt(low * high)
        if closed_form(traffic, middle)[0] < utilisation:
            low = middle
        else:
            high = middle
    return float(high[0])
