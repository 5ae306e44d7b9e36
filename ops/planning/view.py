"""How a plan is shown: as one JSON object, and as tables for people. Values in, values out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ops.planning.bandwidth_table import PAYLOAD_SHARE, UTILISATIONS, Cell, Method
from ops.planning.choosing import Choice, as_chosen
from ops.planning.fleet import GIVE_ACCELERATORS, GIVE_BANDWIDTH, Fleet, limits_to_raise, merging_steps
from ops.planning.footprint import Memory
from ops.planning.forecast import Forecast, forecast
from ops.planning.links import Assume, Mode, assumptions
from ops.planning.notes import notes
from ops.planning.planner import FleetPlan
from ops.planning.sizing import Model
from ops.text import age, size

# --- as JSON ------------------------------------------------------------------------------------------------------


def to_json(fleet: Fleet, planned: FleetPlan, model: Model) -> dict[str, Any]:
    """Returns the plan for ``json.dumps``; ``--help`` lists its keys."""
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
        "assumptions": [model.source + ".", *_sentences(fleet)],
        "notes": notes(fleet, planned),
    }


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
        "beyond": each.beyond,
        "fits": each.fits,
        "link_gbps": each.link_gbps,
        "utilisation": each.utilisation,
        "round_s": each.round_s,
        "rounds_apart_s": each.rounds_apart_s,
        "sync_interval_steps": each.sync_interval_steps,
        "rounds_open": each.rounds_open,
        "staleness": each.staleness,
        "tokens_per_day": each.tokens_per_day,
        "goodput": each.goodput,
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
    """What the same sites would need by the published assumptions, with P = 24 or as many as H allows."""
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


def _sentences(fleet: Fleet) -> list[str]:
    found = assumptions(
        fleet.assume, codec=fleet.codec, version_codec=fleet.version_codec, sites=len(fleet.sites), shards=fleet.shards
    )
    tokens = {site.tokens_per_step for site in fleet.sites}
    each = f"{tokens.pop():,} tokens" if len(tokens) == 1 else "Their own numbers of tokens"
    words = [*found, f"{each} per inner step and site; rounds follow the median site, synchronous ways the slowest."]
    if any(value is not None for value in fleet.goodput.values()):
        words.append(
            "Goodput is that of `atoll simulate`; data-parallel is the elastic kind (--mode elastic-dp there), "
            "streaming is DiLoCo with barriers H / P + tau steps apart."
        )
        if len({site.accelerators for site in fleet.sites}) > 1:
            words.append("Decoupled goodput is each site's own; that of the others is of sites of equal size.")
        words += fleet.goodput_caveats
        words.append("Staleness is that of a fleet without failures.")
    else:
        words.append(f"Tokens are those of a fleet without failures. For the expected goodput {GIVE_ACCELERATORS}.")
    return words


# --- as text ------------------------------------------------------------------------------------------------------


def render(fleet: Fleet, planned: FleetPlan, document: Mapping[str, Any]) -> RenderableType:
    """Returns the plan as tables: modes side by side, memory, what to choose, assumptions, what to try next."""
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
    published = document["published"]
    pair = ", ".join(f"{mode} {_gbps(each['gbps'])}" for mode, each in published.items())
    if fleet.assume is Assume.ATOLL:
        parts.append(Text(f"By the published assumptions (--assume paper): {pair} Gbit/s for each site.", style="dim"))
    parts += [Text(), _memory_table(planned.memory)]
    if planned.choice is not None:
        slow = chosen.mode is Mode.DECOUPLED and merging_steps(fleet) > fleet.sync_interval_steps
        parts += [Text(), Text(_choice_text(planned.choice, slow=slow), style="green")]
    parts += [Text(note, style="yellow") for note in document["notes"]]
    parts += [Text(), Text("Assumptions", style="bold")]
    parts += [Text(f"- {sentence}", style="dim") for sentence in document["assumptions"]]
    return Group(*parts, Text(), Text(f"next: {_next(fleet, planned)}"))


def _modes_table(planned: FleetPlan) -> Table:
    forecasts = [planned.chosen, *(each for each in planned.alternatives.values() if not isinstance(each, str))]
    table = _plain_table("", *(str(each.mode) for each in forecasts))
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
        rows.append(("cost per day", lambda f: f"{f.cost.per_day:,.2f}"))
        rows.append(("cost per 10^9 tokens", lambda f: _price(f.cost.per_billion_tokens)))
    for label, show in rows:
        table.add_row(label, *(show(each) for each in forecasts))
    return table


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
    table = _plain_table("memory of one", "expected", "bound")
    for name, each in memory.items():
        bound = "-" if each.bound is None else size(round(each.bound))
        table.add_row(_PROCESSES[name], size(round(each.expected)), bound)
    return table


def _choice_text(choice: Choice, *, slow: bool) -> str:
    whom = "For these links and an aggregator of the speed assumed" if slow else "For these links"
    needs = f"{choice.up_gbps:.3g} up and {choice.down_gbps:.3g} down of {choice.link_gbps:.3g} Gbit/s"
    return f"{whom}: {_flags(choice)} needs {needs}."


def _flags(choice: Choice) -> str:
    return (
        f"--codec {choice.codec} --version-codec {choice.version_codec} "
        f"--sync-interval {choice.sync_interval_steps} --fragments {choice.fragments}"
    )


def _next(fleet: Fleet, planned: FleetPlan) -> str:
    if planned.chosen.link_gbps is None:
        return f"{GIVE_BANDWIDTH} to see what your links allow"
    if planned.choice is None and planned.chosen.mode is Mode.DECOUPLED and not fleet.links_known:
        return "give gbps of every site to see what their links allow"
    if planned.choice is None and planned.chosen.mode is Mode.DECOUPLED:
        return "no settings tried here are within what the aggregator and a message can take: see above"
    if fleet.accelerators is None:
        return "give --accelerators, or with --fleet accelerators in each [[island]], for goodput; and --price for cost"
    if planned.choice is None or planned.chosen.mode is not Mode.DECOUPLED:
        return "atoll trains decoupled: leave out --mode to plan for that"
    if fleet.assume is Assume.PAPER:
        return "leave out --assume paper to plan for what atoll itself sends"
    raised = limits_to_raise(as_chosen(fleet, planned.choice))
    more = ({"shards": fleet.shards} if fleet.shards > 1 else {}) | raised
    flags = (f"--{name.replace('_', '-')} {value}" for name, value in more.items())
    return " ".join((f"atoll up {_flags(planned.choice)}", *flags))


def table_json(cells: Sequence[Cell]) -> dict[str, Any]:
    """Returns the published table and the recomputed one for ``json.dumps``."""
    return {"payload_share": PAYLOAD_SHARE, "cells": [asdict(cell) for cell in cells]}


def render_table(cells: Sequence[Cell]) -> RenderableType:
    """Returns the published table beside the recomputed one, and what it rests on."""
    table = _plain_table("Gbit/s: published / here", *(f"{utilisation:.0%}" for utilisation in UTILISATIONS))
    for name in dict.fromkeys(cell.size for cell in cells):
        for method in Method:
            row = [cell for cell in cells if (cell.size, cell.method) == (name, method)]
            table.add_row(f"{name} {method}", *(f"{c.published_gbps:g} / {c.gbps:.3g}" for c in row))
    same = sum(cell.steps_apart == 0 for cell in cells)
    basis = (
        f"{same} of {len(cells)} cells are the same, the others one step of the grid (a factor of 1.21) apart.\n"
        "Two islands, H = 100, a bucket per layer, fragments of 3 layers, tau = 1, FP4 at 4.125 bits, and\n"
        f"{PAYLOAD_SHARE} of the nominal payload: that is fitted, with all of it nearly every cell is one step higher."
    )
    return Group(table, Text(), Text(basis))


def _plain_table(first: str, *columns: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(first)
    for title in columns:
        table.add_column(title, justify="right")
    return table
