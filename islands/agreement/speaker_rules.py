"""The speaker's side of plans: all hosts do the same at the same step. Pure.

An island of several hosts runs one training step on all of them together. What happens between two steps (a version is
installed, a fragment is copied, the data change, training ends) must happen between the same two on every host, or they
would train on different parameters. No host may wait for another one inside a step, and training threads call no
collective operation of ours. So the speaker proposes a plan some steps ahead::

    propose(number, step, plan)    to every host: it promises to stop there (``gate_rules``), or is too far
    decide(number, fixed)          to every host, when all have answered

A plan that a host refuses is carried out nowhere, and proposed again for a later step. How far ahead follows what
answers take and how long steps are; each refusal adds steps to it, and plans that went well take them away again.
"""

from __future__ import annotations

import math
from enum import StrEnum

from broker.base.transitions import Staged, Transitions
from islands.agreement.messages import Answer, Decision, Plan, Proposal

#: Margin in steps between a proposal and its boundary, beyond the time of answers: least and most.
LEAST_MARGIN, MOST_MARGIN = 2, 256
#: Successful plans in a row after which the margin shrinks by a step.
CALM = 8
#: Weight of the old value in the moving average of answer times.
MEMORY = 0.8
#: Seconds without a word from a host after which it counts as lost.
LOST_S = 5.0
#: Step time assumed until one is measured, in seconds.
UNKNOWN_STEP_S = 0.05


class Stage(StrEnum):
    """The stage of the speaker's plan."""

    IDLE = "idle"
    PROPOSED = "proposed"
    FIXED = "fixed"


STAGES = Transitions(
    "the plan of a speaker",
    Stage.IDLE,
    {
        Stage.IDLE: {"propose": Stage.PROPOSED},
        Stage.PROPOSED: {"fix": Stage.FIXED, "abandon": Stage.IDLE},
        Stage.FIXED: {"carried out": Stage.IDLE},
    },
)


class Speaker:
    """Proposes and decides the plans of one island, one at a time.

    Args:
        hosts: How many there are; the speaker is host 0 and votes like the others.
        at: The boundary at which all of them begin.
        now_s: The time.
    """

    def __init__(self, hosts: int, at: int, now_s: float) -> None:
        self._doing = Staged(STAGES)
        self._heard_s = dict.fromkeys(range(hosts), now_s)
        self._at = dict.fromkeys(range(hosts), at)  # the last boundary of each, as last said
        self._number = 0
        self._step = at
        self._proposed_s = now_s
        self._votes: dict[int, bool] = {}
        self._answer_s = 0.0
        self._margin, self._calm = LEAST_MARGIN, 0

    @property
    def stage(self) -> Stage:
        """Returns the stage of the current plan."""
        return self._doing.stage

    def propose(self, plan: Plan, step_time_s: float | None, now_s: float) -> Proposal:
        """Returns the proposal of a plan, to send to every host; only one plan may be under way.

        Args:
            plan: The plan to propose.
            step_time_s: Seconds per inner step; None while that is not known.
            now_s: The time.
        """
        self._doing.take("propose")
        step_s = max(step_time_s or UNKNOWN_STEP_S, 1e-6)
        # Where the foremost host will be when all answers and the decision have arrived.
        now_at = max(at + math.floor((now_s - self._heard_s[host]) / step_s) for host, at in self._at.items())
        farthest = max(self._at.values()) + MOST_MARGIN  # a host that says nothing is not running away
        self._number += 1
        self._votes, self._proposed_s = {}, now_s
        self._step = min(now_at, farthest) + math.ceil(2 * self._answer_s / step_s) + self._margin
        return Proposal(number=self._number, step=self._step, plan=plan)

    def voted(self, host: int, answer: Answer, now_s: float) -> Decision | None:
        """Takes a host's answer; returns the decision once all have come."""
        self.heard(host, answer.step, now_s)
        if answer.number != self._number or self.stage is not Stage.PROPOSED:
            return None
        self._votes[host] = answer.promised
        if len(self._votes) < len(self._at):
            return None
        self._answer_s = MEMORY * self._answer_s + (1 - MEMORY) * (now_s - self._proposed_s)
        fixed = all(self._votes.values())
        if fixed:
            self._calm += 1
            if self._calm >= CALM:
                self._margin, self._calm = max(LEAST_MARGIN, self._margin - 1), 0
        else:
            self._margin, self._calm = min(MOST_MARGIN, 2 * self._margin), 0
        self._doing.take("fix" if fixed else "abandon")
        return Decision(number=self._number, fixed=fixed)

    def heard(self, host: int, at: int, now_s: float) -> None:
        """Notes that a host is at the boundary after step ``at``; ends the plan once all are past its step."""
        self._heard_s[host] = now_s
        self._at[host] = max(self._at[host], at)
        if self.stage is Stage.FIXED and min(self._at.values()) >= self._step:
            self._doing.take("carried out")

    def lost(self, now_s: float) -> tuple[int, ...]:
        """Returns the hosts that were silent for too long; the island is lost with them."""
        return tuple(host for host, heard_s in self._heard_s.items() if now_s - heard_s > LOST_S)
