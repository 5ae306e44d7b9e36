"""Islands in lockstep: when they hand over, when they wait, and that one that dies holds up nobody for long."""

import pytest

from aggregator.interface.config import AggregatorConfig
from aggregator.rules.recipes import begun_with
from broker.base.errors import ConfigError
from broker.wire.messages import Pacing, Phase, Profile, Recipe
from islands.protocol.lockstep import Lockstep
from ops.virtual.plan import IslandPlan, SimulationPlan
from tests.sim.counting import TOKENS, run


def recipe(**changes):
    return Recipe(**{"pacing": Pacing.LOCKSTEP, "sync_interval": 6, "fragments": 3, **changes})


def test_fragments_are_handed_over_at_steps_of_their_own_and_their_versions_are_waited_for():
    lockstep, versions, seen = Lockstep(recipe(overlap=1), (0, 1, 2)), [0, 0, 0], []
    for step in range(1, 13):
        due = lockstep.due(step, versions)
        seen += [(step, p) for p in due]
        assert lockstep.holds(step, versions) == any(step > s for s, p in seen if versions[p] <= (s - 1) // 6)
        for s, p in seen:
            if step == s + 1:
                assert lockstep.holds(step, versions)
                versions[p] += 1
        assert not lockstep.holds(step, versions)
    assert seen == [(2, 0), (4, 1), (6, 2), (8, 0), (10, 1), (12, 2)]


def test_without_overlap_training_waits_at_the_hand_over_itself():
    lockstep = Lockstep(recipe(overlap=0, fragments=1), (0,))
    assert not lockstep.holds(5, [0])
    assert (lockstep.due(6, [0]), lockstep.holds(6, [0])) == ({0}, True)
    assert (lockstep.due(6, [1]), lockstep.holds(6, [1])) == (frozenset(), False)


def test_other_recipes_never_wait():
    lockstep = Lockstep(Recipe(), (0, 1))
    assert not any(lockstep.holds(step, [0, 0]) or lockstep.due(step, [0, 0]) for step in range(100))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"overlap": 6}, "overlap = 6: must be from 0 to below sync_interval = 6"),
        ({"pacing": Pacing.FIXED, "overlap": 0}, "overlap = 0: must be at least 1"),
        ({"mix": 1.0, "keep": 0.0}, "mix = 1.0"),
        ({"mix": 0.5}, "mix = 0.5: goes with keep = 0, not with keep = 1"),
    ],
)
def test_what_does_not_go_together_is_refused(changes, told):
    with pytest.raises(ConfigError) as refused:
        recipe(**changes)
    assert told in str(refused.value)


@pytest.mark.parametrize(("profile", "fragments"), [(Profile.DILOCO, 1), (Profile.STREAMING, 4)])
def test_an_island_that_dies_is_waited_for_until_it_counts_as_dead_and_comes_back_into_step(profile, fragments):
    config = AggregatorConfig(
        **begun_with({"profile": profile, "fragments": fragments, "sync_interval": 8}),
        islands=3,
        total_tokens=3 * 100 * TOKENS,
        share_takeover_s=0.0,
    )
    islands = [IslandPlan(island_id=f"island-{i}", step_time_s=0.1, jitter=0.2) for i in range(2)]
    islands.append(IslandPlan(island_id="island-2", step_time_s=0.1, crashes_at_s=(5.0,), restart_s=3.0))
    simulation = run(SimulationPlan(seed=3, config=config, islands=tuple(islands)))
    state = simulation.aggregator.core.run
    assert state.phase is Phase.ENDED
    rounds = state.books.ledger.participation().rounds
    assert rounds[3] > 0.8 * rounds.total()
    steps = [island.step for island in simulation.islands.values()]
    assert max(steps) - min(steps) <= 8
