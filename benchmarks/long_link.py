"""Measures Mbit/s of one and several connections on a long fast link: Atoll beside TCP, each way.

Hub and island are two network namespaces with a TUN device each; a program of ours carries their packets at the link's
rate and holds them back for half of the round trip. TCP is the kernel's, with the buffers that this machine has: of
one connection no more is under way than its buffers hold. An endpoint as islands have it sends probes of 16 MiB to a
real broker, several at a time, and has as many answered; beside it raw TCP carries the same bytes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import zmq.asyncio

from benchmarks import output
from benchmarks.fleet import ROOT_ENVIRONMENT
from benchmarks.output import Column, Printer
from benchmarks.regions.network import Network, address, regions
from broker.chunks.subflow import MOST_SUBFLOWS
from broker.transport.endpoint import Endpoint
from broker.transport.sockets import tcp_buffer_bytes
from broker.wire import messages as m
from broker.wire.errors import ConfigError, Unavailable
from broker.wire.messages import BROKER, Channel, Envelope
from ops.run.daemons import our_command

RUN, PORT, RAW_PORT = "long-link", 7001, 7101
PROBE_BYTES = m.MAX_PROBE_BUFFERS * m.PROBE_BUFFER_BYTES
#: Probes and answers under way at a time.
AT_A_TIME = 3
#: Of these packets a program in Python carries 2 Gbit/s.
MTU = 65_000
WITHIN_S = 120.0
#: Of what a raw connection is asked for.
ASKED_BYTES = 64

COLUMNS = (
    Column(key="connections", title="connections"),
    Column(key="up_mbit", title="up, Mbit/s", form=",.0f"),
    Column(key="down_mbit", title="down, Mbit/s", form=",.0f"),
    Column(key="raw_up_mbit", title="raw TCP up", form=",.0f"),
    Column(key="raw_down_mbit", title="raw TCP down", form=",.0f"),
    Column(key="up_ratio", title="up, of raw TCP", form=".2f"),
    Column(key="down_ratio", title="down, of raw TCP", form=".2f"),
)


# --- ours, in the island's region -------------------------------------------------------------------------------------


class Measured:
    """A bulk connection to the broker, and the probes over it."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._sequence = 0

    async def spread(self, connections: int) -> None:
        """Returns when so many connections carry chunks.

        Raises:
            Unavailable: They do not come to stand.
        """
        ends_s = time.monotonic() + WITHIN_S
        while self._endpoint.spread_over != connections:
            await self._endpoint.recv(0.1)
            if time.monotonic() > ends_s:
                raise Unavailable(f"{self._endpoint.spread_over} of {connections} connections stand", definite=True)

    async def seconds(self, probes: int, *, up: bool) -> float:
        """Returns how long so many probes take whose payload goes one way."""
        began_s, left, room = time.monotonic(), probes, asyncio.Semaphore(AT_A_TIME)

        async def send() -> None:
            payload = m.probe_payload(m.MAX_PROBE_BUFFERS if up else 0)
            for _ in range(probes):
                await room.acquire()
                self._sequence += 1
                probe = m.Probe(answer_buffers=0 if up else m.MAX_PROBE_BUFFERS, payload=payload)
                envelope = Envelope(
                    run_id=RUN,
                    sender=m.joining("bench"),
                    incarnation=0,
                    sequence=self._sequence,
                    to=BROKER,
                    message=probe,
                )
                if not await self._endpoint.send(envelope):
                    raise Unavailable("the connection broke", definite=True)

        sending = asyncio.create_task(send())
        while left:
            answer = await self._endpoint.recv(1.0)
            if answer is not None and isinstance(answer.message, m.Probed):
                left -= 1
                room.release()
            elif answer is not None and isinstance(answer.message, m.Refused):
                raise Unavailable(f"the broker refuses: {answer.message.detail}", definite=True)
            elif sending.done():
                sending.result()
            if time.monotonic() - began_s > WITHIN_S:
                raise Unavailable(f"{left} of {probes} probes were not answered in time", definite=True)
        await sending
        return time.monotonic() - began_s


async def _ours(connections: int, probes: int) -> dict[str, float]:
    with zmq.asyncio.Context() as context:
        endpoint = Endpoint(
            context, f"tcp://{address(0)}:{PORT}", Channel.BULK, connections=connections, bulk_wait_s=60
        )
        async with endpoint:
            measured = Measured(endpoint)
            await measured.spread(connections)
            await measured.seconds(2 * AT_A_TIME, up=True)  # until the windows have grown
            up_s = await measured.seconds(probes, up=True)
            await measured.seconds(2 * AT_A_TIME, up=False)
            down_s = await measured.seconds(probes, up=False)
    mbit = probes * PROBE_BYTES * 8 / 1e6
    return {"up_mbit": mbit / up_s, "down_mbit": mbit / down_s}


# --- raw TCP ----------------------------------------------------------------------------------------------------------


def _serve_raw() -> None:
    """In the hub's region: takes or gives the bytes each connection asks for, until standard input ends."""

    def serve(link: socket.socket) -> None:
        with link:
            asked = json.loads(link.recv(ASKED_BYTES, socket.MSG_WAITALL))
            if asked["up"]:
                _read(link, asked["nbytes"])
            else:
                _write(link, asked["nbytes"])
            link.sendall(b".")

    def accept() -> None:
        with socket.create_server((address(0), RAW_PORT)) as server:
            print("ready", flush=True)
            while True:
                link, _ = server.accept()
                threading.Thread(target=serve, args=(link,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    sys.stdin.read()


def _read(link: socket.socket, nbytes: int) -> None:
    into = memoryview(bytearray(1 << 20))
    while nbytes:
        nbytes -= link.recv_into(into[: min(nbytes, into.nbytes)])


def _write(link: socket.socket, nbytes: int) -> None:
    piece = memoryview(bytes(1 << 20))
    while nbytes:
        nbytes -= link.send(piece[: min(nbytes, piece.nbytes)])


def _raw(connections: int, probes: int) -> dict[str, float]:
    def seconds(nbytes: int, *, up: bool) -> float:
        share = nbytes // connections
        links = [socket.create_connection((address(0), RAW_PORT)) for _ in range(connections)]
        began_s = time.monotonic()

        def carry(link: socket.socket) -> None:
            link.sendall(json.dumps({"up": up, "nbytes": share}).ljust(ASKED_BYTES).encode())
            (_write if up else _read)(link, share)
            link.recv(1)

        threads = [threading.Thread(target=carry, args=(link,)) for link in links]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        took_s = time.monotonic() - began_s
        for link in links:
            link.close()
        return took_s

    nbytes = probes * PROBE_BYTES
    mbit = nbytes * 8 / 1e6
    return {"raw_up_mbit": mbit / seconds(nbytes, up=True), "raw_down_mbit": mbit / seconds(nbytes, up=False)}


# --- both, side by side -----------------------------------------------------------------------------------------------


def _worker(network: Network, work: str, connections: int, probes: int) -> dict[str, Any]:
    command = [sys.executable, "-P", "-m", "benchmarks.long_link", "--work", work]
    command += ["--connections", str(connections), "--probes", str(probes)]
    done = subprocess.run(
        network.inside(1, command),
        capture_output=True,
        text=True,
        timeout=3 * WITHIN_S,
        check=False,
        env=os.environ | ROOT_ENVIRONMENT,
    )
    if done.returncode:
        raise Unavailable(f"{work} over {connections} connections: {done.stderr.strip()[-400:]}", definite=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def measure(args: argparse.Namespace) -> int:
    """Prints the table; returns 0."""
    counts, probes, round_trip_ms = args.connections, args.probes, args.round_trip_ms
    if args.quick:
        counts, probes, round_trip_ms = (1, 2), 2, 10.0
    if max(counts) > MOST_SUBFLOWS:
        raise ConfigError("connections", max(counts), f"must be from 1 to {MOST_SUBFLOWS}")
    printer = Printer(COLUMNS, as_json=args.json)
    buffers = f"{tcp_buffer_bytes() / 1e6:.1f} MB"
    printer.say(f"{args.mbit:g} Mbit/s, {round_trip_ms:g} ms; a connection has {buffers} under way at most")
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="atoll-long-link-")))
        network = stack.enter_context(regions(2, round_trip_ms=round_trip_ms, mbit=args.mbit, mtu=MTU))
        log = stack.enter_context((directory / "hub.log").open("w"))
        broker = our_command("broker", "--run", RUN, "--host", address(0), "--port", str(PORT), "--insecure")
        _start(stack, network.inside(0, broker), log)
        raw = [sys.executable, "-P", "-m", "benchmarks.long_link", "--work", "serve"]
        _start(stack, network.inside(0, raw), log)
        for connections in counts:
            ours = _worker(network, "ours", connections, probes)
            base = _worker(network, "raw", connections, probes)
            ratios = {f"{way}_ratio": ours[f"{way}_mbit"] / base[f"raw_{way}_mbit"] for way in ("up", "down")}
            printer.add({"connections": connections} | ours | base | ratios)
            printer.say(f"{connections} connections: {ours['up_mbit']:,.0f} Mbit/s up, {ours['down_mbit']:,.0f} down")
    printer.close()
    return 0


def _start(stack: ExitStack, command: Sequence[str], log: Any) -> None:
    process = stack.enter_context(
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log, env=os.environ | ROOT_ENVIRONMENT)
    )
    stack.callback(process.terminate)


def main(argv: list[str] | None = None) -> int:
    """Parses, measures, prints; or is one of the programs in a region."""
    parser = output.parser_of("long_link", __doc__, "--mbit 2000 --round-trip-ms 80 --connections 1,4,8")
    output.add_arguments(parser)
    parser.add_argument("--connections", type=output.numbers, default=(1, 2, 4, 8), help="numbers of them (1,2,4,8)")
    parser.add_argument("--mbit", type=float, default=2000.0, help="rate of the link, each way (2000)")
    parser.add_argument("--round-trip-ms", type=float, default=80.0, help="of the link (80)")
    parser.add_argument("--probes", type=int, default=24, help="probes of 16 MiB each way (24)")
    parser.add_argument("--work", choices=["ours", "raw", "serve"], help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.work == "serve":
        _serve_raw()
        return 0
    if args.work:
        (connections,) = args.connections
        found = asyncio.run(_ours(connections, args.probes)) if args.work == "ours" else _raw(connections, args.probes)
        print(json.dumps(found))
        return 0
    return output.guarded(measure, args)


if __name__ == "__main__":
    sys.exit(main())
