"""The plans of several hosts: the speaker makes them, each training thread carries them out. Shell.

:mod:`islands.agreement` has the rules for plans of a training that goes on. While it stands still, before the first
step and after the last one, there is nothing to agree about: plans are carried out in the order they come in.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable
from dataclasses import replace

from broker.base.errors import ConfigError
from broker.process import clocks
from islands.agreement import messages as m
from islands.agreement.gate_rules import Gate
from islands.agreement.speaker_rules import Speaker, Stage
from islands.hosts.loss import end_at_exit, end_if_uncaught, uncaught
from islands.protocol.events import Joined
from islands.protocol.fleet import Progress
from islands.session.exchange import Batch, Due, Exchange, Install

#: How long the training thread sleeps between two looks, where a decision is late.
LOOK_EVERY_S = 0.0002
#: The boundary of a training that has stopped: behind every step.
NEVER = 1 << 62
#: A plan of nothing but the fleet's progress would hold up what falls due meanwhile: after this many steps without one.
#: In between, each host reckons on from what it was told.
PROGRESS_EVERY = 16


class Plans:
    """One host's part in what the hosts agree on: it decides about ``due`` of its training thread.

    Args:
        exchange: Of this host's two threads.
        speaks: Whether this host is the speaker.

    Attributes:
        gate: What it has promised, and where training is.
        passed: The last boundary that training has left behind.
        stopped: It has stopped.
        carried: The number of the last proposal that was carried out.
        broken_off: This host falls out in the middle of training.
        mistake: The error that made it, where a setting is wrong.
    """

    def __init__(self, exchange: Exchange, *, speaks: bool) -> None:
        self.speaks = speaks
        self.passed, self.carried, self.stopped, self.broken_off = 0, 0, False, False
        self.mistake: ConfigError | None = None
        self._exchange = exchange
        self.gate = Gate(0)
        self._placed: dict[tuple[int, int], Install] = {}
        self._standing: deque[m.Plan] = deque()
        self._arrived_at = 0

    # --- the communication thread -----------------------------------------------------------------------------

    def begin(self, step: int) -> None:
        """Sets the step after which training will begin."""
        self.gate.entered = self.passed = self._arrived_at = step

    def placed(self, install: Install) -> None:
        """Takes a version that is placed: a plan may name it from now on."""
        self._placed[install.fragment_id, install.fragment_version] = install

    def stand(self, plan: m.Plan) -> None:
        """Has a plan carried out by a training that stands still."""
        self._standing.append(plan)
        self._exchange.news.set()

    @property
    def ready(self) -> bool:
        """Whether a plan for a training that stands still waits to be carried out."""
        return bool(self._standing)

    # --- the training thread ----------------------------------------------------------------------------------

    def arrive(self, step: int) -> bool:
        """Returns True if a plan for the boundary after ``step`` is now in ``due``; training is there.

        Waits, rarely, until the hosts have agreed. Raises what ends the island.
        """
        self._arrived_at = step
        if self.gate.enter(step):
            while self.gate.undecided:
                if self._exchange.error is not None:
                    raise self._exchange.error
                self._exchange.machine.sleep(LOOK_EVERY_S)
            plan = self.gate.take()
            if plan is not None:
                self.carried = self.gate.number
                self._show(plan)
                return True
        self.passed = step
        return False

    def wait_for_next(self, check: Callable[[], None]) -> None:
        """Waits, before the first step, for the plan that installs the first versions; ``check`` may raise."""
        while not self.next():
            self._exchange.wait(check)

    def next(self) -> bool:
        """Returns whether a plan for a training that stands still has come, now in ``due``."""
        if not self._standing:
            return False
        self._show(self._standing.popleft())
        return True

    def carried_out(self) -> None:
        """Notes that everything in ``due`` was done."""
        due = self._exchange.due
        due.watched, due.snapshot_wanted = frozenset(), False
        self.passed = NEVER if self.stopped else self._arrived_at
        self._exchange.wake()

    def stop(self) -> None:
        """Notes that no further step will be run."""
        self.stopped = True
        self.gate.enter(NEVER)

    def refused(self, error: ConfigError) -> None:
        """Has this process end with the status of an error of joining, if nobody catches it."""
        end_if_uncaught(error, last=self.speaks)

    def break_off(self, leave: Callable[[], None], *, ending: bool) -> None:
        """Leaves in mid-training, so that nothing at the end of this process waits for other hosts.

        Args:
            leave: Says goodbye.
            ending: That end has come.
        """
        error = uncaught() if ending else sys.exception()
        self.broken_off, self.mistake = True, error if isinstance(error, ConfigError) else None
        leave()
        # What another host's mistake has done here may be an error of a collective.
        end_at_exit(self.mistake or self._exchange.error, last=self.speaks, ending=ending)

    def _show(self, plan: m.Plan) -> None:
        due = self._exchange.due
        if plan.installs:
            installs = tuple(self._placed.pop((each.fragment_id, each.fragment_version)) for each in plan.installs)
            due.ready.append(Batch(installs=installs, fresh_optimizer=plan.fresh_optimizer))
        due.watched, due.snapshot_wanted = frozenset(plan.copies), plan.snapshot
        due.life, due.done = plan.life, plan.done
        if plan.blocks != due.blocks:
            due.blocks = plan.blocks
        progress = Progress(plan.trained_tokens, plan.own_tokens, plan.ratio)
        if progress != due.progress:
            due.progress = progress


class Planner:
    """The speaker's plans: what is in them, and when the next one is made.

    What the core has for a training thread stands in :class:`islands.session.exchange.Due`, as on an island of one
    host. Here plans are made of it: one after the other, or at once while training stands still.

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
        self._speaker = Speaker(hosts, 0, clocks.monotonic())
        self._num_fragments = 0
        self._fixed = m.Plan()  # the last plan that will be carried out
        self._proposed, self._proposed_at = m.Plan(), 0
        self._on_its_way: tuple[int, m.Plan, list[Batch]] | None = None  # number, plan before it, what it installs

    def begin(self, joined: Joined) -> None:
        """Begins the plans of a member of the run."""
        self._num_fragments, self._proposed_at = len(joined.manifest), joined.start_step
        self._plans.begin(joined.start_step)

    def heard(self, host: int, at: m.HostAt) -> None:
        """Notes how far another host has come."""
        self._speaker.heard(host, NEVER if at.stopped else at.step, clocks.monotonic())

    def silent(self) -> tuple[int, ...]:
        """Returns the hosts that have said nothing for too long."""
        now_s = clocks.monotonic()
        self._speaker.heard(0, self._plans.passed, now_s)
        return self._speaker.lost(now_s)

    def voted(self, host: int, answer: m.Answer) -> None:
        """Counts the answer of a host to a proposal, and tells the decision if there is one."""
        decision = self._speaker.voted(host, answer, clocks.monotonic())
        if decision is None:
            return
        if decision.fixed:
            before = self._fixed
            self._on_its_way = decision.number, before, self._take_out(self._proposed)
        self._plans.gate.decide(decision.number, fixed=decision.fixed)
        self._tell(decision)

    def advance(self, boundaries: int, *, all_stopped: bool) -> None:
        """Makes the next plan, if there is something to do and all hosts are past the last one.

        Args:
            boundaries: How many the core has seen.
            all_stopped: Every other host has stopped.
        """
        now_s = clocks.monotonic()
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
                m.Placed(fragment_id=install.fragment_id, fragment_version=install.fragment_version)
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
        self._tell(proposal)
        promised = self._plans.gate.promise(proposal.number, proposal.step, plan)
        self.voted(0, m.Answer(number=proposal.number, promised=promised, step=self._plans.passed))

    def _take_back(self) -> None:
        """Makes due again what was planned for a step that training has not come to: it stopped before."""
        if self._on_its_way is not None:
            number, before, batches = self._on_its_way
            if number > self._plans.carried:
                self._fixed = before
                self._due.ready.extendleft(reversed(batches))
            self._on_its_way = None

    def _take_out(self, plan: m.Plan) -> list[Batch]:
        """Takes a plan that will be carried out off what is due; returns what it installs."""
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
