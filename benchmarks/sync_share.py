"""Measures the part of a training thread's time that synchronisation takes, by size of the model.

One island trains beside a broker and an aggregator, in JAX or in PyTorch (in the environment that has it). A step is
a pause, as where an accelerator computes, and a small change of every matrix. ``sync share`` is the part of the
training thread's time that synchronisation took, waits for background copies included. ``memory`` is the most that the
process held beyond what the framework had before it joined, in models of float32.

``on it`` is the processor time that the thread itself spent in these calls. The difference is waiting: for the
interpreter's lock, or for a processor that another thread or the hub was given. With ``--own-core`` the training thread
has a processor to itself, and all else shares the others, as on a host that has many.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from typing import Any

from benchmarks import output
from benchmarks.fleet import peak_bytes
from benchmarks.one_island import LAYERS, loop_of, run, run_cases, write
from benchmarks.output import Column, Printer
from broker.base.errors import ConfigError

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
TOKENS = 1000
#: What islands cost beyond their models: the interpreter, buffers of sockets.
FIXED_BYTES = 64 << 20
#: Large pieces go back to the system when they are freed: else the memory is what glibc keeps of them as well.
MEMORY_ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": str(1 << 20)}


def measure(args: argparse.Namespace, printer: Printer) -> None:
    """Measures each case in processes of its own, and prints a row for it."""
    processors = os.sched_getaffinity(0)
    own = None
    if args.own_core:
        *others, own = sorted(processors)
        if not others:
            raise ConfigError("own_core", True, "needs two processors")
        os.sched_setaffinity(0, others)  # inherited by all processes of the cases
    try:
        run_cases(
            args,
            printer,
            "sync_share",
            one_thread=True,
            environment=MEMORY_ENVIRONMENT,
            settings={"fragments": args.fragments, "sync_interval": 24 if args.quick else args.sync_interval},
            steps=60 if args.quick else args.steps,
            step_s=args.step,
            processor=own,
        )
    finally:
        os.sched_setaffinity(0, processors)


def work(spec: dict[str, Any]) -> int:
    """Trains, and writes down what was seen."""
    width = max(1, round((spec["size"] / LAYERS) ** 0.5))
    loop = loop_of(spec["framework"], width)
    if spec["framework"] == "torch":
        import torch

        torch.set_num_threads(1)
    loop.change()
    before = peak_bytes(os.getpid())
    loop.join(spec["address"], TOKENS)
    calls: list[float] = []
    on_it_s = began_s = 0.0
    for _ in range(spec["steps"]):
        time.sleep(spec["step_s"])
        loop.change()
        if not calls:
            began_s = time.perf_counter()
            if spec["processor"] is not None:  # this thread alone: all others have been begun on the others
                os.sched_setaffinity(0, {spec["processor"]})
        on_it_s -= time.thread_time()
        call_s = time.perf_counter()
        loop.step(TOKENS)
        calls.append(time.perf_counter() - call_s)
        on_it_s += time.thread_time()
    parameters = width**2 * LAYERS
    held = peak_bytes(os.getpid()) - before - FIXED_BYTES
    found = {
        "framework": spec["framework"],
        "parameters": parameters,
        "steps": spec["steps"],
        "versions": min(loop.island.versions),
        "sync_share": loop.island.sync_share,
        "cpu_share": on_it_s / (time.perf_counter() - began_s),
        "longest_ms": 1000 * max(calls[1:]),
        "models": max(0.0, held / (4 * parameters)),
    }
    return write(spec, found, loop)


def main(argv: list[str] | None = None) -> int:
    parser = output.parser_of("sync_share", __doc__, "--framework jax --parameters 1M,10M --steps 400")
    parser.add_argument("--parameters", type=output.numbers, default=(1_000_000, 10_000_000, 100_000_000))
    parser.add_argument("--steps", type=int, default=600, help="of each case (600)")
    parser.add_argument("--fragments", type=int, default=24, help="of the model (24)")
    parser.add_argument("--own-core", action="store_true", help="give the training thread a processor to itself")
    return run(parser, argv, measure, COLUMNS, work)


if __name__ == "__main__":
    sys.exit(main())
