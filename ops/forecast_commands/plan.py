"""``atoll plan``: its flags, the files it reads and its output."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from broker.base import sources
from broker.base.errors import ConfigError
from broker.base.settings import from_flag, refuse_unknown, typed
from ops.forecast.fleet import MOST, Assume, Fleet, Site, Training, check, check_overlap
from ops.forecast.footprint import is_auto, shards_for
from ops.forecast.planner import plan
from ops.forecast_commands.model_size import Lora, Model, parse_parameters, read_model
from ops.forecast_commands.view import following, plan_as_json, plan_as_tables
from ops.terminal import Screen

#: More sites are taken for a typing error.
MOST_SITES = 1_000

_EPILOG = """
--json prints one object: mode, bandwidth_gbps, beyond, fits, link_gbps, utilisation, round_s, rounds_apart_s,
sync_interval_steps, rounds_open, staleness, memory_bytes, tokens_per_day, traffic, settings, sites,
assumptions, notes, alternatives (the other modes) and choice (with --bandwidth).
bandwidth_gbps is the need for the given H: "up" and "down" of each site, "broker_up" and
"broker_down", and "exact": the wider direction of a site before it was moved to a grid. beyond says why no bandwidth is
enough for the target, or is empty. An impossible alternative has one key, "refused", with the reason.

--fleet FILE describes unequal sites:
  [[island]]
  name = "east"         # accelerators, step_time (s), bandwidth (Gbit/s), latency_ms, tokens_per_step
  step_time = 1.2
  bandwidth = 2.0
  count = 3             # three of them"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of ``atoll plan``."""
    model = parser.add_argument_group("model, and sites of a file")
    model.add_argument("--params", metavar="N", help="parameters: 5e9, 5B, 125M")
    about = "a model's directory, safetensors (one file, or the index of several), config.json; or a run's config.toml"
    model.add_argument("--model", type=Path, metavar="PATH", help=about)
    model.add_argument("--lora-rank", metavar="N", help="train adapters of this rank alone, as islands.hf:task does")
    model.add_argument("--lora-targets", metavar="A,B", help="modules that get one (default: by the architecture)")
    model.add_argument(
        "--dtype", metavar="NAME", help="in which islands hold the base of adapters: f32 (default) | bf16"
    )
    model.add_argument("--fleet", type=Path, metavar="FILE", help="TOML file of unequal sites, in place of their flags")
    model.add_argument("--sites", metavar="N", help="sites that are alike, each one island (default 2)")
    sources.add_flags(parser, Site, skip={"name"})
    sources.add_flags(parser, Training)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.epilog = f"{parser.epilog}\n{_EPILOG}"


def run(args: argparse.Namespace) -> int:
    """Prints the plan and returns the exit code.

    Raises:
        ConfigError: The plan cannot work, with what would be possible.
    """
    model = _model(args)
    fleet = fleet_of(args, model)
    planned = plan(fleet)
    document = plan_as_json(fleet, planned, model)
    if args.json:
        print(json.dumps(document, allow_nan=False))
    else:
        Screen().print(plan_as_tables(fleet, planned, document, args.as_called(following(fleet, planned))))
    return 0


def _model(args: argparse.Namespace) -> Model:
    if args.model is not None and args.params is not None:
        raise ConfigError("params", args.params, "is in --model already; give one of them")
    if args.lora_rank is None:
        for name in ("lora_targets", "dtype"):
            if getattr(args, name) is not None:
                raise ConfigError(name, getattr(args, name), "is about adapters: give --lora-rank 8 as well")
    if args.model is not None:
        return read_model(args.model, _lora(args))
    if args.params is None:
        raise ConfigError("params", None, "is needed; give --params 5B, or --model PATH")
    if args.lora_rank is not None:
        cure = "needs the shapes of the model, which --params does not tell: give --model, its directory or config.json"
        raise ConfigError("lora_rank", args.lora_rank, cure)
    return parse_parameters(args.params)


def _lora(args: argparse.Namespace) -> Lora | None:
    if args.lora_rank is None:
        return None
    targets = tuple(filter(None, (args.lora_targets or "").split(",")))
    return Lora(rank=from_flag("lora_rank", args.lora_rank, int), targets=targets, dtype=args.dtype or "f32")


def fleet_of(args: argparse.Namespace, model: Model) -> Fleet:
    """Returns the fleet from flags, ``--fleet`` and the model's file; flags win."""
    auto = is_auto(args.shards)
    flags_given = argparse.Namespace(**{**vars(args), "shards": None if auto else args.shards})
    asked = sources.from_sources(Training, model.training, flags_given)
    paper, interval = asked.assume is Assume.PAPER, asked.sync_interval
    if paper and args.version_codec not in (None, str(asked.codec)):
        cure = f"does not count with --assume paper, which has one codec for both ways ({asked.codec}): leave one out"
        raise ConfigError("version_codec", args.version_codec, cure)
    # What nobody asked for gives way to H.
    usual = {"fragments": min(24 if paper else asked.fragments, interval), "overlap": min(asked.overlap, interval - 1)}
    follows = {key: value for key, value in usual.items() if getattr(args, key) is None and key not in model.training}
    if auto:
        fragments = follows.get("fragments", asked.fragments)
        host_bytes = None if asked.host_memory_gb is None else asked.host_memory_gb * 1e9
        follows["shards"] = shards_for(model.parameters, fragments=fragments, host_bytes=host_bytes)
    described = {"parameters": model.parameters, "tensors": model.tensors, "sites": _sites(args, model), **model.limits}
    fleet = Fleet(**asdict(asked) | follows | described, base_bytes=model.base_bytes)
    if args.overlap is not None:
        check_overlap(fleet)
    return fleet


def _sites(args: argparse.Namespace, model: Model) -> tuple[Site, ...]:
    tokens = dict(model.site)
    if args.fleet is not None:
        for name in ("sites", "step_time", "accelerators", "bandwidth", "latency_ms"):
            if getattr(args, name) is not None:
                raise ConfigError(name, getattr(args, name), f"is in --fleet {args.fleet}; leave the flag out")
        if args.tokens_per_step is not None:
            tokens["tokens_per_step"] = from_flag("tokens_per_step", args.tokens_per_step, int)
        return read_fleet(args.fleet, tokens)
    sites = from_flag("sites", model.islands if args.sites is None else args.sites, int)
    check("sites", sites, 1, MOST_SITES)
    if args.step_time is None:
        raise ConfigError("step_time", None, "is needed; give --step-time in seconds, or --fleet FILE")
    site = sources.from_sources(Site, tokens, args)
    return tuple(replace(site, name=f"site-{i}") for i in range(sites))


def read_fleet(path: Path, usual: Mapping[str, Any]) -> tuple[Site, ...]:
    """Returns the sites of a TOML file with a table ``[[island]]`` for each.

    Args:
        path: The file.
        usual: Values of sites that the file leaves out.

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
        count = typed("[island] count", each.pop("count", 1), int)
        check("[island] count", count, 1, MOST_SITES - len(sites), ", all sites together")
        for _ in range(count):
            table = {"name": f"site-{len(sites)}", **usual, **each}
            try:
                sites.append(sources.from_sources(Site, table, where="island"))
            except ConfigError as err:
                if err.field.startswith("["):
                    raise
                raise ConfigError(f"[island] {err.field} of {table['name']}", each.get(err.field), err.cure) from err
    return tuple(sites)
