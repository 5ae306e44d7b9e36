"""Errors in three families: the peer's, ours, and the world's.

* The peer is wrong: :class:`RemoteProtocolError`. Drop the message, count it, tell the sender, continue.
* We are wrong: :class:`LocalProtocolError`. Crash with the trace written; the supervisor restarts us.
* The world is wrong: :class:`Unavailable`. Bounded, jittered retry, in shells only.

Expected outcomes, such as a stale contribution, are no errors: they are values with a reason
(:class:`broker.wire.messages.Resolution`).
"""

from __future__ import annotations

import errno
import re

_NO_RIGHT = "give this user the right to it, or name another"
_NOT_THERE = "it is on a file system that cannot do this (lock a file, flush a directory): name one on a local disk"
_CURES = {
    errno.ENOENT: "there is none: check the path, and the folder that it is seen from",
    errno.ENOTDIR: "choose a path that leads through directories",
    errno.EISDIR: "it is a directory: name a file",
    errno.EEXIST: "choose a path that is a directory, or does not exist",
    errno.ENAMETOOLONG: "choose a shorter path",
    errno.EACCES: _NO_RIGHT,
    errno.EPERM: _NO_RIGHT,
    errno.EROFS: "mount that disk writable, or name another",
    errno.ENOSPC: "free space on that disk",
    errno.EDQUOT: "raise this user's quota on that disk",
    errno.EFBIG: "raise the limit on file sizes (ulimit -f)",
    errno.EMFILE: "raise the limit on open files (ulimit -n)",
    errno.ENFILE: "raise this machine's limit on open files (sysctl fs.file-max)",
    errno.ENOLCK: _NOT_THERE,
    errno.EINVAL: _NOT_THERE,
    errno.ENOSYS: _NOT_THERE,
    errno.EOPNOTSUPP: _NOT_THERE,
}
_NO_ADDRESS = "this machine has no such address: give one of its own"
_CURES_OF_LISTENING = {
    errno.EADDRINUSE: "end the process that listens there, or take another port",
    errno.EACCES: "this user may not: take a port above 1023",
    errno.EADDRNOTAVAIL: _NO_ADDRESS,
    errno.EAFNOSUPPORT: _NO_ADDRESS,
    errno.ENODEV: _NO_ADDRESS,
    errno.EMFILE: _CURES[errno.EMFILE],
}


class AtollError(Exception):
    """Base of every error raised on purpose; never raised itself."""


class RemoteProtocolError(AtollError):
    """A peer sent something that breaks the protocol.

    ``reason`` is of :class:`broker.wire.messages.Reason`, sent back to the peer and counted. ``field`` is the header
    field or buffer that is wrong; what it is and what it should be are shortened for the log.
    """

    def __init__(self, reason: str, *, field: str, got: object, expected: object) -> None:
        self.reason = reason
        self.field = field
        self.got = _short(got)
        self.expected = _short(expected)
        super().__init__(f"{reason}: {field} is {self.got}, expected {self.expected}")


class LocalProtocolError(AtollError):
    """Our own code tried something that the protocol forbids: a bug here, not at the peer."""


class ConfigError(AtollError):
    """A setting cannot work.

    Attributes:
        field: The setting's name in the file or on the command line.
        value: Its value; an address in the form of :func:`masked`.
        cure: How to set it right.
    """

    def __init__(self, field: str, value: object, cure: str) -> None:
        self.field = field
        self.value = value = masked(value) if isinstance(value, str) else value
        self.cure = cure
        super().__init__(f"{field} = {value!r}: {cure}")


class Unavailable(AtollError):
    """Redis, the disk or the network failed; unless ``definite`` the operation may have happened."""

    def __init__(self, message: str, *, definite: bool) -> None:
        self.definite = definite
        super().__init__(message)


class RunEnded(AtollError):
    """The run has ended; there is nothing left to train."""


def cure_of(err: OSError, otherwise: str = "check that disk") -> str:
    """Returns the cure of a file error, by its number, or else ``otherwise``."""
    return _CURES.get(err.errno or 0, otherwise)


def cure_of_listening(err: OSError) -> str:
    """Returns the cure for an address that cannot be listened on."""
    return _CURES_OF_LISTENING.get(err.errno or 0, "check the address")


def _short(value: object) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def worth_repeating(times: int) -> bool:
    """Returns whether to log a repeated cause again: at its 1st, 10th, 100th, .. occurrence."""
    return str(times).rstrip("0") == "1"


# --- addresses without their passwords --------------------------------------------------------------------------------

# They work on the text alone and not on what a parser makes of it, since a password must be hidden in a
# malformed address, too: the error that refuses it shows it. Where a password might reach farther than it seems to,
# as with an @ behind a question mark, nothing but the scheme is shown.

HIDDEN = "***"

#: A place without a password: a host, perhaps with a port or a database, or a path.
_HOST = r"(?:[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]*(?:%\w+)?\]?)(?::\d{0,5})?"
_PLACE = re.compile(rf"(?:{_HOST})?(?:/[^@?#]*)?", re.ASCII)
#: Several of them, behind Sentinel alone.
_PLACES = re.compile(rf"(?:{_HOST})?(?:,{_HOST})*(?:/[^@?#]*)?", re.ASCII)
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_OPTION = re.compile(
    r"(?P<name>db|protocol|(?:sentinel_)?password_file|ssl_(?!password)\w+)=[^@#&]*|(?P<other>\w+)=.*",
    re.ASCII | re.DOTALL,
)
_PASSWORD = re.compile(r"(password=).*", re.DOTALL)
#: Signs that an address may have a password in it.
_MAY_HIDE = re.compile(r"[@?]|^(?:rediss?(?:\+sentinel)?|unix)://")


def first_of(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Returns the first error inside nested groups: the cause of the failure."""
    first = group.exceptions[0]
    return first_of(first) if isinstance(first, BaseExceptionGroup) else first


def shown(address: str) -> str:
    """Returns an address with anything that may be a user or a password hidden."""
    match = _SCHEME.match(address)
    scheme = match[0] if match else ""
    head, mark, query = address[len(scheme) :].partition("?")
    _, at, place = head.rpartition("@")
    form = _PLACES if scheme.lower().endswith("+sentinel://") else _PLACE
    if "@" in query or "#" in address or not form.fullmatch(place):
        return scheme + HIDDEN
    options = "&".join(map(_option, query.split("&")))
    return f"{scheme}{HIDDEN + at if at else ''}{place}{mark}{options if mark else ''}"


def masked(text: str) -> str:
    """Returns a text in which an address is replaced by its form from :func:`shown`."""
    match = _SCHEME.search(text)
    if match is None:  # a part of an address, perhaps
        return _PASSWORD.sub(rf"\1{HIDDEN}", text)
    if not _MAY_HIDE.search(text[match.start() :]):
        return text
    return text[: match.start()] + shown(text[match.start() :])


def _option(text: str) -> str:
    match = _OPTION.fullmatch(text)
    if match is None:
        return HIDDEN
    return text if match["name"] else f"{match['other']}={HIDDEN}"
