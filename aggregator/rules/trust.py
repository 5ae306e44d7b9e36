"""Trust: how much of an island's weight it has earned, from the directions that it sends. Pure.

An island that belongs to the run can send what is finite, well-formed and of plausible length, and still point
elsewhere: on purpose, or because its GPU computes wrong. The direction tells. The merge compares all contributions
of a round with each other (:attr:`aggregator.interface.events.Merge.compared`), and this module decides what follows
from it for later rounds.

* **Agreement** of an island in a round is the upper median of its cosines with the other islands: what fewer than half
  of them say, alone or together, does not move it. The **level** that is expected of it is the median of the others'
  agreements: where islands hardly agree, because batches are small or their data differ, little is expected.
* **Weight.** Both are averaged over rounds of all fragments, the more of them the larger the noise: islands' deviations
  from the level, by their median, say how large it is, and the rate of the averages is such that the noise of their
  ratio stays near ``PRECISION``. Below a fiftieth of the level an island has no weight, from an eighth on all of it,
  more where noise is large (``LOW``, ``RISE``, ``LIFTED``). Islands with other data: docs/security.md.
* **Earned.** A newcomer begins with ``NEWCOMER`` of its weight, and has all of it after a few rounds of agreement.
  At the beginning of a run all are newcomers, which changes nothing: only the ratio of weights counts.
* **Quarantine.** Pointing *against* the others is judged by the statistic of Shiryaev and Roberts,
  R <- (1 + R) * likelihood ratio, between a mean agreement of ``TOLERATED`` and one of ``OPPOSED`` times the level,
  both with the noise as measured. Of an island that is tolerated R goes beyond ``ALARM`` at most once in as many
  rounds, in the mean: that is the rate of false alarms. What is merely orthogonal, or has other data, loses its weight
  and stays.
* **The way back.** What quarantine ends with is an island without weight whose averages go on: some rounds of
  agreement give it back.

Two islands can only know that they differ: nothing is concluded from rounds of fewer than three.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import median, median_high
from typing import Any

#: Islands without which agreement says nothing of one of them.
FEWEST = 3
#: Weight of one round in the averages, at most; the noise of an average ratio that decides how much less it is.
RATE, PRECISION = 0.25, 0.07
#: Shares of the level: below ``LOW`` an island has no weight, from ``RISE`` more on all of it. Noise lifts the upper
#: median of cosines that are zero, so ``LOW`` is higher by ``LIFTED`` times the noise, as a share of the level.
#: More noise than ``MOST_NOISE`` counts as that much.
LOW, RISE, LIFTED, MOST_NOISE = 0.02, 0.1, 0.6, 0.5
#: Of the weight, before anything is known of an island; and the rounds' weight in its averages that make it whole.
NEWCOMER, KNOWN = 0.5, 0.65
#: The ratio to the level that averages begin with: enough for all of the weight at any noise, and little to lose.
BEGINNING = 0.45
#: Multiples of the level: what is never held against an island, in the mean, and what an island that lies is at.
TOLERATED, OPPOSED = -0.35, -0.85
#: Bound of the statistic; and the most, as a logarithm, that one round may say.
ALARM, MOST_OF_ONE = 1e6, 2.0
#: Variance of agreements before it is measured, and the rate at which it is.
VARIANCE, VARIANCE_RATE = 0.01, 0.05
#: Its least value: cosines have no more digits.
LEAST_VARIANCE = 1e-8
#: Of normal deviations, from the median of their squares to their mean.
FROM_MEDIAN = 1 / 0.4549


@dataclass(slots=True)
class Standing:
    """Averages of one island's agreement, and its test statistic.

    Attributes:
        agreement: Moving average.
        level: Average of the expected agreement.
        known: Share of these averages that comes from rounds, and not from their beginning.
        suspicion: The statistic R of the sequential test.
        alarms: How often it was found to be opposed, here or in another shard.
    """

    agreement: float = 1.0
    level: float = 1.0
    known: float = 0.0
    suspicion: float = 0.0
    alarms: int = 0

    def weight(self, noise: float) -> float:
        """Returns the share of its weight that the island has earned, 0 to 1, at this noise of agreements."""
        low = LOW + LIFTED * min(MOST_NOISE, noise / self.level)
        agrees = min(1.0, max(0.0, (self.agreement / self.level - low) / RISE))
        return agrees * (NEWCOMER + (1 - NEWCOMER) * min(1.0, self.known / KNOWN))


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """Agreements of the islands in one round.

    Attributes:
        islands: The agreement of each.
        level: Their median.
        opposed: Islands that have pointed against the others for too long, with the ratio of their averages.
    """

    islands: Mapping[str, float]
    level: float
    opposed: Mapping[str, float]


class Trust:
    """The standings of all islands of a run.

    Attributes:
        rounds: Rounds that were compared.
    """

    def __init__(self) -> None:
        self._standings: dict[str, Standing] = {}
        self.rounds = 0
        self._variance = VARIANCE  # of an honest island's agreement around the level
        self._elsewhere: dict[int, dict[str, float]] = {}  # shard -> weights there

    def factor(self, island_id: str) -> float:
        """Returns the factor of an island's weight, 0 to 1: what it has earned beside the most trusted."""
        return self.factors([island_id])[island_id]

    def factors(self, island_ids: Iterable[str]) -> dict[str, float]:
        """Returns the factors of several islands, by id."""
        names, noise = list(island_ids), math.sqrt(self._variance)
        weights = dict.fromkeys(names, NEWCOMER)
        weights |= {each: standing.weight(noise) for each, standing in self._standings.items()}
        for elsewhere in self._elsewhere.values():
            weights = {each: min(weight, elsewhere.get(each, weight)) for each, weight in weights.items()}
        most = max([NEWCOMER, *[weights[each] for each in self._standings]])
        return {each: min(1.0, weights[each] / most) for each in names}

    def standing(self, island_id: str) -> Standing:
        """Returns the standing of an island; that of a newcomer if it is unknown."""
        return self._standings.get(island_id, Standing())

    def shown(self, island_ids: Iterable[str], *, weighed: bool) -> dict[str, dict[str, Any]]:
        """Returns each island's entry in :attr:`broker.wire.records.RunTotals.trust`.

        Args:
            island_ids: The islands to show.
            weighed: Whether trust is asked when islands are weighed; all have all of their weight if not.
        """
        shares, found = self.factors(island_ids), {}
        for island_id, share in shares.items():
            standing = self.standing(island_id)
            known = standing.known > 0
            found[island_id] = {
                "trust": share if weighed else 1.0,
                "agreement": standing.agreement if known else None,
                "usual": standing.level if known else None,
                "new": standing.known < KNOWN,
            }
        return found

    def learn(self, islands: Sequence[str], cosines: Sequence[float]) -> Agreement | None:
        """Updates all standings by the cosines of one merge; returns the round's agreement.

        None if fewer than two islands were compared.

        Args:
            islands: Islands of the compared contributions, in order; one may have sent several.
            cosines: Cosines of any two of them: first and second, first and third, ..
        """
        agreements = agreements_of(islands, cosines)
        if not agreements:
            return None
        self.rounds += 1
        opposed = {}
        if len(agreements) >= FEWEST:
            levels = {i: median_high([a for other, a in agreements.items() if other != i]) for i in agreements}
            squares = median([(agreement - levels[i]) ** 2 for i, agreement in agreements.items()])
            self._variance += VARIANCE_RATE * (FROM_MEDIAN * squares - self._variance)
            for island_id, level in levels.items():
                if level > 0 and self._judge(island_id, agreements[island_id], level):
                    standing = self._standings[island_id]
                    opposed[island_id] = standing.agreement / standing.level
        return Agreement(islands=agreements, level=median(agreements.values()), opposed=opposed)

    def _judge(self, island_id: str, agreement: float, level: float) -> bool:
        """Averages an island's agreement, and tests it; returns whether the island was found to be opposed."""
        standing = self._standings.setdefault(island_id, Standing())
        if not standing.known:
            standing.agreement, standing.level = BEGINNING * level, level
        evidence = standing.level**2 / max(self._variance, LEAST_VARIANCE)
        rate = min(RATE, 2 * PRECISION**2 * evidence)
        standing.agreement += rate * (agreement - standing.agreement)
        standing.level += rate * (level - standing.level)
        standing.known += rate * (1 - standing.known)
        share = agreement / standing.level
        says = ((share - TOLERATED) ** 2 - (share - OPPOSED) ** 2) / 2 * evidence
        standing.suspicion = (1 + standing.suspicion) * math.exp(max(-MOST_OF_ONE, min(MOST_OF_ONE, says)))
        if standing.suspicion <= ALARM:
            return False
        standing.suspicion, standing.alarms = 0.0, standing.alarms + 1
        return True

    def rows(self) -> list[tuple[str, float, int]]:
        """Returns island, weight and alarms, for other shards; nothing if all are plainly trusted."""
        noise = math.sqrt(self._variance)
        rows = [(i, round(s.weight(noise), 3), s.alarms) for i, s in sorted(self._standings.items())]
        return rows if any(weight < 1 or alarms for _, weight, alarms in rows) else []

    def told(self, shard: int, rows: Mapping[str, tuple[float, int]]) -> list[str]:
        """Takes what another shard has learned; returns the islands that it has newly found to be opposed."""
        self._elsewhere[shard] = {island_id: weight for island_id, (weight, _) in rows.items()}
        found = []
        for island_id, (_, alarms) in rows.items():
            standing = self._standings.get(island_id)
            if alarms > (0 if standing is None else standing.alarms):
                self._standings.setdefault(island_id, Standing()).alarms = alarms
                found.append(island_id)
        return found

    # --- durability -------------------------------------------------------------------------------------------

    def record(self) -> dict[str, Any]:
        """Returns everything as plain data, for a fragment's commit."""
        rows = {
            island_id: [s.agreement, s.level, s.known, s.suspicion, s.alarms]
            for island_id, s in sorted(self._standings.items())
        }
        return {"rounds": self.rounds, "variance": self._variance, "islands": rows}

    def restore(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Goes on from the newest of some records."""
        newest = max(records, key=lambda record: record["rounds"], default=None)
        if newest is not None:
            self.rounds, self._variance = newest["rounds"], newest["variance"]
            self._standings = {island_id: Standing(*row) for island_id, row in newest["islands"].items()}


def agreements_of(islands: Sequence[str], cosines: Sequence[float]) -> dict[str, float]:
    """Returns each island's upper median cosine with the others; empty if there are fewer than two.

    Where two islands have sent several contributions each, the mean of their cosines counts.

    Args:
        islands: Islands of the contributions, in order.
        cosines: Cosines of any two of them: first and second, first and third, ..
    """
    found: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    for (one, other), cosine in zip(combinations(islands, 2), cosines, strict=True):
        if one != other:
            found[one, other].append(cosine)
            found[other, one].append(cosine)
    of_island: defaultdict[str, list[float]] = defaultdict(list)
    for (island_id, _), values in found.items():
        of_island[island_id].append(math.fsum(values) / len(values))
    return {island_id: median_high(values) for island_id, values in sorted(of_island.items())}
