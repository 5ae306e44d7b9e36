"""Turns errors of Redis into a few words with a cure."""

from __future__ import annotations

import ssl
from urllib.parse import urlsplit

from redis.asyncio.sentinel import MasterNotFoundError
from redis.exceptions import (
    AuthenticationError,
    ConnectionError,
    InvalidResponse,
    NoPermissionError,
    ReadOnlyError,
    TimeoutError,
)

from broker.registry import redis_address


def why(err: BaseException) -> str:
    """Returns what is wrong in the words of the error; of a refused password in those of the protocol."""
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
            return (
                f"give the password in the address, as in {place}, with a user USER:PASSWORD@, or ?password_file=/PATH"
            )
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
        case ConnectionError() if scheme == "redis" and _hung_up(err):
            return "if it wants TLS, the address begins with rediss://"
    return ""


def _hung_up(err: BaseException) -> bool:
    """Whether a server ended the connection without a word, as one does that expects TLS."""
    return any(words in str(err) for words in ("closed by server", "reset by peer"))
