"""Kernels write where they are told and nowhere else, whatever other threads do with memory meanwhile."""

import os
import subprocess
import sys
import threading

import numpy as np
import pytest

from aggregator.events import Part
from aggregator.merge.fragment_state import FragmentState
from aggregator.merge.kernels import merge_and_step
from aggregator.merge.outer_step import make_outer_step
from aggregator.merge.resources import PLAIN
from aggregator.merge.rounding import round_step
from broker.wire.fragments import Kind, TensorSpec
from broker.wire.messages import Codec
from broker.wire.ranges import StepRange
from broker.wire.tensors import encode_tensor

TENSORS = (TensorSpec(name="w", shape=(512, 512), dtype="float32", kind=Kind.RDA),)
SIZE = TENSORS[0].size
PROGRAM = """
from tests.unit.test_merge_memory import merged_and_rounded
found, spoilt = merged_and_rounded()
print(f"{len(found)} results, {spoilt} spoilt")
"""


def parts(codec):
    rng = np.random.default_rng(1)
    return [
        Part(
            island_id=f"i{i}",
            steps=StepRange(from_step=0, to_step=1, from_tokens=0, to_tokens=1),
            payload=(encode_tensor(rng.standard_normal(TENSORS[0].shape, np.float32), codec),),
            token_weight=1.0,
            staleness_weight=1.0,
        )
        for i in range(5)
    ]


class Churn:
    """Threads that take memory of the sizes that kernels use, fill it, and look whether it stays as it was."""

    def __init__(self):
        self.spoilt, self._end = 0, threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(n,)) for n in range(2)]

    def _run(self, n):
        while not self._end.is_set():
            held = [np.full(size, n + 1, np.uint8) for size in (128 << 10, 64 << 10, 1 << 10) for _ in range(4)]
            self.spoilt += sum(not (each == n + 1).all() for each in held)

    def __enter__(self):
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_):
        self._end.set()
        for thread in self._threads:
            thread.join()


def merged_and_rounded():
    """Returns what merging and rounding came to, each of many times, and how much of others' memory was spoilt."""
    step, results = make_outer_step(0.7, 0.3), set()
    before = FragmentState(params=np.ones(SIZE, np.float32), momentum=np.ones(SIZE, np.float32), version=1)
    with Churn() as churn:
        for _ in range(30):
            for codec in (Codec.BF16, Codec.INT4):
                after, *_ = merge_and_step(TENSORS, parts(codec), before, step)
                rounded = round_step(TENSORS, after.params.copy(), before.params, codec, PLAIN)
                results.add((codec, after.params.tobytes(), rounded.params.tobytes()))
    return results, churn.spoilt


@pytest.mark.skipif(sys.platform != "linux", reason="the settings are those of Linux's allocator")
def test_nothing_but_the_results_is_written_while_other_threads_take_memory():
    # As aggregators run it (ops.processes.numeric): one arena for all threads, so that what is freed is soon another's.
    env = os.environ | {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_MAX_": "0"}
    ran = subprocess.run([sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True, timeout=120)
    assert (ran.returncode, ran.stdout.strip()) == (0, "2 results, 0 spoilt"), ran.stderr
