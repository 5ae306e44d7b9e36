"""``up --resume RUN_DIR``, and ``hub`` on its directory: continues a run from its directory.

Everything that matters is on disk already: the store (parameters, momentum, books), the islands' checkpoints, and
``config.toml``, which says every setting. So resuming is starting the same processes on the same directory under the
same run id; this module finds the directory, holds new flags against the stored settings, and says where the run stood.
"""

from __future__ import annotations

import argparse
import copy
import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from aggregator.interface.config import AggregatorConfig
from broker.base import settings, sources
from broker.base.errors import ConfigError
from broker.base.settings import Scope, expanded
from broker.wire.names import check_name
from ops.run.local_plan import LocalPlan, resolve
from ops.run.settings import hub_config

#: What a resumed run may change: its end, its pace, what it is evaluated by and keeps for study, devices and addresses
#: here.
MAY_CHANGE = frozenset(
    {"total_tokens", "pace", "evaluate_every", "benchmark", "log_to", "record_payloads", "platform"}
    | {"devices_per_island", "metrics", "copy_to", "copy_every_s", "port", "redis_port", "redis_url"}
)
#: Places and parts, which follow from the directory, the ports and the other settings.
_PLACES = frozenset(
    {"run_dir", "host", "broker", "store", "tape", "report", "model", "data", "task_options", "failover", "standby"}
)

#: What lies in the directory of a hub before its first start is over: keys may be brought, and so may a store.
OF_NEW_HUBS = frozenset({"keys", "store", "islands", "logs", "lock"})

CHANGES_HELP = (
    "--tokens, --pace, --evaluate-every, --benchmark, --log-to, --record-payloads, --copy-to, --copy-every-s, "
    "--platform, --devices-per-island, --metrics, --port, --redis-port and --redis-url may differ"
)


def directory_of(args: argparse.Namespace) -> Path:
    """Returns the absolute directory that ``--resume`` names.

    Raises:
        ConfigError: It holds no run, or another flag says where the settings or the directory are.
    """
    wanted: Path = args.resume
    run_dir = expanded("resume", wanted).absolute()
    if not (run_dir / "config.toml").is_file():
        cure = "must be the directory of a run that `up` started (it has a config.toml)"
        raise ConfigError("resume", str(wanted), cure)
    if "hub" in _stored(run_dir, "resume", wanted):
        raise ConfigError("resume", str(wanted), "is the directory of a hub: go on with `atoll hub --run-dir` there")
    for name in ("config", "run_dir"):
        value = getattr(args, name, None)
        if value is not None:
            cure = f"does not go with --resume, which goes on in {wanted} with the settings there: leave it out"
            raise ConfigError(name, str(value), cure)
    return run_dir


def _stored(run_dir: Path, field: str, wanted: Path) -> dict[str, dict[str, Any]]:
    """Returns the tables of a run's ``config.toml``; raises ConfigError if it has lost some."""
    stored = sources.read_file(run_dir / "config.toml")
    if not {"run", "aggregator", "island", "task"} <= stored.keys() or "run_id" not in stored["run"]:
        cure = "has lost its settings, without which it would go on as another run: restore its config.toml"
        raise ConfigError(field, str(wanted), cure)
    return stored


def directory_of_hub(args: argparse.Namespace, wanted: Path | None) -> tuple[Path, bool]:
    """Returns the absolute directory of a hub, and whether it has a run already.

    Args:
        args: Flags of ``hub``.
        wanted: The directory, by flags or file; None: that of the run's name in runs/.

    Raises:
        ConfigError: Neither directory nor run is named, or the directory is of something else.
    """
    run_id = getattr(args, "run_id", None)
    if run_id is None and args.config is not None:
        run_id = sources.read_file(args.config).get("run", {}).get("run_id")
    if run_id is None and wanted is None:
        raise ConfigError(
            "run_id", None, "is needed: give --run NAME for a new run, or --run-dir DIR to go on with one"
        )
    if run_id is not None:
        check_name("run_id", run_id)
    run_dir = (wanted or Path("runs", str(run_id))).absolute()
    if not (run_dir / "config.toml").exists():
        strange = {each.name for each in run_dir.iterdir()} - OF_NEW_HUBS if run_dir.is_dir() else set()
        if strange or run_dir.is_file():
            cure = f"has {sorted(strange)[0]} in it" if strange else "is a file"
            raise ConfigError("run_dir", str(run_dir), f"{cure}, and no run of a hub: name a new directory")
        return run_dir, False
    stored = _stored(run_dir, "run_dir", run_dir)
    if "hub" not in stored:
        cure = f"is the directory of a run of `up`: go on with `atoll up --resume {shlex.quote(str(run_dir))}`"
        raise ConfigError("run_dir", str(run_dir), f"{cure}, or name another one")
    if run_id not in (None, stored["run"]["run_id"]):
        cure = (
            f"is not the run in {run_dir}, which is {stored['run']['run_id']}: leave --run out, or name a new --run-dir"
        )
        raise ConfigError("run_id", run_id, cure)
    return run_dir, True


def with_stored_settings(args: argparse.Namespace, run_dir: Path) -> argparse.Namespace:
    """Returns the flags, over the settings that the run was started with."""
    changed = copy.copy(args)
    changed.config = run_dir / "config.toml"
    return changed


def stored_plan(plan: LocalPlan) -> LocalPlan:
    """Returns the plan that the stored settings alone make, in the place of ``plan``."""
    nothing_said = argparse.Namespace(config=plan.config_file, redis_url=None)
    return resolve(
        nothing_said,
        run_dir=plan.run_dir,
        port=plan.broker.port,
        redis_url=plan.redis_url,
        redis_port=plan.redis_port,
        hub=None if plan.hub is None else hub_config(nothing_said),
    )


def stored_port(run_dir: Path) -> int:
    """Returns the control port that the run's broker had; 0 if that is not known."""
    port = sources.read_file(run_dir / "config.toml").get("broker", {}).get("port", 0)
    return port if isinstance(port, int) else 0


def refuse_contradictions(stored: LocalPlan, wanted: LocalPlan) -> None:
    """Compares the plan by the stored settings alone with the plan by these and the flags.

    Raises:
        ConfigError: For the first setting that differs and may not: its value, the stored one, and the cure.
    """
    before = dict(_settings(stored))
    for name, value in _settings(wanted):
        if value != before.get(name):
            had = "no such setting" if name not in before else _plain(before[name])
            cure = f"the run in {stored.run_dir} has {had}: leave it out"
            if wanted.hub is None:
                cure += f" (only {CHANGES_HELP})"
            other = "up --config" if wanted.hub is None else "hub --run NAME --config"
            cure += f", or start another run with {other} {shlex.quote(str(stored.config_file))}"
            raise ConfigError(name, _plain(value), cure)


def has_ended(plan: LocalPlan) -> bool:
    """Says whether nothing is left to train: the run was flushed, ended, and is asked for no more tokens.

    Raises:
        ConfigError: Its report was written as well, so that there is nothing left to do at all.
    """
    counted = [_json(path) for path in plan.reports]
    trained = counted[0].get("tokens", {}).get("trained", 0)
    if (
        any(each.get("phase") != "ended" for each in counted)
        or plan.aggregator.total_tokens == 0
        or trained < plan.aggregator.total_tokens
    ):
        return False
    if _json(plan.run_dir / "report.json").get("exit") == 0:
        cure = f"the run has trained {trained} and ended: to go on, give more, such as --tokens {2 * trained}"
        raise ConfigError("tokens", plan.aggregator.total_tokens, cure)
    return True


def put_away_reports(plan: LocalPlan) -> None:
    """Keeps the previous report under a number, and removes what the aggregators counted for it."""
    report = plan.run_dir / "report.json"
    if report.exists():
        numbered = (plan.run_dir / f"report-{n}.json" for n in range(1, 10_000))
        report.rename(next(path for path in numbered if not path.exists()))
    for path in plan.reports:  # else a run that is killed would be taken for ended
        path.unlink(missing_ok=True)


def _settings(plan: LocalPlan) -> Iterator[tuple[str, Any]]:
    """Yields every setting that a resumed run must share with its past, by the name that its flag has."""
    if plan.hub is not None:  # the aggregator notes what changes of the rest
        fixed = {each.name for each in settings.settings_of(AggregatorConfig) if each.scope is Scope.FIXED}
        yield from ((name, value) for name, value in settings.to_table(plan.aggregator).items() if name in fixed)
        yield "standbys", plan.hub.standbys
        return
    for part in (plan.aggregator, plan.broker, plan.island, plan.up):
        for name, value in settings.to_table(part).items():
            if name not in MAY_CHANGE | _PLACES:
                yield name, value
    for name, value in plan.task.items():
        yield f"task.{name}", value


def _plain(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
