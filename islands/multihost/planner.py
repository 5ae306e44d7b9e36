"""The plans of an island of several hosts: what is in them, and when the next one is made. Shell.

What the core has for a training thread stands in :class:`islands.session.exchange.Due`, as on an island of one host.
Here plans are made of it: one after the other (:class:`islands.hosts.speaker.Speaker`), or at once while training
stands still.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace

from islands.hosts import messages as m
from islands.hosts.speaker import Speaker, Stage, Vote
from islands.multihost.plans import NEVER, Plans
from islands.protocol.events import Joined
from islands.session.exchange import Batch, Due, Exchange

#: A plan of nothing but the fleet's progress would hold up what falls due meanwhile: after so many steps without one.
#: In between, each host reckons on from what it was told.
PROGRESS_EVERY = 16


class Planner:
    """The speaker's plans.

    Args:
        hosts: How many there are.
        due: What the core has for the training threads.
        plans: Of the speaker's own training thread.
        exchange: Of the speaker's two threads.
        tell: Says something to all other hosts.
    """

    def __init__(
        self, hosts: int, due: Due, plans: Plans, exchange: Exchange, tell: Callable[[m.HostMessage], None]
    ) -> None:
        self._due, self._plans, self._exchange, self._tell = due, plans, exchange, tell
        self._speaker: Speaker[m.Plan] = Speaker(hosts, 0, time.monotonic())
        self._num_fragments = 0
        self._fixed = m.Plan()  # the last plan that will be carried out
        self._proposed, self._proposed_at = m.Plan(), 0
        self._on_its_way: tuple[int, m.Plan, list[Batch]] | None = None  # number, plan before it, what it installs

    def begin(self, joined: Joined) -> None:
        """The island is a member: training begins there."""
        self._num_fragments, self._proposed_at = len(joined.manifest), joined.start_step
        self._plans.begin(joined.start_step)

    def heard(self, host: int, at: m.HostAt) -> None:
        """Another host has come so far."""
        self._speaker.heard(host, NEVER if at.stopped else at.step, time.monotonic())

    def silent(self) -> tuple[int, ...]:
        """Returns the hosts that have said nothing for too long."""
        now_s = time.monotonic()
        self._speaker.heard(0, self._plans.passed, now_s)
        return self._speaker.lost(now_s)

    def voted(self, host: int, vote: Vote) -> None:
        """A host has answered to a proposal."""
        decision = self._speaker.voted(host, vote, time.monotonic())
        if decision is None:
            return
        if decision.fixed:
            before = self._fixed
            self._on_its_way = decision.number, before, self._take_out(self._proposed)
        self._plans.decide(decision.number, fixed=decision.fixed)
        self._tell(m.Decision(number=decision.number, fixed=decision.fixed))

    def advance(self, boundaries: int, *, all_stopped: bool) -> None:
        """Makes the next plan, if there is something to do and all hosts are past the last one.

        Args:
            boundaries: How many the core has seen.
            all_stopped: Every other host has stopped.
        """
        now_s = time.monotonic()
        self._speaker.heard(0, self._plans.passed, now_s)
        begun = bool(boundaries) or self._plans.ready
        if not begun or (self._plans.stopped and all_stopped):
            self._take_back()
            self._stand(boundaries, begun=begun)
        elif boundaries and self._speaker.stage is Stage.IDLE and not self._plans.stopped:
            plan = self._next()
            if self._is_due(plan):
                self._propose(plan, now_s)

    def _is_due(self, plan: m.Plan) -> bool:
        """Returns whether a plan is worth the steps that it takes."""
        known = self._known
        if self._plans.passed < self._proposed_at + PROGRESS_EVERY:
            known = replace(known, trained_tokens=plan.trained_tokens, own_tokens=plan.own_tokens, ratio=plan.ratio)
        return bool(plan.installs or plan.copies or plan.snapshot) or plan != known

    @property
    def _known(self) -> m.Plan:
        """The last plan, without what is done once."""
        return replace(self._fixed, installs=(), fresh_optimizer=False, copies=(), snapshot=False)

    def _next(self) -> m.Plan:
        """Returns a plan of all that is due."""
        due, progress = self._due, self._due.progress
        return m.Plan(
            installs=tuple(
                m.Installation(fragment_id=install.fragment_id, fragment_version=install.fragment_version)
                for batch in due.ready
                for install in batch.installs
            ),
            fresh_optimizer=any(batch.fresh_optimizer for batch in due.ready),
            copies=tuple(sorted(due.watched)),
            snapshot=due.snapshot_wanted,
            done=due.done,
            life=due.life,
            blocks=due.blocks,
            trained_tokens=progress.trained_tokens,
            own_tokens=progress.own_tokens,
            ratio=progress.ratio,
        )

    def _stand(self, boundaries: int, *, begun: bool) -> None:
        """Has all hosts carry out what is due at once; before the first step, when every fragment is there."""
        plan = replace(self._next(), copies=(), snapshot=False)
        if begun:
            wanted = bool(plan.installs) or plan != self._known
        else:
            wanted = len({each.fragment_id for each in plan.installs}) == self._num_fragments
        if wanted:
            self._take_out(plan)
            self._tell(m.Standing(after=boundaries, plan=plan))
            self._plans.stand(plan)

    def _propose(self, plan: m.Plan, now_s: float) -> None:
        proposal = self._speaker.propose(plan, self._exchange.step_time_s, now_s)
        self._proposed, self._proposed_at = plan, self._plans.passed
        self._tell(m.Proposal(number=proposal.number, step=proposal.step, plan=plan))
        promised = self._plans.promise(proposal.number, proposal.step, plan)
        self.voted(0, Vote(number=proposal.number, promised=promised, at=self._plans.passed))

    def _take_back(self) -> None:
        """Makes due again what was planned for a step that training has not come to: it stopped before."""
        if self._on_its_way is not None:
            number, before, batches = self._on_its_way
            if number > self._plans.carried:
                self._fixed = before
                self._due.ready.extendleft(reversed(batches))
            self._on_its_way = None

    def _take_out(self, plan: m.Plan) -> list[Batch]:
        """A plan will be carried out: what is in it is not due any more. Returns what it installs."""
        self._fixed, due = plan, self._due
        taken = {(each.fragment_id, each.fragment_version) for each in plan.installs}
        batches, due.ready = due.ready, deque()
        planned: list[Batch] = []
        for batch in batches:
            is_in = taken.issuperset((each.fragment_id, each.fragment_version) for each in batch.installs)
            (planned if is_in else due.ready).append(batch)
        if plan.snapshot:
            due.snapshot_wanted = False
        return planned
