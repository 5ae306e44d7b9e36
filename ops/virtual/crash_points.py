"""Crashes at what a process does, not at a time: as it is about to say or write something, or has just written it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum


class Point(StrEnum):
    """Where a process may die."""

    SEND = "send"  # about to say something, to a process or to Redis: what it said before is out, this is not
    PERSIST = "persist"  # about to write a commit or a run record
    PERSISTED = "persisted"  # it is on the disk, and nobody knows


@dataclass(frozen=True, slots=True, kw_only=True)
class CrashPoint:
    """The ``number``-th time (from 1) that a process, in whichever life, comes by a point; it starts again later."""

    process: str
    point: Point
    number: int
    restart_s: float = 0.5


class Passages:
    """Counts how often each process has come by each point."""

    def __init__(self, crashes: Iterable[CrashPoint]) -> None:
        self._crashes = {(each.process, each.point, each.number): each for each in crashes}
        self.counts: dict[tuple[str, Point], int] = {}

    def pass_by(self, process: str, point: Point) -> CrashPoint | None:
        """Counts, and returns the crash that happens there, if any does."""
        place = process, point
        number = self.counts[place] = self.counts.get(place, 0) + 1
        return self._crashes.get((process, point, number)) if self._crashes else None
