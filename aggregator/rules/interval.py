"""The sync interval, longer for slow aggregators and long journeys; and the times of rounds.

See docs/reference.md, sections 4.1 and 4.5.

Versions of one aggregator are merged one after the other, and so they are made durable. If a stage takes longer for one
than rounds are apart, those that close wait before it, each longer than the last: what they merge is stale when its
turn comes. So rounds open as far apart as the slower stage takes, and no round waits behind many.

What an island trains while a fragment travels, it trains beside the merged values, which is worth less
(docs/results.md, journeys). With such journeys a longer interval costs no more and sends less, so it has room for three
of them. Pure.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque

from aggregator.interface.config import AggregatorConfig
from aggregator.rules.quorum import Waits, grace_window_s
from broker.wire.messages import Pacing

#: The interval is so much longer than the slower stage needs.
HEADROOM = 1.25
#: Journeys in an interval, at least.
JOURNEYS = 3
#: By how much of itself a loss is higher where journeys take the whole interval, with very many islands; and the least
#: that is told.
JOURNEY_COST, WORTH_TELLING = 0.11, 0.01
#: Inner steps of a measured journey that are no part of it: an island answers at the end of one.
ANSWER_STEPS = 1.0
#: An interval that is so much longer than the recipe's is warned of.
FAR_LONGER = 4
#: It becomes longer once more than that part of it is needed, or what piled up would stay for good. It becomes shorter
#: once less than that part would do, headroom included.
LENGTHEN, SHORTEN = 0.9, 0.7
#: The longest interval, as a multiple of the recipe's.
MOST = 64
#: Samples of a stage before it is believed.
LEARNED = 8
#: Weight of one sample: a disk that others use takes now a tenth of the average, now its tenfold.
RATE = 0.1
#: Intervals that pass after a change before it may become longer again, and before it may become shorter.
REST_LONGER, REST_SHORTER = 1, 4
#: The slower half of contributions is waited for up to that multiple of what the quicker half takes.
MOST_ARRIVE = 1.25
#: Arrivals remembered for the 90th percentile, and rounds whose late arrivals still count into it.
REMEMBERED = 64


class MovingAverage:
    """An exponential average that no sample spoils for long, be it an outage or a first compilation.

    A sample counts as at most four times the average, and the average as at most four times a sample.
    """

    __slots__ = ("_rate", "value")

    def __init__(self, rate: float = 0.2) -> None:
        self._rate = rate
        self.value: float | None = None

    def add(self, sample: float) -> None:
        """Takes one sample, at least 0."""
        before = sample if self.value is None else self.value
        if before and sample:
            before, sample = min(before, 4 * sample), min(sample, 4 * before)
        self.value = before + self._rate * (sample - before)

    def get(self, default: float = 0.0) -> float:
        """The average, or ``default`` before the first sample."""
        return default if self.value is None else self.value


class SerialStage:
    """Measures the time of one piece of work in a serial stage, without the wait for its turn."""

    def __init__(self) -> None:
        self._average = MovingAverage(RATE)
        self._samples = 0
        self._done_at_s: float | None = None  # the piece before

    def done(self, given_s: float, now_s: float) -> None:
        """Takes a sample: work given at ``given_s`` is done. The first, when kernels load, is left out."""
        if self._done_at_s is not None:
            self._average.add(max(0.0, now_s - max(given_s, self._done_at_s)))
            self._samples += 1
        self._done_at_s = now_s

    @property
    def service_s(self) -> float:
        """Moving average of one piece's time; 0 before enough is known."""
        return self._average.get() if self._samples >= LEARNED else 0.0


def next_interval(recipe_steps: int, present_steps: int, needed_steps: float) -> int:
    """Returns the next interval in inner steps: the present one unless clearly too short or too long.

    Args:
        recipe_steps: The interval is never below.
        present_steps: In force.
        needed_steps: Steps that the slowest stage takes for all rounds of an interval, without headroom.
    """
    wanted_steps = HEADROOM * needed_steps
    if needed_steps > LENGTHEN * present_steps or wanted_steps < SHORTEN * present_steps:
        return math.ceil(min(max(recipe_steps, wanted_steps), MOST * recipe_steps))
    return present_steps


def journey_cost(islands: int, journey_steps: float, interval_steps: float) -> float:
    """Returns by which share of itself journeys raise the loss: ``0.11 (1 - 1 / M) journey / H``.

    Fitted to four islands with 0.12 M parameters and AdamW, and within a third of what was measured of two islands,
    another interval and 0.9 M parameters; Muon pays less (docs/results.md, journeys).
    """
    return JOURNEY_COST * (1 - 1 / islands) * min(1.0, journey_steps / interval_steps) if islands else 0.0


class Interval:
    """The sync interval of one aggregator, which follows the slower of its stages, and journeys.

    Args:
        recipe_steps: H of the recipe.
        rounds: Rounds merged in one interval: one for each moving fragment.

    Attributes:
        recipe_steps: As given.
        steps: In force.
        merging: From the end of a round to the new parameters.
        writing: From there until they are durable, on this aggregator's disk.
        because: Why it differs from the recipe; empty where it does not.
        journey_steps: Inner steps from capture to adoption lately; 0 while that is not known.
    """

    def __init__(self, recipe_steps: int, rounds: int = 0) -> None:
        self.recipe_steps = self.steps = recipe_steps
        self._rounds = rounds
        self.merging, self.writing = SerialStage(), SerialStage()
        self.because, self.journey_steps = "", 0.0
        self._since = 0  # rounds, the last change

    @property
    def changed(self) -> int:
        """The interval in force where it is not the recipe's; 0 where it is."""
        return self.steps if self.steps != self.recipe_steps else 0

    @property
    def far_longer(self) -> bool:
        """Returns True if it is a multiple of the recipe's that is to be warned of."""
        return self.steps >= FAR_LONGER * self.recipe_steps

    def outer_rule(self, rule: tuple[float, float], before: int) -> tuple[float, float]:
        """Returns learning rate and momentum of an outer step at the end of this interval.

        Momentum is forgotten by inner steps, not by rounds: ``mu ** (steps / recipe_steps)``, as in AutoLoCo
        (arXiv 2609.36662). The rate keeps ``rate / (1 - momentum)``, which is how far a lasting direction is followed.
        The momentum vector is the move of an interval ``before``: after a longer one it counts as what it was per step.

        Args:
            rule: Learning rate and momentum of the recipe.
            before: :attr:`changed` when the round of the version before closed.
        """
        if not (self.changed or before):
            return rule
        rate, momentum = rule
        kept = momentum ** (self.steps / self.recipe_steps)
        return rate * (1 - kept) / (1 - momentum), kept * min(1.0, self.steps / (before or self.recipe_steps))

    def follow(self, step_s: float, there_and_back_s: float = 0.0) -> str:
        """Adapts the interval to stages and journeys; says why if it changes.

        A journey is the way there and back, and the stages without the wait for their turn. Asked once for each round.

        Args:
            step_s: The median inner step.
            there_and_back_s: See :class:`RoundTimes`.
        """
        self._since += 1
        if not step_s:
            return ""
        merging_s, writing_s = self.merging.service_s, self.writing.service_s
        service_s, what = max((merging_s, "merging"), (writing_s, "writing"))
        needed_steps = self._rounds * service_s / step_s
        journey_s = there_and_back_s and there_and_back_s + merging_s + writing_s
        journey_steps = journey_s / step_s
        self.journey_steps = max(0.0, journey_steps - ANSWER_STEPS)
        travelling = JOURNEYS * journey_steps > HEADROOM * needed_steps
        if travelling:
            needed_steps = JOURNEYS * journey_steps / HEADROOM
        steps = next_interval(self.recipe_steps, self.steps, needed_steps)
        rest = self._rounds * (REST_LONGER if steps > self.steps else REST_SHORTER)
        if steps == self.steps or self._since <= rest:
            return ""
        self.steps, self._since = steps, 0
        why = f"{what} takes {service_s:.2g} s a round, and {self._rounds} rounds {needed_steps:.0f} inner steps"
        if travelling:
            why = f"a journey takes {journey_s:.2g} s, {journey_steps:.0f} inner steps, and {JOURNEYS} have room"
        self.because = why if steps > self.recipe_steps else ""
        return why


class RoundTimes:
    """Moving averages of a round's parts; rounds that span an outage are left out by the caller."""

    def __init__(self, config: AggregatorConfig) -> None:
        self._config = config
        self._quorum_s = MovingAverage()
        self._sync_s = MovingAverage()
        self._journey_s = MovingAverage()
        self._arrivals_s: deque[float] = deque(maxlen=REMEMBERED)
        self._opened_at_s: OrderedDict[int, float] = OrderedDict()
        self._waits: tuple[tuple[float, int, float], Waits] | None = None  # by what, since the last measurement

    def opened(self, round_id: int, now_s: float) -> None:
        """Remembers a round, so that what arrives for it is timed even after it has closed."""
        self._opened_at_s[round_id] = now_s  # again after an outage
        if len(self._opened_at_s) > REMEMBERED:
            self._opened_at_s.popitem(last=False)

    def arrived(self, round_id: int, now_s: float) -> None:
        """Times a contribution from the opening of the round that it answers, on time or late."""
        opened_at_s = self._opened_at_s.get(round_id)
        if opened_at_s is not None:
            self._arrivals_s.append(now_s - opened_at_s)
            self._waits = None

    def quorum_met(self, took_s: float) -> None:
        """Takes xi_quorum, the time from a round's opening to its quorum."""
        self._quorum_s.add(took_s)
        self._waits = None

    def committed(self, opened_at_s: float, closed_at_s: float, now_s: float) -> None:
        """Adds one sample of the sync time and of the whole round trip."""
        self._sync_s.add(now_s - closed_at_s)
        self._journey_s.add(now_s - opened_at_s)
        self._waits = None

    @property
    def journey_s(self) -> float | None:
        """Moving average from the opening of a round to its durable version; None before the first."""
        return self._journey_s.value

    @property
    def sync_s(self) -> float | None:
        """Moving average from the closing of a round to its durable version; None before the first."""
        return self._sync_s.value

    def arrivals_s(self, share: float) -> float:
        """Returns the time within which that share of contributions arrived lately; 0 before the first."""
        if not self._arrivals_s:
            return 0.0
        ordered = sorted(self._arrivals_s)
        return ordered[math.ceil(share * len(ordered)) - 1]

    @property
    def there_and_back_s(self) -> float:
        """The time until half of the islands have answered a round; 0 before enough is known."""
        return self.arrivals_s(0.5) if len(self._arrivals_s) >= LEARNED else 0.0

    def waits(self, step_s: float, interval_steps: int, settled_at_s: float = -math.inf) -> Waits:
        """Returns how long a round waits now, at a median inner step of ``step_s``."""
        c, by = self._config, (step_s, interval_steps, settled_at_s)
        if self._waits is not None and self._waits[0] == by:
            return self._waits[1]
        grace_s = grace_window_s(
            factor=c.grace_factor,
            overlap_steps=c.overlap,
            step_s=step_s,
            quorum_s=self._quorum_s.get(),
            sync_s=self._sync_s.get(),
        )
        # Answers are given at the end of a step: those of equal islands come up to a step apart, one now, another then.
        # One that is far away is waited for as long as that costs others little, most are waited for in any case: what
        # comes too late would be merged an interval later.
        longest_s = max(interval_steps / 2 * step_s, MOST_ARRIVE * self.arrivals_s(0.5) + step_s)
        arrivals_s = min(self.arrivals_s(0.9) + step_s, longest_s) if c.grace_by_arrivals else 0.0
        found = Waits(
            quorum=c.quorum or c.islands,
            grace_s=grace_s,
            arrivals_s=arrivals_s,
            timeout_s=c.round_timeout_s,
            settled_at_s=settled_at_s,
        )
        self._waits = by, found
        return found

    def rounds_allowed(self, num_fragments: int, step_s: float, interval_steps: int) -> int:
        """Returns how many rounds may be open: enough that one journey's length does not stretch H."""
        if self._config.pacing is Pacing.LOCKSTEP:
            return num_fragments
        if not step_s:
            return self._config.rounds_in_flight
        journey_steps = self._journey_s.get() / step_s
        needed = math.ceil(num_fragments * journey_steps / interval_steps) + 1
        return min(num_fragments, max(self._config.rounds_in_flight, needed))
