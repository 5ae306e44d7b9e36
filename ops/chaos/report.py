"""The report of a chaos run: outcomes of faults, steps of islands, participation in versions.

An island is *out* from the moment at which a fault stops or kills it until it ends its next step; all other time it is
to step on, whatever happens around it. Its *period* is what a step takes it, by the median, before the first fault.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from statistics import fmean, median
from typing import Any

from aggregator.interface.events import Note
from aggregator.interface.leader_notes import (
    AggregatorStarted,
    BrokerBack,
    LeaseUnknown,
    MessageRefused,
    RunRecordFailed,
)
from aggregator.interface.notes import ContributionRefused, JoinRefused, RoundClosed, VersionNotDurable
from ops.chaos.recording import Happening, Recording, Spell
from ops.faults.kinds import ROGUES, FaultKind, Role, role_of
from ops.faults.plan import NATURES
from ops.processes.cluster import Change
from ops.story.marks import island_of
from ops.text import age, finite

Report = dict[str, Any]

#: What happens so long after a fault's end is no longer put down to it.
CONCERNS_S = 5.0
#: This many steps before the first fault make a period that can be trusted.
ENOUGH_STEPS = 10
#: A version with less of the islands that were there all the while is worth counting.
FULL_ENOUGH = 0.9

_KILLING = (FaultKind.KILL, FaultKind.OUTAGE, FaultKind.WIPE, FaultKind.STALE)

_NOTED_BY_KIND: dict[FaultKind, tuple[type[Note], ...]] = {
    FaultKind.DISK_FULL: (VersionNotDurable, RunRecordFailed),
    FaultKind.CUT_REDIS: (LeaseUnknown,),
}
_NOTED_BY_ROLE: dict[Role, type[Note]] = {Role.BROKER: BrokerBack, Role.AGGREGATOR: AggregatorStarted}


def chaos_report(recording: Recording) -> Report:
    """Returns the figures, ready for ``json.dumps``.

    Times of faults are in seconds since the beginning, when every island trained; what followed a fault, in seconds
    since it.
    """
    began_s, ended_s = recording.began_s, recording.ended_s
    faults = [outcome(each, recording) for each in recording.done()]
    report: Report = {
        "seconds": ended_s - began_s,
        "faults_by_kind": dict(Counter(each["kind"] for each in faults)),
        "faults": faults,
        "skipped": [
            {"at_s": each.at_s - began_s, "fault": str(each.fault), "why": each.skipped}
            for each in recording.happenings
            if each.skipped
        ],
        "healing": healing(faults),
        "stepping": stepping(recording),
        "participation": participation(recording),
    }
    rounded: Report = finite(report, digits=5)
    return rounded


# --- faults -----------------------------------------------------------------------------------------------------


def outcome(happening: Happening, recording: Recording) -> Report:
    """Returns an injected fault and its outcome, in seconds since the fault; None for anything unseen.

    * ``detected_s``: until somebody noticed: the supervisor a death, the aggregator an island that it missed or
      refused, or a full disk, or that its lease is unknown.
    * ``restarted_s``: until every process that died of it was started again.
    * ``healed_s``: until the first version with the struck island in it (a new life of it, if it was killed); until the
      first version under a new epoch, or after the fault's end, for aggregators; after it for brokers; until status was
      whole again for Redis.
    """
    at_s, fault = happening.at_s, happening.fault
    restarted_s = _restarted(happening, recording)
    moments = {
        "detected_s": _detected(happening, recording),
        "restarted_s": restarted_s,
        "healed_s": _healed(happening, recording, restarted_s),
    }
    return {
        "number": happening.number,
        "at_s": at_s - recording.began_s,
        "kind": str(fault.kind),
        "processes": list(happening.processes),
        "for_s": fault.for_s if happening.ended_s is None else happening.ended_s - at_s,
        "options": dict(fault.options),
        **{name: None if moment is None else moment - at_s for name, moment in moments.items()},
    }


def _detected(happening: Happening, recording: Recording) -> float | None:
    if happening.fault.kind in _KILLING:
        return _first(_changes(recording, Change.DIED, *happening.processes), happening.at_s)
    until_s = (happening.ended_s or happening.at_s) + CONCERNS_S
    noticed = (note.at_s for note in recording.notes if note.at_s < until_s and _shows(note.note, happening))
    return _first(noticed, happening.at_s)


def _shows(note: Note, happening: Happening) -> bool:
    """Returns True if a decision of an aggregator shows that it noticed a fault."""
    kind, struck = happening.fault.kind, happening.processes
    if kind in ROGUES:
        return isinstance(note, ContributionRefused | MessageRefused | JoinRefused) and island_of(note) in struck
    if kind in _NOTED_BY_KIND:
        return isinstance(note, _NOTED_BY_KIND[kind])
    role = role_of(struck[0])
    if role in _NOTED_BY_ROLE:
        return isinstance(note, _NOTED_BY_ROLE[role])
    return isinstance(note, RoundClosed) and not set(struck).isdisjoint(note.missing)


def _restarted(happening: Happening, recording: Recording) -> float | None:
    """Returns the time at which every process that the fault killed was started again."""
    if happening.fault.kind not in _KILLING:
        return None
    return _last(_first(_changes(recording, Change.STARTED, each), happening.at_s) for each in happening.processes)


def _changes(recording: Recording, change: Change, *processes: str) -> Iterator[float]:
    """Yields the times at which processes went through a change."""
    return (at_s for at_s, event in recording.changes if event.change is change and event.process in processes)


def _healed(happening: Happening, recording: Recording, restarted_s: float | None) -> float | None:
    kind, versions = happening.fault.kind, recording.versions
    over_s = restarted_s if kind in _KILLING else happening.ended_s
    if over_s is None or kind in ROGUES:
        return None  # a rogue is not to be healed but kept out
    roles = set(map(role_of, happening.processes))
    before = [version for version in versions if version.at_s < happening.at_s]
    if roles == {Role.REDIS}:
        return _first((at_s for at_s, whole in recording.redis if whole), over_s)
    if Role.AGGREGATOR in roles:
        epoch = max((version.epoch for version in before), default=0)
        return _first((v.at_s for v in versions if v.epoch > epoch or v.at_s >= over_s), happening.at_s)
    if Role.BROKER in roles:
        return _first((version.at_s for version in versions), over_s)

    def with_island(island: str) -> float | None:
        lives = (each["incarnation"] for v in before for each in v.contributions if each["island_id"] == island)
        last_life = max(lives, default=0) if kind is FaultKind.KILL else 0
        return _first((v.at_s for v in versions if v.has(island, above_incarnation=last_life)), over_s)

    return _last(map(with_island, happening.processes))


def _first(moments: Iterable[float], from_s: float) -> float | None:
    return next((moment for moment in moments if moment >= from_s), None)


def _last(moments: Iterable[float | None]) -> float | None:
    """Returns the last of these times; None if one is not known."""
    known = list(moments)
    return None if None in known else max(filter(None, known), default=None)


def healing(faults: Iterable[Report]) -> dict[str, Report]:
    """Returns kind and role -> how many, and the median and the worst of the times to notice and to heal."""
    groups: dict[str, list[Report]] = defaultdict(list)
    for each in faults:
        chosen = NATURES[FaultKind(each["kind"])].befalls
        groups[f"{each['kind']} {role_of(each['processes'][0])}" if chosen else each["kind"]].append(each)
    return {
        name: {
            "count": len(group),
            "detected_s": _spread(each["detected_s"] for each in group),
            "healed_s": _spread(each["healed_s"] for each in group),
            "not_healed": sum(each["healed_s"] is None and each["kind"] not in ROGUES for each in group),
        }
        for name, group in sorted(groups.items())
    }


def _spread(values: Iterable[float | None]) -> dict[str, float] | None:
    known = [value for value in values if value is not None]
    return {"median": median(known), "worst": max(known)} if known else None


# --- steps ------------------------------------------------------------------------------------------------------


def stepping(recording: Recording) -> Report:
    """Returns how well live islands stepped on: their steps, against those expected without faults.

    The longest stall is a gap between two steps, less the period. The longest before the first fault is what this
    machine does to its processes by itself.
    """
    began_s, ended_s = recording.began_s, recording.ended_s
    done = usual = before_s = 0.0
    longest: tuple[float, float, str] | None = None  # length, when it began, whose
    for island in recording.islands:
        period = period_s(recording, island)
        if period is None:
            continue
        steps = [step.at_s for step in recording.steps.get(island, [])]
        before_s = max(before_s, longest_stall(steps, (began_s, recording.first_fault_s), period)[0])
        for spell in between(out_spells(recording, island), began_s, ended_s):
            some, all_ = steps_in(steps, spell, period)
            done, usual = done + some, usual + all_
            stall_s, at_s = longest_stall(steps, spell, period)
            if longest is None or stall_s > longest[0]:
                longest = stall_s, at_s, island
    worst = None
    if longest is not None:
        stall_s, at_s, island = longest
        worst = {"island": island, "at_s": at_s - began_s, "stall_s": stall_s}
    return {
        "goodput": done / usual if usual else None,
        "steps": done,
        "usual_steps": usual,
        "longest_stall": worst,
        "longest_stall_before_s": before_s,
    }


def out_spells(recording: Recording, island: str) -> list[Spell]:
    """Returns the spells in which an island was stopped or dead, up to its next step."""
    steps = recording.steps.get(island, [])

    def next_step(at_s: float, not_by: int | None = None) -> float:
        return next((step.at_s for step in steps if step.at_s >= at_s and step.pid != not_by), recording.ended_s)

    def next_life(at_s: float) -> float:
        return next_step(at_s, next((step.pid for step in reversed(steps) if step.at_s <= at_s), None))

    spells = []
    for happening in recording.done():
        if island in happening.processes and happening.fault.kind is FaultKind.STOP:
            over_s = recording.ended_s if happening.ended_s is None else happening.ended_s
            spells.append((happening.at_s, next_step(over_s)))
        elif island in happening.processes and happening.fault.kind is FaultKind.KILL:
            spells.append((happening.at_s, next_life(happening.at_s)))
    spells += [(at_s, next_life(at_s)) for at_s in _changes(recording, Change.DIED, island)]  # unordered, too
    return merged(spells)


def merged(spells: Iterable[Spell]) -> list[Spell]:
    """Returns spells in order, those that touch as one."""
    result: list[Spell] = []
    for from_s, to_s in sorted(spells):
        if result and from_s <= result[-1][1]:
            result[-1] = (result[-1][0], max(to_s, result[-1][1]))
        else:
            result.append((from_s, to_s))
    return result


def between(spells: Sequence[Spell], from_s: float, to_s: float) -> Iterator[Spell]:
    """Yields what lies between the spells, from ``from_s`` to ``to_s``."""
    for a, b in spells:
        if a > from_s:
            yield from_s, min(a, to_s)
        from_s = max(from_s, b)
        if from_s >= to_s:
            return
    yield from_s, to_s


def period_s(recording: Recording, island: str) -> float | None:
    """Returns an island's seconds per step before the first fault; None after too few steps."""
    steps = [step.at_s for step in recording.steps.get(island, [])]
    calm = _within(steps, (recording.began_s, recording.first_fault_s))
    return median(b - a for a, b in pairwise(calm)) if len(calm) > ENOUGH_STEPS else None


def steps_in(steps: Sequence[float], spell: Spell, period: float) -> tuple[float, float]:
    """Returns the steps run in a spell, the one at its end in part, and as many as its length would hold.

    The length is measured from the first step's end on: a spell begins with one, but for the first of all.
    """
    ends = _within(steps, spell)
    if not ends:
        whole = (spell[1] - spell[0]) / period
        return (0.0, whole) if whole > 1 else (0.0, 0.0)  # too short to hold a step: nothing can be said
    done = len(ends) - 1 + min(1.0, (spell[1] - ends[-1]) / period)
    return done, (spell[1] - ends[0]) / period


def longest_stall(steps: Sequence[float], spell: Spell, period: float) -> tuple[float, float]:
    """Returns the length and the beginning of the longest stall within a spell, its open end included."""
    moments = _within(steps, spell) or (spell[0],)
    gap_s, at_s = max((b - a, a) for a, b in pairwise([*moments, spell[1]]))
    return max(0.0, gap_s - period), at_s


def _within(steps: Sequence[float], spell: Spell) -> Sequence[float]:
    return steps[bisect_left(steps, spell[0]) : bisect_right(steps, spell[1])]


# --- participation ----------------------------------------------------------------------------------------------


def participation(recording: Recording) -> Report:
    """Returns how many of the islands live for a whole round are in its version, over all rounds.

    An island is not live while a fault lasts on it, and while it is out.
    """
    shares: list[float] = []
    away = {island: [*_faults_of(recording, island), *out_spells(recording, island)] for island in recording.islands}
    for seen in recording.rounds:
        if recording.began_s <= seen.opened_s <= seen.committed_s <= recording.ended_s:
            live = {
                island
                for island, spells in away.items()
                if not any(from_s <= seen.committed_s and to_s >= seen.opened_s for from_s, to_s in spells)
            }
            if live:
                shares.append(len(seen.islands & live) / len(live))
    return {
        "mean": fmean(shares) if shares else None,
        "worst": min(shares, default=None),
        "versions": len(shares),
        "at_least_90_percent": sum(share >= FULL_ENOUGH for share in shares),
    }


def _faults_of(recording: Recording, island: str) -> list[Spell]:
    return [
        (each.at_s, recording.ended_s if each.ended_s is None else each.ended_s)
        for each in recording.done()
        if island in each.processes
    ]


# --- text -------------------------------------------------------------------------------------------------------


def render(report: Mapping[str, Any]) -> str:
    """Returns the chaos part of a report as text for people."""
    steps, joined = report["stepping"], report["participation"]
    count = sum(report["faults_by_kind"].values())
    kinds = ", ".join(f"{n} {kind}" for kind, n in report["faults_by_kind"].items())
    lines = [f"  {count} faults in {age(report['seconds'])}: {kinds or 'none'}"]
    if report["skipped"]:
        lines.append(f"  {len(report['skipped'])} could not be done: {report['skipped'][0]['why']}")
    if steps["goodput"] is not None:
        figures = f"{steps['steps']:,.0f} of {steps['usual_steps']:,.0f} without faults ({steps['goodput']:.2%})"
        lines.append(f"  steps of live islands  {figures}")
    if (worst := steps["longest_stall"]) is not None:
        whose = f"{1000 * worst['stall_s']:.0f} ms beyond a step, {worst['island']} at {worst['at_s']:.1f} s"
        lines.append(
            f"  longest stall          {whose}; before the first fault {1000 * steps['longest_stall_before_s']:.0f} ms"
        )
    if joined["mean"] is not None:
        lines.append(
            f"  participation          {joined['mean']:.1%} of the islands that were live for the whole round, "
            f"at least 90 % in {joined['at_least_90_percent']} of {joined['versions']} versions"
        )
    if groups := report["healing"]:
        width = max(len("fault"), *map(len, groups))
        lines += ["", f"  {'fault':{width}}  count  {'noticed':>16}  {'healed':>16}  not healed"]
        for name, each in groups.items():
            noticed, healed = _pair(each["detected_s"]), _pair(each["healed_s"])
            lines.append(f"  {name:{width}}  {each['count']:>5}  {noticed:>16}  {healed:>16}  {each['not_healed']:>10}")
        lines.append("  times in seconds: median, worst")
    return "\n".join(lines)


def _pair(spread: Mapping[str, float] | None) -> str:
    return "-" if spread is None else f"{spread['median']:.2f}, {spread['worst']:.2f}"
