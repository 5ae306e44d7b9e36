"""Whether training ever stood still: figures from the moments at which islands ended their steps. Pure.

An island is *out* from the moment at which a fault stops or kills it until it ends its next step; all other time it is
to step on, whatever happens around it. Its *period* is what a step takes it, by the median, before the first fault.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median

from ops.chaos.faults import Kind
from ops.chaos.records import Change, Happening, Recording, Step

#: So many steps before the first fault make a period that can be trusted; else it is the island's pace.
ENOUGH_STEPS = 10

Spell = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stall:
    """The longest time that an island ended no step while it should have: the gap, less its period."""

    island: str
    at_s: float
    gap_s: float
    stall_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Stepping:
    """How well islands stepped on.

    Attributes:
        goodput: Steps that live islands ran, of those that they would have run without faults.
        steps: What they ran while live.
        usual_steps: What they would have run in the same time.
        longest: The longest stall of any; None before there are steps.
        longest_before_s: The longest before the first fault: what this machine does to its processes by itself.
        by_island: Island -> (steps, usual steps, longest stall in seconds).
    """

    goodput: float | None
    steps: float
    usual_steps: float
    longest: Stall | None
    longest_before_s: float
    by_island: dict[str, tuple[float, float, float]]


def out_spells(recording: Recording, island: str) -> list[Spell]:
    """Returns when an island was stopped, or dead, and so long as it took to its next step."""
    steps = recording.steps.get(island, [])
    spells = []
    for happening in recording.done():
        if island in happening.processes and happening.fault.kind is Kind.STOP:
            ended_s = recording.ended_s if happening.ended_s is None else happening.ended_s
            spells.append((happening.at_s, _next_step(steps, ended_s, None, recording.ended_s)))
        elif island in happening.processes and happening.fault.kind is Kind.KILL:
            spells.append((happening.at_s, _next_life(steps, happening.at_s, recording.ended_s)))
    died = (c.at_s for c in recording.changes if c.process == island and c.change is Change.DIED)  # unordered, too
    spells += [(at_s, _next_life(steps, at_s, recording.ended_s)) for at_s in died]
    return merged(spells)


def _next_life(steps: Sequence[Step], at_s: float, end_s: float) -> float:
    before = bisect_right(steps, at_s, key=lambda step: step.at_s)
    return _next_step(steps, at_s, steps[before - 1].pid if before else None, end_s)


def _next_step(steps: Sequence[Step], at_s: float, not_pid: int | None, end_s: float) -> float:
    first = bisect_left(steps, at_s, key=lambda step: step.at_s)
    return next((step.at_s for step in steps[first:] if step.pid != not_pid), end_s)


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


def period_s(recording: Recording, island: str, first_fault_s: float) -> float | None:
    """Returns what a step took an island before the first fault; its pace if there were too few; None for neither."""
    calm = [s.at_s for s in recording.steps.get(island, []) if recording.began_s <= s.at_s < first_fault_s]
    if len(calm) > ENOUGH_STEPS:
        return median(b - a for a, b in pairwise(calm))
    return recording.pace_s.get(island) or None


def stepping(recording: Recording) -> Stepping:
    """Returns the figures of a whole run, from its beginning to its end."""
    first_fault_s = min((each.at_s for each in recording.done()), default=recording.ended_s)
    by_island: dict[str, tuple[float, float, float]] = {}
    longest: Stall | None = None
    longest_before_s = 0.0
    for island in recording.islands:
        period = period_s(recording, island, first_fault_s)
        if period is None:
            continue
        calm = longest_stall(recording.steps[island], (recording.began_s, first_fault_s), period, island)
        longest_before_s = max(longest_before_s, calm.stall_s)
        done = usual = worst_s = 0.0
        for spell in between(out_spells(recording, island), recording.began_s, recording.ended_s):
            some, all_ = steps_in(recording.steps[island], spell, period)
            done, usual = done + some, usual + all_
            stall = longest_stall(recording.steps[island], spell, period, island)
            worst_s = max(worst_s, stall.stall_s)
            longest = stall if longest is None or stall.stall_s > longest.stall_s else longest
        by_island[island] = done, usual, worst_s
    steps = sum(done for done, _, _ in by_island.values())
    usual_steps = sum(usual for _, usual, _ in by_island.values())
    goodput = steps / usual_steps if usual_steps else None
    return Stepping(
        goodput=goodput,
        steps=steps,
        usual_steps=usual_steps,
        longest=longest,
        longest_before_s=longest_before_s,
        by_island=by_island,
    )


def steps_in(steps: Sequence[Step], spell: Spell, period: float) -> tuple[float, float]:
    """Returns the steps that were run in a spell, the one at its end in part, and those that its length would hold.

    It is measured from the first step's end on: a spell begins with one, but for the first of all.
    """
    ends = [step.at_s for step in _in(steps, spell)]
    if not ends:
        whole = (spell[1] - spell[0]) / period
        return (0.0, whole) if whole > 1 else (0.0, 0.0)  # too short to hold a step: nothing can be said
    done = len(ends) - 1 + min(1.0, (spell[1] - ends[-1]) / period)
    return done, (spell[1] - ends[0]) / period


def longest_stall(steps: Sequence[Step], spell: Spell, period: float, island: str) -> Stall:
    """Returns the longest stall within a spell, its open end included."""
    ends = [step.at_s for step in _in(steps, spell)]
    gaps = [(b - a, a) for a, b in pairwise([*ends, spell[1]])] if ends else [(spell[1] - spell[0], spell[0])]
    gap_s, at_s = max(gaps)
    return Stall(island=island, at_s=at_s, gap_s=gap_s, stall_s=max(0.0, gap_s - period))


def share_of_steps(recording: Recording, periods: Mapping[str, float], from_s: float, to_s: float) -> float | None:
    """Returns the steps that live islands ran in a part of a run, of those that they would have run without faults."""
    done = usual = 0.0
    for island, period in periods.items():
        for a, b in between(out_spells(recording, island), recording.began_s, recording.ended_s):
            within = max(a, from_s), min(b, to_s)
            if within[0] < within[1]:
                some, all_ = steps_in(recording.steps[island], within, period)
                done, usual = done + some, usual + all_
    return done / usual if usual else None


def stall_beside(recording: Recording, happening: Happening, periods: Mapping[str, float], until_s: float) -> float:
    """Returns the longest stall of any island but those that a fault befell, from the fault until ``until_s``."""
    worst_s = 0.0
    for island, period in periods.items():
        if island in happening.processes:
            continue
        for from_s, to_s in between(out_spells(recording, island), recording.began_s, recording.ended_s):
            within = max(from_s, happening.at_s - period), min(to_s, until_s)
            if within[0] < within[1] and _in(recording.steps[island], within):
                stall = longest_stall(recording.steps[island], within, period, island)
                worst_s = max(worst_s, stall.stall_s)
    return worst_s


def mean_rate(recording: Recording) -> float | None:
    """Returns the steps per second of an island before the first fault, averaged over the islands."""
    first_fault_s = min((each.at_s for each in recording.done()), default=recording.ended_s)
    periods = [period_s(recording, island, first_fault_s) for island in recording.islands]
    known = [1 / period for period in periods if period]
    return fmean(known) if known else None


def _in(steps: Sequence[Step], spell: Spell) -> Sequence[Step]:
    first = bisect_left(steps, spell[0], key=lambda step: step.at_s)
    return steps[first : bisect_right(steps, spell[1], key=lambda step: step.at_s)]
