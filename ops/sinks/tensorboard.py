"""TensorBoard: a folder of event files for each run or island.

A row is one event, which a reader sees whole or not at all. Each process writes a file of its own, so that an end that
was cut off hurts nothing behind it.
"""

from __future__ import annotations

from pathlib import Path

from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from ops.sinks.sink import Identity
from ops.story.rows import Row

FILES = "events.out.tfevents.*"
#: Rows wait so long at most before they are in the file; a follower flushes earlier.
FLUSH_EVERY_S = 10


class TensorBoardSink:
    """A folder ``DIR/KEY``, which :class:`ops.sinks.sink.Sink` describes."""

    def __init__(self, directory: Path, identity: Identity) -> None:
        """Reads the files that are there, and begins a new one."""
        folder = directory / identity.key
        folder.mkdir(parents=True, exist_ok=True)
        self._written = last_steps(folder)
        self._writer = EventFileWriter(str(folder), max_queue_size=100, flush_secs=FLUSH_EVERY_S)

    def written(self, stream: str) -> int:
        """Returns the last step in the files."""
        return self._written.get(stream, -1)

    def write(self, row: Row) -> None:
        """Adds an event with all points of the row."""
        values = [Summary.Value(tag=name, simple_value=value) for name, value in row.values.items()]
        self._writer.add_event(Event(wall_time=row.at, step=row.step, summary=Summary(value=values)))

    def flush(self) -> None:
        """Writes the waiting rows into the file."""
        self._writer.flush()

    def close(self) -> None:
        """Closes the file."""
        self._writer.close()


def last_steps(folder: Path) -> dict[str, int]:
    """Returns the last step of each stream in the event files of a folder."""
    last: dict[str, int] = {}
    for path in sorted(folder.glob(FILES)):
        for event in LegacyEventFileLoader(str(path)).Load():
            for value in event.summary.value:
                stream, slash, name = value.tag.rpartition("/")
                if name == "tokens" and slash:
                    last[stream] = max(event.step, last.get(stream, -1))
    return last
