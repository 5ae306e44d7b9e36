"""The part of the page about the gaps of decoupled training, with its plot: what :mod:`ops.lab.gaps` found. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from statistics import correlation

from ops.lab import plots, published
from ops.lab.chapter import Findings
from ops.lab.gaps import NAMES, SHARES, Gap, gaps
from ops.lab.markdown import anchor, count, gap, percent, points_per_tenfold, table
from ops.lab.results import Section
from ops.lab.settings import Mode
from ops.lab.trends import plane, trend


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
    for mode, name in NAMES.items():
        ours = [each for each in found if each.baseline is mode]
        if ours:
            parts += [
                f"**To {name}**",
                _table(ours),
                *_trends(_usual([each for each in ours if each.of_language_model])),
            ]
        if mode is Mode.DATA_PARALLEL and any(each.of_language_model for each in ours):
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
    comparable = each.of_language_model and each.baseline is Mode.DATA_PARALLEL
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
    found = [each for each in found if each.of_language_model]  # whose sizes mean the same
    kinds = Counter((each.sync_interval, each.optimizer) for each in found)
    usual = max(kinds, key=lambda kind: kinds[kind], default=None)
    return [each for each in found if (each.sync_interval, each.optimizer) == usual]


def _trends(found: Sequence[Gap]) -> list[str]:
    """Slopes over both sizes, with a point for each comparison, how much the two say the same, and what is left of the
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
        of_them = f"{islands} islands, {len(ours)} comparisons with H = {ours[0].sync_interval} and {ours[0].optimizer}"
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
        lines = panels.setdefault(f"to {NAMES[each.baseline]}, {each.islands} islands", {})
        lines[each.name] = plots.GapLine(
            way=[(n / each.parameters, difference) for n, difference in each.course if n < each.tokens],
            end=(each.tokens_per_parameter, each.interval),
        )
    return plots.gap_against_tokens(panels)
