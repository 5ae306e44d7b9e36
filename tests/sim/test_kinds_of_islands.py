"""Each kind of island alone, the slowest in a pair, and all beside each other: rounds are answered soon."""

from __future__ import annotations

from ast import literal_eval
from dataclasses import replace

import pytest

from ops.virtual.plan import IslandPlan
from tests.run_reading import Reading
from tests.sim.test_simulation import participation, run, steady, tokens

STEP_S = 0.05
#: Steps between two boundaries at which the hosts of an island do something together; 1: it has one host.
ONE_HOST, TWO_HOSTS, FAR_HOSTS = 1, 4, 12
#: A round may wait for the boundary at which slow hosts copy, and for the journey: this many seconds.
ANSWERED_WITHIN_S = STEP_S * FAR_HOSTS + 0.4
SLOW = 4.0

FLEETS = [
    *([kind] for kind in (ONE_HOST, TWO_HOSTS, FAR_HOSTS)),
    [FAR_HOSTS, FAR_HOSTS],
    [ONE_HOST, TWO_HOSTS, FAR_HOSTS],
]


@pytest.mark.parametrize("quorum", [1, 0], ids=["one", "all"])
@pytest.mark.parametrize("kinds", FLEETS, ids=str)
def test_whatever_islands_are_there_rounds_close_soon_and_every_fragment_gets_its_versions(
    kinds: list[int], quorum: int
) -> None:
    plan = steady(len(kinds), fragments=4, total_tokens=30_000 * len(kinds), quorum=quorum or len(kinds))
    islands = [
        IslandPlan(island_id=f"island-{i}", step_time_s=STEP_S, plans_every=every) for i, every in enumerate(kinds)
    ]
    simulation = run(replace(plan, islands=tuple(islands)))
    opened, waited_s = {}, []
    for at_s, _, name, said in simulation.trace:
        if name in ("round.opened", "round.closed", "round.cancelled"):
            fields = literal_eval(said) if isinstance(said, str) else said
            if name == "round.opened":
                opened[fields["round"]] = at_s
            else:
                waited_s.append(at_s - opened.pop(fields["round"]))
                assert "timeout" not in fields["reason"], fields
    assert max(waited_s) < ANSWERED_WITHIN_S
    assert participation(simulation) > 0.8
    versions = Reading(simulation.aggregator.core).versions
    assert max(versions) - min(versions) <= 2, versions
    assert tokens(simulation)["merged"] == tokens(simulation)["trained"]
