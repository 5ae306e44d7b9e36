"""The files of Weights & Biases' offline mode: which steps are in them.

A ``.wandb`` file is a header of seven bytes, then records in the log format of LevelDB: blocks of 32 KiB, and in them
pieces with a header of checksum (4 bytes), length (2) and type (1: whole, 2: first, 3: middle, 4: last).
https://github.com/google/leveldb/blob/main/doc/log_format.md
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from wandb.proto.wandb_internal_pb2 import Record

_HEADER_BYTES, _BLOCK_BYTES = 7, 32768
_PIECE = struct.Struct("<IHB")
_WHOLE, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4


@dataclass(slots=True)
class Found:
    """The end of what is in the files: the last number of a row, and each stream's last step in tokens."""

    number: int = -1
    tokens: dict[str, int] = field(default_factory=dict)


def last_steps(folder: str | Path, run_id: str) -> Found:
    """Returns where the files of a run in a folder end."""
    found = Found()
    for path in sorted(Path(folder).glob(f"wandb/*-run-*-{run_id}/run-{run_id}.wandb")):
        for points in rows_in(path):
            found.number = max(found.number, int(points.get("_step", -1)))
            for name, value in points.items():
                stream, slash, last = name.rpartition("/")
                if last == "tokens" and slash and "/" not in stream:
                    found.tokens[stream] = max(found.tokens.get(stream, -1), int(value))
    return found


def rows_in(path: Path) -> Iterator[dict[str, float]]:
    """Yields the points of each row in a file; an end that was cut off is left out."""
    for record in _records(path.read_bytes()):
        parsed = Record.FromString(record)
        if parsed.WhichOneof("record_type") == "history":
            items = (
                (each.key or "/".join(each.nested_key), json.loads(each.value_json)) for each in parsed.history.item
            )
            yield {name: value for name, value in items if isinstance(value, int | float)}


def _records(data: bytes) -> Iterator[bytes]:
    at, begun = _HEADER_BYTES, b""
    while at + _PIECE.size <= len(data):
        left = _BLOCK_BYTES - at % _BLOCK_BYTES
        if left < _PIECE.size:  # too little of the block for another piece
            at += left
            continue
        _, length, sort = _PIECE.unpack_from(data, at)
        at += _PIECE.size
        piece = data[at : at + length]
        if sort not in (_WHOLE, _FIRST, _MIDDLE, _LAST) or len(piece) < length:
            return
        at += length
        begun = piece if sort in (_WHOLE, _FIRST) else begun + piece
        if sort in (_WHOLE, _LAST):
            yield begun
