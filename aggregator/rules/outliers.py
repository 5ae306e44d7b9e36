"""Outliers: robust statistics that find contributions of implausible length. Pure.

What is compared is the *rate*, the norm of a pseudo-gradient per inner step, ``||Delta|| / s``, as its logarithm: rates
of one fragment differ by factors. Only long ones are refused. A short one is harmless, and most runs end with them.

* **The limit.** Median m and spread d (median absolute deviation, times 1.4826) of the log rates of the last
  ``WINDOW`` contributions let in, and their median steps s0:

      ||Delta|| <= F * e^m * s * max(1, sqrt(s0 / s)),       F = clamp(e^(6 d), factor, 2.5 * factor)

  The root is for short ranges: steps that are random in part add up like a random walk, so a short range has a higher
  rate than a long one, at most by that factor (measured: 2.8 at 2 steps beside 24). It lets no contribution be
  longer than what the fleet's usual ones may be.
* **Why a healthy island is not refused.** In healthy runs, with speeds 1 : 20, deaths, newcomers and int4, no
  contribution exceeded 1.5 times what is typical in this sense (reference.md, section 9.1); the default factor is 10.
  The window moves with the fleet: norms that fall during training, or grow tenfold during a learning rate's warm-up,
  move it within a few rounds.
* **Warm-up.** Until ``WARM_UP_ROUNDS`` versions hold ``WARM_UP_CONTRIBUTIONS`` contributions, norms grow with the
  learning rate and little is known: ten times the factor is allowed, against the lower median of what is known and what
  the *other* islands of the same round sent. Who has nothing to be compared with is measured against version 0:
  ``factor`` times the length of the parameters themselves, or of as many average parameters if those are zero. So may
  be whom that lower median compares with a much shorter range, since the first steps of all are taken at a hundredth of
  the learning rate that follows.
* **The fleet is right.** Judged when the round closes, with everybody's contribution on the table. If more than half of
  the islands that are there to be counted send too much, the times have changed and not the islands: their
  contributions are shortened to the limit, and the statistics start again from what they sent. Votes of several rounds
  count together, so that rounds of few islands cannot be refused for ever. A single island is its own fleet.
  And who sends at most ``ALIKE`` times what the others of its round send is not to blame either: its contribution is
  shortened to the limit.

* **As long as the others.** What is let in is made no longer than ``LONGER`` times the median of the *other* islands
  of its round, at the same steps, so that nobody moves the model by length alone. Where fewer than two others are
  there, the window's median takes their place, once it is known.

Norms say nothing about directions: what is within the limit may still be wrong (:mod:`aggregator.rules.trust`).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median, median_low
from typing import Any, NamedTuple

from broker.wire.messages import DataRange, Payload, TrainedOn
from broker.wire.ranges import StepRange

#: Contributions remembered: eight rounds of eight islands.
WINDOW = 64
WARM_UP_ROUNDS, WARM_UP_CONTRIBUTIONS = 6, 16
#: Islands in a round beyond which one of them does not move the median.
MANY = 16
#: In the warm-up a range of less than this part of its steps says little of another one.
COMPARABLE = 1 / 8
#: Allowed in the warm-up, in factors; and the most that a wide spread may stretch the factor later.
WARM_UP_FACTORS, SPREAD_FACTORS = 10.0, 2.5
#: Islands of one round that differ by less are alike: twice what was measured in healthy runs.
ALIKE = 3.0
#: How much longer than the other islands of its round one may be before it is shortened.
LONGER = 1.5
#: Standard deviations, estimated robustly, that are never too much.
DEVIATIONS = 6 * 1.4826


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """A contribution that was admitted, and waits to be judged, weighed and merged.

    Attributes:
        round_id: The round that it answers.
        steps: At least one.
        norm: Euclidean, over the fragment, finite; None if nobody has looked, and then it passes.
    """

    island_id: str
    incarnation: int
    round_id: int
    fragment_id: int
    steps: StepRange
    trained_on: tuple[TrainedOn, ...]
    payload: Payload
    payload_bytes: int
    norm: float | None = None
    data: tuple[DataRange, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The verdict on one contribution.

    Attributes:
        scale: Multiplies its length: below 1 where it is shortened to the limit.
        refused: Why it is not let in; empty if it is.
    """

    scale: float = 1.0
    refused: str = ""


class _Known(NamedTuple):
    """The remembered figures of an admitted contribution."""

    log_rate: float
    steps: int


@dataclass(slots=True)
class FragmentNorms:
    """The statistics of one fragment.

    Attributes:
        seed_norm: Norm of version 0; 0 if unknown.
        restarts: How often the fleet was right.
    """

    seed_norm: float = 0.0
    restarts: int = 0
    _known: deque[_Known] = field(default_factory=lambda: deque(maxlen=WINDOW))
    _rounds: int = 0  # versions that are in the statistics
    _suspects: set[str] = field(default_factory=set)  # islands whose latest contribution was too long

    @property
    def warming_up(self) -> bool:
        """Whether too little is known to be strict."""
        return self._rounds < WARM_UP_ROUNDS or len(self._known) < WARM_UP_CONTRIBUTIONS

    def judge(
        self,
        offers: Sequence[Offer],
        fleet: Iterable[str],
        factor: float,
        *,
        length: float = 0.0,
        levelled: bool = False,
    ) -> tuple[Finding, ...]:
        """Judges the contributions of a closing round, and learns from those it lets in.

        Args:
            offers: Contributions of the round, in any order.
            fleet: Islands that would have a say: live, responsive and not quarantined. Those of the round have one.
            factor: The multiple of the typical length that is too long; 0 lets everything in.
            length: Norm of the parameters at version 0, to compare with while nothing better is known; 0 if unknown.
            levelled: Whether nobody may be longer than the others of the round.

        Returns:
            A finding for each offer, in the order given.
        """
        if not factor:
            return tuple(Finding() for _ in offers)
        known = [_known(each) for each in offers]
        round_ = [(each.island_id, its) for each, its in zip(offers, known, strict=True) if its is not None]
        limits = self._limits(offers, round_, factor, length)
        fitting = self._levels(offers, round_) if levelled else limits
        too_long = {
            s.island_id for s, limit in zip(offers, limits, strict=True) if s.norm is not None and s.norm > limit
        }
        here = {offer.island_id for offer in offers}
        voters = here.union(fleet)
        votes = (self._suspects | too_long) & voters
        if too_long and 2 * len(votes) > len(voters):
            self._restart(known)
            return tuple(_shortened(s, min(each)) for s, *each in zip(offers, limits, fitting, strict=True))
        findings = [
            # The others are not compared with everybody: each would be let in either way.
            _shortened(s, min(limit, fit)) if s.island_id not in too_long or _alike(s, round_) else _refused(s, limit)
            for s, limit, fit in zip(offers, limits, fitting, strict=True)
        ]
        self._suspects -= here
        self._suspects |= too_long
        self._learn([its for its, finding in zip(known, findings, strict=True) if not finding.refused])
        return tuple(findings)

    def _limits(
        self, offers: Sequence[Offer], round_: Sequence[tuple[str, _Known]], factor: float, length: float
    ) -> list[float]:
        """Returns the greatest norm that each contribution of a round may have."""
        if not self.warming_up:
            log_rates, steps_of = zip(*self._known, strict=True)
            typical = median(log_rates)
            spread = median([abs(rate - typical) for rate in log_rates])
            stretch = min(max(DEVIATIONS * spread, math.log(factor)), math.log(SPREAD_FACTORS * factor))
            steps = median(steps_of)
            return [_allowed(typical + stretch, steps, offer.steps.steps) for offer in offers]
        stretch = math.log(WARM_UP_FACTORS * factor)
        by_length = factor * length if length else math.inf
        limits = []
        references: dict[str, tuple[_Known, float] | None] = {}
        many = len({island_id for island_id, _ in round_}) > MANY
        for offer in offers:
            # Nobody is compared with itself, unless so many are there that it makes no difference.
            apart = "" if many else offer.island_id
            if apart not in references:
                known = [*self._known, *[each for island_id, each in round_ if island_id != apart]]
                references[apart] = (median_low(known), median([each.steps for each in known])) if known else None
            if (reference := references[apart]) is None:
                limits.append(by_length)
                continue
            slow, usual_steps = reference
            limit = _allowed(slow.log_rate + stretch, usual_steps, offer.steps.steps)
            limits.append(limit if slow.steps >= COMPARABLE * offer.steps.steps else max(limit, by_length))
        return limits

    def _levels(self, offers: Sequence[Offer], round_: Sequence[tuple[str, _Known]]) -> list[float]:
        """Returns the norm that each contribution of a round may have beside the others'; infinite if unknown."""
        islands, found = {island_id for island_id, _ in round_}, []
        for offer in offers:
            others = [each for island_id, each in round_ if island_id != offer.island_id]
            if len(islands - {offer.island_id}) < 2:
                others = [] if self.warming_up else list(self._known)
            if not others:
                found.append(math.inf)
                continue
            rate, steps = map(median, zip(*others, strict=True))
            found.append(_allowed(rate + math.log(LONGER), steps, offer.steps.steps))
        return found

    def _learn(self, known: Sequence[_Known | None]) -> None:
        measured = [each for each in known if each is not None]
        self._known.extend(measured)
        self._rounds += bool(measured)

    def _restart(self, known: Sequence[_Known | None]) -> None:
        self._known.clear()
        self._suspects.clear()
        self._rounds = 0
        self.restarts += 1
        self._learn(known)

    # --- durability -------------------------------------------------------------------------------------------

    def record(self) -> dict[str, Any]:
        """Returns all but the votes as plain data, for the fragment's commit."""
        known = [[each.log_rate, each.steps] for each in self._known]
        return {"seed_norm": self.seed_norm, "rounds": self._rounds, "restarts": self.restarts, "known": known}

    @classmethod
    def restored(cls, record: Mapping[str, Any]) -> FragmentNorms:
        """Reads :meth:`record` back."""
        known = deque((_Known(log_rate, steps) for log_rate, steps in record["known"]), maxlen=WINDOW)
        return cls(record["seed_norm"], record["restarts"], known, record["rounds"])


def _known(offer: Offer) -> _Known | None:
    steps = offer.steps.steps
    return _Known(math.log(offer.norm) - math.log(steps), steps) if offer.norm else None


def _allowed(log_rate: float, typical_steps: float, steps: int) -> float:
    """Returns the norm of ``steps`` steps at a rate usual for ``typical_steps``; the module says why."""
    return math.exp(min(log_rate, 700.0)) * steps * max(1.0, math.sqrt(typical_steps / steps))


def _alike(offer: Offer, known: Sequence[tuple[str, _Known]]) -> bool:
    """Returns True if a norm is at most ``ALIKE`` times the lower median of the others in its round."""
    others = [each for island_id, each in known if island_id != offer.island_id]
    if not offer.norm or len(others) < 2:
        return False
    usual = median_low(others)
    return offer.norm <= _allowed(usual.log_rate + math.log(ALIKE), usual.steps, offer.steps.steps)


def _shortened(offer: Offer, limit: float) -> Finding:
    if offer.norm is None or offer.norm <= limit:
        return Finding()
    return Finding(scale=limit / offer.norm)


def _refused(offer: Offer, limit: float) -> Finding:
    if offer.norm is None or offer.norm <= limit:
        return Finding()
    return Finding(
        refused=f"its norm is {offer.norm:.3g} after {offer.steps.steps} steps, at most {limit:.3g} is plausible"
    )
