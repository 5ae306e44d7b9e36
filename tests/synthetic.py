"""Records of laboratory runs that nobody ran, with losses that follow from their settings."""

from __future__ import annotations

from pathlib import Path

from ops.lab import report
from ops.lab.records import Record
from ops.plans.experiment import Experiment, comparison_of

SETTINGS = {"steps": 1500, "islands": 2, "step_times_s": [1.0, 1.2], "task": "islands.language:task"}

# The table of a ``[[compare]]``.
CLAIM = {
    "claim": "Decoupled is within 1 % of synchronous DiLoCo",
    "candidate": {"mode": "decoupled"},
    "baseline": {"mode": "diloco"},
    "margin": 0.01,
    "kind": "not-worse",
    "ignore": ["task.learning_rate"],
    "published": 0.026,
    "source": "arXiv 0000.00000, table 1",
}

SEEDS = (0, 1, 2)


def record(loss=3.0, *, seed=0, tokens=1_000_000, experiment="parity", **cell):
    """One record; a cell's field ``a__b`` is ``a.b``."""
    named = {name.replace("__", "."): value for name, value in cell.items()}
    return Record(
        experiment=experiment,
        cell=named,
        key=f"{tokens}-{sorted(named.items())}-{seed}",
        seed=seed,
        loss=loss,
        tokens=tokens,
        virtual_s=1500.0,
        wall_s=60.0,
        curve=tuple((tokens * k // 5, 300.0 * k, loss * (5 / k) ** 0.1) for k in range(1, 6)),
        settings=SETTINGS,
        code="0.1.0",
        corpus="c0ffee",
    )


def pairs(gap_share, *, seeds=SEEDS, base=3.0, spread=0.0005, **cell):
    """Records of both modes, of which the candidate is worse by gap_share, give or take ``spread``, for each seed."""
    rows = []
    for seed in seeds:
        baseline = base * (1 + 0.01 * seed)
        offset = spread * (seed - (len(seeds) - 1) / 2)
        rows.append(record(baseline, seed=seed, mode="diloco", **cell))
        rows.append(record(baseline * (1 + gap_share + offset), seed=seed, mode="decoupled", **cell))
    return rows


def chapter(records, *claims):
    """The chapter of an experiment whose cells are those of the records."""
    cells = []
    for each in records:
        if each.cell not in cells:
            cells.append(each.cell)
    experiment = Experiment(
        name="parity",
        path=Path("mine/parity.toml"),
        question="Does it lose anything?",
        notes="",
        seeds=3,
        first_seed=0,
        budget_minutes=1.0,
        base={},
        grids=tuple({name: (value,) for name, value in cell.items()} for cell in cells),
        comparisons=tuple(comparison_of(claim) for claim in claims or (CLAIM,)),
    )
    results = [{r.seed: r for r in records if r.cell == cell} for cell in cells]
    return report.Chapter(experiment=experiment, results=results)
