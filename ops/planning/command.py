"""``atoll plan``: its flags, the files it reads and its output."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

from broker.process import sources
from broker.process.settings import refuse_unknown, setting
from broker.wire.errors import ConfigError
from broker.wire.messages import Codec
from ops.planning.fleet import MOST, Fleet, Site, check_overlap
from ops.planning.forecast import with_goodput
from ops.planning.links import Assume, Mode
from ops.planning.planner import plan
from ops.planning.sharding import is_auto, shards_for
from ops.planning.sizing import Model, parse_parameters, read_model
from ops.planning.view import following, render, to_json
from ops.terminal import Screen

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


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSettings:
    """The flags of ``atoll plan``, but for its files and its output."""

    sites: int = setting(2, "sites, each one island", subject="fleet")
    step_time: float | None = setting(None, "seconds of computing per inner step")
    accelerators: int | None = setting(None, "accelerators of each site")
    tokens_per_step: int = setting(1 << 18, "of each site")
    bandwidth: float | None = setting(None, "Gbit/s of each site, each way")
    latency_ms: float = setting(0.0, "from a site to the hub, one way")
    broker_bandwidth: float | None = setting(None, "Gbit/s of the broker, each way")

    mode: Mode = setting(Mode.DECOUPLED, "way of training together", subject="how to train")
    codec: Codec = setting(Codec.BF16, "of contributions")
    version_codec: Codec | None = setting(None, "of versions: as codec if not given")
    sync_interval: int = setting(24, "inner steps between two merges")
    fragments: int | None = setting(None, "fragments of the model: 8 if not given, with --assume paper 24")
    overlap: int | None = setting(None, "inner steps until streaming waits for a version: 2 if not given")
    shards: int = setting(1, "aggregators that share the fragments, each on a host of its own; or auto: by the model")
    utilisation: float = setting(0.95, "share of time to compute; decoupled islands always compute")
    assume: Assume = setting(Assume.ATOLL, "what our programs send, or what published figures rest on")

    price: float | None = setting(None, "of an accelerator-hour", subject="money, memory and failures")
    price_per_gb: float | None = setting(None, "of a GB that leaves a site")
    memory_gb: float | None = setting(None, "of one accelerator: checked")
    host_memory_gb: float | None = setting(None, "of one host: checked")
    mtbi_years: float | None = setting(None, "between interruptions of a chip: 1 if not given")


@dataclass(frozen=True, slots=True, kw_only=True)
class IslandTable:
    """A table ``[[island]]`` of a file of sites."""

    step_time: float = setting(0.0, "seconds of computing per inner step")
    name: str = setting("", "for people")
    count: int = setting(1, "sites that are like this one")
    accelerators: int | None = setting(None, "accelerators of the site")
    gbps: float | None = setting(None, "Gbit/s of the site, each way")
    ms: float = setting(0.0, "milliseconds from the site to the hub, one way")
    tokens_per_step: int | None = setting(None, "of the site")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of ``atoll plan``."""
    model = parser.add_argument_group("model, and sites of a file")
    model.add_argument("--params", metavar="N", help="parameters: 5e9, 5B, 125M")
    about = "safetensors (one of several files, or their index), or a run's config.toml"
    model.add_argument("--model", type=Path, metavar="FILE", help=about)
    model.add_argument("--fleet", type=Path, metavar="FILE", help="TOML file of unequal sites, in place of their flags")
    sources.add_flags(parser, PlanSettings)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.epilog = f"{parser.epilog}\n{_EPILOG}"


def run(args: argparse.Namespace) -> int:
    """Prints the plan and returns the exit code.

    Raises:
        ConfigError: The plan cannot work, with what would be possible.
    """
    model = _model(args)
    fleet, mode = fleet_of(args, model)
    planned = plan(fleet, mode)
    document = to_json(fleet, planned, model)
    if args.json:
        print(json.dumps(document, allow_nan=False))
    else:
        Screen().print(render(fleet, planned, document, args.as_called(following(fleet, planned))))
    return 0


def _model(args: argparse.Namespace) -> Model:
    if args.model is not None and args.params is not None:
        raise ConfigError("params", args.params, "is in --model already; give one of them")
    if args.model is not None:
        return read_model(args.model)
    if args.params is None:
        raise ConfigError("params", None, "is needed; give --params 5B, or --model FILE")
    return parse_parameters(args.params)


def fleet_of(args: argparse.Namespace, model: Model) -> tuple[Fleet, Mode]:
    """Returns the fleet that flags, ``--fleet`` and the model's file describe, and the mode; flags win."""
    auto = is_auto(args.shards)
    flags_given = argparse.Namespace(**{**vars(args), "shards": None if auto else args.shards})
    asked = sources.from_sources(PlanSettings, model.defaults, flags_given)
    paper, interval = asked.assume is Assume.PAPER, asked.sync_interval
    if paper and args.version_codec not in (None, str(asked.codec)):
        cure = f"does not count with --assume paper, which has one codec for both ways ({asked.codec}): leave one out"
        raise ConfigError("version_codec", args.version_codec, cure)
    fragments = min(24 if paper else 8, max(interval, 1)) if asked.fragments is None else asked.fragments
    host_bytes = None if asked.host_memory_gb is None else asked.host_memory_gb * 1e9
    fleet = Fleet(
        parameters=model.parameters,
        tensors=model.tensors,
        sites=_sites(args, asked),
        codec=asked.codec,
        version_codec=asked.version_codec or asked.codec,
        sync_interval_steps=interval,
        fragments=fragments,
        overlap_steps=min(2, max(interval - 1, 0)) if asked.overlap is None else asked.overlap,
        shards=shards_for(model.parameters, fragments=fragments, host_bytes=host_bytes) if auto else asked.shards,
        utilisation=asked.utilisation,
        assume=asked.assume,
        broker_gbps=asked.broker_bandwidth,
        price_per_hour=asked.price,
        price_per_gb=asked.price_per_gb,
        accelerator_gb=asked.memory_gb,
        host_gb=asked.host_memory_gb,
        **model.limits,
    )
    if args.overlap is not None and asked.mode in (Mode.DECOUPLED, Mode.STREAMING):
        check_overlap(fleet)
    return with_goodput(fleet, asked.mtbi_years), asked.mode


def _sites(args: argparse.Namespace, asked: PlanSettings) -> tuple[Site, ...]:
    if args.fleet is not None:
        for name in ("sites", "step_time", "accelerators", "bandwidth", "latency_ms"):
            if getattr(args, name) is not None:
                raise ConfigError(name, getattr(args, name), f"stands in --fleet {args.fleet}; leave the flag out")
        return read_fleet(args.fleet, asked.tokens_per_step)
    if not 1 <= asked.sites <= MOST_SITES:
        raise ConfigError("sites", asked.sites, f"must lie between 1 and {MOST_SITES}")
    if asked.step_time is None:
        raise ConfigError("step_time", None, "is needed; give --step-time in seconds, or --fleet FILE")
    return tuple(
        Site(
            name=f"site-{i}",
            step_s=asked.step_time,
            accelerators=asked.accelerators,
            gbps=asked.bandwidth,
            latency_s=asked.latency_ms / 1e3,
            tokens_per_step=asked.tokens_per_step,
        )
        for i in range(asked.sites)
    )


def read_fleet(path: Path, tokens_per_step: int) -> tuple[Site, ...]:
    """Returns the sites of a TOML file with a table ``[[island]]`` for each.

    Raises:
        ConfigError: The file cannot be read, or a value is missing, unknown or wrong.
    """
    document = sources.read_toml(path, field="fleet")
    refuse_unknown(document, ("island",), where="fleet")
    tables = document.get("island", [])
    if not isinstance(tables, list) or not tables or not all(isinstance(table, dict) for table in tables):
        raise ConfigError("fleet", str(path), "must have a table [[island]] for each site")
    sites: list[Site] = []
    for each in tables:
        for key, value in each.items():
            if isinstance(value, int) and abs(value) > MOST:
                raise ConfigError(f"[island] {key}", value, f"must be at most {MOST:g}")
        table = sources.from_sources(IslandTable, each, where="island")
        if "step_time" not in each:
            raise ConfigError("[island] step_time", None, "is needed for each site, in seconds")
        if not 1 <= table.count <= MOST_SITES - len(sites):
            raise ConfigError("[island] count", table.count, f"must lie between 1 and {MOST_SITES}, all sites together")
        for _ in range(table.count):
            name = table.name or f"site-{len(sites)}"
            try:
                site = Site(
                    name=name,
                    step_s=table.step_time,
                    accelerators=table.accelerators,
                    gbps=table.gbps,
                    latency_s=table.ms / 1e3,
                    tokens_per_step=tokens_per_step if table.tokens_per_step is None else table.tokens_per_step,
                )
            except ConfigError as err:
                key = {"bandwidth": "gbps", "latency_ms": "ms"}.get(err.field, err.field)
                raise ConfigError(f"[island] {key} of {name}", each.get(key), err.cure) from err
            sites.append(site)
    return tuple(sites)
