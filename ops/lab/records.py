"""The record of a run, and the files that records stand in.

A run of the laboratory ends in an :class:`Outcome`; what is kept of it is a :class:`Record`, one line of JSON in
``DIRECTORY/EXPERIMENT.jsonl``. The records behind docs/results.md are one compressed file of such lines. Whoever reads
a record refuses unknown keys. A field added later gets a default, and never changes its type.
"""

from __future__ import annotations

import fcntl
import json
import logging
import lzma
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

from aggregator.store.layout import mapped
from broker.process.settings import from_sources
from broker.wire.errors import ConfigError
from islands.tasks.task import Params

_LOG = logging.getLogger(__name__)

#: Fields that records had once: they are dropped when a record is read.
_FORMER = ("loss_se", "sequences", "blocks", "staleness_histogram", "gantt", "autocorrelation")


class Stage(StrEnum):
    """What a run is for: tuned rates are chosen on other runs than those that are reported."""

    TUNE = "tune"
    FINAL = "final"


class Point(NamedTuple):
    """One point of a loss curve."""

    tokens: int
    virtual_s: float
    loss: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The final global model of a run and what it took.

    Attributes:
        params: Global parameters at the end.
        curve: Held-out loss on the way, in nats per token, without the end.
        tokens: Trained, by all islands.
        merged_tokens: Of those, in the global model.
        virtual_s: Duration of the run in virtual time.
        train_s: Wall time inside training steps.
        wasted: Cause -> tokens.
        rounds: Merges of one fragment.
        participation: Mean share of live islands in a round.
        staleness: Of contributions, in versions: mean, p50, p90, max.
        cosine: Mean cosine between two contributions of a round; None where nothing was merged.
    """

    params: Params
    curve: Sequence[Point]
    tokens: int
    merged_tokens: int
    virtual_s: float
    train_s: float
    wasted: Mapping[str, int] = field(default_factory=dict)
    rounds: int = 0
    participation: float = 1.0
    staleness: Mapping[str, float] = field(default_factory=dict)
    cosine: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One finished run. What a lockstep baseline does not have stays at its default.

    Attributes:
        experiment: Name of the experiment, which is also the name of its file.
        stage: Whether the run chose a rate, or is reported.
        cell: Dotted setting -> scalar or list, only those that differ between the cells of the experiment.
        key: Digest of all settings and the seed; a run with the key of an older one replaces it.
        seed: Of parameters, data order and virtual time.
        loss: Of the global model on held-out text, nats per token; infinite if it is not a number.
        bytes_per_token: Of the held-out text, which turns nats per token into bits per byte.
        tokens: Trained by all islands.
        merged_tokens: Those that reached the global model.
        virtual_s: Time that passed in the modelled fleet.
        wall_s: Time that passed here.
        cpu_s: Processor time of the process that ran it; 0 in records older than the field.
        train_s: Of the time that passed here, inside training steps.
        rounds: Rounds that merged something.
        parameters: Of the model.
        curve: (tokens, virtual_s, loss) of the global model during the run, by growing tokens.
        participation: Mean share of the live islands that a round merged; 1 for baselines, which wait for everybody.
        staleness: Of merged contributions, in versions: mean, p50, p90, max; empty if there are none.
        wasted: Cause -> tokens trained and not merged.
        diverged: Training went wrong: the loss is not a number, or far above where it began.
        cosine: Mean cosine between the contributions of a round.
        settings: Everything, resolved: dotted name -> scalar or list.
        code: Version of the program.
        task_code: Module -> digest, of the user's own modules that the run imported, and ``data PATH`` -> digest of
            text that our task trained on; empty if there are none.
        corpus: Digest of the text.
        build: Versions of jax, jaxlib and numpy, and the kind of processor: what the last bits depend on.
    """

    experiment: str
    stage: Stage
    cell: Mapping[str, Any]
    key: str
    seed: int
    loss: float
    bytes_per_token: float = 0.0
    tokens: int
    merged_tokens: int = 0
    virtual_s: float = 0.0
    wall_s: float = 0.0
    cpu_s: float = 0.0
    train_s: float = 0.0
    rounds: int = 0
    parameters: int
    curve: tuple[tuple[float, ...], ...] = ()
    participation: float = 0.0
    staleness: Mapping[str, float] = field(default_factory=dict)
    wasted: Mapping[str, int] = field(default_factory=dict)
    diverged: bool = False
    cosine: float | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    code: str = ""
    task_code: Mapping[str, str] = field(default_factory=dict)
    corpus: str = ""
    build: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "stage", Stage(self.stage))
        if not math.isfinite(self.loss):
            object.__setattr__(self, "loss", math.inf)
            object.__setattr__(self, "diverged", True)
        if self.cosine is not None and not math.isfinite(self.cosine):
            object.__setattr__(self, "cosine", None)
        for name, value in self.cell.items():
            if not isinstance(value, str | int | float | list | tuple):
                raise ConfigError(f"cell.{name}", value, "must be text, a number, true, false, or a list of these")
        for row in self.curve:
            if len(row) != 3:
                raise ConfigError("curve", row, "must have 3 numbers in every row")

    @property
    def spent_s(self) -> float:
        """Cost of the run: processor time, or the time that passed where that was not counted."""
        return self.cpu_s or self.wall_s

    def to_json(self) -> str:
        """Returns the record as one line without its end; numbers that are not finite become null."""
        table = {each.name: _finite(getattr(self, each.name)) for each in fields(self)}
        return json.dumps(table, allow_nan=False, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Record:
        """Reads what :meth:`to_json` wrote.

        Raises:
            ConfigError: It is no JSON object, has an unknown key, lacks one, or a value has the wrong type.
        """
        try:
            table = json.loads(text)
        except ValueError as err:
            raise ConfigError("record", text[:60], f"is not JSON ({err})") from err
        if not isinstance(table, dict):
            raise ConfigError("record", text[:60], "must be a JSON object")
        if table.get("loss", 0.0) is None:
            table["loss"] = math.inf
        if isinstance(curve := table.get("curve"), list):
            table["curve"] = [
                [math.inf if x is None else x for x in row] if isinstance(row, list) else row for row in curve
            ]
        known = {name: value for name, value in table.items() if value is not None and name not in _FORMER}
        return from_sources(cls, known, where="record")


# --- which of them count --------------------------------------------------------------------------------------------


def newest(records: Iterable[Record]) -> tuple[Record, ...]:
    """Returns the last record of every (experiment, stage, key), in the order in which they were written."""
    kept: dict[tuple[str, Stage, str], Record] = {}
    for record in records:
        kept.pop((record.experiment, record.stage, record.key), None)
        kept[record.experiment, record.stage, record.key] = record
    return tuple(kept.values())


def of_newest_code(records: Iterable[Record], now: Mapping[str, str] | None = None) -> tuple[Record, ...]:
    """Returns the records whose task and text are still as they were.

    A record does not count if a later one imported one of its modules in another form, or trained on other text under
    one of its paths. Records that name neither always count.

    Args:
        records: In the order in which they were made.
        now: Module, or path of text -> digest as it is, where that is known.
    """
    records = tuple(records)
    newest_of = {module: digest for record in records for module, digest in record.task_code.items()} | dict(now or {})
    return tuple(record for record in records if not edited_since(record, newest_of))


def edited_since(record: Record, now: Mapping[str, str]) -> str:
    """Returns the module or text that a run saw in another form than ``now`` says; empty if there is none."""
    return next((name for name, digest in record.task_code.items() if now.get(name, digest) != digest), "")


# --- files ----------------------------------------------------------------------------------------------------------


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


def parse(text: str, *, name: str) -> tuple[tuple[Record, ...], str]:
    """Reads the lines of a file of records, which ``name`` names in errors.

    Returns:
        The records in order, and what was torn off: the end of the file, if the writer died in the middle of a line.
        Nobody was told that this run had finished, and it will be run again.

    Raises:
        ConfigError: Any other line is no record. It names the line.
    """
    whole, _, tail = text.rpartition("\n")
    records = []
    for number, line in enumerate(whole.split("\n") if whole else [], start=1):
        try:
            records.append(Record.from_json(line))
        except ConfigError as err:
            cure = f"{err.cure}; restore the file, or remove that line and run it again"
            raise ConfigError(f"{name}:{number}: {err.field}", err.value, cure) from err
    if tail:  # a line without its end, which is whole all the same if a person cut just the end
        try:
            records.append(Record.from_json(tail))
        except ConfigError:
            return tuple(records), tail
    return tuple(records), ""


def read(place: Path, experiment: str | None = None) -> tuple[Record, ...]:
    """Returns the records of a directory, or of a compressed file, in order; none if there is no such file.

    Args:
        place: A directory of ``*.jsonl``, or a file that :func:`pack` made.
        experiment: Only its records, and only its file.

    Raises:
        ConfigError: A line is no record, or is one of another experiment than its file.
        Unavailable: A file cannot be read.
    """
    if place.suffix == ".xz":
        with mapped(f"cannot read {place}", definite=True):
            records, _ = parse(lzma.decompress(place.read_bytes()).decode(), name=str(place))
        return tuple(record for record in records if experiment in (None, record.experiment))
    found: list[Record] = []
    for path in sorted(place.glob("*.jsonl")) if experiment is None else [path_of(place, experiment)]:
        with mapped(f"cannot read {path}", definite=True):
            content = path.read_bytes() if path.exists() else b""
        records, torn = parse(content.decode(errors="replace"), name=str(path))
        if torn:
            _LOG.warning("lab.record_torn path=%s bytes=%d: its run has to be run again", path, len(torn.encode()))
        for number, record in enumerate(records, start=1):
            if record.experiment != path.stem:
                cure = f"stands in the records of {path.stem}; move it to its own file"
                raise ConfigError(f"{path}:{number}: experiment", record.experiment, cure)
        found += records
    return tuple(found)


def pack(records: Iterable[Record]) -> bytes:
    """Returns records as one compressed file, without what no table and no plot needs.

    Losses keep their last bit; the curves are rounded to what a plot shows. The same records give the same bytes.
    """
    lines = []
    for record in records:
        curve = tuple((float(tokens), round(at_s, 1), round(loss, 4)) for tokens, at_s, loss in record.curve)
        bare = replace(record, curve=curve, staleness={}, wasted={}, build={}, cosine=None, cpu_s=record.spent_s)
        lines.append(f"{bare.to_json()}\n")
    return lzma.compress("".join(lines).encode(), preset=9 | lzma.PRESET_EXTREME)


def _finite(value: Any) -> Any:
    match value:
        case float():
            return value if math.isfinite(value) else None
        case Mapping():
            return {str(key): _finite(each) for key, each in value.items()}
        case list() | tuple():
            return [_finite(each) for each in value]
        case _:
            return value
