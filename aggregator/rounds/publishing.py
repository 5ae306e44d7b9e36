"""Publishes versions to brokers, again where one is lacking (reference.md, section 4.7)."""

from __future__ import annotations

import math
from collections.abc import Mapping

from aggregator.interface.events import NotLetIn, Publish, Received, Send
from aggregator.rounds.brokers import BrokerVersions, Outage
from aggregator.state.run import Run
from broker.wire.messages import BROKER, Attach, AttachBulk, Attached, Codec, Phase, WantWhole

#: A leader says to the brokers that it leads so often.
ATTACH_INTERVAL_S = 1.0
#: A version that is on no broker after so long is on a slow link: they say every second what they have.
DELIVERED_S = 2.5


class Publishing:
    """Sends versions to the brokers, and keeps track of which of them each broker holds."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._broker_versions = BrokerVersions(run.now_s)
        self._attach_at_s = run.now_s  # when :meth:`attach` has something to say again
        run.deadlines.put("attach", self._attach_at_s)
        # A standby that asks a broker about the leader must not take a pause for silence.
        lease_s = run.config.lease_s
        self._attach_interval_s = min(ATTACH_INTERVAL_S, lease_s / 4) if run.config.failover else ATTACH_INTERVAL_S

    # --- who leads --------------------------------------------------------------------------------------------

    def attach(self) -> bool:
        """Tells every broker the leader and its versions, if that is due; returns True if it was."""
        run, c = self._run, self._run.config
        if run.now_s < self._attach_at_s:
            return False
        self._attach_at_s = run.now_s + self._attach_interval_s
        run.deadlines.put("attach", self._attach_at_s)
        ended = run.phase is Phase.ENDED
        attach = Attach(shard=c.shard, shards=c.shards, epoch=run.epoch, versions=run.versions, ended=ended)
        run.emit(Send(to=BROKER, message=attach))
        run.emit(Send(to=BROKER, message=AttachBulk(shard=c.shard, epoch=run.epoch, shards=c.shards)))
        return True

    def not_let_in(self, event: NotLetIn) -> None:
        """Notes that a broker refuses this aggregator: its shards are others than those that lead there."""
        sentence = f"broker {event.broker} does not let this aggregator in: {event.detail}"
        self._run.troubles.begin(f"broker {event.broker}", sentence, self._run.now_s)

    # --- versions ---------------------------------------------------------------------------------------------

    def publish(self, p: int, by: int | None = None, *, merged: bool = False) -> None:
        """Sends the newest durable version of a fragment to each broker, or again to the one at place ``by``.

        One that was ``merged`` a moment ago travels as the difference to the one before, where the recipe says so.
        """
        fragment = self._run.model.fragments[p]
        differs = merged and self._run.config.codec_of_versions is not Codec.F32
        if by is None:
            fragment.published_at_s = fragment.on_their_way[fragment.version] = self._run.now_s
        publish = Publish(
            fragment_id=p,
            fragment_version=fragment.version,
            digest=fragment.digest,
            contributions=fragment.contributions,
            by=by,
            base=fragment.version - 1 if differs else None,
        )
        self._run.emit(publish)

    def want_whole(self, event: Received) -> None:
        """Sends a broker a whole version: it has only differences, and an island lacks their base."""
        wanted = event.envelope.message
        assert isinstance(wanted, WantWhole)
        fragment = self._run.model.fragments.get(wanted.fragment_id)
        if fragment is not None and fragment.version >= 0 and self._run.phase is not Phase.SEEDING:
            self.publish(wanted.fragment_id, by=event.broker)

    def answered(self, attached: Attached, broker: int) -> Outage | None:
        """Records a broker's answer; returns the outage that it ends, None while the run is being seeded."""
        run = self._run
        run.fleet.answered_at_s = run.now_s
        outage = self._broker_versions.answered(broker, run.model.of_ours(attached.versions), run.now_s)
        return None if run.model.manifest is None or run.phase is Phase.SEEDING else outage

    def attached(self, attached: Attached, event: Received, outage: Outage | None) -> None:
        """Publishes again what a broker lacks: it came back empty, or a version was lost on the way."""
        run = self._run
        if run.model.manifest is None or run.phase is Phase.SEEDING:
            return
        held = dict(enumerate(attached.versions))
        self._delivered(held, anew=outage is not None and outage.alone)
        newest = {p: (fragment.version, fragment.published_at_s) for p, fragment in run.model.fragments.items()}
        size_bytes = 4 * sum(run.model.manifest.sizes[p] for p in newest)
        for p in self._broker_versions.lacking(event.broker, held, newest, run.now_s, size_bytes, event.carried):
            self.publish(p, by=event.broker)

    def _delivered(self, held: Mapping[int, int], *, anew: bool) -> None:
        """Notes the versions that have arrived at a broker, and those that are overdue.

        No round is opened on a version that is still on its way to every broker: whatever islands hand over meanwhile
        they have trained from an earlier one, each round would add to their staleness, and its version to the queue.
        But what has been overtaken by a later one is lost: the next round makes good for it. All have as long ``anew``
        where there was no broker for a while.
        """
        now_s, fragments = self._run.now_s, self._run.model.fragments
        sent_s = [at_s for p, f in fragments.items() for v, at_s in f.on_their_way.items() if v <= held.get(p, -1)]
        newest_s = max(sent_s, default=-math.inf)  # of those that have arrived
        for p, fragment in fragments.items():
            waits = {v: at_s for v, at_s in fragment.on_their_way.items() if v > held.get(p, -1) and at_s >= newest_s}
            fragment.on_their_way = left = dict.fromkeys(waits, now_s) if anew else waits
            fragment.undelivered = bool(left) and now_s - min(left.values()) > DELIVERED_S

    def lacking(self, within_s: float) -> list[int]:
        """Returns the brokers that answered ``within_s`` and lacked the newest version of a fragment then."""
        return self._broker_versions.short(self._run.now_s - within_s)
