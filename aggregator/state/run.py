"""The state of a run that the parts of the core share.

The parts (:mod:`aggregator.rounds.membership`, :mod:`aggregator.rounds.rounds` and the others that
:mod:`aggregator.rounds.core` lists) read and change one :class:`Run` while one event is handled. What they want done is
put into its outbox, in order; :class:`aggregator.rounds.core.Aggregator` empties it. ``now_s`` is the clock reading
that came with the event.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from aggregator.interface.config import AggregatorConfig
from aggregator.interface.events import Action, Finished, Manifested, Note
from aggregator.interface.leader_notes import AggregatorFinished, StoreBack
from aggregator.interface.merge_rule import load
from aggregator.interface.notes import IslandQuarantined, IslandReleased
from aggregator.ledger.data_blocks import DataBlocks
from aggregator.ledger.ledger import Ledger
from aggregator.ledger.lives import Life
from aggregator.rules.claims import Claims
from aggregator.rules.deadlines import Deadlines
from aggregator.rules.divergence import Course
from aggregator.rules.interval import Interval, RoundTimes
from aggregator.rules.pacing import Lockstep, Pacer
from aggregator.rules.quarantine import OPPOSED, Quarantine
from aggregator.rules.step_clock import FleetRates, StepClock
from aggregator.rules.troubles import Troubles
from aggregator.rules.trust import Trust
from aggregator.state.founding import Founding
from aggregator.state.fragment import Fragment, Stage
from aggregator.state.members import Member, Members, PendingJoins
from aggregator.state.model_limits import most_held_bytes
from aggregator.state.round import Round
from aggregator.state.routes import Routes
from broker.base.errors import ConfigError
from broker.process.demands import shown_inputs
from broker.routing.resending import SILENT_S
from broker.wire.fragments import FragmentManifest, shard_of
from broker.wire.messages import (
    FASTEST_STEP_S,
    RECIPE,
    Contribution,
    Pacing,
    Phase,
    Reason,
    Recipe,
    Roster,
    own_rule,
    recipe_table,
)
from broker.wire.schema import MAX_DATA_RANGES

#: No training loop runs faster than this, not even one that does nothing. Counters that grow faster are lies, which
#: could end a run or overflow a sum.
STEPS_PER_S, STEPS_AT_ONCE = round(1 / FASTEST_STEP_S), 100_000

#: Contributions of one island that may wait on one fragment.
MOST_WAITING = 16


class Run:
    """The state of one run; see the module's docstring.

    Attributes:
        epoch: Number of this life of the aggregator: one more than the last.
        open_rounds: Rounds that wait for answers, by id.
        refusals: Messages refused, by reason.
    """

    def __init__(self, config: AggregatorConfig, now_s: float) -> None:
        self.config = config
        self.now_s = now_s
        self.outbox: list[Action] = []
        self.deadlines = Deadlines()  # when each part may have something to do without another event
        self.phase = self.told_phase = Phase.SEEDING  # and that which shard 0 tells, where that is another one
        self.epoch = 1
        self.manifest: FragmentManifest | None = None
        self.moving: tuple[int, ...] = ()  # ids of the fragments that fall due here
        self.inputs: dict[str, str] = {}  # what training begins with, by the first island (broker.process.demands)
        self.fragments: dict[int, Fragment] = {}
        self._liveness = config.liveness
        self.members = Members(self._liveness)
        self.pending_joins = PendingJoins()
        self.finished = False  # the driver may exit
        #: Absence after which an island's data go to others; 0: never.
        self.takeover_s = max(config.share_takeover_s, config.dead_after_s) if config.share_takeover_s else 0.0
        alone = config.shards == 1
        self.data = DataBlocks(config.data_ahead_s, config.sync_interval, self.takeover_s, alone=alone)
        self.ledger = Ledger({})
        self.routes = Routes()
        self.clock = StepClock(config.heartbeat_interval_s, self.counts, self._counts_until_s)
        self.members.watch(self.clock.look_at)
        self.claims = Claims(config.trusted_tokens or {}, config.pace_spread)
        self.rates = FleetRates(self.clock, self._tokens_per_step, self.claims.counted)
        self.members.watch(self.rates.look_at)  # what it has trained counts, where it declares nothing
        self.pacer: Pacer | Lockstep | None = None
        self.interval = Interval(config.sync_interval)
        self.round_times = RoundTimes(config)
        self.open_rounds: dict[int, Round] = {}
        self.refusals: Counter[str] = Counter()
        self.quarantine = Quarantine(config.quarantine_s, self.members.changed)
        self.trust, self.course, self.rule = Trust(), Course(), load(config.merge)
        self.seeding_id = 0  # of the present attempt at version 0, the round id of its commits
        self.planted_digests: dict[int, str] = {}  # of version 0, once it is whole
        self.seeder: tuple[str, int] | None = None  # island and incarnation that is asked for it
        self.never_began = True  # no record says that there ever was a version 0
        #: Something of version 0 may be in the store; it is whole, in every shard.
        self.planted = self.began = False
        self.saved_serial = 0  # of the newest run record asked for
        self.durable_serial = 0  # of the newest one that is durable everywhere it must be
        self.agreed_serial = 0  # of the newest one that every shard has, too
        self.rosters: list[Roster] = []  # of shard 0, in records that are not durable yet
        self.begins: dict[str, tuple[int, int]] = {}  # island -> the furthest step and tokens that other shards know
        self.foundings: tuple[Founding, ...] = ()  # of the line that the store has, oldest first
        self.roster_at = (0, 0)  # epoch and serial of shard 0's roster that was taken over last
        self.answered_at_s = math.inf  # when a broker answered last; before the first nobody is missed
        self.flushed = False  # every fragment of this shard is, as far as can be
        self.troubles = Troubles()
        self.last_round_id = 0
        #: The median step time with the last event, or the last one known; how many islands there were.
        self.step_s, self._paced_for = 0.0, 0

    # --- what to do -------------------------------------------------------------------------------------------

    def emit(self, *actions: Action) -> None:
        """Puts actions into the outbox."""
        self.outbox.extend(actions)

    def note(self, note: Note) -> None:
        """Records a decision with its reason."""
        self.outbox.append(note)

    def save(self) -> int:
        """Asks for the run record to be written; returns its serial number."""
        self.saved_serial += 1
        return self.saved_serial

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

    def count_refusal(self, reason: Reason, member: Member | None = None) -> None:
        """Counts a refusal, for the sender too if it is a member."""
        self.refusals[reason] += 1
        if member is not None:
            member.refusals[reason] = member.refusals.get(reason, 0) + 1

    def offence(self, member: Member, reason: Reason, from_step: int) -> None:
        """Notes that a member's message from this step on was refused; too many lead to quarantine."""
        at_step = self.ledger.life(member.island_id, member.incarnation).last_step
        kept_out = self.quarantine.offended(
            member.island_id, reason, from_step=from_step, at_step=at_step, now_s=self.now_s
        )
        if kept_out:
            self._kept_out(member, reason, self.quarantine.why(member.island_id, self.now_s))

    def opposed(self, member: Member, how: str) -> None:
        """Notes that an island points against the others."""
        if self.quarantine.opposed(member.island_id, self.now_s):
            detail = f"its pseudo-gradients point against the fleet's: {how}"
            self._kept_out(member, OPPOSED, detail)

    def _kept_out(self, member: Member, reason: str, detail: str) -> None:
        for_s = round(self.quarantine.until_s(member.island_id, self.now_s) - self.now_s, 3)
        self.note(IslandQuarantined(island=member.island_id, reason=reason, for_s=for_s, detail=detail))
        self.save()  # it must not come back by way of our own restart

    def behaved(self, island_id: str) -> None:
        """Notes that a contribution was let in."""
        if self.quarantine.behaved(island_id, self.now_s):
            self.note(IslandReleased(island=island_id))
            self.save()

    # --- what is ----------------------------------------------------------------------------------------------

    @property
    def decided(self) -> Phase:
        """The phase that the run record is to have; a run begins once that is durable."""
        return Phase.RUNNING if self.began and self.phase is Phase.SEEDING else self.phase

    def owns(self, fragment_id: int) -> bool:
        """Returns True if a fragment is one of this shard's."""
        return shard_of(fragment_id, self.config.shards) == self.config.shard

    def of_ours(self, versions: Sequence[int]) -> tuple[int, ...]:
        """Returns versions by fragment with -1 in place of those of other shards."""
        if self.config.shards == 1:
            return tuple(versions)
        return tuple(version if self.owns(p) else -1 for p, version in enumerate(versions))

    def num_busy(self) -> int:
        """Returns how many fragments have a round in any stage; one that stands still keeps no other from one."""
        return len([f for f in self.fragments.values() if f.at.stage is not Stage.IDLE and f.merge_again_at_s is None])

    def free(self) -> list[int]:
        """Returns the moving fragments without a round, whose newest version was delivered."""
        fragments = self.fragments
        return [p for p in self.moving if not ((f := fragments[p]).undelivered or f.at.stage is not Stage.IDLE)]

    @property
    def versions(self) -> tuple[int, ...]:
        """The newest published version per fragment, -1 for none: version 0 is published whole or not at all.

        Fragments of other shards have none here.
        """
        if self.manifest is None:
            return ()
        if self.phase is Phase.SEEDING:
            return (-1,) * len(self.manifest)
        ours = self.fragments
        if len(ours) == len(self.manifest):
            return tuple([fragment.version for fragment in ours.values()])
        return tuple(ours[p].version if p in ours else -1 for p in range(len(self.manifest)))

    @property
    def deaf(self) -> bool:
        """True if no broker answers, or this process was held up: silence says nothing then."""
        return self.now_s - self.answered_at_s > SILENT_S

    @property
    def heartbeat_interval_s(self) -> float:
        """Seconds between two heartbeats of an island, in a fleet of the expected or the present size."""
        return self._liveness.interval_of(self._fleet)

    @property
    def too_many_heartbeats(self) -> str:
        """A warning with its cure if the fleet sends more heartbeats than a hub answers; else empty."""
        return self._liveness.too_many(self._fleet)

    @property
    def _fleet(self) -> int:
        return max(self.config.islands, len(self.members.live_ids(self.now_s)))

    @property
    def median_step_s(self) -> float:
        """Median inner step time of advancing islands in seconds; the last known if none advances, first 0."""
        return self.clock.median_step_time_s(self.now_s) or self.step_s

    def remember_pace(self) -> None:
        """Remembers the current median step time, for what follows, and for a time when no island advances.

        Done per event, not per question: how often somebody asks must not change a replay.
        """
        self.step_s = self.median_step_s
        if (fleet := self._fleet) != self._paced_for:
            self._paced_for, self.clock.heartbeat_interval_s = fleet, self.heartbeat_interval_s

    def eligible(self) -> frozenset[str]:
        """Ids of the live islands that are not quarantined: those that a round could consist of."""
        live, out = self.members.live_ids(self.now_s), self.quarantine.out(self.now_s)
        return live - out if out else live

    def counts(self, island_id: str) -> bool:
        """Whether an island is one of the :meth:`eligible`."""
        return self.members.lives(island_id, self.now_s) and not self.quarantine.holds(island_id, self.now_s)

    def _counts_until_s(self, island_id: str) -> float:
        """Returns when :meth:`counts` may change by time alone: by silence, or the end of a quarantine."""
        return min(self.members.dies_at_s(island_id), self.quarantine.until_s(island_id, self.now_s))

    def holds_nothing(self, member: Member) -> bool:
        """Returns True if an island joined before the run began, as this shard knows: it holds no version."""
        first_hand = self.never_began or not member.presumed
        return self.phase is Phase.SEEDING and not self.config.shard and first_hand

    def length(self, fragment_id: int) -> float:
        """Returns a fragment's norm at version 0, at least that of as many average parameters of the model.

        Fragments of biases begin at zero, and so would be measured against nothing. 0 if no norm is known.
        """
        if self.manifest is None:
            return 0.0
        squares, ours, sizes = 0.0, 0, self.manifest.sizes
        for p, fragment in self.fragments.items():
            squares += fragment.norms.seed_norm**2
            ours += sizes[p]
        share = sizes[fragment_id] / ours if ours else 0.0  # a shard may have nothing but empty tensors
        return max(self.fragments[fragment_id].norms.seed_norm, math.sqrt(share * squares))

    def waiting_bytes(self) -> int:
        """Bytes of the contributions that wait in open rounds or are held; at most :meth:`held_bytes`."""
        waiting = 0
        for fragment in self.fragments.values():
            waiting += fragment.held_bytes + (fragment.round.waiting_bytes if fragment.round is not None else 0)
        return waiting

    def held_bytes(self) -> int:
        """Bytes of contributions that may wait here."""
        return most_held_bytes(self.config, self.manifest)

    def oldest_allowed(self, p: int) -> int:
        """Returns the oldest version of a fragment whose steps may still be merged."""
        config = self.config
        return self.fragments[p].oldest_allowed(config.max_staleness, config.max_staleness_s, self.now_s)

    def crowded(self, island_id: str, contribution: Contribution) -> str:
        """Says why no more of an island's contributions may wait on a fragment; empty if one more may.

        A version repeats who is in it with which steps and batches. However small contributions are, one island must
        not fill it with more than fits into a message: what was merged already could never be published.
        """
        waiting = self.fragments[contribution.fragment_id].waiting_of(island_id)
        ranges = len(contribution.data) + sum(len(c.data) for c in waiting)
        if len(waiting) < MOST_WAITING and ranges <= MAX_DATA_RANGES:
            return ""
        return f"{len(waiting)} of this island wait, and {ranges} ranges of batches with this one"

    def most_steps(self, member: Member, life: Life) -> int:
        """Returns the highest inner step that an island can have reached by now; a claim beyond is a lie."""
        since_s = max(0.0, self.now_s - member.counted_at_s)
        return life.last_step + STEPS_AT_ONCE + int(since_s * STEPS_PER_S)

    def most_tokens_per_step(self, member: Member) -> int:
        """Returns an island's declared tokens per step, or the most that the configuration allows."""
        return member.tokens_per_step or self.config.max_tokens_per_step

    def tokens_per_step(self, member: Member) -> float:
        """Returns an island's declared tokens per step, or its average so far if it declared none."""
        if member.tokens_per_step:
            return member.tokens_per_step
        life = self.ledger.last_life(member.island_id)
        return life.trained_tokens / max(1, life.last_step - life.start_step)

    def _tokens_per_step(self, island_id: str) -> float:
        return self.tokens_per_step(self.members[island_id])

    def next_round_id(self) -> int:
        """Returns a round id that was never used before."""
        self.last_round_id += 1
        return self.last_round_id

    def standings(self) -> dict[str, dict[str, Any]]:
        """Returns the weight and agreement of each live island."""
        return self.trust.shown(sorted(self.members.live_ids(self.now_s)), weighed=self.config.trusts)

    # --- beginning --------------------------------------------------------------------------------------------

    def recipe_table(self) -> dict[str, Any]:
        """Returns the recipe as plain data, with what training began with if islands have said it."""
        return recipe_table(self.config) | ({"inputs": shown_inputs(self.inputs)} if self.inputs else {})

    def adopt_manifest(self, manifest: FragmentManifest, recipe: Recipe) -> None:
        """Fixes fragments and recipe of the run; what was fixed before must not have been used.

        Raises:
            ConfigError: The recipe, which is another shard's, has another merge rule of one's own.
        """
        if recipe.merge != self.config.merge and (own_rule(recipe.merge) or self.rule is not None):
            cure = f"shard 0 has {recipe.merge}: start every shard with the same --merge, and the same file"
            raise ConfigError("merge", self.config.merge, cure)
        self.manifest = manifest
        self.config = replace(self.config, **{name: getattr(recipe, name) for name in RECIPE})
        self.moving = tuple(p for p in manifest.moving if self.owns(p))
        self.fragments = {p: Fragment(interval=self.config.sync_interval) for p in range(len(manifest)) if self.owns(p)}
        self.ledger = Ledger({p: manifest.sizes[p] for p in self.moving})
        c, self.pacer = self.config, Lockstep()
        if c.pacing is not Pacing.LOCKSTEP:
            fastest = (c.quorum or c.islands) if c.pacing is Pacing.FIXED else 0
            self.pacer = Pacer(manifest.moving, c.sync_interval, self.clock, frozenset(self.moving), fastest=fastest)
        self.interval = Interval(c.sync_interval, len(self.moving))
        self.emit(Manifested(manifest=manifest))
