"""An island of a JAX model in the same loop."""

from __future__ import annotations

import argparse
import time
from typing import Any

from benchmarks.fleet import RUN
from benchmarks.peers.loop import COLUMNS, TENSORS, Lines, System, resting_bytes, rows_of, train
from broker.wire.messages import Codec
from islands.session.session import Session
from islands.session.training_state import Copies

TOKENS = 1000


class Island(System):
    """An island on CPU whose captures and adoptions are noted; the step is jitted and donates what it is given.

    The one place where a benchmark reaches into an island: its own clock says nothing of single rounds. A capture is
    noted at the boundary before, which is the longest time.
    """

    def __init__(self, args: argparse.Namespace, lines: Lines) -> None:
        import jax
        import jax.numpy as jnp

        import islands

        self._jax: Any = jax
        self._watch(lines)
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

    def _watch(self, lines: Lines) -> None:
        self._lines, self._boundary_s = lines, time.monotonic()
        self._captured: dict[int, float] = {}
        self._versions: tuple[int, ...] = ()
        begin = Session._begin_capture

        def begin_capture(session: Session, fragment_id: int, copies: Copies, codec: Codec) -> None:
            self._captured[fragment_id] = self._boundary_s
            begin(session, fragment_id, copies, codec)

        Session._begin_capture = begin_capture  # type: ignore[assignment, method-assign]

    def change(self) -> None:
        self._params = self._jax.block_until_ready(self._change(self._params))

    def step(self) -> None:
        self._boundary_s = time.monotonic()
        self._params = self._island.step(self._params, tokens=TOKENS)

    def look(self) -> None:
        before, self._versions = self._versions, self._island.versions
        for number, (old, new) in enumerate(zip(before, self._versions, strict=False)):
            if new > old and number in self._captured:
                self._lines.say("synced", fragment=number, capture_s=self._captured.pop(number), committed=True)

    def poison(self) -> None:
        self._params = self._jax.tree.map(lambda each: each * float("nan"), self._params)

    def finite(self) -> bool:
        return bool(self._finite(self._params))


if __name__ == "__main__":
    train(Island)
