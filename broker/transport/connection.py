"""One connection of a client, replaced when it is lost; the addresses of its host take turns. Shell."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import math
import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence

import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from broker.base.errors import ConfigError
from broker.process import clocks, logs
from broker.transport.descriptors import forget_unsent
from broker.transport.sockets import Context

log = logs.get(__name__)

#: What helps where a broker does not know a key, or not any more.
_NOT_ALLOWED_CURE = (
    "its key was revoked, or never allowed: on the hub `keys list` shows who is let in, `keys allow` adds"
)
#: How long there may be no connection before it is made anew; longer than a handshake takes.
RENEW_AFTER_S = 30.0
#: ZeroMQ says within a moment of a loss that it tries again. If it has not after this long, it never will.
FORGOTTEN_AFTER_S = 1.0
#: While a name's addresses are tried, whoever waits looks this often whether it is the next one's turn.
LOOK_EVERY_S = 0.1
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
        """Whether it is time for :meth:`next`."""
        return now_s >= self._due_s

    @property
    def _growth(self) -> int:
        return 1 << min(max(0, self._rounds - 1), 10)

    @property
    def _pause_s(self) -> float:
        return min(LONGEST_PAUSE_S, PAUSE_S * self._growth)


class Connection:
    """The one connection of a client's socket, made anew when ZeroMQ has given it up.

    ZeroMQ reconnects after a loss, but not after what it takes for a violation of its own protocol: another security
    mechanism, a stranger on the broker's port, bytes that were damaged on the way. Then it forgets the connection
    without a word. Only its monitor tells such a socket from one that is still trying, which says so at once.

    Of a host's name ZeroMQ would try one address only, and look it up in its own thread. So it is given addresses: the
    name is looked up here, in a thread, and each of its addresses is tried in turn
    (:class:`AddressRotation`); ``on_lookup`` is told each time why in vain, or nothing.

    Attributes:
        connections: How many there were, up to now.
        reached: Something at the address has taken a connection since the last one that stood, be it in vain.
    """

    def __init__(
        self, context: Context, sock: zmq.asyncio.Socket, address: str, on_lookup: Callable[[str], None]
    ) -> None:
        self._socket = sock
        self._address = address
        self._on_lookup = on_lookup
        self._host, self._port = _host_and_port(address)
        self._rotation = AddressRotation() if _is_name(self._host) else None
        self._at = ""  # what ZeroMQ is told to connect to
        self._looking_up = self._closed = False
        self._down_since_s: float | None = None
        self._trying = True
        self._fd: int | None = None  # the descriptor of the connection
        self.connections = 0
        self.reached = self._shut_out = False
        watched = zmq.EVENT_CONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
        watched |= zmq.EVENT_CONNECT_RETRIED | zmq.EVENT_HANDSHAKE_FAILED_AUTH
        self._watcher = sock.get_monitor_socket(watched)
        self._monitor = context.direct(self._watcher)  # it is asked, never waited for

    def connect(self, now_s: float) -> None:
        """Starts connecting; raises ConfigError if ZeroMQ does not take the address."""
        self._down_since_s, self._trying = now_s, True
        self._go_on(now_s)

    def watch(self, now_s: float) -> bool:
        """Takes in the monitor's news; makes the connection anew when due, and returns True if it did."""
        self._take_in(now_s)
        if self._down_since_s is None:
            return False
        if self._rotation is not None and self._rotation.due(now_s):
            self._go_on(now_s)
        patience_s = RENEW_AFTER_S if self._trying else min(RENEW_AFTER_S, FORGOTTEN_AFTER_S)
        if now_s - self._down_since_s < patience_s:
            return False
        self.renew(now_s)
        return True

    def _take_in(self, now_s: float) -> None:
        rotation = self._rotation
        while self._monitor.poll(0):
            seen = parse_monitor_message(self._monitor.recv_multipart(zmq.NOBLOCK))
            if rotation is not None and not _same(seen["endpoint"].decode(), self._at):
                continue  # an attempt at another address, which is being given up
            match seen["event"]:
                case zmq.EVENT_CONNECTED:
                    self._fd, self.reached = seen["value"], True
                case zmq.EVENT_HANDSHAKE_SUCCEEDED:
                    self._down_since_s, self._shut_out = None, False
                    self.connections += 1
                    if rotation is not None:
                        rotation.stood()
                case zmq.EVENT_HANDSHAKE_FAILED_AUTH:  # the end of the connection is told besides
                    if not self._shut_out:
                        log.warning("connection.not_allowed", address=self._address, cure=_NOT_ALLOWED_CURE)
                    self._shut_out = True
                case zmq.EVENT_CONNECT_RETRIED:
                    if rotation is not None and self._trying:  # the first after a loss says that ZeroMQ begins to try
                        rotation.failed(now_s)
                    self._trying = True
                case _:
                    if self._down_since_s is None:
                        self.reached = False
                    if rotation is not None:
                        (rotation.lost if self._down_since_s is None else rotation.failed)(now_s)
                    self._down_since_s, self._trying, self._fd = now_s, False, None

    def renew(self, now_s: float) -> None:
        """Makes the connection anew, whatever has become of the old one and of what was on its way there.

        Until :attr:`stands` again, the socket would take messages for the old one.
        """
        self._take_in(now_s)  # of the old one: the new one begins with what is seen from now on
        self._give_up()
        self.connect(now_s)

    def _give_up(self) -> None:
        """Has ZeroMQ end the connection, or its attempts at one."""
        if self._fd is not None and self._port:
            forget_unsent(self._fd, self._port)
        self._fd = None
        at, self._at = self._at, ""
        if not at:
            return
        try:
            self._socket.disconnect(at)
        except zmq.ZMQError as err:
            if err.errno != errno.ENOENT:  # which says that ZeroMQ has forgotten it: our very case
                raise

    def _go_on(self, now_s: float) -> None:
        """Tries the next address; where the name is to be looked up first, that begins."""
        if self._rotation is None:
            self._dial(self._address)
            return
        address = self._rotation.next(now_s)
        if address is not None:
            self._dial(address)
        elif not self._looking_up:
            self._looking_up = True
            loop = asyncio.get_running_loop()
            # Not of the loop's own threads: it would wait for them when it ends.
            threading.Thread(target=self._look_up, args=(loop,), name="atoll-name", daemon=True).start()

    def _dial(self, address: str) -> None:
        if address == self._at:
            return  # ZeroMQ is at it
        self._give_up()
        try:
            self._socket.connect(address)
        except zmq.ZMQError as err:
            raise ConfigError("broker", self._address, f"ZeroMQ cannot connect to it: {err}") from err
        self._at, self._trying = address, True

    def _look_up(self, loop: asyncio.AbstractEventLoop) -> None:
        """Looks the host's name up; in a thread of its own, where it may take seconds."""
        found, flaw = [], ""
        try:
            found = addresses_of(self._host, self._port)
        except OSError as err:
            flaw = err.strerror or str(err)
        except UnicodeError as err:
            flaw = str(err)
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(self._found, found, flaw)

    def _found(self, addresses: list[str], flaw: str) -> None:
        self._looking_up = False
        if self._closed:
            return
        self._on_lookup(flaw)
        now_s = clocks.monotonic()
        self._take_in(now_s)
        assert self._rotation is not None
        if self._down_since_s is None:
            return  # meanwhile the address that was tried has answered
        if addresses:
            self._rotation.found(addresses, now_s)
        else:
            self._rotation.unknown(now_s)
        if self._rotation.due(now_s):
            self._go_on(now_s)

    async def changed(self, timeout_s: float) -> None:
        """Returns when :meth:`watch` has something to take in, or to do, or when the time is over."""
        timeout_s = min(timeout_s, self.look_again_s)
        await self._watcher.poll(math.ceil(1000 * timeout_s), zmq.POLLIN)  # type: ignore[call-arg]

    @property
    def look_again_s(self) -> float:
        """Seconds after which :meth:`watch` is to be called again at the latest."""
        return RENEW_AFTER_S if self._rotation is None or self.stands else LOOK_EVERY_S

    @property
    def stands(self) -> bool:
        """True while there is a connection, as :meth:`watch` saw it last."""
        return self._down_since_s is None

    def close(self) -> None:
        """Ends the watch, before the socket is closed."""
        self._closed = True
        self._socket.disable_monitor()
        self._watcher.close(linger=0)


def _host_and_port(address: str) -> tuple[str, int]:
    """Returns the two parts of a TCP address, the host without brackets; of another address none, and 0."""
    if not address.startswith("tcp://"):
        return "", 0
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    return host.strip("[]"), int(port)


def _is_name(host: str) -> bool:
    """Whether a host is to be looked up."""
    return bool(host) and _ip(host) is None


def _ip(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        found = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return None
    return (found.ipv4_mapped or found) if isinstance(found, ipaddress.IPv6Address) else found


def _same(seen: str, address: str) -> bool:
    """Returns True if the monitor means this address; it may say IPv4 in the form mapped into IPv6."""
    (host, port), (at, at_port) = _host_and_port(seen), _host_and_port(address)
    return (_ip(host), port) == (_ip(at), at_port)
