"""Worlds in which anything may happen in any order: how a test lets it happen, in brief runs and in long ones.

A *world* is a model of whatever is tested, with one method for each thing that may happen; it checks what must hold as
it happens. ``step(world, kind, a, b)`` lets one happen: the kind says what, two numbers from 0 to :data:`MOST` say to
whom and how. ``heal()`` of a world brings everything to a good end, and checks what must hold then.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol, TypeVar
from unittest import TestCase

from hypothesis import HealthCheck
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from tests.profiles import examples

#: The two numbers of a step are at most that: more than there is to choose from.
MOST = 60


class World(Protocol):
    """What both kinds of run ask of a world, beside the steps."""

    def heal(self) -> None:
        """Ends the run, and checks what must hold at the end."""


W = TypeVar("W", bound=World)
Step = Callable[[W, str, int, int], None]


def brief_runs(make: Callable[[], W], step: Step[W], kinds: Iterable[str], *, runs: int, steps: int) -> type[TestCase]:
    """Returns the test of some runs of at most so many steps, which Hypothesis shortens where one fails."""

    class Machine(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            self.world = make()

        @rule(kind=st.sampled_from(list(kinds)), a=st.integers(0, MOST), b=st.integers(0, MOST))
        def something_happens(self, kind: str, a: int, b: int) -> None:
            step(self.world, kind, a, b)

        def teardown(self) -> None:
            self.world.heal()

    Machine.TestCase.settings = examples(
        runs, stateful_step_count=steps, suppress_health_check=list(HealthCheck), derandomize=True
    )
    return Machine.TestCase


def long_run(world: W, step: Step[W], weights: Mapping[str, int], *, seed: int, steps: int) -> W:
    """Lets so many steps happen in a world, each kind as likely as its weight says, and heals it; returns it."""
    source = random.Random(seed)
    for kind in source.choices(list(weights), list(weights.values()), k=steps):
        step(world, kind, source.randrange(MOST + 1), source.randrange(MOST + 1))
    world.heal()
    return world
