"""The other hosts of a single host: none. See :class:`islands.multihost.speaking.Speaking`. Shell."""

from __future__ import annotations

from collections.abc import Coroutine, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from broker.wire.fragments import Region
from broker.wire.messages import Block, Codec, RunSettings, Version
from broker.wire.ranges import StepRange
from islands.protocol.events import Joined
from islands.session.exchange import Due, Install, StateFound
from islands.session.training_state import Snapshot

#: From and to step of contributions.
Keys = frozenset[tuple[int, int]]


class Alone:
    """No other hosts.

    Args:
        due: What the core has for the training threads.

    Attributes:
        num_hosts: How many there are, this one among them.
        boundaries: How many the core has seen.
    """

    num_hosts = 1

    def __init__(self, due: Due) -> None:
        self.due, self.boundaries = due, 0

    async def __aenter__(self) -> Self:
        """Opens what there is to open."""
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Closes it."""

    def work(self, within_s: float) -> list[Coroutine[Any, Any, None]]:
        """Returns coroutines that run side by side until cancelled; ``within_s``: time for hosts to come."""
        del within_s
        return []

    async def assembled(self) -> Mapping[str, frozenset[Region]]:
        """Returns the regions of each tensor that this host hands over, where there are several."""
        return {}

    def joined(self, joined: Joined, settings: RunSettings, blocks: tuple[Block, ...]) -> None:
        """The island is a member."""

    def encode(self, fragment_id: int, seed: int) -> None:
        """Has other hosts encode their part of a fragment of version 0."""

    def capture(self, fragment_id: int, boundary: int, steps: StepRange, codec: Codec) -> None:
        """Has other hosts encode their part of a contribution, from the copies of a boundary."""

    def send_part(self, fragment_id: int, steps: StepRange | None, island_id: str, incarnation: int) -> None:
        """Has other hosts send their part of a contribution; or with no steps, of a fragment of version 0."""

    def open_parts(self, open_steps: Mapping[int, Keys]) -> None:
        """These contributions of each fragment may have to be sent again."""

    async def prepare(self, version: Version, keep: float, *, mixes: bool) -> None:
        """A version is placed; returns when it is, everywhere else."""

    def placed(self, install: Install) -> None:
        """A version is placed on all hosts."""

    async def whole(self, snapshot: Snapshot, boundary: int, local_names: Sequence[str]) -> Snapshot:
        """Returns a copy of the state with the regions of all hosts in it."""
        del boundary, local_names
        return snapshot

    def begin(self, begun: StateFound) -> None:
        """Training begins with this state of the optimizer."""

    def use(self, broker: int) -> None:
        """The island speaks through another broker."""

    def end(self, *, delivered: bool, finished: bool) -> None:
        """Tells other hosts whether a stopped island has delivered all its progress, and finished."""

    def look(self) -> None:
        """Does what there is to do."""

    async def goodbye(self, reason: str) -> None:
        """The island leaves."""
