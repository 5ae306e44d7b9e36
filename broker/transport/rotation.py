"""The addresses of a broker's name, which take turns. Pure, but for the name service."""

from __future__ import annotations

import ipaddress
import math
import socket
from collections import deque
from collections.abc import Sequence

#: How long an address may take to answer, in the first round and at most.
PATIENCE_S, LONGEST_PATIENCE_S = 3.0, 30.0
#: The pause after a round, likewise.
PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0


def addresses_of(host: str, port: int) -> list[str]:
    """Returns ZeroMQ addresses of a host, as the name service has them; may take seconds; raises OSError."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    hosts = (str(address[0]) for *_, address in found)
    return [f"tcp://[{each}]:{port}" if ":" in each else f"tcp://{each}:{port}" for each in hosts]


class AddressRotation:
    """The addresses of one name, in turn. Pure.

    A name may have several, and a broker may listen on one of them only: ``localhost`` is often ``::1`` and
    ``127.0.0.1``. They are tried in the order in which the name service gives them, but that which worked last goes
    first. One that refuses gives way at once, one that does not answer after a while. After such a round comes a pause,
    and the name is looked up again: names move. Pauses and patience grow from round to round, since a link may be slow.
    """

    def __init__(self) -> None:
        self._known: tuple[str, ...] = ()  # as the name service said last
        self._left: deque[str] = deque()  # of this round
        self._at = self._good = ""  # the address that is tried now, and that which worked last
        self._rounds = 0  # since one worked
        self._due_s = math.inf

    def found(self, addresses: Sequence[str], now_s: float) -> None:
        """The name has these addresses: a round begins."""
        self._known = tuple(dict.fromkeys(addresses))
        self._left = deque(sorted(self._known, key=lambda each: each != self._good))
        self._rounds += 1
        self._due_s = now_s

    def unknown(self, now_s: float) -> None:
        """The name service gives no address: the earlier ones still count, or it is asked again later."""
        if self._known:
            self.found(self._known, now_s)
        else:
            self._rounds += 1
            self._due_s = now_s + self._pause_s

    def next(self, now_s: float) -> str | None:
        """Returns the address to try now; None where the name is to be looked up first."""
        if not self._left:
            return None
        self._at = self._left.popleft()
        self._due_s = now_s + min(LONGEST_PATIENCE_S, PATIENCE_S * self._growth)
        return self._at

    def failed(self, now_s: float) -> None:
        """An attempt at the address has failed; it may go on being tried until the next one is."""
        self._due_s = min(self._due_s, now_s if self._left else now_s + self._pause_s)

    def stood(self) -> None:
        """The address works."""
        self._good, self._rounds, self._due_s = self._at, 0, math.inf
        self._left.clear()

    def lost(self, now_s: float) -> None:
        """The address worked, and the connection has been lost: it is tried again first."""
        self._due_s = now_s + PATIENCE_S

    def due(self, now_s: float) -> bool:
        """Returns True if :meth:`next` is due."""
        return now_s >= self._due_s

    @property
    def _growth(self) -> int:
        return 1 << min(max(0, self._rounds - 1), 10)

    @property
    def _pause_s(self) -> float:
        return min(LONGEST_PAUSE_S, PAUSE_S * self._growth)


def host_and_port(address: str) -> tuple[str, int]:
    """Returns the two parts of a TCP address, the host without brackets; of another address none, and 0."""
    if not address.startswith("tcp://"):
        return "", 0
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    return host.strip("[]"), int(port)


def is_name(host: str) -> bool:
    """Returns True if the host of an address is a name, to be looked up."""
    return bool(host) and _ip(host) is None


def _ip(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        found = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return None
    return (found.ipv4_mapped or found) if isinstance(found, ipaddress.IPv6Address) else found


def same(seen: str, address: str) -> bool:
    """Returns True if the monitor means this address; it may say IPv4 in the form mapped into IPv6."""
    (host, port), (at, at_port) = host_and_port(seen), host_and_port(address)
    return (_ip(host), port) == (_ip(at), at_port)
