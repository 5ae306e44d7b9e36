"""Which codec, H and P to choose for given links: the planner's way back. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from broker.errors import ConfigError
from broker.messages import Codec
from ops.planning.fleet import Fleet, load_of
from ops.planning.links import Assume, Mode, required

#: Intervals, fragments and codecs that :func:`choose` tries, the least harmful first: 4 bits with error feedback cost
#: less than syncing half as often, and versions are rounded last, since every island gets the same rounding error.
INTERVALS = (24, 48, 100, 200, 500, 1000)
FRAGMENTS = (8, 24, 48, 96)
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
    """Settings with which a mode runs on given links, and what they then need of each site."""

    codec: Codec
    version_codec: Codec
    sync_interval_steps: int
    fragments: int
    up_gbps: float
    down_gbps: float


def choose(fleet: Fleet, mode: Mode) -> Choice:
    """Returns the least harmful settings for the links of the fleet: its own if they do, else the first that do.

    Raises:
        ConfigError: No setting is enough, with the bandwidth that would be.
    """
    gbps = fleet.narrowest_gbps
    if gbps is None:
        raise ConfigError("bandwidth", None, "is needed to choose settings for it; give --bandwidth in Gbit/s")
    least = math.inf
    for candidate in _candidates(fleet):
        try:
            need = required(load_of(candidate, mode), candidate.utilisation)
        except ConfigError:
            continue
        if max(need.up_gbps, need.down_gbps) <= gbps * (1 + 1e-9):
            return Choice(
                codec=candidate.codec,
                version_codec=candidate.version_codec,
                sync_interval_steps=candidate.sync_interval_steps,
                fragments=candidate.fragments,
                up_gbps=need.up_gbps,
                down_gbps=need.down_gbps,
            )
        least = min(least, max(need.up_gbps, need.down_gbps))
    if math.isinf(least):
        cure = f"{mode} reaches {fleet.utilisation:.0%} on no link with this latency; train decoupled"
    else:
        longest = max(INTERVALS[-1], fleet.sync_interval_steps)
        cure = f"no codec, H up to {longest} or P is enough; {mode} needs at least {least:.3g} Gbit/s a site"
    raise ConfigError("bandwidth", gbps, cure)


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
