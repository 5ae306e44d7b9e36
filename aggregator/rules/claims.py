"""Decides for how much an island's claims of tokens and steps are believed. Pure.

That tokens were really trained cannot be checked. What is claimed can be held against two things:

* *The fleet.* Tokens per step above ``AMOUNT_SPREAD`` times the fleet's lower median are not believed, nor are tokens
  per second above ``pace_spread`` times it: without the operator's word they weigh, and count towards the end of the
  run, as the median itself. So a claim beyond the bound gains nothing, and one within it at most the bound: between
  median and bound a weight grows with the tokens, and not with their square as below (``w = n * n / s``).
* *The time.* Steps take their step time. Those that no time since the island joined supports do not count, and weigh
  less. Whoever is late, pauses, or brings what it trained while it was cut off has had the time. ``GRACE_S`` and
  ``GRACE_STEPS`` bear a clock of ours that is wrong and a step time that lags behind; an island that needs more than
  that has no grace, until it needs none.

Where all are honest nothing is doubted, and every figure is what it would be without this module.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median_high

from aggregator.rules.ranked import Ranked

#: Times the fleet's lower median of tokens per step up to which an island's are believed.
AMOUNT_SPREAD = 2.0
#: Times that median beyond which no contribution is weighed: steps of one island may differ from its average.
RATE_CAP = 4.0
#: Steps over which an island's tokens per step are averaged.
MEMORY_STEPS = 32.0
#: What a step time that is an average over ten steps may lag behind, after a first one of a thousand times that.
GRACE_STEPS = 64
#: By how much our clock may be behind.
GRACE_S = 10.0
#: By how much a fleet of two may be ahead of the end: half of 4 %.
PACE_MARGIN = 1.04


@dataclass(slots=True)
class Claimed:
    """Steps and tokens that one life of an island has claimed, and the steps that its time supports.

    Attributes:
        step: Inner step up to which it has claimed.
        tokens: Token counter there.
        at_s: When the two were reported.
        amount: Average tokens per step; 0 if unknown.
        before: Step from which time is counted.
        doubted: Tokens that will never count.
        gap: Steps that it had trained while no aggregator was there.
        present_s: Time since it was at ``before``.
        supported: Steps that this time supports.
        step_time_s: As reported last.
        least_s: The shortest that was ever reported.
        caught: The life needed more than the grace.
        pending: Tokens of steps that are not supported yet, ``ahead`` of them.
    """

    step: int
    tokens: int
    at_s: float
    amount: float
    before: int
    doubted: int = 0
    gap: int = 0
    present_s: float = 0.0
    supported: float = 0.0
    step_time_s: float | None = None
    least_s: float = math.inf
    caught: bool = False
    pending: int = 0
    ahead: int = 0


class Claims:
    """The claims of all islands that are in a run, and have not left.

    Args:
        trusted: Island -> tokens per step that the operator vouches for.
        pace_spread: Times the fleet's lower median of tokens per second up to which an island's are believed.
    """

    def __init__(self, trusted: Mapping[str, int], pace_spread: float) -> None:
        self._trusted = dict(trusted)
        self._pace_spread = pace_spread
        self._claimed: dict[str, Claimed] = {}
        self._amounts = Ranked()  # tokens per step
        self._rates = Ranked()  # tokens per second
        self._unheard: dict[str, float] = {}  # recalled and not heard since -> when it was recalled
        self._gaps_s: dict[str, float] = {}  # of those heard since
        self._away_s = 0.0  # for how long no aggregator was there, as most of them say

    # --- writing ----------------------------------------------------------------------------------------------

    def begin(self, island_id: str, step: int, tokens: int, declared: int, now_s: float) -> None:
        """Begins a life of an island; ``declared`` are its tokens per step, 0 if it leaves them open."""
        owes_s = self._owed_s(island_id, now_s)
        self.leave(island_id)
        self._claimed[island_id] = c = Claimed(step, tokens, now_s, float(declared), step, present_s=-owes_s)
        c.supported = 0.0 if not owes_s else -math.inf  # until the new life has a step time
        self._rank(island_id)

    def recall(self, island_id: str, step: int, tokens: int, amount: float, doubted: int, now_s: float) -> None:
        """Continues a life of an island that an earlier process knew, with these counters."""
        self._claimed[island_id] = Claimed(step, tokens, now_s, amount, step, doubted)
        self._unheard[island_id] = now_s
        self._rank(island_id)

    def leave(self, island_id: str) -> None:
        """Takes an island out of the fleet: it has left."""
        self._unheard.pop(island_id, None)
        self._amounts.drop(island_id)
        self._rates.drop(island_id)

    def report(self, island_id: str, step: int, tokens: int, step_time_s: float | None, now_s: float) -> int:
        """Takes an island's counters; returns the tokens of its life that do not count.

        Args:
            island_id: An island whose life has begun, or was recalled.
            step: Its newest inner step; older news changes nothing.
            tokens: Its token counter there.
            step_time_s: Seconds per inner step, if it says so now; else the last ones hold.
            now_s: Seconds of this process's clock; where that goes back no time has passed.
        """
        c = self._claimed[island_id]
        steps, trained = max(0, step - c.step), max(0, tokens - c.tokens)
        self._pass_time(c, step_time_s, now_s)
        if steps:
            c.step, c.tokens = step, c.tokens + trained
            c.amount = c.amount or self._amounts.middle or trained / steps
            c.amount += min(1.0, steps / MEMORY_STEPS) * (trained / steps - c.amount)
        beyond = self._rank(island_id)
        if not steps and not c.ahead:
            return c.doubted
        believed = trained
        if beyond:
            believed = min(trained, int(steps * self._counting_amount(island_id)))
        c.doubted += trained - believed
        self._settle(island_id, c, steps, believed, now_s)
        return c.doubted + c.pending

    def _owed_s(self, island_id: str, now_s: float) -> float:
        """Returns the seconds of grace that the life before has used, and the new one lacks."""
        before = self._claimed.get(island_id)
        if before is None or not before.step_time_s:
            return 0.0
        supported = max(before.supported, before.present_s / before.step_time_s)
        used = before.step - before.before - before.ahead - before.gap - supported
        return max(0.0, used * before.step_time_s - max(0.0, now_s - before.at_s))

    def _pass_time(self, c: Claimed, step_time_s: float | None, now_s: float) -> None:
        """Counts the steps that the time since the last report supports, by the shorter step time at its ends."""
        elapsed_s, c.at_s = max(0.0, now_s - c.at_s), now_s
        c.present_s += elapsed_s
        known = [each for each in (c.step_time_s, step_time_s) if each]
        if step_time_s:
            c.step_time_s, c.least_s = step_time_s, min(step_time_s, c.least_s)
        if known:  # nobody knows how fast it was in a long silence
            c.supported += elapsed_s / (min(known) if elapsed_s < GRACE_S else c.least_s)
        if step_time_s:
            c.supported = max(c.supported, c.present_s / step_time_s)  # so does the time before, of a first report

    def _settle(self, island_id: str, c: Claimed, steps: int, believed: int, now_s: float) -> None:
        """Sets aside the newest tokens, whose steps no time supports yet; earlier ones may count now."""
        c.ahead, c.pending = c.ahead + steps, c.pending + believed
        ahead = self._steps_ahead(island_id, c, steps, now_s)
        if not ahead:
            c.ahead = c.pending = 0
        elif ahead <= c.ahead:
            c.ahead, c.pending = ahead, -(-c.pending * ahead // c.ahead)
        else:  # no grace any more: what counted by it does not
            more = min(c.amount, self._counting_amount(island_id)) if self._beyond(island_id) else c.amount
            c.ahead, c.pending = ahead, c.pending + int((ahead - c.ahead) * more)

    def _steps_ahead(self, island_id: str, c: Claimed, steps: int, now_s: float) -> int:
        """Returns by how many steps a life is ahead of what its time supports."""
        step_time_s = self._step_time_s(c)
        if step_time_s is None:
            return 0
        if island_id in self._unheard:  # its first word since: it may have trained while nobody was here
            del self._unheard[island_id]
            c.gap, self._gaps_s[island_id] = steps, steps * step_time_s
            self._look_at_gaps(now_s)
        elif c.gap and self._unheard:
            self._look_at_gaps(now_s)
        slowdown = self._slowdown(island_id)
        supported = max(c.supported, c.present_s / step_time_s) * slowdown
        supported += min(c.gap, self._away_s / step_time_s) if c.gap else 0.0
        claimed = c.step - c.before
        grace = GRACE_STEPS + GRACE_S / step_time_s * slowdown
        caught = claimed > supported if c.caught else claimed > supported * PACE_MARGIN + grace
        # Until most islands were heard after a restart, no claim is judged.
        c.caught = caught and len(self._unheard) < max(1, len(self._gaps_s))
        return min(claimed, max(0, claimed - int(supported))) if caught else 0

    def _step_time_s(self, c: Claimed) -> float | None:
        """Returns the step time that a life reported; if none, that of the fleet's lower median."""
        if c.step_time_s:
            return c.step_time_s
        middle = self._rates.middle
        return c.amount / middle if c.amount and middle else None

    def _look_at_gaps(self, now_s: float) -> None:
        """Estimates how long no aggregator was there; islands not heard yet count as no gap."""
        for island_id, at_s in list(self._unheard.items()):
            if now_s > at_s + GRACE_S:
                del self._unheard[island_id]  # it is gone
        self._away_s = PACE_MARGIN * median_high([*self._gaps_s.values(), *(0.0 for _ in self._unheard)])

    def _rank(self, island_id: str) -> bool:
        """Enters an island's tokens per step and per second; returns :meth:`_beyond`."""
        c = self._claimed[island_id]
        if c.amount > 0:
            self._amounts.put(island_id, c.amount)
        beyond = self._beyond(island_id)
        if c.amount > 0 and c.step_time_s:
            self._rates.put(island_id, (self._counting_amount(island_id) if beyond else c.amount) / c.step_time_s)
        return beyond

    # --- reading ----------------------------------------------------------------------------------------------

    def _counting_amount(self, island_id: str) -> float:
        """Returns the tokens per step that count for an island that claims too many."""
        return max(self._amounts.middle, self._trusted.get(island_id, 0))

    def _beyond(self, island_id: str) -> bool:
        """Returns True if an island claims more tokens per step than fleet and operator support."""
        claimed = self._amounts.value.get(island_id)
        if claimed is None:
            return False
        return claimed > max(AMOUNT_SPREAD * self._amounts.middle, self._trusted.get(island_id, 0))

    def _slowdown(self, island_id: str) -> float:
        """Returns the factor of an island's pace: 1, unless it is impossibly fast."""
        rate, middle = self._rates.value.get(island_id), self._rates.middle
        return middle / rate if rate and rate > self._pace_spread * middle else 1.0

    def bounds(self, island_ids: Iterable[str]) -> tuple[dict[str, float], dict[str, float]]:
        """Returns by island the most tokens per step that weigh, and the part of its steps that does."""
        names = list(island_ids)
        return {name: self._most_weighed(name) for name in names}, {name: self.pace(name) for name in names}

    def pace(self, island_id: str) -> float:
        """Returns the part of an island's steps that its time supports: 1 of an honest one."""
        c = self._claimed.get(island_id)
        return 1.0 - c.ahead / (c.step - c.before) if c is not None and c.caught else 1.0

    def _most_weighed(self, island_id: str) -> float:
        amount, middle = self._amounts.value.get(island_id) or 0.0, self._amounts.middle
        if self._beyond(island_id):
            return self._counting_amount(island_id)
        if amount > middle and island_id not in self._trusted:
            return math.sqrt(amount * middle)  # squared, that is their product
        return max(RATE_CAP * middle, self._trusted.get(island_id, 0)) or math.inf

    def counted(self, island_id: str) -> float:
        """Returns the part of an island's rate of tokens that counts: 1 of an honest one."""
        amount = self._amounts.value.get(island_id)
        share = self._counting_amount(island_id) / amount if amount and self._beyond(island_id) else 1.0
        return share * self._slowdown(island_id)

    def doubts(self, island_id: str) -> str:
        """Returns a sentence with the cure for claims that are doubted; empty if none is."""
        c = self._claimed[island_id]
        if self._beyond(island_id):
            middle = self._amounts.middle
            return (
                f"{island_id} claims {c.amount:,.0f} tokens a step, {c.amount / middle:.1f} times the fleet's "
                f"{middle:,.0f}: weighs and counts as {self._counting_amount(island_id):,.0f}; "
                f"if it is true, allow it with --trusted-tokens {island_id}={math.ceil(c.amount)}"
            )
        if self._slowdown(island_id) < 1.0:
            rate, fleet = self._rates.value.get(island_id) or 0.0, self._rates.middle
            return (
                f"{island_id} claims {rate:,.0f} tokens a second, {rate / fleet:.0f} times the fleet's {fleet:,.0f}: "
                f"counts as {fleet:,.0f}; if it is true, give the aggregator a larger pace_spread"
            )
        if c.caught:
            steps, step_time_s = c.step - c.before, self._step_time_s(c)
            return (
                f"{island_id} claims {steps:,} steps, {c.ahead:,} more than fit into its time at {step_time_s:.3g} s "
                f"each: they do not count, and its tokens weigh {self.pace(island_id):.0%}"
            )
        return ""
