"""The metrics of an island, as its client library knows it. Pure.

The hub has the same figures of every island by its heartbeats. An island's own endpoint is for the people who run
that island alone, and tells whether the island is well while the hub cannot be asked.
"""

from __future__ import annotations

from collections.abc import Mapping

from broker.metrics.family import Families, Family
from broker.wire.messages import Fate
from islands.protocol.core import Island
from islands.protocol.events import Vitals
from islands.protocol.fragment import Point


def families_of(
    run_id: str,
    core: Island,
    vitals: Vitals,
    at: Point,
    notes: Mapping[tuple[str, str], int],
    *,
    heard_wall_s: float | None,
) -> list[Family]:
    """Returns the metrics of an island.

    Args:
        run_id: Of its run.
        core: Its state machine.
        vitals: For the next heartbeat.
        at: Where training stands, of which the core hears later.
        notes: What the core had to say, by name and reason -> how often.
        heard_wall_s: When anything came from the broker last, in seconds since 1970; None if nothing has.
    """
    own = Families("atoll_island", run=run_id, island=core.island_id)
    versions = {str(p): float(fragment.version) for p, fragment in core.fragments.items()}
    fates = {str(fate): core.fates.get(fate, 0) for fate in (Fate.MERGED, Fate.REFUSED)}
    refused = {reason: times for (name, reason), times in notes.items() if name == "contribution.refused"}
    corrupted = sum(times for (name, _), times in notes.items() if name == "island.corrupted")
    unresolved = sum(len(fragment.outstanding) for fragment in core.fragments.values())
    fleet_tokens = core.schedule.progress.trained_tokens
    own.counter("steps", "Inner steps run, over all lives of the island.", at.step)
    own.counter("tokens", "Tokens trained, over all lives of the island.", at.tokens)
    own.gauge("incarnation", "Which process of the island this is.", core.incarnation)
    own.gauge("loss", "Newest training loss.", vitals.loss)
    own.gauge("step_seconds", "Moving average of an inner step.", vitals.step_time_s)
    own.gauge("sync_ratio", "Part of the training thread's time that synchronisation takes.", vitals.sync_share)
    own.counter("sent_bytes", "Bytes sent by this process.", vitals.bytes_up)
    own.counter("received_bytes", "Bytes received by this process.", vitals.bytes_down)
    own.gauge("broker_heard_timestamp_seconds", "When anything came from the broker last.", heard_wall_s)
    own.gauge("fragment_version", "Version of the fragment in the local parameters.", versions, "fragment")
    own.counter("contributions", "Contributions of this process that met their fate.", fates, "fate")
    own.counter("refused_contributions", "Contributions refused for good, by reason.", refused, "reason")
    own.counter("corruptions", "Times that a fragment was corrupt in memory, and adopted anew.", corrupted)
    own.gauge("unresolved_contributions", "Contributions whose fate is not known yet.", unresolved)
    own.gauge("fleet_tokens", "Tokens trained by all islands, as last heard.", fleet_tokens)
    own.gauge("done", "1 if the run needs no more steps, else 0.", float(core.done))
    return own.all
