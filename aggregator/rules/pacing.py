"""Pacing: says by the clock of inner steps which fragment is due (reference.md, section 4.1).

The step of each island is known to :mod:`aggregator.rules.step_clock`. A fragment is due when the *lower median* of the
recently advancing islands has run H inner steps since the fragment's last round: one very fast or very slow island does
not set the pace. With a fixed schedule it is the K-th fastest instead, as in the paper (algorithm 2, lines 2 and 3).
Fragments start H / P steps apart and keep their distance; after a takeover the first of them is due at once. H may
change in mid-run (:mod:`aggregator.rules.interval`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from aggregator.rules.deadlines import ROUNDING_S
from aggregator.rules.ranked import Ranked
from aggregator.rules.step_clock import StepClock

#: Beside a fixed part, the share of the terms of a sum by which it may be wrong.
ROUNDING = 1e-14


class Pacer:
    """Decides which fragment is due, keeping each near H inner steps between its rounds.

    An island that advances reaches the end of a fragment's interval at a moment that its reports alone change. These
    moments are kept in order, and so it is known of each fragment when enough islands will have reached it, at no cost
    for those that were not heard of. Only near that moment all are asked where they are.

    Args:
        fragment_ids: All that move, in any shard: each has its place in the interval.
        sync_interval_steps: H.
        clock: The islands' step clock.
        ours: The fragments that are paced here; None: all.
        fastest: Rank from the top of the island whose step is the fleet's; 0: the lower median one.
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
        self._num_fragments = max(1, len(every))
        # Step of each island at which the current interval of the fragment began.
        self._began: dict[int, dict[str, float]] = {p: {} for p in self._fragment_ids}
        # When each island that advances will have run it, at the earliest; and who has changed since that was entered.
        self._ends_s: dict[int, Ranked] = {p: Ranked() for p in self._fragment_ids}
        self._news = clock.follow()
        self._unseen: dict[int, set[str]] = {p: set() for p in self._fragment_ids}
        # Fragment k is first due after (k + 1) * H / P steps: so much of an interval counts as done at the start.
        self._early: dict[int, float] = {}  # by how many steps a fragment's next round comes before its place
        # With a fixed schedule half a step later: at a boundary some islands would be before it, and some behind.
        wait = 0.5 if fastest else 0.0
        spacing = self.spacing_steps
        self._head_start = {p: sync_interval_steps - (k + 1) * spacing - wait for k, p in enumerate(every)}

    def resume(self, last_rounds: Mapping[int, int]) -> None:
        """Goes on after a leader that is gone: the longest waiting is due at once, the others stay apart.

        Its islands have trained since its last round, and often hold what it did not acknowledge: to wait once more
        would only be silence.

        Args:
            last_rounds: Fragment id -> id of the round that made its newest version.
        """
        oldest_first = sorted(self._fragment_ids, key=lambda p: (last_rounds.get(p, 0), p))
        for place, p in zip(self._places, oldest_first, strict=True):
            self._head_start[p] = self._interval - place * self.spacing_steps
        if (
            oldest_first
        ):  # among several shards its place may be later: it comes early now, and at its place from then on
            first = oldest_first[0]
            self._early[first] = self._interval - self._head_start[first]
            self._head_start[first] = float(self._interval)

    @property
    def spacing_steps(self) -> float:
        """H / P: inner steps between two rounds of different fragments."""
        return self._interval / self._num_fragments

    def change_interval(self, sync_interval_steps: int, now_s: float) -> None:
        """Goes on with another H; each fragment has the same part of its interval behind it.

        So all of them stay apart, at the new distance, and what was due stays due. An island that the clock has
        forgotten is forgotten here, too.
        """
        ratio = sync_interval_steps / self._interval
        self._interval = sync_interval_steps
        self._head_start = {p: steps * ratio for p, steps in self._head_start.items()}
        self._early = {p: steps * ratio for p, steps in self._early.items()}
        advancing = frozenset(self._clock.advancing(now_s))
        for p, before in self._began.items():
            at = {i: self._clock.estimate(i, now_s) for i in before if self._clock.knows(i)}
            # An island may be behind the estimate at which its interval began: there is nothing to scale yet.
            self._began[p] = {
                i: step - (step - before[i]) * ratio if step > before[i] else before[i] for i, step in at.items()
            }
            self._ends_s[p] = Ranked()
            self._unseen[p] = set(advancing)

    def progress(self, fragment_id: int, now_s: float) -> float:
        """Returns the fleet's inner steps since the fragment's last round; 0 while nobody advances."""
        return self._of_fleet(self._progress(fragment_id, self._clock.at(now_s)))

    def most_overdue(self, now_s: float, free: Sequence[int]) -> int | None:
        """Returns the due fragment that waits longest among those that are ``free``, or None."""
        lines, last = self._look(now_s)
        if not lines:
            return None
        for p in free:  # all of them: a newcomer agrees with the others on each
            if self._unseen[p]:
                self._enter(p, lines, now_s)
        # Where too few can have run an interval, none is computed.
        if not [p for p in free if self._ends_s[p].order[last][0] <= now_s]:
            return None
        moment = self._clock.at(now_s)
        due = [(self._of_fleet(self._progress(p, moment)), -p) for p in free]
        progress, negated = max(due, default=(0.0, 0))
        return -negated if due and progress >= self._interval else None

    def opened(self, fragment_id: int, now_s: float) -> None:
        """Starts the fragment's next interval, less its lateness, so that fragments keep their distance.

        After an outage all of them are late, by different parts of an interval; if only some of it counted, they would
        fall due together from then on. A round that would follow within half a spacing is left out.

        Islands that have just fallen silent train on, as a rule: a broker that is frozen hides them all, one after the
        other, and the round that opens meanwhile is theirs, too. Where they are is not known, so their interval begins
        a whole one after the last: fragments keep their distance in each island's steps. Whoever is away for longer
        agrees with the others when it is back, as a newcomer does.
        """
        late = max(0.0, self.progress(fragment_id, now_s) - self._interval) % self._interval
        if self._interval - late < self.spacing_steps / 2:
            late -= self._interval
        late -= self._early.pop(fragment_id, 0.0)
        before = self._began[fragment_id]
        began = self._began[fragment_id] = {}
        self._ends_s[fragment_id] = Ranked()
        advancing = frozenset(self._clock.advancing(now_s))
        self._unseen[fragment_id] = set(advancing)
        for island_id in self._clock.heard_lately(now_s):
            if island_id in advancing or island_id not in before:
                began[island_id] = self._clock.estimate(island_id, now_s) - late
            else:
                began[island_id] = before[island_id] + self._interval

    def forget(self, island_id: str) -> None:
        """Drops an island whose step counter starts anew."""
        for p in self._fragment_ids:
            self._began[p].pop(island_id, None)
            self._unseen[p].add(island_id)

    def due_in_s(self, fragment_ids: Iterable[int], now_s: float) -> dict[int, float]:
        """Returns seconds until each fragment falls due at current paces; empty while no island advances."""
        waits_s: dict[int, float] = {}
        lines, last = self._look(now_s)
        if not lines:
            return waits_s
        for p in fragment_ids:
            if self._unseen[p]:
                self._enter(p, lines, now_s)
            island_id = self._ends_s[p].order[last][1]
            steps = self._clock.estimate(island_id, now_s) - self._began[p][island_id]
            waits_s[p] = max(0.0, (self._interval - steps) * lines[island_id][2])
        return waits_s

    def _progress(self, fragment_id: int, moment: Mapping[str, float]) -> list[float]:
        """Returns the inner steps of each island that advances since the fragment's last round."""
        began = self._began[fragment_id]
        try:
            return [step - began[i] for i, step in moment.items()]
        except KeyError:
            self._take_in(fragment_id, moment)
            return [step - began[i] for i, step in moment.items()]

    def _look(self, now_s: float) -> tuple[Mapping[str, tuple[float, int, float]], int]:
        """Returns the lines of the islands that advance, and the place of the one that completes an interval.

        That is its place among those that reach the interval's end: the fleet has run it once all but r have, r being
        the rank from below of the island whose steps are the fleet's.
        """
        lines = self._clock.lines(now_s)
        if self._news:
            for unseen in self._unseen.values():
                unseen |= self._news
            self._news.clear()
        return lines, len(lines) - 1 - self._rank(len(lines))

    def _enter(self, fragment_id: int, lines: Mapping[str, tuple[float, int, float]], now_s: float) -> None:
        """Enters when each island with news will have run the fragment's interval, at the earliest."""
        ends_s, unseen, interval = self._ends_s[fragment_id], self._unseen[fragment_id], self._interval
        all_began = self._began[fragment_id]
        for island_id in unseen:
            line = lines.get(island_id)
            if line is None:
                ends_s.drop(island_id)
                continue
            began = all_began.get(island_id)
            if began is None:
                self._take_in(fragment_id, self._clock.at(now_s))
                began = all_began[island_id]
            at_s, step, step_time_s = line
            rounding_s = ROUNDING_S + ROUNDING * (abs(at_s) + step_time_s * (abs(step) + abs(began) + interval))
            ends_s.put(island_id, at_s + (interval + began - step) * step_time_s - rounding_s)
        unseen.clear()
        assert len(ends_s.order) == len(lines), f"fragment {fragment_id}: {len(ends_s.order)} islands of {len(lines)}"

    def _take_in(self, fragment_id: int, at: Mapping[str, float]) -> None:
        """Adds islands: a newcomer agrees with the others; the first ones start in the fragment's phase."""
        began = self._began[fragment_id]
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
    """Paces islands that wait for each other: each fragment is due as soon as it has no round."""

    spacing_steps = 0.0

    def resume(self, last_rounds: Mapping[int, int]) -> None:
        """Does nothing: there is no interval to catch up."""

    def most_overdue(self, now_s: float, free: Sequence[int]) -> int | None:
        """Returns the first fragment that has no round, or None."""
        return free[0] if free else None

    def opened(self, fragment_id: int, now_s: float) -> None:
        """Does nothing: no interval is counted."""

    def forget(self, island_id: str) -> None:
        """Does nothing: no island's steps are known here."""

    def due_in_s(self, fragment_ids: Iterable[int], now_s: float) -> dict[int, float]:
        """Returns nothing: a fragment without a round gets one with the next event."""
        return {}
