"""Links that are cut one by one, each in one direction or in both, and come back in another order."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

#: The end of a link that is no broker.
REDIS = -1


class Way(StrEnum):
    """What of a link is cut."""

    BOTH = "both"
    UP = "up"  # what the process says
    DOWN = "down"  # what it would hear


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """Between a process and a broker, or Redis."""

    process: str
    broker: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """A link that nothing passes, from when and for how long; a cut of Redis is always one of both directions."""

    link: Link
    at_s: float
    for_s: float
    way: Way = Way.BOTH

    def stops(self, direction: str, now_s: float) -> bool:
        """Whether it keeps a message from going ``up`` or ``down`` now."""
        return self.at_s <= now_s < self.at_s + self.for_s and self.way in (Way.BOTH, direction)


def links(processes: Iterable[str], stations: Iterable[str], brokers: int) -> tuple[Link, ...]:
    """Returns every link of a run: of each process to each broker, and of each of its ``stations`` to Redis."""
    every = [Link(process=process, broker=broker) for process in processes for broker in range(brokers)]
    return (*every, *(Link(process=station, broker=REDIS) for station in stations))


def swizzled(
    rng: random.Random, chosen: Sequence[Link], begin_s: float, end_s: float, ways: Sequence[Way] = tuple(Way)
) -> tuple[Cut, ...]:
    """Cuts links in a random order in the first half of a period, and restores them in another in the second half."""
    middle_s = (begin_s + end_s) / 2
    cuts = (
        (link, rng.uniform(begin_s, middle_s), rng.uniform(middle_s, end_s), rng.choice(ways))
        for link in rng.sample(chosen, len(chosen))
    )
    return tuple(
        Cut(link=link, at_s=from_s, for_s=to_s - from_s, way=Way.BOTH if link.broker == REDIS else way)
        for link, from_s, to_s, way in cuts
    )
