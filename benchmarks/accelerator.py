"""Measures Atoll's cost beside an accelerator: a step's time with and without it, and copying rates.

One island trains a stack of square layers beside a broker and an aggregator; the batch is chosen so that a step takes
about ``--step`` seconds. Each loop reads the loss of the step before, as loops that log do. ``step, ms`` is timed over
the same steps before the island joins and after its first rounds; ``sync share`` is the part of the second time that
``island.step`` took. Copies are those of one fragment, as Atoll makes them. It runs on a CPU too, with small models.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from benchmarks import output
from benchmarks.fleet import ROOT_ENVIRONMENT, RUN, Hub, module_command, peak_bytes
from benchmarks.output import Column, Printer
from benchmarks.sync_share import finished, run
from ops.processes.child_process import ProcessSpec

COLUMNS = (
    Column(key="framework", title="framework"),
    Column(key="device", title="device"),
    Column(key="parameters", title="parameters", form=","),
    Column(key="rows", title="rows of a batch", form=","),
    Column(key="alone_ms", title="step alone, ms", form=".2f"),
    Column(key="step_ms", title="with Atoll, ms", form=".2f"),
    Column(key="slowdown", title="slowdown", form="+.2%"),
    Column(key="sync_share", title="sync share", form=".2%"),
    Column(key="longest_ms", title="longest call, ms", form=".1f"),
    Column(key="versions", title="versions"),
    Column(key="to_host_gbs", title="to the host, GB/s", form=".1f"),
    Column(key="to_device_gbs", title="to the device, GB/s", form=".1f"),
    Column(key="host_models", title="host memory, models", form=".1f"),
)
LAYERS = 24  #: of a model, and its fragments: one matrix each
FIRST_ROWS = 64  #: of the batch with which the right one is found
TRIES = 5  #: of each copy, of which the best counts


class Loop(Protocol):
    """A training loop of one framework."""

    device: str

    def prepare(self, rows: int) -> None:
        """Makes a batch of so many rows."""

    def train(self) -> Any:
        """Dispatches a step; returns its loss."""

    def wait(self, loss: Any) -> None:
        """Waits for the loss of a step."""

    def join(self, address: str, rows: int) -> None:
        """Makes the loop an island."""

    def step(self, rows: int, loss: Any) -> None:
        """Calls ``island.step``."""

    def copies(self) -> tuple[Callable[[], object], Callable[[], object]]:
        """Returns two functions, each for one matrix: to the host and to the device; both wait."""

    island: Any


def measure(args: argparse.Namespace) -> int:
    """Measures each case in processes of its own, and prints a row for it."""
    printer = Printer(COLUMNS, as_json=args.json)
    sizes = (1_000_000,) if args.quick else args.parameters
    for framework in args.framework or ["jax"]:
        for size in sizes:
            printer.say(f"{framework}, {size:,} parameters")
            with tempfile.TemporaryDirectory(dir=args.dir, prefix="atoll-accelerator-") as directory:
                printer.add(_case(Path(directory), framework, size, args))
    printer.close()
    return 0


def _case(directory: Path, framework: str, size: int, args: argparse.Namespace) -> dict[str, Any]:
    steps, step_s = (60, 0.01) if args.quick else (args.steps, args.step)
    settings: dict[str, Any] = {
        "islands": 1,
        "fragments": LAYERS,
        "sync_interval": LAYERS if args.quick else args.sync_interval,
    }
    with Hub(directory, total_tokens=0, **settings) as hub:
        out = directory / "worker.json"
        spec = {"framework": framework, "size": size, "steps": steps, "step_s": step_s, "out": os.fspath(out)}
        command = module_command("benchmarks.accelerator", "--worker", json.dumps(spec | {"address": hub.address}))
        # Not of one thread, as the hub's processes are: it has the machine as a team's own loop has it.
        hub.start([ProcessSpec(name="worker", command=command, environment=ROOT_ENVIRONMENT, ends_by_itself=True)])
        return finished(hub, out, within_s=300 + 10 * steps * step_s, doing=f"trained {steps} steps")


# --- the island ---------------------------------------------------------------------------------------------------


def work(spec: dict[str, Any]) -> int:
    """Trains alone, then as an island, and writes down what was seen."""
    width = max(64, round((spec["size"] / LAYERS) ** 0.5 / 64) * 64)
    loop: Loop = JaxLoop(width) if spec["framework"] == "jax" else TorchLoop(width)
    rows = _rows_for(loop, spec["step_s"])
    alone_s = _timed(loop, spec["steps"], lambda loss: None)
    model_bytes, before = 4 * width**2 * LAYERS, peak_bytes(os.getpid())
    loop.join(spec["address"], rows)
    calls: list[float] = []

    def step(loss: Any) -> None:
        began_s = time.perf_counter()
        loop.step(rows, loss)
        calls.append(time.perf_counter() - began_s)

    _until_merged(loop, step)
    first = len(calls)
    with_s = _timed(loop, spec["steps"], step)
    to_host, to_device = loop.copies()
    found = {
        "framework": spec["framework"],
        "device": loop.device,
        "parameters": width**2 * LAYERS,
        "rows": rows,
        "alone_ms": 1000 * alone_s,
        "step_ms": 1000 * with_s,
        "slowdown": with_s / alone_s - 1,
        "sync_share": sum(calls[first:]) / (with_s * spec["steps"]),
        "longest_ms": 1000 * max(calls[first:]),
        "versions": min(loop.island.versions),
        "to_host_gbs": 4 * width**2 / _best(to_host) / 1e9,
        "to_device_gbs": 4 * width**2 / _best(to_device) / 1e9,
        "host_models": max(0, peak_bytes(os.getpid()) - before) / model_bytes,
    }
    temporary = Path(spec["out"] + ".tmp")
    temporary.write_text(json.dumps(found), encoding="utf-8")
    temporary.rename(spec["out"])
    loop.island.leave("measured")
    return 0


def _rows_for(loop: Loop, step_s: float) -> int:
    """Prepares the batch with which a step takes about so long; returns its rows."""
    rows = FIRST_ROWS
    for _ in range(4):
        loop.prepare(rows)
        _timed(loop, 2, lambda loss: None)
        took_s = _timed(loop, 5, lambda loss: None)
        rows = min(16 * rows, max(64, round(rows * step_s / took_s / 64) * 64))
    loop.prepare(rows)
    _timed(loop, 3, lambda loss: None)
    return rows


def _timed(loop: Loop, steps: int, after: Callable[[Any], None]) -> float:
    """Returns the seconds of a step, on the average of so many."""
    previous = None
    began_s = time.perf_counter()
    for _ in range(steps):
        loss = loop.train()
        after(loss)
        if previous is not None:
            loop.wait(previous)
        previous = loss
    loop.wait(previous)
    return (time.perf_counter() - began_s) / steps


def _until_merged(loop: Loop, step: Callable[[Any], None]) -> None:
    """Trains until a version of each fragment has come back: what compiles has compiled then."""
    ends_s = time.monotonic() + 240
    while min(loop.island.versions) < 1 and time.monotonic() < ends_s:
        _timed(loop, 1, step)


def _best(copy: Callable[[], object]) -> float:
    """Returns the seconds of the quickest of several copies."""
    took = []
    for _ in range(TRIES):
        began_s = time.perf_counter()
        copy()
        took.append(time.perf_counter() - began_s)
    return min(took)


class JaxLoop:
    """A stack of layers in JAX: float32 parameters, products in bfloat16, gradient descent."""

    def __init__(self, width: int) -> None:
        import jax
        import jax.numpy as jnp

        self._jax, self._jnp, self._width = jax, jnp, width
        self.device = jax.devices()[0].device_kind
        self.island: Any = None
        keys = jax.random.split(jax.random.key(0), LAYERS)
        self._params = {f"w{i:02}": jax.random.normal(keys[i], (width, width)) / width**0.5 for i in range(LAYERS)}

        def loss_of(params: dict[str, Any], rows: Any) -> Any:
            hidden = rows
            for name in sorted(params):
                hidden = jnp.tanh(hidden @ params[name].astype(jnp.bfloat16))
            return jnp.mean(jnp.square(hidden.astype(jnp.float32) - rows.astype(jnp.float32)))

        def train(params: dict[str, Any], rows: Any) -> tuple[dict[str, Any], Any]:
            loss, grads = jax.value_and_grad(loss_of)(params, rows)
            return {name: x - 0.1 * grads[name] for name, x in params.items()}, loss

        self._train = jax.jit(train, donate_argnums=0)

    def prepare(self, rows: int) -> None:
        """Makes a batch of so many rows."""
        self._batch = self._jax.random.normal(self._jax.random.key(1), (rows, self._width), self._jnp.bfloat16)

    def train(self) -> Any:
        """Dispatches a step; returns its loss."""
        self._params, loss = self._train(self._params, self._batch)
        return loss

    def wait(self, loss: Any) -> None:
        """Waits for the loss of a step."""
        float(loss)

    def join(self, address: str, rows: int) -> None:
        """Makes the loop an island."""
        import islands

        self.island = islands.join(address, self._params, run=RUN, tokens_per_step=rows, donor_wait_s=0.0)
        self._params = self.island.restore(self._params)[0]

    def step(self, rows: int, loss: Any) -> None:
        """Calls ``island.step``."""
        self._params = self.island.step(self._params, tokens=rows, loss=loss)

    def copies(self) -> tuple[Callable[[], object], Callable[[], object]]:
        """Returns two functions, each for one matrix: to the host and to the device; both wait."""
        from islands.arrays import jax_placement

        leaf, value = self._params["w00"], np.ones((self._width, self._width), np.float32)
        return (
            lambda: jax_placement.to_host(self._jax.block_until_ready(jax_placement.copy_here([leaf]))[0]),
            lambda: self._jax.block_until_ready(jax_placement.put(value, None)),
        )


class TorchLoop:
    """The same stack in PyTorch."""

    def __init__(self, width: int) -> None:
        import torch

        self._torch, self._width = torch, width
        self._where = "cuda" if torch.cuda.is_available() else "cpu"
        self.device = torch.cuda.get_device_name() if self._where == "cuda" else "cpu"
        self.island: Any = None
        torch.manual_seed(0)
        layers = [torch.randn(width, width, device=self._where) / width**0.5 for _ in range(LAYERS)]
        self._layers = torch.nn.ParameterList(layers)
        self._optimizer = torch.optim.SGD(self._layers.parameters(), lr=0.1)

    def prepare(self, rows: int) -> None:
        """Makes a batch of so many rows."""
        self._batch = self._torch.randn(rows, self._width, device=self._where)

    def train(self) -> Any:
        """Dispatches a step; returns its loss."""
        self._optimizer.zero_grad()
        with self._torch.autocast(self._where, self._torch.bfloat16):
            hidden = self._batch
            for layer in self._layers:
                hidden = self._torch.tanh(hidden @ layer)
        loss = (hidden.float() - self._batch).square().mean()
        loss.backward()
        self._optimizer.step()
        return loss

    def wait(self, loss: Any) -> None:
        """Waits for the loss of a step."""
        loss.item()

    def join(self, address: str, rows: int) -> None:
        """Makes the loop an island."""
        import islands.torch

        given: dict[str, Any] = {"run": RUN, "tokens_per_step": rows, "inner_optimizer": "sgd", "donor_wait_s": 0.0}
        self.island = islands.torch.join(address, self._layers, self._optimizer, **given)

    def step(self, rows: int, loss: Any) -> None:
        """Calls ``island.step``."""
        self.island.step(tokens=rows, loss=loss)

    def copies(self) -> tuple[Callable[[], object], Callable[[], object]]:
        """Returns two functions, each for one matrix: to the host and to the device; both wait."""
        from islands.torch.tensors import TensorLeaf

        leaf, value = TensorLeaf(self._layers[0].detach()), np.ones((self._width, self._width), np.float32)
        return lambda: leaf.copies([leaf])[0].to_host(), lambda: leaf.place(value, room=False)


def main(argv: list[str] | None = None) -> int:
    """Reads the flags and measures."""
    parser = output.parser_of("accelerator", __doc__, "--framework jax --framework torch --parameters 100M,1B")
    parser.add_argument("--parameters", type=output.numbers, default=(100_000_000, 1_000_000_000))
    parser.add_argument("--steps", type=int, default=400, help="that are timed, without and with Atoll (400)")
    return run(parser, argv, measure, work)


if __name__ == "__main__":
    sys.exit(main())
