"""A host's promise to stop before a step until the plan for it is decided. Pure.

The speaker (:mod:`islands.agreement.speaker_rules`) proposes a plan for the boundary after some step. A host whose
training has not come there yet promises to stop at that boundary until the plan is decided, and keeps the promise on
both threads:

* the communication thread writes the step down first, and then looks how far training is;
* the training thread writes down how far it is first, and then looks whether a step is written down.

So at least one of them sees the other. If training was there already, the promise is withdrawn and the vote is no. In
practice nobody waits: plans are made some steps ahead, and decided long before training comes there.
"""

from __future__ import annotations

from enum import StrEnum

from broker.base.transitions import Staged, Transitions
from islands.agreement.messages import Plan


class Stage(StrEnum):
    """The stage of a host's gate."""

    OPEN = "open"
    PROMISED = "promised"
    FIXED = "fixed"


STAGES = Transitions(
    "the gate of a host",
    Stage.OPEN,
    {
        Stage.OPEN: {"promise": Stage.PROMISED},
        Stage.PROMISED: {"withdraw": Stage.OPEN, "abandon": Stage.OPEN, "fix": Stage.FIXED},
        Stage.FIXED: {"carry out": Stage.OPEN},
    },
)


class Gate:
    """Holds one plan at a time, and the step boundary at which it is carried out.

    Attributes:
        entered: The last boundary that training has come to.
        step: The boundary at which it stops until the plan there is decided; None: at none.
        number: The number of the last proposal heard.
    """

    def __init__(self, entered: int) -> None:
        self.entered = entered
        self.step: int | None = None
        self.number = 0
        self._doing = Staged(STAGES)
        self._plan: Plan | None = None

    # --- the communication thread -----------------------------------------------------------------------------

    def promise(self, number: int, step: int, plan: Plan) -> bool:
        """Promises to stop at the boundary after ``step``; False: training is there already, or beyond."""
        self._doing.take("promise")
        self.number, self._plan = number, plan
        self.step = step  # from here on training stops there: only now is it asked where it is
        if self.entered >= step:
            self._end("withdraw")
            return False
        return True

    def decide(self, number: int, *, fixed: bool) -> None:
        """Takes the decision on the plan: every host carries it out, or none does."""
        if number != self.number or self._doing.stage is not Stage.PROMISED:
            return  # it was this host that said no
        if fixed:
            self._doing.take("fix")
        else:
            self._end("abandon")

    # --- the training thread ----------------------------------------------------------------------------------

    def enter(self, step: int) -> bool:
        """Notes that training is at the boundary after ``step``; returns whether a plan may be due there."""
        self.entered = step
        return self.step is not None and step >= self.step

    @property
    def undecided(self) -> bool:
        """Returns True if training must wait at its boundary, for the decision on a plan."""
        return self.step is not None and self.entered >= self.step and self._doing.stage is Stage.PROMISED

    def take(self) -> Plan | None:
        """Returns the plan to carry out at this boundary, once; None if there is none."""
        if self.step is None or self.entered < self.step or self._doing.stage is not Stage.FIXED:
            return None
        plan = self._plan
        self._end("carry out")
        return plan

    def _end(self, event: str) -> None:
        self._plan, self.step = None, None
        self._doing.take(event)
