"""The state of a run that the parts of the core share, by owner.

The parts (:mod:`aggregator.rounds.membership`, :mod:`aggregator.rounds.rounds` and the others that
:mod:`aggregator.rounds.core` lists) read and change one :class:`Run` while one event is handled. What they want done is
put into its outbox, in order; :class:`aggregator.rounds.core.Aggregator` empties it. ``now_s`` is the clock reading
that came with the event.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from aggregator.interface.config import AggregatorConfig
from aggregator.interface.events import Action, Finished, Manifested, Note
from aggregator.interface.leader_notes import AggregatorFinished, StoreBack
from aggregator.interface.notes import IslandQuarantined
from aggregator.ledger.data_blocks import DataBlocks
from aggregator.ledger.ledger import Ledger
from aggregator.rules.deadlines import Deadlines
from aggregator.rules.divergence import Course
from aggregator.rules.interval import Interval, RoundTimes
from aggregator.rules.pacing import Lockstep, Pacer
from aggregator.rules.quarantine import OPPOSED
from aggregator.rules.step_clock import FleetRates, StepClock
from aggregator.rules.troubles import Troubles
from aggregator.rules.trust import Trust
from aggregator.state.fleet import Fleet
from aggregator.state.founding import Founding
from aggregator.state.fragment import Model
from aggregator.state.members import Member, Members
from aggregator.state.model_limits import most_held_bytes
from aggregator.state.round import Round
from broker.base.errors import ConfigError
from broker.process.demands import shown_inputs
from broker.wire.fragments import FragmentManifest
from broker.wire.messages import RECIPE, Pacing, Phase, Reason, Recipe, Roster, own_rule, recipe_table


class Record:
    """The serial numbers of run records: asked for, given to be written, durable.

    One is written at a time. The next one has all that was asked for meanwhile: a record is as long as the fleet is
    large, and islands may join by the hundred.

    Attributes:
        saved_serial: Of the newest one asked for.
        durable_serial: Of the newest one that is durable everywhere it must be; 0: this life may not speak yet.
        foundings: Of the line that the store has, oldest first.
    """

    def __init__(self) -> None:
        self.saved_serial = self.durable_serial = 0
        self.foundings: tuple[Founding, ...] = ()
        self._given_serial = 0  # of the newest one that was given to be written
        self._is_writing = False  # that one

    def save(self) -> int:
        """Asks for the run record to be written; returns its serial number."""
        self.saved_serial += 1
        return self.saved_serial

    def take(self, *, last: bool) -> bool:
        """Returns True if a record is to be written now; the ``last`` one does not wait for the one before."""
        if self._given_serial == self.saved_serial or (self._is_writing and not last):
            return False
        self._is_writing, self._given_serial = True, self.saved_serial
        return True

    def written(self, serial: int) -> None:
        """Takes note that the record of that serial is durable, and those before it."""
        self.durable_serial = max(self.durable_serial, serial)
        self._is_writing = self._is_writing and serial < self._given_serial

    def failed(self) -> None:
        """Takes note that the record that was being written could not be: the next one may be."""
        self._is_writing = False


@dataclass(slots=True)
class OtherShards:
    """Agreement among the shards of a run (:mod:`aggregator.rounds.roster`)."""

    agreed_serial: int = 0  #: of the newest run record that every shard has, too
    told_phase: Phase = Phase.SEEDING  #: that which shard 0 tells
    rosters: list[Roster] = field(default_factory=list)  #: of shard 0, in records that are not durable yet
    roster_at: tuple[int, int] = (0, 0)  #: epoch and serial of shard 0's roster that was taken over last
    begins: dict[str, tuple[int, int]] = field(default_factory=dict)  #: island -> the furthest step and tokens there


@dataclass(slots=True)
class Origin:
    """Version 0, and where it comes from (:mod:`aggregator.rounds.seeding`)."""

    seeding_id: int = 0  #: of the present attempt, the round id of its commits
    seeder: tuple[str, int] | None = None  #: island and incarnation that is asked for it
    inputs: dict[str, str] = field(default_factory=dict)  #: what training begins with, by the first island
    planted: bool = False  #: something of it may be in the store
    began: bool = False  #: it is whole, in every shard
    never_began: bool = True  #: no record says that there ever was one
    digests: dict[int, str] = field(default_factory=dict)  #: of its fragments, once it is whole


class Books:
    """The books that each commit has: steps and tokens, blocks of data, and how far islands agree."""

    def __init__(self, config: AggregatorConfig, members: Members) -> None:
        self._members, alone = members, config.shards == 1
        self.ledger = Ledger({})
        self.data = DataBlocks(config.data_ahead_s, config.sync_interval, config.takeover_s, alone=alone)
        self.trust, self.course = Trust(), Course()

    def tokens_per_step(self, island_id: str) -> float:
        """Returns an island's declared tokens per step, or its average so far if it declared none."""
        if declared := self._members[island_id].tokens_per_step:
            return declared
        life = self.ledger.last_life(island_id)
        return life.trained_tokens / max(1, life.last_step - life.start_step)


class Schedule:
    """When rounds open and close.

    Attributes:
        pacer: None until there is a manifest.
        open_rounds: Rounds that wait for answers, by id.
        last_round_id: The highest one given.
        step_s: The median step time with the last event, or the last one known; first 0.
    """

    def __init__(self, config: AggregatorConfig, fleet: Fleet, books: Books) -> None:
        self._fleet, members = fleet, fleet.members
        self.clock = StepClock(config.heartbeat_interval_s, fleet.counts, fleet.counts_until_s)
        members.watch(self.clock.look_at)
        self.rates = FleetRates(self.clock, books.tokens_per_step, fleet.claims.counted)
        members.watch(self.rates.look_at)  # what it has trained counts, where it declares nothing
        self.pacer: Pacer | Lockstep | None = None
        self.interval = Interval(config.sync_interval)
        self.round_times = RoundTimes(config)
        self.open_rounds: dict[int, Round] = {}
        self.last_round_id = 0
        self.step_s, self._paced_for = 0.0, 0

    def set_interval(self, steps: int, now_s: float) -> None:
        """Goes on with another sync interval, in inner steps; not in lockstep."""
        assert isinstance(self.pacer, Pacer), "fragments fall due in lockstep"
        self.interval.steps = steps
        self.pacer.change_interval(steps, now_s)

    def adopt(self, config: AggregatorConfig, every: tuple[int, ...], ours: tuple[int, ...]) -> None:
        """Fixes the fragments that fall due: those of all shards, and those of this one."""
        self.pacer = Lockstep()
        if config.pacing is not Pacing.LOCKSTEP:
            fastest = (config.quorum or config.islands) if config.pacing is Pacing.FIXED else 0
            self.pacer = Pacer(every, config.sync_interval, self.clock, frozenset(ours), fastest=fastest)
        self.interval = Interval(config.sync_interval, len(ours))

    def next_round_id(self) -> int:
        """Returns a round id that was never used before."""
        self.last_round_id += 1
        return self.last_round_id

    def median_step_s(self, now_s: float) -> float:
        """Median inner step time of advancing islands in seconds; the last known if none advances, first 0."""
        return self.clock.median_step_time_s(now_s) or self.step_s

    def remember_pace(self, now_s: float) -> None:
        """Remembers the current median step time, for what follows, and for a time when no island advances.

        Done per event, not per question: how often somebody asks must not change a replay.
        """
        self.step_s = self.median_step_s(now_s)
        if (size := self._fleet.size(now_s)) != self._paced_for:
            self._paced_for, self.clock.heartbeat_interval_s = size, self._fleet.heartbeat_interval_s(now_s)


class Run:
    """The state of one run; see the module's docstring.

    Attributes:
        config: The settings, completed by the recipe of the run once that is fixed.
        epoch: Number of this life of the aggregator: one more than the last.
        phase: Of the run, as this shard knows it.
        finished: The driver may exit.
        outbox: What is to be done, in order.
        deadlines: When each part may have something to do without another event.
        troubles: What an operator should know of.
    """

    def __init__(self, config: AggregatorConfig, now_s: float) -> None:
        self.config = config
        self.now_s = now_s
        self.epoch = 1
        self.phase = Phase.SEEDING
        self.finished = False
        self.outbox: list[Action] = []
        self.deadlines = Deadlines()
        self.troubles = Troubles()
        self.record = Record()
        self.other_shards = OtherShards()
        self.origin = Origin()
        self.model = Model(config.shard, config.shards, most_held_bytes(config, None))
        self.fleet = Fleet(config)
        self.books = Books(config, self.fleet.members)
        self.schedule = Schedule(config, self.fleet, self.books)

    # --- what to do -------------------------------------------------------------------------------------------

    def emit(self, *actions: Action) -> None:
        """Puts actions into the outbox."""
        self.outbox.extend(actions)

    def note(self, note: Note) -> None:
        """Records a decision with its reason."""
        self.outbox.append(note)

    def finish(self, reason: str) -> None:
        """Ends this process's work, whether the run has ended or not."""
        if not self.finished:
            self.finished = True
            self.note(AggregatorFinished(reason=reason, phase=str(self.phase)))
            self.emit(Finished())

    def disk_failed(self, detail: str) -> None:
        """Notes that the store cannot be written: nothing is published, and islands train on."""
        self.troubles.begin("store", f"nothing is published, islands train on: {detail}", self.now_s)

    def disk_works(self) -> None:
        """Notes that something was written to the store."""
        lasted_s = self.troubles.end("store", self.now_s)
        if lasted_s is not None:
            self.note(StoreBack(after_s=round(lasted_s, 3)))

    def adopt_manifest(self, manifest: FragmentManifest, recipe: Recipe) -> None:
        """Fixes fragments and recipe of the run; what was fixed before must not have been used.

        Raises:
            ConfigError: The recipe, which is another shard's, has another merge rule of one's own.
        """
        if recipe.merge != self.config.merge and (own_rule(recipe.merge) or own_rule(self.config.merge)):
            cure = f"shard 0 has {recipe.merge}: start every shard with the same --merge, and the same file"
            raise ConfigError("merge", self.config.merge, cure)
        self.config = replace(self.config, **{name: getattr(recipe, name) for name in RECIPE})
        self.model.adopt(manifest, most_held_bytes(self.config, manifest))
        moving = self.model.moving
        self.books.ledger = Ledger({p: manifest.sizes[p] for p in moving})
        self.schedule.adopt(self.config, manifest.moving, moving)
        self.emit(Manifested(manifest=manifest))

    # --- offences ---------------------------------------------------------------------------------------------

    def offence(self, member: Member, reason: Reason, from_step: int) -> None:
        """Notes that a member's message from this step on was refused; too many lead to quarantine."""
        quarantine, island_id, now_s = self.fleet.quarantine, member.island_id, self.now_s
        at_step = self.books.ledger.life(island_id, member.incarnation).last_step
        if quarantine.offended(island_id, reason, from_step=from_step, at_step=at_step, now_s=now_s):
            self._kept_out(island_id, reason, quarantine.why(island_id, now_s))

    def opposed(self, island_id: str, how: str) -> None:
        """Notes that an island points against the others."""
        if self.fleet.quarantine.opposed(island_id, self.now_s):
            self._kept_out(island_id, OPPOSED, f"its pseudo-gradients point against the fleet's: {how}")

    def _kept_out(self, island_id: str, reason: str, detail: str) -> None:
        for_s = round(self.fleet.quarantine.until_s(island_id, self.now_s) - self.now_s, 3)
        self.note(IslandQuarantined(island=island_id, reason=reason, for_s=for_s, detail=detail))
        self.record.save()  # it must not come back by way of our own restart

    # --- what is ----------------------------------------------------------------------------------------------

    @property
    def decided(self) -> Phase:
        """The phase that the run record is to have; a run begins once that is durable."""
        return Phase.RUNNING if self.origin.began and self.phase is Phase.SEEDING else self.phase

    @property
    def versions(self) -> tuple[int, ...]:
        """The newest published version per fragment, -1 for none: version 0 is published whole or not at all.

        Fragments of other shards have none here.
        """
        manifest, ours = self.model.manifest, self.model.fragments
        if manifest is None:
            return ()
        if self.phase is Phase.SEEDING:
            return (-1,) * len(manifest)
        if len(ours) == len(manifest):
            return tuple([fragment.version for fragment in ours.values()])
        return tuple(ours[p].version if p in ours else -1 for p in range(len(manifest)))

    def holds_nothing(self, member: Member) -> bool:
        """Returns True if an island joined before the run began, as this shard knows: it holds no version."""
        first_hand = self.origin.never_began or not member.presumed
        return self.phase is Phase.SEEDING and not self.config.shard and first_hand

    def standings(self) -> dict[str, dict[str, Any]]:
        """Returns the weight and agreement of each live island."""
        live_ids = self.fleet.members.live_ids(self.now_s)
        return self.books.trust.shown(sorted(live_ids), weighed=self.config.trusts)

    def recipe_table(self) -> dict[str, Any]:
        """Returns the recipe as plain data, with what training began with if islands have said it."""
        inputs = self.origin.inputs
        return recipe_table(self.config) | ({"inputs": shown_inputs(inputs)} if inputs else {})
