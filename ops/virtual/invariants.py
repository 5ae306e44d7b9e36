"""The invariants of a simulated run (reference.md, section 10): an observer of every process.

What is asked of files too is in :mod:`ops.faults.invariants`; the rest can only be seen while a run goes on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import ge
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol

from aggregator.interface.events import Commit, Publish
from aggregator.rounds.core import Aggregator
from broker.wire.fragments import shard_of
from broker.wire.messages import OWN_PASS, Block, DataRange, Phase
from islands.protocol.data_shares import TrainedBatch
from islands.protocol.events import Fail
from islands.protocol.fragment import Stage
from ops.faults.invariants import Contents, Epochs, MergedRanges, balanced, durable_before, grows, weights_fit
from ops.faults.kinds import FaultKind
from ops.virtual.dealing import Dealing

if TYPE_CHECKING:
    from aggregator.state.run import Run as RunState
    from ops.virtual.island import Island
    from ops.virtual.plan import SimulationPlan
    from ops.virtual.station import Station


class Run(Protocol):
    """All of a simulated run that the observer looks at."""

    plan: SimulationPlan
    stations: list[Station]
    leaders: dict[int, Station]
    islands: dict[str, Island]
    trace: list[tuple[float, str, str, str]]


#: Faults after which Redis knows less than it did.
FORGETFUL = (FaultKind.WIPE, FaultKind.STALE)


class InvariantViolation(AssertionError):
    """An invariant (reference.md, section 10) does not hold; the message names it."""


def hold(invariant: int, wrong: str) -> None:
    """Raises :class:`InvariantViolation` if a predicate found something wrong."""
    if wrong:
        raise InvariantViolation(f"invariant {invariant}: {wrong}")


def require(holds: bool, invariant: int, message: str) -> None:
    """Raises :class:`InvariantViolation` unless ``holds``."""
    hold(invariant, "" if holds else message)


@dataclass(slots=True)
class _End:
    """The end of the run, as one shard has it."""

    epoch: int = 0  #: under which it came; 0: it has not
    booked: dict[tuple[str, int], int] = field(default_factory=dict)  #: by life: tokens reported by then
    live: frozenset[str] = frozenset()  #: islands that it waited for


class Invariants:
    """The observer of one simulated run.

    Args:
        rogues: Islands that misbehave: what they claim of themselves is not checked.
        sizes: Of the batches of those islands that say they have larger ones, in batches of the others.
        watching: Whether the books and the islands are looked at after every event, which costs more than the event.
    """

    def __init__(
        self,
        *,
        rogues: frozenset[str] = frozenset(),
        sizes: Mapping[str, int] = MappingProxyType({}),
        watching: bool = True,
    ) -> None:
        self._rogues, self._sizes = rogues, sizes
        self._watching = watching
        self._durable: dict[tuple[int, int], Commit] = {}
        self._contents = Contents()  # of what was published
        self._published = self._contents.digests
        self._newest: dict[int, int] = {}
        self._epochs: dict[int, int] = {}  # shard -> the highest epoch that published
        self._speakers = Epochs()
        self._merged = MergedRanges()  # of steps, by life and fragment
        self.merged_tokens: Counter[int] = Counter()
        self._merged_data = MergedRanges()  # of batches, by fragment
        self.dealing = Dealing()
        self._versions_seen: dict[str, tuple[int, ...]] = {}
        self._trained_tokens: dict[tuple[str, int], int] = {}
        self._ends: dict[int, _End] = {}  # by shard

    def trained(self, taken: TrainedBatch) -> None:
        """An island has trained a batch: the next one of its block, or one trained before by somebody."""
        hold(2, self.dealing.trained(taken))

    def commits(self, fragment_id: int) -> list[Commit]:
        """Returns every version of a fragment that was durable anywhere."""
        return [commit for (p, _), commit in self._durable.items() if p == fragment_id]

    def told(self, island_id: str, blocks: Sequence[Block]) -> None:
        """An island knows these blocks as its own."""
        hold(2, self.dealing.told(island_id, blocks))

    # --- told by the drivers ----------------------------------------------------------------------------------

    def persisted(self, commit: Commit) -> None:
        """A commit is durable."""
        key = commit.fragment_id, commit.fragment_version
        known = self._durable.get(key)
        if known is not None and known.digest == commit.digest:
            return  # the same bytes, on the disk of whoever leads now
        if known is not None and commit.fragment_version > 0:
            # Written twice only by a successor that never saw the first: which then must not have been published.
            require(key not in self._published, 1, f"{key} committed twice")
            self._forget(known)
        self._durable[key] = commit
        p = commit.fragment_id
        for merged in commit.contributions:
            life, steps = (merged.island_id, merged.incarnation, p), merged.steps
            hold(2, self._merged.merge(life, steps.from_step, steps.to_step))
            require(bool(merged.data), 2, f"{merged.island_id} does not say what it trained on in {steps}")
            for d in merged.data:
                hold(2, self._merged_data.merge(*self._place(p, d)))
                hold(2, self.dealing.merged(d))
            self.merged_tokens[p] += steps.tokens
        hold(2, weights_fit(key, [merged.merge_weight for merged in commit.contributions]))

    def publishing(self, publish: Publish, epoch: int, shard: int) -> None:
        """A version is about to be sent."""
        key = publish.fragment_id, publish.fragment_version
        require(key in self._durable, 3, f"{key} is published before it is durable")
        require(self._durable[key].digest == publish.digest, 1, f"{key} is published with other bytes than stored")
        again, before = key in self._published, self._epochs.get(shard, 0)
        hold(1, self._contents.name(key, publish.digest))
        if again and epoch < before:
            return  # by a leader that does not know yet that it is none any more: brokers refuse it
        p, version = key
        hold(1, grows(f"the published version of fragment {p}", self._newest.get(p, -1), version, or_stays=True))
        hold(5, grows("the epoch that publishes", before, epoch, or_stays=True))
        self._newest[p], self._epochs[shard] = version, epoch

    def replicated(self, simulation: Run, leader: Station, publish: Publish) -> None:
        """Checks that every standby that may take over has a version that is about to be sent."""
        if not simulation.plan.standbys:
            return
        lease = leader.lease()
        if (lease.holder, lease.epoch) != (leader.name, leader.core.run.epoch):
            return
        if any(fault.kind in FORGETFUL for fault in simulation.plan.faults):
            return
        key = publish.fragment_id, publish.fragment_version
        for station in simulation.stations:
            if station.name in lease.in_sync:
                have = _newest_of(station.commits(), publish.fragment_id)
                hold(3, durable_before(key, have, f"published, {station.name} is in sync"))

    def speaking(self, address: str, shard: int, epoch: int) -> None:
        """A life of an aggregator is about to say something: nobody else ever did under its epoch."""
        hold(5, self._speakers.speak(shard, epoch, address))

    def power_lost(self) -> None:
        """Nobody knows any more of an epoch that was given, and under which nothing was published."""
        for shard, epoch in list(self._speakers.lives):
            if epoch > self._epochs.get(shard, 0):
                del self._speakers.lives[shard, epoch]

    def leading(self, station: Station) -> None:
        """An aggregator takes over: under an epoch of its own, and with everything that was ever published."""
        shard, shards, epoch = station.config.shard, station.config.shards, station.core.run.epoch
        spoken = max((each for of, each in self._speakers.lives if of == shard), default=0)
        hold(5, grows(f"the epoch that {station.name} leads under", spoken, epoch))
        commits = station.commits()
        for p, newest in self._newest.items():
            if shard_of(p, shards) != shard:
                continue
            hold(3, durable_before((p, newest), _newest_of(commits, p), f"published, {station.name} leads"))
            version, digest = commits[p].fragment_version, commits[p].digest
            if (p, version) in self._published:
                hold(1, self._contents.name((p, version), digest))

    def after_aggregator_event(self, aggregator: Station) -> None:
        """The ledger must balance after every event."""
        self._take_note_of_end(aggregator.core.run)
        if not self._watching:
            return
        run = aggregator.core.run
        if not run.config.shard:
            hold(2, self.dealing.dealt(aggregator.address, run.books.data))
        ledger = run.books.ledger
        ledger.check()
        books = ledger.books()
        hold(4, balanced(books.trained, books.merged, books.wasted.values(), books.in_flight))
        waiting = aggregator.core.run.model.waiting_bytes()
        if waiting > aggregator.core.run.model.held_bytes:
            require(False, 9, f"{waiting} bytes wait")

    def _take_note_of_end(self, run: RunState) -> None:
        """Remembers what was booked when the run ended: what an island reports later is nobody's."""
        end = self._ends.setdefault(run.config.shard, _End())
        if run.phase is not Phase.ENDED:
            if run.epoch >= end.epoch:
                end.epoch, end.booked = 0, {}  # it goes on, in a life that has not heard of the end
        elif not end.epoch:
            end.epoch = run.epoch
            lives = ((name, i, life) for name, each in run.books.ledger.lives().items() for i, life in each.items())
            end.booked = {(name, i): life.trained_tokens for name, i, life in lives}
            end.live = frozenset(member.island_id for member in run.fleet.members.live(run.now_s))

    def after_island_event(self, island: Island) -> None:
        """Versions in an island's parameters only grow; its ranges never overlap."""
        if not self._watching:
            return
        core = island.core
        if core.joined:
            self._trained_tokens[(core.island_id, core.incarnation)] = island.tokens
        # Messages cost more than the checks.
        versions = tuple([f.version for f in core.fragments.values()])
        before = self._versions_seen.get(island.address)
        if before is not None and before != versions and not all(map(ge, versions, before)):
            require(False, 1, f"{island.address} went back: {before} {versions}")
        self._versions_seen[island.address] = versions
        step = core.at.step if core.joined else 0
        for p, fragment in core.fragments.items():
            if fragment.handed.step > step:
                require(False, 2, f"{island.address} handed over steps it has not run")
            if fragment.counted > step:
                require(False, 2, f"{island.address} fragment {p} counts steps it has not run")

    def island_killed(self, island: Island) -> None:
        """An island's process is gone."""
        self._versions_seen.pop(island.address, None)

    def island_failed(self, simulation: Run, island: Island, fail: Fail) -> None:
        """An island gave up: only a replaced process may, or one whose place a dead one's message took."""
        core = island.core
        newer = simulation.islands[island.plan.island_id] is not island
        member = simulation.leaders[0].core.run.fleet.members.get(core.island_id)
        outranked = member is not None and member.incarnation > core.incarnation
        require(newer or outranked, 7, f"{island.address} gave up: {fail.reason}")

    # --- at the end -------------------------------------------------------------------------------------------

    def at_end(self, simulation: Run) -> None:
        """Checks what must hold when a run has ended and everybody is calm."""
        for leader in simulation.leaders.values():
            self._at_end(simulation, leader.core)
        if not self._sizes:  # between unlike batches a part of one may be left out
            hold(2, self.dealing.passed_over(simulation.leaders[0].core.run.books.data))

    def _at_end(self, simulation: Run, core: Aggregator) -> None:
        require(core.run.model.manifest is not None, 6, "nobody ever joined")
        # A flush may run out of patience where the pool for contributions is smaller than one round needs.
        gave_up = any(name == "run.flush_incomplete" for _, _, name, _ in simulation.trace)
        # Where everybody is away for long in a short run, all that is trained may be given to others, and not trained.
        moved = any(name == "contribution.refused" and "share_moved" in said for _, _, name, said in simulation.trace)
        honest = [i.core for i in simulation.islands.values() if i.alive and i.plan.island_id not in self._rogues]
        end = self._ends.get(core.run.config.shard, _End())
        booked_by_end = end.booked
        trained = any(booked_by_end.get((each.island_id, each.incarnation)) for each in honest)
        for p in core.run.model.moving:
            grew = core.run.model.fragments[p].version > 0
            require(grew or gave_up or moved or not trained, 6, f"fragment {p} never grew")
        for (island_id, incarnation), tokens in self._trained_tokens.items():
            if incarnation <= core.run.books.ledger.past(island_id).upto:
                continue  # in the sums alone
            if not core.run.books.ledger.knows(island_id, incarnation):
                # Welcomed by an aggregator that died before version 0 was whole: there was nothing to train yet.
                require(tokens == 0, 4, f"{island_id}.{incarnation} trained {tokens}, nothing is booked")
                continue
            booked = core.run.books.ledger.life(island_id, incarnation).last_tokens
            require(booked <= tokens, 4, f"{island_id}.{incarnation} trained {tokens}, booked are {booked}")
        ended_at_s = next((at_s for at_s, _, name, _ in simulation.trace if name == "run.ended"), float("inf"))
        unheard_from_s = ended_at_s - core.run.config.heartbeat_interval_s
        for island in simulation.islands.values():
            if not island.alive:
                continue
            life = core.run.books.ledger.life(island.core.island_id, island.core.incarnation)
            booked = booked_by_end.get((island.core.island_id, island.core.incarnation), 0)
            if not life.trained_tokens or island.stepped_at_s > unheard_from_s:
                continue  # it joined when the run was over: a step that it ran before it heard so is nobody's
            late = not booked or island.core.island_id not in end.live  # and may end without a last word
            told = life.last_tokens == island.tokens or gave_up or late
            require(told, 4, f"{island.address} trained {island.tokens}, books {life}")
            for p in core.run.model.moving:
                fragment = island.core.fragments[p]
                where = f"{island.address} fragment {p}"
                require(not fragment.outstanding, 8, f"{where} never heard of {fragment.outstanding}")
                require(fragment.stage is Stage.IDLE, 6, f"{where} is {fragment.stage}")
                require(fragment.version == core.run.model.fragments[p].version, 6, f"{where} misses versions")
                account = core.run.books.ledger.account(island.core.island_id, island.core.incarnation, p)
                spent = account.merged_tokens + sum(account.wasted_tokens.values())
                require(not account.waiting, 4, f"{where} still waits: {account.waiting}")
                # A step that ended when the run was over is booked as lost with its life, on no fragment's account.
                what = f"{where}: {spent} accounted for of {life.trained_tokens}, {booked} before the end"
                require(booked <= spent <= life.trained_tokens or gave_up, 4, what)
        books = core.run.books.ledger.books()
        require(books.in_flight == 0, 4, f"{books.in_flight} in flight after the flush: {books}")
        for p in core.run.model.moving:
            merged = core.run.books.ledger.merged_tokens(p)
            require(
                merged == self.merged_tokens[p], 4, f"fragment {p}: ledger {merged}, commits {self.merged_tokens[p]}"
            )

    def _forget(self, commit: Commit) -> None:
        p = commit.fragment_id
        for merged in commit.contributions:
            steps = merged.steps
            self._merged.take_back((merged.island_id, merged.incarnation, p), steps.from_step, steps.to_step)
            self.merged_tokens[p] -= steps.tokens
            for d in merged.data:
                self._merged_data.take_back(*self._place(p, d))

    def _place(self, p: int, d: DataRange) -> tuple[tuple[int, int], int, int]:
        """Returns the place of batches, in the data of all or in a pass of one's own, and their range."""
        if d.from_batch >= OWN_PASS:
            return (p, d.share), d.from_batch, d.to_batch
        owner, _ = self.dealing.blocks.get(d.share, ("", None))
        size = self._sizes.get(owner, 1)
        return (p, 0), size * d.from_batch, size * d.to_batch


def _newest_of(commits: Mapping[int, Commit], fragment_id: int) -> int:
    """Returns the version of a fragment on a disk; -1 for none."""
    commit = commits.get(fragment_id)
    return -1 if commit is None else commit.fragment_version
