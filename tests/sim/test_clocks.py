"""One short run, and in it each clock wrong in each way: that of every process, and that of Redis."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ops.virtual.queue import ClockTrouble
from tests.sim.counting import run
from tests.sim.packed import short_plan

OWNERS = ("aggregator", "standby-1", "island-0", "broker-0", "redis")
#: Back by more is left out: its owner would wait for so much longer, and find the run over and everybody gone.
WRONG = (
    *({"jump_s": jump_s} for jump_s in (-5.0, -2.0, -0.3, 0.3, 2.0, 3600.0)),
    *({"rate": rate, "for_s": 8.0} for rate in (0.5, 0.95, 1.05, 2.0)),
    *({"rate": 0.0, "for_s": for_s} for for_s in (0.5, 3.0)),
)


@pytest.mark.rotating(4)
@pytest.mark.parametrize("wrong", WRONG, ids=str)
def test_whatever_a_clock_shows_every_invariant_holds_and_the_run_ends(wrong: dict[str, float]) -> None:
    for number, owner in enumerate(OWNERS):
        at_s = (0.1, 1.7)[(number + WRONG.index(wrong)) % 2]
        run(replace(short_plan(), clocks=(ClockTrouble(process=owner, at_s=at_s, **wrong),)))


@pytest.mark.rotating(4)
@pytest.mark.parametrize("part", range(4))
def test_clocks_that_are_wrong_all_at_once_end_the_run_too(part: int) -> None:
    for seed in range(part, 20, 4):
        troubles = tuple(
            ClockTrouble(process=owner, at_s=0.5 * (seed % 5), **WRONG[(seed * 5 + i * 7) % len(WRONG)])
            for i, owner in enumerate(OWNERS)
        )
        run(replace(short_plan(seed), clocks=troubles))
