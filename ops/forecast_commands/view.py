"""Shows plans and simulated goodput as one JSON object, and as text."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from aggregator.interface.config import AggregatorConfig
from broker.base.settings import to_table
from broker.base.sources import table_of
from ops.forecast.accounts import CONFIDENCE, Estimate
from ops.forecast.failures import BATCHES, all_slices, caveats
from ops.forecast.fleet import GIVE_BANDWIDTH, Assume, Fleet, limits_to_raise
from ops.forecast.footprint import Memory
from ops.forecast.goodput import Result
from ops.forecast.pace import Forecast
from ops.forecast.planner import Choice, FleetPlan, notes
from ops.forecast.timeline import Cause
from ops.forecast_commands.model_size import Model
from ops.terminal import Column, Fitted
from ops.text import age, size

# --- a plan as JSON -----------------------------------------------------------------------------------------------


def plan_as_json(fleet: Fleet, planned: FleetPlan, model: Model) -> dict[str, Any]:
    """Returns the plan for ``json.dumps``; ``--help-all`` lists its keys."""
    return {
        "mode": str(planned.chosen.mode),
        **_forecast_as_json(planned.chosen),
        "memory_bytes": {name: asdict(each) for name, each in planned.memory.items()},
        "settings": {
            "parameters": model.parameters,
            "codec": str(fleet.codec),
            "version_codec": str(fleet.codec_of_versions),
            "sync_interval": fleet.sync_interval,
            "fragments": fleet.fragments,
            "overlap": fleet.overlap,
            "shards": fleet.shards,
            "utilisation": fleet.utilisation,
            "assume": str(fleet.assume),
        },
        "sites": _sites_as_json(fleet, planned.chosen),
        "alternatives": {
            str(mode): {"refused": other} if isinstance(other, str) else _forecast_as_json(other)
            for mode, other in planned.alternatives.items()
        },
        "choice": None if planned.choice is None else _choice_as_json(planned.choice),
        "assumptions": [model.source + ".", *assumptions(fleet)],
        "notes": notes(fleet, planned),
    }


#: Fields of a forecast that are in the JSON object unchanged.
_FIGURES = (
    *("beyond", "fits", "link_gbps", "utilisation", "round_s", "rounds_apart_s", "sync_interval_steps", "staleness"),
    "tokens_per_day",
)


def _forecast_as_json(each: Forecast) -> dict[str, Any]:
    return {
        "bandwidth_gbps": {
            "up": each.up_gbps,
            "down": each.down_gbps,
            "broker_up": each.broker_up_gbps,
            "broker_down": each.broker_down_gbps,
            "exact": each.exact_gbps,
        },
        **{name: getattr(each, name) for name in _FIGURES},
        "rounds_open": sum(each.open_shares),
        "traffic": {
            "round_up_bytes": each.round_up_bytes,
            "round_down_bytes": each.round_down_bytes,
            "gb_per_day": each.traffic_gb_per_day,
        },
    }


def _sites_as_json(fleet: Fleet, chosen: Forecast) -> list[dict[str, Any]]:
    rows = []
    for site, arrives in zip(fleet.sites, chosen.arrivals, strict=True):
        used = None if site.bandwidth is None else chosen.exact_gbps / site.bandwidth
        row = {"name": site.name, "step_s": site.step_time, "gbps": site.bandwidth, "link_share_needed": used}
        rows.append(row | {"participation": arrives.participation, "in_time": arrives.in_time})
    return rows


def _choice_as_json(choice: Choice) -> dict[str, Any]:
    return {
        "link_gbps": choice.link_gbps,
        "codec": str(choice.fleet.codec),
        "version_codec": str(choice.fleet.codec_of_versions),
        "sync_interval_steps": choice.fleet.sync_interval,
        "fragments": choice.fleet.fragments,
        "up_gbps": choice.up_gbps,
        "down_gbps": choice.down_gbps,
    }


def assumptions(fleet: Fleet) -> list[str]:
    """Returns the assumptions behind the figures as sentences."""
    sites = len(fleet.sites)
    buckets = "bfloat16 gradients in 128 buckets, released over the backward pass (2/3 of a step)"
    ring = f"each site sends and receives 2 (1 - 1/M) = {2 * (1 - 1 / sites):.3g} times the payload"
    never = "Decoupled islands never wait: the link carries what they produce at full speed, whatever the target."
    if fleet.assume is Assume.PAPER:
        found = [
            f"Published assumptions: {fleet.codec} without headers, latency or merging time; through a hub each "
            f"fragment goes once each way every H steps (f = 1), and the hub's site carries {sites} times that.",
            never,
            f"Data-parallel and DiLoCo use a ring: {ring}; data-parallel sends {buckets}.",
            "Required bandwidths are the next point of the grid logspace(-1, 3, 200) in Gbit/s.",
        ]
    else:
        shared = f"; {fleet.shards} aggregators, each on a host of its own, get it from there" * (fleet.shards > 1)
        state_gb = (12 if fleet.differences else 8) * fleet.parameters / 1e9
        found = [
            f"Through a hub each fragment goes up once in {fleet.codec} and down once in {fleet.codec_of_versions} "
            f"every H steps (f = 1), headers included; the broker carries all {sites} sites' traffic{shared}.",
            f"{never} Where the median link or the aggregator is too slow, H grows; a slower site is in fewer.",
            "An aggregator takes 6 ms + 3 ms for each island, and 13 ns + 1.3 ns for each island per parameter of a "
            "fragment, as measured on two shared cores; that of the baselines takes no time.",
            f"The model's state at {'one aggregator' if fleet.shards == 1 else 'all aggregators together'}, "
            f"{state_gb:.3g} GB, stays in files; with as much memory to spare, merging does not wait for the disk.",
            f"Data-parallel is a ring of {buckets}: {ring}.",
        ]
    tokens = {site.tokens_per_step for site in fleet.sites}
    each = f"{tokens.pop():,} tokens" if len(tokens) == 1 else "Their own numbers of tokens"
    found.append(f"{each} per inner step and site; rounds follow the median site, synchronous ways the slowest.")
    return [*found, "Tokens are those of a fleet without failures: atoll simulate says how many of them are left."]


# --- a plan as text -----------------------------------------------------------------------------------------------


def plan_as_tables(fleet: Fleet, planned: FleetPlan, document: Mapping[str, Any], following: str) -> RenderableType:
    """Returns the plan as text: tables of modes and memory, choice, assumptions, next command."""
    chosen = planned.chosen
    sites = "1 site" if len(fleet.sites) == 1 else f"{len(fleet.sites)} sites"
    head = (
        f"{chosen.mode}: {sites}, {fleet.parameters:,} parameters, {fleet.codec} up, {fleet.codec_of_versions} down, "
        f"H = {fleet.sync_interval}, P = {fleet.fragments}, tau = {fleet.overlap}"
    )
    parts: list[RenderableType] = [Text(head, style="bold"), Text(), _modes_table(planned)]
    for mode, other in planned.alternatives.items():
        if isinstance(other, str):
            parts.append(Text(f"{mode}: {other}", style="yellow"))
    parts += [Text(), _memory_table(planned.memory)]
    if planned.choice is not None:
        choice = planned.choice
        needs = f"{choice.up_gbps:.3g} up and {choice.down_gbps:.3g} down of {choice.link_gbps:.3g} Gbit/s"
        parts += [Text(), Text(f"For these links: {_flags(choice.fleet)} needs {needs}.", style="green")]
    parts += [Text(note, style="yellow") for note in document["notes"]]
    parts += [Text(), Text("Assumptions", style="bold")]
    parts += [Text(f"- {sentence}", style="dim") for sentence in document["assumptions"]]
    return Group(*parts, Text(), Text(f"next: {following}"))


def _modes_table(planned: FleetPlan) -> Fitted:
    forecasts = [planned.chosen, *(each for each in planned.alternatives.values() if not isinstance(each, str))]
    rows: list[tuple[str, Any]] = [
        ("Gbit/s needed, site up", lambda f: _needed(f, f.up_gbps)),
        ("Gbit/s needed, site down", lambda f: _needed(f, f.down_gbps)),
        ("Gbit/s needed, broker up / down", lambda f: _needed(f, f.broker_up_gbps, f.broker_down_gbps)),
        ("utilisation", lambda f: f"{f.utilisation:.1%}"),
        ("time per round", lambda f: _time(f.round_s)),
        ("rounds apart", lambda f: _time(f.rounds_apart_s)),
        ("H as it comes out, steps", lambda f: f"{f.sync_interval_steps:.0f}"),
        ("expected staleness, versions", lambda f: f"{f.staleness:.2f}"),
        ("bytes per site and round, up / down", lambda f: f"{size(f.round_up_bytes)} / {size(f.round_down_bytes)}"),
        ("tokens per day", lambda f: f"{f.tokens_per_day:.3g}"),
        ("traffic per day", lambda f: size(f.traffic_gb_per_day * 1e9)),
    ]
    shown = [(label, *(show(each) for each in forecasts)) for label, show in rows]
    return Fitted([Column("", number=False), *(Column(str(each.mode)) for each in forecasts)], shown)


def _needed(forecast: Forecast, *gbps: float) -> str:
    return "none is enough" if forecast.beyond else " / ".join(map(_gbps, gbps))


def _gbps(value: float) -> str:
    return "-" if value == 0 else f"{value:.3g}" if value < 1000 else f"{value:,.0f}"


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else age(seconds)


_PROCESSES = {
    "aggregator": "aggregator",
    "broker": "broker",
    "island_host": "island, host",
    "island_accelerators": "island, all its accelerators, before activations",
}


def _memory_table(memory: Mapping[str, Memory]) -> Fitted:
    rows = [
        (_PROCESSES[name], size(round(each.expected)), "-" if each.bound is None else size(round(each.bound)))
        for name, each in memory.items()
    ]
    return Fitted([Column("memory of one", number=False), Column("expected"), Column("bound")], rows)


def _flags(fleet: Fleet) -> str:
    return (
        f"--codec {fleet.codec} --version-codec {fleet.codec_of_versions} "
        f"--sync-interval {fleet.sync_interval} --fragments {fleet.fragments}"
    )


def following(fleet: Fleet, planned: FleetPlan) -> str:
    """Returns the next command to try."""
    choice = planned.choice
    if planned.chosen.link_gbps is None or (choice is None and math.inf in fleet.links_gbps):
        return f"{GIVE_BANDWIDTH} to see what your links allow"
    if choice is None:
        return "no settings tried here are within what the aggregator and a message can take: see above"
    if fleet.assume is Assume.PAPER:
        return "leave out --assume paper to plan for what atoll itself sends"
    command = f"atoll up {_flags(choice.fleet)}" + (f" --shards {fleet.shards}" if fleet.shards > 1 else "")
    limits = {name: least for name, (_, least) in limits_to_raise(choice.fleet).items()}
    in_file = (f"[{table_of(AggregatorConfig, name)}] {name} = {least}" for name, least in limits.items())
    return f"{command}, with {' and '.join(in_file)} in the file of --config" if limits else command


# --- simulated goodput --------------------------------------------------------------------------------------------

MEANING: Mapping[Cause, str] = {
    Cause.PAUSED: "paused: scaling down or up, restarting",
    Cause.CAPACITY_AWAY: "slices under repair",
    Cause.ISLAND_DOWN: "islands down as a whole",
    Cause.ISLAND_LOST: "trained, lost with its island",
    Cause.STALE: "trained, refused as too stale",
}


def simulated_as_text(result: Result) -> str:
    """Returns a simulated result as text."""
    fleet, model, account = result.fleet, result.model, result.account
    fleet_s = model.chip_mtbi_s / fleet.chips
    what = f"{_counted(fleet.chips, 'chip')} in {_counted(fleet.islands, 'island')}, {fleet.mode.value}"
    group = f", an island every {duration(fleet_s * fleet.islands)}" if fleet.islands > 1 else ""
    lines = [
        f"{what}: {_counted(fleet.days, 'day')}, seed {fleet.seed}",
        f"interruptions: a chip every {duration(model.chip_mtbi_s)}, the fleet every {duration(fleet_s)}{group}",
        f"slices: {all_slices(fleet, model):,} of {_slice_chips(result):,.0f} chips, which leave and return together",
        "",
        f"goodput   {_estimate(account.goodput)}",
        f"uptime    {_estimate(account.uptime)}",
    ]
    lines += [f"          {each}" for each in caveats(fleet, model)]
    lines += ["", f"wasted tokens, as a share of what the fleet could train ({CONFIDENCE:.0%} confidence):"]
    named = sorted((each for each in account.wasted.items() if each[1].value > 0.0), key=lambda each: -each[1].value)
    lines += [
        f"{share.value:8.2%}  {share.low:6.2%} to {share.high:6.2%}   {MEANING[cause]}" for cause, share in named
    ] or ["  none"]
    if result.staleness is not None:
        lines += ["", f"staleness of contributions when merged, in versions: mean {result.staleness:.3f}"]
    return "\n".join(lines)


def _estimate(each: Estimate) -> str:
    return f"{each.value:7.2%}   ({CONFIDENCE:.0%} confidence: {each.low:.2%} to {each.high:.2%})"


def _counted(number: float, noun: str) -> str:
    shown = f"{number:,}" if isinstance(number, int) else f"{number:,g}"
    return f"{shown} {noun}{'' if number == 1 else 's'}"


def duration(seconds: float) -> str:
    """Returns a duration as text in a suitable unit."""
    for unit, length_s in (("years", 365.25 * 86_400), ("days", 86_400.0), ("h", 3_600.0), ("min", 60.0)):
        if seconds >= length_s:
            number = f"{seconds / length_s:,.3g}"
            return f"{number} {unit.removesuffix('s') if number == '1' else unit}"
    return f"{seconds:,.1f} s"


def simulated_as_json(result: Result) -> dict[str, Any]:
    """Returns a result as one JSON object; shares are 0 to 1."""
    fleet, account = result.fleet, result.account
    return {
        "mode": fleet.mode.value,
        "chips": fleet.chips,
        "islands": fleet.islands,
        "goodput": account.goodput.value,
        "goodput_ci": [account.goodput.low, account.goodput.high],
        "uptime": account.uptime.value,
        "uptime_ci": [account.uptime.low, account.uptime.high],
        "confidence": {"level": CONFIDENCE, "method": f"{BATCHES} batch means"},
        "waste": {cause.value: each.value for cause, each in account.wasted.items()},
        "waste_ci": {cause.value: [each.low, each.high] for cause, each in account.wasted.items()},
        "staleness": result.staleness,
        "warning": "; ".join(caveats(fleet, result.model)) or None,
        "slices": {"all": all_slices(fleet, result.model), "chips_each": _slice_chips(result)},
        "parameters": {"days": fleet.days, **to_table(result.model)},
        "seed": fleet.seed,
    }


def _slice_chips(result: Result) -> float:
    chips = result.fleet.chips_of(0)
    return chips / result.model.slices(chips)
