"""What failures leave of each mode of a plan, as :mod:`ops.goodput` expects it of such a fleet. Pure."""

from __future__ import annotations

import operator
from dataclasses import replace

from broker.wire.errors import ConfigError
from ops.goodput import fleet as chips
from ops.goodput.caveats import bounds
from ops.goodput.fleet import FailureModel
from ops.goodput.simulation import ESTIMATE_EVENTS, expected_goodput
from ops.planning.fleet import GIVE_ACCELERATORS, Fleet, load_of
from ops.planning.forecast import forecast
from ops.planning.links import Mode

#: So many sizes of sites are simulated for as long as one would be, more for a shorter time, down to so many failures.
SIZES, LEAST_EVENTS = 4, 5_000


def _interval_as_it_comes_out(fleet: Fleet) -> int:
    """Returns H of decoupled islands in steps of the slowest site, as the plan tells it; else as it was asked for."""
    try:
        found = forecast(fleet, Mode.DECOUPLED)
    except ConfigError:
        return fleet.sync_interval_steps
    step_s = load_of(fleet, Mode.DECOUPLED).step_s / max(site.step_s for site in fleet.sites)
    return max(1, round(found.sync_interval_steps * step_s), fleet.sync_interval_steps)


def _expected(
    mode: str, accelerators: int, islands: int, model: FailureModel, *, given: float, events: int = ESTIMATE_EVENTS
) -> float:
    try:
        return expected_goodput(mode=mode, chips=accelerators, islands=islands, model=model, events=events)
    except ConfigError as err:
        if err.field != "mtbi_years":
            raise
        fails_s = model.chip_mtbi_s / accelerators
        cure = f"has an accelerator fail every {fails_s:.2g} s, which is too often to be simulated: give a longer time"
        raise ConfigError("mtbi_years", given, cure) from err


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
    if not 0 < years <= chips.MOST:
        raise ConfigError("mtbi_years", years, f"must be above 0, and at most {chips.MOST:g}")
    # Asks the simulator. Data-parallel is the elastic kind, the fairer comparison.
    names = {Mode.DECOUPLED: "decoupled", Mode.DILOCO: "diloco", Mode.DP: "elastic-dp"}
    model = FailureModel(
        mtbi_years=years,
        step_s=max(site.step_s for site in fleet.sites),
        sync_interval=fleet.sync_interval_steps,
        overlap=min(FailureModel().overlap, fleet.sync_interval_steps - 1),
    )
    # What is not handed over is lost with an island, and a slow aggregator, or a narrow link, makes that more.
    apart = replace(model, sync_interval=_interval_as_it_comes_out(fleet))
    models = {"decoupled": apart, "diloco": model, "elastic-dp": model}
    islands = len(fleet.sites)
    found = {name: _expected(name, fleet.accelerators, islands, models[name], given=years) for name in names.values()}
    # Islands of Streaming DiLoCo wait for each other at every fragment, H / P steps apart, for a version that they need
    # tau steps later: nobody is further ahead than both. Barriers as far apart as that cost a little more.
    ahead = fleet.sync_interval_steps / fleet.fragments + fleet.overlap_steps
    often = replace(model, sync_interval=max(1, min(round(ahead), fleet.sync_interval_steps)), overlap=0)
    streaming = _expected("diloco", fleet.accelerators, islands, often, given=years)
    if len(sizes := {site.accelerators for site in fleet.sites if site.accelerators}) > 1:
        # Decoupled islands fail by themselves: each counts as one of a fleet of its like, by the tokens it brings.
        # Of many sizes each is simulated for a shorter time: what one is off by hardly shows in all of them.
        events = max(LEAST_EVENTS, min(ESTIMATE_EVENTS, SIZES * ESTIMATE_EVENTS // len(sizes)))
        own = {
            size: _expected("decoupled", size * islands, islands, apart, given=years, events=events) for size in sizes
        }
        paces = [site.tokens_per_step / site.step_s for site in fleet.sites]
        goodputs = [own[site.accelerators] for site in fleet.sites if site.accelerators]
        found["decoupled"] = sum(map(operator.mul, paces, goodputs)) / sum(paces)
    # Decoupled islands are told of by the largest, which fails most often.
    most = {"decoupled": islands * max(sizes)}
    sentences = [
        f"Goodput of {name}: {each}."
        for name in found
        for each in bounds(
            chips.Fleet(mode=chips.Mode(name), chips=most.get(name, fleet.accelerators), islands=islands),
            models[name],
        )
    ]
    usual = (
        f"An accelerator fails every {years:g} years and takes a slice of {model.slice_chips} with it, or its site "
        f"where that is smaller, for {model.repair_s / 60:g} min."
    )
    goodput = {mode: found[name] for mode, name in names.items()} | {Mode.STREAMING: streaming}
    return replace(fleet, goodput=goodput, goodput_caveats=(usual, *sentences))
