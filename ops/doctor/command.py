"""``atoll doctor``: checks this machine and the hub, and gives a cure for each problem.

Every probe has a limit of its own and runs in a thread that nobody waits for any longer; JAX starts in a process beside
the first ones. All of it takes about 20 s at most.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import zmq
from rich.text import Text

from broker.base import settings, sources
from broker.base.errors import ConfigError
from broker.base.settings import expanded
from broker.gateway.config import DEFAULT_REDIS_URL, BrokerConfig
from broker.process.limits import most_open_files
from broker.process.release import release
from broker.registry import redis_address
from broker.transport.keys import (
    ALLOW_LIST,
    BROKER_PUBLIC,
    ClientKeys,
    read_allow_list,
    read_public,
    read_secret,
)
from broker.wire.addresses import broker_addresses
from broker.wire.identity import KeyRole
from broker.wire.names import check_name
from ops.doctor import broker_probe, machine_probe, redis_probe
from ops.findings import broker_findings, machine_findings
from ops.findings.finding import Finding, Verdict, exit_status, failure, ok, summary, to_json, warning
from ops.terminal import Screen

#: Limits of the probes, in seconds; that of JAX counts from the beginning.
JAX_S, DISK_S, REDIS_S, BROKER_S, OTHERS_S = 12.0, 5.0, 4.0, 13.0, 3.0
#: With several brokers, all of them together.
BROKERS_S = 16.0

PROBES = ("python", "jax", "files", "disk", "redis", "broker")
_STYLES = {Verdict.OK: "green", Verdict.WARNING: "yellow", Verdict.FAILURE: "red"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags of ``atoll doctor``."""
    broker_help = "address of the broker, or of several (default: ATOLL_BROKER, else that of the file, else none)"
    parser.add_argument("--broker", metavar="ADDRESS", help=broker_help)
    key_help = "secret key file of a process of this machine (default: ATOLL_KEY, else that of the file, else none)"
    parser.add_argument("--key", metavar="FILE", type=sources.as_path, help=key_help)
    parser.add_argument("--run", metavar="TEXT", help="run that the broker should serve (default: any)")
    parser.add_argument(
        "--redis",
        metavar="URL",
        help=f"address of Redis (default: REDIS_URL, else that of the file, else {DEFAULT_REDIS_URL})",
    )
    parser.add_argument("--dir", metavar="DIR", type=sources.as_path, help="where a store would be (default: runs/)")
    parser.add_argument("--skip", metavar="PROBE", nargs="+", default=[], help=f"leave out some of {', '.join(PROBES)}")
    parser.add_argument("--json", action="store_true", help="one JSON object, on one line")
    sources.add_config_flag(parser)


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The addresses and files to check, from command line, environment and file."""

    brokers: tuple[str, ...]
    key: Path | None
    run: str
    redis_url: str
    redis_given: bool
    directory: Path
    skip: frozenset[str]


def run(args: argparse.Namespace) -> int:
    """Prints findings as they come; returns 1 if one is a failure, else 0.

    Raises:
        ConfigError: A flag, or the file, is wrong.
    """
    asked = resolve(args, os.environ)
    console = Screen(soft_wrap=True)
    began_s = time.monotonic()
    found: list[Finding] = []
    for what, findings in _examine(asked):
        if findings is None:
            _progress(what)
            continue
        _progress("")
        findings = [replace(each, cure=args.as_called(each.cure)) for each in findings]
        found += findings
        if not args.json:
            for each in findings:
                _print(each, console)
    took_s = time.monotonic() - began_s
    if args.json:
        print(json.dumps(to_json(found, took_s)), flush=True)
    else:
        console.print(Text(summary(found, took_s), "bold"))
    return exit_status(found)


def resolve(args: argparse.Namespace, environment: Mapping[str, str]) -> Asked:
    """Returns the addresses and files to check: flags win over the environment, and that over the file.

    Raises:
        ConfigError: One of them is wrong.
    """
    tables = sources.read_file(args.config) if args.config is not None else {}
    of_file = {
        name: value
        for table in ("run", "broker", "aggregator", "island")
        for name, value in tables.get(table, {}).items()
    }
    text = args.broker or environment.get("ATOLL_BROKER") or str(of_file.get("broker", ""))
    key = args.key or environment.get("ATOLL_KEY") or of_file.get("key")
    redis = args.redis or environment.get("REDIS_URL") or of_file.get("redis_url")
    run_id = args.run or str(of_file.get("run_id", ""))
    if run_id:
        check_name("run", run_id)
    if redis:
        redis_address.check(redis, field="redis")
    for each in args.skip:
        if each not in PROBES:
            raise ConfigError("skip", each, settings.nearest(each, PROBES))
    return Asked(
        brokers=broker_addresses(text) if text else (),
        key=expanded("key", Path(key)) if key else None,
        run=run_id,
        redis_url=redis or DEFAULT_REDIS_URL,
        redis_given=bool(redis),
        directory=args.dir or Path("runs"),
        skip=frozenset(args.skip),
    )


# --- probing ----------------------------------------------------------------------------------------------------------

_Found = list[Finding]


class _Probe:
    """One probe in a daemon thread."""

    def __init__(self, subject: str, look: Callable[[], _Found], within_s: float) -> None:
        self.subject = subject
        self._within_s, self._ends_s = within_s, time.monotonic() + within_s
        self._found: _Found = []
        self._thread = threading.Thread(target=self._look, args=(look,), name=subject, daemon=True)
        self._thread.start()

    def _look(self, look: Callable[[], _Found]) -> None:
        try:
            self._found = look()
        except Exception as err:  # noqa: BLE001 - a probe that fails is a finding, too
            cure = "report this, with the line: the doctor should have had a better answer"
            self._found = [failure(self.subject, f"the probe itself failed: {type(err).__name__}: {err}", cure)]

    def result(self) -> _Found:
        """Returns the probe's findings, or a failure if it does not end in time."""
        self._thread.join(max(0.0, self._ends_s - time.monotonic()))
        if self._thread.is_alive():
            cure = "see why it hangs: a full queue, a dead network drive; or leave it out with --skip"
            return [failure(self.subject, f"nothing was found within {self._within_s:g} s", cure)]
        return self._found


def _examine(asked: Asked) -> Iterator[tuple[str, _Found | None]]:
    """Yields (name, None) when a probe is waited for, then (name, its findings)."""
    later = None
    if "jax" not in asked.skip:
        # It waits a little less than the probe, so as to say by itself that its time is over.
        later = _Probe("JAX", lambda: [machine_probe.look_at_jax(JAX_S - 1)], JAX_S)
    looks: list[tuple[str, str, Callable[[], _Found], float]] = [
        ("python", "Python", lambda: [machine_probe.look_at_python()], OTHERS_S),
        (
            "files",
            "open files",
            lambda: [machine_findings.open_files(most_open_files(), BrokerConfig().max_peers)],
            OTHERS_S,
        ),
        ("disk", "disk", lambda: [machine_probe.look_at_disk(asked.directory)], DISK_S),
        (
            "redis",
            "Redis",
            lambda: redis_probe.look_at_redis(asked.redis_url, given=asked.redis_given, run=asked.run),
            REDIS_S,
        ),
    ]
    for name, subject, look, within_s in looks:
        if name not in asked.skip:
            yield subject, None
            yield subject, _Probe(subject, look, within_s).result()
    if later is not None:  # before the broker: it would disturb the measurements there
        yield "JAX", None
        yield "JAX", later.result()
    found, keys = look_at_keys(asked.key)
    yield "keys", found
    usable = asked.key is None or keys is not None
    if "broker" in asked.skip or not asked.brokers or not usable:
        return
    within_s = min(BROKER_S, BROKERS_S / len(asked.brokers))
    for address in asked.brokers:
        yield f"broker {address}", None

        def ask(address: str = address) -> _Found:
            seen = broker_probe.look_at(address, keys=keys, run=asked.run, context=zmq.Context.instance())
            return broker_findings.judge(seen, release())

        yield "broker", _Probe("broker", ask, within_s).result()


def look_at_keys(path: Path | None) -> tuple[list[Finding], ClientKeys | None]:
    """Returns the findings on a secret key file, and its key for clients if it is good.

    The key of a broker is no client's; the allow list beside it is looked at.
    """
    if path is None:
        return [], None
    try:
        own = read_secret(path)
    except ConfigError as err:
        return [failure("keys", f"{path} cannot be used", err.cure)], None
    if own.identity.role is KeyRole.BROKER:
        return [ok("keys", f"{path} is the key of the broker, with mode 600"), _allowed(path.parent)], None
    try:
        of_whom, public = read_public(path.parent / BROKER_PUBLIC, setting="keys")
    except ConfigError as err:
        return [failure("keys", f"there is no usable {BROKER_PUBLIC} beside {path}", err.cure)], None
    if of_whom.role is not KeyRole.BROKER:
        cure = "copy it anew from where the broker's keys were made"
        return [failure("keys", f"{path.parent / BROKER_PUBLIC} is the key of {of_whom}", cure)], None
    said = f"{path} is the key of {own.identity}, with mode 600, and {BROKER_PUBLIC} lies beside it"
    return [ok("keys", said)], ClientKeys(own=own, broker_public=public)


def _allowed(directory: Path) -> Finding:
    """Judges the allow list beside the key of a broker."""
    path = directory / ALLOW_LIST
    try:
        allowed = read_allow_list(path)
    except ConfigError as err:
        cure = f"{err.cure}; a running broker keeps the list that it read before"
        return failure("keys", f"{path} cannot be used", cure)
    if not allowed:
        cure = f"atoll keys new island NAME --dir {shlex.quote(str(directory))}"
        return warning("keys", f"{path} allows nobody", cure)
    return ok("keys", f"{path} allows {len(allowed)} keys")


# --- printing ---------------------------------------------------------------------------------------------------------


def _progress(what: str) -> None:
    """Shows on a terminal which probe is waited for, on a line that the next one overwrites."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{f'looking at {what} ..' if what else ''}", end="", file=sys.stderr, flush=True)


def _print(finding: Finding, console: Screen) -> None:
    line = Text(f"{finding.verdict:8}", _STYLES[finding.verdict])
    line.append(f" {finding.subject:12} {finding.seen}", "default")
    console.print(line)
    if finding.cure:
        console.print(Text(f"{'':22}{finding.cure}", "dim"))
