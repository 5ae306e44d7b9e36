"""``atoll plan``: what a fleet needs and does, before anything is paid for.

The pure parts are :mod:`ops.planning.planner` and what it stands on; here are the flags, the files and the output.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from broker.process import toml
from broker.process.settings import nearest, refuse_unknown
from broker.process.values import whole_number
from broker.wire.errors import ConfigError
from broker.wire.messages import Codec
from ops.planning.bandwidth_table import recompute
from ops.planning.expectation import with_goodput
from ops.planning.fleet import MOST, Fleet, Site, check_overlap, check_site
from ops.planning.links import Assume, Mode
from ops.planning.planner import plan
from ops.planning.sizing import Model, parse_parameters, read_model
from ops.planning.view import render, render_table, table_json, to_json
from ops.terminal import Screen
from ops.text import PLAIN_WIDTH

DEFAULT_TOKENS_PER_STEP = 1 << 18

#: Failures of synchronous sites are simulated one by one, which takes half a minute of so many.
MOST_SITES = 1_000

_EPILOG = """
--json prints one object: mode, bandwidth_gbps, beyond, fits, link_gbps, utilisation, round_s, rounds_apart_s,
sync_interval_steps, rounds_open, staleness, memory_bytes, tokens_per_day, goodput, cost, traffic, settings, sites,
assumptions, notes, alternatives (the other modes), published (every mode by the published assumptions) and choice
(with --bandwidth).
bandwidth_gbps is what is needed for the H that was asked for: "up" and "down" of each site (the same as "site_up",
"site_down" and in "per_site"), "broker_up" and "broker_down", and "exact": the wider direction of a site before it was
moved to a grid. beyond says why no bandwidth is enough for what was asked for, or is empty. An alternative that cannot
be has one key, "refused", which says why.

--fleet FILE describes unequal sites:
  [[island]]
  name = "east"         # accelerators, step_time (s), gbps, ms, tokens_per_step; count = 3 for three of them
  step_time = 1.2
  gbps = 2.0"""

_ISLAND_KEYS = ("name", "count", "accelerators", "step_time", "gbps", "ms", "tokens_per_step")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of ``atoll plan``."""
    model = parser.add_argument_group("model")
    model.add_argument("--params", metavar="N", help="parameters: 5e9, 5B, 125M")
    model.add_argument(
        "--model",
        type=Path,
        metavar="FILE",
        help="safetensors (one of several files, or their index), a run's config.toml, or a config.json",
    )
    fleet = parser.add_argument_group("fleet")
    fleet.add_argument("--fleet", type=Path, metavar="FILE", help="TOML file of unequal sites, in place of these flags")
    fleet.add_argument("--sites", type=_number("sites", int), metavar="M", help="sites, each one island (default 2)")
    fleet.add_argument(
        "--step-time", type=_number("step_time", float), metavar="S", help="seconds of computing per inner step"
    )
    fleet.add_argument(
        "--accelerators", type=_number("accelerators", int), metavar="N", help="accelerators of each site"
    )
    fleet.add_argument(
        "--tokens-per-step", type=_number("tokens_per_step", int), metavar="N", help="of each site (default 262144)"
    )
    fleet.add_argument(
        "--bandwidth", type=_number("bandwidth", float), metavar="GBPS", help="Gbit/s of each site, each way"
    )
    fleet.add_argument(
        "--latency-ms", type=_number("latency_ms", float), metavar="MS", help="from a site to the hub, one way"
    )
    fleet.add_argument(
        "--broker-bandwidth",
        type=_number("broker_bandwidth", float),
        metavar="GBPS",
        help="Gbit/s of the broker, each way",
    )
    how = parser.add_argument_group("how to train")
    how.add_argument("--mode", metavar="NAME", default="decoupled", help=f"{' | '.join(Mode)} (default decoupled)")
    how.add_argument("--codec", metavar="NAME", help=f"of contributions: {' | '.join(Codec)} (default bf16)")
    how.add_argument("--version-codec", metavar="NAME", help="of versions: f32 | bf16 (default f32)")
    how.add_argument(
        "--sync-interval", type=_number("sync_interval", int), metavar="H", help="inner steps between two merges (24)"
    )
    how.add_argument(
        "--fragments", type=_number("fragments", int), metavar="P", help="fragments of the model (8; paper: 24)"
    )
    how.add_argument(
        "--overlap",
        type=_number("overlap", int),
        metavar="TAU",
        help="inner steps until streaming waits for a version; what a decoupled round has left of them is grace (2)",
    )
    how.add_argument(
        "--shards",
        type=_number("shards", int),
        metavar="N",
        help="aggregators that share the fragments, each on a host of its own (1)",
    )
    how.add_argument(
        "--utilisation",
        type=_number("utilisation", float),
        metavar="U",
        help="share of time to compute (default 0.95); decoupled islands always compute",
    )
    how.add_argument("--assume", metavar="NAME", default="atoll", help="atoll (what our programs send) | paper")
    money = parser.add_argument_group("money, memory and failures")
    money.add_argument("--price", type=_number("price", float), metavar="X", help="of an accelerator-hour")
    money.add_argument(
        "--price-per-gb", type=_number("price_per_gb", float), metavar="X", help="of a GB that leaves a site"
    )
    money.add_argument(
        "--memory-gb", type=_number("memory_gb", float), metavar="GB", help="of one accelerator: checked"
    )
    money.add_argument(
        "--host-memory-gb", type=_number("host_memory_gb", float), metavar="GB", help="of one host: checked"
    )
    money.add_argument(
        "--mtbi-years", type=_number("mtbi_years", float), metavar="Y", help="between interruptions of a chip (1)"
    )
    parser.add_argument("--table", action="store_true", help="the published bandwidth tables, recomputed; nothing else")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.epilog = f"{parser.epilog}\n{_EPILOG}"


def _number(name: str, kind: type[int] | type[float]) -> Callable[[str], float]:
    """Returns a reader of finite numbers for argparse; whole ones may be written 1e6."""

    def read(text: str) -> float:
        try:
            value = whole_number(text) if kind is int else float(text)
        except ValueError:
            value = math.nan
        if (kind is float and not math.isfinite(value)) or value != value:
            raise ConfigError(name, text, "must be a whole number" if kind is int else "must be a number")
        return value

    return read


def run(args: argparse.Namespace) -> int:
    """Prints the plan and returns the exit code.

    Raises:
        ConfigError: The plan cannot work, with what would be possible.
    """
    console = Screen(highlight=False)
    if not console.is_terminal:
        console.width = PLAIN_WIDTH
    if args.table:
        for name, default in _defaults().items():
            if name not in ("table", "json") and getattr(args, name) != default:
                raise ConfigError(name, str(getattr(args, name)), "is set by each cell of the table: leave it out")
        cells = recompute()
        if args.json:
            print(json.dumps(table_json(cells)))
        else:
            console.print(render_table(cells))
        return 0
    model = _model(args)
    mode = _one_of("mode", args.mode, Mode)
    fleet = fleet_of(args, model, mode)
    planned = plan(fleet, mode)
    document = to_json(fleet, planned, model)
    document["notes"] += _without_effect(args, mode)
    if args.json:
        print(json.dumps(document, allow_nan=False))
    else:
        console.print(render(fleet, planned, document))
    return 0


def _defaults() -> dict[str, Any]:
    """Returns the flags as they are if none is given."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return vars(parser.parse_args([]))


def _without_effect(args: argparse.Namespace, mode: Mode) -> list[str]:
    """Says which flags were given that do nothing for the mode asked about, though for those beside it."""
    idle = []
    if mode is Mode.DECOUPLED and args.utilisation is not None:
        idle.append(
            f"--utilisation {args.utilisation:g} changes nothing for decoupled islands, which compute all the time: "
            "they need the link that carries each fragment once in H steps. It counts for the other modes."
        )
    if mode is not Mode.STREAMING and args.overlap is not None:
        idle.append(
            f"--overlap {args.overlap} changes no figure of {mode}: it is how long Streaming DiLoCo trains on before "
            "it waits for a version. It counts for that."
        )
    if mode is Mode.DP and args.codec is not None:
        idle.append(
            f"--codec {args.codec} changes nothing for data-parallel training, whose gradients travel as bf16. "
            "It counts for the other modes."
        )
    return idle


# --- from flags and files -----------------------------------------------------------------------------------------


def _model(args: argparse.Namespace) -> Model:
    if args.model is not None and args.params is not None:
        raise ConfigError("params", args.params, "is in --model already; give one of them")
    if args.model is not None:
        return read_model(args.model)
    if args.params is None:
        raise ConfigError("params", None, "is needed; give --params 5B, or --model FILE")
    return parse_parameters(args.params)


def _one_of(name: str, value: str, kind: Any) -> Any:
    try:
        return kind(value)
    except ValueError:
        raise ConfigError(name, value, f"is none; {nearest(value, [str(each) for each in kind])}") from None


def fleet_of(args: argparse.Namespace, model: Model, mode: Mode) -> Fleet:
    """Returns the fleet that flags, ``--fleet`` and the model's file describe; flags win."""

    def given(name: str, otherwise: Any) -> Any:
        value = getattr(args, name)
        return value if value is not None else model.defaults.get(name, otherwise)

    assume = _one_of("assume", args.assume, Assume)
    paper = assume is Assume.PAPER
    codec = _one_of("codec", given("codec", "bf16"), Codec)
    if paper and args.version_codec not in (None, str(codec)):
        cure = f"does not count with --assume paper, which has one codec for both ways ({codec}): leave one of them out"
        raise ConfigError("version_codec", args.version_codec, cure)
    version_codec = _one_of("version_codec", given("version_codec", str(codec) if paper else "f32"), Codec)
    interval = given("sync_interval", 24)
    fragments = given("fragments", min(24 if paper else 8, max(interval, 1)))
    fleet = Fleet(
        parameters=model.parameters,
        tensors=model.tensors,
        sites=_sites(args, given),
        codec=codec,
        version_codec=version_codec,
        sync_interval_steps=interval,
        fragments=fragments,
        overlap_steps=given("overlap", min(2, max(interval - 1, 0))),
        shards=given("shards", 1),
        utilisation=0.95 if args.utilisation is None else args.utilisation,
        assume=assume,
        broker_gbps=args.broker_bandwidth,
        price_per_hour=args.price,
        price_per_gb=args.price_per_gb,
        accelerator_gb=args.memory_gb,
        host_gb=args.host_memory_gb,
        **model.limits,
    )
    if args.overlap is not None and mode in (Mode.DECOUPLED, Mode.STREAMING):
        check_overlap(fleet)
    return with_goodput(fleet, args.mtbi_years)


def _sites(args: argparse.Namespace, given: Any) -> tuple[Site, ...]:
    tokens = given("tokens_per_step", DEFAULT_TOKENS_PER_STEP)
    if args.fleet is not None:
        for name in ("sites", "step_time", "accelerators", "bandwidth", "latency_ms"):
            if getattr(args, name) is not None:
                raise ConfigError(name, getattr(args, name), f"stands in --fleet {args.fleet}; leave the flag out")
        return read_fleet(args.fleet, tokens)
    count = given("sites", 2)
    if not 1 <= count <= MOST_SITES:
        raise ConfigError("sites", count, f"must lie between 1 and {MOST_SITES}")
    if args.step_time is None:
        raise ConfigError("step_time", None, "is needed; give --step-time in seconds, or --fleet FILE")
    site = Site(
        name="site",
        step_s=args.step_time,
        accelerators=args.accelerators,
        gbps=args.bandwidth,
        latency_s=(args.latency_ms or 0.0) / 1e3,
        tokens_per_step=tokens,
    )
    return tuple(replace(site, name=f"site-{i}") for i in range(count))


def read_fleet(path: Path, tokens_per_step: int = DEFAULT_TOKENS_PER_STEP) -> tuple[Site, ...]:
    """Returns the sites of a TOML file with a table ``[[island]]`` for each.

    Raises:
        ConfigError: The file cannot be read, or a value is missing, unknown or wrong.
    """
    document = toml.read(path, field="fleet")
    refuse_unknown(document, ("island",), where="fleet")
    tables = document.get("island", [])
    if not isinstance(tables, list) or not tables or not all(isinstance(table, dict) for table in tables):
        raise ConfigError("fleet", str(path), "must have a table [[island]] for each site")
    sites: list[Site] = []
    for table in tables:
        refuse_unknown(table, _ISLAND_KEYS, where="island")
        for key, value in table.items():
            numbers = (int,) if key in ("count", "accelerators", "tokens_per_step") else (int, float)
            if key != "name" and (not isinstance(value, numbers) or isinstance(value, bool)):
                raise ConfigError(f"[island] {key}", value, "must be a number, whole where things are counted")
            if key != "name" and abs(value) > MOST:
                raise ConfigError(f"[island] {key}", value, f"must be at most {MOST:g}")
        if "step_time" not in table:
            raise ConfigError("[island] step_time", None, "is needed for each site, in seconds")
        count = table.get("count", 1)
        if not 1 <= count <= MOST_SITES - len(sites):
            raise ConfigError("[island] count", count, f"must lie between 1 and {MOST_SITES}, all sites together")
        for _ in range(count):
            site = Site(
                name=str(table.get("name", f"site-{len(sites)}")),
                step_s=float(table["step_time"]),
                accelerators=table.get("accelerators"),
                gbps=table.get("gbps"),
                latency_s=table.get("ms", 0.0) / 1e3,
                tokens_per_step=table.get("tokens_per_step", tokens_per_step),
            )
            try:
                check_site(site)
            except ConfigError as err:
                key = {"bandwidth": "gbps", "latency_ms": "ms"}.get(err.field, err.field)
                raise ConfigError(f"[island] {key} of {site.name}", table.get(key), err.cure) from err
            sites.append(site)
    return tuple(sites)
