"""The part of :mod:`islands.placement` that is JAX: jitted copies and installations, placement, random keys."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from broker.errors import ConfigError
from islands.reference import adopted

Array = npt.NDArray[Any]


@jax.jit
def _copies(leaves: list[jax.Array]) -> list[jax.Array]:
    return [jnp.copy(leaf) for leaf in leaves]


@functools.cache
def _installer(keep: float, shardings: tuple[Any, ...] | None) -> Callable[..., list[jax.Array]]:
    """Returns the jitted installation; where ``shardings`` are given, its results have exactly these."""

    def install(leaves: list[jax.Array], shifts: list[jax.Array]) -> list[jax.Array]:
        return [adopted(leaf, shift, keep) for leaf, shift in zip(leaves, shifts, strict=True)]

    if shardings is None:
        return jax.jit(install)
    return jax.jit(install, out_shardings=list(shardings))


def copy(leaves: Sequence[jax.Array]) -> list[jax.Array]:
    """Dispatches copies, one call for all leaves on the same devices."""
    return _grouped(leaves, lambda indices, _: _copies([leaves[i] for i in indices]))


def install(leaves: Sequence[jax.Array], shifts: Sequence[jax.Array], keep: float) -> list[jax.Array]:
    """Dispatches ``keep * leaf + shift``; every result has the dtype and sharding of its leaf."""

    def call(indices: list[int], committed: bool) -> list[jax.Array]:
        # Stated rather than left to the compiler: an equal placement under another name would retrace the train step.
        shardings = tuple(leaves[i].sharding for i in indices) if committed else None
        return _installer(keep, shardings)([leaves[i] for i in indices], [shifts[i] for i in indices])

    return _grouped(leaves, call)


def _grouped(leaves: Sequence[jax.Array], call: Callable[[list[int], bool], list[jax.Array]]) -> list[jax.Array]:
    """Calls once per set of devices: one computation cannot mix them, nor committed with uncommitted arrays."""
    groups: dict[tuple[bool, Any], list[int]] = {}
    for i, leaf in enumerate(leaves):
        committed = leaf.committed
        groups.setdefault((committed, leaf.sharding.device_set if committed else None), []).append(i)
    if len(groups) == 1:
        (((committed, _), indices),) = groups.items()
        return call(indices, committed)
    results: list[Any] = [None] * len(leaves)
    for (committed, _), indices in groups.items():
        for i, result in zip(indices, call(indices, committed), strict=True):
            results[i] = result
    return results


def put(value: Array | jax.Array, sharding: Any) -> jax.Array:
    """Places an array: committed to ``sharding``, or uncommitted on the default device where it is None."""
    placed: jax.Array = jax.device_put(value) if sharding is None else jax.device_put(value, sharding)
    return placed


def to_host(leaf: jax.Array) -> Array:
    """Returns the array's elements, or the data of a random key; waits until they are computed.

    Raises:
        ConfigError: If the array was donated after it was handed to the island.
    """
    if leaf.is_deleted():
        cure = "it was donated after island.step: go on with what step returns, never with what it was given"
        raise ConfigError("params", f"deleted {leaf.dtype}{list(leaf.shape)}", cure)
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return np.asarray(jax.random.key_data(leaf))
    return np.asarray(leaf)


def from_host(value: Array, like: jax.Array) -> jax.Array:
    """Returns ``value`` with the dtype and in the place of ``like``."""
    sharding = like.sharding if like.committed else None
    if jnp.issubdtype(like.dtype, jax.dtypes.prng_key):
        key = jax.random.wrap_key_data(jnp.asarray(value), impl=jax.random.key_impl(like))
        return put(key, sharding) if sharding is not None else key
    return put(value.astype(like.dtype), sharding)
