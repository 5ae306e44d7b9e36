"""Environment variables for several numeric processes on one machine."""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
from pathlib import Path

from broker.process.user_files import cache_folder


def one_thread_environment(environment: dict[str, str] | None = None) -> dict[str, str]:
    """Returns variables that keep a process's numeric libraries to one thread that sleeps when idle.

    Several islands share this machine: thread pools that spin made a 1.85 ms kernel take 13 ms.
    """
    ours = os.environ if environment is None else environment
    flags = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
    return {
        "XLA_FLAGS": f"{ours.get('XLA_FLAGS', '')} {flags}".strip(),
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "passive",
        "OPENBLAS_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "NUMEXPR_NUM_THREADS": "1",
        "JAX_PLATFORMS": ours.get("JAX_PLATFORMS", "cpu"),
    }


def heap_that_stays() -> dict[str, str]:
    """Returns variables of glibc that let a process keep freed memory for its next step.

    A step frees tens of megabytes and allocates as many again: glibc hands them back to the kernel in between, and to
    have them mapped page by page once more took a tenth to a quarter of a step. For processes that only train.
    """
    return {
        "MALLOC_ARENA_MAX": "1",
        "MALLOC_MMAP_MAX_": "0",  # a threshold as high as that is refused by glibc's older releases
        "MALLOC_TRIM_THRESHOLD_": str(1 << 32),
    }


def compilation_cache() -> dict[str, str]:
    """Returns variables for JAX's compilation cache, shared by islands and later runs.

    In the user's cache directory, apart for each kind of processor: what is compiled for one may crash another. None
    for a user who has no such directory.
    """
    folder = cache_folder()
    ours = None if folder is None else os.fspath(folder / f"jax-{_processor()}")
    directory = os.environ.get("JAX_COMPILATION_CACHE_DIR") or ours
    if directory is None:
        return {}
    return {
        "JAX_COMPILATION_CACHE_DIR": directory,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }


def _processor() -> str:
    """Names the kind of processor: a digest of its features."""
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        features = "".join(sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))}))
        return hashlib.sha256(features.encode()).hexdigest()[:12]
    return platform.machine() or "unknown"
