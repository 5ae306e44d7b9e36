"""The first frame of a chunk, of a credit, and of what is said of connections. Pure.

Other messages begin with a map of msgpack (:mod:`broker.wire.headers`), which never has the byte 0xC1 at its start. So
one look at the first byte tells what came.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from broker.base.errors import RemoteProtocolError
from broker.wire.messages import Reason

MARK = 0xC1
_FOUR, _TWO = struct.Struct(">BcQQQQ"), struct.Struct(">BcQQ")


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


class Credit(NamedTuple):
    """Says how many bytes of chunks have come over this connection, and how many may, without a later one."""

    received: int
    limit: int


class Ask(NamedTuple):
    """Asks how much of a message is here of an earlier connection; its header is the frame behind.

    Both numbers are those of its chunks, which follow the answer.
    """

    transfer: int
    total: int


class Resume(NamedTuple):
    """Answers :class:`Ask`: the next chunk of the message is to begin at ``offset``."""

    transfer: int
    offset: int


class Bond(NamedTuple):
    """Says that this connection is one of several for the chunks of one flow; the broker echoes it.

    Attributes:
        nonce: Of the flow, drawn by the client.
        subflow: Number of this connection; 0 is the one that came first, which stands for all of them.
    """

    nonce: int
    subflow: int


Head = Chunk | Credit | Ask | Resume | Bond
_KINDS: dict[bytes, type[Head]] = {b"D": Chunk, b"C": Credit, b"A": Ask, b"R": Resume, b"B": Bond}
_LETTERS = {kind: letter for letter, kind in _KINDS.items()}


def packed(head: Head) -> bytes:
    """Returns the first frame that says this."""
    return (_FOUR if isinstance(head, Chunk) else _TWO).pack(MARK, _LETTERS[type(head)], *head)


def is_head(frame: bytes | memoryview) -> bool:
    """Whether a message with this first frame is one of these, and no message of its own."""
    return len(frame) > 0 and frame[0] == MARK


def read(frame: bytes | memoryview) -> Head:
    """Returns what a first frame says, of which :func:`is_head` is true; raises RemoteProtocolError."""
    kind = _KINDS.get(bytes(frame[1:2]))
    form = _FOUR if kind is Chunk else _TWO
    if kind is None or len(frame) != form.size:
        got = f"{len(frame)} bytes that begin with {bytes(frame[:2]).hex()}"
        expected = "a chunk or what is said of one"
        raise RemoteProtocolError(Reason.MALFORMED, field="head of a chunk", got=got, expected=expected)
    return kind(*form.unpack(frame)[2:])
