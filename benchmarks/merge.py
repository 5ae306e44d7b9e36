"""What one aggregator can merge, step and store: ``python -m benchmarks.merge --parameters 25M --islands 8``.

Every figure stands beside a reference taken in the same run, since machines differ and drift: for merging the plain
``numpy.average`` over a stack, for the outer step the same optax update jitted over the whole vector, for the store a
plain write and fsync of as many bytes. Variants alternate within each repetition; the best of each counts.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

from aggregator.events import Commit, Part
from aggregator.merge.fragment_state import FragmentState, Vector
from aggregator.merge.kernels import merge_fragment
from aggregator.merge.outer_step import make_outer_step
from aggregator.store.store import Store
from benchmarks import output
from benchmarks.output import Column
from broker.wire.fragments import Kind, TensorSpec
from broker.wire.messages import Codec
from broker.wire.ranges import StepRange
from broker.wire.tensors import encode_tensor, fragment_digest

COLUMNS = (
    Column(key="parameters", title="parameters", form=",d"),
    Column(key="islands", title="islands"),
    Column(key="what", title=""),
    Column(key="ms", title="ms", form=".1f"),
    Column(key="times_faster", title="times faster than its reference", form=".1f"),
)
#: How what others are measured against begins.
REFERENCE = "reference: "

STEPS = StepRange(from_step=0, to_step=24, from_tokens=0, to_tokens=24_000)


def best_of(repetitions: int, variants: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Returns the shortest time of each variant in seconds, after one call to warm up; variants alternate."""
    best = dict.fromkeys(variants, float("inf"))
    for repetition in range(repetitions + 1):
        for name, variant in variants.items():
            begin_s = time.perf_counter()
            variant()
            if repetition:
                best[name] = min(best[name], time.perf_counter() - begin_s)
    return best


def merging(deltas: list[Vector], repetitions: int) -> dict[str, float]:
    """Times a merge by kind and codec, in seconds."""
    variants: dict[str, Callable[[], object]] = {}
    for codec in Codec:
        parts = [
            Part(
                island_id=f"island-{i}",
                steps=STEPS,
                payload=(encode_tensor(delta, codec),),
                token_weight=1.0 + i,
                staleness_weight=1.0,
            )
            for i, delta in enumerate(deltas)
        ]
        for kind in (Kind.MEAN, Kind.RDA):
            tensors = (TensorSpec(name="x", shape=deltas[0].shape, dtype="float32", kind=kind),)
            variants[f"{kind} {codec}"] = lambda t=tensors, p=parts: merge_fragment(t, p)  # type: ignore[misc]
    weights = [1.0 + i for i in range(len(deltas))]
    variants[REFERENCE + "numpy.average"] = lambda: np.average(np.stack(deltas), axis=0, weights=weights)
    return best_of(repetitions, variants)


def stepping(state: FragmentState, merged: Vector, repetitions: int) -> dict[str, float]:
    """Times an outer step, in seconds."""
    optimizer = optax.sgd(0.7, momentum=0.5, nesterov=True)

    @jax.jit
    def whole(params: Any, trace: Any, delta: Any) -> Any:
        opt_state = (optax.TraceState(trace=trace), *optimizer.init(params)[1:])
        updates, opt_state = optimizer.update(delta, opt_state, params)
        return optax.apply_updates(params, updates), opt_state[0].trace

    step = make_outer_step(0.7, 0.5)
    return best_of(
        repetitions,
        {
            "outer step": lambda: step(state, merged),
            REFERENCE + "jitted whole": lambda: [np.array(a) for a in whole(state.params, state.momentum, merged)],
        },
    )


def storing(state: FragmentState, directory: Path, repetitions: int) -> dict[str, float]:
    """Times a durable commit, in seconds."""
    digest, versions = fragment_digest(state.params), itertools.count(state.version)

    def commit(store: Store) -> None:
        """Commits a version that is new each time: one that is there already costs nothing."""
        version = next(versions)
        store.commit(
            Commit(
                fragment_id=0,
                fragment_version=version,
                epoch=1,
                digest=digest,
                round_id=version,
                contributions=(),
                ledger={},
            ),
            state._replace(version=version),
        )

    def plain() -> None:
        with (directory / "plain").open("wb") as file:
            file.write(state.params.data)
            file.write(state.momentum.data)
            file.flush()
            os.fsync(file.fileno())

    with Store.open(directory / "store") as store:
        store.load()
        return best_of(repetitions, {"commit": lambda: commit(store), REFERENCE + "write, fsync": plain})


def main(argv: list[str] | None = None) -> int:
    """Runs the benchmark and returns its exit status."""
    parser = output.parser_of("merge", __doc__, "--parameters 25M --islands 8")
    numbers = output.numbers
    parser.add_argument(
        "--parameters", type=numbers, default=(10_000_000,), metavar="N,N", help="of a fragment (default: 10M)"
    )
    parser.add_argument("--islands", type=int, default=4, help="contributions of a round (default: %(default)s)")
    parser.add_argument("--repetitions", type=int, default=5, help="of which the best counts (default: %(default)s)")
    parser.add_argument("--dir", type=Path, default=None, help="where the store is made (default: where you are)")
    output.add_arguments(parser)
    return output.guarded(measure, parser.parse_args(argv))


def measure(args: argparse.Namespace) -> int:
    """Measures every size and prints the table."""
    sizes, repetitions = ((100_000,), 1) if args.quick else (args.parameters, args.repetitions)
    printer = output.Printer(COLUMNS, as_json=args.json)
    rng = np.random.default_rng(0)
    for parameters in sizes:
        printer.say(f"{parameters:,} parameters, {args.islands} contributions")
        deltas = [rng.standard_normal(parameters, dtype=np.float32) for _ in range(args.islands)]
        state = FragmentState(params=deltas[0], momentum=deltas[-1], version=1)
        with tempfile.TemporaryDirectory(dir=args.dir or Path.cwd()) as directory:
            groups = (
                merging(deltas, repetitions),
                stepping(state, deltas[0], repetitions),
                storing(state, Path(directory), repetitions),
            )
        for times in groups:
            reference_s = next(seconds for name, seconds in times.items() if name.startswith(REFERENCE))
            for name, seconds in times.items():
                what = {"parameters": parameters, "islands": args.islands, "what": name}
                printer.add(what | {"ms": 1000 * seconds, "times_faster": reference_s / seconds})
    printer.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
