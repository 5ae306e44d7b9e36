"""Hands over contributions to rounds, and version 0 on request. Pure.

Every trained step of a fragment is handed over at most once: ``handed`` only grows, and a capture takes the range
from there to the boundary of its copy (reference.md, section 4.2). A contribution's bytes are kept until its fate is
known: what the aggregator lacks is sent again, after pauses that follow the link; what its predecessor had, at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import assert_never

from broker.chunks.choices import LinkChoice
from broker.chunks.meter import Link
from broker.routing.resending import Backoff, Carried, Patience
from broker.wire.fragments import shard_of
from broker.wire.messages import (
    AGGREGATOR,
    UNASKED,
    Contribution,
    Fate,
    FleetState,
    Nothing,
    Pacing,
    Phase,
    Resolution,
    Seed,
    Version,
)
from broker.wire.ranges import StepRange
from islands.protocol.data_shares import Trail, TrainedBatch
from islands.protocol.events import Action, Capture, Captured, EncodeSeed, Note, SeedEncoded, Send, Watch
from islands.protocol.fleet import Fleet
from islands.protocol.fragment import Fragment, Pending, Point, Stage
from islands.protocol.member import Member
from islands.protocol.paused import Paused
from islands.protocol.state import Training

NOTHING_AGAIN_S = 1.0


class HandOver:
    """One island's answers to open rounds, and what becomes of its contributions.

    Args:
        training: The books of its training.
        member: Its membership.
        fleet: What it knows of the run.
        several_hosts: They copy together, at few boundaries (:mod:`islands.agreement`): rounds open and close
            in between. So what is copied is handed over at once, for the next round where none is open, and not copied
            again until that round was merged.
    """

    def __init__(self, training: Training, member: Member, fleet: Fleet, *, several_hosts: bool = False) -> None:
        self._training = training
        self._several_hosts = several_hosts
        self._watched: frozenset[int] = frozenset()
        self._member = member
        self._fleet = fleet
        member.blocks = self.blocks
        self._patience = Patience()
        self._chosen: LinkChoice | None = None
        self._trail = Trail()
        self._cursors: dict[int, int] = {}  # block -> the batch after the last one trained
        self._at_hand = 0  # the block that was trained last
        self._asked_from = 0  # the last of which it was said that no other one is known
        self.fates: Counter[Fate] = Counter()  #: of contributions, by what became of them in the end
        self._seeds_for: dict[int, int] = {}  # shard -> epoch that asked for version 0 last

    def trained(self, steps: Sequence[tuple[int, TrainedBatch]]) -> None:
        """Takes down what steps were trained on: (number of the step from 0, its batch)."""
        for step, taken in steps:
            self._trail.add(step, taken)
            self._cursors[taken.block] = taken.batch + 1
            self._at_hand = taken.block

        if self._at_hand not in (self._asked_from, 0):
            newest = max((block.number for block in self._fleet.blocks), default=0)
            if self._at_hand >= newest:  # it has begun the last one that it knows: the answer has the next one
                self._asked_from = self._at_hand
                self._member.beat_besides()

    def blocks(self) -> tuple[int, tuple[int, ...]]:
        """Returns the number of the block at hand, and of those that are this island's and needed no more."""
        numbers = [block.number for block in self._fleet.blocks]
        outstanding = (pending for f in self._training.fragments.values() for pending in f.outstanding.values())
        needed = self._trail.blocks.union(d.share for pending in outstanding for d in pending.message.data)
        self._cursors = {n: batch for n, batch in self._cursors.items() if n in needed.union(numbers)}
        return self._at_hand, tuple(n for n in numbers if n < self._at_hand and n not in needed)

    def begin_blocks(self) -> None:
        """Forgets the numbers of blocks: each life has its own."""
        self._at_hand = self._asked_from = 0

    # --- from one process to the next -------------------------------------------------------------------------

    def paused(self, run_id: str, sequence: int) -> Paused:
        """Returns the state for the next process of this life.

        That is how far each block of the data was trained, and contributions that nobody is known to have merged. Steps
        that are in no contribution are given up.

        Args:
            run_id: Of the run.
            sequence: Of the last message that was sent.
        """
        training, member = self._training, self._member
        assert training.manifest is not None
        fragments = training.fragments
        lost = {p: fragments[p].lost_tokens(training.at) for p in training.manifest.moving}
        return Paused(
            run_id=run_id,
            island_id=member.island_id,
            incarnation=member.incarnation,
            nonce=member.nonce,
            sequence=sequence,
            at=training.at,
            overwritten_tokens=tuple(f.overwritten_tokens + lost.get(p, 0) for p, f in fragments.items()),
            cursors=dict(self._cursors),
            contributions=tuple(pending.message for f in fragments.values() for pending in f.outstanding.values()),
        )

    def resume(self, contributions: Sequence[Contribution], cursors: Mapping[int, int], now_s: float) -> None:
        """Takes over contributions kept by this life's last process; sent again if the aggregator lacks them."""
        self._cursors = dict(cursors)
        self._at_hand = max(cursors, default=0)
        for each in contributions:
            key = (each.steps.from_step, each.steps.to_step)
            pending = Pending(each, self._pauses(each.fragment_id), sent_at_s=now_s, sent_once=False)
            self._training.fragments[each.fragment_id].outstanding[key] = pending

    @property
    def _in_step(self) -> bool:
        """Whether islands hand over at fixed steps, and wait for each other."""
        settings = self._training.settings
        return settings is not None and settings.recipe.pacing is Pacing.LOCKSTEP

    # --- what the aggregators ask for -------------------------------------------------------------------------

    def asked(self, state: FleetState, now_s: float, actions: list[Action], carried: Carried | None = None) -> None:
        """Notes the open rounds of a shard's fragments; encodes seeds of version 0 that are asked for.

        ``carried`` as in :meth:`resolve`.
        """
        assert self._training.manifest is not None
        sizes, open_rounds = self._training.manifest.sizes, {r.fragment_id: r.round_id for r in state.rounds}
        if carried is not None:
            self._look_at(carried.link, now_s, actions)
        if state.seed and state.epoch > self._seeds_for.get(state.shard, -1):
            self._seeds_for[state.shard] = state.epoch
            for p in state.seed:
                self._training.fragments[p].seed = None  # what an earlier leader was sent went with it
        for p, fragment in self._training.fragments.items():
            if shard_of(p, state.shards) != state.shard:
                continue
            fragment.epoch = state.epoch
            round_id = open_rounds.get(p)
            fragment.flushing = state.phase in (Phase.FLUSHING, Phase.ENDED)
            if round_id is None or round_id < fragment.answered:
                fragment.asked = None
            elif round_id > fragment.answered:
                if fragment.asked != round_id:
                    self._link.asked(sizes[p], now_s)
                    fragment.rounds_since += 1
                fragment.asked = round_id
            elif fragment.nothing_at_s is not None and now_s >= fragment.nothing_at_s + NOTHING_AGAIN_S:
                fragment.asked = round_id  # the last answer, "nothing", seems lost
        for p in state.seed:
            seeded = self._training.fragments.get(p)
            if seeded is None or seeded.seeding:
                continue
            if seeded.seed is None:
                seeded.seed = self._patience.backoff(self._training.model_bytes)  # they all go at once
            if seeded.seed.due(now_s, carried):
                seeded.seeding = True
                seeded.seed.tried(now_s)
                actions.append(EncodeSeed(fragment_id=p))

    def seed_encoded(self, event: SeedEncoded, actions: list[Action]) -> None:
        """Sends a fragment of the initial parameters."""
        self._training.fragments[event.fragment_id].seeding = False
        seed = Seed(fragment_id=event.fragment_id, hosts=event.hosts, places=event.places, payload=event.payload)
        actions.append(Send(to=AGGREGATOR, message=seed))

    # --- answers ----------------------------------------------------------------------------------------------

    def watch(self, actions: list[Action]) -> None:
        """Orders copies of fragments that rounds ask for, or soon will."""
        fragments = self._training.fragments
        asked = (p for p, fragment in fragments.items() if fragment.asked is not None)
        idle = self._training.stopped or self._in_step  # in step, drivers know the steps
        watched = frozenset() if idle else self._fleet.due_soon.union(asked)
        if self._several_hosts:
            watched = frozenset(p for p in watched if fragments[p].awaited)
        if watched != self._watched:
            self._watched = watched
            actions.append(Watch(fragments=watched))

    def advance(self, p: int, fragment: Fragment, now_s: float, actions: list[Action]) -> None:
        """Hands over what can be handed over now of a fragment: in answer to its open round, or unasked."""
        if fragment.asked is not None:
            self._answer_round(p, fragment, now_s, actions)
        elif (self._training.stopped or self._several_hosts) and not self._fleet.done:
            self._volunteer(p, fragment, actions)

    def _answer_round(self, p: int, fragment: Fragment, now_s: float, actions: list[Action]) -> None:
        """Answers the open round of a fragment, if it can be answered now."""
        if fragment.stage is Stage.CAPTURING or (fragment.unasked and not fragment.flushing):
            return
        if self._in_step and not self._training.stopped:
            if fragment.stage is Stage.IDLE and fragment.copy is not None and fragment.copy.step > fragment.handed.step:
                self._answer(p, fragment, fragment.copy, now_s, actions)
            return  # else it has not come to the step yet
        if (fragment.congested or self._leaves_out(fragment)) and not self._training.stopped:
            self._pass(p, fragment, now_s, actions)
        elif fragment.copy is not None and fragment.answerable(self._training.at):
            self._answer(p, fragment, fragment.copy, now_s, actions)

    def _answer(self, p: int, fragment: Fragment, copy: Point, now_s: float, actions: list[Action]) -> None:
        """Answers an open round from the copy at hand: with a contribution, or with "nothing"."""
        if fragment.overwrite:
            fragment.drop(copy)  # spoilt: never handed over, and gone with the next version
        if copy.step <= fragment.handed.step:
            self._pass(p, fragment, now_s, actions)
            return
        assert fragment.asked is not None
        fragment.answered, fragment.asked, fragment.nothing_at_s = fragment.asked, None, None
        self._capture(p, fragment, copy, fragment.answered, actions)

    def _volunteer(self, p: int, fragment: Fragment, actions: list[Action]) -> None:
        """Hands over a copy unasked; the fragment's next round takes it in."""
        copy, left = fragment.copy, fragment.stage is Stage.IDLE and not fragment.overwrite
        if left and copy is not None and copy.step > fragment.handed.step:
            self._capture(p, fragment, copy, UNASKED, actions)

    def _capture(self, p: int, fragment: Fragment, copy: Point, round_id: int, actions: list[Action]) -> None:
        """Begins to encode all that was trained up to a copy and not handed over yet."""
        fragment.capturing_for = round_id
        fragment.count(copy.step)
        fragment.capturing = StepRange(
            from_step=fragment.handed.step,
            to_step=copy.step,
            from_tokens=fragment.handed.tokens,
            to_tokens=copy.tokens,
        )
        fragment.handed = copy
        fragment.doing.take("capture")
        fragment.rounds_since = 0
        actions.append(Capture(fragment_id=p, step=copy.step, codec=self._link.codec))

    def _leaves_out(self, fragment: Fragment) -> bool:
        """Returns whether the link has no room for this round; the next contribution has its steps."""
        return not fragment.flushing and fragment.rounds_since < self._link.rounds

    def _look_at(self, link: Link, now_s: float, actions: list[Action]) -> None:
        """Chooses the level of the ladder for later contributions, from the link's measurements."""
        if self._link.look(link, now_s):
            use = self._link.use
            facts = {"codec": str(use.codec), "share": use.share, "up": use.up, "round_trip_s": use.round_trip_s}
            actions.append(Note(name="link.adapted", fields=facts))
            for p, each in self._training.fragments.items():  # not all of them leave out the same rounds
                each.rounds_since = p % self._link.rounds
        self._member.link = self._link.use

    @property
    def _link(self) -> LinkChoice:
        """The level of the ladder for the link, at first the recipe's."""
        if self._chosen is None:
            settings, fragments = self._training.settings, self._training.fragments
            assert settings is not None
            self._chosen = LinkChoice(settings.recipe, len(fragments), shares=not self._several_hosts)
        return self._chosen

    def _pass(self, p: int, fragment: Fragment, now_s: float, actions: list[Action]) -> None:
        """Answers an open round with "nothing": it need not wait for this island."""
        assert fragment.asked is not None
        fragment.answered, fragment.asked, fragment.nothing_at_s = fragment.asked, None, now_s
        actions.append(Send(to=AGGREGATOR, message=Nothing(round_id=fragment.answered, fragment_id=p)))

    def captured(self, event: Captured, now_s: float, actions: list[Action]) -> None:
        """Sends a contribution, and keeps it until its fate is known."""
        training, p = self._training, event.fragment_id
        fragment = training.fragments[p]
        fragment.doing.take("captured")
        assert fragment.capturing is not None
        steps, fragment.capturing = fragment.capturing, None
        if event.flaw:  # what it would hand over was computed from what is corrupt
            fragment.overwritten_tokens += steps.tokens
            fragment.trained_on.clear()
            if fragment.capturing_for != UNASKED and self._member.joined:
                actions.append(Send(to=AGGREGATOR, message=Nothing(round_id=fragment.capturing_for, fragment_id=p)))
            return
        fragment.corruptions = 0
        if not self._member.joined:
            return  # lost its membership meanwhile
        contribution = Contribution(
            round_id=fragment.capturing_for,
            fragment_id=p,
            steps=steps,
            trained_on=fragment.take_trained_on(),
            data=self._trail.data_of(steps.from_step, steps.to_step),
            hosts=event.hosts,
            places=event.places,
            payload=event.payload,
        )
        assert training.manifest is not None
        self._trail.forget(min(training.fragments[q].undescribed_from for q in training.manifest.moving))
        pending = Pending(contribution, self._pauses(p), sent_at_s=now_s, epoch=fragment.epoch)
        pending.backoff.tried(now_s)
        fragment.outstanding[(steps.from_step, steps.to_step)] = pending
        actions.append(Send(to=AGGREGATOR, message=contribution))

    # --- what becomes of them ---------------------------------------------------------------------------------

    def resolve(
        self, resolution: Resolution, epoch: int, now_s: float, actions: list[Action], carried: Carried | None = None
    ) -> bool:
        """Takes in the fate of a contribution; returns whether it is refused for good.

        ``epoch`` is that of the aggregator which says so; ``carried`` is what the bulk connection has, if known: what
        it still holds is not missing.
        """
        fragment = self._training.fragments.get(resolution.fragment_id)
        key = (resolution.from_step, resolution.to_step)
        pending = fragment.outstanding.get(key) if fragment is not None else None
        if fragment is None or pending is None:
            return False
        succeeded = epoch > pending.epoch  # what became of it under an earlier leader says nothing of the link
        pending.epoch = max(pending.epoch, epoch)
        pending.sent_once = pending.sent_once and not succeeded
        match resolution.fate:
            case Fate.WAITING:
                self._arrived(pending, now_s)
                pending.backoff = self._pauses(resolution.fragment_id)
                pending.backoff.tried(now_s)
                pending.backoff.left()
            case Fate.MERGED:
                self._arrived(pending, now_s)
                del fragment.outstanding[key]
                self.fates[Fate.MERGED] += 1
            case Fate.UNKNOWN | Fate.RETRY:
                # What had arrived went with an aggregator's memory, so the journey of the next copy can be measured.
                had, pending.arrived = pending.arrived, False
                if succeeded and resolution.fate is Fate.UNKNOWN:
                    pending.backoff.unheard(now_s)
                if pending.backoff.due(now_s, carried):
                    excused = pending.backoff.excused or resolution.fate is Fate.RETRY  # it was full: not the link
                    pending.backoff.tried(now_s)
                    pending.sent_at_s, pending.sent_once = now_s, had
                    if not excused:
                        self._patience.in_vain(pending.backoff)
                    actions.append(Send(to=AGGREGATOR, message=pending.message))
            case Fate.REFUSED:
                del fragment.outstanding[key]
                self.fates[Fate.REFUSED] += 1
                facts = {
                    "fragment": resolution.fragment_id,
                    "from_step": resolution.from_step,
                    "to_step": resolution.to_step,
                    "reason": str(resolution.reason),
                    "detail": resolution.detail,
                }
                actions.append(Note(name="contribution.refused", fields=facts))
                return True
            case _:
                assert_never(resolution.fate)
        return False

    def _pauses(self, p: int) -> Backoff:
        """Returns those before a contribution to a fragment is sent again."""
        assert self._training.manifest is not None
        return self._patience.backoff(4 * self._training.manifest.sizes[p])

    def _arrived(self, pending: Pending, now_s: float) -> None:
        """Takes note that the aggregator has it; measures a journey that needed no second attempt, once."""
        pending.arrived = True
        if pending.sent_once:
            pending.sent_once = False
            self._patience.took(now_s - pending.sent_at_s)

    def merged(self, version: Version) -> None:
        """Takes from a version the fates of this life's contributions."""
        outstanding = self._training.fragments[version.fragment_id].outstanding
        for merged in version.contributions:
            if (merged.island_id, merged.incarnation) == (self._member.island_id, self._member.incarnation):
                known = outstanding.pop((merged.steps.from_step, merged.steps.to_step), None)
                self.fates[Fate.MERGED] += known is not None

    def due_again(self, now_s: float) -> None:
        """Marks the contributions in transit as possibly lost: they are sent again once they are known to be."""
        for fragment in self._training.fragments.values():
            fragment.seed = None
            for pending in fragment.outstanding.values():
                pending.backoff.lost(now_s)
