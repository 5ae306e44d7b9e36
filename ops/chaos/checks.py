"""One invariant of a run's files, and what does not hold of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

Line = Mapping[str, Any]
#: The lines of files, by their names; they are read anew each time, so that no file has to fit into memory.
Files = Mapping[str, Iterable[Line]]

#: Violations that a check quotes; it counts all.
MOST_QUOTED = 5


@dataclass(slots=True)
class Check:
    """One invariant, and what does not hold of it.

    Attributes:
        invariant: Its number in section 10.
        name: What should hold.
        looked_at: Facts that were checked.
        violations: How many of them do not fit.
        examples: The first few of these, in words.
    """

    invariant: int
    name: str
    looked_at: int = 0
    violations: int = 0
    examples: list[str] = field(default_factory=list)

    @property
    def holds(self) -> bool:
        """Whether no fact that was looked at violates the invariant."""
        return not self.violations

    def fact(self, wrong: str, where: str = "") -> None:
        """Counts one fact, and what a predicate says is wrong with it."""
        self.looked_at += 1
        if wrong:
            self.violations += 1
            if len(self.examples) < MOST_QUOTED:
                self.examples.append(f"{where}: {wrong}" if where else wrong)
