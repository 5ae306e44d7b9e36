"""``up --profile data-parallel``: the synchronous baseline, by JAX collectives.

On the CPU as many processes as islands form one mesh, each with the batch of an island. On accelerators one process has
the batches of all, and divides them over its devices. No broker, aggregator or Redis takes part. Task, data,
pace, evaluation and report are those of any run. A process that dies ends the run, as in any job that is synchronous.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

from broker.base.errors import Unavailable
from broker.process.signals import Interrupted, Signals
from ops.plans.devices import merged
from ops.processes.child_process import ProcessSpec
from ops.processes.numeric import compilation_cache, one_thread_environment
from ops.run import daemons
from ops.run.display import Display
from ops.run.judging import GaveUp, in_short, judge, keep, loss_unit, run_to_the_end
from ops.run.local_plan import LocalPlan
from ops.run.report import Metrics, RunFacts, build_report


def run(plan: LocalPlan, started_s: float, *, as_json: bool) -> int:
    """Trains, evaluates and reports; returns the exit status of ``up``."""
    status, note = 0, ""
    judged: tuple[Metrics, Metrics] = ({}, {})
    counted: dict[str, Any] | None = None
    with Signals() as signals, Display() as display:
        display.note(f"run {plan.run_id} in {plan.run_dir}: {_mesh(plan)}")
        ended_s = time.monotonic()
        try:
            try:
                run_to_the_end(_processes(plan), plan.run_dir / "logs", signals)
            finally:
                ended_s = time.monotonic()
            counted = _counted(plan)
            display.note("evaluating the model before and after")
            judged = judge(plan, signals)
        except GaveUp as err:
            status, note = 2 if err.misset else 1, in_short(err)
            display.note(str(err))
        except (Unavailable, OSError, ValueError) as err:
            status, note = 1, in_short(err)
            display.note(str(err))
        except Interrupted as err:
            status, note = 128 + err.number, str(err)
    trained_s = [each["train_s"] for each in (counted or {}).get("islands", {}).values()]
    facts = RunFacts(
        run_id=plan.run_id,
        run_dir=os.fspath(plan.run_dir),
        exit=status,
        wall_s=ended_s - started_s,
        first_step_s=ended_s - started_s - max(trained_s) if trained_s else None,
        restarts={},
        note=note,
        loss_unit=loss_unit(plan),
    )
    keep(plan, build_report(counted, facts, before=judged[0], after=judged[1]), as_json=as_json)
    return status


def _mesh(plan: LocalPlan) -> str:
    """Says what trains."""
    islands = plan.aggregator.islands
    if not plan.devices:
        return f"{islands} processes in one JAX mesh"
    (place,) = plan.devices
    return f"one process with the batches of {islands} islands, on {place.platform.upper()} {','.join(place.devices)}"


def _ranks(plan: LocalPlan) -> int:
    """Returns the number of processes."""
    return 1 if plan.devices else plan.aggregator.islands


def _processes(plan: LocalPlan) -> list[ProcessSpec]:
    numeric = {} if plan.devices else one_thread_environment()
    environment = daemons.our_environment(plan.redis_url) | numeric | compilation_cache()
    for place in plan.devices:
        environment = merged(environment, place)
    cpus = sorted(os.sched_getaffinity(0))
    paces = plan.up.pace or (0.0,)
    pace = (max(paces),) if plan.devices else paces  # a step takes as long as that of the slowest
    ranks = _ranks(plan)
    flags = ["--count", str(ranks), "--config", os.fspath(plan.config_file)]
    return [
        ProcessSpec(
            name=island_id,
            command=[
                *(sys.executable, "-P", "-m", "ops.data_parallel.worker"),
                *("--rank", str(rank), "--pace", str(pace[rank % len(pace)]), *flags),
            ],
            environment=environment,
            cpus=() if plan.devices else (cpus[rank % len(cpus)],),
            ends_by_itself=True,
        )
        for rank, island_id in enumerate(plan.island_ids[:ranks])
    ]


def _counted(plan: LocalPlan) -> dict[str, Any]:
    """Returns what the processes have counted, in the form of an aggregator's report."""
    paths = [plan.run_dir / f"rank-{rank}.json" for rank in range(_ranks(plan))]
    islands = {
        island_id: json.loads(path.read_text(encoding="utf-8"))
        for island_id, path in zip(plan.island_ids, paths, strict=False)
    }
    for path in paths:
        path.unlink()
    tokens = sum(each["tokens"] for each in islands.values())
    return {
        "tokens": {"trained": tokens, "merged": tokens, "in_flight": 0, "wasted": {}},
        "islands": islands,
        "phase": "ended",
    }
