"""JAX's part of :mod:`islands.arrays.placement`: jitted copies, installation, placement, random keys.

What is on several devices is copied, installed and sampled by one computation for each device. One for all of them
together would be dispatched only once its inputs are computed, at least on CPUs: it made the training thread wait for
most of a step, where a shard by itself takes a tenth of a millisecond.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from broker.base.errors import ConfigError
from broker.wire.fragments import Region
from islands.arrays.reference import adopted
from islands.arrays.regions import Spread, owners, part_of, region_of

Array = npt.NDArray[Any]

#: Arrays of at least this many bytes go to the host through pinned memory; smaller ones are quick anyway.
PINNED_ON, PINNED_FROM = "gpu", 1 << 20


class Together:
    """Leaves on the same devices, with the computations that copy and replace them.

    Args:
        shardings: The shardings of the leaves; None for uncommitted ones, whose results are uncommitted.
    """

    def __init__(self, shardings: Sequence[Any]) -> None:
        self._several = shardings[0] is not None and len(shardings[0].device_set) > 1
        self._shardings = (None,) if self._several else tuple(shardings)
        self._installers: dict[float, Callable[..., list[jax.Array]]] = {}

    def copy(self, leaves: list[jax.Array]) -> list[jax.Array]:
        """Dispatches copies."""
        return _by_device(copy_here, leaves) if self._several else copy_here(leaves)

    def install(self, leaves: list[jax.Array], shifts: list[jax.Array], keep: float) -> list[jax.Array]:
        """Dispatches ``keep * leaf + shift``, into the shardings of the leaves.

        Args:
            leaves: The parameters.
            shifts: In their shapes.
            keep: In (0, 1].
        """
        call = self._installers.get(keep)
        if call is None:
            call = self._installers[keep] = installer(keep, self._shardings)
        if self._several:
            shifts = [_beside(leaf, shift) for leaf, shift in zip(leaves, shifts, strict=True)]
        return _by_device(call, leaves, shifts) if self._several else call(leaves, shifts)


def _beside(leaf: jax.Array, shift: jax.Array) -> jax.Array:
    """Returns a shift in its leaf's sharding, which a train step may have changed meanwhile."""
    alike = shift.sharding == leaf.sharding or shift.sharding.is_equivalent_to(leaf.sharding, leaf.ndim)
    return shift if alike else jax.device_put(shift, leaf.sharding)


def copy_here(leaves: list[jax.Array]) -> list[jax.Array]:
    """Copies arrays on one device by one computation."""
    copies: list[jax.Array] = _copies(leaves)[0]
    return copies


@jax.jit
def _copies(leaves: list[jax.Array]) -> tuple[list[jax.Array], jax.Array | None]:
    """Returns the copies, and on CPUs a sum that nobody reads.

    On CPUs XLA runs a computation of less than a thousand additions on the thread that calls it, and a copy has none:
    the training thread copied 17 MB in 3 ms. With the sum another thread does it.
    """
    largest = max(leaves, key=lambda leaf: leaf.size)
    if jnp.issubdtype(largest.dtype, jax.dtypes.prng_key):
        count = None
    else:
        count = jax.lax.platform_dependent(largest, cpu=_counted, default=lambda leaf: jnp.zeros((), jnp.float32))
    return [jnp.copy(leaf) for leaf in leaves], count


def _counted(leaf: jax.Array) -> jax.Array:
    return jnp.sum((leaf.reshape(-1)[:2048] != 0).astype(jnp.float32))  # of any dtype, int2 and int4 too


def _by_device(
    call: Callable[..., list[jax.Array]], leaves: list[jax.Array], *more: list[jax.Array]
) -> list[jax.Array]:
    """Calls a function of lists of arrays once per device; results get the shardings of ``leaves``.

    Args:
        call: Jitted, elementwise.
        leaves: On the same devices, of which there are several.
        more: Further lists, of arrays that are sharded alike.
    """
    shards = [[shard.data for leaf in column for shard in _in_order(leaf)] for column in (leaves, *more)]
    found, here = on_each_device(call, *shards), len(leaves[0].sharding.addressable_devices)
    return [
        jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, found[i * here : (i + 1) * here])
        for i, leaf in enumerate(leaves)
    ]


def on_each_device(call: Callable[..., list[jax.Array]], *columns: Sequence[jax.Array]) -> list[jax.Array]:
    """Calls a function of lists of arrays once per device, with the arrays on it; returns all results.

    Args:
        call: Jitted, elementwise.
        columns: Arrays of one device each; those with one number are on the same.
    """
    groups: dict[jax.Device, list[int]] = {}
    for i, array in enumerate(columns[0]):
        groups.setdefault(next(iter(array.devices())), []).append(i)
    results: dict[int, jax.Array] = {}
    for numbers in groups.values():
        found = call(*([column[i] for i in numbers] for column in columns))
        results.update(zip(numbers, found, strict=True))
    return [results[i] for i in range(len(columns[0]))]


def _in_order(leaf: jax.Array) -> list[Any]:
    """Returns the shards that are on this host, in the order of their devices."""
    return sorted(leaf.addressable_shards, key=lambda shard: shard.device.id)


# --- rows of a leaf that the run has cut ----------------------------------------------------------------------------


def rows_of(leaf: jax.Array, start: int, stop: int) -> jax.Array:
    """Dispatches a copy of some rows of the first axis, with the sharding of ``leaf`` but for that axis."""
    if _by_rows(leaf):
        gathered: jax.Array = _slicer(start, stop, _without_rows(leaf))([leaf])[0]
        return gathered
    if not _is_spread(leaf):
        found: jax.Array = _slicer(start, stop, leaf.sharding if leaf.committed else None)([leaf])[0]
        return found
    shards = on_each_device(_slicer(start, stop, None), [shard.data for shard in _in_order(leaf)])
    return jax.make_array_from_single_device_arrays((stop - start, *leaf.shape[1:]), leaf.sharding, shards)


def with_rows(leaf: jax.Array, sections: Sequence[tuple[int, jax.Array]]) -> jax.Array:
    """Dispatches a copy of ``leaf`` with some rows replaced, on the same devices.

    Args:
        leaf: The leaf before.
        sections: Each with the number of its first row, placed as :func:`rows_of` does.
    """
    starts, arrays = tuple(start for start, _ in sections), [section for _, section in sections]
    if _by_rows(leaf) or not _is_spread(leaf):
        sharding = leaf.sharding if leaf.committed else None
        found: jax.Array = _updater(starts, sharding)([leaf], *([each] for each in arrays))[0]
        return found
    columns = [[shard.data for shard in _in_order(each)] for each in (leaf, *arrays)]
    shards = on_each_device(_updater(starts, None), *columns)
    return jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, shards)


def _is_spread(leaf: jax.Array) -> bool:
    return len(leaf.sharding.device_set) > 1


def _by_rows(leaf: jax.Array) -> bool:
    """Returns whether an array is sharded along its first axis, so that no device has whole sections."""
    return _is_spread(leaf) and leaf.sharding.shard_shape(leaf.shape)[0] != leaf.shape[0]


def _without_rows(leaf: jax.Array) -> Any:
    """Returns the sharding of a section: that of the leaf, but every device has all rows of it."""
    sharding = leaf.sharding
    if isinstance(sharding, NamedSharding):
        return NamedSharding(sharding.mesh, PartitionSpec(None, *sharding.spec[1:]))  # type: ignore[no-untyped-call]
    devices = np.array([shard.device for shard in _in_order(leaf)])
    return NamedSharding(Mesh(devices, ("all",)), PartitionSpec())  # type: ignore[no-untyped-call]


@functools.cache
def _slicer(start: int, stop: int, sharding: Any) -> Callable[..., list[jax.Array]]:
    """Returns a jitted function that slices arrays on the same devices; results get ``sharding`` if given."""

    def rows(leaves: list[jax.Array]) -> list[jax.Array]:
        return [jax.lax.slice_in_dim(leaf, start, stop) for leaf in leaves]

    return jax.jit(rows) if sharding is None else jax.jit(rows, out_shardings=[sharding])


@functools.cache
def _updater(starts: tuple[int, ...], sharding: Any) -> Callable[..., list[jax.Array]]:
    """Returns a jitted function that replaces rows of arrays on the same devices, as in :func:`_slicer`."""

    def update(leaves: list[jax.Array], *sections: list[jax.Array]) -> list[jax.Array]:
        for start, column in zip(starts, sections, strict=True):
            changed = zip(leaves, column, strict=True)
            leaves = [leaf.at[start : start + len(section)].set(section) for leaf, section in changed]
        return leaves

    return jax.jit(update) if sharding is None else jax.jit(update, out_shardings=[sharding])


# --- samples, installation, placement -------------------------------------------------------------------------------


def sampled_region(sharding: Any, shape: tuple[int, ...]) -> tuple[slice, ...]:
    """Returns the sampled part of an array: the first device's; all of it if it is on one device."""
    if sharding is None or len(sharding.device_set) == 1:
        return (slice(None),) * len(shape)
    first = min(sharding.addressable_devices, key=lambda device: device.id)
    return tuple(sharding.addressable_devices_indices_map(shape)[first])


def first_shard(leaf: jax.Array) -> jax.Array:
    """Returns the shard to sample: the one on this host's first device."""
    if len(leaf.sharding.device_set) == 1:
        return leaf
    shard: jax.Array = _in_order(leaf)[0].data
    return shard


def sample(leaves: list[jax.Array], places: list[jax.Array]) -> list[jax.Array]:
    """Dispatches copies of a few elements of leaves that are on the same devices.

    Args:
        leaves: Arrays of at least one dimension.
        places: For each, int32 (dimensions, elements), within :func:`sampled_region`.

    Raises:
        ConfigError: If an array was donated.
    """
    for leaf in leaves:
        _check_alive(leaf)
    found: list[jax.Array] = _sample([first_shard(leaf) for leaf in leaves], places)
    return found


@jax.jit
def _sample(leaves: list[jax.Array], places: list[jax.Array]) -> list[jax.Array]:
    return [leaf[tuple(place)] for leaf, place in zip(leaves, places, strict=True)]


@functools.cache
def installer(keep: float, shardings: tuple[Any, ...]) -> Callable[..., list[jax.Array]]:
    """Returns the jitted ``keep * leaf + shift`` of lists of both; ``shardings`` as of :class:`Together`."""

    def install(leaves: list[jax.Array], shifts: list[jax.Array]) -> list[jax.Array]:
        moved = [adopted(leaf, shift, keep) for leaf, shift in zip(leaves, shifts, strict=True)]
        return [_into(leaf, x) if leaf.weak_type else x for leaf, x in zip(leaves, moved, strict=True)]

    if shardings[0] is None:
        return jax.jit(install)
    # Stated rather than left to the compiler: an equal placement under another name would retrace the train step.
    return jax.jit(install, out_shardings=list(shardings))


def put(value: Array | jax.Array, sharding: Any, *, weak: bool = False) -> jax.Array:
    """Places an array: committed to ``sharding``, or uncommitted on the default device where it is None.

    Args:
        value: On the host, or a random key.
        sharding: Where to.
        weak: Whether it is to be of a weak type, where one is of its dtype.
    """
    if weak:
        zeros = jnp.full(value.shape, 0 if value.dtype == bool else value.dtype.type(0).item())
        blank = zeros > 0 if value.dtype == bool else zeros  # of Python numbers, and so weak
        value = _into(blank, value) if blank.dtype == value.dtype else value
    placed: jax.Array = jax.device_put(value) if sharding is None else jax.device_put(value, sharding)
    return placed


def _into(like: jax.Array, value: Any) -> jax.Array:
    """Returns the elements of ``value`` with the dtype of ``like``, weakly typed if ``like`` is."""
    return like.at[...].set(value)


def to_host(leaf: jax.Array) -> Array:
    """Returns the array's elements, or the data of a random key; waits until they are computed.

    Raises:
        ConfigError: If the array was donated after it was handed to the island.
    """
    _check_alive(leaf)
    if leaf.is_fully_replicated:
        leaf = leaf.addressable_data(0)  # no computation of all hosts together
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return np.asarray(jax.random.key_data(leaf))
    if _is_spread(leaf):
        whole = np.empty(leaf.shape, leaf.dtype)
        for shard in leaf.addressable_shards:
            if shard.replica_id == 0:
                whole[shard.index] = _fetched(shard.data)
        return whole
    return _fetched(leaf)


def _fetched(array: jax.Array) -> Array:
    """Returns the elements of arrays on one device; waits until they are computed.

    From a GPU to memory that is not pinned JAX copies at 1.4 GB/s, and what the loop itself reads, such as its loss,
    waits behind that (docs/accelerators.md).
    """
    (device,) = array.devices()
    if device.platform == PINNED_ON and array.nbytes >= PINNED_FROM:
        array = jax.device_put(array, SingleDeviceSharding(device, memory_kind="pinned_host"))
    return np.asarray(array)


def here(leaf: jax.Array) -> Array | Spread:
    """Returns this host's part of an array: all of it, or some regions; waits until they are computed.

    Raises:
        ConfigError: If the array was donated after it was handed to the island.
    """
    if leaf.is_fully_addressable or leaf.is_fully_replicated:
        return to_host(leaf)
    _check_alive(leaf)
    shape = tuple(leaf.shape)
    parts = {region_of(shard.index, shape): _fetched(shard.data) for shard in leaf.addressable_shards}
    return Spread(shape, np.dtype(leaf.dtype), parts)


def owned(leaf: jax.Array) -> tuple[Region, ...] | None:
    """Returns the regions that this host hands over, since no earlier host has them; None if it has all."""
    if leaf.is_fully_addressable or leaf.is_fully_replicated:
        return None
    shape, by_host = tuple(leaf.shape), dict[int, list[Region]]()
    for device, index in leaf.sharding.devices_indices_map(shape).items():
        process = device.process_index  # type: ignore[attr-defined]
        by_host.setdefault(process, []).append(region_of(index, shape))
    here = jax.process_index()
    return tuple(sorted(region for region, host in owners(by_host).items() if host == here))


def part_to_host(leaf: Any, region: Region, device: jax.Device) -> Array:
    """Returns the elements of a region on ``device``; waits until they are computed."""
    if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable:
        return np.asarray(leaf)[region.slices]
    _check_alive(leaf)
    return _fetched(next(shard.data for shard in leaf.addressable_shards if shard.device == device))


def _check_alive(leaf: jax.Array) -> None:
    if leaf.is_deleted():
        cure = "it was donated after island.step: continue with the result of step, never with its argument"
        raise ConfigError("params", f"deleted {leaf.dtype}{list(leaf.shape)}", cure)


def from_host(value: Array | Spread, like: jax.Array) -> jax.Array:
    """Returns ``value`` with the dtype and sharding of ``like``."""
    sharding = like.sharding if like.committed else None
    if not like.is_fully_addressable:
        return _spread(value, like)
    assert not isinstance(value, Spread), "what is on this host alone comes as a whole"
    if jnp.issubdtype(like.dtype, jax.dtypes.prng_key):
        key = jax.random.wrap_key_data(jnp.asarray(value), impl=jax.random.key_impl(like))
        return put(key, sharding) if sharding is not None else key
    return put(value.astype(like.dtype), sharding, weak=like.weak_type)


def _spread(value: Array | Spread, like: jax.Array) -> jax.Array:
    """Returns an array spread over several hosts; each host places the elements of its own devices."""
    shape, shards = tuple(like.shape), []
    if jnp.issubdtype(like.dtype, jax.dtypes.prng_key):
        assert not isinstance(value, Spread), "random keys are whole on every host"
        key = jax.random.wrap_key_data(jnp.asarray(value), impl=jax.random.key_impl(like.addressable_data(0)))
        shards = [jax.device_put(key, shard.device) for shard in like.addressable_shards]
    else:
        for shard in like.addressable_shards:
            part = part_of(value, region_of(shard.index, shape)).astype(like.dtype)
            shards.append(jax.device_put(part, shard.device))
    return jax.make_array_from_single_device_arrays(shape, like.sharding, shards)
