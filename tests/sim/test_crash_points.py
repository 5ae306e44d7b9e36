"""One short run, repeated with one crash at each thing that any process says to another or writes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ops.virtual.plan import CrashPoint, Point
from ops.virtual.simulation import Simulation
from tests.run_reading import Reading
from tests.sim.packed import short_plan
from tests.sim.test_packed import LIMIT_S
from tests.sim.test_simulation import run

WRITERS = ("aggregator", "standby-1")
PROCESSES = (*WRITERS, "island-0", "island-1", "broker-0")
PLACES = [
    *((process, Point.SEND) for process in PROCESSES),
    *((writer, point) for writer in WRITERS for point in (Point.PERSIST, Point.PERSISTED)),
]
#: A test takes every fourth of them, and the fast profile one test of each place.
PARTS = 4


@pytest.fixture(scope="module")
def undisturbed() -> Simulation:
    return run(short_plan(), LIMIT_S)


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
    for number in range(1 + part, 1 + undisturbed.passages.counts[at], PARTS):
        crash = CrashPoint(process=process, point=point, number=number, restart_s=(0.05, 1.2)[number % 2])
        died = run(replace(short_plan(), crash_points=(crash,)), LIMIT_S)
        assert any(name == "crashed" for _, _, name, _ in died.trace), crash
