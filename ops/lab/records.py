"""One run of one cell of an experiment, as one JSON object on one line. Pure; the files are :mod:`ops.lab.archive`.

A record holds everything that the report says about a run, so that the report can be written again years later from
the records alone. Whoever reads a record refuses unknown keys: a number that nobody knows is a number that nobody
reports. A field added later gets a default, and never changes its type.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any

from broker.process.settings import from_sources
from broker.wire.errors import ConfigError

#: A run whose loss is not a number is infinitely bad. JSON has no infinity, so that these are null on disk.
_LOSSES = ("loss", "loss_se")

#: What ``staleness`` holds, unless it is empty.
STALENESS_KEYS = ("mean", "p50", "p90", "max")


class Stage(StrEnum):
    """What a run is for: tuned rates are chosen on other runs than those that are reported."""

    TUNE = "tune"
    FINAL = "final"


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One finished run. What a lockstep baseline does not have stays at its default.

    Attributes:
        experiment: Name of the experiment, which is also the name of the file.
        stage: Whether the run chose a rate, or is reported.
        cell: Dotted setting -> scalar or list, only those that differ between the cells of the experiment.
        key: Digest of all settings and the seed; a run with the key of an older one replaces it.
        seed: Of parameters, data order and virtual time.
        loss: Of the global model on held-out sequences, nats per token; infinite if it is not a number.
        loss_se: Its standard error over those sequences.
        sequences: How many those are.
        blocks: Mean losses of consecutive blocks of those sequences, which are in the order of the text; empty if the
            task does not tell sequences apart, or the record is older than the field.
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
        staleness: Of merged contributions, in versions, under the names of ``STALENESS_KEYS``; empty if there is none.
        wasted: Cause -> tokens trained and not merged.
        staleness_histogram: (staleness rounded to 0.25 versions, contributions).
        gantt: (opened_s, closed_s, committed_s, fragment, contributors) of the first rounds, in virtual time.
        diverged: Training went wrong: the loss is not a number, or far above where it began.
        cosine: Mean cosine between the contributions of a round.
        autocorrelation: Mean cosine between successive merged pseudo-gradients of a fragment.
        settings: Everything, resolved: dotted name -> scalar or list.
        code: Version of the program.
        task_code: Module -> digest, of those of the user's own that the run imported, and ``data PATH`` -> digest of
            text of their own that our task trained on; empty if there are none.
        corpus: Digest of the text.
        build: Versions of jax, jaxlib and numpy, and the kind of processor: what the last bits depend on.
    """

    experiment: str
    stage: Stage
    cell: Mapping[str, Any]
    key: str
    seed: int
    loss: float
    loss_se: float
    sequences: int
    blocks: tuple[float, ...] = ()
    bytes_per_token: float
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
    staleness_histogram: tuple[tuple[float, ...], ...] = ()
    gantt: tuple[tuple[float, ...], ...] = ()
    diverged: bool = False
    cosine: float | None = None
    autocorrelation: float | None = None
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
        if not math.isfinite(self.loss_se):
            object.__setattr__(self, "loss_se", math.inf)
        for name in ("cosine", "autocorrelation"):
            value = getattr(self, name)
            if value is not None and not math.isfinite(value):
                object.__setattr__(self, name, None)
        for name, value in self.cell.items():
            if not isinstance(value, str | int | float | list | tuple):
                raise ConfigError(f"cell.{name}", value, "must be text, a number, true, false, or a list of these")
        if self.staleness and set(self.staleness) != set(STALENESS_KEYS):
            raise ConfigError("staleness", dict(self.staleness), f"must be empty, or have {', '.join(STALENESS_KEYS)}")
        for name, width in (("curve", 3), ("staleness_histogram", 2), ("gantt", 5)):
            for row in getattr(self, name):
                if len(row) != width:
                    raise ConfigError(name, row, f"must have {width} numbers in every row")

    @property
    def spent_s(self) -> float:
        """What the run cost of a budget: processor time, or as long as nobody had counted that, time."""
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
            raise ConfigError("record", _short(text), f"is not JSON ({err})") from err
        if not isinstance(table, dict):
            raise ConfigError("record", _short(text), "must be a JSON object")
        for name in _LOSSES:
            if table.get(name, 0.0) is None:
                table[name] = math.inf
        if isinstance(curve := table.get("curve"), list):
            table["curve"] = [
                [math.inf if x is None else x for x in row] if isinstance(row, list) else row for row in curve
            ]
        return from_sources(cls, {name: value for name, value in table.items() if value is not None}, where="record")


def parse(text: str, *, name: str) -> tuple[tuple[Record, ...], str]:
    """Reads the lines of a file of records.

    Args:
        text: The whole file.
        name: What to call it in errors.

    Returns:
        The records in order, and what was torn off: the end of the file, if the writer died in the middle of a line.
        That run never finished as far as anybody was told, and will be run again.

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


def newest(records: Iterable[Record]) -> tuple[Record, ...]:
    """Returns the last record of every (experiment, stage, key), in the order in which they were written."""
    kept: dict[tuple[str, Stage, str], Record] = {}
    for record in records:
        kept.pop((record.experiment, record.stage, record.key), None)
        kept[record.experiment, record.stage, record.key] = record
    return tuple(kept.values())


def of_newest_code(records: Iterable[Record], now: Mapping[str, str] | None = None) -> tuple[Record, ...]:
    """Returns the records of tasks as they were last: who edits a task asks anew, tuning included.

    A record does not count if a later one imported one of its modules in another form, or trained on other text under
    one of its paths. Those that tell of neither, or are older than the field, always do.

    Args:
        records: In the order in which they were made.
        now: Module, or path of text -> digest as it is, where that is known.
    """
    records = tuple(records)
    newest_of = {module: digest for record in records for module, digest in record.task_code.items()} | dict(now or {})
    return tuple(
        record for record in records if all(newest_of[name] == digest for name, digest in record.task_code.items())
    )


def edited_since(record: Record, now: Mapping[str, str]) -> str:
    """Returns the module or text that a run saw in another form than it is said to have now; empty if there is none.

    Args:
        record: Of the run.
        now: As of :func:`of_newest_code`.
    """
    return next((name for name, digest in record.task_code.items() if now.get(name, digest) != digest), "")


def independent(records: Iterable[Record]) -> tuple[Record, ...]:
    """Returns every run once: a record that was taken over from another experiment tells of the same one.

    Two runs of the same settings may agree in every figure, but hardly in the time they took.
    """
    runs = {(record.key, record.code, record.wall_s, record.train_s): record for record in reversed(list(records))}
    return tuple(reversed(runs.values()))


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


def _short(text: str, limit: int = 60) -> str:
    return text if len(text) <= limit else text[: limit - 3] + "..."
