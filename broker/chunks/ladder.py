"""Chooses what is sent over a link by its rate: a number format, and a share of the rounds. Pure.

The choices are a ladder: the number format of the recipe, narrower ones, and then the narrowest in ever fewer rounds.
Each level has its price in bytes for each element that rounds ask for. A level is left when it takes more of the link
than :data:`FULL`, for one that takes no more than :data:`ROOMY`; and for a wider one only when that would take no more
than :data:`HALF` for a while. So nothing goes back and forth while a rate wobbles.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import Final

from broker.wire.lengths import BLOCK_ELEMENTS, encoded_bytes
from broker.wire.messages import Codec

#: Bytes of an element, scales included; wide to narrow.
BYTES: Final = {
    each: encoded_bytes(each, BLOCK_ELEMENTS) / BLOCK_ELEMENTS
    for each in (Codec.F32, Codec.BF16, Codec.INT8, Codec.INT4)
}
#: Shares of the rounds that may be taken part in.
SHARES: Final = (1 / 2, 1 / 4, 1 / 8, 1 / 16)
#: Parts of the link that its level takes: too much, enough room, and enough room for a wider level.
FULL: Final = 0.8
ROOMY: Final = 0.6
HALF: Final = 0.5
#: For so long it must hold before a level is left, for a narrower and for a wider one.
NARROWER_AFTER_S: Final = 2.0
WIDER_AFTER_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class Level:
    """What is sent: elements in a number format, in a share of the rounds."""

    codec: Codec
    share: float = 1.0

    @property
    def price(self) -> float:
        """Bytes for each element that rounds ask for."""
        return BYTES[self.codec] * self.share


def codecs_from(codec: Codec) -> list[Codec]:
    """Returns a number format and all that are narrower, wide to narrow."""
    formats = list(BYTES)
    return formats[formats.index(codec) :]


class Demand:
    """Elements that rounds ask for in a second: those of the last two intervals of every fragment.

    Args:
        fragments: How many there are.
    """

    def __init__(self, fragments: int) -> None:
        self._asked: deque[tuple[float, int]] = deque(maxlen=2 * fragments + 1)
        self._fragments = fragments

    def asked(self, elements: int, now_s: float) -> None:
        """A round of a fragment has begun."""
        self._asked.append((now_s, elements))

    @property
    def elements_per_s(self) -> float | None:
        """The rate; None until every fragment was asked for."""
        if len(self._asked) <= self._fragments or self._asked[-1][0] <= self._asked[0][0]:
            return None
        first_s, first = self._asked[0]
        return (sum(elements for _, elements in self._asked) - first) / (self._asked[-1][0] - first_s)


class Ladder:
    """The level that suits a link.

    Args:
        codec: Of the recipe: the first level.
        shares: Whether rounds may be left out, too.

    Attributes:
        level: That of now.
    """

    def __init__(self, codec: Codec, *, shares: bool) -> None:
        levels = [Level(each) for each in codecs_from(codec)]
        self._levels = levels + [Level(levels[-1].codec, share) for share in SHARES] if shares else levels
        self.level = levels[0]
        self._tight_since_s = self._wide_since_s = math.inf

    def look(self, bytes_per_s: float | None, elements_per_s: float | None, now_s: float) -> bool:
        """Moves to the level that suits the rates of link and rounds; returns True if it is another one.

        A rate that is not known changes nothing.
        """
        if bytes_per_s is None or elements_per_s is None:
            self._tight_since_s = self._wide_since_s = math.inf
            return False
        wider = self._first(HALF, bytes_per_s, elements_per_s)
        tight = self.level.price * elements_per_s > FULL * bytes_per_s
        self._tight_since_s = min(self._tight_since_s, now_s) if tight else math.inf
        self._wide_since_s = min(self._wide_since_s, now_s) if wider.price > self.level.price else math.inf
        if now_s - self._tight_since_s >= NARROWER_AFTER_S:
            found = self._first(ROOMY, bytes_per_s, elements_per_s)
        elif now_s - self._wide_since_s >= WIDER_AFTER_S:
            found = wider
        else:
            return False
        self._tight_since_s = self._wide_since_s = math.inf
        before, self.level = self.level, found
        return found != before

    def _first(self, part: float, bytes_per_s: float, elements_per_s: float) -> Level:
        """Returns the widest level that takes no more than a part of a link; else the narrowest."""
        fits = (each for each in self._levels if each.price * elements_per_s <= part * bytes_per_s)
        return next(fits, self._levels[-1])
