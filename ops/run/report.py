"""The final report of a run, from the aggregator's counts and two evaluations. Pure.

Where an aggregator left no counts, the report has what Redis had last, as a lower bound, or says that nothing is known:
no number stands for a missing file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from broker.wire.messages import Reason, recipe_line
from islands.tasks.task import LOSS
from ops.faults.invariants import balanced
from ops.story import curve
from ops.story.curve import Point, figure
from ops.story.directions import fleet_line
from ops.story.run_status import Status
from ops.text import age, size

Report = dict[str, Any]

#: Of one model: name of a metric -> ``value``, and which is ``better``, as ``evaluate`` prints it.
Metrics = Mapping[str, Mapping[str, Any]]

#: What an aggregator that never wrote a report has counted.
_NOTHING: Mapping[str, Any] = {
    "tokens": {"trained": None, "merged": None, "in_flight": None, "wasted": {}},
    "versions": {},
    "rounds": {},
    "participation": None,
    "staleness_mean": None,
    "agreement": None,
    "momentum_cosine": None,
    "islands": {},
    "phase": "unknown",
    "refusals": {},
    "troubles": [],
    "recipe": {},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """The facts of a run that only the supervisor knows.

    Attributes:
        run_id: The run's name.
        run_dir: Its directory.
        exit: The exit code that ``up`` is about to return.
        wall_s: Seconds from the start of ``up`` to the end of training.
        first_step_s: Seconds from the start of ``up`` to the first inner step seen; None if there was none.
        restarts: Process -> how often the supervisor restarted it; islands under their ids.
        note: Why the run ended, where it did not end by itself.
        loss_unit: Of the held-out loss; empty for a task of somebody's own.
        resume: The command that goes on with it; empty where there is nothing to go on with.
        export: The command that writes the model; empty where the model was evaluated and written.
        exported: The model's directory that ``from_pretrained`` loads; empty where there is none.
        as_seen: The aggregator left no counts; those given are :func:`last_seen`.
        undone: What was asked for beside training and not done, each in a sentence.
    """

    run_id: str
    run_dir: str
    exit: int
    wall_s: float
    first_step_s: float | None = None
    restarts: Mapping[str, int] = field(default_factory=dict)
    note: str = ""
    loss_unit: str = ""
    resume: str = ""
    export: str = ""
    exported: str = ""
    as_seen: bool = False
    undone: Sequence[str] = ()


def last_seen(status: Status) -> dict[str, Any] | None:
    """Returns an aggregator's counts as Redis had them last, in the form of its report, or None."""
    totals = status.totals
    if "trained_tokens" not in totals:
        return None
    same = ("rounds", "participation", "staleness_mean", "agreement", "momentum_cosine", "phase", "refusals")
    islands = {
        name: {
            "inner_steps": each.inner_step,
            "tokens": each.tokens,
            "sync_share": each.sync_share,
            "bytes_up": each.bytes_up,
            "bytes_down": each.bytes_down,
            "incarnations": each.incarnation,
        }
        for name, each in status.islands.items()
    }
    return {
        "tokens": {name: totals[f"{name}_tokens"] for name in _NOTHING["tokens"]},
        "versions": {p: each.version for p, each in status.fragments.items()},
        "islands": islands,
        **{name: totals[name] for name in (*same, "troubles", "recipe")},
    }


def build_report(
    counted: Mapping[str, Any] | None,
    facts: RunFacts,
    *,
    before: Metrics,
    after: Metrics,
    points: Sequence[Point] = (),
) -> Report:
    """Returns the report, ready for ``json.dumps``.

    Args:
        counted: What the aggregator wrote to its report file, or :func:`last_seen`; None if nothing is known.
        facts: What the supervisor saw.
        before: Held-out metrics of version 0; empty if it was not evaluated.
        after: The same of the newest model.
        points: Evaluations of the models in between.

    Returns:
        ``run``, ``loss``, ``metrics`` (the loss among them), ``evaluations`` (:func:`ops.story.curve.summary`),
        ``tokens``, ``counted`` (of these tokens: ``all``, ``at least``, or ``unknown``), ``versions``, ``rounds``,
        ``participation``, ``staleness_mean``, ``agreement``, ``momentum_cosine``, ``islands``, ``refusals``,
        ``restarts``, ``phase``, ``troubles`` (what was wrong at the end, and what was asked for and not done),
        ``recipe``, ``wall_s``, ``first_step_s``, ``exit``, ``note``, ``resume``, ``export``,
        ``exported``.
    """
    source = _NOTHING if counted is None else {**_NOTHING, **counted}
    tokens = {**_NOTHING["tokens"], **source["tokens"]}
    islands = {name: _island(name, each, facts.restarts) for name, each in sorted(source["islands"].items())}
    return {
        "run": {"id": facts.run_id, "dir": facts.run_dir},
        "loss": {"before": _value(before, LOSS), "after": _value(after, LOSS), "unit": facts.loss_unit},
        "metrics": {
            name: {"before": _value(before, name), "after": _value(after, name), "better": each["better"]}
            for name, each in {**before, **after}.items()
        },
        "evaluations": curve.summary(points),
        "tokens": {
            "trained": tokens["trained"],
            "merged": tokens["merged"],
            "in_flight": tokens["in_flight"],
            "wasted": dict(sorted(tokens["wasted"].items())),
        },
        "counted": "unknown" if counted is None else _counted(facts, islands, tokens["wasted"]),
        "versions": _by_number(source["versions"]),
        "rounds": _by_number(source["rounds"]),
        "participation": source["participation"],
        "staleness_mean": source["staleness_mean"],
        "agreement": source["agreement"],
        "momentum_cosine": source["momentum_cosine"],
        "islands": islands,
        "refusals": dict(sorted(source["refusals"].items())),
        "restarts": {name: n for name, n in sorted(facts.restarts.items()) if name not in islands},
        "phase": source["phase"],
        "troubles": [*source["troubles"], *facts.undone],
        "recipe": dict(source["recipe"]),
        "wall_s": round(facts.wall_s, 3),
        "first_step_s": None if facts.first_step_s is None else round(facts.first_step_s, 3),
        "exit": facts.exit,
        "note": facts.note,
        "resume": facts.resume,
        "export": facts.export,
        "exported": facts.exported,
    }


def _counted(facts: RunFacts, islands: Mapping[str, Mapping[str, Any]], wasted: Mapping[str, int]) -> str:
    """Returns whether the tokens are all: what a life trained after its last heartbeat dies with it."""
    killed = wasted.get(Reason.ISLAND_LOST) or any(each["restarts"] for each in islands.values())
    return "at least" if facts.as_seen or killed else "all"


def _value(metrics: Metrics, name: str) -> float | None:
    value = metrics.get(name, {}).get("value")
    return None if value is None else float(value)


def _island(name: str, counted: Mapping[str, Any], restarts: Mapping[str, int]) -> dict[str, Any]:
    """Returns an island's part; one not started by this supervisor counts restarts by incarnations."""
    return {
        "inner_steps": counted.get("inner_steps", 0),
        "tokens": counted.get("tokens", 0),
        "sync_share": counted.get("sync_share"),
        "bytes_up": counted.get("bytes_up", 0),
        "bytes_down": counted.get("bytes_down", 0),
        "restarts": restarts.get(name, max(0, counted.get("incarnations", 1) - 1)),
    }


def _by_number(table: Mapping[Any, Any]) -> dict[str, Any]:
    """JSON has text keys only; they still come in the order of their numbers."""
    return {str(key): table[key] for key in sorted(table, key=int)}


def is_balanced(report: Report) -> bool:
    """Says whether trained = merged + wasted + in flight, as far as these are known."""
    tokens = report["tokens"]
    trained, merged, in_flight = (tokens[name] for name in ("trained", "merged", "in_flight"))
    return trained is None or not balanced(trained, merged, tokens["wasted"].values(), in_flight)


def render(report: Report) -> str:
    """Returns the report as text for people."""
    head = f"run {report['run']['id']}: {report['note'] or 'finished'}, after {age(report['wall_s'])}"
    lines = [head, ""]
    lines += [f"  {label:14}{text}" for label, text in _summary(report)]
    if report["islands"]:
        lines += ["", *_island_table(report["islands"])]
    lines += ["", f"everything is in {report['run']['dir']}"]
    if report["export"] and report["versions"]:
        lines.append(f"its model: {report['export']}")
    if report["exported"]:
        lines.append(f"its model for other tools: from_pretrained({report['exported']!r})")
    if report["resume"]:
        also = ", and merge what is in flight" if report["tokens"]["in_flight"] else ""
        lines += [f"to go on with it{also}: {report['resume']}"]
    return "\n".join(lines)


def _summary(report: Report) -> list[tuple[str, str]]:
    versions = report["versions"].values()
    evaluated = report["evaluations"].get("count", 0) > 0
    rows = [
        *([] if report["export"] else _metrics(report["metrics"], report["loss"]["unit"], evaluated=evaluated)),
        *_curve(report["evaluations"]),
        ("tokens", _tokens(report["tokens"], report["counted"])),
    ]
    if not is_balanced(report):
        rows.append(("", "these do not add up: please report it, with the event tape"))
    if report["recipe"]:
        rows.append(("recipe", recipe_line(report["recipe"])))
    if versions:
        rows.append(("versions", f"{len(versions)} fragments at version {_span(versions)}"))
    if report["rounds"]:
        rounds = ", ".join(f"{count} with {n}" for n, count in reversed(report["rounds"].items()))
        rows.append(("rounds", f"{sum(report['rounds'].values())}: {rounds} contributors"))
    if report["participation"] is not None:
        stale = report["staleness_mean"]
        tail = "" if stale is None else f"; mean staleness {stale:.2f} versions"
        rows.append(("participation", f"{report['participation']:.0%} of the live islands in a version{tail}"))
    if fleet_line(report):
        rows.append(("directions", fleet_line(report)))
    for label in ("refusals", "restarts"):
        present = ", ".join(f"{name} {count}" for name, count in report[label].items() if count)
        if present:
            rows.append((label, present))
    rows += [("trouble", text) for text in report["troubles"]]
    if report["first_step_s"] is not None:
        rows.append(("first step", f"after {report['first_step_s']:.1f} s"))
    return rows


def _tokens(tokens: Mapping[str, Any], counted: str) -> str:
    if tokens["trained"] is None:
        return "not known: no count of them was left"
    wasted = sum(tokens["wasted"].values())
    causes = ", ".join(f"{cause} {count:,}" for cause, count in tokens["wasted"].items() if count)
    return (
        f"{'at least ' if counted == 'at least' else ''}{tokens['trained']:,} trained"
        f" = {tokens['merged']:,} merged{_part(tokens['merged'], tokens['trained'])}"
        f" + {wasted:,} wasted{f' ({causes})' if causes else ''} + {tokens['in_flight']:,} in flight"
    )


def _island_table(islands: Mapping[str, Mapping[str, Any]]) -> list[str]:
    width = max(len("island"), *map(len, islands))
    lines = [f"  {'island':{width}}  {'steps':>9}  {'tokens':>12}  {'sync':>8}  {'up':>9}  {'down':>9}  restarts"]
    for name, each in islands.items():
        share = "-" if each["sync_share"] is None else f"{each['sync_share']:.2%}"
        lines.append(
            f"  {name:{width}}  {each['inner_steps']:>9,}  {each['tokens']:>12,}  {share:>8}"
            f"  {size(each['bytes_up']):>9}  {size(each['bytes_down']):>9}  {each['restarts']:>8}"
        )
    return lines


def _metrics(metrics: Mapping[str, Mapping[str, Any]], unit: str, *, evaluated: bool) -> list[tuple[str, str]]:
    """Returns a row for each metric, the loss first; ``evaluated``: models in between were evaluated."""
    if not metrics:
        return [("held-out loss", "the last model was not evaluated" if evaluated else "not evaluated")]
    rows = []
    for name in sorted(metrics, key=lambda name: name != LOSS):
        before, after, better = (metrics[name][key] for key in ("before", "after", "better"))
        known = [figure(each) for each in (before, after) if each is not None] or ["no number"]
        text = " -> ".join(known) + (f" {unit}" if unit and name == LOSS else "") + _change(before, after, better)
        rows.append(("held-out loss" if name == LOSS else f"{name} ", text))
    return rows


def _curve(evaluations: Mapping[str, Any]) -> list[tuple[str, str]]:
    """A row for each metric that was evaluated more often than before and after."""
    if evaluations.get("count", 0) < 3:
        return []
    return [("curve" if n == 0 else "", text) for n, text in enumerate(curve.shown(evaluations))]


def _change(before: float | None, after: float | None, better: str) -> str:
    """Returns a change in per cent, for a loss, error or perplexity of at least 0, else in words."""
    if before is None or after is None or not better:
        return ""
    if better == "min" and before > 0 and after >= 0:
        return f" ({(after - before) / before:+.1%})"
    if after == before:
        return " (unchanged)"
    return " (better)" if (after < before) == (better == "min") else " (worse)"


def _part(part: int, whole: int) -> str:
    return f" ({part / whole:.1%})" if whole else ""


def _span(values: Any) -> str:
    low, high = min(values), max(values)
    return str(low) if low == high else f"{low} to {high}"
