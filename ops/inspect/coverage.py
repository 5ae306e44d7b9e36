"""Coverage of a replay: versions derived again, and those that could not be. Pure.

A replay that meets no difference has proved nothing about what it did not see. So every version that anybody knows of,
by tape, ledger or recording, is either *checked* or *unchecked* for a reason
(:class:`~ops.inspect.replay_terms.PartReason`), and what is missing is counted: lines that a tape lost or that were cut
short, recordings that should be there.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ops.inspect.replay_core import Replay
from ops.inspect.replay_terms import Key, PartReason


@dataclass(slots=True)
class Seen:
    """What was seen of one tape, and of the ledger and the recordings beside it.

    Attributes:
        checked: Versions that were derived from the tape.
        unchecked: Versions that are known of and were not, and why.
        missing_lines: Lines that the tape lost, or that were cut short.
        missing_recordings: Versions whose payloads were recorded and are gone; or recordings that no ledger explains.
        lives: Of the aggregator, on the tape: none on that of a standby that never led.
    """

    checked: set[Key] = field(default_factory=set)
    unchecked: dict[Key, PartReason] = field(default_factory=dict)
    missing_lines: int = 0
    missing_recordings: int = 0
    lives: int = 0

    @classmethod
    def of(cls, played: Replay, alone: Mapping[Key, PartReason], missing_recordings: int) -> Seen:
        """Returns what was seen in a replay; ``alone`` are versions that the tape does not even name."""
        counts = played.counts
        return cls(
            checked=set(played.durable),
            unchecked={**alone, **played.unchecked},
            missing_lines=counts.missing + counts.torn,
            missing_recordings=missing_recordings,
            lives=counts.lives,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """How much of a run was checked, over all its tapes: what one leader's does not tell, another's may.

    Attributes:
        versions: That are known of.
        checked: Of them.
        unchecked: Why not -> how many of the others.
        missing_lines: See :class:`Seen`.
        missing_recordings: Likewise.
        lives: On all tapes.
    """

    versions: int
    checked: int
    unchecked: Mapping[PartReason, int]
    missing_lines: int
    missing_recordings: int
    lives: int

    @property
    def complete(self) -> bool:
        """Whether everything that should be there was there, and was checked."""
        return not (self.unchecked or self.missing_lines or self.missing_recordings)

    @property
    def empty(self) -> bool:
        """Whether nothing at all was checked where something should have been."""
        return not self.checked and bool(self.versions or not self.complete or not self.lives)

    def sentence(self) -> str:
        """Says it: ``checked 41 of 44 versions; 2 could not be: made in the last moments ..; ..``."""
        parts = [f"checked {self.checked:,} of {self.versions:,} versions"]
        parts += [f"{n:,} could not be: made {why}" for why, n in sorted(self.unchecked.items())]
        if self.missing_lines:
            parts.append(f"{self.missing_lines:,} lines of the tape are missing")
        if self.missing_recordings:
            parts.append(f"{self.missing_recordings:,} recordings are missing or unexplained")
        return "; ".join(parts)


def coverage(seen: Iterable[Seen]) -> Coverage:
    """Adds up what was seen of all tapes of a run."""
    checked: set[Key] = set()
    unchecked: dict[Key, PartReason] = {}
    lines = recordings = lives = 0
    for each in seen:
        checked |= each.checked
        unchecked = {**each.unchecked, **unchecked}
        lines += each.missing_lines
        recordings += each.missing_recordings
        lives += each.lives
    left = Counter(why for key, why in unchecked.items() if key not in checked)
    return Coverage(
        versions=len(checked | unchecked.keys()),
        checked=len(checked),
        unchecked=dict(left),
        missing_lines=lines,
        missing_recordings=recordings,
        lives=lives,
    )


def misweighted(row: Mapping[str, Any]) -> str:
    """Returns what is wrong with the weights in a line of a ledger, by itself; an empty text if they fit each other."""
    contributions = row["contributions"]
    total = math.fsum(each["token_weight"] for each in contributions)
    for each in contributions:
        share = each["token_weight"] / total if total else 0.0
        weight = share * each["staleness_weight"]
        if not math.isclose(each["merge_weight"], weight, rel_tol=1e-9, abs_tol=1e-12):
            return f"{each['island_id']} has merge weight {each['merge_weight']!r}, its other weights give {weight!r}"
    return ""


def skipped_versions(known: Iterable[Key], lineages: Iterable[Key]) -> list[Key]:
    """Returns the versions that are missing below ones that are known: each is made from the one before.

    Args:
        known: All that anybody knows of.
        lineages: The first versions of new lineages, which were made from none.
    """
    versions, begun = set(known), set(lineages)
    before = {(p, version - 1) for p, version in versions - begun if version > 0}
    return sorted(before - versions)
