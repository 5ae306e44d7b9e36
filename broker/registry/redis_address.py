"""Checks and reads addresses of Redis, and shows them without their password. Pure.

``redis://HOST:PORT/DB``, ``rediss://`` with TLS, or ``unix:///PATH``; a user and a password before the host, as in
``redis://USER:PASSWORD@HOST``, or as options. Behind Sentinel ``redis+sentinel://HOST:PORT,HOST:PORT/MASTER/DB``, or
``rediss+sentinel://``, with all sentinels that there are. The option ``password_file`` names a file that has the
password: the address is then no secret, and may stand wherever addresses stand. redis-py takes more, ignores what it
does not understand, and fails over the rest at its first connection, when a daemon runs: so what is wrong is refused
here, before anything starts.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from urllib.parse import SplitResult, parse_qsl, unquote, urlencode, urlsplit

from broker.base.errors import ConfigError, shown

#: Option -> whether redis-py can do with a value. Our connections have time limits of their own.
_OPTIONS: dict[str, Callable[[str], object]] = {
    "db": str.isdecimal,
    "username": bool,
    "password": bool,
    "protocol": ("2", "3").__contains__,
    "password_file": re.compile(r"/.+").fullmatch,  # a daemon may run in another directory
}
_TLS_OPTIONS: dict[str, Callable[[str], object]] = {
    "ssl_ca_certs": bool,
    "ssl_certfile": bool,
    "ssl_keyfile": bool,
    "ssl_password": bool,
    "ssl_cert_reqs": ("none", "optional", "required").__contains__,
    "ssl_check_hostname": ("true", "false").__contains__,
}
_SENTINEL_OPTIONS: dict[str, Callable[[str], object]] = {
    "sentinel_username": bool,
    "sentinel_password": bool,
    "sentinel_password_file": re.compile(r"/.+").fullmatch,
}
_SECRETS = frozenset({"password", "ssl_password", "sentinel_password"})
SENTINEL, SENTINEL_PORT = "+sentinel", 26379
_UNFIT = re.compile(r"[\x00-\x20\x7f\ud800-\udfff]")
_MASTER = re.compile(r"/[A-Za-z0-9._-]+(/\d*)?", re.ASCII)
CURE = "write redis://HOST:PORT, rediss://HOST:PORT for TLS, or unix:///PATH"
SENTINEL_CURE = "write redis+sentinel://HOST:PORT,HOST:PORT/MASTER, with rediss+sentinel:// for TLS"


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The parts of an address; a part that it lacks is empty."""

    url: str = field(repr=False)  # what redis-py takes; behind Sentinel with the first sentinel as its host
    user: str = ""
    password_file: str = ""  # without one the password, if there is any, stands in ``url``
    sentinels: tuple[tuple[str, int], ...] = ()  # host and port of each; none: the server itself is at ``url``
    master: str = ""  # the name under which the sentinels know it
    sentinel_user: str = ""
    sentinel_password: str = field(default="", repr=False)
    sentinel_password_file: str = ""


def place(url: str) -> Place:
    """Returns the parts of an address that passes :func:`check`."""
    parts = urlsplit(url)
    options = dict(parse_qsl(parts.query))
    files = {name: options.pop(name, "") for name in ("password_file", "sentinel_password_file")}
    of_sentinels = {name: options.pop(name, "") for name in ("sentinel_username", "sentinel_password")}
    who, at, where = parts.netloc.rpartition("@")
    user = unquote(who.partition(":")[0]) or options.get("username", "")
    sentinels: tuple[tuple[str, int], ...] = ()
    master, path = "", parts.path
    if parts.scheme.endswith(SENTINEL):
        sentinels = tuple(_host_and_port(each) for each in where.split(","))
        master, _, database = path.removeprefix("/").partition("/")
        path, where = f"/{database}", where.split(",")[0]
    if files["password_file"]:  # redis-py takes no user beside it
        options.pop("username", None)
        who = at = ""
    bare = parts._replace(
        scheme=parts.scheme.removesuffix(SENTINEL),
        netloc=who + at + where,
        path=path,
        query=urlencode(options, safe="/"),
    )
    return Place(
        url=_written(bare),
        user=user,
        password_file=files["password_file"],
        sentinels=sentinels,
        master=master,
        sentinel_user=of_sentinels["sentinel_username"],
        sentinel_password=of_sentinels["sentinel_password"],
        sentinel_password_file=files["sentinel_password_file"],
    )


def _written(parts: SplitResult) -> str:
    """Returns an address; ``geturl`` leaves out the slashes before a path that redis-py wants."""
    url = parts.geturl()
    return url if "://" in url else url.replace(":", "://", 1)


def _host_and_port(text: str) -> tuple[str, int]:
    parts = urlsplit(f"//{text}")
    return parts.hostname or "", parts.port or SENTINEL_PORT


def check(url: str, *, field: str = "redis_url") -> None:
    """Raises ConfigError if ``url`` is not an address of Redis; the error hides its password."""
    problem = _problem(url)
    if problem:
        raise ConfigError(field, shown(url), f"is no address of Redis: {problem}")


def without_password(url: str) -> str:
    """Returns an address that passes :func:`check` without its passwords, fit for files."""
    parts = urlsplit(url)
    user, at, place = parts.netloc.rpartition("@")
    user = user.partition(":")[0]
    options = parse_qsl(parts.query)
    kept = [(name, value) for name, value in options if name not in _SECRETS]
    query = parts.query if kept == options else urlencode(kept, safe="/")
    return _written(parts._replace(netloc=user + at + place if user else place, query=query))


def names(url: str, bare: str) -> bool:
    """Returns True if :func:`without_password` makes ``bare`` of this address."""
    return not _problem(url) and without_password(url) == bare


def _problem(url: str) -> str:
    """Returns why an address cannot be used, and what would be right; empty if it can."""
    if _UNFIT.search(unquote(url)):
        return f"it has a space or another character that none can have; {CURE}"
    try:
        parts = urlsplit(url)
        if parts.scheme in ("redis" + SENTINEL, "rediss" + SENTINEL):
            return _problem_of_sentinels(parts)
        port = parts.port
    except ValueError:
        password = "write other characters than letters and digits of a password as %XX, such as %2F for /"
        return f"its host or port cannot be read; {CURE}; {password}" if "@" in url else f"{_NO_PLACE}; {CURE}"
    if parts.scheme not in ("redis", "rediss", "unix"):
        return CURE
    if parts.fragment:
        return _HASH
    return (_problem_of_path(parts) if parts.scheme == "unix" else _problem_of_host(parts, port)) or _of_options(parts)


_HASH = "it has a #: write that as %23 in a password, and leave it out elsewhere"
_NO_PLACE = "its host or port cannot be read (IPv6 stands in brackets, as in redis://[::1]:6379)"


def _problem_of_sentinels(parts: SplitResult) -> str:
    if parts.fragment:
        return _HASH
    for each in parts.netloc.rpartition("@")[2].split(","):
        try:
            problem = _problem_of_host(urlsplit(f"//{each}"), urlsplit(f"//{each}").port) if each else _NO_PLACE
        except ValueError:
            problem = _NO_PLACE
        if problem:
            return f"{_NO_PLACE}; {SENTINEL_CURE}"
    if not _MASTER.fullmatch(parts.path):
        return f"behind the sentinels the name of the master is missing; {SENTINEL_CURE}"
    return _of_options(parts)


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
    taken = _OPTIONS | (_TLS_OPTIONS if parts.scheme.startswith("rediss") else {})
    if parts.scheme.endswith(SENTINEL):
        taken = taken | _SENTINEL_OPTIONS
    given = parse_qsl(parts.query, keep_blank_values=True)
    names = [name for name, _ in given]
    in_place = ":" in parts.netloc.rpartition("@")[0]
    for name in ("password", "sentinel_password"):
        if f"{name}_file" in names and (name in names or (in_place and name == "password")):
            return f"it has a {name} and a {name}_file: give one of them"
    if len(set(names)) == len(names) and all(name in taken and taken[name](value) for name, value in given):
        return ""
    # Which one it is may be a part of a password that has a question mark in it.
    return f"it has an option that is none, or one with a value that cannot be; there are {', '.join(taken)}"
