"""What the event tapes of a run say about rounds and islands, in the machine's own time. Shell: it reads files.

Each tape is on the clock of its aggregator, which chaos may have made jump; what is known of the jumps turns its times
back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aggregator.store.tape import read_lines
from ops.chaos.records import Change, ClockJump, ProcessChange

Line = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundSeen:
    """A round that led to a version: when it was open, and who is in it."""

    fragment_id: int
    version: int
    opened_s: float
    committed_s: float
    islands: frozenset[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class NoteSeen:
    """A decision of an aggregator."""

    at_s: float
    name: str
    fields: Line


@dataclass(slots=True, kw_only=True)
class Tapes:
    """Everything that the report takes from the tapes.

    Attributes:
        rounds: In the order of the tapes.
        heard: Island -> when its heartbeats arrived, in order.
        notes: Decisions that show that a fault was noticed.
    """

    rounds: list[RoundSeen] = field(default_factory=list)
    heard: dict[str, list[float]] = field(default_factory=dict)
    notes: list[NoteSeen] = field(default_factory=list)


def tape_files(run_dir: Path) -> list[Path]:
    """Returns the tapes of a run: that of the aggregator it began with, and those of its standbys that ever led."""
    return sorted([*run_dir.glob("events.jsonl"), *run_dir.glob("*/events.jsonl")])


def process_of(tape: Path, run_dir: Path) -> str:
    """Returns whose tape it is: a standby has a directory of its own, under its name."""
    return "aggregator" if tape.parent == run_dir else tape.parent.name


def read_tapes(run_dir: Path, jumps: Sequence[ClockJump], changes: Sequence[ProcessChange]) -> Tapes:
    """Returns what all tapes of a run say."""
    tapes = Tapes()
    for path in tape_files(run_dir):
        process = process_of(path, run_dir)
        mine = [each for each in jumps if each.process == process]
        lives = [each.at_s for each in changes if each.process == process and each.change is Change.STARTED]
        take_in(tapes, read_lines(path), true_time(mine, lives))
    tapes.notes.sort(key=lambda note: note.at_s)
    for heard in tapes.heard.values():
        heard.sort()
    return tapes


def take_in(tapes: Tapes, lines: Iterator[Line], time_of: Callable[[float], float]) -> None:
    """Adds what the lines of one tape say."""
    opened: dict[int, float] = {}
    for line in lines:
        if "now_s" not in line:
            continue
        at_s = time_of(line["now_s"])
        if line.get("kind") == "heartbeat":
            tapes.heard.setdefault(line["sender"], []).append(at_s)
            continue
        name, fields = line.get("note"), line.get("fields", {})
        if name == "round.opened":
            opened[fields["round"]] = at_s
        elif name == "version.committed" and fields["round"] in opened:
            tapes.rounds.append(
                RoundSeen(
                    fragment_id=fields["fragment"],
                    version=fields["version"],
                    opened_s=opened.pop(fields["round"]),
                    committed_s=at_s,
                    islands=frozenset(each["island"] for each in fields["contributions"]),
                )
            )
        if name is not None and name not in ("round.opened", "contribution.accepted", "version.committed"):
            tapes.notes.append(NoteSeen(at_s=at_s, name=name, fields=fields))


def true_time(jumps: Sequence[ClockJump], lives: Sequence[float] = ()) -> Callable[[float], float]:
    """Returns what turns readings of a process's clock into the machine's time; call it in the order of the readings.

    Between two jumps, and two lives of the process, the clock is ahead by a constant. A reading belongs to the first
    of these spans, from the last one used on, that it fits.

    Args:
        jumps: Of that process, in order.
        lives: When it was started again: a new life knows nothing of what its clock stood still for.
    """
    changes = sorted(
        [(each.at_s, each.offset_s) for each in jumps] + [(at_s, None) for at_s in lives], key=lambda c: c[0]
    )
    offset_s = ahead_s = 0.0
    spans: list[tuple[float, float, float]] = []
    from_s = float("-inf")
    for at_s, new_offset_s in changes:
        spans.append((from_s, at_s, ahead_s))
        if new_offset_s is None:
            ahead_s = offset_s
        else:
            ahead_s += max(0.0, new_offset_s - offset_s)
            offset_s = new_offset_s
        from_s = at_s
    spans.append((from_s, float("inf"), ahead_s))
    current = 0

    def time_of(reading_s: float) -> float:
        nonlocal current
        for n in range(current, len(spans)):
            begins_s, ends_s, ahead_s = spans[n]
            if begins_s <= reading_s - ahead_s < ends_s:
                current = n
                return reading_s - ahead_s
        return reading_s - spans[current][2]

    return time_of
