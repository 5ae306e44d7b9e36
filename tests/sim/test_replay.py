"""The same events give the same actions, whatever happens in a run: what a replay of a real tape relies on."""

from __future__ import annotations

import json
from typing import Any

import pytest

from aggregator.interface import events as agg
from aggregator.rounds.core import Aggregator
from aggregator.store.tape import read_start, start_line
from ops.virtual import failover
from ops.virtual.aggregator import SimAggregator
from ops.virtual.failover import Station
from ops.virtual.simulation import Simulation
from tests.sim.faults import random_plan


class ShadowedAggregator(SimAggregator):
    """Feeds every event to a second core too, made from a first line; the second is asked for no deadline, ever."""

    def __init__(self, simulation: Simulation, station: Station, life: int, epoch: int | None) -> None:
        disk, now_s = station.disk, simulation.queue.now_s
        line = start_line(simulation.plan.config, now_s, disk.record, disk.commits)
        self.shadow = Aggregator(**read_start(json.loads(json.dumps(line))))
        self.fed = 0
        super().__init__(simulation, station, life, epoch)

    def perform(self, actions: list[agg.Action]) -> None:
        if not self.fed:  # the actions of the start
            self.fed = 1
            assert self.shadow.start(self.simulation.queue.now_s) == actions
        super().perform(actions)

    def handle(self, event: agg.Event) -> None:
        if self.alive:
            self.fed += 1
            self.core.next_deadline_s(self.simulation.queue.now_s)  # long after the last event, and before this one
            expected = self.shadow.handle(event, self.simulation.queue.now_s)
            before, self.core.handle = self.core.handle, self._compared(expected)  # type: ignore[method-assign]
            try:
                super().handle(event)
            finally:
                self.core.handle = before  # type: ignore[method-assign]

    def _compared(self, expected: list[agg.Action]) -> Any:
        handle = self.core.handle

        def compared(event: agg.Event, now_s: float) -> list[agg.Action]:
            actions = handle(event, now_s)
            assert actions == expected, event
            return actions

        return compared


@pytest.mark.rotating(4)
@pytest.mark.parametrize("seed", [300, 301, 302, 305, 309])
def test_a_core_that_is_asked_for_no_deadlines_decides_as_the_one_that_is(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failover, "SimAggregator", ShadowedAggregator)
    simulation = Simulation(random_plan(seed))
    assert simulation.run(2000.0)
    assert isinstance(simulation.aggregator, ShadowedAggregator)
    assert simulation.aggregator.fed > 100
