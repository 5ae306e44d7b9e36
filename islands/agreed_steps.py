"""Boundaries of the steps of an island of several hosts: each does what all have agreed on. Shell."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from islands.arrays.tree import Tree
from islands.between_steps import BetweenSteps, wait_for_state
from islands.hosts.plans import Plans
from islands.interface.config import IslandConfig
from islands.session.array_work import ArrayWork
from islands.session.exchange import Exchange, StateFound
from islands.session.training_state import Needed, Position


class AgreedSteps(BetweenSteps):
    """The boundaries of the steps of one host.

    Args:
        array_work: Whose fragments are installed and copied.
        exchange: With the communication thread; the island is a member.
        plans: What the hosts agree on.
    """

    several = True

    def __init__(self, array_work: ArrayWork, exchange: Exchange, plans: Plans) -> None:
        super().__init__(array_work, exchange)
        self._plans = plans

    def beginning(
        self, needed: Needed, path: Path | None, config: IslandConfig, check: Callable[[], None]
    ) -> StateFound:
        """Returns the speaker's state, or waits for its word; returns when the first versions have come."""
        if self._plans.speaks:
            begun = super().beginning(needed, path, config, check)
        else:
            begun = self._exchange.begun = wait_for_state(self._exchange, needed, check)
        self._plans.wait_for_next(check)
        return begun

    def due(self, step: int, state: Any) -> bool:
        """Returns True if the boundary after ``step`` has work; waits until the hosts have agreed."""
        return self._plans.arrive(step) or super().due(step, state)

    def has_news(self, state: Any) -> bool:
        """Returns True if a plan for a training that stands still has come."""
        return self._plans.next() or super().has_news(state)

    def run(self, params: Tree, at: Position, state: tuple[Any, int | None] | None, *, stopped: bool = False) -> Tree:
        """Carries out the plan for this boundary; all else is as on one host."""
        if stopped and not self._plans.stopped:
            self._plans.stop()
        params = super().run(params, at, state, stopped=stopped)
        self._plans.carried_out()
        return params

    def fall_out(self, leave: Callable[[], None], *, ending: bool) -> None:
        """Leaves in the middle of training: no host can go on, nor wait for the others."""
        self._plans.break_off(leave, ending=ending)

    def _to_copy(self, step: int) -> frozenset[int]:
        return self._exchange.due.watched  # no step is ahead of its plan
