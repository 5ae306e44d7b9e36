"""What failures leave of each mode of a plan, as :mod:`ops.goodput` expects it of such a fleet. Pure."""

from __future__ import annotations

import operator
from dataclasses import replace

from broker.errors import ConfigError
from ops.goodput import fleet as chips
from ops.goodput.caveats import assumed
from ops.goodput.fleet import FailureModel
from ops.goodput.simulation import expected_goodput
from ops.planning.fleet import GIVE_ACCELERATORS, Fleet
from ops.planning.links import Mode


def with_goodput(fleet: Fleet, mtbi_years: float | None) -> Fleet:
    """Returns the fleet with the expected goodput of each mode; as it is without the number of accelerators.

    Args:
        fleet: Whose accelerators may be known.
        mtbi_years: Mean time between interruptions of one of them; None for the usual.

    Raises:
        ConfigError: The time is not above 0, or given without accelerators.
    """
    if fleet.accelerators is None:
        if mtbi_years is not None:
            raise ConfigError("mtbi_years", mtbi_years, f"says how often an accelerator fails: {GIVE_ACCELERATORS}")
        return fleet
    years = FailureModel().mtbi_years if mtbi_years is None else mtbi_years
    if years <= 0:
        raise ConfigError("mtbi_years", years, "must be above 0")
    # Asks the simulator. Data-parallel is the elastic kind, the fairer comparison.
    names = {Mode.DECOUPLED: "decoupled", Mode.DILOCO: "diloco", Mode.DP: "elastic-dp"}
    model = FailureModel(
        mtbi_years=years,
        step_s=max(site.step_s for site in fleet.sites),
        sync_interval=fleet.sync_interval_steps,
        overlap=min(FailureModel().overlap, fleet.sync_interval_steps - 1),
    )
    islands = len(fleet.sites)
    found = {
        name: expected_goodput(mode=name, chips=fleet.accelerators, islands=islands, model=model)
        for name in dict.fromkeys(names.values())
    }
    # Islands of Streaming DiLoCo wait for each other at every fragment, H / P steps apart, for a version that they need
    # tau steps later: nobody is further ahead than both. Barriers as far apart as that cost a little more.
    ahead = fleet.sync_interval_steps / fleet.fragments + fleet.overlap_steps
    often = replace(model, sync_interval=max(1, min(round(ahead), fleet.sync_interval_steps)), overlap=0)
    streaming = expected_goodput(mode="diloco", chips=fleet.accelerators, islands=islands, model=often)
    if len(sizes := {site.accelerators for site in fleet.sites if site.accelerators}) > 1:
        # Decoupled islands fail by themselves: each counts as one of a fleet of its like, by the tokens it brings.
        own = {
            size: expected_goodput(mode="decoupled", chips=size * islands, islands=islands, model=model)
            for size in sizes
        }
        paces = [site.tokens_per_step / site.step_s for site in fleet.sites]
        goodputs = [own[site.accelerators] for site in fleet.sites if site.accelerators]
        found["decoupled"] = sum(map(operator.mul, paces, goodputs)) / sum(paces)
    # Decoupled islands are told of by the largest, which fails most often.
    most = {"decoupled": islands * max(sizes)}
    sentences = [
        f"Goodput of {name}: {each}."
        for name in found
        for each in assumed(
            chips.Fleet(mode=chips.Mode(name), chips=most.get(name, fleet.accelerators), islands=islands), model
        )
    ]
    goodput = {mode: found[name] for mode, name in names.items()} | {Mode.STREAMING: streaming}
    return replace(fleet, goodput=goodput, goodput_caveats=tuple(sentences))
