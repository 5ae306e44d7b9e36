"""Of daemons, each in a process of its own: open files, memory that they free, and reference cycles."""

import platform
import subprocess
import sys

import pytest

from broker.process.limits import THRESHOLDS


def said_by(program, *words):
    command = [sys.executable, "-c", program, *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=50, check=True).stdout.strip()


def test_of_reference_cycles_what_is_there_is_never_looked_at_again_and_the_rest_seldom():
    asked = "gc.get_threshold(), gc.get_freeze_count() > 1000"
    code = f"import gc; from broker.process.limits import collect_seldom; collect_seldom(); print({asked})"
    assert said_by(code) == f"{THRESHOLDS} True"


FILES = """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 512))
from broker.process.limits import raise_open_files
print(raise_open_files(), *resource.getrlimit(resource.RLIMIT_NOFILE), raise_open_files())
"""


def test_the_limit_is_raised_as_far_as_the_system_allows():
    assert said_by(FILES) == "512 512 512 512"


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
    assert int(said_by(MEMORY, "set")) < 50, "MiB"
    assert int(said_by(MEMORY, "left alone")) > 100


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
    assert int(said_by(FRAMES, "kept")) < 100, "new pages"
    assert int(said_by(FRAMES, "returned")) > 2000  # 16 frames of 384 pages, each too small for a huge one


# What a flood leaves: many frames, with small things in between that outlive them.
FLOOD = """
import resource, sys
from pathlib import Path
from broker.process.limits import keep_freed, return_spare
keep_freed(128 << 20, arenas=1)
frames, kept = [], []
for _ in range(400):
    frames.append(bytearray(1 << 20))
    frames[-1][::4096] = bytes(256)
    kept.append(bytearray(600))
frames.clear()
return_spare(int(sys.argv[1]) << 20)
print(int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() >> 20)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="a setting of glibc")
def test_what_a_flood_has_left_is_given_back_and_a_little_is_kept():
    assert int(said_by(FLOOD, "256")) < 100, "MiB"
    assert int(said_by(FLOOD, "800")) > 400
