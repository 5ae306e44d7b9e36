"""The registry of a run in Redis: membership, versions, leases, totals and events.

Redis serves people and elections; no training data passes through it, and nothing here is believed over an
aggregator's store. All keys of a run begin with ``atoll:{run_id}:``

    members             sorted set   island id -> when its last heartbeat came, by the clock of Redis
    member:{island}     hash         field of MemberRecord -> JSON, and ``broker``: the one it was heard by
    model               hash         fragment id -> JSON of FragmentRecord; (epoch, version) only grows
    totals              hash         field of RunTotals -> JSON; of shard 0
    totals:{shard}      hash         the same of each other shard
    brokers             sorted set   broker -> when it last wrote
    broker:{broker}     hash         field of BrokerRecord -> JSON, with ``written_at``
    evaluation          string       JSON of the newest evaluation of the global model
    refusals:{source}   hash         island id -> JSON of reason -> count, as counted by aggregator or broker:{broker}
    lease:{shard}       hash         who leads; :mod:`aggregator.process.lease` changes it, by compare-and-set alone
    events              stream       capped; one JSON object in the field ``event``
    versions:{fragment} hash         version -> JSON of who is in it, of the newest ``KEEP_VERSIONS``

and ``atoll:runs`` is a sorted set of run ids: ``up`` takes one that no run here has (:meth:`Registry.claim`).

All times are those of Redis: writers say how long ago something was, so that ages come out right even if the clocks of
two hosts do not agree. Everything but the leases vanishes a week after its last write.

Every operation writes state, not changes of state, and may be repeated; a failure is
:class:`~broker.base.errors.Unavailable`, after one attempt: the caller decides when to try again.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final, TypeVar, cast

import redis.asyncio as aioredis
from redis.commands.core import AsyncScript
from redis.exceptions import RedisError, ResponseError

from broker.base.errors import Unavailable, shown
from broker.registry import redis_client
from broker.routing.directory import MAX_SHARDS
from broker.wire.records import (
    BrokerRecord,
    EventNumber,
    FragmentRecord,
    KeptVersion,
    LeaseView,
    MemberRecord,
    NumberedEvent,
    RunTotals,
    Snapshot,
)

T = TypeVar("T")

KEEP_S = 7 * 24 * 3600
MAX_EVENTS = 10_000
#: Of each fragment. Of 24 fragments and 200 islands they take 35 MB.
KEEP_VERSIONS = 40
#: Islands whose records are written by one call.
MEMBERS_AT_ONCE = 64
RUNS = "atoll:runs"

#: A registry that is slower than this is as good as gone: nobody waits for it.
CONNECT_TIMEOUT_S = 0.5
ANSWER_TIMEOUT_S = 1.0

#: Writes records of fragments unless a later version is there: a deposed aggregator may still be writing.
_WRITE_FRAGMENTS: Final = """
local written = 0
for i = 2, #ARGV, 4 do
  local held = redis.call('HGET', KEYS[1], ARGV[i])
  local later = false
  if held then
    local epoch, version = tonumber(ARGV[i + 1]), tonumber(ARGV[i + 2])
    held = cjson.decode(held)
    later = held.epoch > epoch or (held.epoch == epoch and held.version > version)
  end
  if not later then
    redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 3])
    written = written + 1
  end
end
redis.call('EXPIRE', KEYS[1], ARGV[1])
return written
"""

#: Writes what a broker has heard of islands, unless another one has heard of them since: who has left for it is
#: remembered here for a while, and written with all else. A time that has not come yet is not believed: clocks go back.
_WRITE_MEMBERS: Final = """
local time = redis.call('TIME')
local now = tonumber(time[1]) + tonumber(time[2]) / 1e6
local written = 0
for i = 3, #ARGV, 3 do
  local island, heard = ARGV[i], now - tonumber(ARGV[i + 1])
  local key = KEYS[2] .. island
  local other = redis.call('HGET', key, 'broker')
  local held = tonumber(redis.call('ZSCORE', KEYS[1], island) or '-1')
  if not other or other == ARGV[2] or held <= heard or held > now then
    redis.call('ZADD', KEYS[1], string.format('%.6f', heard), island)
    redis.call('HSET', key, 'broker', ARGV[2], unpack(cjson.decode(ARGV[i + 2])))
    redis.call('EXPIRE', key, ARGV[1])
    written = written + 1
  end
end
redis.call('EXPIRE', KEYS[1], ARGV[1])
return written
"""

#: Takes the name of a run, unless a run has it: one that was written to within a week, or that anybody ever led.
_CLAIM: Final = """
local time = redis.call('TIME')
local now = tonumber(time[1]) + tonumber(time[2]) / 1e6
local written = redis.call('ZSCORE', KEYS[1], ARGV[1])
if redis.call('EXISTS', KEYS[2]) == 1 or (written and now - tonumber(written) < tonumber(ARGV[2])) then
  return 0
end
redis.call('ZADD', KEYS[1], string.format('%.6f', now), ARGV[1])
return 1
"""


def aggregator_source(shard: int) -> str:
    """Returns the name under which the aggregator of a shard counts refusals."""
    return f"aggregator-{shard}" if shard else "aggregator"


class RedisRefusal(Unavailable):
    """Redis, or another server at its address, refuses to serve; the message has the cure."""


class Registry:
    """One run's keys over one connection; opened by the first operation, and again after a failure.

    Operations may not overlap: each process has one task that writes.
    """

    def __init__(self, url: str, run_id: str, *, field: str = "redis_url") -> None:
        """Prepares a connection; nothing is sent yet. ``field`` is the setting that the address comes from.

        Raises:
            ConfigError: ``url`` is no address of a Redis server, or names a file that cannot be read.
        """
        self._client = redis_client.client(url, CONNECT_TIMEOUT_S, ANSWER_TIMEOUT_S, field=field)
        self.run_id = run_id
        self.address, self._url = shown(url), url

    async def aclose(self) -> None:
        """Closes the connection."""
        await self._client.aclose()

    async def claim(self) -> bool:
        """Reserves the run's name for a new run; returns False if a run with this name is in Redis."""
        return bool(await self._run(_CLAIM, [RUNS, self.key("lease", "0")], [self.run_id, KEEP_S]))

    # --- written by the broker ---

    async def write_members(self, broker: str, records: Sequence[MemberRecord]) -> int:
        """Writes records of islands heard by ``broker``; returns how many no other broker had heard later.

        Not of all of a large fleet at once: neither the caller's other work nor Redis is held up for long.
        """
        written = 0
        for i in range(0, len(records), MEMBERS_AT_ONCE):
            arguments: list[Any] = [KEEP_S, json.dumps(broker)]
            for record in records[i : i + MEMBERS_AT_ONCE]:
                fields = _fields(record, without=("island_id", "heard_ago_s"))
                pairs = [part for pair in fields.items() for part in pair]
                arguments += [record.island_id, record.heard_ago_s, json.dumps(pairs)]
            written += await self._run(_WRITE_MEMBERS, [self.key("members"), self.key("member", "")], arguments)
        return written

    async def write_broker(self, broker: str, record: BrokerRecord) -> None:
        """Writes a broker's counters, and the run into the list of runs."""

        async def write(redis: aioredis.Redis) -> None:
            now_s = _seconds(await redis.time())
            async with redis.pipeline(transaction=True) as pipe:
                pipe.zadd(self.key("brokers"), {broker: now_s})
                pipe.expire(self.key("brokers"), KEEP_S)
                pipe.hset(self.key("broker", broker), mapping=_fields(record) | {"written_at": json.dumps(now_s)})
                pipe.expire(self.key("broker", broker), KEEP_S)
                pipe.zadd(RUNS, {self.run_id: now_s})
                pipe.zremrangebyscore(RUNS, "-inf", now_s - KEEP_S)
                await pipe.execute()

        await self.attempt(write)

    async def write_refusals(self, source: str, refusals: Mapping[str, Mapping[str, int]]) -> None:
        """Writes the refusals of ``source`` (a broker or an aggregator), by island and reason."""
        if refusals:
            counts = {island: json.dumps(dict(reasons)) for island, reasons in refusals.items()}
            await self._write_hash(self.key("refusals", source), counts)

    # --- written by the aggregator ---

    async def write_fragments(self, records: Sequence[FragmentRecord]) -> int:
        """Writes fragment records to Redis, unless a newer one is there; returns the number written."""
        if not records:
            return 0

        async def write(redis: aioredis.Redis) -> int:
            now_s = _seconds(await redis.time())
            arguments: list[Any] = [KEEP_S]
            for record in records:
                value = dataclasses.asdict(record) | {"committed_at": now_s - record.committed_ago_s}
                del value["fragment_id"], value["committed_ago_s"]
                arguments += [record.fragment_id, record.epoch, record.version, json.dumps(value)]
            return int(await redis.register_script(_WRITE_FRAGMENTS)(keys=[self.key("model")], args=arguments))

        return await self.attempt(write)

    async def write_totals(self, totals: RunTotals, shard: int = 0) -> None:
        """Writes the totals of a run, as one shard knows them."""
        await self._write_hash(self._totals_key(shard), _fields(totals))

    async def append_events(self, events: Sequence[Mapping[str, Any]]) -> None:
        """Appends to the stream of events, whose oldest entries fall out beyond about ``MAX_EVENTS``.

        The only operation that is not the same when repeated: give events a number of their own, if copies
        after an :class:`Unavailable` that is not ``definite`` matter.
        """
        if not events:
            return

        async def write(redis: aioredis.Redis) -> None:
            async with redis.pipeline(transaction=True) as pipe:
                for event in events:
                    entry = {"event": json.dumps(dict(event), default=str)}
                    pipe.xadd(self.key("events"), cast(Any, entry), maxlen=MAX_EVENTS, approximate=True)
                pipe.expire(self.key("events"), KEEP_S)
                await pipe.execute()

        await self.attempt(write)

    async def write_versions(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Writes the contributors of versions, and drops old ones; each row has ``fragment`` and ``version``."""
        if not rows:
            return
        keys = sorted({self.key("versions", str(row["fragment"])) for row in rows})

        async def write(redis: aioredis.Redis) -> None:
            async with redis.pipeline(transaction=True) as pipe:
                for row in rows:
                    entry = {str(row["version"]): json.dumps(dict(row), default=str)}
                    pipe.hset(self.key("versions", str(row["fragment"])), mapping=cast(Any, entry))
                for key in keys:
                    pipe.expire(key, KEEP_S)
                for key in keys:
                    pipe.hkeys(key)
                kept = (await pipe.execute())[-len(keys) :]
            async with redis.pipeline(transaction=False) as pipe:
                for key, versions in zip(keys, kept, strict=True):
                    for version in sorted(map(int, versions))[:-KEEP_VERSIONS]:
                        pipe.hdel(key, str(version))
                await pipe.execute()

        await self.attempt(write)

    async def write_evaluation(self, evaluation: Mapping[str, Any]) -> None:
        """Writes the newest evaluation of the global model: plain data, which status hands on as it is."""
        text = json.dumps(dict(evaluation))
        await self.attempt(lambda redis: redis.set(self.key("evaluation"), text, ex=KEEP_S))

    # --- read by status ---

    async def read(self) -> Snapshot:
        """Reads all that is known about the run."""
        return await self.attempt(self._read)

    async def _read(self, redis: aioredis.Redis) -> Snapshot:
        async with redis.pipeline(transaction=True) as pipe:
            pipe.time()
            pipe.zrange(self.key("members"), 0, -1, withscores=True)
            pipe.zrange(self.key("brokers"), 0, -1)
            for name in ("model", "totals"):
                pipe.hgetall(self.key(name))
            for shard in range(MAX_SHARDS):
                pipe.hgetall(self.key("lease", str(shard)))
            pipe.get(self.key("evaluation"))
            time, members, brokers, model, totals, *leases, evaluation = await pipe.execute()
        islands = [island for island, _ in members]
        others = [shard for shard, held in enumerate(leases) if held and shard]
        sources = [*(f"broker:{broker}" for broker in brokers), *map(aggregator_source, (0, *others))]
        keys = [
            *(self._totals_key(shard) for shard in others),
            *(self.key("member", island) for island in islands),
            *(self.key("broker", broker) for broker in brokers),
            *(self.key("refusals", source) for source in sources),
        ]
        async with redis.pipeline(transaction=False) as pipe:
            for key in keys:
                pipe.hgetall(key)
            hashes = [_values(each) for each in await pipe.execute()]
        of_shards, hashes = [_values(totals), *hashes[: len(others)]], hashes[len(others) :]
        return Snapshot(
            run_id=self.run_id,
            now_s=_seconds(time),
            heard_at_s=dict(members),
            members=dict(zip(islands, hashes, strict=False)),
            fragments={int(p): json.loads(each) for p, each in model.items()},
            totals=of_shards if all(of_shards) else of_shards[:1] if totals else [],
            brokers=dict(zip(brokers, hashes[len(islands) :], strict=False)),
            refusals=dict(zip(sources, hashes[len(islands) + len(brokers) :], strict=True)),
            leases={shard: LeaseView.of(held, _seconds(time)) for shard, held in enumerate(leases) if held},
            evaluation=json.loads(evaluation or "{}"),
        )

    async def read_events_after(self, after: EventNumber, count: int) -> list[NumberedEvent]:
        """Reads the first ``count`` events after a number, oldest first; after (0, 0): from the oldest on."""

        async def read(redis: aioredis.Redis) -> list[NumberedEvent]:
            ms, n = after
            entries: Any = await redis.xrange(self.key("events"), min=f"{ms}-{n + 1}", count=count)
            return [(_number(number), json.loads(entry["event"])) for number, entry in entries]

        return await self.attempt(read)

    async def read_version(self, fragment_id: int, version: int | None) -> KeptVersion:
        """Reads the contributors of a version of a fragment; None: of its newest one."""
        key = self.key("versions", str(fragment_id))

        async def read(redis: aioredis.Redis) -> KeptVersion:
            known = sorted(int(each) for each in await cast(Awaitable[list[str]], redis.hkeys(key)))
            wanted = version if version is not None else known[-1] if known else -1
            found = await cast(Awaitable[str | None], redis.hget(key, str(wanted))) if wanted in known else None
            row = None if found is None else json.loads(found)
            return KeptVersion(fragment_id=fragment_id, found=row, known=tuple(known))

        return await self.attempt(read)

    async def known_runs(self) -> list[str]:
        """Lists runs that have been written to within the last week, the latest first."""

        async def read(redis: aioredis.Redis) -> list[str]:
            return [str(run) for run in await redis.zrevrange(RUNS, 0, -1)]

        return await self.attempt(read)

    # --- below, and for :mod:`aggregator.process.lease` ---

    def key(self, *parts: str) -> str:
        """Returns the name of a key of this run."""
        return ":".join(("atoll", self.run_id, *parts))

    def script(self, lua: str) -> AsyncScript:
        """Returns a script that this connection can run."""
        return self._client.redis.register_script(lua)

    def _totals_key(self, shard: int) -> str:
        return self.key("totals", str(shard)) if shard else self.key("totals")

    async def _run(self, lua: str, keys: list[str], arguments: list[Any]) -> int:
        return int(await self.attempt(lambda _: self.script(lua)(keys=keys, args=arguments)))

    async def _write_hash(self, key: str, fields: Mapping[Any, Any]) -> None:
        async def write(redis: aioredis.Redis) -> None:
            async with redis.pipeline(transaction=True) as pipe:
                pipe.hset(key, mapping=fields)
                pipe.expire(key, KEEP_S)
                await pipe.execute()

        await self.attempt(write)

    async def attempt(self, operation: Callable[[aioredis.Redis], Awaitable[T]]) -> T:
        """Runs an operation once; raises Unavailable with the error of Redis or the network."""
        task = asyncio.current_task()
        assert task is not None
        cancels = task.cancelling()
        try:
            # The socket's own timeouts start anew with each byte; this one does not.
            async with asyncio.timeout(CONNECT_TIMEOUT_S + ANSWER_TIMEOUT_S):
                result = await operation(self._client.redis)
                if task.cancelling() > cancels:
                    # The client sends with asyncio.wait_for, which in Python 3.11 loses a cancellation that comes as
                    # the sending ends (cpython issue 86296): a task that reports for ever would never end.
                    raise asyncio.CancelledError
                return result
        except (RedisError, OSError, TimeoutError) as err:
            if task.cancelling() > cancels:
                # Likewise where the client's own timeout was over in the same moment: it tells of that alone.
                raise asyncio.CancelledError from err
            # A refused connection or a server's own error: it was not done. Silence: who knows.
            refused = isinstance(err.__cause__ or err.__context__, ConnectionRefusedError | socket.gaierror)
            definite = refused or isinstance(err, ResponseError)
            why = redis_client.why(err) or f"no answer within {CONNECT_TIMEOUT_S + ANSWER_TIMEOUT_S:g} s"
            message = f"Redis at {self.address} does not serve: {why}"
            cure = redis_client.cure(err, self._url)
            if cure:
                raise RedisRefusal(f"{message}; {cure}", definite=definite) from err
            raise Unavailable(message, definite=definite) from err
        except json.JSONDecodeError as err:
            message = f"Redis at {self.address} holds something under atoll:{self.run_id}: that is not ours: {err}"
            raise Unavailable(message, definite=True) from err


def _fields(record: Any, without: tuple[str, ...] = ()) -> dict[Any, Any]:
    """Returns a record as the fields of a hash, each in JSON."""
    names = [each.name for each in dataclasses.fields(record) if each.name not in without]
    return {name: json.dumps(getattr(record, name)) for name in names}


def _values(fields: Mapping[str, str]) -> dict[str, Any]:
    return {name: json.loads(value) for name, value in fields.items()}


def _number(text: str) -> EventNumber:
    ms, _, n = text.partition("-")
    return int(ms), int(n)


def _seconds(time: tuple[int, int]) -> float:
    return int(time[0]) + int(time[1]) / 1e6
