"""Pacing: a clock of inner steps that says which fragment is due (design, section 4.1).

An island's step counter is reported once per heartbeat and with each contribution; in between it is extrapolated
at the island's own pace, for a bounded time. A fragment is due when the *lower median* of the recently advancing
islands has run H inner steps since the fragment's last round: one very fast or very slow island does not
set the pace, a frozen one stops counting, and one that is dead or in quarantine does not count, whatever pace it had
claimed. With a fixed schedule it is the K-th fastest instead, as in the paper (algorithm 2, lines 2 and 3). Fragments
start H / P steps apart and keep their distance; after a takeover the first of them is due at once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass


@dataclass(slots=True)
class Pace:
    """The step of one island, as last reported."""

    inner_step: int
    reported_at_s: float
    advanced_at_s: float
    step_time_s: float | None
    allowance_s: float  #: of silence: for so long it goes on being extrapolated, and counts as advancing


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Moment:
    """A cache of the answers that are the same for every fragment at one moment.

    Attributes:
        now_s: Which moment.
        advancing: The islands that count and whose counter grew lately, sorted.
        step_times_s: Seconds per inner step of each of them.
        steps: The inner step of each of them.
        median_step_s: Upper median of their step times: the pace of the lower median island.
    """

    now_s: float
    advancing: tuple[str, ...]
    step_times_s: tuple[float, ...]
    steps: tuple[float, ...]
    median_step_s: float | None


class StepClock:
    """Estimates every island's inner step at any moment.

    Args:
        heartbeat_interval_s: How often counters are reported.
        counts: Says whether an island counts now; None: all do.
    """

    def __init__(self, heartbeat_interval_s: float, counts: Callable[[str], bool] | None = None) -> None:
        self._heartbeat_interval_s = heartbeat_interval_s
        self._counts = counts or (lambda _: True)
        self._paces: dict[str, Pace] = {}
        self._moment: Moment | None = None

    def report(self, island_id: str, inner_step: int, now_s: float, step_time_s: float | None = None) -> None:
        """Takes note of a counter read off the island itself; older news than what is known is ignored."""
        self._moment = None
        pace = self._paces.get(island_id)
        if pace is None:
            self._paces[island_id] = Pace(inner_step, now_s, now_s, step_time_s, self._allowance_s(step_time_s))
            return
        if step_time_s is not None:
            pace.step_time_s, pace.allowance_s = step_time_s, self._allowance_s(step_time_s)
        if inner_step > pace.inner_step:
            pace.inner_step, pace.reported_at_s, pace.advanced_at_s = inner_step, now_s, now_s
        elif inner_step == pace.inner_step:
            # Still within the same step: what was extrapolated beyond it has not happened.
            pace.reported_at_s = max(pace.reported_at_s, now_s - (pace.step_time_s or 0.0))

    def look_again(self) -> None:
        """Drops the cache: called before and after each event, so that answers depend on events alone."""
        self._moment = None

    def forget(self, island_id: str) -> None:
        """Drops an island that left, died or starts anew."""
        self._moment = None
        self._paces.pop(island_id, None)

    def estimate(self, island_id: str, now_s: float) -> float:
        """Returns the island's inner step at ``now_s``; it never runs ahead of a report for long."""
        pace = self._paces[island_id]
        if not pace.step_time_s:
            return float(pace.inner_step)
        elapsed_s = min(max(0.0, now_s - pace.reported_at_s), pace.allowance_s)
        return pace.inner_step + elapsed_s / pace.step_time_s

    def step_time_s(self, island_id: str) -> float | None:
        """The island's seconds per inner step, if it has reported any."""
        pace = self._paces.get(island_id)
        return pace.step_time_s if pace else None

    def heard_lately(self, now_s: float) -> tuple[str, ...]:
        """Returns all islands that advance, and those whose silence is hardly longer than that bears."""
        more_s = 2 * self._heartbeat_interval_s
        return tuple(i for i, p in self._paces.items() if now_s - p.advanced_at_s <= p.allowance_s + more_s)

    def advancing(self, now_s: float) -> tuple[str, ...]:
        """Returns the islands that count and whose counter grew lately, sorted."""
        return self.at(now_s).advancing

    def at(self, now_s: float) -> Moment:
        """Returns what holds at ``now_s``; the same object until an island is heard of, or who counts may change."""
        if self._moment is None or self._moment.now_s != now_s:
            times_s = {
                i: p.step_time_s
                for i, p in self._paces.items()
                if p.step_time_s and now_s - p.advanced_at_s <= p.allowance_s and self._counts(i)
            }
            advancing = tuple(sorted(times_s))
            self._moment = Moment(
                now_s=now_s,
                advancing=advancing,
                step_times_s=tuple(times_s[i] for i in advancing),
                steps=tuple(self.estimate(i, now_s) for i in advancing),
                median_step_s=sorted(times_s.values())[len(times_s) // 2] if times_s else None,
            )
        return self._moment

    def median_step_time_s(self, now_s: float) -> float | None:
        """Returns the upper median of the advancing islands' step times: the pace of the lower median island."""
        return self.at(now_s).median_step_s

    def _allowance_s(self, step_time_s: float | None) -> float:
        return max(3 * self._heartbeat_interval_s, 4 * (step_time_s or 0.0))


class Pacer:
    """Decides which fragment is due, keeping each near H inner steps between its rounds.

    Args:
        fragment_ids: All that move, in any shard: each has its place in the interval.
        sync_interval_steps: H.
        clock: Of the islands.
        ours: Those that are decided on here; None: all.
        fastest: The fleet's step is that of the so many-th fastest island; 0: of the lower median one.
    """

    def __init__(
        self,
        fragment_ids: Iterable[int],
        sync_interval_steps: int,
        clock: StepClock,
        ours: Collection[int] | None = None,
        *,
        fastest: int = 0,
    ) -> None:
        self._clock = clock
        self._fastest = fastest
        self._interval = sync_interval_steps
        every = tuple(fragment_ids)
        self._places = tuple(k for k, p in enumerate(every) if ours is None or p in ours)
        self._fragment_ids = every if ours is None else tuple(p for p in every if p in ours)
        self._spacing = sync_interval_steps / max(1, len(every))
        # What every island has run of the intervals at the moment that was asked about last.
        self._moment: Moment | None = None
        self._known: dict[int, list[float]] = {}
        # Step of each island at which the current interval of the fragment began.
        self._began: dict[int, dict[str, float]] = {p: {} for p in self._fragment_ids}
        # Fragment k is first due after (k + 1) * H / P steps: so much of an interval counts as done at the start.
        self._early: dict[int, float] = {}  # by how many steps a fragment's next round comes before its place
        # With a fixed schedule half a step later: at a boundary some islands would be before it, and some behind.
        wait = 0.5 if fastest else 0.0
        self._head_start = {p: sync_interval_steps - (k + 1) * self._spacing - wait for k, p in enumerate(every)}

    def resume(self, last_rounds: Mapping[int, int]) -> None:
        """Goes on after a leader that is gone: what waits longest is due first, and at once; the others keep apart.

        Its islands have trained since its last round, and often hold what it did not acknowledge: to wait once more
        would only be silence.

        Args:
            last_rounds: Fragment id -> id of the round that made its newest version.
        """
        oldest_first = sorted(self._fragment_ids, key=lambda p: (last_rounds.get(p, 0), p))
        for place, p in zip(self._places, oldest_first, strict=True):
            self._head_start[p] = self._interval - place * self._spacing
        if (
            oldest_first
        ):  # among several shards its place may be later: it comes early now, and at its place from then on
            first = oldest_first[0]
            self._early[first] = self._interval - self._head_start[first]
            self._head_start[first] = float(self._interval)

    @property
    def spacing_steps(self) -> float:
        """H / P: inner steps between two rounds of different fragments."""
        return self._spacing

    def progress(self, fragment_id: int, now_s: float) -> float:
        """Returns the fleet's inner steps since the fragment's last round; 0 while nobody advances."""
        return self._of_fleet(self._progress(fragment_id, self._clock.at(now_s)))

    def most_overdue(self, now_s: float, busy: frozenset[int]) -> int | None:
        """Returns the due fragment that waits longest, or None; ``busy`` ones are not considered."""
        moment = self._clock.at(now_s)
        due = [(self._of_fleet(self._progress(p, moment)), -p) for p in self._fragment_ids if p not in busy]
        progress, negated = max(due, default=(0.0, 0))
        return -negated if due and progress >= self._interval else None

    def opened(self, fragment_id: int, now_s: float) -> None:
        """Starts the fragment's next interval; what it was late by counts towards it: fragments keep their distance.

        After an outage all of them are late, by different parts of an interval; if only some of it counted, they would
        fall due together from then on. A round that would follow within half a spacing is left out.

        Islands that have just fallen silent train on, as a rule: a broker that is frozen hides them all, one after the
        other, and the round that opens meanwhile is theirs, too. Where they are is not known, so their interval begins
        a whole one after the last: fragments keep their distance in each island's steps. Whoever is away for longer
        agrees with the others when it is back, as a newcomer does.
        """
        late = max(0.0, self.progress(fragment_id, now_s) - self._interval) % self._interval
        if self._interval - late < self._spacing / 2:
            late -= self._interval
        late -= self._early.pop(fragment_id, 0.0)
        before = self._began[fragment_id]
        began = self._began[fragment_id] = {}
        self._known.pop(fragment_id, None)
        advancing = self._clock.advancing(now_s)
        for island_id in self._clock.heard_lately(now_s):
            if island_id in advancing or island_id not in before:
                began[island_id] = self._clock.estimate(island_id, now_s) - late
            else:
                began[island_id] = before[island_id] + self._interval

    def forget(self, island_id: str) -> None:
        """Drops an island whose step counter starts anew."""
        for began in self._began.values():
            began.pop(island_id, None)
        self._known.clear()

    def due_in_s(self, fragment_ids: Iterable[int], now_s: float) -> dict[int, float]:
        """Returns seconds until each fragment falls due at the current paces; none of them while nobody advances."""
        moment = self._clock.at(now_s)
        if not moment.advancing:
            return {}
        interval, times_s = self._interval, moment.step_times_s
        # The island of rank r from below has H steps once all but r islands have them.
        last = len(times_s) - 1 - self._rank(len(times_s))
        waits_s: dict[int, float] = {}
        for p in fragment_ids:
            islands = zip(self._progress(p, moment), times_s, strict=True)
            waits_s[p] = max(0.0, sorted([(interval - steps) * time_s for steps, time_s in islands])[last])
        return waits_s

    def _progress(self, fragment_id: int, moment: Moment) -> list[float]:
        """Returns the inner steps of each island that advances since the fragment's last round."""
        if moment is not self._moment:
            self._moment = moment
            self._known.clear()
        progress = self._known.get(fragment_id)
        if progress is None:
            began = self._began[fragment_id]
            try:
                progress = [step - began[i] for i, step in zip(moment.advancing, moment.steps, strict=True)]
            except KeyError:
                self._take_in(fragment_id, moment)
                progress = [step - began[i] for i, step in zip(moment.advancing, moment.steps, strict=True)]
            self._known[fragment_id] = progress
        return progress

    def _take_in(self, fragment_id: int, moment: Moment) -> None:
        """A newcomer agrees with those who are here; the first ones start in the fragment's phase."""
        began = self._began[fragment_id]
        at = dict(zip(moment.advancing, moment.steps, strict=True))
        for island_id, step in at.items():
            if island_id not in began:
                known = [at[i] - began[i] for i in at if i in began]
                began[island_id] = step - (self._of_fleet(known) if known else self._head_start[fragment_id])

    def _of_fleet(self, steps: list[float]) -> float:
        return sorted(steps)[self._rank(len(steps))] if steps else 0.0

    def _rank(self, islands: int) -> int:
        """The place, from below, of the island whose steps are the fleet's."""
        return max(0, islands - self._fastest) if self._fastest else (islands - 1) // 2


class Lockstep:
    """Decides likewise where islands wait for each other: each fragment is due as soon as it has no round."""

    spacing_steps = 0.0

    def __init__(self, fragment_ids: Iterable[int]) -> None:
        self._fragment_ids = tuple(fragment_ids)

    def resume(self, last_rounds: Mapping[int, int]) -> None:
        """Nothing is to be caught up."""

    def progress(self, fragment_id: int, now_s: float) -> float:
        """Returns 0: no fragment waits for steps."""
        return 0.0

    def most_overdue(self, now_s: float, busy: frozenset[int]) -> int | None:
        """Returns a fragment that has no round, or None."""
        return next((p for p in self._fragment_ids if p not in busy), None)

    def opened(self, fragment_id: int, now_s: float) -> None:
        """Nothing is counted from there."""

    def forget(self, island_id: str) -> None:
        """No island's steps are known here."""

    def due_in_s(self, fragment_ids: Iterable[int], now_s: float) -> dict[int, float]:
        """Returns nothing: what has no round gets one with the next event."""
        return {}


class MovingAverage:
    """An exponential average that no sample spoils for long, be it an outage or a compilation at the beginning.

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
