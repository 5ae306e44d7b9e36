"""How well a link keeps accelerators busy: an event simulation of buckets on a link, and closed forms. Pure.

Time is counted in inner steps of one step time T; a step is one third forward pass and two thirds backward pass.
What has to travel is cut into *buckets*, which are released while the backward pass goes on and cross a FIFO link one
after the other. Whatever was released in step k must have crossed by the end of step k + tau (the deadline); where
it has not, the next step starts late, and that is the only way to lose time. With d = payload of one transfer /
(bandwidth * T) steps on the link, g steps from the start of the releasing step until the last bucket has crossed an
idle link, and a transfer every h = H / P steps:

    utilisation = min(1, h / d, h / (h + mean(max(0, g - (tau + 1)))))

The second term is a link that never rests; the third is an idle one that still misses the deadline. Tested against the
simulation: within 0.3 points where H / P is whole, and within 5 % where fragments cannot be spaced evenly.

    data parallel      every step, all parameters, tau = 0
    DiLoCo             every H steps, all parameters, tau = 0
    streaming DiLoCo   every H / P steps, one fragment of P, tau steps of overlap

Reference: Streaming DiLoCo, https://arxiv.org/abs/2501.18512; the rules are those of its first author's simulator.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Float64Array = npt.NDArray[np.float64]

#: Share of a step that the forward pass takes: nothing is released in it.
FORWARD = 1 / 3

#: Buckets that gradients are cut into where nothing is known of the layers.
BUCKETS = 128

#: Steps that a simulation runs for.
STEPS = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """What one site's link carries, and by when.

    Attributes:
        payload_gbit: All fragments once, in Gbit on the link: with the codec and the traffic count (ring or hub) in it.
        step_s: T, seconds of computing per inner step.
        releases: Per fragment, when each of its buckets is released, in steps from the start of the releasing step,
            ascending. Buckets are of equal size over all fragments.
        sync_interval_steps: H, inner steps between two transfers of one fragment.
        overlap_steps: tau, whole steps after the releasing one that may pass before the transfer is needed.
    """

    payload_gbit: float
    step_s: float
    releases: tuple[tuple[float, ...], ...]
    sync_interval_steps: int = 1
    overlap_steps: int = 0

    @property
    def spacing_steps(self) -> float:
        """h = H / P: steps between two transfers."""
        return self.sync_interval_steps / len(self.releases)

    @property
    def buckets(self) -> int:
        """Of all fragments together."""
        return sum(map(len, self.releases))


def spread(buckets: int = BUCKETS) -> tuple[float, ...]:
    """Returns when so many buckets are released evenly over the backward pass: each in the middle of its own part.

    The middle is fitted: with the end of its part, one of two published figures for data-parallel training (198 and 104
    Gbit/s) was missed by a point of their grid.
    """
    return _released(buckets, 0.5)


def _released(parts: int, within: float) -> tuple[float, ...]:
    """Returns when equal parts of the backward pass are released, each at this share of its own."""
    return tuple(FORWARD + (1 - FORWARD) * (i + within) / parts for i in range(parts))


def by_layer(layers: int, fragments: int) -> tuple[tuple[float, ...], ...]:
    """Returns when the layers of each fragment are released: the last layer of the model first, each when it is done.

    Fragment p has the layers p, p + P, p + 2 P, ... ("strided", Streaming DiLoCo, section 2.2).
    """
    done = _released(layers, 1.0)
    strides = (range(p, layers, fragments) for p in range(fragments))
    return tuple(tuple(sorted(done[layers - 1 - layer] for layer in stride)) for stride in strides)


def crossing_steps(traffic: Traffic, gbps: Float64Array) -> list[Float64Array]:
    """Returns g of each fragment: steps from the start of the releasing step until an idle link has carried all of it.

    With buckets released at r_1 <= r_2 <= ... <= r_n that take s each: g = max over i of r_i + (n - i + 1) * s.
    """
    per_bucket = traffic.payload_gbit / traffic.buckets / (gbps * traffic.step_s)
    crossed = {
        releases: np.max(np.array(releases)[:, None] + np.outer(np.arange(len(releases), 0, -1), per_bucket), axis=0)
        for releases in set(traffic.releases)  # most fragments are alike
    }
    return [crossed[releases] for releases in traffic.releases]


def simulate(traffic: Traffic, gbps: npt.ArrayLike, steps: int = STEPS) -> Float64Array:
    """Returns the utilisation measured over so many steps, one for each bandwidth.

    Event by event: a transfer starts when its first bucket is released and the link has carried all earlier ones; a
    step starts when the previous one is computed and every transfer due by then has crossed. All bandwidths run
    side by side. Buckets of one transfer follow each other without another between them, so the last one crosses at
    max(link free + n * s, start of the step + g).

    Args:
        traffic: What is carried.
        gbps: Gbit/s, any number of them, all above 0.
        steps: Inner steps to run.
    """
    bandwidth = np.atleast_1d(np.asarray(gbps, np.float64))
    per_bucket = traffic.payload_gbit / traffic.buckets / (bandwidth * traffic.step_s)
    on_the_link = [len(releases) * per_bucket for releases in traffic.releases]
    crossing = crossing_steps(traffic, bandwidth)
    now = np.zeros_like(bandwidth)
    link_free = np.zeros_like(bandwidth)
    schedule = _schedule(traffic)
    due: dict[int, Float64Array] = {}
    for step in range(steps):
        for p in schedule[step % traffic.sync_interval_steps]:
            link_free = np.maximum(link_free + on_the_link[p], now + crossing[p])
            due[step + traffic.overlap_steps] = link_free  # the link is FIFO: the latest of a step is the last
        now = now + 1.0
        if step in due:
            now = np.maximum(now, due.pop(step))
    return steps / now


def _schedule(traffic: Traffic) -> list[list[int]]:
    """Returns the fragments released in each step of an interval, spread as evenly as whole steps allow."""
    fragments, interval = len(traffic.releases), traffic.sync_interval_steps
    released: list[list[int]] = [[] for _ in range(interval)]
    for p in range(fragments):
        released[(p + 1) * interval // fragments - 1].append(p)
    return released


def closed_form(traffic: Traffic, gbps: npt.ArrayLike) -> Float64Array:
    """Returns the utilisation by the formula at the top of this module, one for each bandwidth."""
    bandwidth = np.atleast_1d(np.asarray(gbps, np.float64))
    h = traffic.spacing_steps
    d = traffic.payload_gbit / len(traffic.releases) / (bandwidth * traffic.step_s)
    deadline = traffic.overlap_steps + 1
    missed = np.mean([np.maximum(0.0, g - deadline) for g in crossing_steps(traffic, bandwidth)], axis=0)
    utilisation: Float64Array = np.minimum(1.0, np.minimum(h / d, h / (h + missed)))
    return utilisation


def required_gbps(traffic: Traffic, utilisation: float) -> float:
    """Returns the least bandwidth at which the closed form reaches ``utilisation``, to 1 in 10^12.

    For gradients of b bits in many buckets (data parallel) that is N * b * 2 (1 - 1/M) / (T * (1/u - 1/3)), and for
    fragments whose transfers fill the interval N * b * u / (H * T).

    Args:
        traffic: What is carried.
        utilisation: Between 0 and 1, both excluded.
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


def required_on_grid(traffic: Traffic, utilisation: Sequence[float], grid: Float64Array) -> list[float]:
    """Returns, for each utilisation, the first bandwidth of an ascending grid at which the simulation reaches it.

    Infinity where none does.
    """
    reached = simulate(traffic, grid)
    # A last bit of rounding must not cost a grid step.
    firsts = [np.flatnonzero(reached >= each - 1e-12) for each in utilisation]
    return [float(grid[first[0]]) if first.size else float("inf") for first in firsts]
