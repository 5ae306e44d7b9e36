"""The file of a paused island: its unmerged progress on disk. Shell.

One file per island of a run, beside its checkpoint, replaced as a whole. After a checksum it holds one msgpack map; the
contributions in it are the frames that travel (:mod:`broker.wire.frames`), with checksums of their own. It is read
before the island joins, so it is named by what is known then: the id that the island asks for, or the name that it has
on its host. A process that has joined removes it: no second one may bring the same.
"""

from __future__ import annotations

import contextlib
import struct
from dataclasses import fields
from pathlib import Path
from typing import Any

import msgpack
import xxhash

from broker.base.errors import RemoteProtocolError, Unavailable
from broker.wire.frames import decode, encode, verify
from broker.wire.headers import Limits
from broker.wire.messages import AGGREGATOR, Contribution, Envelope
from islands.protocol.fragment import Point
from islands.protocol.paused import Paused
from islands.session.checkpoint import read_if_there, write

_MAGIC = b"ATOLLPP1"
_PREFIX = struct.Struct("<8sQ")  # magic, checksum of the rest


def path_of(directory: Path, run_id: str, name: str) -> Path:
    """Returns where an island keeps its unmerged progress.

    Args:
        directory: Of its checkpoints; several islands, also of several runs, may share one.
        run_id: Of the run.
        name: The island id asked for, or else the name that it has on its host.
    """
    return directory / f"{run_id}.{name.replace('/', '.')}.unmerged"


def save(path: Path, paused: Paused) -> int:
    """Writes unmerged progress and makes it durable; returns its bytes.

    Raises:
        Unavailable: The file cannot be written.
    """
    packed = msgpack.packb(_rows(paused))
    return write(path, [_PREFIX.pack(_MAGIC, xxhash.xxh3_64_intdigest(packed)), packed])


def load(path: Path, limits: Limits) -> Paused | None:
    """Reads what an earlier process has kept; None if it kept nothing.

    Raises:
        Unavailable: It cannot be read, or is damaged; the message says how.
    """
    content = read_if_there(path)
    if content is None:
        return None
    try:
        magic, checksum = _PREFIX.unpack_from(content)
        packed = memoryview(content)[_PREFIX.size :]
        if magic != _MAGIC or xxhash.xxh3_64_intdigest(packed) != checksum:
            raise ValueError("it is cut off, changed, or of another kind")
        return _paused(msgpack.unpackb(packed), limits)
    except (ValueError, KeyError, TypeError, struct.error, msgpack.UnpackException, RemoteProtocolError) as err:
        raise Unavailable(f"{path} is damaged ({err}): the progress in it is lost", definite=True) from err


def remove(path: Path) -> None:
    """Removes the file if possible; one that stays is useless, since its nonce is not the last one."""
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)


def _rows(paused: Paused) -> dict[str, Any]:
    about: dict[str, Any] = {"run_id": paused.run_id, "sender": paused.island_id, "incarnation": paused.incarnation}
    envelopes = (Envelope(**about, sequence=0, to=AGGREGATOR, message=each) for each in paused.contributions)
    return {field.name: getattr(paused, field.name) for field in fields(paused)} | {
        "at": [paused.at.step, paused.at.tokens],
        "cursors": [[block, 0, batch] for block, batch in paused.cursors.items()],
        "contributions": [[bytes(frame) for frame in encode(each)] for each in envelopes],
    }


def _paused(rows: dict[str, Any], limits: Limits) -> Paused:
    read = {
        "at": Point(*rows["at"]),
        "overwritten_tokens": tuple(rows["overwritten_tokens"]),
        "cursors": {block: batch for block, _, batch in rows["cursors"]},
        "contributions": tuple(_contribution(frames, limits) for frames in rows["contributions"]),
    }
    return Paused(**rows | read)


def _contribution(frames: list[bytes], limits: Limits) -> Contribution:
    envelope = decode(frames, limits)
    verify(envelope)
    if not isinstance(envelope.message, Contribution):
        raise ValueError("it holds another message where a contribution belongs")
    return envelope.message
