"""One term of a leader: an epoch and the lease that it holds for it. Shell."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Self

from aggregator.config import AggregatorConfig
from aggregator.events import Commit
from aggregator.process.lease import LeaseKey
from aggregator.standby.candidate_events import Lead
from aggregator.standby.replication import Replication
from aggregator.standby.replication_events import Renewed, RenewFailed
from aggregator.state.founding import Founding
from broker.registry.registry import Registry
from broker.wire.errors import Unavailable


class Term:
    """The right to lead under one epoch, with the lease that says so.

    Args:
        name: Of the store that leads.
        lead: How it came to lead.
        registry: Closed with the term.
        shard: Of the aggregator.
    """

    def __init__(self, name: str, lead: Lead, registry: Registry, shard: int) -> None:
        self.name, self.epoch, self.founding = name, lead.epoch, lead.founding
        self._lease = LeaseKey(registry, shard)
        self._registry = registry

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._registry.aclose()

    def replication(
        self, config: AggregatorConfig, commits: Mapping[int, Commit], foundings: tuple[Founding, ...], now_s: float
    ) -> Replication:
        """Returns what decides, in this term, when something is durable everywhere it must be."""
        return Replication(
            name=self.name,
            epoch=self.epoch,
            lease_s=config.lease_s,
            standby_lag_s=config.standby_lag_s,
            commits=commits,
            foundings=foundings,
            now_s=now_s,
        )

    async def renew(self, in_sync: tuple[str, ...], standbys: tuple[str, ...]) -> Renewed | RenewFailed:
        """Renews the lease, says who is in sync and which standbys are heard, and returns what came of it."""
        try:
            granted, holder, epoch = await self._lease.renew(
                holder=self.name, epoch=self.epoch, in_sync=in_sync, standbys=standbys
            )
        except Unavailable as err:
            return RenewFailed(detail=str(err))
        return Renewed(granted=granted, holder=holder, epoch=epoch)

    async def give_up(self, to: str) -> None:
        """Leaves the lease to a standby; where Redis is away it runs out."""
        with suppress(Unavailable):
            await self._lease.give_up(holder=self.name, epoch=self.epoch, to=to)

    async def end(self) -> None:
        """Says in the lease that the run has ended, if Redis can be asked."""
        with suppress(Unavailable):
            await self._lease.end(holder=self.name, epoch=self.epoch)
