"""One island beside a broker and an aggregator, in a process of its own: what sync_share and accelerator share.

A model is a stack of equal square matrices, in JAX or PyTorch. A process is told its case as JSON and writes what it
found to a file.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import output
from benchmarks.fleet import ROOT_ENVIRONMENT, RUN, Hub, module_command
from benchmarks.output import Column, Printer
from broker.base.errors import ConfigError, Unavailable
from ops.processes.child_process import ProcessSpec, last_lines

LAYERS = 24  #: of a model: as many matrices of one size


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
        # One row of each: the copy of a whole model would be this machine's work, and not the accelerator's.
        self._change = jax.jit(lambda tree: {n: x.at[0].add(1e-3) for n, x in tree.items()}, donate_argnums=0)

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

    def change(self) -> None:
        """Changes every matrix a little, in place of a step: a pause stands for what an accelerator computes."""
        self._params = self._jax.block_until_ready(self._change(self._params))  # type: ignore[no-untyped-call]

    def join(self, address: str, tokens: int) -> None:
        """Makes the loop an island, with so many tokens in a step."""
        import islands

        self.island = islands.join(address, self._params, run=RUN, tokens_per_step=tokens, donor_wait_s=0.0)
        self._params = self.island.restore(self._params)[0]

    def step(self, tokens: int, loss: Any = None) -> None:
        """Calls ``island.step``."""
        self._params = self.island.step(self._params, tokens=tokens, loss=loss)

    def copies(self) -> tuple[Callable[[], object], Callable[[], object]]:
        """Returns two functions, each for one matrix: to the host and to the device; both wait."""
        from islands.arrays import jax_placement

        leaf, value = self._params["w00"], np.ones((self._width, self._width), np.float32)
        return (
            lambda: jax_placement.to_host(self._jax.block_until_ready(jax_placement.copy_here([leaf]))[0]),
            lambda: self._jax.block_until_ready(jax_placement.put(value, None)),
        )


class TorchLoop:
    """The same in PyTorch."""

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
        self._batch = self._torch.randn(rows, self._width, device=self._where)

    def train(self) -> Any:
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
        loss.item()

    def change(self) -> None:
        for layer in self._layers:
            if layer.grad is None:
                layer.grad = self._torch.zeros_like(layer)
                layer.grad[0] = 1.0
        self._optimizer.step()

    def join(self, address: str, tokens: int) -> None:
        import islands.torch

        given: dict[str, Any] = {"run": RUN, "tokens_per_step": tokens, "inner_optimizer": "sgd", "donor_wait_s": 0.0}
        self.island = islands.torch.join(address, self._layers, self._optimizer, **given)

    def step(self, tokens: int, loss: Any = None) -> None:
        self.island.step(tokens=tokens, loss=loss)

    def copies(self) -> tuple[Callable[[], object], Callable[[], object]]:
        from islands.torch.tensors import TensorLeaf

        leaf, value = TensorLeaf(self._layers[0].detach()), np.ones((self._width, self._width), np.float32)
        return lambda: leaf.copies([leaf])[0].to_host(), lambda: leaf.place(value, room=False)


Loop = JaxLoop | TorchLoop


def loop_of(framework: str, width: int) -> Loop:
    """Returns a loop over a stack of matrices of that width."""
    return JaxLoop(width) if framework == "jax" else TorchLoop(width)


# --- the processes ------------------------------------------------------------------------------------------------


def run_cases(
    args: argparse.Namespace,
    printer: Printer,
    module: str,
    *,
    one_thread: bool,
    environment: dict[str, str] | None = None,
    settings: Mapping[str, Any],
    **spec: Any,
) -> None:
    """Measures each framework and size in a process of its own, told ``spec``, and prints a row for it.

    With ``one_thread`` the process has one numeric thread, as islands of ``up`` have; else it is as a loop by itself.

    Raises:
        Unavailable: The process has not found anything in time, or another one has ended.
    """
    within_s = 300 + 10 * spec["steps"] * spec["step_s"]
    for framework in args.framework or ["jax"]:
        for size in (1_000_000,) if args.quick else args.parameters:
            printer.say(f"{framework}, {size:,} parameters")
            with (
                tempfile.TemporaryDirectory(prefix=f"atoll-{module}-") as name,
                Hub(Path(name), islands=1, total_tokens=0, **settings) as hub,
            ):
                out = Path(name, "worker.json")
                case = spec | {"framework": framework, "size": size, "address": hub.address, "out": os.fspath(out)}
                command = module_command(f"benchmarks.{module}", "--worker", json.dumps(case))
                variables = (hub.numeric_environment() if one_thread else {}) | ROOT_ENVIRONMENT | (environment or {})
                hub.start([ProcessSpec(name="worker", command=command, environment=variables, ends_by_itself=True)])
                printer.add(_found(hub, out, within_s))


def _found(hub: Hub, out: Path, within_s: float) -> dict[str, Any]:
    ends_s = time.monotonic() + within_s
    while not out.exists():
        hub.check()
        if time.monotonic() > ends_s:
            end = last_lines(hub.cluster.log_of("worker"))
            raise Unavailable(f"the island has not trained its steps; its log ends:\n{end}", definite=True)
        time.sleep(0.1)
    found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return found


def write(spec: Mapping[str, Any], found: Mapping[str, Any], loop: Loop) -> int:
    """Writes what a process found, and leaves the run; returns its exit status."""
    temporary = Path(spec["out"] + ".tmp")
    temporary.write_text(json.dumps(found), encoding="utf-8")
    temporary.rename(spec["out"])
    loop.island.leave("measured")
    return 0


def run(
    parser: argparse.ArgumentParser,
    argv: list[str] | None,
    measure: Callable[[argparse.Namespace, Printer], None],
    columns: Sequence[Column],
    work: Callable[[dict[str, Any]], int],
) -> int:
    """Adds the flags of both benchmarks and reads them; measures all cases, or works as the process of one."""
    parser.add_argument("--framework", choices=["jax", "torch"], action="append", help="repeatable (jax)")
    parser.add_argument("--step", type=float, default=0.05, help="seconds of a step (0.05)")
    parser.add_argument("--sync-interval", type=int, default=100, help="steps between two syncs of a fragment (100)")
    parser.add_argument("--worker", default="", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.worker:
        return work(json.loads(args.worker))
    if args.steps < 10:
        print(f"error: {ConfigError('steps', args.steps, 'must be at least 10')}", file=sys.stderr)
        return 2
    return output.guarded(measure, args, columns)
