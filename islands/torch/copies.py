"""Copies of tensors on the CPU, made by a thread while the next step computes its gradients.

Parameters and the optimizer's state change in ``optimizer.step`` alone. Between two of these calls they can be read
beside the training thread: forward and backward passes only read them, too. A hook before the optimizer's step waits
until the copies are made; they usually are. A loop that writes to its parameters at another time is found by the
tensors' version counters, and told.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from queue import SimpleQueue

import torch

from broker.base.errors import ConfigError
from broker.process.signals import in_children

#: A thread that copies has ended its work long before.
END_WITHIN_S = 2.0
#: Less, of a fragment, the training thread had better copy itself: that takes it about 0.1 ms.
SMALL_BYTES = 1 << 20


class CopyThread:
    """Makes the copies; begun with the first one.

    Attributes:
        waited_s: How long the training thread has waited for them, in all.
        under_way: Tensors with their version counters, and what is done when they are copied, until :meth:`settle`. The
            copies themselves are their readers' alone.
    """

    def __init__(self) -> None:
        self.waited_s = 0.0
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self.under_way: list[tuple[torch.Tensor, int, Future[None]]] = []
        self._forget = in_children(self._forked)

    def take(self, tensors: Sequence[torch.Tensor]) -> list[Future[torch.Tensor]]:
        """Returns copies of the values of now, as they will be."""
        futures: list[Future[torch.Tensor]] = [Future() for _ in tensors]
        sources, made = [tensor.detach() for tensor in tensors], Future[None]()

        def copy() -> None:
            for source, future in zip(sources, futures, strict=True):
                try:
                    future.set_result(source.clone())
                except BaseException as err:  # noqa: BLE001 (raised where the copy is read)
                    future.set_exception(err)
            made.set_result(None)

        self.under_way += [(tensor, tensor._version, made) for tensor in tensors]
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="atoll-copies", daemon=True)
            self._thread.start()
            atexit.register(self.close)
        self._jobs.put(copy)
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
        """Ends the thread, when it has made what was asked for; an interpreter that ends under it would abort."""
        atexit.unregister(self.close)
        self._forget()
        self._jobs.put(None)
        if self._thread is not None:
            self._thread.join(END_WITHIN_S)

    def _forked(self) -> None:
        """Nobody copies in a child: an optimizer that steps there must not wait for it."""
        self.under_way, self._thread = [], None

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
            del job  # and the tensors that it holds
