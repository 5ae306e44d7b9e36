"""Lockstep: the steps at which every island hands a fragment over, and waits for its version. Pure.

For the ancestors of this algorithm, whose islands wait for each other: DiLoCo (https://arxiv.org/abs/2311.08105) at the
hand-over itself, Streaming DiLoCo (https://arxiv.org/abs/2501.18512) tau steps after it. All islands count alike: with
the k-th of n moving fragments at version v, the next hand-over is after step

    round((k + 1) * H / n) + H * v
"""

from __future__ import annotations

from collections.abc import Sequence

from broker.wire.messages import Pacing, Recipe

NONE: frozenset[int] = frozenset()


class Lockstep:
    """The steps of one island at which it hands over and waits; none where the recipe has no lockstep.

    Args:
        recipe: Of the run.
        moving: Numbers of the fragments that fall due.
    """

    def __init__(self, recipe: Recipe, moving: Sequence[int]) -> None:
        self._interval, self._overlap = recipe.sync_interval, recipe.overlap
        self._moving = tuple(moving) if recipe.pacing is Pacing.LOCKSTEP else ()
        spacing = self._interval / max(1, len(self._moving))
        self._first = {p: round((k + 1) * spacing) for k, p in enumerate(self._moving)}

    def due(self, step: int, versions: Sequence[int]) -> frozenset[int]:
        """Returns the fragments to hand over after ``step``; ``versions`` are those in the parameters."""
        if not self._moving:  # as in most runs, at each step
            return NONE
        return frozenset(p for p in self._moving if step == self._due(p, versions[p]))

    def holds(self, step: int, versions: Sequence[int]) -> bool:
        """Returns whether training waits after ``step`` for a version that it needs."""
        return bool(self._moving) and any(step >= self._due(p, versions[p]) + self._overlap for p in self._moving)

    def _due(self, p: int, version: int) -> int:
        return self._first[p] + self._interval * max(0, version)
