"""Copies of tensors on the CPU, made by a thread while the next step computes its gradients.

Parameters and the optimizer's state change in ``optimizer.step`` alone. Between two of these calls they can be read
beside the training thread: forward and backward passes only read them, too. A hook before the optimizer's step waits
until the copies are made; they usually are. A loop that writes to its parameters at another time is found by the
tensors' version counters, and told.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

import torch

from broker.base.errors import ConfigError
from broker.process.signals import in_children

#: Less, of a fragment, the training thread had better copy itself: that takes it about 0.1 ms.
SMALL_BYTES = 1 << 20


class CopyThread:
    """A thread that copies tensors; it starts with the first copy.

    Attributes:
        waited_s: How long the training thread has waited for them, in all.
        under_way: Tensors with their version counters, and what is done when they are copied, until :meth:`settle`. The
            copies themselves are their readers' alone.
    """

    def __init__(self) -> None:
        self.waited_s = 0.0
        self._pool = ThreadPoolExecutor(1, "atoll-copies")  # the interpreter waits for it as it ends
        self.under_way: list[tuple[torch.Tensor, int, Future[bool]]] = []
        self._forget = in_children(self._forked)

    def take(self, tensors: Sequence[torch.Tensor]) -> list[Future[torch.Tensor]]:
        """Returns copies of the current values, which the thread has yet to make."""
        futures = [self._pool.submit(tensor.detach().clone) for tensor in tensors]
        made = self._pool.submit(bool)  # after them, and holds none of them
        self.under_way += [(tensor, tensor._version, made) for tensor in tensors]
        return futures

    def settle(self) -> None:
        """Waits until the tensors may be written to.

        Raises:
            ConfigError: One of them has been, meanwhile: a copy may be of both values.
        """
        if not self.under_way:
            return
        began_s = time.perf_counter()
        under_way, self.under_way = self.under_way, []
        wait({made for _, _, made in under_way})
        self.waited_s += time.perf_counter() - began_s
        for tensor, version, _ in under_way:
            if tensor._version != version:
                cure = "was written to between island.step and optimizer.step, while it was copied: write to parameters"
                cure += " before island.step, or join with background_copies=False"
                raise ConfigError("params", f"a tensor {tuple(tensor.shape)}", cure)

    def close(self) -> None:
        """Ends the thread after its pending copies."""
        self._forget()
        self._pool.shutdown()

    def _forked(self) -> None:
        """Clears pending copies in a forked child, which has no thread: its optimizer must not wait."""
        self.under_way, self._pool = [], ThreadPoolExecutor(1)
