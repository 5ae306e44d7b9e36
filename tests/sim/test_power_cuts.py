"""Everything loses power at once: aggregators come back with their disks, brokers and Redis with nothing."""

import pytest

from tests.sim.faults import power_cut, random_plan
from tests.sim.test_simulation import run

#: Each of these lost what was published, or ended in a store that had been away, while any store could be the first.
SEEDS = (1, 2, 3, 6, 8)
#: Given an epoch twice: once before the power went, by a Redis that forgot it before anything was said under it.
GIVEN_TWICE = 22


@pytest.mark.rotating(4)
@pytest.mark.parametrize("seed", [*SEEDS, GIVEN_TWICE])
def test_the_newest_store_leads_when_nothing_else_is_left(seed: int) -> None:
    run(power_cut(random_plan(seed)))
