"""Everything loses power at once: aggregators come back with their disks, brokers and Redis with nothing."""

from dataclasses import replace

import pytest

from ops.faults.kinds import Fault, FaultKind
from ops.virtual.plan import Cut, Link
from tests.sim.faults import power_cut, random_plan
from tests.sim.packed import short_plan
from tests.sim.test_simulation import run

#: Each of these lost what was published, or ended in a store that had been away, while any store could be the first.
SEEDS = (1, 2, 3, 6, 8)
#: Given an epoch twice: once before the power went, by a Redis that forgot it before anything was said under it.
GIVEN_TWICE = 22


@pytest.mark.rotating(4)
@pytest.mark.parametrize("seed", [*SEEDS, GIVEN_TWICE])
def test_the_newest_store_leads_when_nothing_else_is_left(seed: int) -> None:
    run(power_cut(random_plan(seed)))


def test_the_newer_store_leads_also_where_the_older_one_reaches_the_broker_first() -> None:
    """The leader went on alone, all ended, Redis came back empty; both stores had waited for long by then."""
    lags = Cut(link=Link(process="standby-1", broker=0), at_s=3.0, for_s=4.0)
    comes_later = Cut(link=Link(process="aggregator", broker=0), at_s=8.0, for_s=12.46)
    ends = [("aggregator", 0.5), ("standby-1", 0.5), ("broker-0", 13.0)]
    faults = [Fault(at_s=7.0, kind=FaultKind.KILL, targets=(process,), for_s=for_s) for process, for_s in ends]
    faults.append(Fault(at_s=7.0, kind=FaultKind.WIPE, targets=("redis",), for_s=0.1))
    simulation = run(replace(short_plan(steps=160), cuts=(lags, comes_later), faults=tuple(faults)))
    led = [(who.partition("/")[0], at_s) for at_s, who, name, _ in simulation.trace if name == "lease.taken"]
    assert [who for who, _ in led] == ["aggregator", "aggregator"]
    assert 23.0 < led[1][1] < 25.0
