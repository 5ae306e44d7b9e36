"""What each way of training together asks of the links, and what it makes of given ones: closed forms. Pure.

Two sets of assumptions:

*atoll*: what our programs send. Every site has a link to a hub, full duplex. A fragment goes up in the codec of
contributions and comes down in that of versions, headers included; between the two the aggregator merges and persists
it. A round's journey is up + down + twice the latency + the aggregator's time.

    decoupled   islands never wait. The link carries P fragments in H steps, up and down side by side, and what a
                journey takes of the links fits into H steps, since a fragment has one open round at a time. The
                aggregator's time is no link's fault: it stretches H, and the need is told for the H that was asked for.
    streaming   the same fragments, but whoever has no version tau steps after the capture waits for it.
    diloco      all parameters every H steps, and everybody waits for the journey.
    dp          a ring all-reduce of bfloat16 gradients among the sites in every step, in 128 buckets, the first of
                which travel while the backward pass goes on (:mod:`ops.planning.utilisation`).

*paper*: what published figures assume. No headers, no latency, no merging; int4 is 4 bits an element, in both
directions, which a fragment goes at the same time; DiLoCo and data-parallel by ring; the simulation of
:mod:`ops.planning.utilisation` on a grid of bandwidths, 0.1 to 1000 Gbit/s in 200 steps, or its closed form where that
says more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from broker.wire.errors import ConfigError
from broker.wire.messages import Codec
from ops.planning.footprint import MessageBytes
from ops.planning.utilisation import Float64Array, Traffic, closed_form, required_gbps, required_on_grid, spread

PAPER_GRID: Float64Array = np.logspace(-1, 3, 200)
GRADIENT_BITS = 16
_NOMINAL_BITS = {Codec.F32: 32, Codec.BF16: 16, Codec.INT8: 8, Codec.INT4: 4}


class Mode(StrEnum):
    """Ways of training one model on several sites."""

    DECOUPLED = "decoupled"
    STREAMING = "streaming"
    DILOCO = "diloco"
    DP = "dp"


class Assume(StrEnum):
    """Whose assumptions."""

    ATOLL = "atoll"
    PAPER = "paper"


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What has to travel, for one mode.

    Attributes:
        mode: How.
        assume: By whose assumptions.
        parameters: Elements that are synchronised.
        sites: M.
        step_s: Of the fleet's pace: its upper median, or its slowest site where all wait for each other.
        wire: Of one island.
        codec: Of contributions; ``wire`` has it already, the paper's assumptions count nominal bits.
        sync_interval_steps: H.
        overlap_steps: tau.
        max_staleness: Versions that a step may be behind when it is merged.
        latency_s: Of a journey, there and back; for dp of a whole ring.
        mergings_s: Of a journey: what the aggregator takes for each fragment.
    """

    mode: Mode
    assume: Assume
    parameters: int
    sites: int
    step_s: float
    wire: MessageBytes
    codec: Codec
    sync_interval_steps: int
    overlap_steps: int
    max_staleness: int
    latency_s: float
    mergings_s: tuple[float, ...]

    @property
    def ring(self) -> bool:
        """Whether sites send to each other; else through a hub."""
        return self.mode is Mode.DP or (self.mode is Mode.DILOCO and self.assume is Assume.PAPER)

    @property
    def alone(self) -> bool:
        """Whether nothing has to travel: a ring of one."""
        return self.sites == 1 and self.ring

    @property
    def interval_s(self) -> float:
        """H steps, in seconds."""
        return self.sync_interval_steps * self.step_s

    @property
    def spacing_s(self) -> float:
        """H / P steps, in seconds: the time between two rounds."""
        return self.interval_s / self.wire.rounds

    @property
    def fixed_s(self) -> float:
        """Of a journey of the largest fragment, whatever the bandwidth."""
        return self.latency_s + max(self.mergings_s)

    @property
    def turn_s(self) -> float:
        """The time from one round to the first that is captured after its version was needed, if nobody has to wait.

        Of rounds that follow each other so closely that several are under way, all those of a turn wait together.
        """
        return self.spacing_s * max(1, math.ceil(self.overlap_steps * self.step_s / self.spacing_s - 1e-9))


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """Gbit/s of one site's link; ``exact_gbps``, the larger of both before it was moved to a grid, is enough."""

    up_gbps: float
    down_gbps: float
    exact_gbps: float


def required(load: Load, utilisation: float) -> Need:
    """Returns the least bandwidth of each site at which accelerators compute for this share of the time.

    Decoupled islands never wait, so their links must carry what they produce at full speed, whatever is asked for,
    and whatever the aggregator takes.

    Raises:
        ConfigError: No bandwidth is enough, with what would be possible.
    """
    if load.alone:
        return Need(up_gbps=0.0, down_gbps=0.0, exact_gbps=0.0)
    if load.assume is Assume.PAPER:
        return _required_by_paper(load, utilisation)
    match load.mode:
        case Mode.DECOUPLED:
            return _required_decoupled(load)
        case Mode.DP:
            lost = load.latency_s / load.step_s  # a ring waits for its latencies whatever the bandwidth
            if 1 / utilisation - lost <= 1:
                raise _too_far(load, utilisation, 1 / (1 + lost))
            gbps = required_gbps(_traffic(load), 1 / (1 / utilisation - lost))
            return Need(up_gbps=gbps, down_gbps=gbps, exact_gbps=gbps)
        case Mode.DILOCO | Mode.STREAMING:
            return _required_by_who_waits(load, utilisation)


def achieved(load: Load, gbps: float) -> float:
    """Returns the share of the time that accelerators compute on links of so many Gbit/s in each direction."""
    if load.mode is Mode.DECOUPLED or load.alone:
        return 1.0
    if load.assume is Assume.PAPER:
        return float(closed_form(_traffic(load), gbps)[0])
    if load.mode is Mode.DP:
        return float(1 / (1 / closed_form(_traffic(load), gbps)[0] + load.latency_s / load.step_s))
    journey = journey_s(load, gbps, gbps)
    if load.mode is Mode.DILOCO:
        return load.interval_s / (load.interval_s + journey)
    stalled_s = max(0.0, journey - load.overlap_steps * load.step_s)
    busiest_s = max(load.wire.cycle_up_bytes, load.wire.cycle_down_bytes) * 8e-9 / gbps
    return min(load.turn_s / (load.turn_s + stalled_s), load.interval_s / busiest_s)


def journey_s(load: Load, up_gbps: float, down_gbps: float) -> float:
    """Returns the seconds from the opening of a round of the largest fragment until its version has arrived.

    In a ring, the seconds that the whole payload takes.
    """
    return max(journeys_s(load, up_gbps, down_gbps))


def journeys_s(load: Load, up_gbps: float, down_gbps: float) -> tuple[float, ...]:
    """Returns the same of each fragment; published assumptions have equal ones, and a ring but one."""
    if load.ring:
        return (load.fixed_s + (_traffic(load).payload_gbit / up_gbps if up_gbps else 0.0),)
    if load.assume is Assume.PAPER:
        return (_nominal_gbit(load) / load.wire.rounds / min(up_gbps, down_gbps),) * load.wire.rounds
    each = zip(load.wire.ups, load.wire.downs, load.mergings_s, strict=True)
    return tuple(load.latency_s + made + 8e-9 * (up / up_gbps + down / down_gbps) for up, down, made in each)


def made_s(load: Load, up_gbps: float, down_gbps: float) -> float:
    """Returns the seconds from the opening of a round of the largest fragment until its version is made.

    The next round of the fragment waits for that, and not for the way down; the published assumptions do not tell them
    apart.
    """
    whole_s = journey_s(load, up_gbps, down_gbps)
    if load.alone or load.assume is Assume.PAPER:
        return whole_s
    return whole_s - load.wire.largest_down_bytes * 8e-9 / down_gbps


def carried_bytes(load: Load) -> tuple[float, float]:
    """Returns the bytes that one site sends and receives in an inner step."""
    if load.mode is Mode.DP or load.assume is Assume.PAPER:
        each = _traffic(load).payload_gbit / load.sync_interval_steps / 8e-9
        return each, each
    return (
        load.wire.cycle_up_bytes / load.sync_interval_steps,
        load.wire.cycle_down_bytes / load.sync_interval_steps,
    )


# --- atoll --------------------------------------------------------------------------------------------------------


def _required_decoupled(load: Load) -> Need:
    wire, interval_s = load.wire, load.interval_s
    if load.latency_s >= interval_s:
        twice = math.ceil(2 * load.latency_s / load.step_s)
        takes = f"latency alone takes {load.latency_s:.3g} s of a round, and H steps {interval_s:.3g} s"
        raise ConfigError(
            "sync_interval", load.sync_interval_steps, f"{takes}: an H of {twice} leaves half of it to the links"
        )
    # An even flow is enough unless the largest fragment, up and then down, takes longer than the interval.
    up, down = (nbytes * 8e-9 / interval_s for nbytes in (wire.cycle_up_bytes, wire.cycle_down_bytes))
    up, down = _in_time(wire, interval_s - load.latency_s, up, down)
    return Need(up_gbps=up, down_gbps=down, exact_gbps=max(up, down))


def _in_time(wire: MessageBytes, within_s: float, up_gbps: float, down_gbps: float) -> tuple[float, float]:
    """Returns rates of at least these at which the largest fragment goes up and comes down in time.

    Where one direction is wide enough for both at its rate, the other one gets the time that is left. Else they are
    alike: other pairs of rates would do as well, and of all of them the wider one is the narrowest here.
    """
    up_gbit, down_gbit = wire.largest_up_bytes * 8e-9, wire.largest_down_bytes * 8e-9
    if up_gbit / up_gbps + down_gbit / down_gbps <= within_s * (1 + 1e-9):
        return up_gbps, down_gbps
    both = (up_gbit + down_gbit) / within_s
    if down_gbps >= both:
        return up_gbit / (within_s - down_gbit / down_gbps), down_gbps
    if up_gbps >= both:
        return up_gbps, down_gbit / (within_s - up_gbit / up_gbps)
    return both, both


def _required_by_who_waits(load: Load, utilisation: float) -> Need:
    """DiLoCo waits for the whole journey, streaming for what of it exceeds tau steps; one is one round of the other."""
    allowed_s = load.overlap_steps * load.step_s if load.mode is Mode.STREAMING else 0.0
    turn_s = load.turn_s
    within_s = allowed_s + turn_s * (1 / utilisation - 1) - load.latency_s
    if within_s <= 0:
        raise _too_far(load, utilisation, turn_s / (turn_s + load.latency_s - allowed_s))
    rate = utilisation / load.interval_s * 8e-9
    up, down = _in_time(load.wire, within_s, load.wire.cycle_up_bytes * rate, load.wire.cycle_down_bytes * rate)
    return Need(up_gbps=up, down_gbps=down, exact_gbps=max(up, down))


def _too_far(load: Load, utilisation: float, possible: float) -> ConfigError:
    """No bandwidth helps against latency."""
    at_most = f"{load.mode} reaches at most {possible:.1%} here: {load.latency_s:.3g} s of each journey are latency"
    field, value = ("overlap", load.overlap_steps) if load.mode is Mode.STREAMING else ("utilisation", utilisation)
    return ConfigError(field, value, f"{at_most}; {other_than_waiting(load)}")


def other_than_waiting(load: Load) -> str:
    """Says what to do where a mode waits for its latency too long."""
    steps = int(load.latency_s / load.step_s) + 1
    if load.mode is Mode.STREAMING and load.overlap_steps < steps < load.sync_interval_steps:
        return f"an overlap of {steps} steps hides it"
    return "sync less often, or train decoupled" if load.mode is not Mode.DP else "train decoupled"


# --- paper --------------------------------------------------------------------------------------------------------


def _required_by_paper(load: Load, utilisation: float) -> Need:
    traffic = _traffic(load)
    if load.mode is Mode.DECOUPLED:
        exact = traffic.payload_gbit / load.interval_s
        gbps = _next_on_grid(exact)
    else:
        exact = required_gbps(traffic, utilisation)
        # Where fragments cannot be spaced evenly the simulation takes less; a link is judged by the closed form.
        gbps = max(required_on_grid(traffic, [utilisation], PAPER_GRID)[0], _next_on_grid(exact))
    if math.isinf(gbps) or not PAPER_GRID[0] <= exact <= PAPER_GRID[-1]:
        gbps = exact
    return Need(up_gbps=gbps, down_gbps=gbps, exact_gbps=exact)


def _next_on_grid(gbps: float) -> float:
    return float(PAPER_GRID[min(int(np.searchsorted(PAPER_GRID, gbps * (1 - 1e-12))), len(PAPER_GRID) - 1)])


def _nominal_gbit(load: Load) -> float:
    return load.parameters * _NOMINAL_BITS[load.codec] / 1e9


def _traffic(load: Load) -> Traffic:
    """The mode as :mod:`ops.planning.utilisation` has it: a ring sends 2 (1 - 1/M) of the payload, a hub's site all."""
    ring = 2 * (1 - 1 / load.sites)
    one_transfer = (spread(),)
    match load.mode:
        case Mode.DP:
            gbit = load.parameters * GRADIENT_BITS / 1e9 * ring
            return Traffic(payload_gbit=gbit, step_s=load.step_s, releases=one_transfer)
        case Mode.DILOCO:
            return Traffic(
                payload_gbit=_nominal_gbit(load) * ring,
                step_s=load.step_s,
                releases=one_transfer,
                sync_interval_steps=load.sync_interval_steps,
            )
        case _:
            return Traffic(
                payload_gbit=_nominal_gbit(load),
                step_s=load.step_s,
                releases=one_transfer * load.wire.rounds,
                sync_interval_steps=load.sync_interval_steps,
                overlap_steps=load.overlap_steps,
            )


def assumptions(assume: Assume, *, codec: Codec, version_codec: Codec, sites: int, shards: int) -> Sequence[str]:
    """Returns the sentences that say what the figures rest on."""
    ring = f"each site sends 2 (1 - 1/M) = {2 * (1 - 1 / sites):.3g} times the payload and receives as much"
    aggregators, through = "The aggregator runs", ""
    if shards > 1:
        aggregators = f"Each of {shards} aggregators runs on a host of its own"
        through = "; contributions go on to the hosts of aggregators, and each version comes from there once"
    buckets = "bfloat16 gradients in 128 buckets, released over the backward pass (2/3 of a step)"
    if assume is Assume.PAPER:
        bits = _NOMINAL_BITS[codec]
        return (
            f"Published assumptions: {bits} bits an element in both directions, no headers, latency or merging time.",
            "Decoupled and streaming go through a hub: a site sends and receives each fragment once, at the same time "
            f"(f = 1), and the hub's site carries {sites} times that; with the hub cut into a shard per site, "
            "f = 2 (1 - 1/M).",
            "Decoupled learners never wait: the link carries what they produce at full speed, whatever the target.",
            f"Data-parallel and DiLoCo use a ring: {ring}; data-parallel sends {buckets}.",
            "Required bandwidths are the next point of the grid logspace(-1, 3, 200) in Gbit/s, from 2,000 steps, or "
            "from the closed form where that says more.",
        )
    return (
        f"Traffic of our own programs through a hub: each fragment goes up once in {codec} and down once in "
        f"{version_codec} every H steps (f = 1), headers included; the broker carries all {sites} sites' "
        f"traffic{through}.",
        "Heartbeats and announcements (a few kB/s for each island) and the bytes of TCP/IP are not counted.",
        "Decoupled islands never wait: the link carries what they produce at full speed, whatever the target. Where "
        "the median site's is narrower upwards, or the aggregator slow, the interval stretches instead; whose own is "
        "narrower takes part less often, with more steps that are older: to first order.",
        f"{aggregators} beside the broker. It takes 6 ms + 3 ms for each island, and 13 ns + 1.3 ns for each "
        "island per parameter of a fragment, as measured on two shared cores; the baselines are granted one "
        "that takes no time, beside the broker.",
        f"Data-parallel is a ring of {buckets}, neighbours as far apart as a site and the hub: {ring}.",
    )
