"""Times the inner steps of a task, as an island of a run or alone without Atoll.

In an island, ``benchmarks.stopwatch:timed`` is the task: it wraps another one and notes when steps begin. Alone,
``python -m benchmarks.stopwatch`` runs the loop that the island daemon runs, without the island.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from islands.tasks.task import Batch, DataShare, OptState, Params, Schedule, Task, load_task


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Steps between the warm-up and the end.

    Attributes:
        steps: Inner steps begun and ended.
        wall_s: Seconds they took.
        cpu_s: Processor seconds of the whole process meanwhile: training, and whatever Atoll does beside it.
    """

    steps: int
    wall_s: float
    cpu_s: float


class Stopwatch:
    """Counts steps for ``seconds``, after a warm-up from the second step on: the first one compiles.

    Args:
        out: Where the result goes, whole or not at all.
        seconds: To measure.
        warm_up_s: Before that.
    """

    def __init__(self, out: Path, *, seconds: float, warm_up_s: float) -> None:
        self._out = out
        self._seconds = seconds
        self._warm_up_s = warm_up_s
        self._steps = 0
        self._second_at_s = 0.0
        self._began: Timing | None = None
        self.done = False

    def step(self) -> None:
        """To be called before each step."""
        self._steps += 1
        now_s = time.perf_counter()
        if self._steps == 2:
            self._second_at_s = now_s
        if self.done or self._steps < 2:
            return
        if self._began is None:
            if now_s - self._second_at_s >= self._warm_up_s:
                self._began = self._now(now_s)
        elif now_s - self._began.wall_s >= self._seconds:
            self.done = True
            self._write(self._began, self._now(now_s))

    def _now(self, now_s: float) -> Timing:
        return Timing(steps=self._steps, wall_s=now_s, cpu_s=time.process_time())

    def _write(self, began: Timing, ended: Timing) -> None:
        fields = {name: getattr(ended, name) - getattr(began, name) for name in ("steps", "wall_s", "cpu_s")}
        temporary = self._out.with_suffix(".tmp")
        temporary.write_text(json.dumps(fields), encoding="utf-8")
        os.replace(temporary, self._out)


def timed(*, inner: str, out: str, seconds: float, warm_up_s: float, **options: Any) -> Task:
    """Returns the task ``inner`` (package.module:function) with its options, its steps timed into ``out``."""
    task = load_task(inner, options)
    watch = Stopwatch(Path(out), seconds=seconds, warm_up_s=warm_up_s)

    def train(params: Params, opt_state: OptState, batch: Batch, schedule: Schedule) -> tuple[Params, OptState, Any]:
        watch.step()
        return task.train(params, opt_state, batch, schedule)

    return dataclasses.replace(task, train=train)


def alone(task: Task, watch: Stopwatch) -> None:
    """Trains until the watch is done: the loop of :func:`islands.daemon.train` without an island."""
    params, opt_state = task.init(0)
    previous: Any = None
    for step, batch in enumerate(task.data(DataShare(index=0, count=1))):
        watch.step()
        if watch.done:
            return
        params, opt_state, loss = task.train(params, opt_state, batch, Schedule(step, 0))
        if hasattr(previous, "block_until_ready"):
            previous.block_until_ready()
        previous = loss


def main() -> None:
    """Runs one task alone."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", required=True, help="package.module:function")
    parser.add_argument("--options", type=json.loads, default={}, help="of the task, as JSON")
    parser.add_argument("--out", type=Path, required=True, help="file for the result")
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--warm-up-s", type=float, required=True)
    args = parser.parse_args()
    alone(load_task(args.task, args.options), Stopwatch(args.out, seconds=args.seconds, warm_up_s=args.warm_up_s))


if __name__ == "__main__":
    main()
