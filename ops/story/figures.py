"""The figures of a fleet over time: lines of its tapes in, rows of points out. Pure.

The history of the run (:mod:`ops.story.history`) says who lives and what islands said last; what lies between two
rows is counted here. The same lines give the same rows, so that a second reading of a tape meets the rows of the first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from aggregator.interface.events import Note
from aggregator.interface.leader_notes import MessageRefused
from aggregator.interface.notes import ContributionRefused, JoinRefused, RunEnded, VersionCommitted
from broker.routing.liveness import Liveness
from ops.story.history import History

Line = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """The figures of one moment.

    Attributes:
        run_s: Seconds since the run began.
        tokens: Trained by all islands; grows from each sample to the next.
        values: Name -> value; None: nothing is known of it.
    """

    run_s: float
    tokens: int
    values: Mapping[str, float | None]


class Figures:
    """Samples the figures of a run at intervals of its own time.

    No sample is made while no token is trained: a curve over tokens has no place for it.

    Args:
        every_s: Seconds between two samples.
    """

    def __init__(self, every_s: float) -> None:
        self.history = History()
        self._every_s = every_s
        self._sampled_at_s, self._sampled_tokens = 0.0, 0
        self._of_islands: dict[str, int] = {}  # tokens of each at the last sample
        self._refusals: Counter[str] = Counter()
        self._contributions = self._live = 0  # of the versions since the last sample
        self._staleness = 0.0  # their sum over contributions
        self._directions: dict[str, list[float]] = {}  # agreement and momentum_cosine of these versions

    def take(self, line: Line) -> Sample | None:
        """Reads a line of a tape; returns a sample if one is due."""
        note = self.history.take(line)
        self._note(note)
        ended = self.history.phase == "ended"
        if ended and not isinstance(note, RunEnded):
            return None  # the last sample was made: a later look meets no other one
        return self.sample(now=ended)

    def note(self, note: Note) -> None:
        """Takes a decision of the aggregator without its line."""
        self.history.note(note)
        self._note(note)

    def sample(self, *, now: bool = False) -> Sample | None:
        """Returns the present figures if a sample is due (or ``now``) and tokens were trained since the last."""
        history = self.history
        passed_s = history.now_s - self._sampled_at_s
        if not (now or passed_s >= self._every_s):
            return None
        tokens = history.tokens
        if tokens <= self._sampled_tokens:
            return None
        values = self._fleet(tokens, passed_s) | self._islands(passed_s)
        self._sampled_at_s, self._sampled_tokens = history.now_s, tokens
        self._of_islands = {name: each.tokens for name, each in history.islands.items()}
        self._contributions, self._live, self._staleness, self._directions = 0, 0, 0.0, {}
        return Sample(run_s=history.now_s, tokens=tokens, values=values)

    def _note(self, note: Note | None) -> None:
        match note:
            case VersionCommitted():
                self._contributions += note.islands
                self._live += note.live
                self._staleness += note.islands * note.staleness_mean
                for name, figure in (("agreement", note.agreement), ("momentum_cosine", note.momentum_cosine)):
                    if figure is not None:
                        self._directions.setdefault(name, []).append(figure)
            case ContributionRefused() | MessageRefused() | JoinRefused():
                self._refusals[str(note.reason)] += 1
            case _:
                pass

    def _fleet(self, tokens: int, passed_s: float) -> dict[str, float | None]:
        history = self.history
        (living, loss), versions = history.living(), history.fragments.values()
        values: dict[str, float | None] = {
            "fleet/loss": loss,
            "fleet/tokens_per_s": _ratio(tokens - self._sampled_tokens, passed_s),
            "fleet/islands": living,
            "fleet/model_version": sum(versions),
            "fleet/version_min": min(versions, default=0),
            "fleet/version_max": max(versions, default=0),
            "fleet/staleness": _ratio(self._staleness, self._contributions),
            "fleet/participation": _ratio(self._contributions, self._live),
            "fleet/refusals": self._refusals.total(),
        }
        values |= {f"fleet/{name}": fmean(found) for name, found in self._directions.items()}
        return values | {f"fleet/refusals/{reason}": count for reason, count in sorted(self._refusals.items())}

    def _islands(self, passed_s: float) -> dict[str, float | None]:
        values: dict[str, float | None] = {}
        for name, each in sorted(self.history.islands.items()):
            if each.state is not Liveness.ALIVE:
                continue  # its curve has a gap
            trained = each.tokens - self._of_islands.get(name, 0)
            values |= {
                f"islands/{name}/loss": each.loss,
                f"islands/{name}/tokens_per_s": _ratio(max(0, trained), passed_s),
                f"islands/{name}/step": each.step,
                f"islands/{name}/step_time_s": each.step_time_s,
                f"islands/{name}/sync_share": each.sync_share,
                f"islands/{name}/staleness": each.staleness,
                f"islands/{name}/agreement": each.agreement,
                f"islands/{name}/trust": each.trust,
                f"islands/{name}/refusals": sum(each.refusals.values()),
            }
        return values


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None
