"""One short run with every subset of its links cut, one by one in a random order, and restored in another."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import combinations

import pytest

from ops.virtual.plan import Way
from tests.sim.counting import run
from tests.sim.packed import links, short_plan, swizzled

STATIONS = ("aggregator", "standby-1")
LINKS = links((*STATIONS, "island-0", "island-1"), STATIONS, brokers=1)


SUBSETS = [chosen for many in range(len(LINKS)) for chosen in combinations(LINKS, 1 + many)]
PARTS = 16


@pytest.mark.rotating(8)
@pytest.mark.parametrize("part", range(PARTS))
def test_whichever_links_are_cut_and_come_back_the_run_goes_on_and_loses_nothing_that_was_merged(part: int) -> None:
    for number in range(part, len(SUBSETS), PARTS):
        chosen, rng = SUBSETS[number], random.Random(f"subset {number}")
        for_s, ways = ((2.0, (Way.BOTH,)), (4.0, tuple(Way)))[number // PARTS % 2]
        begin_s = rng.uniform(0.0, 2.0)
        cuts = swizzled(rng, chosen, begin_s, begin_s + for_s, ways)
        run(replace(short_plan(number, steps=30), cuts=cuts))  # all are back before it ends
