"""Errors in three families: the peer's, ours, and the world's.

* The peer is wrong: :class:`RemoteProtocolError`. Drop the message, count it, tell the sender, go on.
* We are wrong: :class:`LocalProtocolError`. Crash with the trace written; the supervisor restarts us.
* The world is wrong: :class:`Unavailable`. Bounded, jittered retry, in shells only.

Expected outcomes, such as a stale contribution, are no errors: they are values with a reason
(:class:`broker.wire.messages.Resolution`).
"""

from __future__ import annotations

from broker.wire.masking import masked


class AtollError(Exception):
    """Base of every error raised on purpose; never raised itself."""


class RemoteProtocolError(AtollError):
    """A peer sent something that breaks the protocol.

    Attributes:
        reason: One word from :class:`broker.wire.messages.Reason`, sent back to the peer and counted.
        field: The header field or buffer that is wrong.
        got: What was found, shortened for the log.
        expected: What would have been right.
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
        field: The setting's name, as it stands in the file or on the command line.
        value: What it was set to; of an address what :func:`broker.wire.masking.masked` shows.
        cure: What would be right.
    """

    def __init__(self, field: str, value: object, cure: str) -> None:
        self.field = field
        self.value = value = masked(value) if isinstance(value, str) else value
        self.cure = cure
        super().__init__(f"{field} = {value!r}: {cure}")


class Unavailable(AtollError):
    """Redis, the disk or the network did not do what was asked.

    Attributes:
        definite: True when the operation certainly did not happen; False when it may have.
    """

    def __init__(self, message: str, *, definite: bool) -> None:
        self.definite = definite
        super().__init__(message)


class RunEnded(AtollError):
    """The run is over: whoever comes now finds nothing to train."""


def _short(value: object, limit: int = 80) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."


def worth_repeating(times: int) -> bool:
    """Whether what has happened so many times is said again: the 1st, 10th, 100th, .. time."""
    return str(times).rstrip("0") == "1"
