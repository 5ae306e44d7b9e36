"""Fleets to plan: sites that are alike unless something is changed."""

from broker.wire.messages import Codec
from ops.planning.fleet import Fleet, Site

N = 1_000_000


def site(**changes):
    return Site(**({"name": "site", "step_s": 0.5, "tokens_per_step": 1000} | changes))


def fleet(sites=4, **changes):
    shared = {name: changes.pop(name) for name in ("step_s", "gbps", "latency_s", "accelerators") if name in changes}
    values = {"parameters": N, "sites": (site(**shared),) * sites, "version_codec": Codec.F32}
    return Fleet(**(values | changes))
