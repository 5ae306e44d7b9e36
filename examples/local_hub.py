"""A broker and an aggregator for as long as one example runs, so that one command is enough to try it.

Given an address, an example joins the run there. Without one it starts a hub of its own on this machine, without Redis,
which training does not need. It prints the command for a second island; nothing is left behind.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from ops.processes.child_process import ProcessSpec
from ops.processes.cluster import LocalCluster, free_ports
from ops.run.daemons import ON_CPU, our_command, our_environment

#: Two fragments, and short rounds of eight steps, as these runs take seconds.
SETTINGS = ("--islands", "1", "--fragments", "2", "--sync-interval", "8")


def parser(about: str | None) -> argparse.ArgumentParser:
    """Returns what every example is told: an address, or none.

    Args:
        about: The docstring of the example.
    """
    made = argparse.ArgumentParser(description=(about or "").partition("\n")[0])
    made.add_argument("address", nargs="?", help="a broker, such as tcp://hub:7001 (default: a hub of its own)")
    return made


@contextlib.contextmanager
def at(address: str | None, *, run: str = "atoll", tokens: int) -> Iterator[str]:
    """Yields an address that was given, or else that of a hub which ends with the block.

    Args:
        address: From the command line.
        run: The run's name, where the hub is ours.
        tokens: Likewise its length, of all islands together.

    Raises:
        Unavailable: The hub did not start.
    """
    if address:
        yield address
        return
    port = free_ports(3)
    found = f"tcp://127.0.0.1:{port}"
    environment = our_environment(f"redis://127.0.0.1:{port + 2}") | ON_CPU  # where none answers
    with tempfile.TemporaryDirectory(prefix="atoll-hub-") as folder, LocalCluster(Path(folder)) as hub:
        where = ("--broker", found, "--store", f"{folder}/store", "--tokens", str(tokens))
        commands = {
            "broker": our_command("broker", "--run", run, "--port", str(port)),
            "aggregator": our_command("aggregator", "--run", run, *where, *SETTINGS),
        }
        hub.start(ProcessSpec(name=n, command=c, environment=environment) for n, c in commands.items())
        hub.wait_for_port("broker", port)
        again = f"python -m examples.{Path(sys.argv[0]).stem} {found}"
        print(f"hub at {found}; another island: {again}", flush=True)
        yield found
