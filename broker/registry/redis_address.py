"""Checks addresses of Redis, and shows them without their password. Pure.

``redis://HOST:PORT/DB``, ``rediss://`` with TLS, or ``unix:///PATH``; a user and a password before the host, as in
``redis://USER:PASSWORD@HOST``, or as options. redis-py takes more, ignores what it does not understand, and fails over
the rest at its first connection, when a daemon runs: so what is wrong is refused here, before anything starts.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from urllib.parse import SplitResult, parse_qsl, unquote, urlencode, urlsplit

from broker.wire.errors import ConfigError
from broker.wire.masking import shown

#: Option -> whether redis-py can do with a value. Our connections have time limits of their own.
_OPTIONS: dict[str, Callable[[str], object]] = {
    "db": str.isdecimal,
    "username": bool,
    "password": bool,
    "protocol": ("2", "3").__contains__,
}
_TLS_OPTIONS: dict[str, Callable[[str], object]] = {
    "ssl_ca_certs": bool,
    "ssl_certfile": bool,
    "ssl_keyfile": bool,
    "ssl_password": bool,
    "ssl_cert_reqs": ("none", "optional", "required").__contains__,
    "ssl_check_hostname": ("true", "false").__contains__,
}
_SECRETS = frozenset({"password", "ssl_password"})
_UNFIT = re.compile(r"[\x00-\x20\x7f\ud800-\udfff]")
CURE = "write redis://HOST:PORT, rediss://HOST:PORT for TLS, or unix:///PATH"


def check(url: str, *, field: str = "redis_url") -> None:
    """Refuses what is no address of a Redis server.

    Raises:
        ConfigError: With the address as :func:`broker.wire.masking.shown` shows it.
    """
    problem = _problem(url)
    if problem:
        raise ConfigError(field, shown(url), f"is no address of Redis: {problem}")


def without_password(url: str) -> str:
    """Returns an address that :func:`check` takes, without its passwords: fit for files."""
    parts = urlsplit(url)
    user, at, place = parts.netloc.rpartition("@")
    user = user.partition(":")[0]
    options = parse_qsl(parts.query)
    kept = [(name, value) for name, value in options if name not in _SECRETS]
    query = parts.query if kept == options else urlencode(kept, safe="/")
    return parts._replace(netloc=user + at + place if user else place, query=query).geturl()


def names(url: str, bare: str) -> bool:
    """Whether an address is the one that :func:`without_password` has made ``bare`` of."""
    return not _problem(url) and without_password(url) == bare


def _problem(url: str) -> str:
    """Says why an address cannot be used, and what would be right; empty if it can."""
    if _UNFIT.search(unquote(url)):
        return f"it has a space or another character that none can have; {CURE}"
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        password = "write other characters than letters and digits of a password as %XX, such as %2F for /"
        return f"its host or port cannot be read; {CURE}; {password}" if "@" in url else f"{_NO_PLACE}; {CURE}"
    if parts.scheme not in ("redis", "rediss", "unix"):
        return CURE
    if parts.fragment:
        return "it has a #: write that as %23 in a password, and leave it out elsewhere"
    return (_problem_of_path(parts) if parts.scheme == "unix" else _problem_of_host(parts, port)) or _of_options(parts)


_NO_PLACE = "its host or port cannot be read (IPv6 stands in brackets, as in redis://[::1]:6379)"


def _problem_of_path(parts: SplitResult) -> str:
    if parts.netloc.rpartition("@")[2]:
        return "a path follows three slashes, as in unix:///run/redis.sock"
    return "" if parts.path.startswith("/") else "it has no path; write unix:///run/redis.sock"


def _problem_of_host(parts: SplitResult, port: int | None) -> str:
    try:
        fits = len(unquote(parts.hostname or "").encode("idna")) < 254
    except UnicodeError:
        fits = False
    if not fits or port == 0:
        return f"{_NO_PLACE}; {CURE}"
    if not re.fullmatch(r"(/\d*)?", parts.path, re.ASCII):
        return "behind the host there may be the number of a database, as in redis://HOST:PORT/0, and nothing else"
    return ""


def _of_options(parts: SplitResult) -> str:
    taken = _OPTIONS | (_TLS_OPTIONS if parts.scheme == "rediss" else {})
    given = parse_qsl(parts.query, keep_blank_values=True)
    names = [name for name, _ in given]
    if len(set(names)) == len(names) and all(name in taken and taken[name](value) for name, value in given):
        return ""
    # Which one it is may be a part of a password that has a question mark in it.
    return f"it has an option that is none, or one with a value that cannot be; there are {', '.join(taken)}"
