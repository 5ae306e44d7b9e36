"""A merge rule of one's own in virtual time: its state through crashes and failovers, and what it does to a liar."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from aggregator.interface.merge_rule import MergeRound, RoundRule
from aggregator.process import leader
from tests.sim.counting import run as run_counting
from tests.sim.packed import packed_plan
from tests.sim.test_replay import Shadowed
from tests.sim.trust import TOKENS, Candidate, run


class Counting(RoundRule):
    """Counts the versions of a fragment, and leaves the merge as it was."""

    def factors(self, round: MergeRound, state: Any) -> tuple[list[float], Any]:
        """See :class:`RoundRule`."""
        return [1.0] * len(round.contributions), 1 + (state or 0)


@pytest.mark.rotating(3)
@pytest.mark.parametrize("seed", range(10, 16))
def test_a_state_is_that_of_its_version_whatever_happens_in_a_run(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each commit follows from the one before it: a merge that a crash lost has not been counted."""
    monkeypatch.setattr(leader, "Aggregator", Shadowed)
    plan = packed_plan(seed)
    merge = f"{Counting.__module__}:{Counting.__name__}"
    simulation = run_counting(replace(plan, config=replace(plan.config, merge=merge)))
    commits = {p: commit for leader in simulation.leaders.values() for p, commit in leader.commits().items()}
    counted = {p: commit.ledger["rule"]["state"] for p, commit in commits.items() if "rule" in commit.ledger}
    assert counted
    assert counted == {p: commits[p].fragment_version for p in counted}


@pytest.mark.full("trains for some seconds")
def test_under_the_geometric_median_a_long_liar_weighs_less_and_honest_islands_are_left_alone() -> None:
    median = Candidate(rule="examples.geometric_median:GeometricMedian", trust=False)
    found, by_tokens = (run("two-constant-3", 0, 200, candidate=candidate) for candidate in (median, TOKENS))
    assert not found.accused
    assert found.weight < 0.9 < by_tokens.weight
    assert found.loss < by_tokens.loss
