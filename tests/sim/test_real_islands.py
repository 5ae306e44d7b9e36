"""Real islands in simulated runs: the session, the training thread and its loop, in virtual time under faults.

A failing seed N reproduces with ``python3 -m tests.real_islands N``.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest

from examples import numpy_task
from islands import daemon
from islands.arrays.partition import tensor_specs
from ops.virtual.plan import CrashPoint, Point
from tests.real_islands import LIMIT_S, RealSimulation, check, check_final_parameters, story
from tests.sim.packed import short_plan

#: Seeds of one test.
BATCH = 4


@pytest.mark.rotating(8)
@pytest.mark.parametrize("first", range(0, 96, BATCH))
def test_whatever_befalls_real_islands_the_books_are_exact_and_they_end_with_the_last_versions(tmp_path, first):
    for seed in range(first, first + BATCH):
        check(seed, tmp_path)


def test_the_daemon_trains_a_task_through_lives_that_are_killed_and_paused(tmp_path, monkeypatch):
    """The example in numpy: what the daemon runs, with checkpoints, and progress that is kept for the next life."""
    monkeypatch.setattr(daemon, "gc", SimpleNamespace(freeze=lambda: None))
    task = numpy_task.task(batch=32, hidden=16)
    begun, _ = task.init(0)
    plan = short_plan(seed=7)
    first, second = plan.islands
    islands = replace(first, crashes_at_s=(4.0, 9.0)), replace(second, pauses_at_s=(6.0, 11.0))
    config = replace(plan.config, total_tokens=90 * task.tokens_per_step, sync_interval=4)
    tensors = tuple(tensor_specs(begun, task.kinds, task.unit_axes))
    plan = replace(plan, islands=islands, config=config, tensors=tensors, tokens_per_step=task.tokens_per_step)
    simulation = RealSimulation(plan, tmp_path, task=task)
    assert simulation.run(LIMIT_S)
    simulation.invariants.at_end(simulation)
    check_final_parameters(simulation)
    assert {name: process.life for name, process in simulation.islands.items()} == {"island-0": 2, "island-1": 2}
    ended = next(iter(simulation.versions.values()))
    trained: dict[str, dict[str, object]] = {}
    for name, value in ended.items():
        layer, _, part = name.partition("/")
        trained.setdefault(layer, {})[part] = value
    assert task.evaluate is not None
    assert task.evaluate(trained) < task.evaluate(task.init(plan.config.seed)[0]) - 0.3


@pytest.mark.rotating(4)
@pytest.mark.parametrize("part", range(6))
@pytest.mark.parametrize("name", ["island-0", "island-1"])
def test_a_real_island_may_die_at_anything_that_it_says(tmp_path, name, part):
    for number in range(1 + part, 24, 6):
        crash = CrashPoint(process=name, point=Point.SEND, number=number, restart_s=(0.05, 1.2)[number % 2])
        simulation = RealSimulation(replace(short_plan(), crash_points=(crash,)), tmp_path / str(number))
        assert simulation.run(LIMIT_S)
        assert "crashed" in {decision for _, _, decision, _ in simulation.trace} or number > 22
        simulation.invariants.at_end(simulation)
        check_final_parameters(simulation)


def test_a_seed_gives_the_same_story_in_any_process(tmp_path):
    def told(hash_seed):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        command = [sys.executable, "-m", "tests.real_islands", "--story", "3"]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout

    first = told("1")
    assert len(first.splitlines()) > 200
    assert told("2") == first
    assert story(3, tmp_path) == first.rstrip("\n")
