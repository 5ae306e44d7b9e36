"""Fits the pseudo-gradients of an island and the versions of an aggregator to the links. Pure.

*Up* each island chooses for itself (:class:`LinkChoice`): the number format, and the share of the rounds that it takes
part in. A round that is left out costs nothing but time: its steps are in the next contribution.

*Down* a version is what islands hold once they have added its difference, so it is the same bits for all of them, and
one number format serves the whole fleet (:class:`VersionCodec`): that of the recipe, unless a live island's link is too
narrow for it. Who cannot take every version even so gets the newest one whenever there is room
(:mod:`broker.routing.deliveries`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from broker.chunks.ladder import Demand, Ladder
from broker.chunks.meter import Link
from broker.wire.messages import Codec, Heartbeat, LinkUse, Pacing, Recipe


class LinkChoice:
    """What an island sends, from one heartbeat's answer to the next.

    Args:
        recipe: Of the run: where islands wait for each other, all send the same, and nothing is left out.
        fragments: Of the model.
        shares: Whether rounds may be left out, too.
    """

    def __init__(self, recipe: Recipe, fragments: int, *, shares: bool) -> None:
        self._adapts = recipe.adapt and recipe.pacing is not Pacing.LOCKSTEP
        self._ladder = Ladder(recipe.codec, shares=shares)
        self._demand = Demand(fragments)
        self._link = Link()

    @property
    def codec(self) -> Codec:
        """Of the next pseudo-gradient."""
        return self._ladder.level.codec

    @property
    def rounds(self) -> int:
        """It takes part in one of so many rounds of each fragment."""
        return round(1 / self._ladder.level.share)

    @property
    def use(self) -> LinkUse:
        """What its heartbeats say."""
        up, down, round_trip_s = self._link
        return LinkUse(up=up, down=down, round_trip_s=round_trip_s, codec=self.codec, share=self._ladder.level.share)

    def asked(self, elements: int, now_s: float) -> None:
        """A round of a fragment of so many elements has begun."""
        self._demand.asked(elements, now_s)

    def look(self, link: Link, now_s: float) -> bool:
        """Takes in what is known of the link; returns whether another choice suits it better."""
        self._link = link
        return self._adapts and self._ladder.look(link.up, self._demand.elements_per_s, now_s)


class VersionCodec:
    """The number format of the next version.

    Args:
        recipe: Of the run. Whole versions (float32) stay whole.
        sizes: Elements of each fragment of the model.
        ours: The fragments that are merged here, of those that move.
        moving: All that move, in any shard.
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
        """That of now."""
        return self._ladder.level.codec

    def merges(self, fragment_id: int, beats: Iterable[Heartbeat | None], now_s: float) -> float | None:
        """Takes in that a fragment is merged, and the last word of each live island.

        Returns:
            The bytes per second of the narrowest link down if another number format suits it better; else None.
        """
        self._demand.asked(self._sizes[fragment_id], now_s)
        if not self._adapts:
            return None
        links = (None if beat is None else beat.link for beat in beats)
        narrowest = min((link.down for link in links if link is not None and link.down is not None), default=None)
        ours = self._demand.elements_per_s
        wanted = None if ours is None else ours * self._all_by_ours
        return narrowest if self._ladder.look(narrowest, wanted, now_s) else None
