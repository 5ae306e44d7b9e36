"""Probes a broker: access to its ports, protocol, round trip and bandwidth. Shell.

The probe takes no part in the run: it sends ``probe`` (broker/PROTOCOL.md) over the bulk port, and nothing over the
other one. A broker counts that one as a connection that ended without a word. Where a port does not open, its greeting
is read over a plain socket: it says by itself whether keys are wanted.
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
import time
from dataclasses import dataclass, replace
from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message

from broker.base.errors import RemoteProtocolError
from broker.chunks.receiving import Refused
from broker.transport.chunked import Chunked
from broker.transport.keys import ClientKeys
from broker.transport.sockets import configure_socket, tcp_buffer_bytes
from broker.wire import messages as m
from broker.wire.addresses import channel_address, split_tcp
from broker.wire.frames import decode, encode
from broker.wire.headers import DEFAULT_LIMITS, Buffer
from broker.wire.messages import BROKER, Channel, Envelope, Reason
from ops.findings.broker_findings import BrokerSeen, LinkSeen, PortState
from ops.findings.machine_findings import median

#: For the handshake of one port; in it ZeroMQ tries again every 0.1 s.
OPEN_WITHIN_S = 2.5
#: For the rest of a handshake that a broker has begun as it should: it may be busy.
BUSY_WITHIN_S = 10.0
#: For one answer to a small probe.
ANSWER_WITHIN_S = 2.0
#: For all probes of one direction. A broker's last answer may be behind others' versions.
MEASURE_S = 2.0
ROUND_TRIPS = 7
#: Largest probes in each direction: a fast link that others use as well is not filled for longer.
FULL_PROBES = 3
#: The name that is asked for where the user names no run: a probe is answered whatever it names.
ANY_RUN = "atoll"
#: The greeting of a ZMTP 3 peer: a signature, its version, and the mechanism in 20 bytes.
_SIGNATURE = b"\xff" + bytes(8) + b"\x7f"
_GREETING_BYTES = 64

_EVENTS = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_CLOSED
    | zmq.EVENT_CONNECT_RETRIED
)

#: The events that end a handshake.
_ENDS: dict[int | None, PortState] = {
    zmq.EVENT_HANDSHAKE_SUCCEEDED: PortState.OPEN,
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: PortState.NOT_ALLOWED,
}


def look_at(address: str, *, keys: ClientKeys | None, run: str, context: zmq.Context[Any]) -> BrokerSeen:
    """Returns the findings on one broker, within about 10 s, or 20 s if it is busy.

    Args:
        address: The address of its control port.
        keys: The keys to connect with; None: without.
        run: The run that it should serve; empty: any.
        context: The context of this process; no socket is left in it.
    """
    ports = {Channel.CONTROL: PortState.SILENT, Channel.BULK: PortState.SILENT}
    why = ""
    with contextlib.ExitStack() as stack:
        sockets = {channel: _connected(stack, context, address, channel, keys) for channel in Channel}
        for channel in Channel:
            ports[channel], why = _port_state(sockets[channel], address, channel, keyed=keys is not None)
            if ports[channel] is not PortState.OPEN:
                break
        seen = BrokerSeen(
            address=address,
            control=ports[Channel.CONTROL],
            bulk=ports[Channel.BULK],
            why=why,
            keyed=keys is not None,
            asked_run=run,
        )
        return seen if why or ports[Channel.BULK] is not PortState.OPEN else _measured(sockets[Channel.BULK][0], seen)


# --- opening ----------------------------------------------------------------------------------------------------------

_Watched = tuple[zmq.Socket[Any], zmq.Socket[Any]]


def _connected(
    stack: contextlib.ExitStack, context: zmq.Context[Any], address: str, channel: Channel, keys: ClientKeys | None
) -> _Watched:
    sock = context.socket(zmq.DEALER)
    configure_socket(sock, channel)
    sock.linger = 0
    sock.set(zmq.RECONNECT_IVL, 100)
    sock.set(zmq.MAXMSGSIZE, -1)
    if keys is not None:
        keys.apply(sock)
    monitor = sock.get_monitor_socket(_EVENTS)
    stack.callback(sock.close, linger=0)
    # Disabled first: with its other end closed, an event is waited for by ZeroMQ's thread for ever, and that by us.
    stack.callback(monitor.close, linger=0)
    stack.callback(sock.disable_monitor)
    sock.connect(channel_address(address, channel))
    return sock, monitor


def _port_state(watched: _Watched, address: str, channel: Channel, *, keyed: bool) -> tuple[PortState, str]:
    """Waits for the handshake; if it fails, finds the reason."""
    tcp = address.startswith("tcp:")
    event = _end_of_handshake(watched, OPEN_WITHIN_S, retried=tcp)
    if event not in _ENDS and tcp:
        host, port = split_tcp(channel_address(address, channel))
        if (misfit := _misfit(host, port, keyed=keyed)) is not None:
            return misfit
        if event is None:
            event = _end_of_handshake(watched, BUSY_WITHIN_S, retried=tcp)
        if event is None or (event not in _ENDS and not keyed):
            return PortState.SILENT, "it did not end the handshake"
        return _ENDS.get(event, PortState.OTHER_BROKER), ""
    return _ENDS.get(event, PortState.UNREACHABLE), ""


def _end_of_handshake(watched: _Watched, within_s: float, *, retried: bool) -> int | None:
    """Returns the event that ended a handshake, good or bad; None if none came in time."""
    ends_s = time.monotonic() + within_s
    while (left_s := ends_s - time.monotonic()) > 0 and watched[1].poll(math.ceil(1000 * left_s)):
        event = int(parse_monitor_message(watched[1].recv_multipart())["event"])
        if event != zmq.EVENT_CONNECT_RETRIED or not retried:
            return event
    return None


def _misfit(host: str, port: int, *, keyed: bool) -> tuple[PortState, str] | None:
    """Returns why no handshake with a port is possible, by its first bytes; None if it is."""
    try:
        with socket.create_connection((host, port), OPEN_WITHIN_S) as connection:
            connection.settimeout(OPEN_WITHIN_S)
            connection.sendall(_SIGNATURE + b"\x03\x00")
            said = b""
            while len(said) < _GREETING_BYTES and (more := connection.recv(_GREETING_BYTES)):
                said += more
                if said[:1] != _SIGNATURE[:1]:
                    break
    except socket.gaierror as err:
        return PortState.NO_NAME, err.strerror or ""
    except TimeoutError:
        return PortState.SILENT, f"no answer within {OPEN_WITHIN_S:g} s"
    except OSError as err:
        return PortState.UNREACHABLE, os.strerror(err.errno) if err.errno else str(err)
    mechanism = said[12:32].rstrip(b"\0")
    if mechanism == b"CURVE":
        return None if keyed else (PortState.WANTS_KEY, "")
    if mechanism == b"NULL":
        return (PortState.WANTS_NO_KEY, "") if keyed else None
    return PortState.STRANGER, "it does not speak ZMTP 3"


# --- measuring --------------------------------------------------------------------------------------------------------


@dataclass
class _Asking:
    """A conversation of probes over one socket."""

    sock: zmq.Socket[Any]
    run: str
    sequence: int = 0
    protocol: int = 0
    refused: str = ""

    def __post_init__(self) -> None:
        self._chunked = Chunked(DEFAULT_LIMITS)

    def ask(self, *, buffers: int = 0, answer_buffers: int = 0, within_s: float) -> tuple[float, m.Probed | None]:
        """Sends one probe; returns the seconds that it took, with its answer, or None where none came."""
        self.sequence += 1
        probe = m.Probe(answer_buffers=answer_buffers, payload=m.probe_payload(buffers))
        frames = encode(
            Envelope(
                run_id=self.run,
                sender=m.joining(f"doctor-{os.getpid()}"),
                incarnation=0,
                sequence=self.sequence,
                to=BROKER,
                message=probe,
            )
        )
        began_s = time.monotonic()
        self._chunked.put(frames, urgent=True)
        self._send()
        while (left_s := began_s + within_s - time.monotonic()) > 0:
            if not self.sock.poll(math.ceil(1000 * left_s)):
                break
            self._chunked.take_in(self.sock.recv_multipart(copy=False), time.monotonic())
            self._send()
            answer = self._read(self._chunked.arrived.popleft()) if self._chunked.arrived else None
            if answer is not None and answer.answers == self.sequence:
                return time.monotonic() - began_s, answer
            if self.refused:
                break
        return time.monotonic() - began_s, None

    def _send(self) -> None:
        out = self._chunked.flow.out
        with contextlib.suppress(zmq.Again):  # it goes on with the next answer
            while (step := out.next()) is not None:
                self.sock.send_multipart(step.frames, zmq.NOBLOCK, copy=False)
                out.sent(step, time.monotonic())

    def _read(self, frames: list[Buffer] | Refused) -> m.Probed | None:
        try:
            if isinstance(frames, Refused):
                raise frames.error
            envelope = decode(frames)
        except RemoteProtocolError as err:
            self.refused = str(err)
            if err.reason == Reason.PROTOCOL_VERSION and err.got.isdecimal():
                self.protocol = int(err.got)
            return None
        match envelope.message:
            case m.Probed() as probed:
                self.protocol, self.run = m.PROTOCOL_VERSION, envelope.run_id
                return probed
            case m.Refused(reason=reason, detail=detail):
                self.refused = f"{reason}: {detail}"
        return None


def _measured(sock: zmq.Socket[Any], seen: BrokerSeen) -> BrokerSeen:
    asking = _Asking(sock, seen.asked_run or ANY_RUN)
    _, answer = asking.ask(within_s=ANSWER_WITHIN_S)
    link = None if answer is None else _link(asking)
    return replace(
        seen,
        protocol=asking.protocol,
        release=answer.release if answer is not None else "",
        run=asking.run,
        refused=asking.refused,
        link=link,
    )


def _link(asking: _Asking) -> LinkSeen | None:
    trips: list[tuple[float, float | None]] = []  # seconds, and the broker's clock minus ours in the middle of it
    ends_s = time.monotonic() + ANSWER_WITHIN_S
    while len(trips) < ROUND_TRIPS and time.monotonic() < ends_s:
        took_s, answer = asking.ask(within_s=ANSWER_WITHIN_S)
        if answer is None:
            break
        trips.append((took_s, answer.clock_s - (time.time() - took_s / 2) if answer.clock_s else None))
    if not trips:
        return None
    least_s, offset_s = min(trips, key=lambda each: each[0])
    up = _rate(asking, least_s, up=True)
    down = _rate(asking, least_s, up=False) if up else 0.0
    return LinkSeen(
        round_trips_s=tuple(took_s for took_s, _ in trips),
        up_bits_per_s=up,
        down_bits_per_s=down,
        clock_offset_s=offset_s,  # 0.0 where both clocks show the same to the last bit: they are compared
        buffer_bytes=tcp_buffer_bytes(),
    )


def _rate(asking: _Asking, round_trip_s: float, *, up: bool) -> float:
    """Returns a direction's rate in bits per second, from the largest probe in time; 0 without one.

    Probes grow, over one connection: TCP begins slowly, and beside the round trip a small one is lost in the noise.
    """
    ends_s = time.monotonic() + MEASURE_S
    buffers, took_s = 1, 0.0
    rates: list[float] = []  # of the present size
    before = 0.0  # of the size before
    while len(rates) < FULL_PROBES and (left_s := ends_s - time.monotonic()) > took_s:  # else it would come too late
        size = {"buffers": buffers} if up else {"answer_buffers": buffers}
        took_s, answer = asking.ask(within_s=left_s, **size)
        if answer is None:
            break
        rates.append(8 * buffers * m.PROBE_BUFFER_BYTES / max(took_s - round_trip_s, took_s / 10))
        # The next one shall end in time, at the rate of this one.
        larger = min(4 * buffers, m.MAX_PROBE_BUFFERS, int(buffers * (ends_s - time.monotonic()) / (2 * took_s)))
        if larger > buffers:
            before, rates = median(rates), []
            buffers, took_s = larger, took_s * larger / buffers
    return median(rates) or before
