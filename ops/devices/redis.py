"""A Redis in virtual time, spoken to by the real client over a connection of virtual time.

What may happen to it: it answers nothing for a while, and then all that it was asked; it is not there; it comes back
empty, or with what it had long ago. Its commands are in :mod:`ops.devices.redis_commands`.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import Any

from ops.devices.redis_commands import Data, RedisError
from ops.virtual.loop import Process, VirtualTime

#: Least and greatest time of one way between a process and Redis, in seconds.
WAY_S = (1e-4, 2e-3)
_COUNT = re.compile(rb"[*$](\d+)\r\n")


def _written(answer: Any) -> bytes:
    """Returns an answer as bytes, in version 3 of the protocol."""
    match answer:
        case None:
            return b"_\r\n"
        case RedisError():
            return f"-{answer}\r\n".encode()
        case int():
            return b":%d\r\n" % answer
        case float():
            return f",{answer!r}\r\n".encode()
        case str():
            text = answer.encode()
            return b"$%d\r\n%s\r\n" % (len(text), text)
        case list():
            return b"*%d\r\n" % len(answer) + b"".join(map(_written, answer))
        case dict():
            parts = [part for pair in answer.items() for part in pair]
            return b"%%%d\r\n" % len(answer) + b"".join(map(_written, parts))
    raise TypeError(f"Redis answers with a {type(answer).__name__}")


def _commands(data: bytearray) -> list[list[str]]:
    """Takes the whole commands off the beginning of what has come."""
    commands, at = [], 0
    while count := _COUNT.match(data, at):
        parts, here = [], count.end()
        for _ in range(int(count[1])):
            length = _COUNT.match(data, here)
            if length is None or len(data) < length.end() + int(length[1]) + 2:
                break
            here = length.end() + int(length[1]) + 2
            parts.append(data[length.end() : here - 2].decode())
        else:
            commands.append(parts)
            at = here
            continue
        break
    del data[:at]
    return commands


class _Connection(asyncio.Transport):
    """One connection of a process; each way keeps its order."""

    def __init__(self, server: Redis, process: Process, protocol: asyncio.Protocol) -> None:
        super().__init__()
        self.server, self.process, self.protocol = server, process, protocol
        self.closing = False
        self.data = bytearray()  # a part of a command
        self.queued: list[list[str]] | None = None  # commands of a transaction
        self.free_s = [0.0, 0.0]  # when what was sent last arrives, there and back

    def later(self, way: int, call: Callable[[], None]) -> None:
        """Calls when something that is sent now has arrived."""
        virtual = self.process.virtual
        arrives_s = virtual.now_s + self.server.way_s(self.process.name)
        self.free_s[way] = max(self.free_s[way], arrives_s, self.server.cut_until_s.get(self.process.name, 0.0))
        virtual.at(self.free_s[way], call)

    def write(self, data: Any) -> None:
        content = bytes(data)
        self.later(0, lambda: self.server.take(self, content))

    def answer(self, content: bytes) -> None:
        """Sends bytes to the process."""

        def arrived() -> None:
            if not self.closing:
                self.process.call_soon(self.protocol.data_received, content)

        self.later(1, arrived)

    def close(self) -> None:
        self.end(None)

    def end(self, error: Exception | None) -> None:
        """Ends it; what is on its way to the server arrives there."""
        if not self.closing:
            self.closing = True
            self.process.call_soon(self.protocol.connection_lost, error)

    def is_closing(self) -> bool:
        return self.closing or not self.process.alive

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default


class Redis:
    """A server in virtual time.

    Args:
        virtual: The time.
        clock: Its wall clock, in seconds, in true time where none is given.

    Attributes:
        data: What it holds.
        silent_until_s: Until then it does nothing; then it does what it was asked meanwhile.
        way_s: Returns how long something is on its way between a process and here, by its name.
        down: Nobody can connect.
        cut_until_s: Process -> until when nothing comes through, either way.
    """

    def __init__(self, virtual: VirtualTime, clock: Callable[[], float] | None = None) -> None:
        self._virtual = virtual
        self.data = Data(clock or virtual.wall)
        self.silent_until_s = 0.0
        self.way_s: Callable[[str], float] = lambda name: virtual.between(name, "way to redis", *WAY_S)
        self.down = False
        self.cut_until_s: dict[str, float] = {}
        self._connections: list[_Connection] = []

    def accept(self, process: Process, protocol: asyncio.Protocol) -> asyncio.Transport:
        """Returns a new connection; raises ConnectionRefusedError."""
        if self.down:
            raise ConnectionRefusedError(111, "Connection refused")
        made = _Connection(self, process, protocol)
        self._connections = [each for each in self._connections if not each.closing] + [made]
        return made

    def restart(self) -> None:
        """Breaks all connections, as a server does that ends; what it holds stays."""
        for each in self._connections:
            each.end(ConnectionResetError(104, "Connection reset by peer"))
        self._connections.clear()

    def take(self, connection: _Connection, content: bytes) -> None:
        """Does what has arrived, or does it later."""
        if self._virtual.now_s < self.silent_until_s:
            self._virtual.at(self.silent_until_s, lambda: self.take(connection, content))
            return
        if self.down:
            return
        connection.data += content
        answers = [self._done(connection, command) for command in _commands(connection.data)]
        connection.answer(b"".join(answers))

    def _done(self, connection: _Connection, command: list[str]) -> bytes:
        name = command[0].upper()
        if name == "MULTI":
            connection.queued = []
            return b"+OK\r\n"
        if connection.queued is None:
            return _written(self._run(command))
        if name != "EXEC":
            connection.queued.append(command)
            return b"+QUEUED\r\n"
        commands, connection.queued = connection.queued, None
        return b"*%d\r\n" % len(commands) + b"".join(_written(self._run(each)) for each in commands)

    def _run(self, command: list[str]) -> Any:
        try:
            return self.data.run(*command)
        except RedisError as err:
            return err
