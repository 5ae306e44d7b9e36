"""Tracks bytes for an aggregator that the kernel has not sent yet. Pure.

Islands send a contribution again when they have heard nothing of it for a while, and cannot see that it waits here,
behind others, for an aggregator's slow link. A copy would queue behind its own first one, and each copy makes the wait
of the next contribution longer, until the link carries nothing else. What waits in the relay's own queue is known there
(:mod:`broker.routing.queues`); what ZeroMQ and the kernel hold is known by the kernel's account of what the connection
has carried (:mod:`broker.transport.tcp`). Once the first copy has left, the next one passes: the first may have been
lost. So does one that comes at once: nobody is impatient yet, so the first has arrived and was not what it should be.
"""

from __future__ import annotations

from collections.abc import Hashable

from broker.routing.deafness import Carried
from broker.routing.resending import PATIENT_S

#: A kernel may keep an acknowledgement back for up to 0.2 s; islands wait for longer before they send anything again.
ACKNOWLEDGED_S = 0.5


class Unsent:
    """One connection, from its first message on; where its account is not known, nothing is known here."""

    __slots__ = ("_base_bytes", "_given_bytes", "_known", "_leaves")

    def __init__(self) -> None:
        self._known = False
        self._base_bytes = 0  # carried, or about to be, when what is counted here began
        self._given_bytes = 0  # since then
        self._leaves: dict[Hashable, tuple[int, float]] = {}  # given by then, and when; in that order

    def account(self, carried: Carried | None, now_s: float) -> None:
        """Takes note of what the connection has carried by now; where nothing waits, all but the latest has left."""
        self._known = carried is not None
        if carried is None:
            self._leaves.clear()
            return
        left_bytes = carried.up - self._base_bytes
        latest_s = now_s - (PATIENT_S if carried.waiting else ACKNOWLEDGED_S)
        for what, (by_bytes, since_s) in list(self._leaves.items()):
            if by_bytes > left_bytes and since_s > latest_s:
                break
            del self._leaves[what]
        if not self._leaves:
            self._base_bytes, self._given_bytes = carried.up + carried.waiting, 0

    def gave(self, what: Hashable, size_bytes: int, now_s: float) -> None:
        """Something was handed to the connection, of which it carries at least so much."""
        if self._known:
            self._given_bytes += size_bytes
            self._leaves.pop(what, None)
            self._leaves[what] = self._given_bytes, now_s

    def took_back(self, what: Hashable, size_bytes: int) -> None:
        """The connection did not take it after all."""
        found = self._leaves.pop(what, None)
        if found is None:
            return
        self._given_bytes -= size_bytes
        for behind, (by_bytes, since_s) in self._leaves.items():
            if by_bytes > found[0]:
                self._leaves[behind] = by_bytes - size_bytes, since_s

    def holds(self, what: Hashable, now_s: float) -> bool:
        """Whether the last copy is still here, by the last account; nothing is believed to be for ever."""
        found = self._leaves.get(what)
        return found is not None and now_s >= found[1] + ACKNOWLEDGED_S
