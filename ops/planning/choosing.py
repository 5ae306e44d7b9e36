"""Which codec, H and P to choose for given links: the planner's way back. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from broker.wire.errors import ConfigError
from broker.wire.messages import Codec
from ops.planning.fleet import Fleet, interval_s, limits_to_raise, load_of, merging_per_cycle_s, share_gbps
from ops.planning.links import Assume, Mode, journey_s, other_than_waiting, required

#: Intervals, fragments and codecs that :func:`choose` tries, the least harmful first: 4 bits with error feedback cost
#: less than syncing half as often, and versions are rounded last, since every island gets the same rounding error.
INTERVALS = (24, 48, 100, 200, 500, 1000)
FRAGMENTS = (8, 24, 48, 96, 192, 384, 768)
CODECS = (
    (Codec.BF16, Codec.F32),
    (Codec.INT8, Codec.F32),
    (Codec.INT4, Codec.F32),
    (Codec.BF16, Codec.BF16),
    (Codec.INT8, Codec.BF16),
    (Codec.INT4, Codec.BF16),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Settings with which a mode runs on links of ``link_gbps``, and what they then need of each site."""

    link_gbps: float
    codec: Codec
    version_codec: Codec
    sync_interval_steps: int
    fragments: int
    up_gbps: float
    down_gbps: float


def choose(fleet: Fleet, mode: Mode, gbps: float) -> Choice | None:
    """Returns the least harmful settings for links of ``gbps``: those of the fleet if they do, else the first that do.

    What a site has of the broker's link as well is a matter of the settings, so ``gbps`` is of the sites' links alone.
    None if with every setting the aggregator is too slow, or a fragment is too large for a message.

    Raises:
        ConfigError: No setting is enough, with the bandwidth that would be.
    """
    least, refused = math.inf, False
    had_gbps = min(gbps, share_gbps(fleet, load_of(fleet, mode)))
    for candidate in _candidates(fleet):
        if mode is Mode.DECOUPLED and not _works(candidate):
            continue
        load = load_of(candidate, mode)
        try:
            need, link_gbps = required(load, candidate.utilisation), min(gbps, share_gbps(candidate, load))
        except ConfigError:
            refused = True
            continue
        if need.exact_gbps > link_gbps * (1 + 1e-9):
            least, had_gbps = min((least, had_gbps), (need.exact_gbps, link_gbps))
            continue
        if mode is Mode.DECOUPLED and journey_s(load, link_gbps, link_gbps) > load.interval_s * (1 + 1e-9):
            continue  # the links would do, but with merging between up and down work is more than a version old
        return Choice(
            link_gbps=link_gbps,
            codec=candidate.codec,
            version_codec=candidate.version_codec,
            sync_interval_steps=candidate.sync_interval_steps,
            fragments=candidate.fragments,
            # Without the way to the next point of a grid.
            up_gbps=min(need.up_gbps, need.exact_gbps),
            down_gbps=min(need.down_gbps, need.exact_gbps),
        )
    if math.isinf(least) and not refused:
        return None
    if math.isinf(least):
        instead = other_than_waiting(load_of(fleet, mode))
        cure = f"{mode} reaches {fleet.utilisation:.0%} on no link with this latency; {instead}"
    else:
        enough = f"{mode} needs at least {at_least(least)} Gbit/s a site"
        cure = f"no codec, H up to {_longest(fleet)} or P is enough; {enough}"
    raise ConfigError("bandwidth", had_gbps, cure)


def _longest(fleet: Fleet) -> int:
    return max(INTERVALS[-1], fleet.sync_interval_steps)


def at_least(value: float) -> str:
    """Returns three digits of it, rounded up: who gives that much is not refused."""
    unit = 10.0 ** (math.floor(math.log10(value)) - 2)
    return f"{math.ceil(value / unit * (1 - 1e-9)) * unit:.3g}"


def _works(fleet: Fleet) -> bool:
    """Whether the aggregator merges every fragment within H steps, and messages take the largest of them.

    Other limits of the run are raised at the aggregator alone, and nobody has to sync less often for them.
    """
    if fleet.assume is Assume.PAPER:
        return True
    return merging_per_cycle_s(fleet) <= interval_s(fleet) and "max_message_bytes" not in limits_to_raise(fleet)


def as_chosen(fleet: Fleet, choice: Choice) -> Fleet:
    """Returns the fleet with the settings that were chosen for it."""
    return replace(
        fleet,
        codec=choice.codec,
        version_codec=choice.version_codec,
        sync_interval_steps=choice.sync_interval_steps,
        fragments=choice.fragments,
    )


def _candidates(fleet: Fleet) -> Sequence[Fleet]:
    intervals = [fleet.sync_interval_steps] + [each for each in INTERVALS if each > fleet.sync_interval_steps]
    fragments = [fleet.fragments] + [each for each in FRAGMENTS if each > fleet.fragments]
    own = (fleet.codec, fleet.version_codec)
    # The paper counts one codec for both directions.
    pairs = CODECS if fleet.assume is Assume.ATOLL else tuple((c, c) for c in (Codec.BF16, Codec.INT8, Codec.INT4))
    codecs = [own, *(pair for pair in pairs if pair != own)]
    return [
        replace(fleet, sync_interval_steps=h, fragments=p, codec=up, version_codec=down)
        for h in intervals
        for up, down in codecs
        for p in fragments
        if p <= min(h, fleet.parameters)
    ]
