"""Computes each mode's bandwidth need, and its pace on given links, in closed form. Pure.

Two sets of assumptions:

*atoll*: what our programs send. Every site has a link to a hub, full duplex. A fragment goes up in the codec of
contributions and comes down in that of versions, headers included; between the two the aggregator merges and persists
it. A round's journey is up + down + twice the latency + the aggregator's time.

    decoupled   islands never wait. The link carries P fragments in H steps, up and down side by side, and what a
                journey takes of the links fits into H steps, since a fragment has one open round at a time. The
                aggregator's time is no link's fault: it stretches H, and the need is told for the H that was asked for.
    streaming   the same fragments, but a site without the version tau steps after the capture waits for it.
    diloco      all parameters every H steps, and everybody waits for the journey.
    dp          a ring all-reduce of bfloat16 gradients among the sites in every step, in 128 buckets, the first of
                which travel during the backward pass (:mod:`ops.forecast.utilisation`).

*paper*: what published figures assume. No headers, latency or merging; int4 is 4 bits an element; a fragment goes both
ways at the same time; DiLoCo and data-parallel by ring; bandwidths on a grid of 0.1 to 1000 Gbit/s in 200 steps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from broker.base.errors import ConfigError
from broker.wire.fragments import shard_of
from broker.wire.messages import Codec
from ops.forecast.fleet import PLANNED, Assume, Fleet, Mode, lower_median
from ops.forecast.footprint import FragmentBytes
from ops.forecast.utilisation import Float64Array, Traffic, closed_form, released, required_gbps

#: The aggregator's time for a round, measured (benchmarks/README.md, "Outer round latency") on two shared cores.
ROUND_S, ROUND_PER_ISLAND_S = 6e-3, 3e-3
MERGE_AND_PERSIST_S, MERGE_PER_ISLAND_S = 13e-9, 1.3e-9  # per parameter of the fragment

PAPER_GRID: Float64Array = np.logspace(-1, 3, 200)
GRADIENT_BITS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The traffic and the pace of one mode."""

    mode: Mode
    assume: Assume
    sites: int  # M
    step_s: float  # of the fleet's pace: its upper median, or its slowest site where all wait for each other
    wire: FragmentBytes  # of one island
    codec: Codec  # of contributions; wire has it already, the paper's assumptions count nominal bits
    sync_interval_steps: int  # H
    overlap_steps: int  # tau
    latency_s: float  # of a journey, there and back; for dp of a whole ring
    mergings_s: tuple[float, ...]  # the aggregator's seconds of a journey, for each fragment

    @property
    def ring(self) -> bool:
        """Returns whether sites send to each other in a ring, and not through a hub."""
        return self.mode is Mode.DP or (self.mode is Mode.DILOCO and self.assume is Assume.PAPER)

    @property
    def alone(self) -> bool:
        """Returns whether nothing has to travel: a ring of one site."""
        return self.sites == 1 and self.ring

    @property
    def interval_s(self) -> float:
        """H steps, in seconds."""
        return self.sync_interval_steps * self.step_s

    @property
    def turn_s(self) -> float:
        """Seconds from a round to the first one captured after its version was needed, without waiting.

        If several rounds are under way at a time, all rounds of a turn wait together.
        """
        spacing_s = self.interval_s / self.wire.rounds
        return spacing_s * max(1, math.ceil(self.overlap_steps * self.step_s / spacing_s - 1e-9))


def load_of(fleet: Fleet, mode: Mode) -> Load:
    """Returns the traffic and pace of ``fleet`` in one of the planned modes."""
    assert mode in PLANNED
    wire, decoupled = fleet.wire(mode), mode is Mode.DECOUPLED
    return Load(
        mode=mode,
        assume=fleet.assume,
        sites=len(fleet.sites),
        # Synchronous ways follow the slowest site.
        step_s=-lower_median([-site.step_time for site in fleet.sites]) if decoupled else fleet.slowest_step_s,
        wire=wire,
        codec=fleet.codec,
        sync_interval_steps=1 if mode is Mode.DP else fleet.sync_interval,
        overlap_steps=0 if mode in (Mode.DILOCO, Mode.DP) else fleet.overlap,
        latency_s=_latency_s(fleet, mode),
        # The baselines are granted an aggregator that takes no time.
        mergings_s=tuple(_merging_s(fleet, elements) if decoupled else 0.0 for elements in wire.elements),
    )


def _latency_s(fleet: Fleet, mode: Mode) -> float:
    if fleet.assume is Assume.PAPER:
        return 0.0
    journeys_s = [site.journey_s for site in fleet.sites]
    if mode is Mode.DECOUPLED:  # rounds wait for the median site; farther sites are merged later
        return -lower_median([-each for each in journeys_s])
    return max(journeys_s) * (len(fleet.sites) - 1 if mode is Mode.DP else 1)


def _merging_s(fleet: Fleet, elements: int) -> float:
    """Returns the aggregator's seconds for one round of a fragment of ``parameters`` parameters."""
    if fleet.assume is Assume.PAPER:
        return 0.0
    islands = len(fleet.sites)
    per_element_s = MERGE_AND_PERSIST_S + islands * MERGE_PER_ISLAND_S
    return ROUND_S + islands * ROUND_PER_ISLAND_S + elements * per_element_s


def merging_steps(fleet: Fleet) -> int:
    """Returns the least H: inner steps in which the aggregator can merge every fragment once.

    One fragment after the other, shards side by side.
    """
    load = load_of(fleet, Mode.DECOUPLED)
    of_shards_s = [0.0] * fleet.shards
    for p, merging_s in enumerate(load.mergings_s):
        of_shards_s[shard_of(p, fleet.shards)] += merging_s
    return math.ceil(max(of_shards_s) / load.step_s * (1 - 1e-9))


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """Gbit/s of one site's link; ``exact_gbps``, the larger of both before rounding to a grid, is enough."""

    up_gbps: float
    down_gbps: float
    exact_gbps: float


def required(load: Load, utilisation: float) -> Need:
    """Returns each site's least bandwidth at which accelerators compute for this share of the time.

    Decoupled islands never wait, so their links must carry what they produce at full speed, whatever is asked for,
    and whatever the aggregator takes.

    Raises:
        ConfigError: No bandwidth is enough, with what would be possible.
    """
    if load.alone:
        return Need(up_gbps=0.0, down_gbps=0.0, exact_gbps=0.0)
    if load.assume is Assume.PAPER:
        return _required_by_paper(load, utilisation)
    if load.mode is Mode.DP:
        lost = load.latency_s / load.step_s  # a ring waits for its latencies whatever the bandwidth
        if 1 / utilisation - lost <= 1:
            raise _too_far(load, utilisation, 1 / (1 + lost))
        gbps = required_gbps(_traffic(load), 1 / (1 / utilisation - lost))
        return Need(up_gbps=gbps, down_gbps=gbps, exact_gbps=gbps)
    share = 1.0  # of the link's time, for which it is busy
    if load.mode is Mode.DECOUPLED:
        within_s = load.interval_s - load.latency_s
        if within_s <= 0:
            twice = math.ceil(2 * load.latency_s / load.step_s)
            takes = f"latency alone takes {load.latency_s:.3g} s of a round, and H steps {load.interval_s:.3g} s"
            cure = f"{takes}: an H of {twice} leaves half of it to the links"
            raise ConfigError("sync_interval", load.sync_interval_steps, cure)
    else:  # DiLoCo waits for the whole journey, streaming for what of it exceeds tau steps
        allowed_s = load.overlap_steps * load.step_s if load.mode is Mode.STREAMING else 0.0
        within_s = allowed_s + load.turn_s * (1 / utilisation - 1) - load.latency_s
        share = utilisation
        if within_s <= 0:
            raise _too_far(load, utilisation, load.turn_s / (load.turn_s + load.latency_s - allowed_s))
    # An even flow is enough unless the largest fragment, up and then down, takes longer than it may.
    up, down = (sum(nbytes) * share * 8e-9 / load.interval_s for nbytes in (load.wire.ups, load.wire.downs))
    up, down = _in_time(load.wire, within_s, up, down)
    return Need(up_gbps=up, down_gbps=down, exact_gbps=max(up, down))


def _in_time(wire: FragmentBytes, within_s: float, up_gbps: float, down_gbps: float) -> tuple[float, float]:
    """Returns rates, at least the given ones, that carry the largest fragment both ways in time.

    Where one direction is wide enough for both at its rate, the other one gets the time that is left. Else they are
    alike: other pairs of rates would do as well, and of all of them the wider one is the narrowest here.
    """
    up_gbit, down_gbit = max(wire.ups) * 8e-9, max(wire.downs) * 8e-9
    if up_gbit / up_gbps + down_gbit / down_gbps <= within_s * (1 + 1e-9):
        return up_gbps, down_gbps
    both = (up_gbit + down_gbit) / within_s
    if down_gbps >= both:
        return up_gbit / (within_s - down_gbit / down_gbps), down_gbps
    if up_gbps >= both:
        return up_gbps, down_gbit / (within_s - up_gbit / up_gbps)
    return both, both


def _too_far(load: Load, utilisation: float, possible: float) -> ConfigError:
    """Returns the error for a latency that no bandwidth can make up for."""
    at_most = f"{load.mode} reaches at most {possible:.1%} here: {load.latency_s:.3g} s of each journey are latency"
    field, value = ("overlap", load.overlap_steps) if load.mode is Mode.STREAMING else ("utilisation", utilisation)
    return ConfigError(field, value, f"{at_most}; {other_than_waiting(load)}")


def other_than_waiting(load: Load) -> str:
    """Returns the cure for a mode that waits too long for its latency."""
    steps = int(load.latency_s / load.step_s) + 1
    if load.mode is Mode.STREAMING and load.overlap_steps < steps < load.sync_interval_steps:
        return f"an overlap of {steps} steps hides it"
    return "sync less often, or train decoupled" if load.mode is not Mode.DP else "train decoupled"


def achieved(load: Load, gbps: float) -> float:
    """Returns the share of time in which accelerators compute, on links of ``gbps`` in each direction."""
    if load.mode is Mode.DECOUPLED or load.alone:
        return 1.0
    if load.ring or load.assume is Assume.PAPER:
        busy = float(closed_form(_traffic(load), gbps)[0])
        return 1 / (1 / busy + load.latency_s / load.step_s) if load.latency_s else busy
    journey_s = max(journeys_s(load, gbps, gbps))
    if load.mode is Mode.DILOCO:
        return load.interval_s / (load.interval_s + journey_s)
    stalled_s = max(0.0, journey_s - load.overlap_steps * load.step_s)
    busiest_s = max(sum(load.wire.ups), sum(load.wire.downs)) * 8e-9 / gbps
    return min(load.turn_s / (load.turn_s + stalled_s), load.interval_s / busiest_s)


def journeys_s(load: Load, up_gbps: float, down_gbps: float) -> tuple[float, ...]:
    """Returns the seconds from the opening of a round of each fragment until its version has arrived.

    In a ring, the seconds that the whole payload takes.
    """
    if load.ring:
        return (load.latency_s + (_traffic(load).payload_gbit / up_gbps if up_gbps else 0.0),)
    if load.assume is Assume.PAPER:
        return (_traffic(load).payload_gbit / load.wire.rounds / min(up_gbps, down_gbps),) * load.wire.rounds
    each = zip(load.wire.ups, load.wire.downs, load.mergings_s, strict=True)
    return tuple(load.latency_s + made + 8e-9 * (up / up_gbps + down / down_gbps) for up, down, made in each)


def carried_bytes(load: Load) -> tuple[float, float]:
    """Returns the bytes that one site sends and receives in an inner step."""
    if load.ring or load.assume is Assume.PAPER:
        each = _traffic(load).payload_gbit / load.sync_interval_steps / 8e-9
        return each, each
    return sum(load.wire.ups) / load.sync_interval_steps, sum(load.wire.downs) / load.sync_interval_steps


def _required_by_paper(load: Load, utilisation: float) -> Need:
    traffic = _traffic(load)
    if load.mode is Mode.DECOUPLED:
        exact = traffic.payload_gbit / load.interval_s
    else:
        exact = required_gbps(traffic, utilisation)
    gbps = exact
    if PAPER_GRID[0] <= exact <= PAPER_GRID[-1]:
        gbps = float(PAPER_GRID[min(int(np.searchsorted(PAPER_GRID, exact * (1 - 1e-12))), len(PAPER_GRID) - 1)])
    return Need(up_gbps=gbps, down_gbps=gbps, exact_gbps=exact)


def _traffic(load: Load) -> Traffic:
    """Returns the mode's traffic: 2 (1 - 1/M) of the payload in a ring, all of it through a hub."""
    bits = GRADIENT_BITS if load.mode is Mode.DP else load.codec.bits
    return Traffic(
        payload_gbit=sum(load.wire.elements) * bits / 1e9 * (2 * (1 - 1 / load.sites) if load.ring else 1.0),
        step_s=load.step_s,
        releases=(released(),) * (1 if load.ring else load.wire.rounds),
        sync_interval_steps=load.sync_interval_steps,
        overlap_steps=load.overlap_steps,
    )
