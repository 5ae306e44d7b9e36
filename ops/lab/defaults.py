"""What the defaults rest on: comparisons of a default with something else, of all experiments, by setting. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from aggregator.config import AggregatorConfig
from ops.lab.cells import cell_key, scalar
from ops.lab.chapter import Findings
from ops.lab.comparisons import Finding, distinct
from ops.lab.markdown import anchor, gap, table
from ops.lab.results import Section
from ops.lab.settings import CellSettings, Mode, is_language
from ops.run.outer_defaults import OuterDefaults, suited_to

#: Settings of a run that an experiment may vary, and whose defaults it is asked to choose.
CHOSEN = (
    "outer_learning_rate",
    "outer_momentum",
    "merge",
    "keep",
    "staleness_exponent",
    "max_staleness",
    "presence_exponent",
    "quorum",
    "grace_factor",
    "codec",
)

OUTER = {each.name for each in fields(OuterDefaults)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One comparison of defaults with something else.

    Attributes:
        names: The settings in which both sides differ.
        default: Their defaults, and with which inner optimizer they are.
        instead: What was tried in place of the defaults.
        experiment: Where.
        finding: Default / other - 1.
    """

    names: tuple[str, ...]
    default: str
    instead: str
    experiment: str
    finding: Finding


def sections(experiments: Sequence[Findings]) -> tuple[Section, ...]:
    """Returns the section; none as long as no default was tried."""
    found = trials(experiments)
    return (Section(title="Defaults", body=lambda _: _body(found)),) if found else ()


def default_of(name: str, settings: Mapping[str, Any] | None = None) -> Any:
    """Returns the default of a setting in production; the laboratory's where production has none of that name.

    Args:
        name: One of :data:`CHOSEN`.
        settings: Of a run: some defaults follow from its inner optimizer.
    """
    for source in (suited_to(_optimizer_of(settings or {})), AggregatorConfig(), CellSettings()):
        value = getattr(source, name, None)
        if value is not None:
            return value
    raise AttributeError(name)


def _optimizer_of(settings: Mapping[str, Any]) -> str:
    return str(settings.get("task.optimizer", "adamw")) if is_language(settings) else ""


def trials(experiments: Sequence[Findings]) -> tuple[Trial, ...]:
    """Returns every comparison of decoupled runs whose candidate has the default where both sides differ.

    What was tuned for each side may differ as well.
    """
    found = []
    for each in experiments:
        settings = {cell_key(record.cell): record.settings for record in each.final}
        for finding in each.claims:
            if not finding.differences or len(finding.cells) != 2:
                continue
            ours, theirs = (settings.get(cell_key(cell), {}) for cell in finding.cells)
            if not ours.get("mode") == theirs.get("mode") == str(Mode.DECOUPLED):
                continue
            names_of_both = (ours.keys() | theirs.keys()) - {"seed"}
            differing = {name for name in names_of_both if ours.get(name) != theirs.get(name)}
            if each.experiment.tune is not None:
                differing -= {each.experiment.tune.name}  # the best for each side
            if not differing or not differing <= set(CHOSEN):
                continue
            names = tuple(name for name in CHOSEN if name in differing)
            # Rule, rate and momentum are one default: a candidate has all three of them or none.
            held = names if OUTER.isdisjoint(names) else (*names, *OUTER)
            if any(ours[name] != default_of(name, ours) for name in held):
                continue
            default = ", ".join(_told(name, ours[name]) for name in names)
            if any(ours[name] != default_of(name) for name in names):
                default += f" with {_optimizer_of(ours)}"
            instead = ", ".join(_told(name, theirs[name]) for name in names)
            found.append(
                Trial(names=names, default=default, instead=instead, experiment=each.experiment.name, finding=finding)
            )
    return tuple(found)


def _body(found: Sequence[Trial]) -> str:
    rows = []
    groups = {(trial.names, trial.default) for trial in found}
    for names, default in sorted(groups, key=lambda group: ([CHOSEN.index(name) for name in group[0]], group[1])):
        mine = [trial for trial in found if (trial.names, trial.default) == (names, default)]
        worst = max(mine, key=_mean)
        verdicts = Counter(str(each.verdict) for each in distinct(trial.finding for trial in mine))
        rows.append(
            (
                ", ".join(f"`{name}`" for name in names),
                default,
                "; ".join(dict.fromkeys(trial.instead for trial in mine)),
                f"{gap(worst.finding.interval)} ({worst.instead})",
                ", ".join(f"{number} {verdict}" for verdict, number in sorted(verdicts.items())),
                ", ".join(f"[{name}]({anchor(name)})" for name in dict.fromkeys(trial.experiment for trial in mine)),
            )
        )
    head = ("setting", "default", "tried instead", ">worst for the default (against)", "verdicts", "experiment")
    far = max(_mean(trial) for trial in found)
    highs = [trial.finding.interval.high for trial in found if trial.finding.interval is not None]
    reach = max((high for high in highs if math.isfinite(high)), default=0.0)
    single = sum(not math.isfinite(high) for high in highs)
    but = f" but those of {single} that have one seed" if single else ""
    return f"""\
Every comparison of decoupled runs that differ in these settings alone (and in a rate that was tuned for each side), and
whose candidate has the default. In the mean none of these defaults is more than {max(0.0, 100 * far):.2f} % behind, and
no interval{but} reaches beyond {100 * reach:+.2f} %.{_behind(found)} H, P and tau trade loss for bandwidth, and are not
among them.

{table(head, rows)}"""


def _behind(found: Sequence[Trial]) -> str:
    """Names the defaults that are behind something for the whole interval, however little."""
    told = []
    for trial in found:
        if trial.finding.interval is None or trial.finding.interval.low <= 0:
            continue
        names = ", ".join(f"`{name}`" for name in trial.names)
        where = f", {trial.finding.name}" if trial.finding.name not in ("", "all") else ""
        told.append(f"{names} ({gap(trial.finding.interval)} against {trial.instead}{where})")
    return f" Behind for the whole interval: {'; '.join(told)}." if told else ""


def _told(name: str, value: Any) -> str:
    return "all" if (name, value) == ("quorum", 0) else scalar(value)


def _mean(trial: Trial) -> float:
    assert trial.finding.interval is not None
    return trial.finding.interval.mean
