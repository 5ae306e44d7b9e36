"""The plans of one host: announced by the communication, carried out by the training thread. Shell.

:class:`islands.hosts.gate.Gate` has the rules for plans of a training that goes on. While it stands still, before the
first step and after the last one, there is nothing to agree about: plans are carried out in the order they come in.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable

from broker.wire.errors import ConfigError
from islands.hosts.gate import Gate
from islands.hosts.messages import Plan
from islands.multihost.loss import end_at_exit, end_if_uncaught, uncaught
from islands.protocol.fleet import Progress
from islands.session.exchange import Batch, Exchange, Install

#: How long the training thread sleeps between two looks, where a decision is late.
LOOK_EVERY_S = 0.0002
#: While it waits for what takes longer: how often it looks for signals.
SIGNALS_EVERY_S = 0.2
#: The boundary of a training that has stopped: behind every step.
NEVER = 1 << 62


class Plans:
    """One host's part in what the hosts of its island agree on (:class:`islands.session.exchange.Agreed`).

    Args:
        exchange: Of this host's two threads.
        speaks: Whether this host is the speaker.

    Attributes:
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
        self._gate: Gate[Plan] = Gate(0)
        self._placed: dict[tuple[int, int], Install] = {}
        self._standing: deque[Plan] = deque()
        self._arrived_at = 0

    # --- the communication thread -----------------------------------------------------------------------------

    def begin(self, step: int) -> None:
        """Training will begin after this step; before it has begun."""
        self._gate.entered = self.passed = self._arrived_at = step

    def placed(self, install: Install) -> None:
        """A version is placed: a plan may name it."""
        self._placed[install.fragment_id, install.fragment_version] = install

    def promise(self, number: int, step: int, plan: Plan) -> bool:
        """Promises to stop at the boundary after ``step``; False: training is too far."""
        return self._gate.promise(number, step, plan)

    def decide(self, number: int, *, fixed: bool) -> None:
        """The plan is carried out on every host, or on none."""
        self._gate.decide(number, fixed=fixed)

    def stand(self, plan: Plan) -> None:
        """Has a plan carried out by a training that stands still."""
        self._standing.append(plan)
        self._exchange.news.set()

    @property
    def ready(self) -> bool:
        """Whether a plan for a training that stands still waits to be carried out."""
        return bool(self._standing)

    # --- the training thread ----------------------------------------------------------------------------------

    def arrive(self, step: int) -> bool:
        """See :class:`islands.session.exchange.Agreed`."""
        self._arrived_at = step
        if self._gate.enter(step):
            while self._gate.undecided:
                if self._exchange.error is not None:
                    raise self._exchange.error
                time.sleep(LOOK_EVERY_S)
            plan = self._gate.take()
            if plan is not None:
                self.carried = self._gate.number
                self._show(plan)
                return True
        self.passed = step
        return False

    def wait_for_next(self, check: Callable[[], None]) -> None:
        """See :class:`islands.session.exchange.Agreed`."""
        while not self.next():
            if self._exchange.error is not None:
                raise self._exchange.error
            check()
            self._exchange.news.wait(SIGNALS_EVERY_S)
            self._exchange.news.clear()

    def next(self) -> bool:
        """See :class:`islands.session.exchange.Agreed`."""
        if not self._standing:
            return False
        self._show(self._standing.popleft())
        return True

    def carried_out(self) -> None:
        """See :class:`islands.session.exchange.Agreed`."""
        due = self._exchange.due
        due.watched, due.snapshot_wanted = frozenset(), False
        self.passed = NEVER if self.stopped else self._arrived_at
        self._exchange.wake()

    def stop(self) -> None:
        """See :class:`islands.session.exchange.Agreed`."""
        self.stopped = True
        self._gate.enter(NEVER)

    def refused(self, error: ConfigError) -> None:
        """See :class:`islands.session.exchange.Agreed`."""
        end_if_uncaught(error, last=self.speaks)

    def break_off(self, leave: Callable[[], None], *, ending: bool) -> None:
        """See :class:`islands.session.exchange.Agreed`."""
        error = uncaught() if ending else sys.exception()
        self.broken_off, self.mistake = True, error if isinstance(error, ConfigError) else None
        leave()
        # What another host's mistake has done here may be an error of a collective.
        end_at_exit(self.mistake or self._exchange.error, last=self.speaks, ending=ending)

    def _show(self, plan: Plan) -> None:
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
