"""How far decoupled training is from the other modes, over tokens and sizes of the model, in all experiments. Pure.

One experiment asks about one length and one size. A gap is read together with the tokens per parameter that the model
has seen: published budgets are near 20 (Streaming DiLoCo, Chinchilla), and early in a run every mode that averages is
behind.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ops.lab.cells import cell_key, label
from ops.lab.chapter import Findings
from ops.lab.claims import Equal
from ops.lab.comparisons import Finding
from ops.lab.markdown import count
from ops.lab.records import Record
from ops.lab.settings import Mode, is_language
from ops.lab.statistics import Interval

#: Parts of a run at which gaps are shown.
SHARES = (1 / 6, 1 / 3, 1 / 2, 2 / 3, 5 / 6, 1.0)

#: The modes that decoupled training is held against, as the page calls them.
NAMES: Mapping[Mode, str] = {
    Mode.DATA_PARALLEL: "data-parallel training",
    Mode.DILOCO: "synchronous DiLoCo",
    Mode.STREAMING: "Streaming DiLoCo",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """Decoupled training against another mode: one comparison of one experiment.

    Attributes:
        experiment: Its name.
        where: What else tells it from others of the experiment; empty if nothing.
        baseline: The other mode.
        islands: Of both.
        sync_interval: H of the decoupled runs.
        optimizer: The inner one of both, as the task calls it, and what its runs changed of it.
        text: What its tokens are, and the beginning of its digest.
        parameters: Of the model.
        tokens: Of a whole run.
        tokens_per_step: Of one island.
        course: (tokens, mean gap over seeds) at ``SHARES`` of the run, from the curves; none where a seed has none.
        interval: Mean and interval of the last losses' differences, one for each seed.
        pairs: Keys of the two runs behind each of those.
        of_language_model: Whether it is one of ours, to which published ones can be compared.
    """

    experiment: str
    where: str
    baseline: Mode
    islands: int
    sync_interval: int
    optimizer: str
    text: str
    parameters: int
    tokens: int
    tokens_per_step: int
    course: tuple[tuple[float, float], ...]
    interval: Interval
    pairs: frozenset[tuple[str, str]]
    of_language_model: bool

    @property
    def tokens_per_parameter(self) -> float:
        """Of a whole run."""
        return self.tokens / self.parameters

    @property
    def name(self) -> str:
        """Of its line in a plot."""
        parts = (self.experiment, self.where, count(self.parameters), f"H = {self.sync_interval}", self.optimizer)
        return ", ".join(part for part in parts if part)


def gaps(experiments: Sequence[Findings]) -> tuple[Gap, ...]:
    """Returns every comparison of decoupled training with another mode at equal tokens: by baseline, islands, size.

    Where experiments share pairs of runs, the one with the most seeds stands for all of them.
    """
    most_first = sorted((each for findings in experiments for each in _gaps(findings)), key=lambda gap: -len(gap.pairs))
    found: list[Gap] = []
    for each in most_first:
        if all(each.pairs.isdisjoint(other.pairs) for other in found):
            found.append(each)
    modes = list(NAMES)
    return tuple(
        sorted(found, key=lambda each: (modes.index(each.baseline), each.islands, each.parameters, each.tokens))
    )


def _gaps(findings: Findings) -> Iterator[Gap]:
    for finding in findings.claims:
        if finding.interval is None or finding.comparison.equal is not Equal.TOKENS:
            continue  # in equal time the modes train unequal numbers of tokens, and the gap is mostly that
        candidate, baseline = (_runs(findings, finding, side) for side in (0, 1))
        if not candidate or not baseline:
            continue
        first, other = candidate[min(candidate)], baseline[min(baseline)]
        others = [name for name in finding.group if name != "islands"]
        if first.settings.get("mode") != Mode.DECOUPLED or other.settings.get("mode") not in list(NAMES):
            continue
        if other.settings["mode"] != Mode.DATA_PARALLEL and _interval(first) != _interval(other):
            continue  # another H is another question
        yield Gap(
            experiment=findings.experiment.name,
            where=label(finding.group, others) if others else "",
            baseline=Mode(other.settings["mode"]),
            islands=int(first.settings["islands"]),
            sync_interval=_interval(first),
            optimizer=_optimizer(first, other),
            text=_text(first),
            parameters=finding.parameters,
            tokens=first.tokens,
            tokens_per_step=_per_step(first),
            course=_course(candidate, baseline),
            interval=finding.interval,
            of_language_model=is_language(first.settings),
            pairs=frozenset((candidate[seed].key, baseline[seed].key) for seed in candidate.keys() & baseline.keys()),
        )


def _optimizer(candidate: Record, baseline: Record) -> str:
    """The inner optimizer by name, with its constants where they are not the default ones on either side."""
    if not is_language(candidate.settings):
        return str(candidate.settings.get("task.optimizer", "the task's own"))
    words = [str(candidate.settings.get("task.optimizer", "adamw"))]
    for constant in ("b2", "momentum"):
        changed = [each.settings.get(f"task.{constant}") for each in (candidate, baseline)]
        if changed != [None, None]:
            ours, other = (f"the default {constant}" if value is None else f"{constant} {value}" for value in changed)
            words.append(ours if ours == other else f"{ours} against {other}")
    return ", ".join(words)


def _text(run: Record) -> str:
    match run.bytes_per_token:
        case 1:
            tokens = "bytes"
        case 0:
            tokens = "the task's own"
        case _:
            tokens = f"pieces of {run.bytes_per_token:.1f} bytes"
    return f"{tokens} ({run.corpus[:4]})" if run.corpus else tokens


def _interval(run: Record) -> int:
    return int(run.settings["sync_interval"])


def _per_step(run: Record) -> int:
    """Returns the tokens of one step of one island, from what all of them trained within a step or two."""
    return round(run.tokens / (int(run.settings["steps"]) * int(run.settings["islands"])))


def _runs(findings: Findings, finding: Finding, side: int) -> dict[int, Record]:
    """Seed -> the run of one side of a comparison."""
    key = cell_key(finding.cells[side])
    return {run.seed: run for run in findings.final if cell_key(run.cell) == key and run.seed in finding.differences}


def _course(candidate: Mapping[int, Record], baseline: Mapping[int, Record]) -> tuple[tuple[float, float], ...]:
    seeds = sorted(candidate.keys() & baseline.keys())
    end = min(run.tokens for run in (*candidate.values(), *baseline.values()))
    course = []
    for share in SHARES:
        tokens = share * end
        pairs = [(_loss_at(candidate[seed], tokens), _loss_at(baseline[seed], tokens)) for seed in seeds]
        ratios = [a / b for a, b in pairs if a is not None and b is not None]
        if seeds and len(ratios) == len(seeds):
            course.append((tokens, math.fsum(ratios) / len(ratios) - 1))
    return tuple(course)


def _loss_at(run: Record, tokens: float) -> float | None:
    """The loss of a run's curve, linear in the logarithm of tokens between two points; None before the first."""
    points = [(n, loss) for n, _, loss in run.curve if n > 0 and 0 < loss < math.inf]
    for (n0, loss0), (n1, loss1) in itertools.pairwise(points):
        if n0 <= tokens <= n1:
            part = math.log(tokens / n0) / math.log(n1 / n0)
            return loss0 + part * (loss1 - loss0)
    # Islands end within a few steps of each other, and evaluate at the first boundary after a share of the tokens.
    nearest = min(points, key=lambda point: abs(point[0] - tokens), default=None)
    return nearest[1] if nearest is not None and abs(nearest[0] / tokens - 1) < 0.02 else None
