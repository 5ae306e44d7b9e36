"""Kernels write where they are told and nowhere else, whatever other threads do with memory meanwhile."""

import os
import subprocess
import sys
import threading

import numpy as np
import pytest

from aggregator.merge.fragment_state import FragmentState
from aggregator.merge.kernels import merge_and_step
from aggregator.merge.resources import PLAIN
from aggregator.merge.versions import round_step
from broker.wire.messages import Codec
from tests.unit.aggregator_merge.test_kernels import STEP
from tests.unit.aggregator_merge.test_merge import part, random, spec

PROGRAM = """
from tests.unit.aggregator_merge.test_memory import merged_and_rounded
found, spoilt = merged_and_rounded()
print(f"{len(found)} results, {spoilt} spoilt")
"""


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
    tensors, results = (spec((512, 512)),), set()
    ones = np.ones(tensors[0].size, np.float32)
    before = FragmentState(params=ones, momentum=ones, version=1)
    with Churn() as churn:
        for _ in range(30):
            for codec in (Codec.BF16, Codec.INT4):
                parts = [part(random((512, 512), seed), codec=codec) for seed in range(5)]
                after, *_ = merge_and_step(tensors, parts, before, STEP)
                rounded = round_step(tensors, after.params.copy(), before.params, codec, PLAIN)
                results.add((codec, after.params.tobytes(), rounded.params.tobytes()))
    return results, churn.spoilt


@pytest.mark.skipif(sys.platform != "linux", reason="the settings are those of Linux's allocator")
@pytest.mark.full("a process that takes memory for seconds")
def test_nothing_but_the_results_is_written_while_other_threads_take_memory():
    # As aggregators run it (ops.processes.numeric): one arena for all threads, so that what is freed is soon another's.
    env = os.environ | {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_MAX_": "0"}
    ran = subprocess.run([sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True, timeout=120)
    assert (ran.returncode, ran.stdout.strip()) == (0, "2 results, 0 spoilt"), ran.stderr
