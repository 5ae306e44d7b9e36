"""Follows a run: evaluates its newest global model every so many tokens, until it has ended.

The loop takes a clock, a way to sleep and what judges a model as arguments; it is the only one that decides what is
evaluated when. Whatever fails here costs a point of the curve, and the run nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from broker.wire.errors import Unavailable
from islands.tasks.benchmarks import Judgement
from ops import curve
from ops.curve import Point
from ops.evaluation.curve_file import CurveFile
from ops.evaluation.followed_run import FollowedRun
from ops.inspect.global_model import GlobalModel, Which

POLL_S = 0.5
#: What stands in Redis is written again so often: an emptied one looks like one that was never gone.
REPUBLISH_S = 10.0


class Follower:
    """One run and its curve.

    Args:
        run: To be followed.
        file: Of its curve.
        every: Tokens between two evaluations.
        judge: Tensors of a model, and words for it -> what is measured of it.
        publish: Writes the newest point where status looks; whatever hinders it, it says itself.
        say: Prints a line.
        sleep: Waits so many seconds.
    """

    def __init__(
        self,
        run: FollowedRun,
        file: CurveFile,
        *,
        every: int,
        judge: Callable[[Mapping[str, Any], str], Judgement],
        publish: Callable[[Point], None],
        say: Callable[[str], None],
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._run = run
        self._file = file
        self._every = every
        self._judge = judge
        self._publish = publish
        self._say = say
        self._sleep = sleep
        self._published_s = float("-inf")
        self._behind = False  # said that the disk takes nothing

    def follow(self) -> None:
        """Returns after the last model of a run that has ended, or that nobody runs any more.

        Raises:
            ConfigError: Nothing could be measured of a model: the task or the benchmarks do not fit it.
        """
        seeded = any(not any(point.versions) for point in self._file.points)
        before = self._file.points[-1].tokens if self._file.points else None
        while True:
            # Asked before the model is read: what is read afterwards is the last one.
            over = self._run.has_ended() or self._run.is_abandoned()
            if not seeded:
                seeded = self._evaluate(self._run.model(Which.SEED))
            tokens = self._run.tokens()
            due = tokens is not None and curve.is_due(tokens, before, self._every)
            if (over or due) and self._evaluate(self._run.model()):
                seeded, before = True, tokens  # version 0 would come too late
            if over:
                self._republish(now=True)
                return
            self._republish()
            self._sleep(POLL_S)

    def _evaluate(self, model: GlobalModel | None) -> bool:
        """Evaluates a model unless it was before; says whether there is one."""
        if model is None:
            return False
        if all(point.model != model.digest for point in self._file.points):
            began_s = time.monotonic()
            found = self._judge(model.tensors, f"run {model.run_id}")
            point = Point(
                tokens=model.tokens,
                versions=model.versions,
                model=model.digest,
                at=round(time.time(), 3),
                seconds=round(time.monotonic() - began_s, 3),
                metrics=found.metrics,
                better=found.better,
                failed=found.failed,
            )
            self._keep(point)
        return True

    def _keep(self, point: Point) -> None:
        """Writes a point wherever it belongs."""
        try:
            self._file.append(point)
        except Unavailable as err:
            if not self._behind:
                self._say(f"atoll: {err}; evaluations that are not in the file are only told here")
            self._behind = True
        else:
            self._behind = False
        self._say(curve.sentence(point))
        self._republish(now=True)

    def _republish(self, *, now: bool = False) -> None:
        now_s = time.monotonic()
        if self._file.points and (now or now_s >= self._published_s + REPUBLISH_S):
            self._published_s = now_s
            self._publish(self._file.points[-1])
