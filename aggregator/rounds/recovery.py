"""Detects a store that is older than what its peers hold, and begins a new lineage on request. Pure.

Brokers and islands hold versions. A store that has less, because it was lost, emptied or restored from an old copy,
must not go on as if nothing had happened: it would make other bytes under taken names (reference.md, section 8.2).
So the aggregator compares what it hears with what it has. If it is *behind* it publishes and answers nothing, says so,
and waits; islands train on and keep their bytes. Then there are three ways out:

* restore the store from a copy that is not behind, such as that of a standby that was in sync;
* order a *new lineage* (``--new-lineage``): go on from what this store has, under versions above all that were seen.
  What was merged since is lost, and stands in the books as ``store_lost``;
* begin another run.

What islands say may be a lie, told while most of the others were cut off. So a store that is behind by the word of
islands alone goes on as soon as more than half of those that are heard contradict. By a broker's word it is behind for
good; so is an empty store by anybody's, since it has nothing that it could go on with.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from aggregator.interface.events import (
    Commit,
    Computed,
    Event,
    Fenced,
    MergeFailed,
    NewLineage,
    Persisted,
    PersistFailed,
    Received,
)
from aggregator.interface.leader_notes import AggregatorFenced, StoreFallenBehind, StoreNotBehind
from aggregator.state.records import Carried
from aggregator.state.run import Run
from broker.wire.messages import Attached, Heartbeat, Phase, Reason

#: How long a new lineage listens to every peer before it chooses its versions, in seconds.
LISTEN_S = 2.0
#: What a new lineage adds to its epoch where a broker refuses it: how much higher that one's is, it does not say.
EPOCH_JUMP = 1000
#: No run has had so many versions: whoever holds one beyond lies, and a new lineage must find room above.
MOST_VERSION = 2**48

CURE = (
    "nothing is published: restore the store from a copy, such as a standby's; or go on from what it has and lose "
    "the rest, with --new-lineage; or begin another run, with another --run"
)
CURE_SHARD = (
    "nothing of this shard is published: restore its store from a copy, such as a standby's; or begin another run"
)
CURE_EMPTY = (
    "nothing is published: this store holds no model to go on from; restore it from a copy, or begin another run, with "
    "another --run"
)


class Peers:
    """The versions that peers hold, as far as they have said so.

    Attributes:
        versions: Fragment -> highest version that a believed peer holds.
    """

    def __init__(self) -> None:
        self.versions: dict[int, int] = {}
        self._of_brokers: dict[int, int] = {}  # likewise, by the word of brokers alone
        self._claims: dict[str, dict[int, int]] = {}
        self._believed = False  # what islands claim

    def broker_holds(self, broker: int, versions: Sequence[int], own: Sequence[int]) -> str:
        """Takes in a broker's versions and believes them; says which are ahead of ours, empty if none."""
        ahead = _ahead(versions, own)
        _raise(self._of_brokers, ahead)
        _raise(self.versions, ahead)
        return _sentence(f"broker {broker}", ahead, own)

    def island_holds(
        self, island_id: str, versions: Sequence[int], own: Sequence[int], *, live: Collection[str]
    ) -> str:
        """Takes the versions that an island claims to hold.

        One island may lie, and must not stop a run by it: islands are believed when more than half of those that live
        claim to be ahead. A store that knows no island believes the first. What the dead have claimed does not count.

        Args:
            island_id: The island that claims it.
            versions: By fragment.
            own: Likewise.
            live: Ids of the islands that live, and are known to this store.
        """
        ahead = {} if versions == own else _ahead(versions, own)
        if not ahead:
            self._claims.pop(island_id, None)
            return ""
        self._claims[island_id] = ahead
        counted = {each: claim for each, claim in self._claims.items() if each in live or each == island_id}
        if 2 * len(counted) <= len(live):
            return ""
        if not self._believed:  # later on, the dead are witnesses too
            self._believed, self._claims = True, counted
        for claim in self._claims.values():
            _raise(self.versions, claim)
        return _sentence(f"island {island_id}", ahead, own)

    def outvoted(self, live: Collection[str]) -> bool:
        """Returns True if most live islands contradict those that claimed to be ahead, alive or dead by now.

        A tie decides nothing: it takes more than half to be believed, and more than half to be refuted.
        """
        return 2 * len(self._claims) < len(live)

    def disbelieve(self) -> None:
        """Forgets what islands have claimed: it was refuted."""
        self._believed, self._claims = False, {}
        self.versions = dict(self._of_brokers)


def renumbered(commit: Commit, above: int, epoch: int, books: Mapping[str, Any] | None = None) -> Commit:
    """Returns a new lineage's first commit: the old parameters under a version above all seen.

    Its books are those of the old commit, and from here on gaps in them are lost with the store; unless others are
    given, of a run that has all of its books.
    """
    if books is None:
        books = {**commit.ledger, "gaps": str(Reason.STORE_LOST)} if commit.ledger else {}
    return dataclasses.replace(
        commit,
        fragment_version=above + 1,
        epoch=epoch,
        contributions=(),
        ledger=books,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Lineage:
    """A restart of a fragment's history: an earlier version goes on under a new number.

    Attributes:
        version: The first one of the new lineage.
        kept: The one that it is, byte for byte; those in between were given up. -1: its line was dropped.
    """

    fragment_id: int
    version: int
    kept: int

    @property
    def given_up(self) -> range:
        """Numbers of the versions given up; of some, nothing may be known any more."""
        return range(self.kept + 1, self.version)

    @property
    def original(self) -> str:
        """Returns the version that goes on, in words."""
        return f"version {self.kept}" if self.kept >= 0 else "a version whose line was dropped"


def lineages(rows: Iterable[Mapping[str, Any]], dropped: Mapping[int, Carried] | None = None) -> list[Lineage]:
    """Returns new lineages in ledger lines, which come at most once per version, versions growing.

    A line is the first of a lineage if nobody contributed to it and it names the bytes of an earlier version. One that
    has neither contributions nor such bytes is a fault, and for others to find.

    Args:
        rows: The lines.
        dropped: Fragment -> the newest version whose line was dropped; those before it are unknown.
    """
    dropped = dropped or {}
    found: list[Lineage] = []
    known = {(p, each.digest): each.version for p, each in dropped.items()}
    for row in rows:
        p, version, digest = row["fragment_id"], row["fragment_version"], row["digest"]
        kept = known.get((p, digest), -1 if p in dropped else None)
        if version > 0 and not row["contributions"] and kept is not None and kept < version:
            found.append(Lineage(fragment_id=p, version=version, kept=kept))
        known[p, digest] = version
    return found


def _ahead(versions: Sequence[int], own: Sequence[int]) -> dict[int, int]:
    return {
        p: version for p, version in enumerate(versions) if (own[p] if p < len(own) else -1) < version <= MOST_VERSION
    }


def _raise(known: dict[int, int], ahead: Mapping[int, int]) -> None:
    for p, version in ahead.items():
        known[p] = max(version, known.get(p, -1))


def _sentence(who: str, ahead: Mapping[int, int], own: Sequence[int]) -> str:
    if not ahead:
        return ""
    p, version = max(ahead.items(), key=lambda item: item[1] - (own[item[0]] if item[0] < len(own) else -1))
    have = own[p] if p < len(own) and own[p] >= 0 else "none"
    return f"{who} holds version {version} of fragment {p}, this store {have}"


class StoreBehind:
    """Compares what peers hold with what the store has."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._peers = Peers()
        self.active = False  #: peers hold newer versions than the store, so that nothing may be said
        self._since_s = 0.0
        self._surely = False  # not by the word of islands alone
        self._missed: list[Event] = []  # completions that came meanwhile
        self._fenced_at: set[int] = set()  # brokers where a later epoch leads

    def compare(self, event: Received) -> None:
        """Compares what a peer holds with what the store has."""
        run, message = self._run, event.envelope.message
        match message:
            case Attached():
                run.troubles.end(f"broker {event.broker}", run.now_s)
                held = run.model.of_ours(message.versions)
                self._fall(self._peers.broker_holds(event.broker, held, run.versions), surely=True)
            case Heartbeat():
                member, sender = run.fleet.members.get(event.envelope.sender), event.envelope.sender
                if member is None and run.phase is not Phase.SEEDING:
                    return  # a stranger, who will be told to join
                if member is not None and run.holds_nothing(member):
                    return  # whatever it says: a lie is refused
                if member is None or member.incarnation == event.envelope.incarnation:
                    held, own = run.model.of_ours(message.versions), run.versions
                    # As with most messages: nobody else's claim is looked at.
                    live = frozenset() if member is None or held == own else self._live() | {sender}
                    sentence = self._peers.island_holds(sender, held, own, live=live)
                    self._fall(sentence, surely=member is None)
            case _:
                pass

    def fenced(self, event: Fenced) -> None:
        """Notes that a later epoch leads at a broker; once for each broker."""
        run = self._run
        if not run.config.failover:  # else the lease says who leads
            self._fall(f"broker {event.broker} knows a later epoch ({event.detail})", surely=True)
        if event.broker not in self._fenced_at:
            self._fenced_at.add(event.broker)
            run.note(AggregatorFenced(epoch=run.epoch, broker=event.broker, detail=event.detail))

    def listen(self, event: Event) -> None:
        """Learns from an event what peers hold, while the store is behind; nothing else follows."""
        match event:
            case Received(envelope=envelope):
                member = self._run.fleet.members.get(envelope.sender)
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
        ordered = run.config.new_lineage and run.phase is not Phase.SEEDING
        if ordered and not run.finished and run.now_s >= self._since_s + LISTEN_S:
            jump = EPOCH_JUMP if self._fenced_at else 0
            above = {p: max(version, self._peers.versions.get(p, -1)) for p, version in enumerate(run.versions)}
            run.emit(NewLineage(above=above, epoch=run.epoch + 1 + jump))
            run.finish("a new lineage begins, as ordered")
        return ()

    def _live(self) -> frozenset[str]:
        return self._run.fleet.members.live_ids(self._run.now_s)

    def _fall(self, sentence: str, *, surely: bool) -> None:
        """Stops the run as the store is behind: nothing is published, answered or merged from here on."""
        if not sentence:
            return
        self._surely = self._surely or surely
        if self.active:
            return
        run = self._run
        self.active, self._since_s = True, run.now_s
        cure = CURE if run.config.shards == 1 else CURE_SHARD
        if run.phase is Phase.SEEDING:
            cure = CURE_EMPTY
        run.troubles.begin("behind", f"behind: {sentence}; {cure}", run.now_s)
        run.note(StoreFallenBehind(detail=sentence, cure=cure))

    def _go_on(self) -> Sequence[Event]:
        run = self._run
        self.active = False
        self._peers.disbelieve()
        lasted_s = run.troubles.end("behind", run.now_s)
        run.note(StoreNotBehind(detail="most islands contradict", after_s=round(lasted_s or 0.0, 3)))
        missed, self._missed = self._missed, []
        return missed
