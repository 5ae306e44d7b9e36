"""The metrics of an island, as its client library knows it. Pure.

The hub has the same figures of every island by its heartbeats. An island's own endpoint is for whoever runs that island
alone, and tells whether the island is well while the hub cannot be asked.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from broker.metrics.family import Families, Family
from broker.wire.messages import Fate
from islands.protocol.core import Island
from islands.protocol.events import Vitals
from islands.protocol.fragment import Point


@dataclass(frozen=True, slots=True, kw_only=True)
class IslandSnapshot:
    """An island at one moment.

    Attributes:
        run_id: Of its run.
        island_id: Its own; empty while it has none.
        incarnation: Which life of its id this is.
        inner_step: Steps run, over all lives.
        tokens: Trained, likewise.
        loss: The newest that is known.
        step_time_s: Moving average.
        sync_share: Part of the training thread's time spent on synchronisation.
        bytes_up: Sent by this process.
        bytes_down: Received by it.
        heard_ago_s: Since anything came from the broker; None if nothing has.
        versions: Of each fragment in the local parameters.
        unresolved: Contributions whose fate is not known yet.
        fates: Fate -> contributions of this process that have met it.
        refused: Reason -> contributions refused for good.
        fleet_tokens: Trained by all islands, as last heard.
        done: The run needs no more steps.
        wall_s: Seconds since 1970.
    """

    run_id: str
    island_id: str
    incarnation: int
    inner_step: int
    tokens: int
    loss: float | None
    step_time_s: float | None
    sync_share: float
    bytes_up: int
    bytes_down: int
    heard_ago_s: float | None
    versions: Mapping[int, int]
    unresolved: int
    fates: Mapping[str, int]
    refused: Mapping[str, int]
    fleet_tokens: int
    done: bool
    wall_s: float


def snapshot_of(
    run_id: str,
    core: Island,
    vitals: Vitals,
    at: Point,
    heard_ago_s: float | None,
    notes: Mapping[tuple[str, str], int],
    *,
    wall_s: float,
) -> IslandSnapshot:
    """Returns what an island knows of itself.

    Args:
        run_id: Of its run.
        core: Its state machine.
        vitals: For the next heartbeat.
        at: Where training stands, of which the core hears later.
        heard_ago_s: Since anything came from the broker.
        notes: What the core had to say, by name and reason -> how often.
        wall_s: Seconds since 1970.
    """
    fragments = core.fragments
    return IslandSnapshot(
        run_id=run_id,
        island_id=core.island_id,
        incarnation=core.incarnation,
        inner_step=at.step,
        tokens=at.tokens,
        loss=vitals.loss,
        step_time_s=vitals.step_time_s,
        sync_share=vitals.sync_share,
        bytes_up=vitals.bytes_up,
        bytes_down=vitals.bytes_down,
        heard_ago_s=heard_ago_s,
        versions={p: fragment.version for p, fragment in fragments.items()},
        unresolved=sum(len(fragment.outstanding) for fragment in fragments.values()),
        fates={str(fate): core.fates.get(fate, 0) for fate in (Fate.MERGED, Fate.REFUSED)},
        refused={reason: times for (name, reason), times in notes.items() if name == "contribution.refused"},
        fleet_tokens=core.schedule.progress.trained_tokens,
        done=core.done,
        wall_s=wall_s,
    )


def families_of(now: IslandSnapshot) -> list[Family]:
    """Returns the metrics of an island."""
    own = Families("atoll_island", run=now.run_id, island=now.island_id)
    versions = {str(p): float(version) for p, version in now.versions.items()}
    heard = None if now.heard_ago_s is None else now.wall_s - now.heard_ago_s
    own.counter("steps", "Inner steps run, over all lives of the island.", now.inner_step)
    own.counter("tokens", "Tokens trained, over all lives of the island.", now.tokens)
    own.gauge("incarnation", "Which process of the island this is.", now.incarnation)
    own.gauge("loss", "Newest training loss.", now.loss)
    own.gauge("step_seconds", "Moving average of an inner step.", now.step_time_s)
    own.gauge("sync_ratio", "Part of the training thread's time that synchronisation takes.", now.sync_share)
    own.counter("sent_bytes", "Bytes sent by this process.", now.bytes_up)
    own.counter("received_bytes", "Bytes received by this process.", now.bytes_down)
    own.gauge("broker_heard_timestamp_seconds", "When anything came from the broker last.", heard)
    own.gauge("fragment_version", "Version of the fragment in the local parameters.", versions, "fragment")
    own.counter("contributions", "Contributions of this process that met their fate.", now.fates, "fate")
    own.counter("refused_contributions", "Contributions refused for good, by reason.", now.refused, "reason")
    own.gauge("unresolved_contributions", "Contributions whose fate is not known yet.", now.unresolved)
    own.gauge("fleet_tokens", "Tokens trained by all islands, as last heard.", now.fleet_tokens)
    own.gauge("done", "1 if the run needs no more steps, else 0.", float(now.done))
    return own.all
