"""``chaos``: strikes a local run with faults while it trains, reports, and checks the invariants.

Starts the same run as ``up`` with the same settings, waits until every island trains, does the faults of its plan to
it, lets it heal, ends it, and says what was seen. The exit status is 1 if an invariant does not hold.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from aggregator.interface.config import AggregatorConfig
from broker.base import settings, sources
from broker.base.errors import ConfigError
from broker.base.settings import nearest
from broker.gateway.config import BrokerConfig
from broker.process.signals import Signals
from islands.interface.config import IslandConfig
from ops.chaos import report, verify
from ops.chaos.drill import Drill
from ops.faults.kinds import FaultKind
from ops.faults.plan import NATURES, ChaosConfig, FaultFile, Needs, all_faults, read_faults
from ops.inspect.tapes import ledgers_in
from ops.link_proxy import placing
from ops.links.region import TO_REDIS
from ops.run import local_plan
from ops.run import report as reporting
from ops.run.display import Display
from ops.run.end_of_run import keep
from ops.run.local_plan import LocalPlan
from ops.run.prepare import prepare
from ops.run.settings import UpConfig, up_config

_EPILOG = """
Kinds of faults, the form of the file and every figure of the report: docs/chaos.md. Without --tokens the run goes on
until the faults are over and have healed.

exit status:
  0    every invariant holds
  1    one does not, or the run did not go on; the report has what was seen
  2    a setting or the file of faults is wrong
  130  interrupted by Ctrl-C; the report has what was seen until then (1 if an invariant does not hold)"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of ``chaos``: its own, then those of ``up``."""
    parser.add_argument("faults", nargs="?", type=Path, metavar="FILE", help="TOML file with faults and settings")
    parser.add_argument(
        "--check", type=Path, metavar="RUN_DIR", help="only check the invariants of a run, past or present"
    )
    parser.add_argument(
        "--json", action="store_true", help="the report as one JSON object, on standard output's last line"
    )
    sources.add_flags(parser, ChaosConfig)
    local_plan.add_arguments(parser)
    parser.set_defaults(resume=None)  # a flag of up: a run that is struck is a new one
    parser.epilog = f"{parser.epilog}\n{_EPILOG}"


def run(args: argparse.Namespace) -> int:
    """Runs, strikes, reports; returns the exit status that ``--help`` lists.

    Raises:
        ConfigError: A setting or the file of faults cannot work; nothing was started.
        Unavailable: The run directory cannot be written or read, or there is no Redis.
    """
    if args.check is not None:
        return _check(args.check, as_json=args.json)
    file = FaultFile()
    if args.faults is not None:
        file = read_faults(sources.toml_text(args.faults, field="faults"), name=str(args.faults))
    config = sources.from_sources(ChaosConfig, file.chaos, args, where="chaos")
    _take_cluster_settings(args, file.cluster)
    _place_links(args, config, file)
    possible = _possible(args)
    faults = all_faults(config, file, possible, standbys=up_config(args).standbys > 0)
    if args.total_tokens is None:
        args.total_tokens = "0"  # it ends with the faults
    plan = prepare(args)
    with Signals() as signals, Display() as display:
        drill = Drill(plan, config, faults, as_called=args.as_called)
        status = drill.run(display, signals)
        display.note("reading the tapes and checking the invariants")
        whole = _report(plan, config, drill, status)
    keep(plan, whole, as_json=args.json, text=_render)
    return int(whole["exit"])


# --- before -----------------------------------------------------------------------------------------------------


def _take_cluster_settings(args: argparse.Namespace, cluster: Mapping[str, Any]) -> None:
    """Takes the settings of [cluster] that no flag gives.

    Raises:
        ConfigError: A key of it is no setting of ``up``.
    """
    known = {
        each.name
        for cls in (UpConfig, AggregatorConfig, IslandConfig, BrokerConfig)
        for each in settings.settings_of(cls)
    }
    known &= set(vars(args))
    for name, value in cluster.items():
        if name not in known:
            raise ConfigError(f"[cluster] {name}", value, f"is no setting of up; {nearest(name, known)}")
        if getattr(args, name) is None:
            setattr(args, name, _as_flag(value))


def _as_flag(value: Any) -> Any:
    """Returns a TOML value as its flag would have parsed it."""
    match value:
        case bool():
            return value
        case list():
            return [str(each) for each in value]
        case dict():
            return [f"{key}={json.dumps(each) if isinstance(each, bool) else each}" for key, each in value.items()]
        case _:
            return str(value)


def _place_links(args: argparse.Namespace, config: ChaosConfig, file: FaultFile) -> None:
    """Gives every process a faultless link, if a fault of the plan may need one and none is placed yet."""
    asked = config.kinds if config.kinds is not None else frozenset(FaultKind if config.fault_every_s else ())
    wanted = asked | {each.kind for each in file.faults}
    if (link := up_config(args).link) is not None:  # that of a file as well
        args.link = str(link)
        return
    needs = {NATURES[kind].needs for kind in wanted}
    if Needs.REDIS_LINKS in needs and local_plan.given_redis_url(args) is None:
        args.link = str(Path(__file__).with_name("plain_links_with_redis.toml"))
    elif Needs.LINKS in needs:
        args.link = str(Path(__file__).with_name("plain_links.toml"))


def _possible(args: argparse.Namespace) -> set[Needs]:
    """Returns the needs of faults that this run meets."""
    possible = set()
    if local_plan.given_redis_url(args) is None:
        possible.add(Needs.OWN_REDIS)
    if args.link is not None:
        possible.add(Needs.LINKS)
        if any(glob.endswith(TO_REDIS) for glob, _ in placing.read(Path(args.link))):
            possible.add(Needs.REDIS_LINKS)
    return possible


# --- after ------------------------------------------------------------------------------------------------------


def _check(run_dir: Path, *, as_json: bool) -> int:
    checks, left_out = verify.verify(run_dir), verify.left_out(run_dir)
    holds = all(check.holds for check in checks)
    if as_json:
        found = {"run_dir": os.fspath(run_dir), "holds": holds, "invariants": verify.as_json(checks)}
        print(json.dumps(found | {"left_out": left_out}))
    else:
        rows = [verify.render(verify.as_json(checks)), *(f"  {each}" for each in left_out)]
        print(f"invariants of {run_dir}:\n" + "\n".join(rows))
    return 0 if holds else 1


def _report(plan: LocalPlan, config: ChaosConfig, drill: Drill, status: int) -> dict[str, Any]:
    """Returns the report of ``up`` with the chaos part beside it."""
    checks = verify.verify(plan.run_dir) if ledgers_in(plan.run_dir) else []
    holds = all(check.holds for check in checks)
    exit_ = 1 if not holds else status or int(not checks)
    whole = drill.up.report(exit_)
    return whole | {
        "plan": dataclasses.asdict(config) | {"fault_kinds": list(config.fault_kinds)},
        "chaos": report.chaos_report(drill.recording),
        "invariants": verify.as_json(checks),
        "holds": holds and bool(checks),
    }


def _render(whole: Mapping[str, Any]) -> str:
    text = [reporting.render(dict(whole)), "", "chaos:", report.render(whole["chaos"]), "", "invariants:"]
    text.append(verify.render(whole["invariants"]) or "  nothing to check: the run left no ledger")
    return "\n".join(text)
