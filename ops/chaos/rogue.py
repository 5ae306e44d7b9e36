"""A rogue island: a real process that trains like any other and tampers with what it sends.

    python3 -m ops.chaos.rogue --manner nan --config runs/20260131-120304/config.toml --island-id rogue

Everything else is the island daemon with its flags. Only the outgoing side of its connection is replaced, so what
arrives at the broker comes from a true member with true counters, which is the hard case.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import zmq

from broker.base.errors import ConfigError, Unavailable
from broker.wire.messages import Channel, Contribution
from islands import daemon
from islands.session import connections as wire
from islands.session import session
from islands.tasks.task import Task, load_task
from ops.faults.kinds import LIES, ROGUES, FaultKind, Rogue, TamperedTensors
from ops.launcher import find_modules_here


def rogue_wire(manner: FaultKind, honest_s: float = 0.0) -> type[wire.Connections]:
    """Returns the connection of an island, with a rogue between core and socket, honest for ``honest_s``."""
    rng, honest_until_s = random.Random(0), time.monotonic() + honest_s
    rogue = Rogue(manner, 1.0, TamperedTensors(), rng, honest=lambda: time.monotonic() < honest_until_s)

    class RogueWire(wire.Connections):
        def post(self, posted: wire.Posted) -> None:
            for message in rogue.outgoing(posted.message):
                super().post(posted._replace(message=message))
            if manner is FaultKind.GARBAGE and isinstance(posted.message, Contribution):
                asyncio.get_running_loop().create_task(self._send_bytes())

        async def _send_bytes(self) -> None:
            """Sends random bytes, which are no message."""
            if Channel.BULK not in self._endpoints:
                return  # between two brokers
            socket = self._endpoints[Channel.BULK]._lines[0].socket  # no honest use would do this
            frames = [rng.randbytes(rng.randrange(200)) for _ in range(rng.randrange(1, 4))]
            with contextlib.suppress(zmq.ZMQError):  # the connection is down: garbage need not arrive
                await socket.send_multipart(frames, zmq.NOBLOCK)

    return RogueWire


def claiming(times: int) -> Callable[..., Task]:
    """Returns a loader of tasks whose steps claim ``times`` the tokens that they have."""

    def load(name: str, options: Mapping[str, Any]) -> Task:
        task = load_task(name, options)
        return replace(task, tokens_per_step=times * task.tokens_per_step)

    return load


def main(argv: list[str] | None = None) -> int:
    """Runs a rogue until the run ends or a signal comes; exit codes as of ``atoll island``."""
    parser = argparse.ArgumentParser(prog="rogue", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--manner", choices=[str(each) for each in ROGUES], required=True, help="what it does")
    parser.add_argument("--honest-s", type=float, default=0.0, help="seconds in which it is honest (default: 0)")
    daemon.add_arguments(parser)
    args = parser.parse_args(argv)
    try:
        manner = FaultKind(args.manner)
        # The one place where an island makes its connection.
        setattr(session, "Connections", rogue_wire(manner, args.honest_s))  # noqa: B010 - typed so
        if manner in LIES:
            setattr(daemon, "load_task", claiming(LIES[manner].tokens))  # noqa: B010 - the one place where it has one
        return daemon.run(args)
    except (ConfigError, Unavailable) as err:
        print(f"rogue: {err}", file=sys.stderr)
        return 2 if isinstance(err, ConfigError) else 1


if __name__ == "__main__":
    find_modules_here()
    sys.exit(main())
