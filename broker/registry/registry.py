"""The registry of a run in Redis: membership, versions, leases, totals and events.

Redis serves people and elections; no training data passes through it, and nothing here is believed over an
aggregator's store. All keys of a run begin with ``atoll:{run_id}:``

    members             sorted set   island id -> when its last heartbeat came, by the clock of Redis
    member:{island}     hash         field of MemberRecord -> JSON, and ``broker``: the one it was heard by
    model               hash         fragment id -> JSON of FragmentRecord; (epoch, version) only grows
    totals              hash         field of RunTotals -> JSON; of shard 0
    totals:{shard}      hash         likewise, of each other shard
    brokers             sorted set   broker -> when it last wrote
    broker:{broker}     hash         field of BrokerRecord -> JSON, with ``written_at``
    evaluation          string       JSON of the newest evaluation of the global model
    refusals:{source}   hash         island id -> JSON of reason -> count, as counted by aggregator or broker:{broker}
    lease:{shard}       hash         who leads; :mod:`aggregator.process.lease` changes it, by compare-and-set alone
    events              stream       capped; one JSON object in the field ``event``
    versions:{fragment} hash         version -> JSON of who is in it, of the newest ``KEEP_VERSIONS``

and ``atoll:runs`` is a sorted set of run ids: ``up`` takes one that no run here has (:meth:`Registry.claim`).

All times are those of Redis: writers say how long ago something was, so
that ages come out right even if the clocks of two hosts do not agree. Everything but the leases vanishes a week after
its last write.

Every operation writes state, not changes of state, and may be repeated; a failure is
:class:`~broker.wire.errors.Unavailable`, after one attempt: whoever calls decides when to try again.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

import redis.asyncio as aioredis
from redis.commands.core import AsyncScript
from redis.exceptions import RedisError, ResponseError

from broker.registry import redis_client, redis_errors, scripts
from broker.routing.directory import MAX_SHARDS
from broker.wire.errors import Unavailable, shown
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

__all__ = ["BrokerRecord", "FragmentRecord", "MemberRecord", "Registry", "RunTotals", "Snapshot"]

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


def aggregator_source(shard: int) -> str:
    """Under which name the aggregator of a shard counts refusals."""
    return f"aggregator-{shard}" if shard else "aggregator"


class RedisRefusal(Unavailable):
    """Redis, or another server at its address, refuses to serve; the message has the cure."""


class Registry:
    """One run's keys over one connection; opened by the first operation, and again after a failure.

    Operations may not overlap: each process has one task that writes.
    """

    def __init__(self, url: str, run_id: str, *, field: str = "redis_url") -> None:
        """Prepares a connection; nothing is sent yet.

        Args:
            url: Of the server.
            run_id: Of the run.
            field: The setting that the address comes from, named in the error.

        Raises:
            ConfigError: ``url`` is no address of a Redis server, or names a file that cannot be read.
        """
        self._client = redis_client.client(
            url, field=field, connect_timeout_s=CONNECT_TIMEOUT_S, answer_timeout_s=ANSWER_TIMEOUT_S
        )
        self.run_id = run_id
        self.address, self._url = shown(url), url
        self._redis = self._client.redis
        self._write_fragments = self._redis.register_script(scripts.WRITE_FRAGMENTS)
        self._write_members = self._redis.register_script(scripts.WRITE_MEMBERS)

    async def aclose(self) -> None:
        """Closes the connection."""
        await self._client.aclose()

    # --- written before a run begins ---

    async def claim(self) -> bool:
        """Takes the run's name for a new run; False: a run has it, whose keys would be those of the new one."""

        async def claim(_: aioredis.Redis) -> bool:
            keys, arguments = [RUNS, self._key("lease", "0")], [self.run_id, str(KEEP_S)]
            return bool(await self.script(scripts.CLAIM)(keys=keys, args=arguments))

        return await self.attempt(claim)

    # --- written by the broker ---

    async def write_members(self, broker: str, records: Sequence[MemberRecord]) -> int:
        """Writes what ``broker`` last heard of some islands; returns of how many no other had heard later.

        Not of all of a large fleet at once: neither the caller's other work nor Redis is held up for long.
        """
        parts = [records[i : i + MEMBERS_AT_ONCE] for i in range(0, len(records), MEMBERS_AT_ONCE)]
        return sum([await self._write_some(broker, part) for part in parts])

    async def _write_some(self, broker: str, records: Sequence[MemberRecord]) -> int:
        async def write() -> int:
            arguments: list[Any] = [KEEP_S, json.dumps(broker)]
            for record in records:
                fields = _fields(record, without=("island_id", "heard_ago_s"))
                pairs = [part for pair in fields.items() for part in pair]
                arguments += [record.island_id, record.heard_ago_s, json.dumps(pairs)]
            return int(await self._write_members(keys=[self._key("members"), self._key("member", "")], args=arguments))

        return await self._attempt(write)

    async def write_broker(self, broker: str, record: BrokerRecord) -> None:
        """Writes a broker's counters, and the run into the list of runs."""

        async def write() -> None:
            now_s = await self._now_s()
            async with self._redis.pipeline(transaction=True) as pipe:
                pipe.zadd(self._key("brokers"), {broker: now_s})
                pipe.expire(self._key("brokers"), KEEP_S)
                pipe.hset(self._key("broker", broker), mapping=_fields(record) | {"written_at": json.dumps(now_s)})
                pipe.expire(self._key("broker", broker), KEEP_S)
                pipe.zadd(RUNS, {self.run_id: now_s})
                pipe.zremrangebyscore(RUNS, "-inf", now_s - KEEP_S)
                await pipe.execute()

        await self._attempt(write)

    async def write_refusals(self, source: str, refusals: Mapping[str, Mapping[str, int]]) -> None:
        """Writes how often ``source`` (a broker or an aggregator) refused what, by island and reason."""
        if not refusals:
            return
        mapping: dict[Any, Any] = {island: json.dumps(dict(reasons)) for island, reasons in refusals.items()}

        async def write() -> None:
            async with self._redis.pipeline(transaction=True) as pipe:
                pipe.hset(self._key("refusals", source), mapping=mapping)
                pipe.expire(self._key("refusals", source), KEEP_S)
                await pipe.execute()

        await self._attempt(write)

    # --- written by the aggregator ---

    async def write_fragments(self, records: Sequence[FragmentRecord]) -> int:
        """Writes fragment records to Redis, unless a newer one is there; returns the number written."""
        if not records:
            return 0

        async def write() -> int:
            now_s = await self._now_s()
            arguments: list[Any] = [KEEP_S]
            for record in records:
                value = dataclasses.asdict(record) | {"committed_at": now_s - record.committed_ago_s}
                del value["fragment_id"], value["committed_ago_s"]
                arguments += [record.fragment_id, record.epoch, record.version, json.dumps(value)]
            return int(await self._write_fragments(keys=[self._key("model")], args=arguments))

        return await self._attempt(write)

    async def write_totals(self, totals: RunTotals, shard: int = 0) -> None:
        """Writes where the run stands, as far as one shard can say."""
        key = self._totals_key(shard)

        async def write() -> None:
            async with self._redis.pipeline(transaction=True) as pipe:
                pipe.hset(key, mapping=_fields(totals))
                pipe.expire(key, KEEP_S)
                await pipe.execute()

        await self._attempt(write)

    async def append_events(self, events: Sequence[Mapping[str, Any]]) -> None:
        """Appends to the stream of events, whose oldest entries fall out beyond about ``MAX_EVENTS``.

        The only operation that is not the same when repeated: give events a number of their own, if copies
        after an :class:`Unavailable` that is not ``definite`` matter.
        """
        if not events:
            return

        async def write() -> None:
            async with self._redis.pipeline(transaction=True) as pipe:
                for event in events:
                    entry = {"event": json.dumps(dict(event), default=str)}
                    pipe.xadd(self._key("events"), cast(Any, entry), maxlen=MAX_EVENTS, approximate=True)
                pipe.expire(self._key("events"), KEEP_S)
                await pipe.execute()

        await self._attempt(write)

    async def write_versions(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Writes who is in some versions; a row has at least ``fragment`` and ``version``. Old ones fall out."""
        if not rows:
            return
        keys = sorted({self._key("versions", str(row["fragment"])) for row in rows})

        async def write() -> None:
            async with self._redis.pipeline(transaction=True) as pipe:
                for row in rows:
                    entry = {str(row["version"]): json.dumps(dict(row), default=str)}
                    pipe.hset(self._key("versions", str(row["fragment"])), mapping=cast(Any, entry))
                for key in keys:
                    pipe.expire(key, KEEP_S)
                for key in keys:
                    pipe.hkeys(key)
                kept = (await pipe.execute())[-len(keys) :]
            async with self._redis.pipeline(transaction=False) as pipe:
                for key, versions in zip(keys, kept, strict=True):
                    for version in sorted(map(int, versions))[:-KEEP_VERSIONS]:
                        pipe.hdel(key, str(version))
                await pipe.execute()

        await self._attempt(write)

    # --- written by whoever evaluates the run ---

    async def write_evaluation(self, evaluation: Mapping[str, Any]) -> None:
        """Writes the newest evaluation of the global model; whatever plain data it is, status hands it on."""

        async def write() -> None:
            await self._redis.set(self._key("evaluation"), json.dumps(dict(evaluation)), ex=KEEP_S)

        await self._attempt(write)

    # --- read by status ---

    async def read(self) -> Snapshot:
        """Reads all that is known about the run."""
        return await self._attempt(self._read)

    async def _read(self) -> Snapshot:
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.time()
            pipe.zrange(self._key("members"), 0, -1, withscores=True)
            pipe.zrange(self._key("brokers"), 0, -1)
            for name in ("model", "totals"):
                pipe.hgetall(self._key(name))
            for shard in range(MAX_SHARDS):
                pipe.hgetall(self._key("lease", str(shard)))
            pipe.get(self._key("evaluation"))
            time, members, brokers, model, totals, *leases, evaluation = await pipe.execute()
        islands = [island for island, _ in members]
        others = [shard for shard, held in enumerate(leases) if held and shard]
        sources = [*(f"broker:{broker}" for broker in brokers), *map(aggregator_source, (0, *others))]
        keys = [
            *(self._totals_key(shard) for shard in others),
            *(self._key("member", island) for island in islands),
            *(self._key("broker", broker) for broker in brokers),
            *(self._key("refusals", source) for source in sources),
        ]
        async with self._redis.pipeline(transaction=False) as pipe:
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

        async def read() -> list[NumberedEvent]:
            ms, n = after
            entries: Any = await self._redis.xrange(self._key("events"), min=f"{ms}-{n + 1}", count=count)
            return [(_number(number), json.loads(entry["event"])) for number, entry in entries]

        return await self._attempt(read)

    async def read_version(self, fragment_id: int, version: int | None) -> KeptVersion:
        """Reads who is in a version of a fragment; None: in its newest one."""
        key = self._key("versions", str(fragment_id))

        async def read() -> KeptVersion:
            known = sorted(int(each) for each in await cast(Awaitable[list[str]], self._redis.hkeys(key)))
            wanted = version if version is not None else known[-1] if known else -1
            found = await cast(Awaitable[str | None], self._redis.hget(key, str(wanted))) if wanted in known else None
            row = None if found is None else json.loads(found)
            return KeptVersion(fragment_id=fragment_id, found=row, known=tuple(known))

        return await self._attempt(read)

    async def known_runs(self) -> list[str]:
        """Lists runs that have been written to within the last week, the latest first."""

        async def read() -> list[str]:
            return [str(run) for run in await self._redis.zrevrange(RUNS, 0, -1)]

        return await self._attempt(read)

    # --- below, and for :mod:`aggregator.process.lease` ---

    def key(self, *parts: str) -> str:
        """Returns the name of a key of this run."""
        return self._key(*parts)

    def script(self, lua: str) -> AsyncScript:
        """Returns a script that this connection can run."""
        return self._redis.register_script(lua)

    async def attempt(self, operation: Callable[[aioredis.Redis], Awaitable[T]]) -> T:
        """Runs an operation on the connection once; Unavailable says what Redis or the network had to say."""
        return await self._attempt(lambda: operation(self._redis))

    def _totals_key(self, shard: int) -> str:
        return self._key("totals", str(shard)) if shard else self._key("totals")

    def _key(self, *parts: str) -> str:
        return ":".join(("atoll", self.run_id, *parts))

    async def _now_s(self) -> float:
        return _seconds(await self._redis.time())

    async def _attempt(self, operation: Callable[[], Awaitable[T]]) -> T:
        """Runs an operation once; maps whatever Redis or the network has to say to :class:`Unavailable`."""
        task = asyncio.current_task()
        assert task is not None
        cancels = task.cancelling()
        try:
            # The socket's own timeouts start anew with each byte; this one does not.
            async with asyncio.timeout(CONNECT_TIMEOUT_S + ANSWER_TIMEOUT_S):
                result = await operation()
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
            why = redis_errors.why(err) or f"no answer within {CONNECT_TIMEOUT_S + ANSWER_TIMEOUT_S:g} s"
            message = f"Redis at {self.address} does not serve: {why}"
            cure = redis_errors.cure(err, self._url)
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
