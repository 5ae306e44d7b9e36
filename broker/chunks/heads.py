"""The first frame of a chunk, of a credit, and of what is said of connections. Pure.

Other messages begin with a map of msgpack (:mod:`broker.wire.headers`), which never has the byte 0xC1 at its start. So
one look at the first byte tells what came.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from broker.wire.errors import RemoteProtocolError
from broker.wire.messages import Reason

MARK = 0xC1
_CHUNK = struct.Struct(">BcQQQQ")
_CREDIT = struct.Struct(">BcQQ")
_ASK = struct.Struct(">BcQQ")
_RESUME = struct.Struct(">BcQQ")
_BOND = struct.Struct(">BcQQ")


class Chunk(NamedTuple):
    """Says which part of which message the frames behind it are.

    Attributes:
        transfer: Number of the message among those that this end has sent in chunks over this connection, from 1.
        total: Bytes of all its frames together.
        offset: Of them, those in chunks before.
        rest: Bytes of the last frame of this chunk that come with the next one; 0: it is whole.
    """

    transfer: int
    total: int
    offset: int
    rest: int

    def packed(self) -> bytes:
        """Returns the frame."""
        return _CHUNK.pack(MARK, b"D", *self)


class Credit(NamedTuple):
    """Says what has come in chunks over this connection, and how far the other end may go on.

    Attributes:
        received: Bytes.
        limit: Of the same count; more is to be sent only when a later credit allows it.
    """

    received: int
    limit: int

    def packed(self) -> bytes:
        """Returns the frame."""
        return _CREDIT.pack(MARK, b"C", *self)


class Ask(NamedTuple):
    """Asks how much of a message is here of an earlier connection; its header is the frame behind.

    Attributes:
        transfer: As of its chunks, which follow the answer.
        total: Likewise.
    """

    transfer: int
    total: int

    def packed(self) -> bytes:
        """Returns the frame."""
        return _ASK.pack(MARK, b"A", *self)


class Resume(NamedTuple):
    """Answers :class:`Ask`: the next chunk of the message is to begin at ``offset``."""

    transfer: int
    offset: int

    def packed(self) -> bytes:
        """Returns the frame."""
        return _RESUME.pack(MARK, b"R", *self)


class Bond(NamedTuple):
    """Says that this connection is one of several for the chunks of one flow; the broker echoes it.

    Attributes:
        nonce: Of the flow, drawn by the client.
        subflow: Number of this connection; 0 is the one that came first, which stands for all of them.
    """

    nonce: int
    subflow: int

    def packed(self) -> bytes:
        """Returns the frame."""
        return _BOND.pack(MARK, b"B", *self)


Head = Chunk | Credit | Ask | Resume | Bond


def is_head(frame: bytes | memoryview) -> bool:
    """Whether a message with this first frame is one of these, and no message of its own."""
    return len(frame) > 0 and frame[0] == MARK


def read(frame: bytes | memoryview) -> Head:
    """Returns what a first frame says, of which :func:`is_head` is true.

    Raises:
        RemoteProtocolError: ``malformed``: it is none of them.
    """
    match bytes(frame[1:2]), len(frame):
        case b"D", _CHUNK.size:
            return Chunk(*_CHUNK.unpack(frame)[2:])
        case b"C", _CREDIT.size:
            return Credit(*_CREDIT.unpack(frame)[2:])
        case b"A", _ASK.size:
            return Ask(*_ASK.unpack(frame)[2:])
        case b"R", _RESUME.size:
            return Resume(*_RESUME.unpack(frame)[2:])
        case b"B", _BOND.size:
            return Bond(*_BOND.unpack(frame)[2:])
    got = f"{len(frame)} bytes that begin with {bytes(frame[:2]).hex()}"
    raise RemoteProtocolError(
        Reason.MALFORMED,
        field="head of a chunk",
        got=got,
        expected="a chunk or what is said of one",
    )
