"""Whole runs of real programs in virtual time: brokers, aggregators with their disks, islands that train.

Nothing of ours is modelled: what is simulated lies below, sockets, links, disks, Redis, threads and clocks.
"""

from __future__ import annotations

import gc
import random
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np

from broker.transport.endpoint import Endpoint
from broker.wire import messages as m
from ops.virtual.loop import Killed
from ops.virtual.network import Network
from ops.virtual.plan import Point, SimulationPlan, station_names
from tests.real_islands import RealIsland, RealSimulation, WatchedSession
from tests.sim.packed import packed_plan, short_plan
from tests.sim.real_hub import RealHub
from tests.sim.real_wires import address_of
from tests.training_loops import stored

#: Within which a run ends, whatever befalls it.
LIMIT_S = 300.0


class WholeRun(RealHub):
    """One run of a plan, whose islands are real, too; to be used in a ``with`` statement.

    Args:
        plan: What happens.
        job_s: Least and greatest time of a job of a thread of an island.
        shows_state: Whether the loops show an optimizer's state.
        corrupt_at_s: When a bit changes in the memory of an island: (time, island).
        spoilt_at_s: When a step of an island goes wrong, likewise.
    """

    kind = RealIsland
    start_island, _others_joined = RealSimulation.start_island, RealSimulation._others_joined
    leave, pause = RealSimulation.leave, RealSimulation.pause

    def __init__(
        self, plan: SimulationPlan, *, job_s=(1e-4, 1e-2), shows_state=True, corrupt_at_s=(), spoilt_at_s=()
    ) -> None:
        self.job_s, self.shows_state, self.versions = job_s, shows_state, {}
        self._session = mock.patch("islands.joining.Session", WatchedSession)
        self._session.start()
        super().__init__(plan)
        RealSimulation.plague(self, corrupt_at_s, spoilt_at_s)

    @property
    def addresses(self) -> list[str]:
        """Of the brokers."""
        return [address_of(place) for place in range(self.plan.brokers)]

    def context_of(self, island: RealIsland) -> Any:
        """Returns what the sockets of an island come from."""
        return self.wires.context(island.process)

    def make_network(self) -> Network:
        return Network(self)  # nobody speaks through it

    def _sending(self, send: Callable[..., Any]) -> Callable[..., Any]:
        async def sending(endpoint: Endpoint, envelope: m.Envelope, **how: Any) -> bool:
            process = self.virtual.running
            watched = process is not None and (process.name in self.posts or process.name in self.islands)
            if process is not None and watched and self.dies_at(process.name, Point.SEND):
                raise Killed
            sent: bool = await send(endpoint, envelope, **how)
            return sent

        return sending

    def deafen(self, plan: Any) -> None:
        """Bytes that are damaged on the way are not part of this."""

    def ended(self) -> bool:
        live = [name for name, island in self.islands.items() if island.alive]
        return super().ended() and self.versions.keys() >= set(live)

    def run(self, limit_s: float) -> bool:
        ended = super().run(limit_s)
        assert not self.virtual.failures, self.virtual.failures[0]
        return ended

    def close(self) -> None:
        super().close()
        self._session.stop()
        with warnings.catch_warnings():  # of connections to Redis, which a killed process leaves open
            warnings.simplefilter("ignore", ResourceWarning)
            gc.collect()

    def check_final_parameters(self) -> None:
        """Every island that has ended has the run's last versions, bit for bit."""
        store: dict[str, Any] = {}
        for leader in self.leaders.values():
            leader.machine.process.kill()  # it has the store locked
            leader.machine.disk.close_files()
            store |= stored(leader.machine.disk.path)
        for name, params in self.versions.items():
            for tensor, value in params.items():
                assert np.array_equal(value, store[tensor]), f"{name} ends with another {tensor}"


def run_of(seed: int) -> WholeRun:
    """Returns the run of a seed: troubles of :mod:`tests.sim.packed`, slow threads, bits that change in memory."""
    plan, rng = packed_plan(seed), random.Random(f"whole {seed}")
    honest = tuple(island for island in plan.islands if island.manner is None)
    islands = honest or short_plan().islands
    names = [island.island_id for island in islands]
    known = {*names, *station_names(plan.config.shards, plan.standbys)}
    plan = replace(plan, islands=islands, cuts=tuple(cut for cut in plan.cuts if cut.link.process in known))
    corrupt = [(rng.uniform(0.5, 4.0), rng.choice(names)) for _ in range(rng.choice([0, 0, 1]))]
    spoilt = [(rng.uniform(1.0, 4.0), rng.choice(names)) for _ in range(rng.choice([0, 0, 1]))]
    job_s = rng.choice([(1e-4, 1e-2), (1e-4, 1e-2), (1e-3, 0.1), (1e-3, 0.5)])
    return WholeRun(plan, job_s=job_s, shows_state=rng.random() < 0.8, corrupt_at_s=corrupt, spoilt_at_s=spoilt)


def check(seed: int) -> None:
    """Runs a seed to its end; what fails names it."""
    try:
        with run_of(seed) as run:
            assert run.run(LIMIT_S), "it never ended"
            run.invariants.at_end(run)
            run.check_final_parameters()
    except AssertionError as err:
        raise AssertionError(f"seed {seed}: {err}") from err


def story(seed: int) -> str:
    """Returns every turn of every process, and every decision, of a seed."""
    turns: list[str] = []
    with run_of(seed) as run:
        run.virtual.on_turn = lambda *turn: turns.append(str(turn))
        run.run(LIMIT_S)
        return "\n".join([*turns, *map(str, run.trace)])


if __name__ == "__main__":
    if sys.argv[1] == "--story":
        print(story(int(sys.argv[2])))
    else:
        for number in range(int(sys.argv[1]), int(sys.argv[-1]) + 1):
            check(number)
