"""Both sides of the drill as processes in regions: Atoll's hub and islands, or the base's processes.

The hub is in the first region and shares its link with that region's island: a region is not helped by a network of
the hub's own. The model is sampled from the store while the run goes on, and judged when it is over.
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from benchmarks.fleet import ROOT_ENVIRONMENT, RUN, check, hub_command, module_command, written
from benchmarks.regions.network import Network, address
from broker.base import sources
from broker.base.errors import Unavailable
from broker.gateway.config import BrokerConfig
from islands.tasks.task import Batch, DataShare, OptState, Params, Schedule, Task, load_task
from ops.models.global_model import read_model, stores_of
from ops.processes.child_process import ProcessSpec
from ops.processes.cluster import LocalCluster
from ops.processes.numeric import compilation_cache, one_thread_environment
from ops.processes.supervision import ONE_LIFE
from ops.run.daemons import ON_CPU, our_command, our_environment

BROKER_PORT, COORDINATOR_PORT = 7001, 7101
START_WITHIN_S = 300.0
STOP_WITHIN_S = 10.0
POLL_S = 0.1
SAID_EVERY_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A global model at a time: ``s`` from the first inner step of any island."""

    s: float
    tokens: int
    file: Path


def meet(folder: Path, number: int, count: int) -> None:
    """Waits until all processes of a side have compiled: gloo gives up on a partner half a minute late.

    Raises:
        TimeoutError: One has not come.
    """
    (folder / f"compiled-{number}").touch()
    until_s = time.monotonic() + START_WITHIN_S
    while not all((folder / f"compiled-{other}").exists() for other in range(count)):
        if time.monotonic() > until_s:
            raise TimeoutError(f"not all {count} processes have compiled within {START_WITHIN_S:g} s")
        time.sleep(POLL_S)


def marked(*, inner: str, out: str, number: int, count: int, **options: Any) -> Task:
    """Returns the compiled task ``inner``, which writes to ``out`` when it began and its steps so far.

    It waits for the other islands to have compiled, as the processes of the base do.
    """
    task = load_task(inner, options)
    # As in the base, where compiling is off the clock too.
    params, opt_state = task.init(0)
    task.train(params, opt_state, next(task.data(DataShare(index=0, count=1))), Schedule(0, 0))
    meet(Path(out).parent, number, count)
    path, steps, first_s, said_s = Path(out), 0, 0.0, 0.0

    def train(params: Params, opt_state: OptState, batch: Batch, schedule: Schedule) -> tuple[Params, OptState, Any]:
        nonlocal steps, first_s, said_s
        now_s = time.monotonic()
        first_s = first_s or now_s
        if now_s - said_s > SAID_EVERY_S:
            said_s = now_s
            temporary = path.with_suffix(".tmp")
            temporary.write_text(json.dumps({"first_s": first_s, "steps": steps}), encoding="utf-8")
            os.replace(temporary, path)
        steps += 1
        return task.train(params, opt_state, batch, schedule)

    return dataclasses.replace(task, train=train)


def atoll(
    network: Network, directory: Path, options: Mapping[str, Any], *, seconds: float, sample_s: float, **recipe: Any
) -> tuple[list[Sample], list[int], float]:
    """Trains with Atoll for so many seconds, an island in each region.

    Args:
        network: The regions.
        directory: Existing and empty.
        options: Of the language task.
        seconds: From the first inner step.
        sample_s: Between two samples of the model.
        recipe: Settings of the aggregator.

    Returns:
        Samples of the model, inner steps of each island, and seconds from the first of them.

    Raises:
        Unavailable: A process died, or no step was made in time.
    """
    number = len(network.pids)
    broker_address = f"tcp://{address(0)}:{BROKER_PORT}"
    broker = BrokerConfig(run_id=RUN, host=address(0), port=BROKER_PORT, insecure=True, redis_url="")
    hub = {"broker": broker_address, "insecure": True, "redis_url": "", "tape": directory / "events.jsonl"}
    written(directory, broker, islands=number, **hub, **recipe)
    environment = our_environment("") | one_thread_environment() | compilation_cache()
    specs = [
        ProcessSpec(
            name=name,
            command=network.inside(0, hub_command(directory, name)),
            environment=environment | ON_CPU,
            ends_by_itself=name == "aggregator",
        )
        for name in ("broker", "aggregator")
    ]
    said = [directory / f"steps-{i}.json" for i in range(number)]
    cpus = sorted(os.sched_getaffinity(0))
    for i in range(number):
        config = directory / f"island-{i}.toml"
        island = {"run_id": RUN, "broker": broker_address, "insecure": True, "island_id": f"island-{i}"}
        task = {"inner": "islands.language:task", "out": os.fspath(said[i]), "number": i, "count": number, **options}
        tables = {"island": island | {"task": "benchmarks.regions.fleet:marked"}, "task": task}
        config.write_text(sources.to_toml(tables), encoding="utf-8")
        specs.append(
            ProcessSpec(
                name=f"island-{i}",
                command=network.inside(i, our_command("island", "--config", os.fspath(config))),
                environment=environment,
                cpus=(cpus[i % len(cpus)],),
                ends_by_itself=True,
            )
        )
    samples: list[Sample] = []
    (directory / "logs").mkdir(exist_ok=True)
    with LocalCluster(directory / "logs", policy=ONE_LIFE) as cluster:
        cluster.start(specs)
        began_s = _begun(cluster, said)
        while (spent_s := time.monotonic() - began_s) < seconds:
            check(cluster)
            if spent_s >= sample_s * (len(samples) + 1):
                samples.append(_sample(directory, began_s, len(samples)))
            time.sleep(POLL_S)
        samples.append(_sample(directory, began_s, len(samples)))
        cluster.stop(within_s=STOP_WITHIN_S)
    steps = [json.loads(path.read_text(encoding="utf-8"))["steps"] if path.exists() else 0 for path in said]
    return samples, steps, spent_s


def base(
    network: Network,
    directory: Path,
    options: Mapping[str, Any],
    heard: Callable[[dict[str, Any]], None],
    **limits: Any,
) -> list[dict[str, Any]]:
    """Trains data-parallel, a process in each region; returns the first one's losses, steps and seconds.

    Raises:
        Unavailable: A process failed.
    """
    environment = our_environment("") | one_thread_environment() | compilation_cache() | ROOT_ENVIRONMENT
    number, coordinator = len(network.pids), f"{address(0)}:{COORDINATOR_PORT}"
    spec = {"options": dict(options), "count": number, "coordinator": coordinator, "meeting": os.fspath(directory)}
    cpus = sorted(os.sched_getaffinity(0))
    specs = []
    for i in range(number):
        command = module_command("benchmarks.regions.data_parallel", json.dumps(spec | limits | {"rank": i}))
        specs.append(
            ProcessSpec(
                name=f"region-{i}",
                command=network.inside(i, command),
                environment=environment,
                cpus=(cpus[i % len(cpus)],),
                ends_by_itself=True,
            )
        )
    said: list[dict[str, Any]] = []
    (directory / "logs").mkdir(exist_ok=True)
    with LocalCluster(directory / "logs", policy=ONE_LIFE) as cluster:
        cluster.start(specs)
        log = cluster.log_of("region-0")
        while cluster.running():
            check(cluster)
            new = _said_in(log)[len(said) :]
            said += new
            for each in new:
                heard(each)
            time.sleep(POLL_S)
        said += _said_in(log)[len(said) :]
    return said


def losses_of(samples: list[Sample], options: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the curve of a run's samples, in this process."""
    from islands.tasks.evaluate import load_file_of

    task = load_task("islands.language:task", dict(options))
    found = [float(task.evaluate(load_file_of(task, each.file))) for each in samples]  # type: ignore[arg-type]
    return [{"s": each.s, "tokens": each.tokens, "loss": loss} for each, loss in zip(samples, found, strict=True)]


def _begun(cluster: LocalCluster, said: list[Path]) -> float:
    """Waits for the first inner step of any island; returns when it began."""
    until_s = time.monotonic() + START_WITHIN_S
    while time.monotonic() < until_s:
        check(cluster)
        firsts = [json.loads(path.read_text(encoding="utf-8"))["first_s"] for path in said if path.exists()]
        if firsts:
            return float(min(firsts))
        time.sleep(POLL_S)
    raise Unavailable(f"no inner step within {START_WITHIN_S:g} s", definite=True)


def _sample(directory: Path, began_s: float, number: int) -> Sample:
    now_s = time.monotonic()
    model = read_model(stores_of(directory / "store"))
    file = directory / f"sample-{number}.safetensors"
    save_file({name: np.ascontiguousarray(each) for name, each in model.tensors.items()}, file)
    return Sample(s=now_s - began_s, tokens=model.tokens, file=file)


def _said_in(log: Path) -> list[dict[str, Any]]:
    """Returns the JSON lines of a process's log that are complete."""
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n")[:-1] if log.exists() else []
    return [json.loads(line) for line in lines if line.startswith("{")]
