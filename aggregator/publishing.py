"""Versions on their way to the brokers: each new one to all, and again to those that lack it (design, section 4.7)."""

from __future__ import annotations

from aggregator.events import Publish
from aggregator.rounds import Rounds
from aggregator.run import Run
from aggregator.shelves import Shelves
from broker.messages import Attached, Phase


class Publishing:
    """What is sent to the brokers, and what they say that they have."""

    def __init__(self, run: Run, rounds: Rounds) -> None:
        self._run = run
        self._rounds = rounds
        self._shelves = Shelves(run.now_s)

    def publish(self, p: int, by: int | None = None) -> None:
        """Sends the newest durable version of a fragment to each broker, or again to the one at place ``by``."""
        fragment = self._run.fragments[p]
        if by is None:
            fragment.published_at_s = self._run.now_s
        publish = Publish(
            fragment_id=p,
            fragment_version=fragment.version,
            digest=fragment.digest,
            contributions=fragment.contributions,
            by=by,
        )
        self._run.emit(publish)

    def attached(self, attached: Attached, broker: int) -> None:
        """Publishes again what a broker lacks: it came back empty, or a version was lost on the way."""
        run = self._run
        away_since_s = self._shelves.answered(broker, run.of_ours(attached.versions), run.now_s)
        if run.phase is Phase.SEEDING:
            return
        if away_since_s is not None:
            self._rounds.start_over(broker, away_since_s, alone=self._shelves.alone(broker, run.now_s))
        held = dict(enumerate(attached.versions))
        newest = {p: (fragment.version, fragment.published_at_s) for p, fragment in run.fragments.items()}
        size_bytes = 4 * sum(run.manifest.sizes[p] for p in newest) if run.manifest is not None else 0
        for p in self._shelves.lacking(broker, held, newest, run.now_s, size_bytes):
            self.publish(p, by=broker)

    def lacking(self, within_s: float) -> list[int]:
        """Returns the brokers that answered ``within_s`` and lacked the newest version of a fragment then."""
        return self._shelves.short(self._run.now_s - within_s)

    def lost(self, broker: int) -> None:
        """What is on its way to a broker will not arrive: its connection is made anew."""
        self._shelves.lost(broker, self._run.now_s)
