"""A gain that follows the autocorrelation of pseudo-gradients: tried here, and in no production setting. Pure.

Pseudo-gradients that go on pointing the same way say that the outer step is too short, those that turn back that it is
too long. The rule tried is the plainest one:

    params <- params - eta * (1 + c * cos(D, last D)) * D

It needs no state of its own: without momentum, what an outer step keeps is the last D
(:mod:`aggregator.merge.outer_step`).
"""

from __future__ import annotations

import numpy as np

from aggregator.merge.outer_step import FragmentState, OuterStep, Vector, make_outer_step


def outer_step_of(learning_rate: float, momentum: float, adaptation: float) -> OuterStep:
    """Returns the outer step of a cell: production's, or with ``adaptation`` (c) above 0 the rule above.

    Raises:
        ConfigError: As :func:`aggregator.merge.outer_step.make_outer_step`.
    """
    step = make_outer_step(learning_rate, momentum)
    if not adaptation:
        return step

    def adapted(state: FragmentState, merged: Vector) -> FragmentState:
        gain = 1 + adaptation * cosine(state.momentum, merged)
        return step(state, np.float32(gain) * merged)

    return adapted


def cosine(a: Vector, b: Vector) -> float:
    """Returns the cosine between two float32 vectors [n], summed in float64; 0 if one of them is all zeros."""
    left, right = a.astype(np.float64), b.astype(np.float64)
    lengths = float(np.sqrt(left @ left) * np.sqrt(right @ right))
    return float(left @ right) / lengths if lengths else 0.0
