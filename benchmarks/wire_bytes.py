"""Bytes on the wire per island and round, against the closed form.

Each island reaches a real broker through a TCP forwarder of its own, which counts what passes; it shares no code with
the rest. A round moves one fragment of S parameters (the model over P), and the closed form of one island is

    up   = S * b + header        b = 4 bytes for f32, 2 for bf16; 1 for int8 and 1/2 for int4, and 4/256 for scales
    down = S * b + header        a version that every island takes, as the difference to the one before

with headers of 270 bytes, 75 for each tensor and, in a version, 200 for what it has of the island. The bulk channel
must agree within 2 % where a model has a million parameters or more. The control channel (heartbeats twice a second,
announcements of rounds, each with the state an island needs) is shown by itself, in bytes per second and island.
"""

from __future__ import annotations

import argparse
import asyncio
import socket
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AsyncExitStack, closing, suppress
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks import output
from benchmarks.fleet import Hub
from benchmarks.output import Column, Printer
from benchmarks.scripted import SPACING_STEPS, Payloads, model, scripted_fleet
from broker.wire.messages import Channel, Codec
from broker.wire.number_formats import MERGED_BYTES
from ops.processes.cluster import free_ports

#: An int8 or int4 shares a float32 with 255 others. Written out here: the closed form asks nobody for it.
ELEMENT_BYTES = {Codec.BF16: 2.0, Codec.F32: 4.0, Codec.INT8: 1 + 4 / 256, Codec.INT4: 1 / 2 + 4 / 256}
#: Per tensor: its entry in the header (codec, shape, length, checksum) and ZeroMQ's 9 bytes of frame.
TENSOR_HEADER_BYTES = 75
#: Per message: protocol, run, addresses, and the fields of its kind.
MESSAGE_HEADER_BYTES = 270
TOLERANCE = 0.02
#: What the forwarder reads at a time.
CHUNK_BYTES = 1 << 18

COLUMNS = (
    Column(key="parameters", title="parameters", form=",d"),
    Column(key="islands", title="islands"),
    Column(key="codecs", title="up/down"),
    Column(key="up_bytes", title="up, bytes", form=",.0f"),
    Column(key="up_form_bytes", title="closed form", form=",.0f"),
    Column(key="up_ratio", title="ratio", form=".4f"),
    Column(key="down_bytes", title="down, bytes", form=",.0f"),
    Column(key="down_form_bytes", title="closed form", form=",.0f"),
    Column(key="down_ratio", title="ratio", form=".4f"),
    Column(key="counters_ratio", title="own counters", form=".4f"),
    Column(key="control_bytes_per_s", title="control B/s", form=",.0f"),
)


def closed_form(parameters: int, tensors: int, codec: Codec) -> tuple[int, int]:
    """Returns the bytes, up and down, of one fragment of so many parameters in so many tensors."""
    up_bytes = round(parameters * ELEMENT_BYTES[codec]) + MESSAGE_HEADER_BYTES + tensors * TENSOR_HEADER_BYTES
    return up_bytes, up_bytes + MERGED_BYTES


class Forwarder:
    """A TCP forwarder between one island and the broker, which counts every byte and shares no code with either.

    Attributes:
        address: That the island connects to.
        up: Bytes by channel inside TCP, ZeroMQ's own framing, greetings and heartbeats included.
        down: The same the other way.
    """

    def __init__(self, broker: str) -> None:
        host, _, port = broker.removeprefix("tcp://").rpartition(":")
        self.up: Counter[Channel] = Counter()
        self.down: Counter[Channel] = Counter()
        self._lock = threading.Lock()
        own_port = free_ports(2)
        self.address = f"tcp://127.0.0.1:{own_port}"
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        for offset, channel in enumerate((Channel.CONTROL, Channel.BULK)):
            door = socket.create_server(("127.0.0.1", own_port + offset))
            self._sockets.append(door)
            self._thread(self._accept, door, (host, int(port) + offset), channel)

    def close(self) -> None:
        """Cuts every connection."""
        for each in self._sockets:
            with suppress(OSError):  # its peer has gone
                each.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for each in self._sockets:
            each.close()

    def _accept(self, door: socket.socket, target: tuple[str, int], channel: Channel) -> None:
        with suppress(OSError):
            while True:
                here, there = door.accept()[0], socket.create_connection(target)
                self._sockets += [here, there]
                self._thread(self._pump, here, there, self.up, channel)
                self._thread(self._pump, there, here, self.down, channel)

    def _pump(self, source: socket.socket, sink: socket.socket, counted: Counter[Channel], channel: Channel) -> None:
        with suppress(OSError):
            while data := source.recv(CHUNK_BYTES):
                with self._lock:
                    counted[channel] += len(data)
                sink.sendall(data)
        with suppress(OSError):
            sink.shutdown(socket.SHUT_WR)

    def _thread(self, target: Callable[..., None], *args: Any) -> None:
        thread = threading.Thread(target=target, args=args, daemon=True)
        thread.start()
        self._threads.append(thread)


def run_case(parameters: int, islands: int, codec: Codec, args: argparse.Namespace, rounds: int) -> dict[str, Any]:
    """Runs one case and returns its line."""
    payloads = Payloads(model(parameters), args.fragments, codec)
    up_form, down_form = closed_form(payloads.manifest.sizes[0], len(payloads.manifest.fragments[0]), codec)

    async def drive(broker: str) -> tuple[list[Forwarder], int, float]:
        async with AsyncExitStack() as stack:
            ways = [stack.enter_context(closing(Forwarder(broker))) for _ in range(islands)]
            fleet = await stack.enter_async_context(scripted_fleet([way.address for way in ways], payloads))
            await fleet.seeded()
            await fleet.round()
            traffic = [island.endpoints[Channel.BULK].traffic for island in fleet.islands]
            before = sum(each.bytes_up + each.bytes_down for each in traffic)
            for way in ways:
                way.up.clear()
                way.down.clear()
            began_s = time.monotonic()
            for _ in range(rounds):
                await fleet.round()
            took_s = time.monotonic() - began_s
            counted = sum(each.bytes_up + each.bytes_down for each in traffic) - before
            return ways, counted, took_s

    with tempfile.TemporaryDirectory(prefix="atoll-bytes-") as directory:
        hub = Hub(
            Path(directory),
            islands=islands,
            fragments=args.fragments,
            sync_interval=args.fragments * SPACING_STEPS,
            codec=codec,
            round_timeout_s=120.0,
        )
        with hub:
            ways, own_bytes, took_s = asyncio.run(drive(hub.address))
    share = islands * rounds
    up = sum(way.up[Channel.BULK] for way in ways) / share
    down = sum(way.down[Channel.BULK] for way in ways) / share
    control = sum(way.up[Channel.CONTROL] + way.down[Channel.CONTROL] for way in ways)
    return {
        "parameters": payloads.parameters,
        "islands": islands,
        "fragments": args.fragments,
        "rounds": rounds,
        "codecs": f"{codec}/{codec}",
        "up_bytes": up,
        "up_form_bytes": up_form,
        "up_ratio": up / up_form,
        "down_bytes": down,
        "down_form_bytes": down_form,
        "down_ratio": down / down_form,
        "counters_ratio": own_bytes / (share * (up + down)),
        "control_bytes_per_s": control / islands / took_s,
        "agrees": max(abs(up / up_form - 1), abs(down / down_form - 1)) <= TOLERANCE,
    }


def measure(args: argparse.Namespace, printer: Printer) -> int:
    """Runs every case; returns 1 if one of a million parameters or more is off by more than 2 %."""
    parameters, islands, codecs, rounds = args.parameters, args.islands, args.codec or list(Codec), args.rounds
    if args.quick:
        parameters, islands, codecs, rounds = (1_000_000,), (2,), args.codec or [Codec.BF16], 3
    agree = True
    for count, m, codec in product(parameters, islands, codecs):
        printer.say(f"{count:,} parameters, {m} islands, {codec} up")
        row = run_case(count, m, codec, args, rounds)
        agree = agree and (row["agrees"] or count < 1_000_000)
        printer.add(row)
    if not agree:
        printer.say(f"measured and closed form differ by more than {TOLERANCE:.0%}")
    return 0 if agree else 1


def main(argv: list[str] | None = None) -> int:
    parser = output.parser_of("wire_bytes", __doc__, "--parameters 1M,10M --islands 2,8")
    parser.add_argument("--parameters", type=output.numbers, default=(100_000, 1_000_000, 10_000_000))
    parser.add_argument("--islands", type=output.numbers, default=(2, 8))
    parser.add_argument("--fragments", type=int, default=8, help="P: a round moves 1/P of the model (8)")
    parser.add_argument("--rounds", type=int, default=24, help="rounds counted per case, after one to warm up (24)")
    parser.add_argument("--codec", type=Codec, action="append", help="of pseudo-gradients; repeatable (all)")
    return output.guarded(measure, parser.parse_args(argv), COLUMNS)


if __name__ == "__main__":
    sys.exit(main())
