"""Participation: the share of live islands in a version, and its contributions' staleness. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Participation:
    """Sums over the versions of one fragment, or of all."""

    rounds: Counter[int] = field(default_factory=Counter)  #: number of contributors -> versions
    participation_sum: float = 0.0
    staleness_sum: float = 0.0

    def count(self, contributors: int, participation: float, staleness: float) -> None:
        """Takes one version in."""
        self.rounds[contributors] += 1
        self.participation_sum += participation
        self.staleness_sum += staleness

    @property
    def participation(self) -> float | None:
        """Mean share of the live islands in a version; None before the first."""
        return self.participation_sum / self.rounds.total() if self.rounds else None

    @property
    def staleness(self) -> float | None:
        """Mean staleness of what was merged, in versions; None before the first."""
        return self.staleness_sum / self.rounds.total() if self.rounds else None

    @classmethod
    def added(cls, parts: Iterable[Participation]) -> Participation:
        """Returns the sum over several fragments."""
        total = cls()
        for part in parts:
            total.rounds += part.rounds
            total.participation_sum += part.participation_sum
            total.staleness_sum += part.staleness_sum
        return total

    def record(self) -> list[Any]:
        """Returns it as plain data."""
        return [{str(n): k for n, k in self.rounds.items()}, self.participation_sum, self.staleness_sum]

    @classmethod
    def restored(cls, record: Sequence[Any]) -> Participation:
        """Reads :meth:`record` back."""
        rounds, participation_sum, staleness_sum = record
        return cls(Counter({int(n): k for n, k in rounds.items()}), participation_sum, staleness_sum)
