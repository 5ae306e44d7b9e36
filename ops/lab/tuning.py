"""Which value of a tuned setting is the best: what to try next, and what has won. Pure.

Successive halving over the values declared, then beyond an edge while the best lies there. One seed may favour a rate:
where two are close, what decides is how often each of them makes a run stumble. So the best of the last rung can be run
with more seeds, and the lowest mean wins.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from broker.wire.errors import ConfigError
from ops.lab.cells import CellKey


@dataclass(frozen=True, slots=True, kw_only=True)
class Tune:
    """How a setting is tuned.

    Attributes:
        name: Dotted name of the setting.
        values: Those of the first rung, growing.
        by: Fields of the cells, of one grid at least; there is one best value for each combination of theirs.
        rungs: Shares of the full number of steps, growing; a run on a shorter rung has its whole schedule in it.
        keep: How many values go on from one rung to the next, and from the last rung to its other seeds.
        extend: How many values are tried beyond an edge of the last rung.
        seed: Of tuning runs, the first one of the last rung's: none of those that are reported.
        seeds: Of the last rung.
    """

    name: str
    values: tuple[Any, ...]
    by: tuple[str, ...] = ("mode",)
    rungs: tuple[float, ...] = (1.0,)
    keep: int = 3
    extend: int = 2
    seed: int = 1000
    seeds: int = 1

    def __post_init__(self) -> None:
        numbers = all(isinstance(v, int | float) and not isinstance(v, bool) and math.isfinite(v) for v in self.values)
        if not numbers or len(self.values) < 2 or list(self.values) != sorted(set(self.values)):
            raise ConfigError("tune.values", self.values, "must be two or more growing numbers")
        if not self.rungs or list(self.rungs) != sorted(set(self.rungs)) or not self.rungs[0] > 0 or self.rungs[-1] > 1:
            raise ConfigError("tune.rungs", self.rungs, "must be growing shares of the steps, such as [0.25, 1.0]")
        if self.keep < 2:
            raise ConfigError("tune.keep", self.keep, "must be at least 2: the best of one has no neighbours")
        if self.seeds < 1:
            raise ConfigError("tune.seeds", self.seeds, "must be at least 1")
        if self.extend < 0:
            raise ConfigError("tune.extend", self.extend, "must be 0 or more values beyond an edge")
        if not self.by:
            raise ConfigError("tune.by", self.by, 'must name the fields that a rate is tuned for, such as ["mode"]')


class Attempt(NamedTuple):
    """One tuning run: a value, the share of the steps, and the seed."""

    value: float
    rung: float
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuned:
    """The best of the values tried.

    Attributes:
        best: The value with the lowest loss; of equal ones the smallest.
        interior: Smaller and larger values were tried and were worse.
        next_value: What to try next if it is not interior: as far beyond the edge, in ratio, as its neighbour is
            within. None if interior, or if there is no such value.
        sound: A run with it did not diverge.
    """

    best: float
    interior: bool
    next_value: float | None
    sound: bool = True

    def told(self, name: str) -> str:
        """Returns it in words, ``name`` being that of the setting."""
        if self.interior:
            return f"{name} = {self.best:g}"
        if not self.sound:
            return f"{name} = {self.best:g}, with which a run diverged, as with all that was tried"
        beyond = "" if self.next_value is None else f": a larger extend in [tune] tries {self.next_value:g}"
        return f"{name} = {self.best:g}, which lies at the edge of what was tried{beyond}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """How far a tuning is.

    Attributes:
        tried: Values of which there is a run, growing.
        due: Attempts that can start now; none once there is a winner.
        winner: None while attempts are due.
    """

    tried: tuple[float, ...]
    due: tuple[Attempt, ...] = ()
    winner: Tuned | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """A search as the page tells it.

    Attributes:
        group: The fields of the cells that share the value.
        name: The tuned setting.
        search: How far it is.
        tokens: Of the longest runs so far.
    """

    group: CellKey
    name: str
    search: Search
    tokens: int


def search(tune: Tune, loss_of: Callable[[Attempt], float | None], possible: Callable[[float], bool]) -> Search:
    """Follows a tuning as far as its runs have come.

    Args:
        tune: How.
        loss_of: The loss of an attempt, infinite if it diverged; None if it was not run.
        possible: Says whether the setting may have a value beyond those declared.
    """
    tried: set[float] = set()
    steps = _steps(tune, possible)
    asked = next(steps)
    while True:
        losses = {attempt: loss_of(attempt) for attempt in asked}
        tried |= {attempt.value for attempt, loss in losses.items() if loss is not None}
        if due := tuple(attempt for attempt, loss in losses.items() if loss is None):
            return Search(tried=tuple(sorted(tried)), due=due)
        try:
            asked = steps.send([loss for loss in losses.values() if loss is not None])
        except StopIteration as end:
            return Search(tried=tuple(sorted(tried)), winner=end.value)


def _steps(tune: Tune, possible: Callable[[float], bool]) -> Generator[Sequence[Attempt], Sequence[float], Tuned]:
    """Yields the attempts that are needed next, is sent their losses, and returns the best value."""
    values, last = list(tune.values), tune.rungs[-1]
    for rung in tune.rungs[:-1]:
        losses = dict(zip(values, (yield [Attempt(value, rung, tune.seed) for value in values]), strict=True))
        most = len(losses) + tune.extend
        # Where everything diverged smaller values may not.
        while not _best(losses, tune.keep) and len(losses) < most:
            beyond = _beyond(losses, tune.values, possible)
            if beyond is None:
                break
            (losses[beyond],) = yield [Attempt(beyond, rung, tune.seed)]
        values = sorted(_best(losses, tune.keep))
        if not values:
            return _found(tune, losses, possible)  # the smallest value will show it again

    losses = dict(zip(values, (yield [Attempt(value, last, tune.seed) for value in values]), strict=True))
    most = len(values) + tune.extend
    # Beyond the edge while the best lies there, and beside it what an earlier rung dropped.
    while len(losses) < most and (beyond := _beyond(losses, tune.values, possible)) is not None:
        (losses[beyond],) = yield [Attempt(beyond, last, tune.seed)]
    if tune.seeds == 1:
        return _found(tune, losses, possible)

    # Who does not race counts as worse, but where the winner lies at the edge the value beyond it joins.
    means, racing = dict.fromkeys(losses, math.inf), _best(losses, tune.keep)
    while racing:
        found = iter((yield [Attempt(value, last, tune.seed + k) for value in racing for k in range(tune.seeds)]))
        for value in racing:
            means[value] = math.fsum(next(found) for _ in range(tune.seeds)) / tune.seeds
        beyond = _beyond(means, tune.values, possible) if len(means) < most else None
        racing = [] if beyond is None else [beyond]
    return _found(tune, means, possible)


def _found(tune: Tune, losses: Mapping[float, float], possible: Callable[[float], bool]) -> Tuned:
    """Returns the best value, with what the search would try next if it went on."""
    found = interior(losses)
    return replace(found, next_value=_beyond(losses, tune.values, possible), sound=math.isfinite(losses[found.best]))


def _best(losses: Mapping[float, float], keep: int) -> list[float]:
    """Returns the values that go on, best first; those that diverged never do."""
    return sorted((value for value in losses if math.isfinite(losses[value])), key=losses.__getitem__)[:keep]


def interior(losses: Mapping[float, float]) -> Tuned:
    """Returns the best value, whether it is interior to the values tried, and if not, the value to try next.

    Args:
        losses: Of every value tried, in any order; not finite where the run diverged. A single value is an edge, and
            twice as much is tried next.

    Raises:
        ValueError: There are no values.
    """
    if not losses:
        raise ValueError("there is nothing to choose from")
    tried = sorted(losses)
    ranked = [losses[value] if math.isfinite(losses[value]) else math.inf for value in tried]
    index = ranked.index(min(ranked))
    best = tried[index]
    if 0 < index < len(tried) - 1:
        return Tuned(best=best, interior=True, next_value=None)
    if len(tried) == 1:
        return Tuned(best=best, interior=False, next_value=2 * best if best > 0 else None)
    neighbour = tried[1 if index == 0 else -2]
    next_value = best * best / neighbour if min(best, neighbour) > 0 else None
    return Tuned(best=best, interior=False, next_value=next_value)


def _beyond(
    losses: Mapping[float, float], declared: Sequence[float], possible: Callable[[float], bool]
) -> float | None:
    """Returns the value to try beside the best if that lies at an edge of those tried; None if there is none."""
    found = interior(losses)
    if found.interior:
        return None
    if (beside := _beside(found.best, losses, declared)) is not None:
        return beside
    beyond = found.next_value
    if beyond is not None and all(isinstance(value, int) for value in declared):
        beyond = round(beyond)
    return beyond if beyond is not None and beyond not in losses and possible(beyond) else None


def _beside(best: float, losses: Iterable[float], declared: Sequence[float]) -> float | None:
    """Returns the declared neighbour of an edge that has no loss yet, if there is one."""
    losses = set(losses)
    smaller = [value for value in declared if value < best and value not in losses]
    larger = [value for value in declared if value > best and value not in losses]
    if best == min(losses) and smaller:
        return max(smaller)
    if best == max(losses) and larger:
        return min(larger)
    return None
