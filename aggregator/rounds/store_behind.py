"""Holds publication while the store is older than what its peers hold. Pure.

What is heard is weighed in :mod:`aggregator.rounds.recovery`, which says why a store that is behind must keep silent,
and how it may go on again.
"""

from __future__ import annotations

from collections.abc import Sequence

from aggregator.events import Computed, Event, Fenced, MergeFailed, NewLineage, Persisted, PersistFailed, Received
from aggregator.rounds.recovery import CURE, CURE_EMPTY, CURE_SHARD, EPOCH_JUMP, LISTEN_S, Peers
from aggregator.state.run import Run
from broker.wire.messages import Attached, Heartbeat, Phase


class StoreBehind:
    """Compares what peers hold with what the store has."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._peers = Peers()
        self._since_s: float | None = None
        self._surely = False  # not by the word of islands alone
        self._missed: list[Event] = []  # completions that came meanwhile
        self._fenced_at: set[int] = set()  # brokers where a later epoch leads

    def __bool__(self) -> bool:
        """Whether peers hold newer versions than the store, so that nothing may be said."""
        return self._since_s is not None

    def compare(self, event: Received) -> None:
        """Compares what a peer holds with what the store has."""
        run, message = self._run, event.envelope.message
        match message:
            case Attached():
                run.troubles.end(f"broker {event.broker}", run.now_s)
                held = run.of_ours(message.versions)
                self._fall(self._peers.broker_holds(event.broker, held, run.versions), surely=True)
            case Heartbeat():
                member, sender = run.members.get(event.envelope.sender), event.envelope.sender
                if member is None and run.phase is not Phase.SEEDING:
                    return  # a stranger, who will be told to join
                if member is not None and run.holds_nothing(member):
                    return  # whatever it says: a lie is refused
                if member is None or member.incarnation == event.envelope.incarnation:
                    live = frozenset() if member is None else self._live()
                    if member is not None and sender not in live:
                        live |= {sender}
                    held = run.of_ours(message.versions)
                    sentence = self._peers.island_holds(sender, held, run.versions, live=live)
                    self._fall(sentence, surely=member is None)
            case _:
                pass

    def fenced(self, event: Fenced) -> None:
        """A later epoch leads at a broker: said once per broker."""
        run = self._run
        if not run.config.failover:  # else the lease says who leads
            self._fall(f"broker {event.broker} knows a later epoch ({event.detail})", surely=True)
        if event.broker not in self._fenced_at:
            self._fenced_at.add(event.broker)
            run.note("aggregator.fenced", epoch=run.epoch, broker=event.broker, detail=event.detail)

    def listen(self, event: Event) -> None:
        """Takes an event while the store is behind: nothing follows from it but what it says of peers."""
        match event:
            case Received(envelope=envelope):
                member = self._run.members.get(envelope.sender)
                if member is not None and member.incarnation == envelope.incarnation:
                    member.heard(self._run.now_s)
                self.compare(event)
            case Fenced():
                self.fenced(event)
            case Computed() | MergeFailed() | Persisted() | PersistFailed():
                self._missed.append(event)
            case _:
                pass

    def advance(self) -> Sequence[Event]:
        """Ends the wait if the store is not behind after all, or begins a new lineage if that was ordered.

        Returns:
            What was completed meanwhile, and is to be taken note of now; nothing while the wait goes on.
        """
        run = self._run
        if not self._surely and self._peers.outvoted(self._live()):
            return self._go_on()
        assert self._since_s is not None
        ordered = run.config.new_lineage and run.phase is not Phase.SEEDING
        if ordered and not run.finished and run.now_s >= self._since_s + LISTEN_S:
            jump = EPOCH_JUMP if self._fenced_at else 0
            above = {p: max(version, self._peers.versions.get(p, -1)) for p, version in enumerate(run.versions)}
            run.emit(NewLineage(above=above, epoch=run.epoch + 1 + jump))
            run.finish("a new lineage begins, as ordered")
        return ()

    def _live(self) -> frozenset[str]:
        return self._run.members.live_ids(self._run.now_s)

    def _fall(self, sentence: str, *, surely: bool) -> None:
        """The store is behind: from here on nothing is published, answered or merged."""
        if not sentence:
            return
        self._surely = self._surely or surely
        if self:
            return
        run = self._run
        self._since_s = run.now_s
        cure = CURE if run.config.shards == 1 else CURE_SHARD
        if run.phase is Phase.SEEDING:
            cure = CURE_EMPTY
        run.troubles.begin("behind", f"behind: {sentence}; {cure}", run.now_s)
        run.note("store.behind", detail=sentence, cure=cure)

    def _go_on(self) -> Sequence[Event]:
        run = self._run
        self._since_s = None
        self._peers.disbelieve()
        lasted_s = run.troubles.end("behind", run.now_s)
        run.note("store.not_behind", detail="most islands contradict", after_s=round(lasted_s or 0.0, 3))
        missed, self._missed = self._missed, []
        return missed
