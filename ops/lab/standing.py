"""Where an experiment stands: what was run, what is left, what it says so far. For people, and as JSON."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ops.lab import archive
from ops.lab.cells import label
from ops.lab.comparisons import Finding, findings
from ops.lab.experiment import Experiment
from ops.lab.markdown import duration, gap
from ops.lab.records import Stage, independent, newest
from ops.lab.schedule import Agenda, agenda, current, left_out


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """One experiment and its records.

    Attributes:
        experiment: What is asked.
        runs: Final ones with the file's settings; of those that are the same, one counts.
        tuning_runs: Likewise.
        spent_s: Processor time of all records, of whatever settings.
        left: What is due.
        others: Says which records do not count; empty if all do.
        found: What the claims have come to.
    """

    experiment: Experiment
    runs: int
    tuning_runs: int
    spent_s: float
    left: Agenda
    others: str
    found: tuple[Finding, ...]

    @property
    def _tuned(self) -> str:
        return "" if self.experiment.tune is None else self.experiment.tune.name

    def text(self) -> str:
        """Returns it as lines for people."""
        later = f", at least {self.left.later} after them" if self.left.later else ""
        lines = [
            f"{self.experiment.name}: {self.experiment.question}",
            f"  {self.runs} runs and {self.tuning_runs} tuning runs in {duration(self.spent_s)} of processor time; "
            f"{len(self.left.due)} due{later}",
        ]
        lines += [f"  {self.others}"] if self.others else []
        lines += [f"  {label(dict(group))}: {each.told(self._tuned)}" for group, each in self.left.tuned.items()]
        for finding in self.found:
            words = [f"{finding.verdict}:", finding.comparison.claim, f"[{finding.name}]"]
            told = [] if finding.interval is None else [gap(finding.interval)]
            lines.append(" ".join([" ", *words, "; ".join(filter(None, (*told, finding.reason)))]))
        return "\n".join(lines)

    def row(self) -> dict[str, Any]:
        """Returns it as plain JSON values; differences are relative, candidate / baseline - 1."""
        tuned = [
            {"cell": dict(group), "setting": self._tuned, "value": each.best, "interior": each.interior}
            for group, each in self.left.tuned.items()
        ]
        return {
            "experiment": self.experiment.name,
            "question": self.experiment.question,
            "runs": self.runs,
            "tuning_runs": self.tuning_runs,
            "spent_s": round(self.spent_s, 2),
            "due": len(self.left.due),
            "due_after_them": self.left.later,
            "left_out": self.others,
            "tuned": tuned,
            "claims": [_claim(finding) for finding in self.found],
        }


def stand(experiment: Experiment, directory: Path) -> Standing:
    """Returns where an experiment stands by the records in a directory.

    Raises:
        ConfigError: Its file holds what is no record of it.
        Unavailable: Its file cannot be read.
    """
    kept = newest(archive.read(archive.path_of(directory, experiment.name)))
    records = current(experiment, kept)
    finals = [record for record in records if record.stage is Stage.FINAL]
    return Standing(
        experiment=experiment,
        runs=len(independent(finals)),
        tuning_runs=len(independent(records)) - len(independent(finals)),
        spent_s=sum(record.spent_s for record in kept),
        left=agenda(experiment, records),
        others=left_out(experiment, kept, records),
        found=findings(experiment.comparisons, finals),
    )


def _claim(finding: Finding) -> dict[str, Any]:
    interval = finding.interval
    return {
        "claim": finding.comparison.claim,
        "where": dict(finding.group),
        "kind": str(finding.comparison.kind),
        "margin": finding.comparison.margin,
        "verdict": str(finding.verdict),
        "reason": finding.reason,
        "seeds": len(finding.differences),
        "difference": None if interval is None else interval.mean,
        "half_width": None if interval is None or not math.isfinite(interval.half_width) else interval.half_width,
    }
