"""A daemon may have more files open than it starts with; memory that it frees is the system's again, or its own."""

import platform
import subprocess
import sys

import pytest


def said_by(program, how):
    """The number that a process of its own prints."""
    command = [sys.executable, "-c", program, how]
    return int(subprocess.run(command, capture_output=True, text=True, timeout=50, check=True).stdout)


FILES = """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 512))
from broker.process.limits import raise_open_files
print(raise_open_files(), *resource.getrlimit(resource.RLIMIT_NOFILE), raise_open_files())
"""


def test_the_limit_is_raised_as_far_as_the_system_allows():
    done = subprocess.run([sys.executable, "-c", FILES], capture_output=True, text=True, timeout=50, check=True)
    assert done.stdout.split() == ["512"] * 4


# What a library of numbers does: large buffers, and small things in between that outlive them.
MEMORY = """
import re, sys
from pathlib import Path
from broker.process.limits import return_freed
if sys.argv[1] == "set":
    return_freed(8 << 20)
MIB, kept, buffers = 1 << 20, [], []
bytearray(30 * MIB)  # freed: glibc's own limit is that from here on
for _ in range(10):
    buffers.append(bytearray(16 * MIB))
    buffers[-1][::4096] = bytes(4096)
    kept.append(bytearray(100_000))
buffers.clear()
print(int(re.search(r"RssAnon:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) // 1024)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="a setting of glibc")
def test_large_memory_that_was_freed_is_not_kept_between_small_things():
    assert said_by(MEMORY, "set") < 50, "MiB"
    assert said_by(MEMORY, "left alone") > 100


# What ZeroMQ does: a thread of its own makes frames, another one frees them.
FRAMES = """
import resource, sys
from concurrent.futures import ThreadPoolExecutor
from broker.process.limits import keep_freed, return_freed
keep_freed(64 << 20, arenas=1) if sys.argv[1] == "kept" else return_freed(1 << 20)

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

with ThreadPoolExecutor(1) as thread:
    for _ in range(10):
        before, frames = faults(), [thread.submit(bytearray, 3 << 19).result() for _ in range(16)]
        for each in frames:
            each[::4096] = bytes(len(each) // 4096)
        frames.clear()
print(faults() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="a setting of glibc")
def test_memory_that_is_kept_is_used_again_whichever_thread_freed_it():
    assert said_by(FRAMES, "kept") < 100, "new pages"
    assert said_by(FRAMES, "returned") > 2000  # 16 frames of 384 pages, each too small for a huge one
