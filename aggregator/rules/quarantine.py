"""Quarantine: keeps repeated offenders out for a while, then lets them back on probation. Pure.

::

    GOOD --STRIKES offences--> QUARANTINED --time is over--> ON PROBATION --RELEASE_AFTER good ones--> GOOD
                                    ^------- one offence ---------/          (everything is forgiven)

The first quarantine lasts ``quarantine_s``, each further one twice as long as the last, up to ``LONGEST_S``; a release
starts the doubling over. A quarantined island is asked and told everything, so that it stays with the fleet and
nothing has to be done when its time is over; only its contributions are refused, and no round waits for it.

*One incident counts once.* An island whose parameters are spoilt has several contributions under way before it can hear
of the first refusal. So what began before the last offence was answered says nothing new. Counters that cannot be
true, ranges that were handed over before and fragments that do not exist have no such excuse.

Refusals that a healthy island may meet are no offences: too old, no room, damaged on the way, not the leader.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from broker.wire.messages import Reason

STRIKES = 3
RELEASE_AFTER = 8
LONGEST_S = 3600.0
#: The reason of one that points against the others (:mod:`aggregator.rules.trust`).
OPPOSED = "opposed"

#: What no accident to its parameters makes an island send.
_LIES = frozenset({Reason.IMPLAUSIBLE, Reason.OVERLAP, Reason.UNKNOWN_FRAGMENT})
OFFENCES = _LIES | frozenset(
    {
        Reason.NOT_FINITE,
        Reason.OUTLIER,
        Reason.WRONG_SHAPE,
        Reason.WRONG_DTYPE,
        Reason.FUTURE_VERSION,
    }
)


@dataclass(slots=True)
class Offender:
    """The offences of one island, and its quarantine.

    Attributes:
        strikes: Offences since it was last in good standing.
        times: Quarantines in a row.
        until_s: When the present or last quarantine ends; 0 before the first.
        reason: Reason of the last offence.
        good: Contributions let in since then.
        answered_at_step: How far it was known to be when the last offence was answered.
    """

    strikes: int = 0
    times: int = 0
    until_s: float = 0.0
    reason: str = ""
    good: int = 0
    answered_at_step: int = -1


class Quarantine:
    """The offenders of a run.

    Args:
        first_s: Length of a first quarantine; 0 for none ever.
        watcher: Is told the id of each island that is put into quarantine, or let out of it before its time.
    """

    def __init__(self, first_s: float, watcher: Callable[[str], None] = lambda _: None) -> None:
        self._first_s = first_s
        self._watcher = watcher
        self._offenders: dict[str, Offender] = {}

    def holds(self, island_id: str, now_s: float) -> bool:
        """Returns True if an island is kept out."""
        offender = self._offenders.get(island_id)
        return offender is not None and now_s < offender.until_s

    def until_s(self, island_id: str, now_s: float) -> float:
        """Returns when the quarantine of an island is over; infinite if it is not in one."""
        offender = self._offenders.get(island_id)
        return offender.until_s if offender is not None and now_s < offender.until_s else math.inf

    def why(self, island_id: str, now_s: float) -> str:
        """Returns why an island is kept out, and how long; empty if it is not."""
        if not self.holds(island_id, now_s):
            return ""
        offender = self._offenders[island_id]
        return f"for {offender.until_s - now_s:.1f} s more, after {offender.reason}"

    def out(self, now_s: float) -> frozenset[str]:
        """Returns the ids of all islands that are kept out."""
        if not self._offenders:
            return frozenset()
        return frozenset(island_id for island_id, o in self._offenders.items() if now_s < o.until_s)

    def now(self, now_s: float) -> dict[str, Offender]:
        """Returns the islands that are kept out, by id."""
        return {island_id: self._offenders[island_id] for island_id in sorted(self.out(now_s))}

    def offended(self, island_id: str, reason: Reason, *, from_step: int, at_step: int, now_s: float) -> bool:
        """Takes note of a refusal; returns whether the island is quarantined for it.

        Args:
            island_id: The sender of the refused message.
            reason: Why it was refused.
            from_step: First inner step of the refused message.
            at_step: The furthest step that the island is known to have reached.
            now_s: Seconds, as everywhere.
        """
        if reason not in OFFENCES or not self._first_s or self.holds(island_id, now_s):
            return False
        offender = self._offenders.setdefault(island_id, Offender())
        if reason not in _LIES and from_step < offender.answered_at_step:
            return False  # of the same incident
        offender.answered_at_step = at_step
        offender.good, offender.reason = 0, str(reason)
        offender.strikes += 1
        if offender.strikes < STRIKES and not offender.times:
            return False
        self._keep_out(island_id, offender, now_s)
        return True

    def opposed(self, island_id: str, now_s: float) -> bool:
        """Takes note that an island has pointed against the fleet for too long; returns whether it is news."""
        if not self._first_s or self.holds(island_id, now_s):
            return False
        offender = self._offenders.setdefault(island_id, Offender())
        offender.good, offender.reason = 0, OPPOSED
        self._keep_out(island_id, offender, now_s)
        return True

    def _keep_out(self, island_id: str, offender: Offender, now_s: float) -> None:
        offender.until_s = now_s + min(LONGEST_S, self._first_s * 2**offender.times)
        offender.times += 1
        offender.strikes = 0
        self._watcher(island_id)

    def behaved(self, island_id: str, now_s: float) -> bool:
        """Takes note of a contribution let in; returns whether it ends a probation.

        What is let in during a quarantine had arrived before it, and says nothing of how its island behaves now.
        """
        offender = self._offenders.get(island_id)
        if offender is None or self.holds(island_id, now_s):
            return False
        offender.good += 1
        if offender.good < RELEASE_AFTER:
            return False
        del self._offenders[island_id]
        self._watcher(island_id)
        return offender.times > 0

    def joined(self, island_id: str) -> None:
        """Notes that a new life of an island has begun, with other step counts; its past stays."""
        if island_id in self._offenders:
            self._offenders[island_id].answered_at_step = -1

    # --- durability -------------------------------------------------------------------------------------------

    def record(self, now_s: float) -> dict[str, list[Any]]:
        """Returns everything as plain data, for the run record; times are what is left of them."""
        return {
            island_id: [o.strikes, o.times, max(0.0, o.until_s - now_s), o.reason, o.good]
            for island_id, o in sorted(self._offenders.items())
        }

    def restore(self, record: Mapping[str, list[Any]], now_s: float) -> None:
        """Reads :meth:`record` back."""
        for island_id, (strikes, times, left_s, reason, good) in record.items():
            self._offenders[island_id] = Offender(strikes, times, now_s + left_s, reason, good)
            self._watcher(island_id)
