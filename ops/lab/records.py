"""The record of a run, and the files of records.

A run of the laboratory ends in an :class:`Outcome`; its :class:`Record` is kept, one line of JSON in
``DIRECTORY/EXPERIMENT.jsonl``. The records behind docs/results.md are one compressed file of such lines. Unknown keys
of a record are refused. A field added later gets a default, and never changes its type.
"""

from __future__ import annotations

import json
import lzma
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from aggregator.store import replacing
from aggregator.store.commit_file import write_all
from aggregator.store.layout import mapped
from broker.base.errors import ConfigError
from broker.base.sources import from_sources
from islands.tasks.task import Params
from ops.text import finite

#: Judges parameters on the way: a few sequences.
Judge = Callable[[Params], float]


class Point(NamedTuple):
    """One point of a loss curve."""

    tokens: int
    virtual_s: float
    loss: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The final global model of a run, with its costs.

    Attributes:
        params: Global parameters at the end.
        curve: Held-out loss on the way, in nats per token, without the end.
        tokens: Trained, by all islands.
        merged_tokens: Those of them in the global model.
        virtual_s: Duration of the run in virtual time.
        wasted: Cause -> tokens.
        rounds: Merges of one fragment.
        participation: Mean share of live islands in a round.
    """

    params: Params
    curve: Sequence[Point]
    tokens: int
    merged_tokens: int
    virtual_s: float
    wasted: Mapping[str, int] = field(default_factory=dict)
    rounds: int = 0
    participation: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One finished run; fields that a baseline does not have keep their defaults.

    Attributes:
        experiment: Name of the experiment, which is also the name of its file.
        cell: Dotted setting -> scalar or list, only those that differ between the cells of the experiment.
        key: Digest of all that decides the run; a run with the key of an older one replaces it.
        seed: The seed of parameters, data order and virtual time.
        loss: The loss of the global model on held-out text, nats per token; infinite if it is not a number.
        tokens: Trained by all islands.
        virtual_s: Time that passed in the modelled fleet.
        wall_s: Time that passed here.
        cpu_s: Processor time of the process that ran it; 0 in records older than the field.
        curve: (tokens, virtual_s, loss) of the global model during the run, by growing tokens.
        diverged: Training went wrong: the loss is not a number, or far above where it began.
        settings: Everything, resolved: dotted name -> scalar or list.
        code: Version of the program.
        corpus: Digest of the text.
    """

    experiment: str
    cell: Mapping[str, Any]
    key: str
    seed: int
    loss: float
    tokens: int
    virtual_s: float = 0.0
    wall_s: float = 0.0
    cpu_s: float = 0.0
    curve: tuple[tuple[float, ...], ...] = ()
    diverged: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)
    code: str = ""
    corpus: str = ""

    def __post_init__(self) -> None:
        if not math.isfinite(self.loss):
            object.__setattr__(self, "loss", math.inf)
            object.__setattr__(self, "diverged", True)
        for row in self.curve:
            if len(row) != 3:
                raise ConfigError("curve", row, "must have 3 numbers in every row")

    @property
    def spent_s(self) -> float:
        """Cost of the run in seconds: processor time, or elapsed time where that was not measured."""
        return self.cpu_s or self.wall_s

    def to_json(self) -> str:
        """Returns the record as one line of JSON; numbers that are not finite become null."""
        table = {each.name: finite(getattr(self, each.name)) for each in fields(self)}
        return json.dumps(table, allow_nan=False, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Record:
        """Returns the record in a line of :meth:`to_json`.

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
        known = {name: value for name, value in table.items() if value is not None}
        return from_sources(cls, known, where="record")


def newest(records: Iterable[Record]) -> tuple[Record, ...]:
    """Returns the last record of every experiment and key."""
    return tuple({(record.experiment, record.key): record for record in records}.values())


# --- files ----------------------------------------------------------------------------------------------------------


def path_of(directory: Path, experiment: str) -> Path:
    """Returns the file of an experiment's records."""
    return directory / f"{experiment}.jsonl"


def append(directory: Path, record: Record) -> None:
    """Adds one record durably, by replacing the whole file, so that no line is ever torn.

    Raises:
        Unavailable: It was not written, or may not have been.
    """
    path = path_of(directory, record.experiment)
    with mapped(f"cannot append to {path}", definite=True):
        directory.mkdir(parents=True, exist_ok=True)
        before = path.read_text(encoding="utf-8") if path.exists() else ""
    end = "" if before.endswith("\n") or not before else "\n"  # a person may have cut it
    write(path, f"{before}{end}{record.to_json()}\n".encode())


def write(path: Path, content: bytes) -> None:
    """Replaces a file atomically.

    Raises:
        Unavailable: It was not written, or may not have been.
    """
    with mapped(f"cannot write {path}", definite=True):
        path.parent.mkdir(parents=True, exist_ok=True)
    replacing.replace(path, lambda fd: write_all(fd, memoryview(content)))


def read(place: Path, experiment: str | None = None) -> tuple[Record, ...]:
    """Returns the records of a directory or a compressed file in order; none if a directory lacks them.

    Args:
        place: A directory of ``*.jsonl``, or a file that :func:`pack` made.
        experiment: Only its records, and only its file.

    Raises:
        ConfigError: A line is no record.
        Unavailable: A file cannot be read.
    """
    packed = place.suffix == ".xz"
    paths = [place] if packed else sorted(place.glob("*.jsonl") if experiment is None else [path_of(place, experiment)])
    found: list[Record] = []
    for path in paths:
        with mapped(f"cannot read {path}", definite=True):
            content = path.read_bytes() if packed or path.exists() else b""
        text = (lzma.decompress(content) if packed else content).decode(errors="replace")
        for number, line in enumerate(text.splitlines(), start=1):
            try:
                found.append(Record.from_json(line))
            except ConfigError as err:
                cure = f"{err.cure}; restore the file, or remove that line and run it again"
                raise ConfigError(f"{path}:{number}: {err.field}", err.value, cure) from err
    return tuple(record for record in found if experiment in (None, record.experiment))


def pack(records: Iterable[Record]) -> bytes:
    """Returns records as a compressed file, reduced to the fields that tables and plots need.

    Losses keep their last bit; curves are rounded to the resolution of a plot. The same records give the same bytes.
    """
    lines = []
    for record in records:
        curve = tuple((float(tokens), round(at_s, 1), round(loss, 4)) for tokens, at_s, loss in record.curve)
        bare = replace(record, curve=curve, cpu_s=record.spent_s)
        lines.append(f"{bare.to_json()}\n")
    return lzma.compress("".join(lines).encode(), preset=9 | lzma.PRESET_EXTREME)
