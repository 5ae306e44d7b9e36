"""An island of Atoll in the same loop: in PyTorch where that is installed, else in JAX."""

from __future__ import annotations

import argparse
import importlib.util
import time
from typing import Any

from benchmarks.fleet import RUN
from benchmarks.peers.loop import COLUMNS, TENSORS, Lines, System, resting_bytes, rows_of, train
from broker.wire.messages import Codec
from islands.session.session import Copies, Session

TOKENS = 1000


class Watch:
    """Notes when fragments are captured and adopted, a capture at the boundary before: the longest time.

    The one place where a benchmark reaches into an island: its own clock says nothing of single rounds.
    """

    def __init__(self, lines: Lines) -> None:
        self._lines, self._boundary_s = lines, time.monotonic()
        self._captured: dict[int, float] = {}
        self._versions: tuple[int, ...] = ()
        begin = Session._begin_capture

        def begin_capture(session: Session, fragment_id: int, copies: Copies, codec: Codec) -> None:
            self._captured[fragment_id] = self._boundary_s
            begin(session, fragment_id, copies, codec)

        Session._begin_capture = begin_capture  # type: ignore[assignment, method-assign]

    def boundary(self) -> None:
        """To be called before the island's step."""
        self._boundary_s = time.monotonic()

    def adopted(self, versions: tuple[int, ...]) -> None:
        """To be called after it."""
        before, self._versions = self._versions, versions
        for number, (old, new) in enumerate(zip(before, versions, strict=False)):
            if new > old and number in self._captured:
                self._lines.say("synced", fragment=number, capture_s=self._captured.pop(number), committed=True)


class Watched(System):
    """An island whose captures and adoptions are noted."""

    _watch: Watch
    _island: Any

    def look(self) -> None:
        """Notes what was adopted."""
        self._watch.adopted(self._island.versions)


class JaxIsland(Watched):
    """An island of a JAX model, on CPU; the step is jitted and donates what it is given."""

    def __init__(self, args: argparse.Namespace, lines: Lines) -> None:
        import jax
        import jax.numpy as jnp

        import islands

        self._jax: Any = jax
        self._watch = Watch(lines)
        shape = rows_of(args.parameters), COLUMNS
        self._params: Any = {f"w{i:02}": jnp.zeros(shape) for i in range(TENSORS)}
        self._change = jax.jit(
            lambda params: {name: each.at[0].add(-1e-3) for name, each in params.items()}, donate_argnums=0
        )
        self._finite = jax.jit(lambda params: jnp.isfinite(jnp.stack([each[-1, -1] for each in params.values()])).all())
        self._jax.block_until_ready(self._params)
        lines.say("resting", bytes=resting_bytes())
        self._island = islands.join(
            args.coordinator,
            self._params,
            run=RUN,
            island_id=f"peer-{args.number}",
            tokens_per_step=TOKENS,
            donor_wait_s=0.0,
        )
        self._params = self._island.restore(self._params)[0]

    def change(self) -> None:
        """Changes a row of every tensor."""
        self._params = self._jax.block_until_ready(self._change(self._params))

    def step(self) -> None:
        """The island's step."""
        self._watch.boundary()
        self._params = self._island.step(self._params, tokens=TOKENS)

    def poison(self) -> None:
        """Makes all parameters NaN."""
        self._params = self._jax.tree.map(lambda each: each * float("nan"), self._params)

    def finite(self) -> bool:
        """Returns False once NaN is in this peer's model. One number of each tensor tells: all would be NaN."""
        return bool(self._finite(self._params))


class TorchIsland(Watched):
    """An island of a PyTorch model."""

    def __init__(self, args: argparse.Namespace, lines: Lines) -> None:
        import torch

        import islands.torch

        self._torch: Any = torch
        torch.set_num_threads(1)
        self._watch = Watch(lines)
        self._model = torch.nn.ParameterList([torch.zeros(rows_of(args.parameters), COLUMNS) for _ in range(TENSORS)])
        self._optimizer = torch.optim.SGD(list(self._model), lr=1e-3)
        for parameter in self._model:
            parameter.grad = torch.zeros_like(parameter)
            parameter.grad[0] = 1.0
        lines.say("resting", bytes=resting_bytes())
        self._island = islands.torch.join(
            args.coordinator,
            self._model,
            self._optimizer,
            run=RUN,
            island_id=f"peer-{args.number}",
            tokens_per_step=TOKENS,
            inner_optimizer="sgd",
            donor_wait_s=0.0,
        )

    def change(self) -> None:
        """A step of the inner optimizer."""
        self._optimizer.step()

    def step(self) -> None:
        """The island's step."""
        self._watch.boundary()
        self._island.step(tokens=TOKENS)

    def poison(self) -> None:
        """Makes all parameters NaN."""
        with self._torch.no_grad():
            for each in self._model:
                each.fill_(float("nan"))

    def finite(self) -> bool:
        """Returns False once NaN is in this peer's model. One number of each tensor tells: all would be NaN."""
        return all(bool(self._torch.isfinite(each[-1, -1])) for each in self._model)


if __name__ == "__main__":
    train(TorchIsland if importlib.util.find_spec("torch") else JaxIsland, __doc__)
