"""Weights & Biases: one of its runs for each run or island, resumed by its id.

What it has, its server says, by the summary of the run. Offline there is no server: there the files say it that
earlier processes have left, which may lack the last seconds of one that was killed.
"""

from __future__ import annotations

import json
import os
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import wandb
from wandb.proto.wandb_internal_pb2 import Record

from ops.sinks.sink import Identity
from ops.story.rows import Row, marker

#: Of ids, by the limits of its server.
_NOT_IN_IDS, _MAX_ID = re.compile(r"[^A-Za-z0-9_.-]"), 120


class WandbSink:
    """A run of a project, which :class:`ops.sinks.sink.Sink` describes."""

    def __init__(self, project: str, identity: Identity) -> None:
        """Resumes the run, or begins it; where nobody is logged in, this fails instead of asking."""
        entity, _, project = project.rpartition("/")
        folder = os.environ.get("WANDB_DIR") or os.fspath(identity.folder)
        run_id = _NOT_IN_IDS.sub("-", identity.key)[:_MAX_ID]
        before = last_steps(folder, run_id)
        quiet = wandb.Settings(console="off", silent=True, disable_git=True, save_code=False, x_disable_stats=True)
        self._run = wandb.init(
            entity=entity or None,
            project=project,
            id=run_id,
            name=identity.name,
            group=identity.group,
            dir=folder,
            resume="allow",
            settings=quiet,
        )
        self._offline = self._run.offline
        self._before = before.tokens
        # Numbers of rows go on, so that the files of one run can be uploaded one after the other.
        self._number = before.number + 1 if self._offline else self._run.step

    def written(self, stream: str) -> int:
        """Returns the last step that the server has, or the files."""
        # Its own axis, so that curves are over tokens and not over numbers of rows.
        self._run.define_metric(marker(stream))
        self._run.define_metric(f"{stream}/*", step_metric=marker(stream))
        if stream == "fleet":
            self._run.define_metric("islands/*", step_metric=marker(stream))
        found = self._before.get(stream) if self._offline else self._run.summary.get(marker(stream))
        return -1 if found is None else int(found)

    def write(self, row: Row) -> None:
        """Logs all points of the row at once."""
        self._run.log({**row.values, "_timestamp": row.at}, step=self._number, commit=True)
        self._number += 1

    def flush(self) -> None:
        """Does nothing: its own process uploads, or writes, every few seconds."""

    def close(self) -> None:
        """Uploads the waiting rows, and finishes."""
        self._run.finish()


# --- the files of offline mode --------------------------------------------------------------------------------------

# A .wandb file is a header of seven bytes, then records in the log format of LevelDB: blocks of 32 KiB, and in them
# pieces with a header of checksum (4 bytes), length (2) and type (1: whole, 2: first, 3: middle, 4: last).
# https://github.com/google/leveldb/blob/main/doc/log_format.md
_HEADER_BYTES, _BLOCK_BYTES = 7, 32768
_PIECE = struct.Struct("<IHB")
_WHOLE, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4


@dataclass(slots=True)
class Found:
    """The last row number in the files, and each stream's last step in tokens."""

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
