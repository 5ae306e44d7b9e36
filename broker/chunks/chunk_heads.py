"""The first frames of chunks and of the messages that control them: credit, resuming, bonding. Pure.

Other messages begin with a map of msgpack (:mod:`broker.wire.headers`), which never has the byte 0xC1 at its start. So
the first byte tells the two apart.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from broker.base.errors import RemoteProtocolError
from broker.wire.messages import Reason

MARK = 0xC1
_FOUR, _TWO = struct.Struct(">BcQQQQ"), struct.Struct(">BcQQ")


class Chunk(NamedTuple):
    """Announces which part of which message the frames behind it are.

    Attributes:
        transfer: Number of the message among those that this end has sent in chunks over this connection, from 1.
        total: Bytes of all its frames together.
        offset: Bytes of the message in earlier chunks.
        rest: Bytes of the last frame of this chunk that come with the next one; 0: the frame is whole.
    """

    transfer: int
    total: int
    offset: int
    rest: int


class Credit(NamedTuple):
    """Reports bytes of chunks received over this connection, and the total up to which the sender may go."""

    received: int
    limit: int


class Ask(NamedTuple):
    """Asks how much of a message an earlier connection has brought; the frame behind is its header.

    Both numbers are those of the chunks that follow the answer.
    """

    transfer: int
    total: int


class Resume(NamedTuple):
    """Answers :class:`Ask`: the next chunk of the message is to begin at ``offset``."""

    transfer: int
    offset: int


class Bond(NamedTuple):
    """Declares this connection one of several for the chunks of one flow; the broker echoes it.

    Attributes:
        nonce: Identifies the flow; drawn by the client.
        subflow: Number of this connection; 0 is the first one, which represents all of them.
    """

    nonce: int
    subflow: int


Head = Chunk | Credit | Ask | Resume | Bond
_KINDS: dict[bytes, type[Head]] = {b"D": Chunk, b"C": Credit, b"A": Ask, b"R": Resume, b"B": Bond}
_LETTERS = {kind: letter for letter, kind in _KINDS.items()}


def packed(head: Head) -> bytes:
    """Returns a head as a frame."""
    return (_FOUR if isinstance(head, Chunk) else _TWO).pack(MARK, _LETTERS[type(head)], *head)


def read(frame: bytes | memoryview) -> Head | None:
    """Reads a first frame; returns None for the header of a whole message.

    Raises:
        RemoteProtocolError: It is a head, and malformed.
    """
    if len(frame) == 0 or frame[0] != MARK:
        return None
    kind = _KINDS.get(bytes(frame[1:2]))
    form = _FOUR if kind is Chunk else _TWO
    if kind is None or len(frame) != form.size:
        got = f"{len(frame)} bytes that begin with {bytes(frame[:2]).hex()}"
        expected = "a chunk or what is said of one"
        raise RemoteProtocolError(Reason.MALFORMED, field="head of a chunk", got=got, expected=expected)
    return kind(*form.unpack(frame)[2:])
