"""How a run merges, and what is worth knowing of its merges: of decoupled runs and baselines alike."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from aggregator.merge.outer_step import FragmentState
from broker.wire.fragments import Kind
from islands.arrays.partition import tensor_specs
from islands.tasks.task import Params, Task
from ops.lab.settings import MergeRule


def kinds_of(task: Task, params: Params, merge: MergeRule) -> dict[str, str]:
    """Returns the kinds of a run's tensors by name.

    The rule ``mean`` takes the place of RDA, and of nothing else, and not of what the task itself asks to be merged so.
    """
    if merge is MergeRule.RDA:
        return dict(task.kinds)
    kinds = {}
    for each in tensor_specs(params, task.kinds, task.unit_axes):
        asked_for = any(re.search(pattern, each.name) for pattern in task.kinds)
        kinds[f"^{re.escape(each.name)}$"] = str(Kind.MEAN if each.kind is Kind.RDA and not asked_for else each.kind)
    return kinds


@dataclass(slots=True)
class Merges:
    """What is worth knowing of the merges of a run, and the global parameters as they are durable."""

    durable: dict[int, FragmentState] = field(default_factory=dict)
    cosines: list[float] = field(default_factory=list)
    autocorrelations: list[float] = field(default_factory=list)
    last: dict[int, np.ndarray[Any, np.dtype[np.float32]]] = field(default_factory=dict)

    def merged(self, fragment_id: int, delta: np.ndarray[Any, np.dtype[np.float32]], cosine: float | None) -> None:
        """Takes note of a merged pseudo-gradient."""
        if cosine is not None:
            self.cosines.append(cosine)
        before = self.last.get(fragment_id)
        if before is not None:
            lengths = float(np.linalg.norm(before)) * float(np.linalg.norm(delta))
            if lengths > 0:
                self.autocorrelations.append(float(np.dot(before, delta)) / lengths)
        self.last[fragment_id] = delta
