"""Restart policy: starts a process that died again, or gives up. Pure.

States of one process, and what moves it:

    running --(exit 0 of a process that ends by itself)--> ended
    running --(exit 2: its settings are wrong)----------> given up     starting it again cannot help
    running --(any other end)---------------------------> waiting, for a delay that doubles while it keeps dying young
    running --(died young too often in a row)-----------> given up
    waiting --(the delay is over)-----------------------> running

A life in which it got somewhere forgets what was before: a process that is killed now and then (a spot machine, a chaos
test) is restarted for ever, one that cannot do its work is given up. That is a step of an island, a version of an
aggregator, however long it took: by the clock alone, what fails for certain after eleven seconds, as everything does on
a busy machine, would be tried for ever. Of the others nothing is known but how long they lived.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartPolicy:
    """The patience of the supervisor.

    Attributes:
        first_delay_s: Before the first restart of a process that died young; doubles with each further one.
        max_delay_s: The delay grows to this.
        settled_after_s: A process that lived this long did start properly, where nothing else tells: its count begins
            anew.
        young_deaths: So many deaths in a row before settling, and it is given up.
    """

    first_delay_s: float = 0.2
    max_delay_s: float = 5.0
    settled_after_s: float = 10.0
    young_deaths: int = 5


#: The first death of a process ends everything: of a measurement nothing is healed.
ONE_LIFE = RestartPolicy(young_deaths=1, settled_after_s=math.inf)


@dataclass(frozen=True, slots=True, kw_only=True)
class Restart:
    """Start it again at ``at_s``."""

    at_s: float
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GiveUp:
    """Do not start it again: the run cannot go on, by its own settings or for another reason."""

    reason: str
    misset: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """Notes that the process has done its work."""


Verdict = Restart | GiveUp | Ended


class Supervision:
    """The verdict on each death of a process.

    Attributes:
        restarts: Process -> how many restarts of it have been ordered.
    """

    def __init__(self, policy: RestartPolicy) -> None:
        self.restarts: Counter[str] = Counter()
        self._policy = policy
        self._young_deaths: Counter[str] = Counter()  # in a row, before settling

    def died(
        self,
        name: str,
        *,
        status: int,
        lived_s: float,
        ends_by_itself: bool,
        now_s: float,
        progressed: bool | None = None,
        ordered: bool = False,
    ) -> Verdict:
        """Decides what follows the end of a process.

        Args:
            name: The process.
            status: Its exit status; minus the signal's number if a signal ended it.
            lived_s: How long it ran.
            ends_by_itself: Whether exit status 0 means that its work is done.
            now_s: Monotonic seconds.
            progressed: Whether it got anywhere in this life; None: nothing tells.
            ordered: It was killed on purpose, which says nothing about whether it can live.
        """
        if status == 0 and ends_by_itself:
            return Ended()
        how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
        if status == 2:
            return GiveUp(reason=f"{name} {how}: its settings are wrong", misset=True)
        settled = lived_s >= self._policy.settled_after_s if progressed is None else progressed
        young = self._young_deaths[name] = 0 if settled or ordered else self._young_deaths[name] + 1
        if young >= self._policy.young_deaths:
            when = f"within {self._policy.settled_after_s:g} s" if progressed is None else "before it got anywhere"
            return GiveUp(reason=f"{name} {how}, {young} times in a row {when}")
        self.restarts[name] += 1
        delay_s = min(self._policy.max_delay_s, self._policy.first_delay_s * 2 ** max(0, young - 1))
        return Restart(at_s=now_s + delay_s, reason=f"{name} {how} after {lived_s:.1f} s")
