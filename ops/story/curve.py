"""The curve of a run: evaluations as lines of a file, a few points of a report, and text. Pure.

One line of ``evaluations.jsonl`` is one evaluation of one global model (:class:`Point`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Self, TypeVar

from ops.text import finite

T = TypeVar("T")

#: The curve, in the directory of a run, beside the event tape.
FILE = "evaluations.jsonl"
#: What a report has of a long curve.
REPORTED_POINTS = 20
SHOWN_POINTS = 4
#: The metric that is told first.
_LOSS = "loss"
_LESS, _MORE = "min", "max"


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One evaluation.

    Attributes:
        tokens: Tokens that the fleet had trained when the newest version in this model was made.
        versions: The version of each fragment.
        model: Digest of all its fragments' bytes.
        at: When the evaluation ended, in seconds since 1970.
        seconds: How long it took.
        metrics: Name -> number; None for what is not finite.
        better: Name -> ``max`` or ``min``, of the metrics of which that is known.
        stderr: Name -> standard error, of the metrics of which that is known.
        failed: Benchmark, or ``task.evaluate`` -> why there is no number of it.
    """

    tokens: int
    versions: tuple[int, ...]
    model: str
    at: float
    seconds: float
    metrics: Mapping[str, float | None]
    better: Mapping[str, str] = field(default_factory=dict)
    stderr: Mapping[str, float] = field(default_factory=dict)
    failed: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Returns the point, ready for ``json.dumps``."""
        return {name: each for name, each in finite(asdict(self)).items() if each or name != "stderr"}

    @classmethod
    def of(cls, line: Mapping[str, Any]) -> Self | None:
        """Reads a line of the file; None if it is not an evaluation."""
        try:
            point = cls(
                tokens=int(line["tokens"]),
                versions=tuple(int(each) for each in line["versions"]),
                model=str(line["model"]),
                at=float(line["at"]),
                seconds=float(line["seconds"]),
                metrics={str(k): None if v is None else float(v) for k, v in line["metrics"].items()},
                better={str(k): str(v) for k, v in line.get("better", {}).items()},
                stderr={str(k): float(v) for k, v in line.get("stderr", {}).items()},
                failed={str(k): str(v) for k, v in line.get("failed", {}).items()},
            )
        except (KeyError, TypeError, ValueError, AttributeError):
            return None
        return point


def points_of(lines: Iterable[Mapping[str, Any]]) -> list[Point]:
    """Returns the evaluations among the lines of a file, in order; other lines are skipped."""
    return [point for line in lines if (point := Point.of(line)) is not None]


def is_due(tokens: int, before: int | None, every: int) -> bool:
    """Returns True if a model is to be evaluated.

    Due are the first models beyond ``every`` tokens, twice as many, and so on: however long an evaluation takes, and
    wherever the process was restarted, the curve keeps to that grid.

    Args:
        tokens: Trained when the model was made.
        before: Tokens of the model evaluated last; None if none was.
        every: Tokens between two evaluations.
    """
    return before is None or tokens // every != before // every  # a new lineage may begin further back


def first_with(points: Iterable[Point], fragment: int, version: int) -> Point | None:
    """Returns the first evaluation of a model with this version of a fragment, or a later one."""
    return next((each for each in points if fragment < len(each.versions) and each.versions[fragment] >= version), None)


def sentence(point: Point) -> str:
    """Returns one line for people: tokens, metrics, and what failed."""
    rows = [" ".join(row) for row in table(point)]
    failed = "".join(f"; {name} failed: {why}" for name, why in point.failed.items())
    return f"evaluated at {point.tokens:,} tokens: {', '.join(rows)}{failed}"


def table(point: Point) -> list[tuple[str, str]]:
    """Returns each metric's name, and its value with its standard error; the loss first."""
    return [
        (name, figure(point.metrics[name]) + (f" ± {figure(point.stderr[name])}" if name in point.stderr else ""))
        for name in _ordered(point.metrics)
    ]


def summary(points: Sequence[Point]) -> dict[str, Any]:
    """Returns the curve's part of a report: count of points, some points with first and last, the best.

    Returns:
        ``count``, ``points`` (``tokens`` and ``metrics`` of at most :data:`REPORTED_POINTS`) and ``best`` (metric ->
        ``value`` and ``tokens``); an empty mapping if there is no point.
    """
    if not points:
        return {}
    return {
        "count": len(points),
        "points": [{"tokens": each.tokens, "metrics": dict(each.metrics)} for each in some(points, REPORTED_POINTS)],
        "best": {name: found for name in _names(points) if (found := _best(points, name)) is not None},
    }


def shown(summed: Mapping[str, Any]) -> list[str]:
    """Returns a line of text for each metric of a :func:`summary`: a few points, and the best."""
    lines = []
    for name in _ordered(summed["points"][0]["metrics"] | summed["points"][-1]["metrics"]):
        known = [(each["metrics"][name], each["tokens"]) for each in summed["points"] if _is_known(each, name)]
        if not known:
            continue
        text = " -> ".join(f"{figure(value)} at {tokens:,}" for value, tokens in some(known, SHOWN_POINTS))
        best = summed["best"].get(name)
        tail = f"; best {figure(best['value'])} at {best['tokens']:,}" if best is not None else ""
        lines.append(f"{name} {text} tokens{tail}")
    return lines


def some(items: Sequence[T], most: int) -> list[T]:
    """Returns at most ``most`` items, evenly spread, the first and the last among them."""
    if len(items) <= most:
        return list(items)
    return [items[round(k * (len(items) - 1) / (most - 1))] for k in range(most)]


def figure(value: float | None) -> str:
    """Returns a metric as people read it."""
    if value is None:
        return "no number"
    if value >= 1000 and value == int(value):  # a count
        return f"{value:,.0f}"
    return f"{value:.3f}" if not value or abs(value) >= 0.001 else f"{value:.3g}"


def _is_known(point: Mapping[str, Any], name: str) -> bool:
    return point["metrics"].get(name) is not None


def _best(points: Sequence[Point], name: str) -> dict[str, Any] | None:
    """Returns the best value of a metric and its tokens; None if better is not defined for it."""
    better = next((each.better[name] for each in reversed(points) if name in each.better), "")
    known = [(value, each.tokens) for each in points if (value := each.metrics.get(name)) is not None]
    if not known or better not in (_LESS, _MORE):
        return None
    value, tokens = (min if better == _LESS else max)(known, key=lambda each: each[0])
    return {"value": value, "tokens": tokens}


def _names(points: Sequence[Point]) -> list[str]:
    return _ordered({name: None for each in points for name in each.metrics})


def _ordered(metrics: Mapping[str, Any]) -> list[str]:
    """Names of metrics, the loss first."""
    return sorted(metrics, key=lambda name: name != _LOSS)
