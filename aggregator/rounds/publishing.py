"""Publishes versions to the brokers, and again to those that lack one (design, section 4.7)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from aggregator.events import Publish
from aggregator.rounds.brokers import BrokerVersions
from aggregator.state.run import Run
from broker.routing.deafness import Carried
from broker.wire.messages import Attached

#: A version that is on no broker after so long is on a slow link: they say every second what they have.
DELIVERED_S = 2.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Outage:
    """The absence of a broker, now over.

    Attributes:
        broker: Its place.
        since_s: When it was heard last.
        alone: There was no other one meanwhile.
    """

    broker: int
    since_s: float
    alone: bool


class Publishing:
    """What is sent to the brokers, and what they say that they have."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._shelves = BrokerVersions(run.now_s)

    def publish(self, p: int, by: int | None = None) -> None:
        """Sends the newest durable version of a fragment to each broker, or again to the one at place ``by``."""
        fragment = self._run.fragments[p]
        if by is None:
            fragment.published_at_s = fragment.on_their_way[fragment.version] = self._run.now_s
        publish = Publish(
            fragment_id=p,
            fragment_version=fragment.version,
            digest=fragment.digest,
            contributions=fragment.contributions,
            by=by,
        )
        self._run.emit(publish)

    def answered(self, attached: Attached, broker: int) -> Outage | None:
        """Takes note that a broker is there; returns the outage that this ends, if there was one."""
        run = self._run
        away_since_s = self._shelves.answered(broker, run.of_ours(attached.versions), run.now_s)
        if away_since_s is None:
            return None
        return Outage(broker=broker, since_s=away_since_s, alone=self._shelves.alone(broker, run.now_s))

    def attached(self, attached: Attached, broker: int, carried: Carried | None, outage: Outage | None = None) -> None:
        """Publishes again what a broker lacks: it came back empty, or a version was lost on the way.

        Args:
            attached: What it has said.
            broker: Its place.
            carried: By the bulk connection to it, if known.
            outage: What this ends.
        """
        run = self._run
        held = dict(enumerate(attached.versions))
        self._delivered(held, anew=outage is not None and outage.alone)
        newest = {p: (fragment.version, fragment.published_at_s) for p, fragment in run.fragments.items()}
        size_bytes = 4 * sum(run.manifest.sizes[p] for p in newest) if run.manifest is not None else 0
        for p in self._shelves.lacking(broker, held, newest, run.now_s, size_bytes, carried):
            self.publish(p, by=broker)

    def _delivered(self, held: Mapping[int, int], *, anew: bool) -> None:
        """Takes note of what has arrived at a broker, and of what should have by now.

        No round is opened on a version that is still on its way to every broker: whatever islands hand over meanwhile
        they have trained from an earlier one, each round would add to their staleness, and its version to the queue.
        But what has been overtaken by a later one is lost: the next round makes good for it. All have as long ``anew``
        where there was no broker for a while.
        """
        now_s, fragments = self._run.now_s, self._run.fragments
        sent_s = [at_s for p, f in fragments.items() for v, at_s in f.on_their_way.items() if v <= held.get(p, -1)]
        newest_s = max(sent_s, default=-math.inf)  # of those that have arrived
        for p, fragment in fragments.items():
            waits = {v: at_s for v, at_s in fragment.on_their_way.items() if v > held.get(p, -1) and at_s >= newest_s}
            fragment.on_their_way = left = dict.fromkeys(waits, now_s) if anew else waits
            fragment.undelivered = bool(left) and now_s - min(left.values()) > DELIVERED_S

    def lacking(self, within_s: float) -> list[int]:
        """Returns the brokers that answered ``within_s`` and lacked the newest version of a fragment then."""
        return self._shelves.short(self._run.now_s - within_s)

    def renewed(self, broker: int) -> None:
        """The connection to a broker is made anew: what is on its way will not arrive."""
        self._shelves.renewed(broker, self._run.now_s)
