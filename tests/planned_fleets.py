"""Fleets to plan: sites that are alike unless something is changed."""

from broker.wire.messages import Codec
from ops.forecast.fleet import Fleet, Site

N = 1_000_000


def site(*, step_s=0.5, gbps=None, latency_s=0.0, **changes):
    values = {"step_time": step_s, "bandwidth": gbps, "latency_ms": 1e3 * latency_s, "tokens_per_step": 1000}
    return Site(**(values | changes))


def fleet(sites=4, **changes):
    shared = {name: changes.pop(name) for name in ("step_s", "gbps", "latency_s", "accelerators") if name in changes}
    values = {"parameters": N, "sites": (site(**shared),) * sites, "version_codec": Codec.F32}
    return Fleet(**(values | changes))
