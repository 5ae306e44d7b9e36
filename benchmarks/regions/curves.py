"""What the drill computes from its curves, and how it keeps and draws them."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

#: One point: ``s`` since the first step, ``loss`` held out, and whatever else a side counts.
Point = Mapping[str, Any]


def seconds_to(curve: Sequence[Point], loss: float) -> float | None:
    """Returns when a curve first falls to a loss, on the line between two points; None if it does not."""
    before: Point | None = None
    for point in curve:
        if point["loss"] <= loss:
            if before is None or not before["loss"] > point["loss"]:  # as where it was no number
                return float(point["s"])
            share = (before["loss"] - loss) / (before["loss"] - point["loss"])
            return float(before["s"] + share * (point["s"] - before["s"]))
        before = point
    return None


def keep(path: Path, lines: Iterable[Mapping[str, Any]]) -> None:
    """Writes JSON lines, compressed where the name ends in ``.gz``; the same lines give the same bytes."""
    text = "".join(json.dumps(line) + "\n" for line in lines).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(text, mtime=0) if path.suffix == ".gz" else text)


def draw(path: Path, curves: Mapping[str, Sequence[Point]], *, loss: float, title: str) -> None:
    """Draws held-out loss over seconds, on a logarithmic axis since the sides differ by so much, as SVG."""
    from ops.lab.report import COLOURS, drawing, svg

    with drawing((6.2, 3.6)) as (figure, axes):
        for i, (name, curve) in enumerate(curves.items()):
            xs, ys = [point["s"] for point in curve], [point["loss"] for point in curve]
            axes.plot(xs, ys, color=COLOURS[i % len(COLOURS)], linewidth=1.3, label=name)
        axes.axhline(loss, color="#777777", linewidth=0.8, linestyle=":")
        axes.set(xscale="log", xlabel="seconds since the first step", ylabel="held-out loss", title=title)
        axes.legend()
        path.write_bytes(svg(figure))
