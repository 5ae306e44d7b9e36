"""How far decoupled training is from the other modes, over tokens and sizes of the model, in all experiments. Pure.

One experiment asks about one length and one size. A gap is read together with the tokens per parameter that the model
has seen: published budgets are near 20 (Streaming DiLoCo, Chinchilla), and early in a run every mode that averages is
behind.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import correlation

from ops.lab import plots, published
from ops.lab.cells import cell_key, label
from ops.lab.chapter import Findings
from ops.lab.comparisons import Finding
from ops.lab.markdown import anchor, count, gap, percent, points_per_tenfold, table
from ops.lab.records import Record
from ops.lab.results import Section
from ops.lab.settings import LANGUAGE, Mode
from ops.lab.statistics import Interval
from ops.lab.trends import plane, trend

#: Parts of a run at which gaps are shown.
SHARES = (1 / 6, 1 / 3, 1 / 2, 2 / 3, 5 / 6, 1.0)

_NAMES: Mapping[Mode, str] = {
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
        ours: Of our language models, to which published ones can be compared.
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
    ours: bool = True

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
    """Returns every comparison of decoupled training with another mode that has pairs: by baseline, islands, size.

    Where experiments share pairs of runs, the one with the most seeds stands for all of them.
    """
    most_first = sorted((each for findings in experiments for each in _gaps(findings)), key=lambda gap: -len(gap.pairs))
    found: list[Gap] = []
    for each in most_first:
        if all(each.pairs.isdisjoint(other.pairs) for other in found):
            found.append(each)
    modes = list(_NAMES)
    return tuple(
        sorted(found, key=lambda each: (modes.index(each.baseline), each.islands, each.parameters, each.tokens))
    )


def _gaps(findings: Findings) -> Iterator[Gap]:
    for finding in findings.claims:
        if finding.interval is None:
            continue
        candidate, baseline = (_runs(findings, finding, side) for side in (0, 1))
        if not candidate or not baseline:
            continue
        first, other = candidate[min(candidate)], baseline[min(baseline)]
        others = [name for name in finding.group if name != "islands"]
        if first.settings.get("mode") != Mode.DECOUPLED or other.settings.get("mode") not in list(_NAMES):
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
            ours=_ours(first),
            pairs=frozenset((candidate[seed].key, baseline[seed].key) for seed in candidate.keys() & baseline.keys()),
        )


def _optimizer(candidate: Record, baseline: Record) -> str:
    """The inner optimizer by name, with its constants where they are not the default ones on either side."""
    if not _ours(candidate):
        return str(candidate.settings.get("task.optimizer", "the task's own"))
    words = [str(candidate.settings.get("task.optimizer", "adamw"))]
    for constant in ("b2", "momentum"):
        changed = [each.settings.get(f"task.{constant}") for each in (candidate, baseline)]
        if changed != [None, None]:
            ours, other = (f"the default {constant}" if value is None else f"{constant} {value}" for value in changed)
            words.append(ours if ours == other else f"{ours} against {other}")
    return ", ".join(words)


def _ours(run: Record) -> bool:
    return str(run.settings.get("task", LANGUAGE)) == LANGUAGE


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
    points = [(n, loss) for n, _, loss in run.curve if n > 0 and math.isfinite(loss)]
    for (n0, loss0), (n1, loss1) in itertools.pairwise(points):
        if n0 <= tokens <= n1:
            part = math.log(tokens / n0) / math.log(n1 / n0)
            return loss0 + part * (loss1 - loss0)
    # Islands end within a few steps of each other, and evaluate at the first boundary after a share of the tokens.
    nearest = min(points, key=lambda point: abs(point[0] - tokens), default=None)
    return nearest[1] if nearest is not None and abs(nearest[0] / tokens - 1) < 0.02 else None


# --- what the page says -------------------------------------------------------------------------------------------


def sections(experiments: Sequence[Findings]) -> tuple[Section, ...]:
    """Returns the part of the page about all gaps, with its plot; none if there are none."""
    found = gaps(experiments)
    if not found:
        return ()
    plot = {"gaps.svg": lambda: _plot(found)}
    return (
        Section(title="Gaps over tokens and size", body=lambda folder: _body(found, f"{folder}/gaps.svg"), plots=plot),
    )


def _body(found: Sequence[Gap], file: str) -> str:
    parts = [
        "Losses of decoupled training against those of the other modes, in all experiments that compare them: on the "
        "way, from the curves (fewer sequences), and at the end. The learning rate decays over each run's own length, "
        "so a gap on the way is not that of a shorter run; and what is judged on the way is the model as it was merged "
        "last, up to H steps ago, beside data-parallel training's of the same step, so early gaps to that are told too "
        "large. At the end everything is merged. Published gaps to data-parallel training are those of runs "
        "with about 20 tokens per parameter. Texts are named by what their tokens are and by the beginning of a digest."
    ]
    for mode, name in _NAMES.items():
        ours = [each for each in found if each.baseline is mode]
        if ours:
            parts += [f"**To {name}**", _table(ours), *_trends(_usual(ours))]
        if mode is Mode.DATA_PARALLEL and any(each.ours for each in ours):
            parts += [_published()]
    return "\n\n".join([*parts, f"![gaps over tokens per parameter]({file})"])


def _table(found: Sequence[Gap]) -> str:
    rows = []
    for each in found:
        way = {round(len(SHARES) * tokens / each.tokens): difference for tokens, difference in each.course}
        rows.append(
            (
                f"[{each.experiment}]({anchor(each.experiment)}) {each.where}",
                str(each.islands),
                str(each.sync_interval),
                each.optimizer,
                each.text,
                count(each.parameters),
                f"{each.tokens_per_parameter:.3g}",
                f"{each.tokens_per_step:,}",
                *(percent(way[k], 1) if k in way else "" for k in range(1, len(SHARES))),
                gap(each.interval),
                str(each.interval.count),
                _followed(each),
            )
        )
    way_head = (">at 1/6 of the run", ">1/3", ">1/2", ">2/3", ">5/6")
    what = ("experiment", ">islands", ">H", "inner optimizer", "text")
    sizes = (">parameters", ">tokens per parameter", ">tokens per island and step")
    return table((*what, *sizes, *way_head, ">end", ">seeds", ">line through published gaps"), rows)


def _followed(each: Gap) -> str:
    comparable = each.ours and each.baseline is Mode.DATA_PARALLEL
    there = published.gap_at(each.parameters, each.islands) if comparable else None
    return "" if there is None else gap(there, digits=1)


def _published() -> str:
    sizes = published.DATA_PARALLEL
    slopes = [(islands, published.slope(islands)) for islands in published.DILOCO]
    told = "\n".join(
        f"- {islands} islands, published: {points_per_tenfold(each, 'parameters')}"
        for islands, each in slopes
        if each is not None
    )
    return (
        f"The last column follows published gaps, of models of {count(min(sizes))} to {count(max(sizes))} parameters, "
        "down to our sizes along a line over the logarithm of size, with the line's own 95 % interval. That is far "
        "from where they were measured: it says what size alone would make of them, and no more. They are from the "
        "paper on Streaming DiLoCo with H = 30, for two islands its DiLoCo, for four its Streaming DiLoCo with 4 bits; "
        "its losses have two decimals, which leaves "
        f"up to {100 * published.ROUNDING:.1f} points in a gap beside that interval.\n\n{told}"
    )


def _usual(found: Sequence[Gap]) -> list[Gap]:
    """Those with the H and the optimizer that most of them have: slopes over sizes are of these, since the others have
    slopes of their own."""
    (interval, optimizer), _ = Counter((each.sync_interval, each.optimizer) for each in found).most_common(1)[0]
    return [each for each in found if (each.sync_interval, each.optimizer) == (interval, optimizer)]


def _trends(found: Sequence[Gap]) -> list[str]:
    """Slopes over both sizes, with a point for each experiment, how much the two say the same, and what is left of the
    second where the first does not change."""
    lines = []
    for islands in sorted({each.islands for each in found}):
        ours = [each for each in found if each.islands == islands]
        parameters: list[float] = [each.parameters for each in ours]
        seen = [each.tokens_per_parameter for each in ours]
        if min(len(set(parameters)), len(set(seen))) < 3:
            continue
        means = [each.interval.mean for each in ours]
        alike = correlation([math.log(size) for size in parameters], [math.log(size) for size in seen])
        of_them = f"{islands} islands, {len(ours)} experiments with H = {ours[0].sync_interval} and {ours[0].optimizer}"
        lines += [
            f"- {of_them}: {points_per_tenfold(trend(sizes, means), word)}"
            for word, sizes in (("parameters", parameters), ("tokens per parameter", seen))
        ]
        lines += [
            f"- {islands} islands: parameters and tokens per parameter correlate at {alike:+.2f} (logarithms), and "
            "experiments differ in more than these, so neither slope stands for its size alone"
        ]
        lines += _together(islands, parameters, seen, means)
        lines += _within(islands, ours)
    return ["\n".join(lines)] if lines else []


def _together(islands: int, parameters: Sequence[float], seen: Sequence[float], means: Sequence[float]) -> list[str]:
    """Both slopes at once: what one of the sizes does while the other stays what it is."""
    try:
        slopes = plane(parameters, seen, means)
    except ValueError:
        return []  # one of the sizes follows from the other
    words = ("parameters with as many tokens for each", "tokens per parameter with as many parameters")
    return [
        f"- {islands} islands, both at once: {points_per_tenfold(slope, word)}"
        for slope, word in zip(slopes, words, strict=True)
        if math.isfinite(slope.half_width)
    ]


def _within(islands: int, ours: Sequence[Gap]) -> list[str]:
    """The slope over tokens between experiments with the very same model: what else they differ in is how long they
    train, and on how many tokens at a time."""
    sizes = Counter(each.parameters for each in ours)
    again = [each for each in ours if sizes[each.parameters] > 1]
    seen = [each.tokens_per_parameter for each in again]
    models = [each.parameters for each in again]
    if len(again) < 3 or len(set(zip(models, seen, strict=True))) == len(set(models)):
        return []
    slope = trend(seen, [each.interval.mean for each in again], models)
    word = "tokens per parameter between experiments with the same model"
    return [f"- {islands} islands, {len(again)} experiments: {points_per_tenfold(slope, word)}"]


def _plot(found: Sequence[Gap]) -> bytes:
    panels: dict[str, dict[str, plots.GapLine]] = {}
    for each in found:
        lines = panels.setdefault(f"to {_NAMES[each.baseline]}, {each.islands} islands", {})
        lines[each.name] = plots.GapLine(
            way=[(n / each.parameters, difference) for n, difference in each.course if n < each.tokens],
            end=(each.tokens_per_parameter, each.interval),
        )
    return plots.gap_against_tokens(panels)
