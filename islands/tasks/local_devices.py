"""Data parallelism in one island: parameters on each of its devices, a part of every batch on each.

The step stays the same function. XLA splits it by where its arguments lie, and adds the gradients up over the devices.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from broker.wire.errors import ConfigError
from islands.tasks.task import Batch

#: The axis of the mesh.
DEVICES = "devices"


class LocalDevices:
    """All devices of this process, if it has several and is no part of a larger JAX program."""

    def __init__(self) -> None:
        """Asks JAX for the devices."""
        devices = jax.local_devices() if jax.process_count() == 1 else []
        self.count = max(1, len(devices))
        if self.count > 1:
            mesh = Mesh(np.array(devices), (DEVICES,))
            self._everywhere = NamedSharding(mesh, PartitionSpec())  # type: ignore[no-untyped-call]
            self._split = NamedSharding(mesh, PartitionSpec(DEVICES))  # type: ignore[no-untyped-call]

    def jit(self, function: Callable[..., Any], *, donate_argnums: tuple[int, ...] = ()) -> Callable[..., Any]:
        """Returns the jitted function; with several devices, each of them has all of its results."""
        if self.count == 1:
            return jax.jit(function, donate_argnums=donate_argnums)
        return jax.jit(function, donate_argnums=donate_argnums, out_shardings=self._everywhere)

    def settled(self, results: Any) -> Any:
        """Returns the results of a step; on several devices of the CPU only once they are computed.

        XLA's CPU backend can hang where several steps of one computation over such devices are under way: their
        collective operations wait for each other (seen with JAX 0.10 on two processors, without Atoll too).
        """
        if self.count > 1 and jax.default_backend() == "cpu":
            jax.block_until_ready(results)  # type: ignore[no-untyped-call]
        return results

    def split(self, batch: Batch) -> Batch:
        """Returns the batch divided over devices: every array whose first axis divides by their number.

        Other arrays go to each device whole, which changes nothing but the work. One device gets the batch as it is.

        Raises:
            ConfigError: No array of the batch can be divided, so that every device would do all of the work.
        """
        if self.count == 1:
            return batch
        leaves, structure = jax.tree.flatten(batch)
        if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
            return batch  # whoever traces this places its arrays
        divides = [bool(np.shape(leaf)) and np.shape(leaf)[0] % self.count == 0 for leaf in leaves]
        if not any(divides):
            cure = (
                f"must divide among the {self.count} devices of this island along the first axis of its arrays: "
                "change the batch, --devices-per-island or CUDA_VISIBLE_DEVICES"
            )
            raise ConfigError("task.data", ", ".join(str(list(np.shape(leaf))) for leaf in leaves), cure)
        places = [self._split if each else self._everywhere for each in divides]
        return jax.tree.unflatten(structure, jax.device_put(leaves, places))
