"""Fits the pseudo-gradients of an island and the versions of an aggregator to the links. Pure.

*Up* each island chooses for itself (:class:`LinkChoice`): the number format, and the share of the rounds that it takes
part in. A round that is left out costs nothing but time: its steps are in the next contribution.

*Down* a version is what islands hold once they have added its difference, so it is the same bits for all of them, and
one number format serves the whole fleet (:class:`VersionCodec`): that of the recipe, unless a live island's link is too
narrow for it. An island that still cannot take every version gets the newest one whenever there is room
(:mod:`broker.routing.deliveries`).

The choices are a ladder: the number format of the recipe, narrower ones, and then the narrowest in ever fewer rounds.
Each level has its price in bytes for each element that rounds ask for. A level is left when it takes more of the link
than :data:`FULL`, for one that takes no more than :data:`ROOMY`; and for a wider one only when that would take no more
than :data:`HALF` for a while. So nothing goes back and forth while a rate wobbles.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from broker.chunks.meter import Link
from broker.wire.messages import Codec, Heartbeat, LinkUse, Pacing, Recipe
from broker.wire.number_formats import BLOCK_ELEMENTS, encoded_bytes

#: Bytes of an element, scales included; wide to narrow.
BYTES: Final = {each: encoded_bytes(each, BLOCK_ELEMENTS) / BLOCK_ELEMENTS for each in Codec}
#: Shares of the rounds that may be taken part in.
SHARES: Final = (1 / 2, 1 / 4, 1 / 8, 1 / 16)
#: Parts of the link that its level takes: too much, enough room, and enough room for a wider level.
FULL: Final = 0.8
ROOMY: Final = 0.6
HALF: Final = 0.5
#: How long that must hold before a level is left, for a narrower and for a wider one.
NARROWER_AFTER_S: Final = 2.0
WIDER_AFTER_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class Level:
    """One step of the ladder: number format and share of the rounds."""

    codec: Codec
    share: float = 1.0

    @property
    def price(self) -> float:
        """Bytes sent for each element that rounds ask for."""
        return BYTES[self.codec] * self.share


class Demand:
    """Elements per second that rounds ask for, measured over the last two intervals of every fragment."""

    def __init__(self, fragments: int) -> None:
        self._asked: deque[tuple[float, int]] = deque(maxlen=2 * fragments + 1)
        self._fragments = fragments

    def asked(self, elements: int, now_s: float) -> None:
        """Notes that a round of a fragment has begun."""
        self._asked.append((now_s, elements))

    @property
    def elements_per_s(self) -> float | None:
        """The rate; None until every fragment had a round."""
        if len(self._asked) <= self._fragments or self._asked[-1][0] <= self._asked[0][0]:
            return None
        times_s, elements = zip(*self._asked, strict=True)
        return float((sum(elements) - elements[0]) / (times_s[-1] - times_s[0]))


class Ladder:
    """The ``level`` that suits a link: the first has the recipe's codec, the last ones leave rounds out."""

    def __init__(self, codec: Codec, *, shares: bool) -> None:
        formats = list(BYTES)
        levels = [Level(each) for each in formats[formats.index(codec) :]]
        self._levels = levels + [Level(levels[-1].codec, share) for share in SHARES] if shares else levels
        self.level = levels[0]
        self._tight_since_s = self._wide_since_s = math.inf

    def look(self, bytes_per_s: float | None, elements_per_s: float | None, now_s: float) -> bool:
        """Moves to the level that suits the rates of link and rounds; returns True if the level changed.

        While a rate is unknown nothing changes.
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
        """Returns the widest level that takes at most ``part`` of the link; else the narrowest."""
        fits = (each for each in self._levels if each.price * elements_per_s <= part * bytes_per_s)
        return next(fits, self._levels[-1])


class LinkChoice:
    """Chooses an island's number format and share of the rounds, by its link.

    If the recipe makes islands wait for each other, all use its format, and none leaves a round out.
    """

    def __init__(self, recipe: Recipe, fragments: int, *, shares: bool) -> None:
        self._adapts = recipe.adapt and recipe.pacing is not Pacing.LOCKSTEP
        self._ladder = Ladder(recipe.codec, shares=shares)
        self._demand = Demand(fragments)
        self._link = Link()

    @property
    def codec(self) -> Codec:
        """The number format of the next pseudo-gradient."""
        return self._ladder.level.codec

    @property
    def rounds(self) -> int:
        """The island takes part in one of this many rounds of each fragment."""
        return round(1 / self._ladder.level.share)

    @property
    def use(self) -> LinkUse:
        """Link and choice, as heartbeats report them."""
        up, down, round_trip_s = self._link
        return LinkUse(up=up, down=down, round_trip_s=round_trip_s, codec=self.codec, share=self._ladder.level.share)

    def asked(self, elements: int, now_s: float) -> None:
        """Notes that a round of a fragment of ``elements`` has begun."""
        self._demand.asked(elements, now_s)

    def look(self, link: Link, now_s: float) -> bool:
        """Takes a new measurement of the link; returns True if the choice changed."""
        self._link = link
        return self._adapts and self._ladder.look(link.up, self._demand.elements_per_s, now_s)


class VersionCodec:
    """The number format of the next version; whole versions (float32) stay whole.

    Args:
        recipe: The run's recipe.
        sizes: Elements of each fragment of the model.
        ours: The moving fragments that this shard merges.
        moving: The moving fragments of all shards.
    """

    def __init__(self, recipe: Recipe, sizes: Sequence[int], ours: Collection[int], moving: Collection[int]) -> None:
        base = recipe.codec_of_versions
        self._adapts = recipe.adapt and base is not Codec.F32 and recipe.pacing is not Pacing.LOCKSTEP
        self._ladder = Ladder(base, shares=False)
        self._demand = Demand(len(ours))
        self._sizes = sizes
        own = sum(sizes[p] for p in ours)
        self._all_by_ours = sum(sizes[p] for p in moving) / own if own else 1.0

    @property
    def codec(self) -> Codec:
        """The current codec."""
        return self._ladder.level.codec

    def merges(self, fragment_id: int, beats: Iterable[Heartbeat | None], now_s: float) -> float | None:
        """Chooses again as a fragment is merged, by the last heartbeat of each live island.

        Returns:
            The bytes per second of the narrowest link down if another number format suits it better; else None.
        """
        self._demand.asked(self._sizes[fragment_id], now_s)
        if not self._adapts:
            return None
        links = [beat.link for beat in beats if beat is not None]
        narrowest = min([link.down for link in links if link is not None and link.down is not None], default=None)
        ours = self._demand.elements_per_s
        wanted = None if ours is None else ours * self._all_by_ours
        return narrowest if self._ladder.look(narrowest, wanted, now_s) else None
