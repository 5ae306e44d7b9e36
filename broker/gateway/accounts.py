"""The kernel's byte counts of aggregators' connections at a broker. Shell."""

from __future__ import annotations

import zmq

from broker.gateway.receiving import said_of
from broker.routing.deafness import Carried
from broker.routing.directory import MAX_SHARDS
from broker.transport.tcp import carried, peer_port

#: Connections remembered: of each shard its leader's, and some that were replaced or that nobody let in.
MOST = 4 * MAX_SHARDS


class Accounts:
    """Remembers which descriptor is whose; one that was closed and given to something else has no account."""

    def __init__(self) -> None:
        self._behind: dict[bytes, tuple[int, int]] = {}  # routing id -> descriptor and port at the other end

    def open(self, peer: bytes, frame: zmq.Frame) -> None:
        """A message came over a connection that accounts will be asked of."""
        fd = said_of(frame, zmq.SRCFD)
        port = None if fd is None else peer_port(fd)
        self._behind.pop(peer, None)
        if port is None:
            return
        self._behind[peer] = fd, port
        while len(self._behind) > MOST:
            del self._behind[next(iter(self._behind))]

    def of(self, peer: bytes) -> Carried | None:
        """Returns what a connection has carried; None where it is not known."""
        found = self._behind.get(peer)
        return None if found is None else carried(found[0], to_port=found[1])
