"""Receives messages frame by frame, with a limit on frames. Shell.

pyzmq's own ``recv_multipart`` takes whatever a peer puts into one message: a million empty frames, two megabytes on the
wire, held the broker up for 24 s. Here the surplus is thrown away as it comes, with pauses in which others are served:
beside a million frames the slowest heartbeat took 0.12 s.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import zmq
import zmq.asyncio

#: A message with so many frames too many is no mistake: its connection is ended.
FLOOD_FRAMES = 1_000
#: Frames thrown away between two pauses.
_SLICE = 2_000


def said_of(frame: zmq.Frame, name: int | str) -> Any:
    """Returns ZeroMQ's value for the connection of a frame, such as its descriptor; None if it has none.

    Of a peer that speaks ZMTP 1.0 or 2.0 it says nothing at all, and asking it is an error.
    """
    try:
        return frame.get(name)
    except zmq.ZMQError:
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """One message off a ROUTER.

    Attributes:
        peer: Routing id of its connection.
        frames: The first ones, as many as a message may have; of one in chunks all, once it is whole.
        surplus: How many more there were.
        last: One that came last: it knows the connection.
    """

    peer: bytes
    frames: list[Any]
    surplus: int = 0
    last: zmq.Frame | None = None


class Intake:
    """Takes messages off one ROUTER.

    Args:
        socket: Nobody else may receive from it.
        most_frames: Of a message, behind the routing id.
        in_a_row: After so many messages others have their turn.
        drained: Called when there is no message to take.
        flooded: Called with a frame of a message that has far too many, while the rest is still coming.
    """

    def __init__(
        self,
        socket: zmq.asyncio.Socket,
        *,
        most_frames: int,
        flooded: Callable[[zmq.Frame], None],
        drained: Callable[[], None] = lambda: None,
        in_a_row: int = 1,
    ) -> None:
        self._socket = socket
        # Behind the first frame the others are there already: they are taken without a future for each.
        self._direct: zmq.Socket[Any] = zmq.Socket.shadow(socket.underlying)
        self._most_frames = most_frames
        self._flooded, self._drained = flooded, drained
        self._in_a_row, self._taken = in_a_row, 0

    async def take(self) -> Taken:
        """Returns the next message."""
        # One that is there already is returned without a pause; without one here, the busier socket would keep the
        # other from being read.
        self._taken += 1
        if self._taken % self._in_a_row == 0:
            await asyncio.sleep(0)
        try:
            route: zmq.Frame = self._direct.recv(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            self._drained()
            route = await self._socket.recv(copy=False)
        frames: list[zmq.Frame] = []
        more = route.more
        while more and len(frames) < self._most_frames:
            frame = self._direct.recv(zmq.NOBLOCK, copy=False)
            frames.append(frame)
            more = frame.more
        surplus = await self._throw_away(frames[0]) if more else 0
        return Taken(peer=route.bytes, frames=frames, surplus=surplus, last=frames[0] if frames else None)

    async def _throw_away(self, of: zmq.Frame) -> int:
        surplus = 0
        while True:
            self._direct.recv(zmq.NOBLOCK)
            surplus += 1
            if surplus == FLOOD_FRAMES:
                self._flooded(of)
            if not self._direct.get(zmq.RCVMORE):
                return surplus
            if surplus % _SLICE == 0:
                await asyncio.sleep(0)
