"""``atoll plan``: its flags, the files it reads and its output."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from broker.process import toml
from broker.process.settings import nearest, refuse_unknown
from broker.process.values import whole_number
from broker.wire.errors import ConfigError
from broker.wire.messages import Codec
from ops.planning.fleet import MOST, Fleet, Site, check_overlap
from ops.planning.forecast import with_goodput
from ops.planning.links import Assume, Mode
from ops.planning.planner import plan
from ops.planning.sizing import Model, parse_parameters, read_model
from ops.planning.view import render, to_json
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

#: Keys of a table [[island]], and whether their values are whole numbers.
_ISLAND_KEYS = {
    "name": None,
    "count": int,
    "accelerators": int,
    "step_time": float,
    "gbps": float,
    "ms": float,
    "tokens_per_step": int,
}

#: Heading -> flags that take a number: name, kind, placeholder, help.
_NUMBERS: dict[str, tuple[tuple[str, type[int] | type[float], str, str], ...]] = {
    "fleet": (
        ("sites", int, "M", "sites, each one island (default 2)"),
        ("step-time", float, "S", "seconds of computing per inner step"),
        ("accelerators", int, "N", "accelerators of each site"),
        ("tokens-per-step", int, "N", "of each site (default 262144)"),
        ("bandwidth", float, "GBPS", "Gbit/s of each site, each way"),
        ("latency-ms", float, "MS", "from a site to the hub, one way"),
        ("broker-bandwidth", float, "GBPS", "Gbit/s of the broker, each way"),
    ),
    "how to train": (
        ("sync-interval", int, "H", "inner steps between two merges (24)"),
        ("fragments", int, "P", "fragments of the model (8; paper: 24)"),
        ("overlap", int, "TAU", "inner steps until streaming waits for a version (2); decoupled islands never wait"),
        ("shards", int, "N", "aggregators that share the fragments, each on a host of its own (1)"),
        ("utilisation", float, "U", "share of time to compute (default 0.95); decoupled islands always compute"),
    ),
    "money, memory and failures": (
        ("price", float, "X", "of an accelerator-hour"),
        ("price-per-gb", float, "X", "of a GB that leaves a site"),
        ("memory-gb", float, "GB", "of one accelerator: checked"),
        ("host-memory-gb", float, "GB", "of one host: checked"),
        ("mtbi-years", float, "Y", "between interruptions of a chip (1)"),
    ),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of ``atoll plan``."""
    model = parser.add_argument_group("model")
    model.add_argument("--params", metavar="N", help="parameters: 5e9, 5B, 125M")
    about = "safetensors (one of several files, or their index), or a run's config.toml"
    model.add_argument("--model", type=Path, metavar="FILE", help=about)
    groups = {title: parser.add_argument_group(title) for title in _NUMBERS}
    about = "TOML file of unequal sites, in place of these flags"
    groups["fleet"].add_argument("--fleet", type=Path, metavar="FILE", help=about)
    how = groups["how to train"]
    how.add_argument("--mode", metavar="NAME", default="decoupled", help=f"{' | '.join(Mode)} (default decoupled)")
    how.add_argument("--codec", metavar="NAME", help=f"of contributions: {' | '.join(Codec)} (default bf16)")
    how.add_argument("--version-codec", metavar="NAME", help="of versions: f32 | bf16 (default f32)")
    how.add_argument("--assume", metavar="NAME", default="atoll", help="atoll (what our programs send) | paper")
    for title, flags in _NUMBERS.items():
        for name, kind, metavar, about in flags:
            read = _number(name.replace("-", "_"), kind)
            groups[title].add_argument(f"--{name}", type=read, metavar=metavar, help=about)
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
    model = _model(args)
    mode = _one_of("mode", args.mode, Mode)
    fleet = fleet_of(args, model, mode)
    planned = plan(fleet, mode)
    document = to_json(fleet, planned, model)
    if args.json:
        print(json.dumps(document, allow_nan=False))
    else:
        console.print(render(fleet, planned, document))
    return 0


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
    interval = given("sync_interval", 24)
    fleet = Fleet(
        parameters=model.parameters,
        tensors=model.tensors,
        sites=_sites(args, given),
        codec=codec,
        version_codec=_one_of("version_codec", given("version_codec", str(codec) if paper else "f32"), Codec),
        sync_interval_steps=interval,
        fragments=given("fragments", min(24 if paper else 8, max(interval, 1))),
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


def _sites(args: argparse.Namespace, given: Callable[[str, Any], Any]) -> tuple[Site, ...]:
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
    return tuple(
        Site(
            name=f"site-{i}",
            step_s=args.step_time,
            accelerators=args.accelerators,
            gbps=args.bandwidth,
            latency_s=(args.latency_ms or 0.0) / 1e3,
            tokens_per_step=tokens,
        )
        for i in range(count)
    )


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
            if key == "name":
                continue
            kinds = int if _ISLAND_KEYS[key] is int else (int, float)
            if not isinstance(value, kinds) or isinstance(value, bool):
                raise ConfigError(f"[island] {key}", value, "must be a number, whole where things are counted")
            if abs(value) > MOST:
                raise ConfigError(f"[island] {key}", value, f"must be at most {MOST:g}")
        if "step_time" not in table:
            raise ConfigError("[island] step_time", None, "is needed for each site, in seconds")
        count = table.get("count", 1)
        if not 1 <= count <= MOST_SITES - len(sites):
            raise ConfigError("[island] count", count, f"must lie between 1 and {MOST_SITES}, all sites together")
        for _ in range(count):
            name = str(table.get("name", f"site-{len(sites)}"))
            try:
                site = Site(
                    name=name,
                    step_s=float(table["step_time"]),
                    accelerators=table.get("accelerators"),
                    gbps=table.get("gbps"),
                    latency_s=table.get("ms", 0.0) / 1e3,
                    tokens_per_step=table.get("tokens_per_step", tokens_per_step),
                )
            except ConfigError as err:
                key = {"bandwidth": "gbps", "latency_ms": "ms"}.get(err.field, err.field)
                raise ConfigError(f"[island] {key} of {name}", table.get(key), err.cure) from err
            sites.append(site)
    return tuple(sites)
