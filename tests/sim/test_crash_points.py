"""One short run, repeated with one crash at each thing that any process says to another or writes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ops.virtual.plan import CrashPoint, Point
from ops.virtual.simulation import Simulation
from tests.run_reading import Reading
from tests.sim.counting import run
from tests.sim.packed import short_plan

WRITERS = ("aggregator", "standby-1")
PROCESSES = (*WRITERS, "island-0", "island-1", "broker-0")
PLACES = [
    *((process, Point.SEND) for process in PROCESSES),
    *((writer, point) for writer in WRITERS for point in (Point.PERSIST, Point.PERSISTED)),
]
#: Of all that a process says or writes so many are tried, from the first to the last, a part in each test.
TRIED, PARTS = 16, 8


@pytest.fixture(scope="module")
def undisturbed() -> Simulation:
    return run(short_plan())


def test_the_short_run_passes_every_kind_of_point_often(undisturbed: Simulation) -> None:
    counts = undisturbed.passages.counts
    assert set(counts) == set(PLACES)
    assert min(counts.values()) >= 5, counts
    books = Reading(undisturbed.aggregator.core).tokens()
    assert books["merged"] == books["trained"] > 0


@pytest.mark.rotating(PARTS)
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("at", PLACES, ids=lambda place: f"{place[0]}-{place[1]}")
def test_a_process_may_die_at_anything_that_it_says_or_writes(
    undisturbed: Simulation, at: tuple[str, Point], part: int
) -> None:
    process, point = at
    last = undisturbed.passages.counts[at]
    for number in sorted({1 + i * last // TRIED for i in range(part, TRIED, PARTS)}):
        crash = CrashPoint(process=process, point=point, number=number, restart_s=(0.05, 0.7)[number % 2])
        died = run(replace(short_plan(), crash_points=(crash,)))
        assert any(name == "crashed" for _, _, name, _ in died.trace), crash
