"""Logs: one line per event worth reading, as text for people or as JSON for machines.

``log.info("round.committed", round=31, fragment=2)`` becomes::

    12:03:04.512 aggregator round.committed round=31 fragment=2                                       on a terminal
    {"time": "2026-01-31T12:03:04.512+00:00", "process": "aggregator", "level": "info", ...}          elsewhere

Events are names with dots, from the general to the particular; what varies stands in fields. Standard ``logging``
does the work below, so other libraries' records come out in the same form, and a program that has set up ``logging`` by
itself reads ``round.committed round=31 fragment=2`` as the message.
"""

from __future__ import annotations

import datetime
import json
import logging
import math
import os
import sys
from collections.abc import Mapping
from typing import Any, TextIO

_EVENT = "atoll_event"  # the attribute of a LogRecord that carries what happened
_FIELDS = "atoll_fields"  # and the one that carries the fields
_MARKS = {logging.WARNING: "warning ", logging.ERROR: "error ", logging.CRITICAL: "error "}


class _Message:
    """An event with its fields as one line, made when somebody reads it."""

    __slots__ = ("_event", "_fields")

    def __init__(self, event: str, fields: Mapping[str, Any]) -> None:
        self._event = event
        self._fields = fields

    def __str__(self) -> str:
        return _line(self._event, self._fields)


class Log:
    """Writes events with fields to one named logger."""

    __slots__ = ("_logger",)

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger

    def debug(self, event: str, /, **fields: Any) -> None:
        """Details for someone who looks for a fault; off by default."""
        self._write(logging.DEBUG, event, fields)

    def info(self, event: str, /, **fields: Any) -> None:
        """Something that was meant to happen."""
        self._write(logging.INFO, event, fields)

    def warning(self, event: str, /, **fields: Any) -> None:
        """Something that was not meant to happen, and that was dealt with."""
        self._write(logging.WARNING, event, fields)

    def error(self, event: str, /, **fields: Any) -> None:
        """Something that somebody must deal with."""
        self._write(logging.ERROR, event, fields)

    def _write(self, level: int, event: str, fields: dict[str, Any]) -> None:
        if self._logger.isEnabledFor(level):
            carried = {_EVENT: event, _FIELDS: fields}
            self._logger.log(level, "%s", _Message(event, fields), extra=carried, stacklevel=3)


def get(name: str) -> Log:
    """Returns the log of a module: ``log = logs.get(__name__)``."""
    return Log(logging.getLogger(name))


def configure(process: str) -> None:
    """Sends every record of this process to standard error, replacing what was configured before.

    Standard output is for results. Lines are text exactly when it is a terminal, else JSON; ATOLL_LOG=text or
    ATOLL_LOG=json decides in its place, for files that people read.

    Args:
        process: This process's name, which stands on every line: ``broker``, ``aggregator``, an island's id.
    """
    stream, wanted = sys.stderr, os.environ.get("ATOLL_LOG")
    as_json = wanted == "json" if wanted in ("text", "json") else not stream.isatty()
    handler = _Handler(stream)
    handler.setFormatter(JsonFormatter(process) if as_json else TextFormatter(process))
    root = logging.getLogger()
    for old in root.handlers[:]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(logging.INFO)


def log_to_stderr(level: int | str = logging.INFO) -> None:
    """Shows what an island of this program does on standard error, a line for each event.

    For a training loop of one's own that has not set up ``logging`` itself. It concerns Atoll's records alone, and may
    be called again, with another level. ATOLL_LOG=json makes the lines JSON objects.

    Args:
        level: The lowest level that is written, such as ``"WARNING"``.
    """
    as_json = os.environ.get("ATOLL_LOG") == "json"
    for package in ("broker", "islands"):
        logger = logging.getLogger(package)
        for old in [each for each in logger.handlers if isinstance(each, _Handler)]:
            logger.removeHandler(old)
        handler = _Handler(sys.stderr)
        handler.setFormatter(JsonFormatter("island") if as_json else TextFormatter("island"))
        logger.addHandler(handler)
        logger.setLevel(level)
        logger.propagate = False  # else a program with handlers of its own would show each line twice


class _Handler(logging.StreamHandler[TextIO]):
    """Writes lines; drops what a full disk or a closed stream refuses: no process ends by its log."""

    def handleError(self, record: logging.LogRecord) -> None:
        """Says on standard error what was wrong with a record; nothing if it was the stream."""
        if not isinstance(sys.exception(), OSError | ValueError):
            super().handleError(record)


class _Formatter(logging.Formatter):
    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process


class TextFormatter(_Formatter):
    """``12:03:04.512 aggregator round.committed round=31``; warnings and errors say so before the event."""

    def format(self, record: logging.LogRecord) -> str:
        """Returns the record as one line, and its traceback, if any, below."""
        moment = datetime.datetime.fromtimestamp(record.created)
        clock = f"{moment:%H:%M:%S}.{moment.microsecond // 1000:03d}"
        what = _line(_event_of(record), getattr(record, _FIELDS, {}))
        line = f"{clock} {self._process} {_MARKS.get(record.levelno, '')}{what}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class JsonFormatter(_Formatter):
    """One JSON object per line: time (UTC), process, level, logger, event, then the fields."""

    def format(self, record: logging.LogRecord) -> str:
        """Returns the record as one JSON object; a field never replaces one of the five fixed keys."""
        moment = datetime.datetime.fromtimestamp(record.created, tz=datetime.UTC)
        fixed = {
            "time": moment.isoformat(timespec="milliseconds"),
            "process": self._process,
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": _event_of(record),
        }
        fields = getattr(record, _FIELDS, {})
        line = fixed | {(f"field_{key}" if key in fixed else key): value for key, value in fields.items()}
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(_finite(line), default=str)


def _event_of(record: logging.LogRecord) -> str:
    """Returns the event of a log record; of another library's record the whole message."""
    return getattr(record, _EVENT, None) or record.getMessage()


def _line(event: str, fields: Mapping[str, Any]) -> str:
    return " ".join([event.replace("\n", "\\n"), *(f"{key}={_text(value)}" for key, value in fields.items())])


def _text(value: Any) -> str:
    """Returns a field as text: numbers short, what has spaces in quotes, so that a line can be split."""
    if isinstance(value, bool) or value is None:
        return str(value).lower()  # "none" reads better than an empty field
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, tuple | list | set | frozenset):
        return ",".join(_text(each) for each in value) or "none"
    text = str(value)
    return json.dumps(text, ensure_ascii=False) if not text or any(c in text for c in ' "\n\r\t=') else text


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity: they become text."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {str(key): _finite(each) for key, each in value.items()}
    if isinstance(value, tuple | list):
        return [_finite(each) for each in value]
    return value
