"""One fragment at an island: its version in the parameters, and the steps handed over."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from broker.base.transitions import Staged, Transitions
from broker.routing.resending import Backoff
from broker.wire.messages import UNASKED, Contribution, TrainedOn, Version
from broker.wire.ranges import StepRange


class Stage(StrEnum):
    """The stage of a fragment at an island."""

    IDLE = "idle"
    CAPTURING = "capturing"
    PREPARING = "preparing"
    READY = "ready"


#: It does one thing at a time: while a version is prepared and waits for a boundary, no copy is captured, so the shift
#: that was prepared stays right.
STAGES = Transitions(
    "a fragment of the island",
    Stage.IDLE,
    {
        Stage.IDLE: {"capture": Stage.CAPTURING, "prepare": Stage.PREPARING},
        Stage.CAPTURING: {"captured": Stage.IDLE},
        Stage.PREPARING: {"prepared": Stage.READY},
        Stage.READY: {"installed": Stage.IDLE},
    },
)


@dataclass(frozen=True, slots=True)
class Point:
    """A moment in an island's training: its two counters."""

    step: int
    tokens: int


@dataclass(slots=True)
class Pending:
    """A contribution whose fate is not known yet; its bytes are kept until it is."""

    message: Contribution
    backoff: Backoff
    sent_at_s: float
    sent_once: bool = True  #: since the aggregator is known to lack it: its journey can be measured
    arrived: bool = False  #: the aggregator is known to have it
    epoch: int = 0  #: of the aggregator that it was sent to, or that spoke of it last


@dataclass(slots=True)
class Fragment:
    """One fragment of the local parameters."""

    handed: Point  #: everything before was handed over, or dropped
    doing: Staged[Stage] = field(default_factory=lambda: Staged(STAGES))
    version: int = -1  #: in the local parameters
    trained_on: list[TrainedOn] = field(default_factory=list)  #: of the steps since ``handed``, up to ``counted``
    counted: int = 0  #: inner step up to which ``trained_on`` counts
    copy: Point | None = None
    capturing: StepRange | None = None
    incoming: Version | None = None  #: while PREPARING or READY
    incoming_keep: float = 1.0
    newer: Version | None = None  #: arrived meanwhile
    latest: Version | None = None  #: the one in the local parameters, where it is kept whole to add differences to
    without_base: bool = False  #: differences cannot be added here: a whole version is wanted
    overwrite: bool = False  #: adopt the next version with keep = 0
    corrupted: bool = False  #: what is here is not what was written: no version, until one has overwritten it
    corruptions: int = 0  #: since the last contribution
    epoch: int = 0  #: of the aggregator that leads it, as last heard
    asked: int | None = None  #: the open round to answer
    rounds_since: int = 0  #: begun since the last one that it took part in
    capturing_for: int = 0  #: the round that what is captured answers; 0: none, it is handed over unasked
    flushing: bool = False  #: rounds of it are the last ones
    answered: int = 0  #: the last round answered
    nothing_at_s: float | None = None  #: when the last answer was "nothing"
    outstanding: dict[tuple[int, int], Pending] = field(default_factory=dict)
    overwritten_tokens: int = 0
    exact_at: Point | None = None  #: the last boundary at which it became the global parameters, to the bit
    seed: Backoff | None = None  #: since version 0 of it was asked for
    seeding: bool = False

    @property
    def stage(self) -> Stage:
        """Returns its present stage."""
        return self.doing.stage

    @property
    def newest(self) -> int:
        """The newest version that has arrived; -1 asks for whatever there is."""
        if self.overwrite and self.incoming is None and self.newer is None:
            return -1
        newest = self.newer or self.incoming
        return self.version if newest is None else max(self.version, newest.fragment_version)

    def replace_progress(self) -> None:
        """Orders the global parameters in place of the local ones: the present version, or else a newer one."""
        self.overwrite = True
        if self.newer is None and self.incoming is None:
            self.newer = self.latest

    @property
    def congested(self) -> bool:
        """Whether to hand over nothing more for now: an earlier contribution is not known to have arrived.

        On a link that is blocked, or too slow, captures would pile up here, and old ones would hold up new ones until
        all of them are stale. Steps that are not handed over yet lose nothing by waiting: the next range has them. In
        the flush there is no next one.
        """
        return not self.flushing and any(not pending.arrived for pending in self.outstanding.values())

    @property
    def awaited(self) -> bool:
        """True if a copy could be handed over: none is being encoded, none sent answers the next round.

        What came too late for an earlier round does not: the open one waits for another contribution.
        """
        if self.capturing is not None or self.unasked:
            return False
        return not self.outstanding or self.asked not in (None, *self._rounds_sent)

    @property
    def unasked(self) -> bool:
        """True while a contribution handed over unasked is not merged: it answers the next round."""
        return UNASKED in self._rounds_sent

    @property
    def _rounds_sent(self) -> set[int]:
        return {pending.message.round_id for pending in self.outstanding.values()}

    @property
    def undescribed_from(self) -> int:
        """The first inner step that a contribution may still have to say something of."""
        return self.handed.step if self.capturing is None else self.capturing.from_step

    @property
    def awaits_overwrite(self) -> bool:
        """Whether the local parameters of this fragment are still to be replaced by the global ones."""
        return self.overwrite or (self.incoming is not None and self.incoming_keep == 0)

    def answerable(self, at: Point) -> bool:
        """Returns whether an open round can be answered now, ``at`` being the last boundary.

        A copy that was handed over already says nothing of the steps since: answering "nothing" would be a lie, and
        cost this island the round. The next boundary brings a new copy.
        """
        if self.stage is not Stage.IDLE or self.copy is None:
            return False
        return self.overwrite or self.copy.step > self.handed.step or self.handed.step >= at.step

    def count(self, step: int) -> None:
        """Books the steps up to ``step`` on the version now in the local parameters."""
        if step > self.counted:
            self.trained_on.append(TrainedOn(fragment_version=self.version, steps=step - self.counted))
            self.counted = step

    def begin_again(self, start: Point) -> None:
        """Starts the books of a new life at ``start``; an earlier life's drops and hand-overs are in its own."""
        self.overwritten_tokens = 0
        self.handed = max(self.handed, start, key=lambda point: point.step)

    def lost_tokens(self, at: Point) -> int:
        """Tokens up to ``at`` that no contribution holds, if the process ends now."""
        captured = 0 if self.capturing is None else self.capturing.tokens
        return at.tokens - self.handed.tokens + captured

    def resume(self, at: Point, overwritten_tokens: int) -> None:
        """Goes on with the books of a life, all of whose steps up to ``at`` were handed over or dropped."""
        self.handed, self.counted, self.overwritten_tokens = at, at.step, overwritten_tokens

    def drop(self, at: Point) -> None:
        """Gives up the steps not handed over before ``at``."""
        self.overwritten_tokens += max(0, at.tokens - self.handed.tokens)  # a life may begin beyond what was trained
        self.handed, self.counted = at, at.step
        self.trained_on.clear()

    def take_trained_on(self) -> tuple[TrainedOn, ...]:
        """Returns and forgets the versions that steps since ``handed`` ran on, equal neighbours added up."""
        joined: list[TrainedOn] = []
        for part in self.trained_on:
            if joined and joined[-1].fragment_version == part.fragment_version:
                part = TrainedOn(fragment_version=part.fragment_version, steps=joined.pop().steps + part.steps)
            joined.append(part)
        self.trained_on.clear()
        return tuple(joined)
