"""Makes clients of Redis from an address of a server or of sentinels, and words their errors.

Shell. Nothing is sent before the first command. A file with the password is read at every connection, so that one which
is replaced there is used from the next one on. Sentinels are asked at every connection, too: after a failover the next
one leads to the new master.
"""

from __future__ import annotations

import re
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import redis.asyncio as aioredis
from redis.asyncio.connection import parse_url
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import MasterNotFoundError, Sentinel
from redis.backoff import NoBackoff
from redis.credentials import CredentialProvider
from redis.exceptions import (
    AuthenticationError,
    ConnectionError,
    InvalidResponse,
    NoPermissionError,
    ReadOnlyError,
    RedisError,
    TimeoutError,
)

from broker.base.errors import ConfigError, cure_of, shown
from broker.registry import redis_address
from broker.registry.redis_address import Place

#: For each sentinel, to connect and to answer: a dead one must not take the time of those behind it.
SENTINEL_TIMEOUT_S = 0.3


class PasswordFile(CredentialProvider):
    """A user (empty: the default one) whose password is in a file."""

    def __init__(self, user: str, path: str) -> None:
        self._user, self._path = user, path

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        """Returns user and password; raises ConnectionError if the file cannot be read any more."""
        try:
            password = read_password(self._path)
        except ConfigError as err:
            raise ConnectionError(f"its password file {self._path} {err.cure}") from err
        return (self._user, password) if self._user else (password,)

    async def get_credentials_async(self) -> tuple[str] | tuple[str, str]:
        """Returns user and password, without a thread: the file is small."""
        return self.get_credentials()


def read_password(path: str) -> str:
    """Returns the password in a file, without the end of its line; raises ConfigError if it has none."""
    try:
        text = Path(path).read_text(encoding="utf-8").rstrip("\r\n")
    except UnicodeDecodeError as err:
        raise ConfigError("password_file", path, "is no text in UTF-8: name the file with the password") from err
    except OSError as err:
        raise ConfigError("password_file", path, f"cannot be read ({err.strerror}): {cure_of(err)}") from err
    if not text:
        raise ConfigError("password_file", path, "is empty: write the password into it")
    return text


@dataclass(frozen=True, slots=True)
class Client:
    """A client of Redis, and the clients of the sentinels that it asks."""

    redis: aioredis.Redis
    sentinels: tuple[aioredis.Redis, ...] = ()

    async def aclose(self) -> None:
        """Closes the connections."""
        for each in (self.redis, *self.sentinels):
            await each.aclose()


def client(url: str, connect_timeout_s: float, answer_timeout_s: float, *, field: str) -> Client:
    """Returns a client that tries everything once, and answers in text; ``field`` names the setting.

    Raises:
        ConfigError: It is no address, or a file that it names cannot be read.
    """
    redis_address.check(url, field=field)
    place = redis_address.place(url)
    for path in (place.password_file, place.sentinel_password_file):
        if path:
            read_password(path)
    # The default repeats up to ten times whatever failed, with pauses, appending to a stream included.
    usual: dict[str, Any] = {"decode_responses": True, "retry": Retry(NoBackoff(), 0)}
    timeouts = {"socket_connect_timeout": connect_timeout_s, "socket_timeout": answer_timeout_s}
    ours = usual | timeouts | {"max_connections": 2}
    if place.password_file:
        ours["credential_provider"] = PasswordFile(place.user, place.password_file)
    try:
        if place.sentinels:
            return _behind_sentinels(place, usual, ours)
        redis = aioredis.Redis.from_url(place.url, **ours)
        # It is not opened: it looks at options once more.
        redis.connection_pool.make_connection()  # type: ignore[no-untyped-call]
    except (ValueError, TypeError, RedisError) as err:
        cure = f"redis-py does not take it ({type(err).__name__}); {redis_address.CURE}"
        raise ConfigError(field, shown(url), cure) from err
    return Client(redis)


def _behind_sentinels(place: Place, usual: dict[str, Any], ours: dict[str, Any]) -> Client:
    of_server = {name: value for name, value in parse_url(place.url).items() if name not in ("host", "port")}
    tls = {name: value for name, value in of_server.items() if name.startswith("ssl_")}
    if of_server.pop("connection_class", None) is not None:
        of_server["ssl"] = tls["ssl"] = True
    of_sentinels = usual | tls | {"socket_connect_timeout": SENTINEL_TIMEOUT_S, "socket_timeout": SENTINEL_TIMEOUT_S}
    if place.sentinel_password_file:
        of_sentinels["credential_provider"] = PasswordFile(place.sentinel_user, place.sentinel_password_file)
    elif place.sentinel_password:
        of_sentinels |= {"username": place.sentinel_user or None, "password": place.sentinel_password}
    manager = Sentinel(  # type: ignore[no-untyped-call]
        place.sentinels, sentinel_kwargs=of_sentinels, **of_server, **ours
    )
    return Client(manager.master_for(place.master), tuple(manager.sentinels))


def why(err: BaseException) -> str:
    """Returns the error's own words; for a refused password those of the protocol."""
    if not isinstance(err, AuthenticationError):
        return str(err).rstrip(".")
    if "without any password" in str(err) or "no password is set" in str(err):
        return "it has no password, and was given one"
    if "invalid" in str(err):
        return "WRONGPASS, it does not take this user and password"
    return "NOAUTH, it wants a password"


def cure(err: BaseException, url: str) -> str:
    """Returns the cure for an error at an address; empty if none is known."""
    scheme = urlsplit(url).scheme.removesuffix(redis_address.SENTINEL)
    cause = err.__cause__ or err.__context__
    match err:
        case AuthenticationError() if why(err).startswith("it has no"):
            return "leave it out of the address"
        case AuthenticationError():
            place = "unix://:PASSWORD@/PATH" if scheme == "unix" else f"{scheme}://:PASSWORD@HOST:PORT"
            others = "with a user USER:PASSWORD@, or ?password_file=/PATH"
            return f"give the password in the address, as in {place}, {others}"
        case NoPermissionError():
            return "its user needs the commands on the keys atoll:* that docs/operate.md lists"
        case MasterNotFoundError():
            return "check the sentinels, and the name of the master behind them; during a failover it comes by itself"
        case ReadOnlyError():
            return "it is a replica: give the address of its primary"
        case ConnectionError() if isinstance(cause, ssl.SSLCertVerificationError):
            return "name the authority of its certificate in the address, as in ?ssl_ca_certs=FILE"
        case ConnectionError() | TimeoutError() if isinstance(cause, ssl.SSLError) or (
            scheme == "rediss" and isinstance(err, TimeoutError)
        ):
            return "without TLS the address begins with redis://"
        case InvalidResponse():
            return "what listens there is no Redis, or wants TLS, for which the address begins with rediss://"
        case ConnectionError() if scheme == "redis" and re.search("closed by server|reset by peer", str(err)):
            return "if it wants TLS, the address begins with rediss://"
    return ""
