"""The event tape: every input and decision of an aggregator, as JSON lines for replay.

Four kinds of lines, each one JSON object::

    {"tape": 11, "now_s": .., "epoch": .., "config": {..}, "record": {..}, "commits": [..]}     a life begins
    {"now_s": .., "event": "received", ..}                                      what went into the core
    {"now_s": .., "note": "round.opened", "fields": {..}}                       what it decided, and why
    {"gap": 12}                                                                 number of lines lost to the disk

and, where a tape is kept in segments (:mod:`aggregator.store.segments`), a first one in each but the oldest::

    {"segment": 3, "lines": 81234, ..}                                          number of lines before this file

``now_s`` is the monotonic clock of that life. A core made from a first line (:func:`read_start`) and fed with the
events (:func:`read_event`) takes the same decisions again. Payloads are not on the tape: of each buffer it has codec,
shape and checksum, and :mod:`aggregator.store.recording` keeps the bytes where somebody wants them.

Training never waits for the tape. A disk that fails costs lines, which are counted, and nothing else.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import Any, get_args

from aggregator.interface.config import AggregatorConfig
from aggregator.interface.events import Commit, Event, Flaw, Note, Received
from aggregator.state.founding import Founding, foundings_of
from aggregator.state.records import commit_from_map, commit_to_map
from aggregator.store.rotation import Aside, Rotation, on_the_spot
from aggregator.store.segments import TapeReader, is_tape
from broker.base.errors import ConfigError, cure_of
from broker.base.settings import to_table
from broker.base.sources import from_sources
from broker.process import logs
from broker.routing.resending import Carried
from broker.wire.messages import KINDS, Codec, Encoded, Envelope, Reason, kind_of
from broker.wire.schema import Record

log = logs.get(__name__)

#: Of the lines, and of the rules: where decisions change, a sound tape made by the earlier ones would look forged.
FORMAT = 15
#: Lines that may wait for a disk that hangs; a line has a few hundred bytes.
MAX_WAITING = 100_000

_MESSAGES = {kind: Record(cls) for kind, cls in KINDS.items()}
#: By the names that they have on the tape; what was received has a line of its own kind.
_PLAIN_EVENTS: dict[str, type[Event]] = {
    re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower(): cls for cls in get_args(Event) if cls is not Received
}
_EVENT_NAMES = {cls: name for name, cls in _PLAIN_EVENTS.items()}


# --- lines ------------------------------------------------------------------------------------------------------


def start_line(
    config: AggregatorConfig,
    now_s: float,
    record: Mapping[str, Any] | None,
    commits: Mapping[int, Commit],
    *,
    epoch: int = 1,
    founding: Founding | None = None,
) -> dict[str, Any]:
    """Returns the first line of a life: all that its core is made from."""
    given = to_table(config)
    given.pop("redis_url", None)  # no decision depends on it, and it may hold a password
    return {
        "tape": FORMAT,
        "now_s": now_s,
        "epoch": epoch,
        "config": {name: str(value) if isinstance(value, Path) else value for name, value in given.items()},
        "record": record,
        "founding": None if founding is None else founding.row(),
        "commits": [commit_to_map(commit) for _, commit in sorted(commits.items())],
    }


def event_line(event: Event, now_s: float) -> dict[str, Any]:
    """Returns an event of the core as a line, without the bytes of payloads."""
    if not isinstance(event, Received):
        return {"now_s": now_s, "event": _EVENT_NAMES[type(event)], **dataclasses.asdict(event)}
    envelope = event.envelope
    kind = kind_of(envelope.message)
    payload: tuple[Encoded, ...] = getattr(envelope.message, "payload", ())
    return {
        "now_s": now_s,
        "event": "received",
        "sender": envelope.sender,
        "incarnation": envelope.incarnation,
        "sequence": envelope.sequence,
        "to": envelope.to,
        "run": envelope.run_id,
        "kind": kind,
        "body": _MESSAGES[kind].write(envelope.message),
        "buffers": [[each.codec, list(each.shape), each.checksum] for each in payload],
        "payload_bytes": event.payload_bytes,
        "broker": event.broker,
        "flaw": None if event.flaw is None else [event.flaw.reason, event.flaw.detail],
        "norm": event.norm,
        "carried": None if event.carried is None else list(event.carried[:3]),  # nothing is decided by the link
    }


def note_line(note: Note, now_s: float) -> dict[str, Any]:
    """Returns a decision as a line."""
    return {"now_s": now_s, "note": note.name, "fields": note.fields}


# --- reading ----------------------------------------------------------------------------------------------------


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the lines of a tape in all its segments; a line that a crash cut short is passed over."""
    return (line for _, line in numbered_lines(path) if line is not None)


def numbered_lines(path: Path) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """Yields a tape's lines with their numbers, None for unreadable ones; empty ones only count.

    Numbers go on from one segment to the next, from 1. Where older segments are gone, the first line has the number
    that it always had, and is told by ``missing``: how many segments are gone before it. One line at a time is in
    memory, and a chunk of the file.

    Raises:
        OSError: There is no such tape, or a file of it cannot be read.
    """
    if not is_tape(path):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    reader, number, missed = TapeReader(path), 0, 0
    try:
        while found := reader.read():
            for number, text in found:
                line = _parsed(text) if text else None
                if line is not None and "segment" in line and missed < reader.missed:
                    line["missing"], missed = reader.missed - missed, reader.missed
                if text:
                    yield number, line
        if reader.rest:
            yield number + 1, _parsed(reader.rest)
    finally:
        reader.close()


def _parsed(text: bytes) -> dict[str, Any] | None:
    try:
        line = json.loads(text.decode(errors="replace"))
    except ValueError:
        return None
    return line if isinstance(line, dict) else None


def read_start(line: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments of :class:`aggregator.rounds.core.Aggregator` that a first line describes.

    Raises:
        ConfigError: The tape has another format, or settings that this program does not know.
    """
    if line["tape"] != FORMAT:
        raise ConfigError(
            "tape", line["tape"], f"this program reads format {FORMAT}: use the release that wrote the tape"
        )
    commits = {row["fragment_id"]: commit_from_map(row) for row in line["commits"]}
    given = {"trust": False, **line["config"]}  # of a release that knew none of it
    config = from_sources(AggregatorConfig, given, where="config of the tape")
    epoch = line["epoch"]
    founding = foundings_of({"foundings": [line["founding"]]})[0] if line.get("founding") else None
    return {
        "config": config,
        "now_s": line["now_s"],
        "record": line["record"],
        "commits": commits,
        "epoch": epoch,
        "founding": founding,
    }


def read_event(line: Mapping[str, Any]) -> Event:
    """Returns the event of a line that has one; buffers come without their bytes."""
    fields = dict(line)
    del fields["now_s"]
    name = fields.pop("event")
    if name != "received":
        return _PLAIN_EVENTS[name](**fields)
    given: dict[str, Any] = {}
    record = _MESSAGES[line["kind"]]
    if record.has_payload:
        given["payload"] = tuple(
            Encoded(codec=Codec(codec), shape=tuple(shape), checksum=checksum, data=b"")
            for codec, shape, checksum in line["buffers"]
        )
    return Received(
        envelope=Envelope(
            run_id=line["run"],
            sender=line["sender"],
            incarnation=line["incarnation"],
            sequence=line["sequence"],
            to=line["to"],
            message=record.read(line["body"], **given),
        ),
        flaw=None if line["flaw"] is None else Flaw(reason=Reason(line["flaw"][0]), detail=line["flaw"][1]),
        payload_bytes=line["payload_bytes"],
        broker=line["broker"],
        norm=line["norm"],
        carried=None if line["carried"] is None else Carried(*line["carried"]),
    )


# --- writing ----------------------------------------------------------------------------------------------------


class Tape:
    """A file that lines are appended to, in batches.

    :meth:`write` only remembers a line. :meth:`flush` blocks on the disk and may run in another thread. One that was
    given up, with the life that asked for it, goes on there, and the next waits for it.
    """

    def __init__(self, path: Path, segment_bytes: int = 0, keep: int = 0, aside: Aside = on_the_spot) -> None:
        """Opens the file, after what an earlier life has written.

        Args:
            path: The file.
            segment_bytes: Length at which it is closed as a segment, and another begun; 0: never.
            keep: Closed segments to keep; 0: all.
            aside: Where they are compressed and dropped.

        Raises:
            ConfigError: It cannot be opened, which is better said at once than found out after the run.
        """
        self.dropped = 0  #: lines lost
        self._path = path
        self._waiting: list[str | int] = []  # lines, and in place of those that are lost how many
        self._room = Lock()  # for what waits; held for moments
        self._disk = Lock()  # for the file; held for as long as the disk takes
        self._failing = False
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._rotation = Rotation(path, segment_bytes, keep, aside=aside)
            self._fd = self._rotation.open()
            size = os.fstat(self._fd).st_size
            self._torn = size > 0 and os.pread(self._fd, 1, size - 1) != b"\n"
        except OSError as err:
            raise ConfigError("tape", str(path), f"cannot be written ({err.strerror}); {cure_of(err)}") from err

    def write(self, line: Mapping[str, Any]) -> None:
        """Remembers a line for the next flush; drops it if too many wait already."""
        text = json.dumps(line, separators=(",", ":"), default=str)
        with self._room:
            if len(self._waiting) < MAX_WAITING:
                self._waiting.append(text)
                return
            self.dropped += 1
            last = self._waiting[-1]
            if isinstance(last, int):
                self._waiting[-1] = last + 1
            else:
                self._waiting.append(1)

    def flush(self) -> None:
        """Writes what waits. A failure is logged when it begins and when it ends; what it costs is counted."""
        with self._disk:
            with self._room:
                waiting, self._waiting = self._waiting, []
            if waiting:
                self._flush(waiting)

    def _flush(self, waiting: list[str | int]) -> None:
        lines = [each if isinstance(each, str) else json.dumps({"gap": each}) for each in waiting]
        text = ("\n" if self._torn else "") + "\n".join(lines) + "\n"
        try:
            self._append(memoryview(text.encode()))
        except OSError as err:
            with self._room:
                self.dropped += sum(isinstance(each, str) for each in waiting)
                lost = sum(1 if isinstance(each, str) else each for each in waiting)
                behind = self._waiting[0] if self._waiting else ""
                if isinstance(behind, int):
                    self._waiting[0] = lost + behind
                else:
                    self._waiting.insert(0, lost)
            if not self._failing:
                cure = "training goes on; free space there, or lines stay missing"
                log.warning("tape.failing", path=str(self._path), detail=err.strerror, cure=cure)
            self._failing = True
            return
        if self._failing:
            log.info("tape.back", path=str(self._path), dropped=self.dropped)
        self._failing = False
        self._fd = self._rotation.turn(self._fd)

    def close(self) -> None:
        """Writes what waits and closes the file."""
        self.flush()
        os.close(self._fd)
        self._rotation.close()

    def _append(self, data: memoryview) -> None:
        """Writes all data, or takes it back and raises OSError, so that gaps are where they say."""
        size = os.fstat(self._fd).st_size
        try:
            while data:
                data = data[os.write(self._fd, data) :]
        except OSError:
            self._torn = True  # an empty line more does no harm
            with suppress(OSError):
                os.ftruncate(self._fd, size)
            raise
        self._torn = False
