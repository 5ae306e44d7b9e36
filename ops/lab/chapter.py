"""What the page of results says about one experiment, as a pure function of the experiment and its records."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from ops.lab import rates
from ops.lab.cells import Cell, cell_key, grouped, label, not_run, rank, scalar, varying
from ops.lab.claims import Comparison
from ops.lab.comparisons import Finding, findings
from ops.lab.markdown import count, details, duration, share, table
from ops.lab.records import Record, Stage, independent
from ops.lab.statistics import Interval, interval
from ops.lab.tuning import Tuning
from ops.lab.verdicts import extra_tokens, verdicts


class Tune(Protocol):
    """What was tuned, by its dotted name."""

    @property
    def name(self) -> str: ...


class Experiment(Protocol):
    """What the report needs to know of an experiment; ``cells`` gives the fields of each declared cell."""

    @property
    def name(self) -> str: ...
    @property
    def question(self) -> str: ...
    @property
    def notes(self) -> str: ...
    @property
    def comparisons(self) -> tuple[Comparison, ...]: ...
    @property
    def command(self) -> str: ...
    @property
    def tune(self) -> Tune | None: ...
    def cells(self) -> Sequence[Cell]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """A plot that the page shows; ``file`` is relative to it."""

    title: str
    file: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """An experiment with all that its records say.

    Attributes:
        experiment: What was asked.
        records: Of its cells, tuning included.
        claims: What they say of its claims.
        passed_over: Final runs at rates that tuning did not choose in the end.
        tunings: What tuning tried and chose.
        flags: What the experiment's command needs besides, to add to these records.
    """

    experiment: Experiment
    records: tuple[Record, ...]
    claims: tuple[Finding, ...]
    passed_over: tuple[Record, ...] = ()
    tunings: tuple[Tuning, ...] = ()
    flags: str = ""

    @property
    def command(self) -> str:
        """What regenerates the records, where they are."""
        return f"{self.experiment.command} {self.flags}".strip()

    @property
    def final(self) -> tuple[Record, ...]:
        """The runs that are reported."""
        return tuple(record for record in self.records if record.stage is Stage.FINAL)


def findings_of(
    experiment: Experiment,
    records: Iterable[Record],
    passed_over: Iterable[Record] = (),
    tunings: Iterable[Tuning] = (),
    *,
    flags: str = "",
) -> Findings:
    """Returns an experiment with those of the records that are its own, and its verdicts.

    Which run finished first depends on the machine, so the records are brought into an order of their own.
    """

    def in_order(unsorted: Iterable[Record]) -> tuple[Record, ...]:
        own = [record for record in unsorted if record.experiment == experiment.name]
        names = sorted({name for record in own for name in record.cell})
        return tuple(sorted(own, key=lambda each: (rank(each.cell, names), each.stage, each.seed, each.key)))

    own = in_order(records)
    return Findings(
        experiment=experiment,
        records=own,
        claims=findings(experiment.comparisons, own),
        passed_over=in_order(passed_over),
        tunings=tuple(tunings),
        flags=flags,
    )


def chapter(each: Findings, plots: Sequence[Plot]) -> str:
    """Returns all that the records say about one experiment, under its name as a heading."""
    experiment = each.experiment
    parts = [f"## {experiment.name}", f"**Question.** {experiment.question.strip()}", f"```\n{each.command}\n```"]
    if not each.records:
        parts += [f"Nothing of it was run yet: all of its {len(experiment.cells())} cells are missing."]
        return "\n\n".join(parts)
    if experiment.notes.strip():
        parts += [f"**Notes.** {experiment.notes.strip()}"]
    parts += [_counted(each.records), _provenance(each.records)]
    if each.final:
        parts += [_cells(each)]
    parts += [verdicts(each.claims), extra_tokens(each.claims), *_rates(each)]
    parts += [f"![{plot.title}]({plot.file})" for plot in plots]
    parts += [_missing(each)]
    return "\n\n".join(part for part in parts if part)


def compute(records: Iterable[Record]) -> tuple[str, str, str, str]:
    """Returns how many runs there are, their tokens, the time they took here, and the share of it in training.

    A run that serves several cells counts once.
    """
    records = independent(records)
    wall_s, train_s = (math.fsum(getattr(record, name) for record in records) for name in ("wall_s", "train_s"))
    tokens = sum(record.tokens for record in records)
    return str(len(records)), count(tokens), duration(wall_s), share(train_s, wall_s)


def _counted(records: Sequence[Record]) -> str:
    runs, tokens, wall, training = compute(records)
    tuning = sum(record.stage is Stage.TUNE for record in independent(records))
    inside = f", {training} of it inside training steps" if training else ""
    judged = sorted({record.sequences for record in records if record.stage is Stage.FINAL and record.sequences})
    by = f" Losses are of {' or '.join(f'{each:,}' for each in judged)} held-out sequences." if judged else ""
    return f"{runs} runs, {tuning} of them for tuning: {tokens} tokens in {wall}{inside}.{by}"


def _provenance(records: Sequence[Record]) -> str:
    """What made the runs, and the settings that all of them share: folded away."""

    def all_of(values: Iterable[str]) -> str:
        return ", ".join(dict.fromkeys(value for value in values if value)) or "unknown"

    modules = sorted({f"{name} {digest}" for record in records for name, digest in record.task_code.items()})
    own = f", {', '.join(modules)}" if modules else ""
    build = all_of(", ".join(f"{name} {value}" for name, value in sorted(record.build.items())) for record in records)
    flat = [
        {name: json.dumps(value) if isinstance(value, list | tuple) else value for name, value in each.settings.items()}
        for each in records
    ]
    in_cells = {name for record in records for name in record.cell}
    varied = set(varying(flat))
    shared = [(f"`{name}`", scalar(value)) for name, value in sorted(flat[0].items()) if name not in varied | in_cells]
    others = sorted(varied - in_cells - {"seed"})
    text = all_of(record.corpus for record in records)
    parts = [
        f"Sources: {all_of(record.code for record in records)}{own}. Text: {text}. Build: {build}.",
        table(("setting", "value"), shared) if shared else "",
        f"Differs between runs besides: {', '.join(f'`{name}`' for name in others)}." if others else "",
    ]
    return details("What made the runs, and the settings of all", "\n\n".join(part for part in parts if part))


def _cells(each: Findings) -> str:
    cells = grouped(each.final, each.experiment.cells())
    names = varying(dict(cell) for cell in cells)
    rows = []
    for cell, runs in cells.items():
        fields = dict(cell)
        sound = [run for run in runs if not run.diverged]
        losses = interval([run.loss for run in sound]) if sound else None
        bits = [run.loss / math.log(2) / run.bytes_per_token for run in sound if run.bytes_per_token]
        stale = [run.staleness for run in runs if run.staleness]
        cosines = [run.cosine for run in runs if run.cosine is not None]
        wasted = {cause: sum(run.wasted.get(cause, 0) for run in runs) for run in runs for cause in run.wasted}
        rows.append(
            (
                *(scalar(fields[name]) if name in fields else "" for name in names),
                str(len(runs)),
                _loss(losses),
                f"{_mean([run.loss_se for run in sound]):.4f}" if any(run.sequences > 1 for run in sound) else "",
                f"{_mean(bits):.4f}" if bits else "",
                str(len(runs) - len(sound)) if len(sound) < len(runs) else "",
                count(_mean([run.parameters for run in runs])),
                count(_mean([run.tokens for run in runs])),
                share(sum(wasted.values()), sum(run.tokens for run in runs)),
                share(_mean([run.participation for run in runs]), 1) if stale else "",  # baselines have no rounds
                f"{_mean([s['mean'] for s in stale]):.2f}" if stale else "",
                f"{_mean([s['p90'] for s in stale]):.2f}" if stale else "",
                f"{_mean(cosines):.2f}" if cosines else "",
                duration(_mean([run.virtual_s for run in runs])),
            )
        )
    head = (
        *(name.rpartition(".")[2].replace("_", " ") for name in names),
        *(
            ">seeds",
            ">loss",
            ">error over sequences",
            ">bits per byte",
            ">diverged",
            ">parameters",
            ">tokens",
            ">wasted",
            ">participation",
        ),
        *(">staleness, mean", ">p90", ">cosine", ">virtual time"),
    )
    return table(head, rows)


def _loss(losses: Interval | None) -> str:
    if losses is None:
        return "diverged"
    spread = f" ± {losses.half_width:.4f}" if math.isfinite(losses.half_width) else ""
    return f"{losses.mean:.4f}{spread}"


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _rates(each: Findings) -> Iterator[str]:
    if each.experiment.tune is not None:
        name, cells = each.experiment.tune.name, each.experiment.cells()
        yield rates.chosen(each.tunings)
        yield rates.others(name, cells, each.final, each.passed_over)


def _missing(each: Findings) -> str:
    cells = each.experiment.cells()
    missing = not_run(cells, each.records)
    only_tuned = [cell for cell in not_run(cells, each.final) if cell_key(cell) not in {cell_key(c) for c in missing}]
    lines = []
    for cells_of, words in ((missing, "Not run"), (only_tuned, "Run for tuning only")):
        if cells_of:
            lines += [f"**{words}** ({len(cells_of)} of {len(cells)} cells):", ""]
            lines += [f"- {label(cell)}" for cell in cells_of] + [""]
    return "\n".join(lines).strip()
