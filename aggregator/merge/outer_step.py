"""The outer step: one Nesterov update of one fragment (DiLoCo, https://arxiv.org/abs/2311.08105, algorithm 1).

The optimizer is ``optax.sgd`` itself, jitted. A fragment is cut into chunks of one fixed size, and what is left into
small ones, the last of them padded, for three reasons measured on 25 M parameters (benchmarks/merge.py): two
compilations serve every fragment of every model, where one per size costs 45 ms each; XLA leaves chunks this small to
the calling thread, so the step never competes with training for other cores; and the temporary memory is a chunk, not a
fragment. It is also the faster way (94 ms against 161 ms for the whole vector, since a chunk's copies stay in the
cache).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from broker.wire.errors import ConfigError, LocalProtocolError

Vector = NDArray[np.float32]

#: Elements per jitted call: 512 KiB of float32.
CHUNK = 1 << 17
#: Of what is less than a whole chunk: a fragment of 15,000 elements takes 0.06 ms, as a whole one 0.3 ms.
SMALL = CHUNK >> 3
#: So many small ones take as long as a whole one.
MOST_SMALL = 5


class FragmentState(NamedTuple):
    """One fragment of the global model at one version. The arrays are never written to once they are in here."""

    params: Vector  # float32 [elements of the fragment], tensors in manifest order
    momentum: Vector  # float32, same shape: optax's trace
    version: int  # merges applied
    residual: Vector | None = None  # float32, same shape: the exact parameters less ``params``; None: there is none

    @property
    def exact(self) -> Vector:
        """The parameters as the outer steps have led to them, before any was rounded for the wire."""
        return self.params if self.residual is None else self.params + self.residual


OuterStep = Callable[[FragmentState, Vector], FragmentState]


def seeded(params: Vector) -> FragmentState:
    """Returns version 0 of a fragment: the given parameters at rest."""
    return FragmentState(params=params, momentum=np.zeros_like(params), version=0)


def make_outer_step(learning_rate: float, momentum: float) -> OuterStep:
    """Returns the function that applies a merged pseudo-gradient D to a fragment.

    With learning rate eta and momentum mu:
        m <- D + mu * m;    params <- params - eta * (D + mu * m);    version <- version + 1

    The function takes and returns numpy vectors, float32 and contiguous, and may be called from any thread. The old
    state stays valid, since its bytes may still be on their way to islands. D is reference minus local, so it is
    descended. With momentum 0 it is plain SGD, and m is simply the last D.

    Raises:
        ConfigError: If the learning rate is not above 0, or the momentum not in [0, 1).
    """
    if not learning_rate > 0:
        raise ConfigError("outer_learning_rate", learning_rate, "must be above 0, 1 is usual")
    if not 0 <= momentum < 1:
        raise ConfigError("outer_momentum", momentum, "must be at least 0 and below 1, 0 is usual")
    update = _jitted_update(learning_rate, momentum)

    def outer_step(state: FragmentState, merged: Vector) -> FragmentState:
        """Returns the fragment after one outer step; raises LocalProtocolError if the arrays do not fit each other."""
        size = state.params.size
        for name, array in (("params", state.params), ("momentum", state.momentum), ("merged", merged)):
            if array.shape != (size,) or array.dtype != np.float32:
                got = f"{array.dtype} of shape {array.shape}"
                raise LocalProtocolError(f"{name} of an outer step is {got}, must be float32 of shape ({size},)")
        params, trace = np.empty(size, np.float32), np.empty(size, np.float32)
        for here in _chunks(size):
            new_params, new_trace = update(*(_padded(array[here]) for array in (state.params, state.momentum, merged)))
            params[here] = np.asarray(new_params)[: here.stop - here.start]
            trace[here] = np.asarray(new_trace)[: here.stop - here.start]
        return FragmentState(params=params, momentum=trace, version=state.version + 1)

    return outer_step


@cache
def _jitted_update(learning_rate: float, momentum: float) -> Callable[..., tuple[Any, Any]]:
    # Imported here: the store, the simulator and the tests of the core use FragmentState without a JAX runtime.
    import jax
    import optax

    optimizer = optax.sgd(learning_rate, momentum=momentum, nesterov=True)

    def update(params: jax.Array, trace: jax.Array, merged: jax.Array) -> tuple[Any, Any]:
        # The state of sgd is (TraceState, the stateless scaling by the learning rate).
        opt_state = (optax.TraceState(trace=trace), *optimizer.init(params)[1:])
        updates, (trace_state, *_) = optimizer.update(merged, opt_state, params)
        return optax.apply_updates(params, updates), trace_state.trace

    # Donating lets the outputs take over the device copies of the first two arguments.
    return jax.jit(update, donate_argnums=(0, 1))


def _chunks(size: int) -> Iterator[slice]:
    """Cuts a fragment into whole chunks, and what is left into small ones while these are faster than one more."""
    whole = size - size % CHUNK
    if size - whole > MOST_SMALL * SMALL:
        whole = size
    yield from (slice(start, min(start + CHUNK, size)) for start in range(0, whole, CHUNK))
    yield from (slice(start, min(start + SMALL, size)) for start in range(whole, size, SMALL))


def _padded(chunk: Vector) -> Vector:
    """Returns the chunk, or a copy with zeros behind, of the size of a small or a whole one."""
    if chunk.size in (CHUNK, SMALL):
        return chunk
    padded = np.zeros(SMALL if chunk.size < SMALL else CHUNK, np.float32)
    padded[: chunk.size] = chunk
    return padded
