"""What the page says of tuned rates: which was chosen for what, and how far the choice matters. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from ops.lab.cells import Cell, CellKey, cell_key, grouped, label, scalar, varying
from ops.lab.markdown import count, gap, table
from ops.lab.records import Record
from ops.lab.statistics import interval
from ops.lab.tuning import Tuned, Tuning


def chosen(found: Sequence[Tuning]) -> str:
    """Returns a table of what tuning tried and found; empty if nothing was tuned yet."""
    if not found:
        return ""
    names = varying(dict(tuning.group) for tuning in found)
    rows = [
        (
            label(dict(tuning.group), names) if names else "",
            tuning.name,
            ", ".join(scalar(value) for value in tuning.search.tried),
            *_told(tuning.search.winner),
            count(tuning.tokens),
        )
        for tuning in found
    ]
    head = ("cells", "tuned", "tried", ">best", "interior", ">next to try", ">at tokens")
    return table(head, rows)


def _told(winner: Tuned | None) -> tuple[str, str, str]:
    if winner is None:
        return "not known yet", "", ""
    beyond = "" if winner.next_value is None else scalar(float(winner.next_value))
    return scalar(winner.best), "yes" if winner.interior else "**no**", beyond


def others(name: str, cells: Sequence[Cell], final: Sequence[Record], passed_over: Sequence[Record]) -> str:
    """Returns a table of final runs at other rates beside those at the one chosen, paired by seed; empty if none are.

    Args:
        name: Of the tuned setting.
        cells: Of the experiment, in order.
        final: Runs at the values chosen.
        passed_over: Runs of the same cells at other values.
    """
    best: dict[CellKey, dict[int, Record]] = {}
    for run in final:
        best.setdefault(cell_key(run.cell, without=[name]), {})[run.seed] = run
    names = [each for each in varying(cells) if each != name]
    rows = []
    for key, runs in grouped(passed_over, cells).items():
        cell = dict(key)
        beside = best.get(cell_key(cell, without=[name]), {})
        pairs = [(run, beside[run.seed]) for run in runs if run.seed in beside]
        pairs = [pair for pair in pairs if not any(each.diverged or each.loss <= 0 for each in pair)]
        if pairs:
            found = interval([run.loss / other.loss - 1 for run, other in pairs])
            values = (scalar(cell[name]), scalar(pairs[0][1].cell[name]))
            rows.append((label(cell, names) if names else "", name, *values, gap(found), str(len(pairs))))
    if not rows:
        return ""
    caption = (
        "Runs at rates that were the best until more was known, beside those at the one chosen now, seed by seed. "
        "Below 0 the other rate is better with these seeds: that is the luck of choosing, which is in no interval."
    )
    head = ("cells", "tuned", ">other", ">chosen", ">other against chosen", ">seeds")
    return f"{caption}\n\n{table(head, rows)}"
