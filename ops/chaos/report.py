"""The report of a chaos run: figures from its recording, its tapes and its checks. Pure."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean, median
from typing import Any

from ops.chaos.faults import Kind
from ops.chaos.healing import Outcome, outcome
from ops.chaos.plan import summary
from ops.chaos.records import Recording
from ops.chaos.stepping import Spell, merged, out_spells, period_s, share_of_steps, stall_beside, stepping
from ops.chaos.tapes import RoundSeen, Tapes
from ops.text import age

Report = dict[str, Any]

#: A version with less of the islands that were there all the while is worth counting.
FULL_ENOUGH = 0.9
#: A stall is put down to the faults of the last so many seconds.
CONCERNS_STALL_S = 2.0


def chaos_report(recording: Recording, tapes: Tapes) -> Report:
    """Returns the figures, ready for ``json.dumps``.

    Times of faults are in seconds since the beginning, when every island trained; what followed a fault, in seconds
    since it.
    """
    outcomes = [outcome(each, recording, tapes) for each in recording.done()]
    first_fault_s = min((each.at_s for each in recording.done()), default=recording.ended_s)
    periods = {island: period_s(recording, island, first_fault_s) for island in recording.islands}
    known = {island: period for island, period in periods.items() if period is not None}
    minutes = (recording.ended_s - recording.began_s) / 60
    within = [v for v in recording.versions if recording.began_s <= v.at_s < recording.ended_s]
    return {
        "seconds": round(recording.ended_s - recording.began_s, 3),
        "faults_by_kind": summary([each.fault for each in recording.done()]),
        "faults": [_fault(each, recording, known) for each in outcomes],
        "skipped": [
            {"at_s": round(each.at_s - recording.began_s, 3), "fault": str(each.fault), "why": each.skipped}
            for each in recording.happenings
            if each.skipped
        ],
        "healing": healing(outcomes),
        "stepping": _stepping(recording),
        "participation": participation(recording, tapes),
        "versions_per_min": round(len(within) / minutes, 2) if minutes > 0 else None,
    }


# --- faults -----------------------------------------------------------------------------------------------------


def _fault(each: Outcome, recording: Recording, periods: Mapping[str, float]) -> dict[str, Any]:
    happening = each.happening
    over_s = recording.ended_s if happening.ended_s is None else happening.ended_s
    stall_s = stall_beside(recording, happening, periods, over_s + CONCERNS_STALL_S)
    share = share_of_steps(recording, periods, happening.at_s, over_s) if happening.fault.for_s >= 1 else None
    return {
        "number": happening.number,
        "at_s": round(happening.at_s - recording.began_s, 3),
        "kind": str(happening.fault.kind),
        "processes": list(happening.processes),
        "for_s": round(over_s - happening.at_s if happening.ended_s is not None else happening.fault.for_s, 3),
        "options": dict(happening.fault.options),
        "detected_s": each.detected_s,
        "restarted_s": each.restarted_s,
        "healed_s": each.healed_s,
        "longest_stall_beside_s": round(stall_s, 3),
        "goodput_during": None if share is None else round(share, 4),
    }


def healing(outcomes: Sequence[Outcome]) -> dict[str, dict[str, Any]]:
    """Returns what kind befell whom -> how many, and the median and the worst of the times to notice and to heal.

    ``heals_after_s`` counts from the moment when healing became possible: the restart of what was killed, or the
    fault's end.
    """
    groups: dict[str, list[Outcome]] = defaultdict(list)
    for each in outcomes:
        groups[str(each.happening.fault.kind) + ("" if _chooses_itself(each) else f" {each.role}")].append(each)
    result = {}
    for name, group in sorted(groups.items()):
        judged = [each for each in group if each.healed_s is not None]
        result[name] = {
            "count": len(group),
            "detected_s": _spread([each.detected_s for each in group]),
            "healed_s": _spread([each.healed_s for each in judged]),
            "heals_after_s": _spread([each.heals_after for each in judged]),
            "not_healed": sum(_should_heal(each) and each.healed_s is None for each in group),
        }
    return result


def _chooses_itself(each: Outcome) -> bool:
    return not each.happening.fault.targets


def _should_heal(each: Outcome) -> bool:
    return each.happening.fault.kind not in (Kind.NAN, Kind.SCALE, Kind.REPLAY, Kind.GARBAGE)


def _spread(values: Sequence[float | None]) -> dict[str, float] | None:
    known = [value for value in values if value is not None]
    return {"median": round(median(known), 3), "worst": round(max(known), 3)} if known else None


# --- steps ------------------------------------------------------------------------------------------------------


def _stepping(recording: Recording) -> dict[str, Any]:
    figures = stepping(recording)
    longest = figures.longest
    return {
        "goodput": None if figures.goodput is None else round(figures.goodput, 5),
        "steps": round(figures.steps, 1),
        "usual_steps": round(figures.usual_steps, 1),
        "longest_stall": None
        if longest is None
        else {
            "island": longest.island,
            "at_s": round(longest.at_s - recording.began_s, 3),
            "gap_s": round(longest.gap_s, 4),
            "stall_s": round(longest.stall_s, 4),
            "observer_late_s": round(_late_s(recording, longest.at_s, longest.at_s + longest.gap_s), 4),
        },
        "observer_late_s": round(_late_s(recording, recording.began_s, recording.ended_s), 4),
        "longest_stall_before_s": round(figures.longest_before_s, 4),
        "islands": {
            island: {"steps": round(steps, 1), "usual_steps": round(usual, 1), "longest_stall_s": round(stall_s, 4)}
            for island, (steps, usual, stall_s) in sorted(figures.by_island.items())
        },
    }


def _late_s(recording: Recording, from_s: float, to_s: float) -> float:
    """Returns by how much the observer itself woke late, at the most, within or across a part of the run."""
    late = (late_s for at_s, late_s in recording.late if at_s <= to_s and at_s + late_s >= from_s)
    return max(late, default=0.0)


# --- participation ----------------------------------------------------------------------------------------------


def participation(recording: Recording, tapes: Tapes) -> dict[str, Any]:
    """Returns how many of the islands that were live for the whole of a round are in its version, over all rounds.

    An island is live from its first heartbeat after its last fault, until the next one strikes it.
    """
    shares: list[float] = []
    rows = []
    spells = {island: _away(recording, island) for island in recording.islands}
    for seen in tapes.rounds:
        if not recording.began_s <= seen.opened_s <= seen.committed_s <= recording.ended_s:
            continue
        live = [island for island in recording.islands if _live(island, seen, spells[island], tapes)]
        if not live:
            continue
        there = sum(island in seen.islands for island in live)
        shares.append(there / len(live))
        rows.append(
            {
                "at_s": round(seen.committed_s - recording.began_s, 3),
                "fragment": seen.fragment_id,
                "version": seen.version,
                "live": len(live),
                "in_it": there,
            }
        )
    enough = sum(share >= FULL_ENOUGH for share in shares)
    return {
        "mean": round(fmean(shares), 5) if shares else None,
        "worst": round(min(shares), 5) if shares else None,
        "versions": len(shares),
        "at_least_90_percent": enough,
        "by_version": rows,
    }


def _away(recording: Recording, island: str) -> list[Spell]:
    """When an island was not live, whatever the fault: stopped, dead, or cut off."""
    return merged([*recording.spells(island), *out_spells(recording, island)])


def _live(island: str, seen: RoundSeen, away: Sequence[Spell], tapes: Tapes) -> bool:
    """Whether an island was live from a round's opening to its version."""
    back_s = 0.0
    for from_s, to_s in away:
        if from_s <= seen.committed_s and to_s >= seen.opened_s:
            return False
        if to_s < seen.opened_s:
            back_s = to_s
    heard = tapes.heard.get(island, [])
    return bisect_right(heard, seen.opened_s) > bisect_left(heard, back_s)


# --- text -------------------------------------------------------------------------------------------------------


def render(report: Mapping[str, Any]) -> str:
    """Returns the chaos part of a report as text for people."""
    steps, joined = report["stepping"], report["participation"]
    count = sum(report["faults_by_kind"].values())
    per_hour = 3600 * count / report["seconds"] if report["seconds"] else 0.0
    kinds = ", ".join(f"{n} {kind}" for kind, n in report["faults_by_kind"].items())
    lines = [f"  {count} faults in {age(report['seconds'])} ({per_hour:.0f} an hour): {kinds or 'none'}"]
    if report["skipped"]:
        lines.append(f"  {len(report['skipped'])} could not be done: {report['skipped'][0]['why']}")
    if steps["goodput"] is not None:
        lines.append(
            f"  steps of live islands  {steps['steps']:,.0f} of {steps['usual_steps']:,.0f} without faults"
            f" ({steps['goodput']:.2%})"
        )
    if steps["longest_stall"] is not None:
        worst = steps["longest_stall"]
        lines.append(
            f"  longest stall          {1000 * worst['stall_s']:.0f} ms beyond a step, {worst['island']} at"
            f" {worst['at_s']:.1f} s; before the first fault {1000 * steps['longest_stall_before_s']:.0f} ms"
        )
        lines.append(
            f"  this machine's doing   the observer woke up to {1000 * steps['observer_late_s']:.0f} ms late,"
            f" {1000 * worst['observer_late_s']:.0f} ms during that stall"
        )
    if joined["mean"] is not None:
        lines.append(
            f"  participation          {joined['mean']:.1%} of the islands that were live for the whole round, "
            f"at least 90 % in {joined['at_least_90_percent']} of {joined['versions']} versions"
        )
    if report["versions_per_min"] is not None:
        lines.append(f"  versions               {report['versions_per_min']:.1f} per minute")
    return "\n".join([*lines, "", *_healing_table(report["healing"])])


def _healing_table(groups: Mapping[str, Mapping[str, Any]]) -> list[str]:
    if not groups:
        return []
    width = max(len("fault"), *map(len, groups))
    lines = [f"  {'fault':{width}}  count  {'noticed':>16}  {'healed':>16}  {'after restart/end':>18}  not healed"]
    for name, each in groups.items():
        noticed, healed, after = (_pair(each[key]) for key in ("detected_s", "healed_s", "heals_after_s"))
        lines.append(
            f"  {name:{width}}  {each['count']:>5}  {noticed:>16}  {healed:>16}  {after:>18}  {each['not_healed']:>10}"
        )
    return [*lines, "  times in seconds: median, worst"]


def _pair(spread: Mapping[str, float] | None) -> str:
    return "-" if spread is None else f"{spread['median']:.2f}, {spread['worst']:.2f}"
