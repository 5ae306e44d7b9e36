r"""One direction of one link: releases bytes when they may arrive. Pure.

Every connection of the link is a *flow*. What a flow is offered waits in its own queue until it is *ready*, its delay
after it was offered; then it leaves at the rate that all flows of the lane share. They take turns of a few kilobytes,
so that a heartbeat on the control connection waits for at most one turn of the bulk connection and not for the
megabytes behind it::

    offer --> [ flow 1: ready at 0.040, 0.041, .. ] --\
    offer --> [ flow 2: ready at 0.043 ]            ----> turns --> rate --> take

What always holds: within a flow nothing is lost, reordered or changed in length; nothing leaves before it is ready;
within any time t no more than ``burst + rate * t`` bytes leave; and a flow holds no more than its window, so that
pressure reaches its sender. The window is twice what the delay keeps on its way at full rate, and never more than
:data:`MAX_WINDOW_BYTES`: the rate is reached, and no queue grows that a real link would not have.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field
from enum import StrEnum

from ops.links.condition import MEGA, Direction

#: Most bytes of a flow: about as much as TCP on Linux keeps under way.
MAX_WINDOW_BYTES = 4 << 20
MIN_WINDOW_BYTES = 64 << 10
#: The token bucket holds the rate's bytes in this time, and at least a packet.
BURST_S = 0.01
MIN_BURST_BYTES = 1500
#: A turn of a flow.
MAX_TURN_BYTES = 64 << 10
#: Time and level are floats: a level that falls short by less than a byte is full.
SLACK_BYTES = 1.0
SLACK_S = 1e-6


class Mark(StrEnum):
    """A mark that travels with the bytes of a connection and takes its time as they do."""

    OPEN = "open"  # the connection is being made, or has been
    END = "end"  # no more bytes follow
    RESET = "reset"  # the connection is gone


Item = bytes | Mark


@dataclass(frozen=True, slots=True)
class Delivery:
    """An arrival at the far end."""

    flow: int
    item: Item


@dataclass(slots=True)
class _Flow:
    """The items under way in one flow as (ready at, item), oldest first; later ones wait for earlier ones."""

    items: deque[tuple[float, Item]] = field(default_factory=deque)
    waiting_bytes: int = 0
    held: bool = False  # its receiver takes nothing for now

    def ready_by(self, now_s: float) -> bool:
        return not self.held and bool(self.items) and self.items[0][0] <= now_s + SLACK_S


class Lane:
    """The flows of one direction, which share its rate.

    Attributes:
        passed_bytes: Have arrived so far.
    """

    def __init__(self, direction: Direction, random_source: random.Random) -> None:
        self.passed_bytes = 0
        self._random = random_source
        self._flows: dict[int, _Flow] = {}
        self._turns: deque[int] = deque()  # the next turn comes first
        self._direction = direction
        self._level_bytes = self.burst_bytes  # of the bucket
        self._filled_at_s: float | None = None
        self._until_corrupt = self._draw_corruption()

    # --- conditions ---------------------------------------------------------------------------------------------

    @property
    def direction(self) -> Direction:
        """The current condition of the lane."""
        return self._direction

    @property
    def burst_bytes(self) -> float:
        """Capacity of the token bucket in bytes; unused without a rate."""
        return max(float(MIN_BURST_BYTES), self._direction.bytes_per_s * BURST_S)

    @property
    def window_bytes(self) -> int:
        """Bytes that a flow may hold; a single offer may exceed it by its own size."""
        way = self._direction
        if not way.bytes_per_s:
            return MAX_WINDOW_BYTES
        on_the_way = way.bytes_per_s * (way.delay_s + way.jitter_s)
        return min(MAX_WINDOW_BYTES, MIN_WINDOW_BYTES + round(2 * on_the_way))

    def change(self, direction: Direction, now_s: float) -> None:
        """Sets the lane's condition; bytes under way keep their delay."""
        if direction == self._direction:
            return
        self._refill(now_s)
        corruption = self._direction.corrupt_per_mb
        self._direction = direction
        self._level_bytes = min(self._level_bytes, self.burst_bytes)
        if direction.corrupt_per_mb != corruption:
            self._until_corrupt = self._draw_corruption()

    # --- flows --------------------------------------------------------------------------------------------------

    def room(self, flow: int) -> int:
        """Returns the bytes that the flow can still take; 0 if it is full or does not exist."""
        known = self._flows.get(flow)
        return 0 if known is None else max(0, self.window_bytes - known.waiting_bytes)

    def offer(self, flow: int, item: Item, now_s: float) -> None:
        """Appends bytes or a mark to a flow; the first offer creates the flow."""
        known = self._flows.get(flow)
        if known is None:
            known = self._flows[flow] = _Flow()
            self._turns.append(flow)
        way = self._direction
        drawn_s = way.delay_s + (self._random.uniform(0.0, way.jitter_s) if way.jitter_s else 0.0)
        known.items.append((now_s + drawn_s, item))  # and not before earlier items
        if not isinstance(item, Mark):
            known.waiting_bytes += len(item)

    def hold(self, flow: int, held: bool) -> None:
        """Sets whether the flow's receiver takes nothing for now."""
        known = self._flows.get(flow)
        if known is not None:
            known.held = held

    def drop(self, flow: int) -> None:
        """Drops a flow and its bytes, because its connection is gone."""
        if self._flows.pop(flow, None) is not None:
            self._turns.remove(flow)

    # --- arriving -----------------------------------------------------------------------------------------------

    def next_s(self) -> float | None:
        """Returns the time of the next possible arrival; None if nothing can arrive without a change."""
        if self._direction.blocked:
            return None
        seen_s = float("-inf") if self._filled_at_s is None else self._filled_at_s
        times_s = []
        for name in self._turns:
            flow = self._flows[name]
            if flow.held or not flow.items:
                continue
            if not flow.ready_by(seen_s):
                times_s.append(flow.items[0][0])
            else:
                rate = self._direction.bytes_per_s
                lacking = max(0.0, self._needed(flow) - self._level_bytes)
                times_s.append(seen_s + (lacking / rate if rate else 0.0))
                break  # those behind it wait for its turn, ready or not
        return min(times_s, default=None)

    def take(self, now_s: float) -> list[Delivery]:
        """Returns the arrivals until ``now_s``, in order."""
        self._refill(now_s)
        if self._direction.blocked:
            return []
        arrived: list[Delivery] = []
        passed_over = 0  # flows in a row that had nothing ready
        while passed_over < len(self._turns):
            flow = self._flows[self._turns[0]]
            if not flow.ready_by(now_s):
                passed_over += 1
            elif (item := self._turn(flow)) is None:
                break  # the bucket is empty; it stays this flow's turn
            else:
                passed_over = 0
                arrived.append(Delivery(self._turns[0], item))
            self._turns.rotate(-1)
        return arrived

    def _turn(self, flow: _Flow) -> Item | None:
        """Returns the part of a flow's front that may be sent at its turn; None while the rate forbids it."""
        ready_s, item = flow.items[0]
        if isinstance(item, Mark):
            flow.items.popleft()
            return item
        if self._direction.bytes_per_s:
            needed = self._needed(flow)
            if self._level_bytes + SLACK_BYTES < needed:
                return None
            self._level_bytes -= needed
            piece, rest = item[:needed], item[needed:]
        else:
            piece, rest = item, b""
        if rest:
            flow.items[0] = (ready_s, rest)
        else:
            flow.items.popleft()
        flow.waiting_bytes -= len(piece)
        self.passed_bytes += len(piece)
        return self._corrupted(piece)

    def _needed(self, flow: _Flow) -> int:
        """Returns the bytes of the flow's next turn."""
        item = flow.items[0][1]
        return 0 if isinstance(item, Mark) else min(len(item), MAX_TURN_BYTES, int(self.burst_bytes))

    def _refill(self, now_s: float) -> None:
        if self._filled_at_s is not None and now_s > self._filled_at_s:
            brought = (now_s - self._filled_at_s) * self._direction.bytes_per_s
            self._level_bytes = min(self.burst_bytes, self._level_bytes + brought)
        if self._filled_at_s is None or now_s > self._filled_at_s:
            self._filled_at_s = now_s

    # --- damage -------------------------------------------------------------------------------------------------

    def _draw_corruption(self) -> float:
        """Draws the number of bytes until the next corrupted one, from a Poisson process."""
        per_byte = self._direction.corrupt_per_mb / MEGA
        return self._random.expovariate(per_byte) if per_byte else float("inf")

    def _corrupted(self, piece: bytes) -> bytes:
        if self._until_corrupt >= len(piece):
            self._until_corrupt -= len(piece)
            return piece
        damaged = bytearray(piece)
        at = self._until_corrupt
        while at < len(damaged):
            damaged[int(at)] ^= self._random.randrange(1, 256)
            at += max(1.0, self._draw_corruption())
        self._until_corrupt = at - len(damaged)
        return bytes(damaged)
