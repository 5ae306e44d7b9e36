"""A broker and an aggregator for as long as one example runs, so that one command is enough to try it.

An example calls :func:`address`. Given an address it joins the run there. Without one it starts a hub of its own on
this machine, with no Redis (training needs none) and nothing left behind; it prints the command for a second island.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from ops.processes.cluster import free_ports

#: The run of every example: the model, and so the hub, differs from one to the next.
RUN = "atoll"
#: Short rounds, as these runs take seconds: each of two fragments every eight steps.
SETTINGS = ("--islands", "1", "--fragments", "2", "--sync-interval", "8")


@contextlib.contextmanager
def address(about: str, *, tokens: int) -> Iterator[str]:
    """Yields the address on the command line, or else that of a hub that ends with the block.

    Args:
        about: The docstring of the example, for ``--help``.
        tokens: Length of the run where the hub is ours; all islands together.
    """
    parser = argparse.ArgumentParser(description=about.partition("\n")[0])
    parser.add_argument("address", nargs="?", help="a broker, such as tcp://hub:7001 (default: a hub of its own)")
    given = parser.parse_args().address
    if given:
        yield given
        return
    with tempfile.TemporaryDirectory(prefix="atoll-") as folder, contextlib.ExitStack() as processes:
        port = free_ports(3)
        found = f"tcp://127.0.0.1:{port}"
        where = ("--run", RUN, "--redis-url", f"redis://127.0.0.1:{port + 2}")  # where none answers
        processes.enter_context(_started(Path(folder), "broker", *where, "--port", str(port)))
        store = ("--broker", found, "--store", f"{folder}/store", "--tokens", str(tokens))
        processes.enter_context(_started(Path(folder), "aggregator", *where, *store, *SETTINGS))
        module = Path(sys.argv[0]).stem
        print(f"hub at {found}; another island: {sys.executable} -m examples.{module} {found}", flush=True)
        yield found


@contextlib.contextmanager
def _started(folder: Path, command: str, *flags: str) -> Iterator[None]:
    """Runs a command of ours beside the block, its output in ``folder``; Ctrl-C reaches the example alone."""
    environment = os.environ | {"ATOLL_NO_VENV": "1", "JAX_PLATFORMS": "cpu"}
    with (folder / f"{command}.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "ops", command, *flags],
            stdout=log,
            stderr=log,
            env=environment,
            start_new_session=True,
        )
    try:
        yield
    finally:
        process.terminate()
        process.wait()
