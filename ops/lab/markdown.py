"""Tables and numbers as Markdown. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from ops.lab.statistics import Interval


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a table without the columns that are empty in every row. A title that begins with ``>`` is of numbers."""
    kept = [i for i in range(len(head)) if any(row[i] for row in rows)]
    titles = [head[i].removeprefix(">") for i in kept]
    rules = ["---:" if head[i].startswith(">") else "---" for i in kept]
    lines = [titles, rules, *([_escaped(row[i]) or "-" for i in kept] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _escaped(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


def anchor(heading: str) -> str:
    """Returns the link to a heading of the same page, as common renderers name it."""
    return "#" + re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def details(summary: str, body: str) -> str:
    """Returns text that is folded away until somebody opens it."""
    return f"<details><summary>{summary}</summary>\n\n{body}\n\n</details>"


def percent(share: float, digits: int = 2) -> str:
    """Returns a relative difference with its sign."""
    return f"{100 * share:+.{digits}f} %" if math.isfinite(share) else "-"


def share(part: float, whole: float) -> str:
    """Returns a part in percent of the whole; empty if there is no whole or no part."""
    return f"{100 * part / whole:.1f} %" if whole and part else ""


def gap(found: Interval | None, digits: int = 2) -> str:
    """Returns a relative difference with its 95 % interval."""
    if found is None:
        return "-"
    if not math.isfinite(found.half_width):
        return f"{percent(found.mean, digits)} (one seed)"
    if found.mean == found.half_width == 0:
        return "none: identical runs"
    return f"{percent(found.mean, digits)} ± {100 * found.half_width:.{digits}f} %"


def points_per_tenfold(slope: Interval, of: str) -> str:
    """Returns how a relative difference changes with a size, with the 95 % interval if there is one."""
    spread = f" ± {100 * slope.half_width:.2f}" if math.isfinite(slope.half_width) else ""
    return f"{100 * slope.mean:+.2f}{spread} percentage points per tenfold of {of}"


def count(number: float) -> str:
    """Returns a large count in three figures with a unit: 1.23 M."""
    for scale, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= 0.9995 * scale:
            return f"{number / scale:.3g} {unit}"
    return f"{number:.0f}"


def duration(seconds: float) -> str:
    """Returns a time in hours and minutes, in minutes, or in seconds of three figures."""
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60:02d} min"
