"""Trust: how much of an island's weight it has earned, from the directions that it sends. Pure.

An island that belongs to the run can send what is finite, well-formed and of plausible length, and still point
elsewhere: on purpose, or because its GPU computes wrong. What tells is the direction. The merge compares all
contributions of a round with each other (:attr:`aggregator.interface.events.Merge.compared`), and here stands what
follows from it, for the rounds after that one.

* **Agreement** of an island in a round is the upper median of its cosines with the other islands: what fewer than half
  of them say, alone or together, does not move it. The **level** that is expected of it is the median of the others'
  agreements: where islands hardly agree, because batches are small or their data differ, little is expected.
* **Weight.** Both are averaged over rounds of all fragments. An island that agrees less than ``HIGH`` times the level
  loses weight, and has none below ``LOW`` times; between, it falls in proportion. Islands with other data agree less,
  and stay above (docs/security.md has what was measured).
* **Earned.** A newcomer begins with ``NEWCOMER`` of its weight, and has all of it after a few rounds of agreement.
  At the beginning of a run all are newcomers, which changes nothing: only the ratio of weights counts.
* **Quarantine.** A round in which an island points *against* the others by more than ``OPPOSED`` of the level is
  evidence, by the statistic of Shiryaev and Roberts, R <- (1 + R) * likelihood ratio, of an island that does so in
  ``LIAR`` of its rounds against one that does so in ``HONEST``. It goes beyond ``ALARM`` at most once in as many
  rounds, in the mean, of an honest island: that is the rate of false alarms. One interval of steps is one piece of
  evidence, in however many fragments it was handed over. What is merely orthogonal loses its weight, and stays.
* **The way back.** What quarantine ends with is an island without weight whose averages go on: some rounds of
  agreement give it back.

Two islands can only know that they differ: nothing is concluded from rounds of fewer than three.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median, median_high
from typing import Any

from broker.wire.ranges import StepRange

#: Islands without which agreement says nothing of one of them.
FEWEST = 3
#: Weight of one round in the averages.
RATE = 0.25
#: Shares of the expected agreement: below the first an island has no weight, above the second all of it.
LOW, HIGH = 0.15, 0.4
#: Of the weight, before anything is known of an island; and the rounds' weight in its averages that make it whole.
NEWCOMER, KNOWN = 0.5, 0.65
#: The ratio to the level that averages begin with: enough for all of the weight, and little to lose.
BEGINNING = 0.5
#: An agreement of less than this is noise: nothing is concluded from it.
NOISE = 0.005
#: Share of the level by which an island must point against the others to count as opposed.
OPPOSED = 0.1
#: How often an honest island is opposed at most, how often one that lies is at least, and the bound of the statistic.
HONEST, LIAR, ALARM = 0.05, 0.8, 1e6


@dataclass(slots=True)
class Standing:
    """What is known of one island.

    Attributes:
        agreement: Moving average.
        level: Of what was expected, likewise.
        known: Share of these averages that comes from rounds, and not from their beginning.
        suspicion: The statistic R of the sequential test.
        judged_to: Inner step up to which there was evidence for that test.
        alarms: How often it was found to be opposed, here or in another shard.
    """

    agreement: float = 1.0
    level: float = 1.0
    known: float = 0.0
    suspicion: float = 0.0
    judged_to: int = -1
    alarms: int = 0

    @property
    def weight(self) -> float:
        """The share of its weight that the island has earned, 0 to 1."""
        ratio = self.agreement / self.level
        agrees = min(1.0, max(0.0, (ratio - LOW) / (HIGH - LOW)))
        return agrees * (NEWCOMER + (1 - NEWCOMER) * min(1.0, self.known / KNOWN))


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """What one round has shown.

    Attributes:
        islands: The agreement of each.
        level: Their median.
        opposed: Islands that have pointed against the others for too long, with the ratio of their averages.
    """

    islands: Mapping[str, float]
    level: float
    opposed: Mapping[str, float]


class Trust:
    """The standings of all islands of a run."""

    def __init__(self) -> None:
        self._standings: dict[str, Standing] = {}
        self._rounds = 0
        self._elsewhere: dict[int, dict[str, float]] = {}  # shard -> weights there

    def factor(self, island_id: str) -> float:
        """Returns by what an island's weight is multiplied, 0 to 1: what it has earned beside the most trusted."""
        most = max((self._weight(each) for each in self._standings), default=NEWCOMER)
        return min(1.0, self._weight(island_id) / max(NEWCOMER, most))

    def _weight(self, island_id: str) -> float:
        standing = self._standings.get(island_id)
        own = NEWCOMER if standing is None else standing.weight
        return min([own, *(weights.get(island_id, own) for weights in self._elsewhere.values())])

    def standing(self, island_id: str) -> Standing:
        """Returns what is known of an island."""
        return self._standings.get(island_id, Standing())

    def learn(self, contributions: Sequence[tuple[str, StepRange]], cosines: Sequence[float]) -> Agreement | None:
        """Takes what a merge has found; returns what it says, None if fewer than two islands were compared.

        Args:
            contributions: Those that were compared, in order: island and steps; an island may have sent several.
            cosines: Of any two of them: first and second, first and third, ..
        """
        agreements = agreements_of([island_id for island_id, _ in contributions], cosines)
        if not agreements:
            return None
        self._rounds += 1
        opposed = {}
        for island_id, agreement in agreements.items():
            others = [each for other, each in agreements.items() if other != island_id]
            level = median_high(others)
            if len(others) + 1 < FEWEST or level < NOISE:
                continue
            standing = self._standings.setdefault(island_id, Standing())
            if not standing.known:
                standing.agreement, standing.level = BEGINNING * level, level
            standing.agreement += RATE * (agreement - standing.agreement)
            standing.level += RATE * (level - standing.level)
            standing.known += RATE * (1 - standing.known)
            steps = [each for sender, each in contributions if sender == island_id]
            if min(each.from_step for each in steps) >= standing.judged_to:
                standing.judged_to = max(each.to_step for each in steps)
                against = agreement < -OPPOSED * level
                likelihood = LIAR / HONEST if against else (1 - LIAR) / (1 - HONEST)
                standing.suspicion = (1 + standing.suspicion) * likelihood
                if standing.suspicion > ALARM:
                    standing.suspicion, standing.alarms = 0.0, standing.alarms + 1
                    opposed[island_id] = standing.agreement / standing.level
        return Agreement(islands=agreements, level=median(agreements.values()), opposed=opposed)

    def rows(self) -> list[tuple[str, float, int]]:
        """Returns what other shards need to know: island, weight and alarms; nothing if all are plainly trusted."""
        rows = [(i, round(s.weight, 3), s.alarms) for i, s in sorted(self._standings.items())]
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

    def began(self, island_id: str) -> None:
        """A new life of an island begins: its steps count anew, what is known of it stays."""
        if island_id in self._standings:
            self._standings[island_id].judged_to = -1

    # --- durability -------------------------------------------------------------------------------------------

    def record(self) -> dict[str, Any]:
        """Returns everything as plain data, for a fragment's commit."""
        rows = {
            island_id: [s.agreement, s.level, s.known, s.suspicion, s.judged_to, s.alarms]
            for island_id, s in sorted(self._standings.items())
        }
        return {"rounds": self._rounds, "islands": rows}

    def restore(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Goes on from the newest of some records."""
        newest = max(records, key=lambda record: record["rounds"], default=None)
        if newest is not None:
            self._rounds = newest["rounds"]
            self._standings = {island_id: Standing(*row) for island_id, row in newest["islands"].items()}


def agreements_of(islands: Sequence[str], cosines: Sequence[float]) -> dict[str, float]:
    """Returns each island's upper median cosine with the others; empty if there are fewer than two.

    Where two islands have sent several contributions each, the mean of their cosines counts.

    Args:
        islands: Of the contributions, in order.
        cosines: Of any two of them: first and second, first and third, ..
    """
    found: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    pairs = ((i, j) for i in range(len(islands)) for j in range(i + 1, len(islands)))
    for (i, j), cosine in zip(pairs, cosines, strict=True):
        if islands[i] != islands[j]:
            found[islands[i], islands[j]].append(cosine)
            found[islands[j], islands[i]].append(cosine)
    of_island: defaultdict[str, list[float]] = defaultdict(list)
    for (island_id, _), values in found.items():
        of_island[island_id].append(math.fsum(values) / len(values))
    return {island_id: median_high(values) for island_id, values in sorted(of_island.items())}
