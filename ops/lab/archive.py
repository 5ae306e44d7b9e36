"""Where the records of experiments stand: ``DIRECTORY/EXPERIMENT.jsonl``, one line per run. Decides nothing."""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from aggregator.store.layout import mapped
from broker.wire.errors import ConfigError, Unavailable
from ops.lab.records import Record, parse
from ops.processes.child_process import end_of

_LOG = logging.getLogger(__name__)


def path_of(directory: Path, experiment: str) -> Path:
    """Where the records of an experiment are."""
    return directory / f"{experiment}.jsonl"


def append(directory: Path, record: Record) -> None:
    """Adds one record durably. Several processes may append to one file at a time: each waits for its turn.

    A torn end that an earlier writer left is cut off first: its run was never reported as finished.

    Raises:
        Unavailable: It was not written, or may not have been.
    """
    path = path_of(directory, record.experiment)
    line = f"{record.to_json()}\n".encode()
    with mapped(f"cannot append to {path}", definite=False):
        directory.mkdir(parents=True, exist_ok=True)
        with path.open("a+b", buffering=0) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            line = _mended(file.fileno(), path) + line
            size = os.fstat(file.fileno()).st_size
            try:
                while line:  # a disk that is nearly full takes a part of it, and refuses the rest
                    line = line[os.write(file.fileno(), line) :]
                os.fsync(file.fileno())
            except OSError:
                with suppress(OSError):  # who is told to add the line by hand adds it to no half of it
                    os.ftruncate(file.fileno(), size)
                raise


@contextmanager
def locked(directory: Path, experiment: str) -> Iterator[None]:
    """Holds an experiment while it is run: two that run it at once would do everything twice.

    Raises:
        Unavailable: Somebody else holds it, or the file cannot be written.
    """
    path = directory / f".{experiment}.lock"
    with mapped(f"cannot lock {path}", definite=True):
        directory.mkdir(parents=True, exist_ok=True)
        file = path.open("a", encoding="utf-8")
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as err:
            raise Unavailable(f"{experiment} is being run already, with records in {directory}", definite=True) from err
        yield  # the file stays: whoever removed it would let two others lock two files of that name


@contextmanager
def workspace(directory: Path, experiment: str) -> Iterator[Path]:
    """Makes a temporary folder for what runs leave on their way, and removes it; to be entered while locked.

    It is not beside the records: when their disk is full, a run's result still has a place to be printed from. Whoever
    was killed could not remove it, so it has the same name every time, and one that is there goes first.

    Raises:
        Unavailable: It cannot be made.
    """
    place = zlib.crc32(os.fsencode(directory.resolve()))
    with mapped("cannot make a temporary folder, for which TMPDIR may name a place", definite=True):
        path = Path(tempfile.gettempdir(), f"atoll-lab-{os.getuid()}-{place:08x}-{experiment}")
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(mode=0o700)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def keep_log(directory: Path, experiment: str, run: str, log: Path) -> Path | None:
    """Keeps the end of what a run said that failed, behind those before it; returns where.

    Nothing, and no error, if there is nothing to keep or no room for it: the sentence that is printed tells the reason.
    """
    with suppress(OSError):
        if said := end_of(log):
            path = _failed_log(directory, experiment)
            with path.open("a", encoding="utf-8") as file:
                file.write("\n".join((f"== {run}", *said, "")))
            return path
    return None


def forget_logs(directory: Path, experiment: str) -> None:
    """Removes what runs of an earlier command said."""
    with suppress(OSError):
        _failed_log(directory, experiment).unlink()


def _failed_log(directory: Path, experiment: str) -> Path:
    return directory / f"{experiment}.failed.log"


def _mended(fd: int, path: Path) -> bytes:
    """Cuts off a torn end; returns the line end that a whole last line lacks."""
    size = os.fstat(fd).st_size
    if size == 0 or os.pread(fd, 1, size - 1) == b"\n":
        return b""
    content = os.pread(fd, size, 0)
    _, torn = parse(content.decode(errors="replace"), name=str(path))
    if not torn:
        return b"\n"
    os.ftruncate(fd, content.rfind(b"\n") + 1)
    return b""


def read(path: Path) -> tuple[Record, ...]:
    """Returns the records of one file in order; none if there is no such file.

    Raises:
        ConfigError: A line is no record, or is one of another experiment.
        Unavailable: The file cannot be read.
    """
    with mapped(f"cannot read {path}", definite=True):
        if not path.exists():
            return ()
        content = path.read_bytes()
    records, torn = parse(content.decode(errors="replace"), name=str(path))
    if torn:
        _LOG.warning("lab.record_torn path=%s bytes=%d: its run has to be run again", path, len(torn.encode()))
    for number, record in enumerate(records, start=1):
        if record.experiment != path.stem:
            cure = f"stands in the records of {path.stem}; move it to its own file"
            raise ConfigError(f"{path}:{number}: experiment", record.experiment, cure)
    return records


def read_all(directory: Path) -> tuple[tuple[Record, ...], dict[str, ConfigError]]:
    """Returns the records of all files of a directory, by file name, and experiment -> what is wrong with its file.

    Neither if there is no such directory.

    Raises:
        Unavailable: A file cannot be read.
    """
    with mapped(f"cannot list {directory}", definite=True):
        paths = sorted(directory.glob("*.jsonl"))
    found: list[Record] = []
    wrong: dict[str, ConfigError] = {}
    for path in paths:
        try:
            found += read(path)
        except ConfigError as err:
            wrong[path.stem] = err
    return tuple(found), wrong
