"""Who is in a run, how far each island is, and which versions there are: read from Redis alone.

:func:`status_of` is pure: what stands in Redis and the time there make a :class:`Status`. No process of the run is
asked, so it answers during a run, after it, and while half of it is down; how old its knowledge is, it says itself.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import os
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from broker.config import DEFAULT_REDIS_URL
from broker.errors import ConfigError, Unavailable
from broker.liveness import Liveness, LivenessConfig, liveness
from broker.registry import Registry, Snapshot
from ops.archive import address_in, served
from ops.shards import one_total

#: Where lines are cut when the output is no terminal: a file has no width, and log viewers wrap by themselves.
PLAIN_WIDTH = 140

#: An aggregator renews its lease about twice a second; one that did not for so long has ended, hangs, or lost Redis.
LEADER_WITHIN_S = 10.0

_STYLES = {Liveness.ALIVE: "green", Liveness.SUSPECT: "yellow", Liveness.DEAD: "red", Liveness.LEFT: "dim"}


@dataclass(frozen=True, slots=True, kw_only=True)
class IslandStatus:
    """One island.

    Attributes:
        broker: The one it was last heard by.
        optimizer: What its inner optimizer started from: pending, checkpoint, donor or fresh; empty while not heard.
        refusals: Reason -> its messages that brokers and aggregator refused.
    """

    state: Liveness
    incarnation: int
    inner_step: int
    tokens: int
    loss: float | None
    step_time_s: float | None
    last_seen_s: float
    sync_share: float | None
    bytes_up: int
    bytes_down: int
    refusals: Mapping[str, int]
    broker: str = ""
    optimizer: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerStatus:
    """One broker: since when it has not written, and how many islands were last heard by it and still live."""

    age_s: float
    silent: bool
    islands: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FragmentStatus:
    """One fragment; ``contributors`` are the islands in its newest version."""

    version: int
    age_s: float
    contributors: tuple[str, ...]
    merged_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardStatus:
    """Who leads one shard of the fragments, by its lease.

    Attributes:
        leader: Name of the aggregator that holds the lease.
        age_s: Since it renewed the lease.
        in_sync: Who has every published version, the leader among them; they alone may take over.
        standbys: Who else the leader hears, in sync or not.
        ended: It has ended the run.
    """

    leader: str
    epoch: int
    age_s: float
    in_sync: tuple[str, ...]
    standbys: tuple[str, ...]
    ended: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """A run as Redis knows it.

    Attributes:
        broker_age_s: Since a broker last wrote; None if none ever did. Ages of islands are no younger than this.
        brokers: Name -> how it is.
        totals: What the aggregator counted, with ``islands`` (state -> how many), ``refusals`` (reason -> messages,
            whoever sent them) and ``broker_age_s``.
        shards: Shard -> who leads it, of those that anybody ever led.
    """

    run_id: str
    islands: Mapping[str, IslandStatus]
    fragments: Mapping[int, FragmentStatus]
    totals: Mapping[str, Any]
    broker_age_s: float | None
    broker_is_silent: bool
    brokers: Mapping[str, BrokerStatus] = field(default_factory=dict)
    shards: Mapping[int, ShardStatus] = field(default_factory=dict)


def status_of(snapshot: Snapshot, now_s: float) -> Status:
    """Says how a run stands at ``now_s``, by the clock of Redis, going by what is written there."""
    allowances = LivenessConfig()
    # Brokers of one run have one configuration; after a change the one that wrote last counts.
    newest = max(snapshot.brokers.values(), key=lambda each: each.get("written_at", 0.0), default={})
    suspect_s = newest.get("suspect_after_s", allowances.suspect_after_s)
    dead_s = newest.get("dead_after_s", allowances.dead_after_s)
    # Only the two limits matter here; the interval merely has to fit them.
    allowances = LivenessConfig(
        heartbeat_interval_s=min(suspect_s / 2, dead_s / 3), suspect_after_s=suspect_s, dead_after_s=dead_s
    )
    refusals = _refusals_by_sender(snapshot)
    islands = {
        island_id: _island(
            snapshot.members.get(island_id, {}),
            last_seen_s=max(0.0, now_s - heard_at_s),
            allowances=allowances,
            refusals=refusals.get(island_id, Counter()),
        )
        for island_id, heard_at_s in sorted(snapshot.heard_at_s.items())
    }
    fragments = {
        p: FragmentStatus(
            version=int(held["version"]),
            age_s=max(0.0, now_s - float(held["committed_at"])),
            contributors=tuple(held["contributors"]),
            merged_tokens=int(held["merged_tokens"]),
        )
        for p, held in sorted(snapshot.fragments.items())
    }
    ages_s = {name: max(0.0, now_s - each["written_at"]) for name, each in snapshot.brokers.items() if each}
    broker_age_s = min(ages_s.values(), default=None)
    live = (Liveness.ALIVE, Liveness.SUSPECT)
    speaking = Counter(each.broker for each in islands.values() if each.state in live)
    brokers = {
        name: BrokerStatus(age_s=age_s, silent=age_s >= dead_s, islands=speaking[name])
        for name, age_s in sorted(ages_s.items())
    }
    shards = {
        shard: ShardStatus(
            leader=lease.holder,
            epoch=lease.epoch,
            age_s=max(0.0, now_s - snapshot.now_s + lease.age_s),
            in_sync=tuple(sorted(lease.in_sync)),
            standbys=tuple(sorted(lease.standbys)),
            ended=lease.ended,
        )
        for shard, lease in sorted(snapshot.leases.items())
    }
    states = Counter(str(each.state) for each in islands.values())
    totals = {
        **(one_total(snapshot.totals) if snapshot.totals else {}),
        "islands": {str(state): states[str(state)] for state in Liveness},
        "refusals": dict(sorted(sum(refusals.values(), Counter[str]()).items())),
        "broker_age_s": broker_age_s,
    }
    return Status(
        run_id=snapshot.run_id,
        islands=islands,
        fragments=fragments,
        totals=totals,
        broker_age_s=broker_age_s,
        broker_is_silent=broker_age_s is None or broker_age_s >= dead_s,
        brokers=brokers,
        shards=shards,
    )


def leaderless(status: Status, within_s: float) -> str:
    """Says why a run has no leader that renewed its lease within so many seconds; empty if every shard has one."""
    if not status.shards:
        return f"run {status.run_id} has no leader: no aggregator has taken its lease"
    for shard, each in status.shards.items():
        if each.age_s > within_s:
            what = f"run {status.run_id}" if len(status.shards) == 1 else f"shard {shard} of run {status.run_id}"
            since = f"{age(each.age_s)} ago, the limit is {age(within_s)}"
            return f"{what} has no leader: aggregator {each.leader} renewed its lease {since}"
    return ""


def _refusals_by_sender(snapshot: Snapshot) -> dict[str, Counter[str]]:
    summed: dict[str, Counter[str]] = {}
    for by_sender in snapshot.refusals.values():
        for sender, reasons in by_sender.items():
            summed.setdefault(sender, Counter()).update(reasons)
    return summed


def _island(
    member: Mapping[str, Any], *, last_seen_s: float, allowances: LivenessConfig, refusals: Counter[str]
) -> IslandStatus:
    return IslandStatus(
        state=Liveness.LEFT if member.get("left") else liveness(last_seen_s, allowances),
        incarnation=int(member.get("incarnation", 0)),
        inner_step=int(member.get("inner_step", 0)),
        tokens=int(member.get("tokens", 0)),
        loss=member.get("loss"),
        step_time_s=member.get("step_time_s"),
        last_seen_s=last_seen_s,
        sync_share=member.get("sync_share"),
        bytes_up=int(member.get("bytes_up", 0)),
        bytes_down=int(member.get("bytes_down", 0)),
        optimizer=str(member.get("optimizer", "")),
        refusals=dict(sorted(refusals.items())),
        broker=str(member.get("broker", "")),
    )


# --- as JSON ------------------------------------------------------------------------------------------------------


def to_json(status: Status) -> dict[str, Any]:
    """Returns the tables of a status and its ``totals`` for ``json.dumps``; NaN and infinity become None."""
    islands = {name: asdict(each) for name, each in status.islands.items()}
    fragments = {str(p): asdict(each) for p, each in status.fragments.items()}
    brokers = {name: asdict(each) for name, each in status.brokers.items()}
    shards = {str(shard): asdict(each) for shard, each in status.shards.items()}
    tables = {"islands": islands, "fragments": fragments, "brokers": brokers, "shards": shards}
    return dict(_finite(tables | {"totals": dict(status.totals)}))


def _finite(value: Any) -> Any:
    match value:
        case float():
            return round(value, 6) if math.isfinite(value) else None
        case Mapping():
            return {str(key): _finite(each) for key, each in value.items()}
        case list() | tuple():
            return [_finite(each) for each in value]
        case _:
            return value


# --- as text ------------------------------------------------------------------------------------------------------


def render(status: Status) -> RenderableType:
    """Returns tables of islands and fragments between a headline and what deserves attention."""
    parts: list[RenderableType] = [Text(headline(status), style="bold")]
    if status.islands:
        parts += [Text(), _island_table(status)]
    if status.fragments:
        parts += [Text(), _fragment_table(status)]
    if status.shards:
        parts += [Text(), _shard_table(status)]
    if len(status.brokers) > 1:
        parts += [Text(), _broker_table(status)]
    for name, each in status.totals.get("quarantined", {}).items():
        what = f"{name} is quarantined for {age(each['for_s'])} more, after {each['reason']}"
        again = f", for the {ordinal(each['times'])} time in a row" if each["times"] > 1 else ""
        parts += [Text(), Text(f"{what}{again}: its contributions are refused, rounds do not wait for it.", "yellow")]
    for trouble in status.totals.get("troubles", ()):
        parts += [Text(), Text(f"The aggregator says, {trouble}", "yellow")]
    if status.broker_is_silent:
        since = "has never written" if status.broker_age_s is None else f"last wrote {age(status.broker_age_s)} ago"
        who = "The broker" if len(status.brokers) < 2 else "Every broker is silent: the last one"
        parts += [Text(), Text(f"{who} {since}: it has ended or lost Redis, and islands may live on.", "yellow")]
    return Group(*parts)


def headline(status: Status) -> str:
    """Returns the run in one line: islands, phase, tokens, loss."""
    totals = status.totals
    counts = ", ".join(f"{n} {state}" for state, n in totals["islands"].items() if n) or "no islands"
    words = [f"run {status.run_id}: {counts}"]
    if "phase" in totals:
        progress = f" {totals['progress']:.0%} of {totals['target_tokens']:,} tokens" if totals["target_tokens"] else ""
        wasted = sum(totals["wasted_tokens"].values())
        words += [
            f"{totals['phase']}{progress}",
            f"trained {totals['trained_tokens']:,} = merged {totals['merged_tokens']:,} + wasted {wasted:,}"
            f" + in flight {totals['in_flight_tokens']:,}",
        ]
        if totals["loss"] is not None:
            words.append(f"loss {totals['loss']:.4f}")
    if totals["refusals"]:
        words.append("refused " + _counts(totals["refusals"]))
    return "; ".join(words)


def _island_table(status: Status) -> Table:
    table = _table("island", "state", ">step", ">tokens", ">loss", ">step time", ">last seen", ">sync", ">up", ">down")
    table.add_column("optimizer")
    table.add_column("refused")
    for name, each in status.islands.items():
        table.add_row(
            name,
            Text(each.state, style=_STYLES[each.state]),
            f"{each.inner_step:,}",
            f"{each.tokens:,}",
            "-" if each.loss is None else f"{each.loss:.4f}",
            "-" if each.step_time_s is None else f"{each.step_time_s:.3f} s",
            age(each.last_seen_s),
            "-" if each.sync_share is None else f"{each.sync_share:.2%}",
            size(each.bytes_up),
            size(each.bytes_down),
            each.optimizer or "-",
            _counts(each.refusals),
        )
    return table


def _fragment_table(status: Status) -> Table:
    table = _table(">fragment", ">version", ">age", ">merged tokens", "contributors")
    for p, each in status.fragments.items():
        contributors = ", ".join(each.contributors)
        table.add_row(str(p), str(each.version), age(each.age_s), f"{each.merged_tokens:,}", contributors or "-")
    return table


def _shard_table(status: Status) -> Table:
    table = _table(">shard", "leader", ">epoch", ">renewed", "in sync", "standbys heard")
    for shard, each in status.shards.items():
        renewed = Text("the run has ended") if each.ended else Text(age(each.age_s))
        if not each.ended and each.age_s > LEADER_WITHIN_S:
            renewed.stylize("red")
        in_sync = ", ".join(each.in_sync) or "-"
        table.add_row(str(shard), each.leader, str(each.epoch), renewed, in_sync, ", ".join(each.standbys) or "-")
    return table


def _broker_table(status: Status) -> Table:
    table = _table("broker", "state", ">last wrote", ">islands")
    for name, each in status.brokers.items():
        state = Text("silent", style="red") if each.silent else Text("alive", style="green")
        table.add_row(name, state, age(each.age_s), str(each.islands))
    return table


def _table(*columns: str) -> Table:
    """An empty table; columns whose title begins with ``>`` are numbers."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for column in columns:
        table.add_column(column.removeprefix(">"), justify="right" if column.startswith(">") else "left", no_wrap=True)
    return table


def _counts(reasons: Mapping[str, int]) -> str:
    return ", ".join(f"{reason} {n:,}" for reason, n in reasons.items())


def age(seconds: float) -> str:
    """Returns a duration in the two largest units that matter."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, hours = divmod(int(seconds), 60)[0], int(seconds) // 3600
    if hours:
        return f"{hours} h {minutes % 60:02d} min"
    return f"{minutes} min {int(seconds) % 60:02d} s"


def ordinal(number: int) -> str:
    """Returns a number as in "the 3rd time"."""
    ending = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"


def size(nbytes: int) -> str:
    """Returns bytes with a decimal unit."""
    amount = float(nbytes)
    for unit in ("B", "kB", "MB", "GB"):
        if amount < 1000:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1000
    return f"{amount:.1f} TB"


# --- the command ----------------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags of ``atoll status``."""
    directory_help = "directory of a run that `up` started on this machine, live or finished (default: ask --redis)"
    parser.add_argument("run_dir", metavar="RUN_DIR", nargs="?", type=Path, help=directory_help)
    parser.add_argument("--run", metavar="TEXT", help="name of the run (default: the one that was written to last)")
    url_help = f"where Redis listens (default: REDIS_URL, else {DEFAULT_REDIS_URL})"
    parser.add_argument("--redis", metavar="URL", help=url_help)
    parser.add_argument("--json", action="store_true", help="one JSON object, on one line")
    watch_help = "again and again, until interrupted (default: every second)"
    parser.add_argument("--watch", metavar="SECONDS", type=float, nargs="?", const=1.0, help=watch_help)
    leader_help = (
        "a check for supervisors, in one line: status 1 unless an aggregator renewed its lease within so many seconds "
        f"(default: {LEADER_WITHIN_S:g})"
    )
    parser.add_argument("--leader", metavar="SECONDS", type=float, nargs="?", const=LEADER_WITHIN_S, help=leader_help)


def run(args: argparse.Namespace) -> int:
    """Prints the status of a run, or of its leader alone; returns 0, or 1 with a line on standard error.

    Raises:
        ConfigError: ``--redis`` is no address, ``--watch`` no interval, or ``--leader`` no limit or one among others.
    """
    if args.watch is not None and not args.watch > 0:
        raise ConfigError("watch", args.watch, "must be a number of seconds above 0")
    if args.leader is not None and not args.leader > 0:
        raise ConfigError("leader", args.leader, "must be a number of seconds above 0")
    if args.leader is not None and (args.json or args.watch is not None):
        raise ConfigError("leader", args.leader, "is a check of its own: leave out --json and --watch")
    console = Console(highlight=False, width=None if sys.stdout.isatty() else PLAIN_WIDTH)
    try:
        with _address(args) as url:
            if args.leader is not None:
                return _check_leader(asyncio.run(_fetch(url, args.run)), args.leader)
            if args.watch is None:
                _print(asyncio.run(_fetch(url, args.run)), console, as_json=args.json)
            else:
                with contextlib.suppress(KeyboardInterrupt):  # the way to end it
                    asyncio.run(_watch(url, args.run, args.watch, console, as_json=args.json))
    except Unavailable as err:
        print(f"atoll: {err}", file=sys.stderr)
        return 1
    return 0


@contextlib.contextmanager
def _address(args: argparse.Namespace) -> Iterator[str]:
    """Yields the Redis to ask: the one named; or a run directory's, while it lives and from its snapshot after."""
    if args.run_dir is None:
        yield args.redis or os.environ.get("REDIS_URL") or DEFAULT_REDIS_URL
        return
    kept = address_in(args.run_dir)
    args.run = kept.run_id
    if not kept.own:
        yield args.redis or kept.url
        return
    try:
        asyncio.run(_fetch(kept.url, kept.run_id))
    except Unavailable:
        print(f"atoll: the run's Redis has ended; this is what it left in {args.run_dir}", file=sys.stderr)
        with served(args.run_dir) as served_url:
            yield served_url
    else:
        yield kept.url


async def _fetch(url: str, run_id: str | None) -> Status:
    """Reads a run's status.

    Raises:
        Unavailable: Redis does not answer, or knows nothing of the run.
    """
    with_runs = Registry(url, run_id or "")
    async with contextlib.aclosing(with_runs):
        try:
            if run_id is not None:
                snapshot = await with_runs.read()
                if not snapshot.empty:
                    return status_of(snapshot, snapshot.now_s)
            runs = await with_runs.known_runs()
        except Unavailable as err:
            cure = "start it, or say where it is with --redis URL or REDIS_URL"
            raise Unavailable(f"{err}; {cure}", definite=err.definite) from err
    if run_id is None and runs:
        return await _fetch(url, runs[0])
    known = (
        f"it knows {', '.join(runs)}; choose one with --run" if runs else "nor of any other: start one with atoll up"
    )
    about = f"run {run_id}" if run_id is not None else "a run"
    raise Unavailable(f"Redis at {with_runs.address} knows nothing of {about}: {known}", definite=True)


async def _watch(url: str, run_id: str | None, interval_s: float, console: Console, *, as_json: bool) -> None:
    """Shows the status again and again, through outages of Redis; whoever watches wants to see it come back."""
    in_place = console.is_terminal and not as_json
    with Live(console=console, auto_refresh=False, screen=True) if in_place else contextlib.nullcontext() as live:
        complaint = ""
        while True:
            try:
                status = await _fetch(url, run_id)
            except Unavailable as err:
                if live is not None:
                    live.update(Text(str(err), "red"), refresh=True)
                elif str(err) != complaint:
                    print(f"atoll: {err}", file=sys.stderr, flush=True)
                complaint = str(err)
            else:
                complaint = ""
                if live is not None:
                    live.update(render(status), refresh=True)
                else:
                    _print(status, console, as_json=as_json)
            await asyncio.sleep(interval_s)


def _check_leader(status: Status, within_s: float) -> int:
    why = leaderless(status, within_s)
    if why:
        print(f"atoll: {why}", file=sys.stderr)
        return 1
    leaders = ", ".join(sorted({each.leader for each in status.shards.values()}))
    oldest_s = max(each.age_s for each in status.shards.values())
    print(f"run {status.run_id} is led by {leaders}, which renewed its lease {age(oldest_s)} ago")
    return 0


def _print(status: Status, console: Console, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(to_json(status), allow_nan=False), flush=True)
    else:
        console.print(render(status))
