"""The outer step: one Nesterov update of a fragment (DiLoCo, arXiv:2311.08105, algorithm 1).

It is ``optax.sgd(learning_rate, momentum, nesterov=True)``, against which it is tested. It is computed on the way of a
merge's last pass over memory (:mod:`aggregator.merge.passes`), while the merged pseudo-gradient is in the cache.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from aggregator.merge.fragment_state import FragmentState, Vector
from aggregator.merge.layout import Source
from aggregator.merge.passes import Target, fold
from aggregator.merge.resources import PLAIN, Resources
from broker.base.errors import ConfigError, LocalProtocolError
from broker.wire.messages import Codec, Encoded


@dataclass(frozen=True, slots=True)
class OuterStep:
    """Applies merged pseudo-gradients to fragments: see :func:`make_outer_step`."""

    learning_rate: float
    momentum: float

    def __call__(self, state: FragmentState, merged: Vector, resources: Resources = PLAIN) -> FragmentState:
        """Returns the fragment after one outer step, with its exact parameters.

        Args:
            state: Not changed: its bytes may still be on their way to islands.
            merged: float32 [elements of the fragment].
            resources: Threads and memory.

        Raises:
            LocalProtocolError: The arrays do not fit each other.
        """
        target = self.target(state, merged.size, resources, merged=merged)
        whole = Encoded(codec=Codec.F32, shape=merged.shape, checksum=0, data=np.ascontiguousarray(merged))
        fold([Source(whole)], np.ones((1, 1)), 0, 1, merged.size, target, resources.spread, counted=0)
        return self.after(state, target)

    def target(
        self,
        state: FragmentState,
        size: int,
        resources: Resources = PLAIN,
        *,
        merged: Vector | None = None,
        delta: Vector | None = None,
    ) -> Target:
        """Returns new vectors beside those of a fragment, for a pass to write.

        Args:
            state: Before the step.
            size: Elements of the fragment.
            resources: The new vectors come from there.
            merged: Is checked, too.
            delta: Takes the merged pseudo-gradient itself, where it is wanted.

        Raises:
            LocalProtocolError: An array has another dtype or size.
        """
        named = {"params": state.params, "residual": state.residual, "momentum": state.momentum, "merged": merged}
        for name, array in named.items():
            if array is not None and (array.shape != (state.params.size,) or array.dtype != np.float32):
                got, size = f"{array.dtype} of shape {array.shape}", state.params.size
                raise LocalProtocolError(f"{name} of an outer step is {got}, must be float32 of shape ({size},)")
        if size != state.params.size:
            raise LocalProtocolError(
                f"a pseudo-gradient of {size} elements does not fit {state.params.size} parameters"
            )
        return Target(
            params=np.ascontiguousarray(state.params),
            residual=None if state.residual is None else np.ascontiguousarray(state.residual),
            momentum=np.ascontiguousarray(state.momentum),
            new_params=resources.empty(size),
            new_momentum=resources.empty(size),
            delta=delta,
            rate=(self.learning_rate, self.momentum),
        )

    def after(self, state: FragmentState, target: Target) -> FragmentState:
        """Returns the fragment as passes have left it in a target."""
        assert target.new_params is not None
        assert target.new_momentum is not None
        return FragmentState(params=target.new_params, momentum=target.new_momentum, version=state.version + 1)


def make_outer_step(learning_rate: float, momentum: float) -> OuterStep:
    """Returns the function that applies a merged pseudo-gradient D to a fragment.

    With learning rate eta and momentum mu, each product and each sum rounded to float32 by itself:
        m <- D + mu * m;    params <- params - eta * (D + mu * m);    version <- version + 1

    It takes and returns numpy vectors, and may be called from any thread. D is reference minus local, so it is
    descended. With momentum 0 it is plain SGD, and m is simply the last D.

    Raises:
        ConfigError: If the learning rate is not above 0, or the momentum not in [0, 1).
    """
    if not learning_rate > 0:
        raise ConfigError("outer_learning_rate", learning_rate, "must be above 0, 1 is usual")
    if not 0 <= momentum < 1:
        raise ConfigError("outer_momentum", momentum, "must be at least 0 and below 1, 0 is usual")
    return OuterStep(learning_rate, momentum)
