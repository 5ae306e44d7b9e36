"""Shows a status as JSON or as tables. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from broker.routing.liveness import Liveness
from broker.wire.messages import recipe_line
from broker.wire.records import LEADER_WITHIN_S
from ops.story.curve import sentence
from ops.story.directions import fleet_line, weight_line
from ops.story.run_status import IslandStatus, Status
from ops.terminal import Column, Fitted
from ops.text import age, finite, ordinal, size

_STYLES = {Liveness.ALIVE: "green", Liveness.SUSPECT: "yellow", Liveness.DEAD: "red", Liveness.LEFT: "dim"}


# --- as JSON ------------------------------------------------------------------------------------------------------


def to_json(status: Status) -> dict[str, Any]:
    """Returns the tables of a status and its ``totals`` for ``json.dumps``; NaN and infinity become None."""
    islands = {name: asdict(each) for name, each in status.islands.items()}
    fragments = {str(p): asdict(each) for p, each in status.fragments.items()}
    brokers = {name: asdict(each) for name, each in status.brokers.items()}
    shards = {str(shard): asdict(each) for shard, each in status.shards.items()}
    tables = {"islands": islands, "fragments": fragments, "brokers": brokers, "shards": shards}
    evaluation = None if status.evaluation is None else status.evaluation.to_json()
    return dict(finite(tables | {"totals": dict(status.totals), "evaluation": evaluation}, digits=6))


# --- as text ------------------------------------------------------------------------------------------------------


def render(status: Status) -> RenderableType:
    """Returns a headline, tables of islands and fragments, and what deserves attention."""
    parts: list[RenderableType] = [Text(headline(status), style="bold")]
    if status.totals.get("recipe"):
        parts += [Text(f"recipe: {recipe_line(status.totals['recipe'])}")]
    if status.totals.get("interval"):
        parts += [Text("H is {steps} for now: {because}.".format(**status.totals["interval"]), "yellow")]
    if status.totals.get("journey"):
        line = "A journey takes {steps:.0f} of {of} steps, which costs about {cost:.0%} of the loss of a small model."
        parts += [Text(line.format(**status.totals["journey"]))]
    if status.evaluation is not None:
        parts += [Text(sentence(status.evaluation))]
    if status.islands:
        parts += [Text(), island_table(status)]
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
    for name, each in status.totals.get("trust", {}).items():
        new = ", for now: it is new" if each["new"] else ""
        line = weight_line(each["agreement"], each["usual"], each["trust"])
        parts += [Text(), Text(f"{name} {line}{new}.", "yellow")]
    for trouble in status.totals.get("troubles", ()):
        parts += [Text(), Text(f"The aggregator says, {trouble}", "yellow")]
    for shard, each in status.shards.items():
        over = each.ended or status.totals.get("phase") == "ended"
        if not over and not status.stopped and each.age_s > LEADER_WITHIN_S:
            whose = "The aggregator" if len(status.shards) == 1 else f"The aggregator of shard {shard}"
            text = f"{whose} ({each.leader}) last renewed its lease {age(each.age_s)} ago: it has ended or lost Redis."
            parts += [Text(), Text(text, "yellow")]
    if status.stopped:
        parts += [
            Text(),
            Text("No process of this run is alive: up --resume goes on with it, or hub --run-dir.", "yellow"),
        ]
    elif status.broker_is_silent and status.totals.get("phase") != "ended":
        since = "has never written" if status.broker_age_s is None else f"last wrote {age(status.broker_age_s)} ago"
        who = "The broker" if len(status.brokers) < 2 else "Every broker is silent: the last one"
        parts += [Text(), Text(f"{who} {since}: it has ended or lost Redis, and islands may live on.", "yellow")]
    return Group(*parts)


def headline(status: Status) -> str:
    """Returns the run in one line: islands, phase, tokens, loss."""
    totals = status.totals
    counts = ", ".join(f"{n} {state}" for state, n in totals["islands"].items() if n) or "no islands"
    if status.stopped:
        counts = f"{len(status.islands)} islands"
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
        if fleet_line(totals):
            words.append(fleet_line(totals))
    if totals["refusals"]:
        words.append("refused " + _counts(totals["refusals"]))
    return "; ".join(words)


def island_table(status: Status) -> Fitted:
    """Returns a row for each island."""
    columns = (
        Column("island", number=False),
        Column("state", number=False),
        Column("step", rank=1),
        Column("tokens", rank=2),
        Column("loss", rank=3),
        Column("step time", rank=5),
        Column("last seen", rank=6),
        Column("sync", rank=7),
        Column("up", rank=8),
        Column("down", rank=9),
        Column("sends", number=False, wraps=True, rank=8),
        Column("optimizer", number=False, wraps=True, rank=10),
        Column("refused", number=False, wraps=True, rank=4),
    )
    return Fitted(
        columns,
        (
            (
                name,
                _state(each, status.stopped),
                f"{each.inner_step:,}",
                f"{each.tokens:,}",
                "-" if each.loss is None else f"{each.loss:.4f}",
                "-" if each.step_time_s is None else f"{each.step_time_s:.3f} s",
                age(each.last_seen_s),
                "-" if each.sync_share is None else f"{each.sync_share:.2%}",
                size(each.bytes_up),
                size(each.bytes_down),
                _sent(each.link),
                each.optimizer or "-",
                _counts(each.refusals),
            )
            for name, each in status.islands.items()
        ),
    )


def _state(island: IslandStatus, stopped: bool) -> Text:
    if island.revoked:
        return Text("revoked", "red")
    gone = stopped and island.state is not Liveness.LEFT
    return Text("stopped", "dim") if gone else Text(island.state, _STYLES[island.state])


def _sent(link: Mapping[str, Any] | None) -> str:
    """Returns an island's number format with the speed of its link: "int8 (1.2 MB/s or more, 81 ms)"."""
    if link is None:
        return "-"
    words = str(link["codec"])
    if link["share"] < 1:
        words += f" in 1 of {round(1 / link['share'])} rounds"
    known = [] if link["up"] is None else [f"{size(link['up'])}/s or more"]
    known += [] if link["round_trip_s"] is None else [f"{1000 * link['round_trip_s']:.0f} ms"]
    return f"{words} ({', '.join(known)})" if known else words


def _fragment_table(status: Status) -> Fitted:
    columns = (
        Column("fragment"),
        Column("version"),
        Column("age", rank=1),
        Column("merged tokens", rank=2),
        Column("contributors", number=False, wraps=True, rank=3),
    )
    return Fitted(
        columns,
        (
            (str(p), str(each.version), age(each.age_s), f"{each.merged_tokens:,}", ", ".join(each.contributors) or "-")
            for p, each in status.fragments.items()
        ),
    )


def _shard_table(status: Status) -> Fitted:
    columns = (
        Column("shard"),
        Column("leader", number=False),
        Column("epoch", rank=3),
        Column("renewed"),
        Column("in sync", number=False, wraps=True, rank=1),
        Column("standbys heard", number=False, wraps=True, rank=2),
    )
    rows = []
    for shard, each in status.shards.items():
        renewed = Text("the run has ended") if each.ended else Text(age(each.age_s))
        if not each.ended and each.age_s > LEADER_WITHIN_S:
            renewed.stylize("red")
        in_sync = ", ".join(each.in_sync) or "-"
        rows.append((str(shard), each.leader, str(each.epoch), renewed, in_sync, ", ".join(each.standbys) or "-"))
    return Fitted(columns, rows)


def _broker_table(status: Status) -> Fitted:
    columns = Column("broker", number=False), Column("state", number=False), Column("last wrote"), Column("islands")
    rows = []
    for name, each in status.brokers.items():
        state = Text("silent", style="red") if each.silent else Text("alive", style="green")
        rows.append((name, state, age(each.age_s), str(each.islands)))
    return Fitted(columns, rows)


def _counts(reasons: Mapping[str, int]) -> str:
    return ", ".join(f"{reason} {n:,}" for reason, n in reasons.items())
