"""Assembly: joins the parts of a contribution from several hosts; it counts once all are here.

Each host sends the regions that live on its devices; the speaker's message has the counters, too. The parts of one
range of steps wait here. With the last of them they are one contribution, or one fragment of version 0, like any other:
its tensors are whole or in pieces, its norm is that of all parts, a flaw of one is a flaw of all. Until then nothing is
booked, and the fate of the contribution is unknown: the island sends all parts again after its usual pause.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from aggregator.interface.events import Flaw, Piece, Pieced, Received
from aggregator.state.run import Run
from broker.wire.fragments import flaw_in
from broker.wire.messages import RETRY_REASONS, Contribution, HostPart, Reason, Seed

#: So many unfinished contributions of one island to one fragment wait for their parts; the oldest goes first.
MOST_UNFINISHED = 2


class Key(NamedTuple):
    """One contribution of one life, or with no steps, its seed of one fragment."""

    island_id: str
    incarnation: int
    fragment_id: int
    from_step: int
    to_step: int


@dataclass(slots=True)
class Unfinished:
    """The parts of one contribution received so far."""

    hosts: int
    parts: dict[int, Received] = field(default_factory=dict)  #: by host

    @property
    def nbytes(self) -> int:
        """Returns the bytes of all parts."""
        return sum(part.payload_bytes for part in self.parts.values())


class Assembly:
    """Keeps the parts of contributions until all of one are here."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._unfinished: dict[Key, Unfinished] = {}

    @property
    def waiting_bytes(self) -> int:
        """Returns the bytes of parts that wait for others."""
        return sum(each.nbytes for each in self._unfinished.values())

    def take(self, event: Received) -> Received | None:
        """Takes a message of a known life; returns it if it is whole, or all its parts once they are here."""
        message, envelope = event.envelope.message, event.envelope
        match message:
            case Contribution(hosts=hosts, steps=steps) if hosts > 1:
                host, steps_of = 0, (steps.from_step, steps.to_step)
            case Seed(hosts=hosts) if hosts > 1:
                host, steps_of = 0, (0, 0)
            case HostPart(host=host, hosts=hosts):
                steps_of = (message.from_step, message.to_step)
            case _:
                return event
        if event.flaw is not None and event.flaw.reason in RETRY_REASONS:
            return None  # damaged on its way: as if it had not come
        if message.fragment_id not in self._run.model.fragments:
            return None if isinstance(message, HostPart) else event  # which is refused for that
        key = Key(envelope.sender, envelope.incarnation, message.fragment_id, *steps_of)
        self._forget(key)
        found = self._unfinished.get(key)
        if found is None or found.hosts != hosts:
            found = self._unfinished[key] = Unfinished(hosts)
        found.parts[host] = event
        if len(found.parts) < hosts:
            self._bound(key)
            return None
        del self._unfinished[key]
        return self._whole(found)

    def _forget(self, key: Key) -> None:
        """Drops the parts of an island's earlier lives."""
        for other in [k for k in self._unfinished if k.island_id == key.island_id and k.incarnation != key.incarnation]:
            del self._unfinished[other]

    def _bound(self, key: Key) -> None:
        """Drops the oldest parts if too many wait: of this island and fragment, or in bytes of all."""
        same = [k for k in self._unfinished if (k.island_id, k.fragment_id) == (key.island_id, key.fragment_id)]
        for oldest in same[:-MOST_UNFINISHED]:
            del self._unfinished[oldest]
        while self._unfinished and self.waiting_bytes > self._run.model.held_bytes - self._run.model.waiting_bytes():
            del self._unfinished[next(iter(self._unfinished))]

    def _whole(self, found: Unfinished) -> Received:
        """Returns all parts as one message of the speaker."""
        ordered = [found.parts[host] for host in sorted(found.parts)]
        spoken = ordered[0]
        flaw = next((part.flaw for part in ordered if part.flaw is not None), None)
        message = spoken.envelope.message
        assert isinstance(message, Contribution | Seed)
        payload: tuple[Pieced, ...] = ()
        if flaw is None:
            payload, flaw = self._payload(message, ordered)
        message = replace(message, hosts=1, places=(), payload=payload)
        norms = [part.norm for part in ordered if part.norm is not None]
        return replace(
            spoken,
            envelope=replace(spoken.envelope, message=message),
            flaw=flaw,
            norm=None if flaw is not None else math.sqrt(math.fsum(norm * norm for norm in norms)),
            payload_bytes=found.nbytes,
        )

    def _payload(self, spoken: Contribution | Seed, ordered: list[Received]) -> tuple[tuple[Pieced, ...], Flaw | None]:
        """Puts the buffers of all parts at their tensors; or returns why they are not the fragment."""
        manifest = self._run.model.manifest
        assert manifest is not None  # or there would be no fragment of which a part was kept
        tensors = manifest.fragments[spoken.fragment_id]
        pieces: list[list[Piece]] = [[] for _ in tensors]
        for part in ordered:
            message = part.envelope.message
            assert isinstance(message, Contribution | Seed | HostPart)
            for place, encoded in zip(message.places, message.payload, strict=True):
                pieces[place.tensor].append(Piece(place.start, encoded))
        for tensor, held in zip(tensors, pieces, strict=True):
            why = flaw_in([piece.region for piece in held], tensor.shape)
            if why:
                return (), Flaw(reason=Reason.WRONG_SHAPE, detail=f"{tensor.name} of {len(ordered)} hosts: {why}")
        return tuple(Pieced(t.shape, tuple(held)) for t, held in zip(tensors, pieces, strict=True)), None
