"""Records of laboratory runs that nobody ran, with losses that follow from their settings."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from types import SimpleNamespace

from ops.lab.claims import Comparison, comparison_of
from ops.lab.records import Record

SETTINGS = {"steps": 1500, "step_times_s": [1.0, 1.2], "task": "islands.language:task", "task.context": 128}

# The table of a ``[[compare]]``.
CLAIM = {
    "claim": "Decoupled is within 1 % of synchronous DiLoCo",
    "candidate": {"mode": "decoupled"},
    "baseline": {"mode": "diloco"},
    "by": ["islands"],
    "margin": 0.01,
    "kind": "not-worse",
    "ignore": ["task.learning_rate"],
    "published": 0.026,
    "source": "arXiv 0000.00000, table 1",
}

SEEDS = (0, 1, 2)


def record(loss=3.0, *, seed=0, stage="final", tokens=1_000_000, experiment="parity", **cell):
    """One record; a cell's field ``a__b`` is ``a.b``."""
    named = {name.replace("__", "."): value for name, value in cell.items()}
    return Record(
        experiment=experiment,
        stage=stage,
        cell=named,
        key=f"{stage}-{tokens}-{sorted(named.items())}-{seed}",
        seed=seed,
        loss=loss,
        loss_se=0.01,
        sequences=512,
        bytes_per_token=4.0,
        tokens=tokens,
        merged_tokens=tokens - 1000,
        virtual_s=1500.0,
        wall_s=60.0,
        train_s=45.0,
        rounds=480,
        parameters=10_000_000,
        curve=tuple((tokens * k // 5, 300.0 * k, loss * (5 / k) ** 0.1) for k in range(1, 6)),
        participation=0.9,
        staleness={"mean": 0.6, "p50": 0.5, "p90": 1.0, "max": 3.0},
        wasted={"stale": 500, "left": 500},
        staleness_histogram=((0.0, 10), (0.5, 50), (1.0, 30), (3.0, 1)),
        gantt=((0.0, 2.0, 2.5, 0, 4), (1.0, 3.5, 4.0, 1, 3), (4.0, 6.0, 6.5, 0, 2)),
        cosine=0.1,
        settings=SETTINGS,
        code="0.1.0",
        corpus="c0ffee",
        build={"jax": "0.10.2", "processor": "x86_64"},
    )


@dataclass(frozen=True, kw_only=True)
class FakeExperiment:
    """What the report asks an experiment for."""

    name: str = "parity"
    question: str = "Does it lose anything?"
    notes: str = "Smaller models, by a factor of 500."
    comparisons: tuple[Comparison, ...] = ()
    command: str = "atoll lab run parity"
    tune: object = field(default_factory=lambda: SimpleNamespace(name="task.learning_rate"))
    declared: tuple[dict, ...] = field(default_factory=tuple)

    def cells(self):
        return [dict(cell) for cell in self.declared]


def pairs(gap_share, *, seeds=SEEDS, base=3.0, spread=0.0005, **cell):
    """Records of both modes, of which the candidate is worse by gap_share, give or take ``spread``, for each seed."""
    rows = []
    for seed in seeds:
        baseline = base * (1 + 0.01 * seed)
        offset = spread * (seed - (len(seeds) - 1) / 2)
        rows.append(record(baseline, seed=seed, mode="diloco", **cell))
        rows.append(record(baseline * (1 + gap_share + offset), seed=seed, mode="decoupled", **cell))
    return rows


def experiment(**changes):
    """Both modes with 2, 8 and 64 islands and one claim on them, but for ``changes``."""
    declared = tuple({"mode": mode, "islands": m} for m in (2, 8, 64) for mode in ("diloco", "decoupled"))
    return FakeExperiment(**{"comparisons": (comparison_of(CLAIM),), "declared": declared, **changes})


def whole_experiment():
    """Records of ``experiment()``: three seeds with 2 islands and, of a larger model, with 8; tuning runs with 2."""
    finals = [
        replace(each, parameters=each.parameters * larger)
        for m, larger in ((2, 1), (8, 10))
        for each in pairs(0.002 * m, islands=m, task__learning_rate=0.002)
    ]
    tuning = [
        record(loss, stage="tune", tokens=200_000, mode=mode, islands=2, task__learning_rate=rate)
        for mode in ("diloco", "decoupled")
        for rate, loss in ((0.001, 3.3), (0.002, 3.2), (0.004, 3.4 if mode == "diloco" else 3.1))
    ]
    return [*finals, *tuning]
