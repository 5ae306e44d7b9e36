"""A plan as one JSON object, and as tables for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ops.planning.fleet import GIVE_ACCELERATORS, GIVE_BANDWIDTH, Fleet, limits_to_raise
from ops.planning.footprint import Memory
from ops.planning.forecast import Forecast, forecast
from ops.planning.links import Assume, Mode
from ops.planning.notes import notes
from ops.planning.planner import Choice, FleetPlan, as_chosen
from ops.planning.sizing import Model
from ops.text import age, size

# --- as JSON ------------------------------------------------------------------------------------------------------


def to_json(fleet: Fleet, planned: FleetPlan, model: Model) -> dict[str, Any]:
    """Returns the plan for ``json.dumps``; ``--help-all`` lists its keys."""
    chosen = planned.chosen
    return {
        "mode": str(chosen.mode),
        **_forecast_json(chosen),
        "memory_bytes": {name: asdict(each) for name, each in planned.memory.items()},
        "settings": {
            "parameters": model.parameters,
            "codec": str(fleet.codec),
            "version_codec": str(fleet.version_codec),
            "sync_interval": fleet.sync_interval_steps,
            "fragments": fleet.fragments,
            "overlap": fleet.overlap_steps,
            "shards": fleet.shards,
            "utilisation": fleet.utilisation,
            "assume": str(fleet.assume),
        },
        "sites": _sites_json(fleet, chosen),
        "alternatives": {
            str(mode): {"refused": other} if isinstance(other, str) else _forecast_json(other)
            for mode, other in planned.alternatives.items()
        },
        "published": _published(fleet),
        "choice": None if planned.choice is None else asdict(planned.choice),
        "assumptions": [model.source + ".", *assumptions(fleet)],
        "notes": notes(fleet, planned),
    }


#: Figures of a forecast that stand in the JSON object as they are.
_FIGURES = (
    *("beyond", "fits", "link_gbps", "utilisation", "round_s", "rounds_apart_s", "sync_interval_steps", "staleness"),
    *("tokens_per_day", "goodput"),
)


def _forecast_json(each: Forecast) -> dict[str, Any]:
    site = {"up": each.up_gbps, "down": each.down_gbps}
    return {
        "bandwidth_gbps": {
            **site,
            "site_up": each.up_gbps,
            "site_down": each.down_gbps,
            "per_site": site,
            "broker_up": each.broker_up_gbps,
            "broker_down": each.broker_down_gbps,
            "exact": each.exact_gbps,
        },
        **{name: getattr(each, name) for name in _FIGURES},
        "rounds_open": sum(each.open_shares),
        "cost": None if each.cost is None else asdict(each.cost),
        "traffic": {
            "round_up_bytes": each.round_up_bytes,
            "round_down_bytes": each.round_down_bytes,
            "gb_per_day": each.traffic_gb_per_day,
        },
    }


def _sites_json(fleet: Fleet, chosen: Forecast) -> list[dict[str, Any]]:
    rows = []
    for site, arrives in zip(fleet.sites, chosen.arrivals, strict=True):
        used = None if site.gbps is None else chosen.exact_gbps / site.gbps
        row = {"name": site.name, "step_s": site.step_s, "gbps": site.gbps, "link_share_needed": used}
        rows.append(row | {"participation": arrives.participation, "in_time": arrives.in_time})
    return rows


def _published(fleet: Fleet) -> dict[str, Any]:
    """The needs of the same sites by the published assumptions, with P = 24 or as many as H allows."""
    fragments = min(max(fleet.fragments, 24), fleet.sync_interval_steps, fleet.parameters)
    theirs = replace(
        fleet,
        assume=Assume.PAPER,
        fragments=fragments,
        tensors=(),
        sites=tuple(replace(site, gbps=None) for site in fleet.sites),
        overlap_steps=min(fleet.overlap_steps, fleet.sync_interval_steps - 1),
        broker_gbps=None,
        price_per_hour=None,
        price_per_gb=None,
    )
    return {str(mode): {"gbps": forecast(theirs, mode).up_gbps} for mode in Mode}


def assumptions(fleet: Fleet) -> list[str]:
    """Returns the sentences that say what the figures rest on."""
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
            f"Through a hub each fragment goes up once in {fleet.codec} and down once in {fleet.version_codec} every H "
            f"steps (f = 1), headers included; the broker carries all {sites} sites' traffic{shared}.",
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
    if any(value is not None for value in fleet.goodput.values()):
        found.append("Goodput is that of `atoll simulate`, for data-parallel of --mode elastic-dp there.")
        return [*found, *fleet.goodput_caveats]
    return [*found, f"Tokens are those of a fleet without failures. For the expected goodput {GIVE_ACCELERATORS}."]


# --- as text ------------------------------------------------------------------------------------------------------


def render(fleet: Fleet, planned: FleetPlan, document: Mapping[str, Any], following: str) -> RenderableType:
    """Returns the plan as tables: modes side by side, memory, choice, assumptions, and the next command."""
    chosen = planned.chosen
    sites = "1 site" if len(fleet.sites) == 1 else f"{len(fleet.sites)} sites"
    head = f"{chosen.mode}: {sites}, {fleet.parameters:,} parameters, "
    if chosen.mode is Mode.DP:
        head += "bf16 gradients in every step"
    else:
        head += f"{fleet.codec} up, {fleet.version_codec} down, H = {fleet.sync_interval_steps}"
    if chosen.mode in (Mode.DECOUPLED, Mode.STREAMING):
        head += f", P = {fleet.fragments}, tau = {fleet.overlap_steps}"
    parts: list[RenderableType] = [Text(head, style="bold"), Text(), _modes_table(planned)]
    for mode, other in planned.alternatives.items():
        if isinstance(other, str):
            parts.append(Text(f"{mode}: {other}", style="yellow"))
    if fleet.assume is Assume.ATOLL:
        pair = ", ".join(f"{mode} {_gbps(each['gbps'])}" for mode, each in document["published"].items())
        parts.append(Text(f"By the published assumptions (--assume paper): {pair} Gbit/s for each site.", style="dim"))
    parts += [Text(), _memory_table(planned.memory)]
    if planned.choice is not None:
        choice = planned.choice
        needs = f"{choice.up_gbps:.3g} up and {choice.down_gbps:.3g} down of {choice.link_gbps:.3g} Gbit/s"
        parts += [Text(), Text(f"For these links: {_flags(choice)} needs {needs}.", style="green")]
    parts += [Text(note, style="yellow") for note in document["notes"]]
    parts += [Text(), Text("Assumptions", style="bold")]
    parts += [Text(f"- {sentence}", style="dim") for sentence in document["assumptions"]]
    return Group(*parts, Text(), Text(f"next: {following}"))


def _modes_table(planned: FleetPlan) -> Table:
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
        ("expected goodput", lambda f: "-" if f.goodput is None else f"{f.goodput:.1%}"),
        ("tokens per day", lambda f: f"{f.tokens_per_day:.3g}"),
        ("traffic per day", lambda f: size(f.traffic_gb_per_day * 1e9)),
    ]
    if planned.chosen.cost is not None:
        rows.append(("cost per day", lambda f: _price(f.cost.per_day)))
        rows.append(("cost per 10^9 tokens", lambda f: _price(f.cost.per_billion_tokens)))
    shown = [(label, *(show(each) for each in forecasts)) for label, show in rows]
    return _table(("", *(str(each.mode) for each in forecasts)), shown)


def _needed(forecast: Forecast, *gbps: float) -> str:
    return "none is enough" if forecast.beyond else " / ".join(map(_gbps, gbps))


def _gbps(value: float) -> str:
    return "-" if value == 0 else f"{value:.3g}" if value < 1000 else f"{value:,.0f}"


def _price(value: float | None) -> str:
    return "-" if value is None else f"{value:,.2f}"


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else age(seconds)


_PROCESSES = {
    "aggregator": "aggregator",
    "broker": "broker",
    "island_host": "island, host",
    "island_accelerators": "island, all its accelerators, before activations",
}


def _memory_table(memory: Mapping[str, Memory]) -> Table:
    rows = [
        (_PROCESSES[name], size(round(each.expected)), "-" if each.bound is None else size(round(each.bound)))
        for name, each in memory.items()
    ]
    return _table(("memory of one", "expected", "bound"), rows)


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for k, title in enumerate(columns):
        table.add_column(title, justify="right" if k else "left")
    for row in rows:
        table.add_row(*row)
    return table


def _flags(choice: Choice) -> str:
    return (
        f"--codec {choice.codec} --version-codec {choice.version_codec} "
        f"--sync-interval {choice.sync_interval_steps} --fragments {choice.fragments}"
    )


def following(fleet: Fleet, planned: FleetPlan) -> str:
    """Returns what to try next."""
    chosen, choice = planned.chosen, planned.choice
    if chosen.link_gbps is None or (choice is None and not fleet.links_known):
        return f"{GIVE_BANDWIDTH} to see what your links allow"
    if chosen.mode is not Mode.DECOUPLED:
        return "atoll trains decoupled: leave out --mode to plan for that"
    if choice is None:
        return "no settings tried here are within what the aggregator and a message can take: see above"
    if fleet.assume is Assume.PAPER:
        return "leave out --assume paper to plan for what atoll itself sends"
    if fleet.accelerators is None:
        return "give --accelerators, or with --fleet accelerators in each [[island]], for goodput; and --price for cost"
    more = ({"shards": fleet.shards} if fleet.shards > 1 else {}) | limits_to_raise(as_chosen(fleet, choice))
    flags = (f"--{name.replace('_', '-')} {value}" for name, value in more.items())
    return " ".join((f"atoll up {_flags(choice)}", *flags))
