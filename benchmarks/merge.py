"""Measures how fast one aggregator merges and takes the outer step, against the speed of its memory.

*x memory*: bytes per second as a share of what as many threads read from memory by themselves, in turn with it. Bytes
are those that no merge can do without: each contribution once, as encoded, and parameters and momentum read and
written. ``on arrival`` folds contributions one by one instead.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache, partial
from typing import Any

import numba
import numpy as np

from aggregator.interface.events import Part
from aggregator.merge.fragment_state import FragmentState, Vector
from aggregator.merge.kernels import merge_and_step
from aggregator.merge.layout import Source
from aggregator.merge.lengths import measure as measure_lengths
from aggregator.merge.outer_step import make_outer_step
from aggregator.merge.passes import PIECE, Target, fold
from aggregator.merge.resources import Resources
from aggregator.process.workers import SPARE_VECTORS
from benchmarks import output
from benchmarks.output import Column, median
from broker.chunks.memory import ReusedMemory
from broker.wire.fragments import Kind, TensorSpec
from broker.wire.messages import Codec
from broker.wire.ranges import StepRange
from broker.wire.tensors import encode_tensor, payload_bytes

COLUMNS = (
    Column(key="parameters", title="parameters", form=",d"),
    Column(key="islands", title="islands"),
    Column(key="what", title=""),
    Column(key="threads", title="threads"),
    Column(key="ms", title="ms", form=".1f"),
    Column(key="of_memory", title="x memory", form=".2f"),
)
READING = "reference: memory read"

STEPS = StepRange(from_step=0, to_step=24, from_tokens=0, to_tokens=24_000)


def alternating(repetitions: int, variants: dict[str, Callable[[], object]]) -> dict[str, list[float]]:
    """Returns the times of each variant in seconds, after one call to warm up; variants alternate."""
    times: dict[str, list[float]] = {name: [] for name in variants}
    for repetition in range(repetitions + 1):
        for name, variant in variants.items():
            begin_s = time.perf_counter()
            variant()
            if repetition:
                times[name].append(time.perf_counter() - begin_s)
    return times


def parts_of(deltas: list[Vector], codec: Codec) -> list[Part]:
    """Returns contributions with different weights."""
    return [
        Part(
            island_id=f"island-{i}",
            steps=STEPS,
            payload=(encode_tensor(delta, codec),),
            token_weight=1.0 + i,
            staleness_weight=1.0,
        )
        for i, delta in enumerate(deltas)
    ]


def at_memory_speed(deltas: list[Vector], repetitions: int, threads: int) -> dict[str, tuple[float, float]]:
    """Times merges with their outer step on so many threads.

    Returns:
        Name -> seconds, and the bytes that cannot be done without.
    """
    state = FragmentState(params=deltas[0], momentum=deltas[-1], version=1)
    step, size, words = make_outer_step(0.7, 0.3), deltas[0].size, [delta.view(np.uint32) for delta in deltas]
    counted: dict[str, float] = {READING: 4.0 * size * len(deltas)}
    with ThreadPoolExecutor(threads) as pool:
        resources = Resources(lambda call, count: pool.map(call, range(count)), ReusedMemory(SPARE_VECTORS).floats)

        def reading() -> None:
            read = kernel_that_reads()
            chunks = range(0, size, PIECE)
            list(pool.map(lambda start: read(*(w[start : start + PIECE] for w in _four(words))), chunks))

        def on_arrival(parts: list[Part]) -> object:
            """As if nothing had been kept: the sum is read and written again for each contribution."""
            total = resources.empty(size)
            target = Target(delta=total)
            so_far = Source(encode_tensor(total, Codec.F32))
            for i, part in enumerate(parts):
                sources, factors = [so_far, Source(part.payload[0])], np.array([[1.0], [0.25]])
                if not i:
                    sources, factors = sources[1:], factors[1:]
                fold(sources, factors, 0, 1, size, target, resources.spread, counted=0)
            return step(state, total, resources)

        variants: dict[str, Callable[[], object]] = {READING: reading}
        plain = TensorSpec(name="x", shape=deltas[0].shape, dtype="float32", kind=Kind.MEAN)
        for codec in Codec:
            parts = parts_of(deltas, codec)
            for kind in (Kind.MEAN, Kind.RDA):
                tensor = replace(plain, kind=kind)
                used = parts
                if kind is Kind.RDA:  # as in the aggregator, where inspection has kept the lengths
                    used = [replace(part, payload=(replace(part.payload[0]),)) for part in parts]
                    for part in used:
                        measure_lengths(tensor, part.payload[0])
                variants[f"{kind} {codec} + step"] = partial(
                    merge_and_step, (tensor,), used, state, step, resources=resources
                )
            variants[f"mean {codec} on arrival + step"] = partial(on_arrival, parts)
            for name in variants:
                counted.setdefault(name, 16.0 * size + sum(payload_bytes(part.payload) for part in parts))
        times = {name: median(seconds) for name, seconds in alternating(repetitions, variants).items()}
    return {name: (seconds, counted[name]) for name, seconds in times.items()}


def _four(words: list[Any]) -> list[Any]:
    """Four vectors to read side by side, which is faster than one by one: repeated if there are fewer."""
    return (words * 4)[:4]


@cache
def kernel_that_reads() -> Callable[..., int]:
    """Returns a compiled function that reads four vectors of integers, as fast as memory gives them."""

    def read(a: Any, b: Any, c: Any, d: Any) -> Any:
        total = np.uint32(0)
        for i in range(a.size):
            total = np.uint32(total + a[i] + b[i] + c[i] + d[i])
        return total

    return numba.njit(nogil=True)(read)  # type: ignore[no-any-return]


def main(argv: list[str] | None = None) -> int:
    parser = output.parser_of("merge", __doc__, "--parameters 25M --islands 8")
    numbers = output.numbers
    parser.add_argument(
        "--parameters", type=numbers, default=(10_000_000,), metavar="N,N", help="of a fragment (default: 10M)"
    )
    parser.add_argument("--islands", type=int, default=4, help="contributions of a round (default: %(default)s)")
    parser.add_argument(
        "--threads", type=numbers, default=(1, 2), metavar="N,N", help="of merges with their step (default: 1,2)"
    )
    parser.add_argument("--repetitions", type=int, default=5, help="of which the median counts (default: %(default)s)")
    return output.guarded(measure, parser.parse_args(argv), COLUMNS)


def measure(args: argparse.Namespace, printer: output.Printer) -> None:
    """Measures every size and prints the table."""
    sizes, repetitions = ((100_000,), 1) if args.quick else (args.parameters, args.repetitions)
    rng = np.random.default_rng(0)
    for parameters in sizes:
        printer.say(f"{parameters:,} parameters, {args.islands} contributions")
        deltas = [rng.standard_normal(parameters, dtype=np.float32) for _ in range(args.islands)]
        for threads in args.threads:
            found = at_memory_speed(deltas, repetitions, threads)
            read_s, read_bytes = found[READING]
            for name, (seconds, num_bytes) in found.items():
                row = {"parameters": parameters, "islands": args.islands, "what": name, "threads": threads}
                share = num_bytes / seconds / (read_bytes / read_s)
                printer.add(row | {"ms": 1000 * seconds, "of_memory": share, "gb_per_s": num_bytes / seconds / 1e9})


if __name__ == "__main__":
    sys.exit(main())
