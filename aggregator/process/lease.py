"""The lease of a shard in Redis, one key, changed by compare-and-set alone; and a leader's term.

    lease:{shard}    hash    holder, epoch, in_sync (JSON list of names), synced (the epoch under which these were in
                             sync), renewed_at (clock of Redis), renewal (a number that grows within an epoch),
                             standbys (JSON list: who is heard); ended, at the end

Leading is safe without it: a version is published only once it is durable at everyone in the *in-sync set*, and nobody
else may take the lease. So the two things that a lease decides, who may take over and when, are decided on one key, and
the clock that runs out is that of Redis. Rules of the two scripts:

* **take**: granted if there is no key and the caller expects none; or the key has the epoch that the caller expects,
  the caller is in the in-sync set, and nobody has renewed it for ``lease_s``. Its holder waits as well: a copy of its
  store may be leading under its name. A key whose epoch is lower than that of the caller's store comes from a Redis
  that lost writes, and counts as none. One without an in-sync set is of an earlier release, whose aggregator led
  without failover: it goes to the store that has its epoch. Who was in sync stays so until the taker renews for the
  first time, since it publishes nothing before that: if it dies at once, any other one of them may lead. Where nobody
  was, or the key says nothing, the taker alone is, and until it renews ``synced`` is 0: no lease vouches for its store.
* **renew**: granted to the holder under its epoch, who says anew who is in sync; to a leader of a higher epoch than the
  key has, since a Redis that lost writes knows less than a leader's store; and where there is no key. Never otherwise.

A renewal that was given up may still reach Redis, after later ones: a standby that they took out of the set would be
back in it. So renewals are numbered, and one that comes after its successor is refused. And a leader puts nothing right
in Redis before it has renewed once what it took: a leader of before may have gone on with what Redis came back with.

An aggregator without failover asks nobody whether it may lead: it says that it does (:meth:`LeaseKey.lead`), alone in
sync, so that status knows, and a standby that is added later finds a lease of its own kind.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, Self

from redis.asyncio import Redis
from redis.commands.core import AsyncScript

from aggregator.standby.candidate_events import Lead
from aggregator.standby.replication_events import Renewed, RenewFailed
from broker.base.errors import Unavailable
from broker.registry.registry import Registry
from broker.wire.records import LeaseView

#: A lease that runs out after so long never does.
_FOR_EVER_S = 1e9

TAKE = """
local held = redis.call('HMGET', KEYS[1], 'holder', 'epoch', 'in_sync', 'renewed_at', 'synced')
local time = redis.call('TIME')
local now = tonumber(time[1]) + tonumber(time[2]) / 1e6
local granted, in_sync, synced = false, cjson.encode({ARGV[1]}), '0'
if not held[1] then
  granted = ARGV[2] == '0'
elseif held[2] == ARGV[2] then
  local member = not held[3] and held[2] == ARGV[5]
  local older = tonumber(held[2]) < tonumber(ARGV[5])
  for _, name in ipairs(cjson.decode(held[3] or '[]')) do
    member = member or name == ARGV[1]
  end
  local age = now - tonumber(held[4])
  granted = older or (member and (age >= tonumber(ARGV[4]) or age < 0))
  if not older and held[3] then
    in_sync, synced = held[3], held[5] or held[2]
  end
end
if granted then
  local stamp = string.format('%.6f', now)
  redis.call('HDEL', KEYS[1], 'ended', 'renewal', 'standbys')
  redis.call('HSET', KEYS[1], 'holder', ARGV[1], 'epoch', ARGV[3], 'renewed_at', stamp)
  redis.call('HSET', KEYS[1], 'in_sync', in_sync, 'synced', synced)
end
return granted and 1 or 0
"""

RENEW = """
local held = redis.call('HMGET', KEYS[1], 'holder', 'epoch', 'renewal')
local granted = ARGV[5] == '1' and (not held[1] or tonumber(held[2]) < tonumber(ARGV[2]))
if held[1] == ARGV[1] and held[2] == ARGV[2] then
  granted = tonumber(held[3] or '0') < tonumber(ARGV[4])
end
if granted then
  local time = redis.call('TIME')
  local stamp = string.format('%.6f', tonumber(time[1]) + tonumber(time[2]) / 1e6)
  redis.call('HSET', KEYS[1], 'holder', ARGV[1], 'epoch', ARGV[2], 'in_sync', ARGV[3], 'renewed_at', stamp)
  redis.call('HSET', KEYS[1], 'renewal', ARGV[4], 'standbys', ARGV[6], 'synced', ARGV[2])
  return {1, ARGV[1], ARGV[2]}
end
return {0, held[1] or '', held[2] or '0'}
"""

GIVE_UP = """
local held = redis.call('HMGET', KEYS[1], 'holder', 'epoch')
if held[1] == ARGV[1] and held[2] == ARGV[2] then
  redis.call('HSET', KEYS[1], 'holder', ARGV[3], 'in_sync', cjson.encode({ARGV[3]}), 'synced', '0', 'renewed_at', '0')
  redis.call('HDEL', KEYS[1], 'renewal')
end
return 0
"""

END = """
local held = redis.call('HMGET', KEYS[1], 'holder', 'epoch')
if held[1] == ARGV[1] and held[2] == ARGV[2] then
  redis.call('HSET', KEYS[1], 'ended', '1')
end
return 0
"""


class LeaseKey:
    """Operations on one shard's key, one attempt each; raises :class:`~broker.base.errors.Unavailable`.

    A leader renews through one of these for its whole term, since that counts the renewals.
    """

    def __init__(self, registry: Registry, shard: int) -> None:
        self._registry = registry
        self._key = registry.key("lease", str(shard))
        self._take = registry.script(TAKE)
        self._renew = registry.script(RENEW)
        self._end = registry.script(END)
        self._give_up = registry.script(GIVE_UP)
        self._renewals = 0
        self._confirmed = False  # what was taken was there when it was renewed

    async def read(self) -> LeaseView:
        """Returns the present lease."""

        async def read(redis: Redis) -> LeaseView:
            async with redis.pipeline(transaction=True) as pipe:
                pipe.hgetall(self._key)
                pipe.time()
                held, (seconds, micros) = await pipe.execute()
            return LeaseView.of(held, int(seconds) + int(micros) / 1e6)

        return await self._registry.attempt(read)

    async def take(self, *, holder: str, expected_epoch: int, epoch: int, lease_s: float, store_epoch: int = 0) -> bool:
        """Tries to lead.

        Args:
            holder: Who would.
            expected_epoch: Of the lease as last seen, 0 for no key.
            epoch: To lead under.
            lease_s: After so long without a renewal others may take it.
            store_epoch: Of the caller's run record.
        """
        return bool(await self._run(self._take, holder, expected_epoch, epoch, lease_s, store_epoch))

    async def renew(
        self, *, holder: str, epoch: int, in_sync: Iterable[str], standbys: Iterable[str] = ()
    ) -> tuple[bool, str, int]:
        """Says that ``holder`` leads, who is in sync, and which standbys it hears, for people to see.

        Returns:
            Whether it was granted, and holder and epoch as the key has them now; "" and 0 if there is none.
        """
        self._renewals += 1
        sync, heard = json.dumps(sorted({holder, *in_sync})), json.dumps(sorted(standbys))
        granted, by, under = await self._run(
            self._renew, holder, epoch, sync, self._renewals, int(self._confirmed), heard
        )
        self._confirmed = self._confirmed or bool(granted)
        return bool(granted), str(by), int(under)

    async def lead(self, *, holder: str, epoch: int) -> tuple[bool, str, int]:
        """Says that ``holder`` leads without failover: renews its lease, or takes one that is free or older.

        A lease under a lower epoch is older, by any holder: a store that leads has seen the end of that.

        Returns:
            As :meth:`renew`.
        """
        if self._confirmed:
            renewed = await self.renew(holder=holder, epoch=epoch, in_sync=())
            if renewed[0]:
                return renewed
        found = await self.read()
        if (found.holder, found.epoch) == (holder, epoch):  # by an answer that got lost: no epoch is begun twice
            return await self.renew(holder=holder, epoch=epoch, in_sync=())
        granted = found.epoch <= epoch and await self.take(  # a store that went back must not take the epoch back
            holder=holder, expected_epoch=found.epoch, epoch=epoch, lease_s=_FOR_EVER_S, store_epoch=epoch
        )
        self._confirmed = granted
        return (True, holder, epoch) if granted else (False, found.holder, found.epoch)

    async def give_up(self, *, holder: str, epoch: int, to: str) -> None:
        """Leaves the lease to a standby, which may take it at once under a later epoch and found a line."""
        await self._run(self._give_up, holder, epoch, to)

    async def end(self, *, holder: str, epoch: int) -> None:
        """Says that the run has ended under this leader."""
        await self._run(self._end, holder, epoch)

    async def _run(self, script: AsyncScript, *arguments: Any) -> Any:
        return await self._registry.attempt(lambda _: script(keys=[self._key], args=list(arguments)))


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

    async def renew(self, in_sync: tuple[str, ...], standbys: tuple[str, ...]) -> Renewed | RenewFailed:
        """Renews the lease with the standbys in sync and those heard; returns the outcome."""
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
