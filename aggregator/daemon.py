"""The aggregator daemon, ``atoll aggregator``: settings, signals and threads of the process.

Numeric libraries read how many threads they may start when they are imported. So this module imports none of them, and
:mod:`aggregator.process.service`, which does, is imported when that has been decided.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
from collections.abc import Mapping
from typing import Any

from aggregator.interface.config import AggregatorConfig
from broker.base import sources
from broker.process import limits, logs

#: Merges have threads of their own, which sleep between them (:mod:`aggregator.process.workers`). Those of numeric
#: libraries spin: beside islands that train on the same machine they made a 1.85 ms kernel take 13 ms.
ENVIRONMENT = {
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}
#: From here on memory goes back to the system when it is freed. Left alone, glibc kept half a model more, with 24
#: fragments of 100 M parameters (benchmarks/README.md). With 1 MiB, page faults made rounds slower; with 8 MiB not.
LARGE_BYTES = 8 << 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags of ``atoll aggregator``."""
    sources.add_config_flag(parser)
    sources.add_flags(parser, AggregatorConfig, defaults={"run_id": None})


def run(args: argparse.Namespace) -> int:
    """Aggregates until the run has ended, and returns 0, or until signal n comes, and returns 128 + n.

    The report is written either way.

    Raises:
        ConfigError: A setting cannot work, such as a store that belongs to another run, or is not that of its run.
        Unavailable: The store cannot be used.
    """
    logs.configure("aggregator")
    given = sources.of_a_run(AggregatorConfig, args, "aggregator")
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    limits.return_freed(LARGE_BYTES)
    limits.raise_open_files()
    return asyncio.run(_until_signalled(given))


async def _until_signalled(given: Mapping[str, Any]) -> int:
    from aggregator.process import service

    limits.collect_seldom()
    stop, received = asyncio.Event(), []

    def signalled(number: int) -> None:
        received.append(number)
        stop.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signalled, number)
    ending = await service.serve(given, stop=stop)
    return 128 + received[0] if received and ending is not service.Ending.OVER else 0
