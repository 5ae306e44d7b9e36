"""Measures the part of a training thread's time that synchronisation takes, by size of the model.

One island trains beside a broker and an aggregator, in JAX or in PyTorch (in the environment that has it). A step is
a pause, as where an accelerator computes, and a small change of every parameter tensor. ``sync share`` is the part of
the training thread's time that synchronisation took, waits for background copies included. ``memory`` is the most
that the process held beyond what the framework had before it joined, in models of float32.

``on it`` is the processor time that the thread itself spent in these calls. The difference is waiting: for the
interpreter's lock, or for a processor that another thread or the hub was given. With ``--own-core`` the training thread
has a processor to itself, and all else shares the others, as on a host that has many.
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
from typing import Any

from benchmarks import output
from benchmarks.fleet import ROOT_ENVIRONMENT, RUN, Hub, module_command, peak_bytes
from benchmarks.output import Column, Printer
from broker.wire.errors import ConfigError, Unavailable
from ops.processes.child_process import ProcessSpec, last_lines
from ops.processes.cluster import Change

COLUMNS = (
    Column(key="framework", title="framework"),
    Column(key="parameters", title="parameters", form=","),
    Column(key="steps", title="steps", form=","),
    Column(key="versions", title="versions"),
    Column(key="sync_share", title="sync share", form=".2%"),
    Column(key="cpu_share", title="on it", form=".2%"),
    Column(key="longest_ms", title="longest call, ms", form=".1f"),
    Column(key="models", title="memory, models", form=".1f"),
)
TENSORS = 24  #: of a model: as many matrices of one size
TOKENS = 1000
#: Calls a step of the island, and takes its time.
Called = Callable[[Callable[[], None]], None]
#: What islands cost beyond their models: the interpreter, buffers of sockets.
FIXED_BYTES = 64 << 20
#: Large pieces go back to the system when they are freed: else the memory is what glibc keeps of them as well.
MEMORY_ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": str(1 << 20)}


def measure(args: argparse.Namespace) -> int:
    """Measures each case in processes of its own, and prints a row for it."""
    processors = os.sched_getaffinity(0)
    args.processor = None
    if args.own_core:
        *others, args.processor = sorted(processors)
        if not others:
            raise ConfigError("own_core", True, "needs two processors")
        os.sched_setaffinity(0, others)  # inherited by all processes of the cases
    try:
        _cases(args)
    finally:
        os.sched_setaffinity(0, processors)
    return 0


def _cases(args: argparse.Namespace) -> None:
    printer = Printer(COLUMNS, as_json=args.json)
    sizes = (1_000_000,) if args.quick else args.parameters
    steps = 60 if args.quick else args.steps
    for framework in args.framework or ["jax"]:
        for size in sizes:
            printer.say(f"{framework}, {size:,} parameters")
            with tempfile.TemporaryDirectory(dir=args.dir, prefix="atoll-sync-") as directory:
                printer.add(_case(Path(directory), framework, size, steps, args))
    printer.close()


def _case(directory: Path, framework: str, size: int, steps: int, args: argparse.Namespace) -> dict[str, Any]:
    interval = 24 if args.quick else args.sync_interval
    settings = {"islands": 1, "fragments": args.fragments, "sync_interval": interval, "total_tokens": 0}
    with Hub(directory, **settings) as hub:
        out = directory / "worker.json"
        spec = {"framework": framework, "size": size, "steps": steps, "step_s": args.step, "out": os.fspath(out)}
        spec["processor"] = args.processor
        command = module_command("benchmarks.sync_share", "--worker", json.dumps(spec | {"address": hub.address}))
        environment = hub.numeric_environment() | ROOT_ENVIRONMENT | MEMORY_ENVIRONMENT
        hub.start([ProcessSpec(name="worker", command=command, environment=environment, ends_by_itself=True)])
        return finished(hub, out, within_s=120 + 10 * steps * args.step, doing=f"trained {steps} steps")


def finished(hub: Hub, out: Path, *, within_s: float, doing: str) -> dict[str, Any]:
    """Waits for the file that the process ``worker`` writes; returns what stands in it.

    Raises:
        Unavailable: It has not come in time, or another process has ended.
    """
    ends_s = time.monotonic() + within_s
    while not out.exists():
        for event in hub.cluster.poll():
            if event.change is not Change.STARTED and not out.exists():
                end = last_lines(hub.cluster.log_of(event.process))
                raise Unavailable(f"{event.detail}; its log ends:\n{end}", definite=True)
        if time.monotonic() > ends_s:
            end = last_lines(hub.cluster.log_of("worker"))
            raise Unavailable(f"the island has not {doing}; its log ends:\n{end}", definite=True)
        time.sleep(0.1)
    found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return found


# --- the island ---------------------------------------------------------------------------------------------------


def work(spec: dict[str, Any]) -> int:
    """Trains, and writes down what was seen."""
    rows = max(1, round(spec["size"] / TENSORS / 1024))
    train = {"jax": _jax, "torch": _torch}[spec["framework"]]
    calls: list[float] = []
    on_it_s = 0.0
    began_s = 0.0

    def called(step: Callable[[], None]) -> None:
        nonlocal on_it_s, began_s
        if not calls:
            began_s = time.perf_counter()
            if spec["processor"] is not None:  # this thread alone: all others have been begun on the others
                os.sched_setaffinity(0, {spec["processor"]})
        on_it_s -= time.thread_time()
        call_s = time.perf_counter()
        step()
        calls.append(time.perf_counter() - call_s)
        on_it_s += time.thread_time()

    island, before = train(spec, rows, called)
    trained_s = time.perf_counter() - began_s
    model_bytes = 4 * rows * 1024 * TENSORS
    held = peak_bytes(os.getpid()) - before - FIXED_BYTES
    found = {
        "framework": spec["framework"],
        "parameters": rows * 1024 * TENSORS,
        "steps": spec["steps"],
        "versions": min(island.versions),
        "sync_share": island.sync_share,
        "cpu_share": on_it_s / trained_s,
        "longest_ms": 1000 * max(calls[1:]),
        "models": max(0.0, held / model_bytes),
    }
    temporary = Path(spec["out"] + ".tmp")
    temporary.write_text(json.dumps(found), encoding="utf-8")
    temporary.rename(spec["out"])
    island.leave("measured")
    return 0


def _jax(spec: dict[str, Any], rows: int, called: Called) -> tuple[Any, int]:
    import jax
    import jax.numpy as jnp

    import islands

    params = {f"w{i}": jnp.zeros((rows, 1024), jnp.float32) + i for i in range(TENSORS)}
    # One row of each: the copy of a whole model would be this machine's work, and not the accelerator's.
    change = jax.jit(lambda tree: {n: x.at[0].add(1e-3) for n, x in tree.items()}, donate_argnums=0)
    params = jax.block_until_ready(change(params))  # type: ignore[no-untyped-call]
    before = peak_bytes(os.getpid())
    island = islands.join(spec["address"], params, run=RUN, tokens_per_step=TOKENS, donor_wait_s=0.0)
    state: list[Any] = [island.restore(params)[0]]
    del params  # as in a loop of one's own, which goes on with what it is given
    for _ in range(spec["steps"]):
        time.sleep(spec["step_s"])
        state[0] = jax.block_until_ready(change(state[0]))  # type: ignore[no-untyped-call]

        def step() -> None:
            state[0] = island.step(state[0], tokens=TOKENS)

        called(step)
    return island, before


def _torch(spec: dict[str, Any], rows: int, called: Called) -> tuple[Any, int]:
    import torch

    import islands.torch

    torch.set_num_threads(1)
    model = torch.nn.ParameterList([torch.zeros(rows, 1024) + i for i in range(TENSORS)])
    optimizer = torch.optim.SGD(list(model), lr=1e-3)
    for parameter in model:
        parameter.grad = torch.zeros_like(parameter)
        parameter.grad[0] = 1.0
    optimizer.step()
    before = peak_bytes(os.getpid())
    island = islands.torch.join(
        spec["address"], model, optimizer, run=RUN, tokens_per_step=TOKENS, inner_optimizer="sgd", donor_wait_s=0.0
    )
    for _ in range(spec["steps"]):
        time.sleep(spec["step_s"])  # where gradients are computed
        optimizer.step()
        called(lambda: island.step(tokens=TOKENS))
    return island, before


def run(
    parser: argparse.ArgumentParser,
    argv: list[str] | None,
    measure: Callable[[argparse.Namespace], int],
    work: Callable[[dict[str, Any]], int],
) -> int:
    """Adds a benchmark's flags, reads them, and measures all cases; or works, as the process of one case.

    Args:
        parser: With the flags of one benchmark alone.
        argv: Words of the command line.
        measure: Starts the processes of all cases.
        work: What such a process does.
    """
    output.add_arguments(parser)
    parser.add_argument("--framework", choices=["jax", "torch"], action="append", help="repeatable (jax)")
    parser.add_argument("--step", type=float, default=0.05, help="seconds of a step (0.05)")
    parser.add_argument("--sync-interval", type=int, default=100, help="steps between two syncs of a fragment (100)")
    parser.add_argument("--dir", default=None, help="where temporary stores are written")
    parser.add_argument("--worker", default="", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.worker:
        return work(json.loads(args.worker))
    if args.steps < 10:
        print(f"error: {ConfigError('steps', args.steps, 'must be at least 10')}", file=sys.stderr)
        return 2
    return output.guarded(measure, args)


def main(argv: list[str] | None = None) -> int:
    """Reads the flags and measures."""
    parser = output.parser_of("sync_share", __doc__, "--framework jax --parameters 1M,10M --steps 400")
    parser.add_argument("--parameters", type=output.numbers, default=(1_000_000, 10_000_000, 100_000_000))
    parser.add_argument("--steps", type=int, default=600, help="of each case (600)")
    parser.add_argument("--fragments", type=int, default=24, help="of the model (24)")
    parser.add_argument("--own-core", action="store_true", help="give the training thread a processor to itself")
    return run(parser, argv, measure, work)


if __name__ == "__main__":
    sys.exit(main())
