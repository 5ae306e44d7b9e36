"""The data of a Redis in virtual time, and the commands that our registry and the lease use."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable
from typing import Any

from ops.devices import lua


class RedisError(Exception):
    """An error that Redis answers instead of a result."""


class Data:
    """The data of a server, and the commands on it, one at a time.

    Args:
        clock: Its wall clock, in seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.keys: dict[str, Any] = {}
        self.ends_s: dict[str, float] = {}  # when a key vanishes
        self.scripts: dict[str, str] = {}

    def wipe(self) -> None:
        """Forgets everything."""
        self.keys.clear()
        self.ends_s.clear()
        self.scripts.clear()

    def kept(self) -> Data:
        """Returns a snapshot."""
        return copy.deepcopy(self, {id(self._clock): self._clock})

    def back_to(self, snapshot: Data) -> None:
        """Has what it had when a snapshot was made."""
        held = snapshot.kept()
        self.keys, self.ends_s, self.scripts = held.keys, held.ends_s, {}

    def run(self, name: str, *args: str) -> Any:
        """Runs one command; raises RedisError."""
        command = getattr(self, f"_do_{name.lower()}", None)
        if command is None:
            raise RedisError(f"ERR unknown command '{name}'")
        now_s = self._clock()
        for key in [key for key, at_s in self.ends_s.items() if at_s <= now_s]:
            self._do_del(key)
        return command(*args)

    def _at(self, key: str, kind: type = dict) -> Any:
        return self.keys.setdefault(key, kind())

    # --- the server ---

    def _do_hello(self, version: str = "3", *_: str) -> Any:
        return {"server": "redis", "version": "7.2.0", "proto": int(version)}

    def _do_client(self, *_: str) -> Any:
        return "OK"

    def _do_ping(self) -> Any:
        return "PONG"

    def _do_time(self) -> Any:
        micros = round(self._clock() * 1e6)
        return [str(micros // 10**6), str(micros % 10**6)]

    def _do_script(self, _: str, script: str) -> Any:
        digest = hashlib.sha1(script.encode()).hexdigest()
        self.scripts[digest] = script
        return digest

    def _do_evalsha(self, digest: str, count: str, *args: str) -> Any:
        if digest not in self.scripts:
            raise RedisError("NOSCRIPT No matching script. Please use EVAL.")
        return lua.run(self.scripts[digest], self.call, args[: int(count)], args[int(count) :])

    def call(self, *command: Any) -> Any:
        """Runs a command of a script."""
        answer = self.run(*map(str, command))
        if isinstance(answer, dict):
            return [part for pair in answer.items() for part in pair]
        return str(answer) if isinstance(answer, float) else answer

    # --- keys ---

    def _do_del(self, *keys: str) -> Any:
        for key in keys:
            self.ends_s.pop(key, None)
        return sum(self.keys.pop(key, None) is not None for key in keys)

    def _do_exists(self, key: str) -> Any:
        return int(key in self.keys)

    def _do_expire(self, key: str, seconds: str) -> Any:
        if key in self.keys:
            self.ends_s[key] = self._clock() + float(seconds)
        return int(key in self.keys)

    def _do_ttl(self, key: str) -> Any:
        return round(self.ends_s[key] - self._clock()) if key in self.ends_s else -1

    def _do_scan(self, _: str, __: str, pattern: str, *___: str) -> Any:
        return ["0", [key for key in self.keys if key.startswith(pattern.removesuffix("*"))]]

    def _do_set(self, key: str, value: str, *how: str) -> Any:
        self.keys[key] = value
        self.ends_s.pop(key, None)
        if how:
            self._do_expire(key, how[1])
        return "OK"

    def _do_get(self, key: str) -> Any:
        return self.keys.get(key)

    # --- hashes ---

    def _do_hset(self, key: str, *pairs: str) -> Any:
        held = self._at(key)
        before = len(held)
        held.update(zip(pairs[::2], pairs[1::2], strict=True))
        return len(held) - before

    def _do_hget(self, key: str, name: str) -> Any:
        return self.keys.get(key, {}).get(name)

    def _do_hmget(self, key: str, *names: str) -> Any:
        return [self._do_hget(key, name) for name in names]

    def _do_hgetall(self, key: str) -> Any:
        return dict(self.keys.get(key, {}))

    def _do_hkeys(self, key: str) -> Any:
        return list(self.keys.get(key, {}))

    def _do_hdel(self, key: str, *names: str) -> Any:
        held = self.keys.get(key, {})
        count = sum(held.pop(name, None) is not None for name in names)
        if key in self.keys and not held:
            self._do_del(key)
        return count

    # --- sorted sets ---

    def _do_zadd(self, key: str, *pairs: str) -> Any:
        held = self._at(key)
        before = len(held)
        held.update(zip(pairs[1::2], map(float, pairs[::2]), strict=True))
        return len(held) - before

    def _do_zscore(self, key: str, member: str) -> Any:
        return self.keys.get(key, {}).get(member)

    def _do_zrange(self, key: str, first: str, last: str, *how: str) -> Any:
        assert (first, last) == ("0", "-1"), "only all of it"
        ranked = sorted((score, member) for member, score in self.keys.get(key, {}).items())
        return [[member, score] if how else member for score, member in ranked]

    def _do_zrevrange(self, key: str, first: str, last: str) -> Any:
        return self._do_zrange(key, first, last)[::-1]

    def _do_zremrangebyscore(self, key: str, least: str, most: str) -> Any:
        gone = [m for m, score in self.keys.get(key, {}).items() if float(least) <= score <= float(most)]
        for member in gone:
            del self.keys[key][member]
        return len(gone)

    # --- streams ---

    def _do_xadd(self, key: str, *args: str) -> Any:
        place = args.index("*")
        held = self._at(key, list)
        ms = int(self._clock() * 1000)
        last_ms, last_n = held[-1][0] if held else (0, 0)
        number = (ms, 0) if ms > last_ms else (last_ms, last_n + 1)
        held.append((number, list(args[place + 1 :])))
        if place:
            del held[: max(0, len(held) - int(args[place - 1]))]
        return _shown(number)

    def _do_xrange(self, key: str, least: str, most: str, *how: str) -> Any:
        assert most == "+", "only to the end"
        ms, _, n = least.partition("-")
        found = [[_shown(at), fields] for at, fields in self.keys.get(key, []) if at >= (int(ms), int(n or 0))]
        return found[: int(how[1])] if how else found


def _shown(number: tuple[int, int]) -> str:
    return f"{number[0]}-{number[1]}"
