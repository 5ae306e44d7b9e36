"""Strangers at a broker's two ports: what they say, and their visits."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import ssl
import struct
import time
from collections import Counter
from collections.abc import Callable

from benchmarks.hostile.messages import Frames, broken, valid_messages
from broker.base.errors import Unavailable

#: How long a stranger waits for an answer, and to be hung up when it has said everything.
ANSWER_S, STAY_S = 0.5, 0.1
#: Heard before it says its second words, and its third: a greeting of ZMTP 3, and a bit of READY.
ANSWER_BYTES = 64, 65
#: How long a stranger stays that holds its connection open.
HOLD_S = 3.0

Words = tuple[bytes, ...]
#: Returns what strangers of one kind say.
Kind = Callable[[random.Random], Words]

GET = b"GET / HTTP/1.1\r\nHost: hub:7001\r\nConnection: keep-alive\r\nUser-Agent: Mozilla/5.0\r\n"
RDP = bytes.fromhex("0300002b26e00000000000436f6f6b69653a206d737473686173683d68656c6c6f0d0a0100080003000000")
SSL_2 = bytes.fromhex("802e010002001500000010010080020080030080040080050080") + bytes(21)
SIGNATURE = b"\xff" + bytes(8) + b"\x7f"


def hello(most: ssl.TLSVersion) -> bytes:
    """Returns the first bytes of a TLS client."""
    context = ssl.create_default_context()
    context.maximum_version = most
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        context.wrap_bio(incoming, outgoing, server_hostname="hub").do_handshake()
    return outgoing.read()


def greeting(mechanism: bytes = b"NULL") -> bytes:
    """Returns the greeting of ZMTP 3.0."""
    return SIGNATURE + b"\x03\x00" + mechanism.ljust(20, b"\0") + bytes(32)


def ready(**properties: bytes) -> bytes:
    """Returns the command that ends a handshake without keys, with properties: ``Socket_Type=b"DEALER"``."""
    body = b"\x05READY"
    for name, value in properties.items():
        body += bytes((len(name),)) + name.replace("_", "-").encode() + len(value).to_bytes(4, "big") + value
    return b"\x04" + bytes((len(body),)) + body


def message(frames: Frames) -> bytes:
    """Returns a message of ZMTP 3.0."""
    sent = b""
    for i, frame in enumerate(frames, 1):
        sent += bytes((2 + (i < len(frames)),)) + len(frame).to_bytes(8, "big") + frame
    return sent


DEALER = greeting(), ready(Socket_Type=b"DEALER", Identity=b"")
_VALID = valid_messages(random.Random(0))


def _damaged(rng: random.Random) -> Words:
    """Returns the words of a peer whose every byte may be damaged, such as by a bad line."""
    said = [bytearray(words) for words in (*DEALER, message(rng.choice(_VALID)))]
    for words in said:
        for _ in range(rng.choice((0, 0, 1, 3))):
            words[rng.randrange(len(words))] = rng.randrange(256)
    return tuple(map(bytes, said))


#: Those that leave without having said anything wrong: counted as silent connections where there are no keys.
SILENT: dict[str, Kind] = {
    "port scan": lambda rng: (),
    "ZMTP 3, nothing to say": lambda rng: DEALER,
}
#: Those that are refused, with keys and without.
REFUSED: dict[str, Kind] = {
    "SSL 2.0": lambda rng: (SSL_2,),
    "TLS 1.2": lambda rng: (hello(ssl.TLSVersion.TLSv1_2),),
    "TLS 1.3": lambda rng: (hello(ssl.TLSVersion.TLSv1_3),),
    "HTTP GET": lambda rng: (GET + b"\r\n",),
    "HTTP GET, kept alive": lambda rng: (GET + b"\r\n",) * 3,
    "HTTP GET, long": lambda rng: (GET + b"Cookie: " + bytes(rng.choices(range(33, 127), k=20_000)) + b"\r\n\r\n",),
    "RDP": lambda rng: (RDP,),
    "SSH": lambda rng: (b"SSH-2.0-OpenSSH_9.6\r\n",),
    "Redis": lambda rng: (b"*1\r\n$4\r\nPING\r\n",),
    "zeros": lambda rng: (bytes(4096),),
    "ZMTP 1.0": lambda rng: (b"\x01\x00",),
    "ZMTP 1.0, a message": lambda rng: (b"\x01\x00\x02\x00A",),
    "ZMTP 1.0, an id and a message": lambda rng: (b"\x02\x00X\x02\x01A\x02\x00B",),
    "ZMTP 2.0": lambda rng: (SIGNATURE + b"\x01\x05\x00\x00",),
    "ZMTP 2.0, a message": lambda rng: (SIGNATURE + b"\x01\x05\x00\x00\x00\x01A",),
    "ZMTP 2.0, an id and a message": lambda rng: (SIGNATURE + b"\x01\x05\x00\x01Y\x00\x01A",),
    "ZMTP 3, half a greeting": lambda rng: (greeting()[: rng.randrange(1, 64)],),
    "ZMTP 3, another mechanism": lambda rng: (greeting(b"PLAIN"), b"\x04\x0c\x05HELLO\x01a\x01b"),
    "ZMTP 3, no READY": lambda rng: (greeting(), b"\x04\x06\x05HELLO"),
    "ZMTP 3, a PUB": lambda rng: (greeting(), ready(Socket_Type=b"PUB")),
    "ZMTP 3, its own routing id": lambda rng: (
        *(greeting(), ready(Socket_Type=b"DEALER", Identity=b"me" + rng.randbytes(4))),
        message(_VALID[0]),
    ),
    "ZMTP 3, an id like a drawn one": lambda rng: (
        *(greeting(), ready(Socket_Type=b"DEALER", Identity=b"\0" + rng.randbytes(4))),
        message([b"A"]),
    ),
}
#: Those of whom some are refused, some leave, and some get through.
MIXED: dict[str, Kind] = {
    "noise": lambda rng: (rng.randbytes(rng.randrange(1, 4096)),),
    "ZMTP 3, an unknown command": lambda rng: (*DEALER, b"\x04\x05\x04WHAT"),
    "ZMTP 3, a short ping": lambda rng: (*DEALER, b"\x04\x05\x04PING"),
    "ZMTP 3, a frame of a terabyte": lambda rng: (*DEALER, b"\x02" + (1 << 40).to_bytes(8, "big")),
    "ZMTP 3, damaged": _damaged,
    "ZMTP 3, a broken message": lambda rng: (*DEALER, message(broken(_VALID, rng))),
}
KINDS = SILENT | REFUSED | MIXED


async def visit(host: str, port: int, words: Words, *, stay_s: float = STAY_S, reset: bool = False) -> bool:
    """Connects, says all words, each after an answer to the one before, and stays; returns whether it was hung up.

    Raises:
        OSError: Nobody listens there.
    """
    reader, writer = await asyncio.open_connection(host, port)
    heard_bytes = 0

    async def hung_up(within_s: float, enough_bytes: int | None = None) -> bool:
        """Listens until that is over, or until enough has been heard."""
        nonlocal heard_bytes
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while enough_bytes is None or heard_bytes < enough_bytes:
                    data = await reader.read(1 << 16)
                    if not data:
                        return True
                    heard_bytes += len(data)
        return False

    try:
        for said, enough_bytes in zip(words, (0, *ANSWER_BYTES), strict=False):
            if await hung_up(ANSWER_S, enough_bytes):
                return True
            writer.write(said)
        return await hung_up(stay_s)
    except ConnectionError:
        return True
    finally:
        if reset:  # it leaves with a reset instead of an end
            sock: socket.socket = writer.get_extra_info("socket")
            with contextlib.suppress(OSError):  # it has been hung up
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def besiege(
    host: str, port: int, *, seconds: float, at_once: int, seed: int
) -> tuple[Counter[str], Counter[str]]:
    """Visits both ports with strangers of every kind: ``at_once`` at a time, and as many that hold on.

    Returns:
        Kind -> visits, and kind -> how many of them were hung up.

    Raises:
        Unavailable: In a group: nobody listens there, or no longer.
    """
    made: Counter[str] = Counter()
    hung_up: Counter[str] = Counter()
    ends_s = time.monotonic() + seconds

    async def come(number: int, *, hold: bool) -> None:
        rng = random.Random(f"{seed} {number}")
        while time.monotonic() < ends_s:
            for name in rng.sample(sorted(KINDS), len(KINDS)):
                words = KINDS[name](rng)
                stay_s, reset = (HOLD_S if hold else STAY_S), rng.random() < 0.2
                try:
                    hung_up[name] += await visit(host, port + rng.randrange(2), words, stay_s=stay_s, reset=reset)
                except OSError as err:
                    raise Unavailable(f"no broker at {host}:{port} any more, or ever: {err}", definite=True) from err
                made[name] += 1
                if time.monotonic() >= ends_s:
                    return

    async with asyncio.TaskGroup() as group:
        for number in range(2 * at_once):
            group.create_task(come(number, hold=number >= at_once))
    return made, hung_up
