"""Checks the values of messages, by rules derived once from the annotations of their dataclasses.

One :class:`Record` per dataclass reads what msgpack unpacked and writes what msgpack packs. Both directions apply the
same checks, so that nothing leaves this process which a peer would refuse. A value that does not fit raises
:class:`Unfit`; :mod:`broker.wire.frames` says whose fault that is.

The rules, by annotation: ``int`` is a msgpack integer of 64 bits, never a bool, and not negative; ``float`` is a
float64, finite and not negative; ``str`` is short and printable (it ends up in logs and terminals); an enum is its
value; a tuple is an array; a dataclass is a map that holds exactly its fields. The exceptions go by the field's name
and are in the tables of this module.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from enum import StrEnum
from types import NoneType, UnionType
from typing import Any, NamedTuple, NoReturn, Union, get_args, get_origin, get_type_hints

from broker.base.errors import ConfigError
from broker.wire.fragments import TensorSpec
from broker.wire.messages.observation import MAX_PROBE_BUFFERS, Probe
from broker.wire.messages.rounds import Contribution, HostPart, Outstanding, Resolution, Seed
from broker.wire.messages.values import AGGREGATOR, BROKER, Block, DataRange, Reason
from broker.wire.messages.versions import Version
from broker.wire.names import NAME, RULE, is_name
from broker.wire.ranges import StepRange

INT_MAX = 2**63 - 1
MAX_TEXT = 1024  # characters
MAX_ITEMS = 65_536  # of one tuple, unless its field is listed below
MAX_DIMENSIONS = 32
MAX_OUTSTANDING = 1024  # of one heartbeat: each is answered, in one message
MAX_DATA_RANGES = 256  # of one contribution: the version that it goes into repeats them
MAX_HOSTS = 4096  # of one island: the parts of its contributions wait for each other
MAX_TRAINED_ON = 4096  # of one contribution: versions that it was trained on; it waits with them
MAX_RECORD_BYTES = 2 << 20  # of one record that an aggregator writes and another one reads

#: The field that travels as raw frames; the codec fills it in.
PAYLOAD = "payload"
#: Longest tuples of fields whose readers repeat them, or do more than read them.
_MOST_ITEMS = {
    "shape": MAX_DIMENSIONS,
    "start": MAX_DIMENSIONS,
    "outstanding": MAX_OUTSTANDING,
    "data": MAX_DATA_RANGES,
    "trained_on": MAX_TRAINED_ON,
}
#: Integers where -1 means "none".
_MINUS_ONE_IS_NONE = frozenset({"versions", "sequence"})
#: Floats that may be below zero.
_SIGNED = frozenset({"loss"})
#: Free text that explains; when we write it, it is cleaned and cut, for a remark must never cost the message.
_REMARKS = frozenset({"detail", "reason"})

_ADDRESS = re.compile(rf"((join|standby|observer):)?{NAME}", re.ASCII)


class Unfit(Exception):
    """A value does not fit its field; ``path`` has the names and indexes to it, innermost first."""

    def __init__(self, got: object, expected: str, *, reason: Reason = Reason.MALFORMED, at: str = "") -> None:
        self.path = [at] if at else []
        self.reason = reason
        self.got = got
        self.expected = expected
        super().__init__(expected)

    @property
    def field(self) -> str:
        """The path as text, such as ``body.trained_on[2].steps``."""
        return ".".join(reversed(self.path)).replace(".[", "[")


class Rule(NamedTuple):
    """Checks and converts values of one annotation, in both directions."""

    read: Callable[[Any], Any]
    write: Callable[[Any], Any]


class Record:
    """Reads and writes the values of one dataclass, without its payload.

    Raises:
        TypeError: If a field is annotated with a type that has no form on the wire: a bug in the message list.
    """

    __slots__ = ("_check", "_names", "_rules", "cls", "has_payload")

    def __init__(self, cls: type[Any]) -> None:
        hints = get_type_hints(cls)
        names = [f.name for f in fields(cls)]
        self.cls = cls
        self.has_payload = PAYLOAD in names
        self._rules = [(name, _rule(hints[name], name)) for name in names if name != PAYLOAD]
        self._names = frozenset(name for name, _ in self._rules)
        self._check = _RELATIONS.get(cls, lambda _: None)

    def read(self, value: Any, **given: Any) -> Any:
        """Returns an instance with the fields of the map ``value`` and the fields ``given``.

        Raises:
            Unfit: If the map lacks a field, has another one, or a value does not fit.
        """
        if type(value) is not dict:
            raise Unfit(value, "a map")
        if value.keys() != self._names:
            _refuse_keys(value, self._names)
        name = ""
        try:
            for name, rule in self._rules:
                given[name] = rule.read(value[name])
        except Unfit as unfit:
            unfit.path.append(name)
            raise
        try:
            value = self.cls(**given)
        except ConfigError as err:  # a part that checks its own relations, as settings do
            raise Unfit(err.value, err.cure, at=err.field) from err
        self._check(value)
        return value

    def write(self, value: Any) -> dict[str, Any]:
        """Returns the map that :meth:`read` turns into ``value``, without the payload.

        Raises:
            Unfit: If ``value`` is no instance, or one of its fields does not fit.
        """
        if type(value) is not self.cls:
            raise Unfit(value, f"an instance of {self.cls.__name__}")
        self._check(value)
        written = {}
        name = ""
        try:
            for name, rule in self._rules:
                written[name] = rule.write(getattr(value, name))
        except Unfit as unfit:
            unfit.path.append(name)
            raise
        return written


def counter(value: Any) -> int:
    """Returns ``value`` if it is an integer from 0 to 2**63 - 1; raises :class:`Unfit` otherwise."""
    if type(value) is not int or not 0 <= value <= INT_MAX:
        raise Unfit(value, "an integer from 0 to 2**63 - 1")
    return value


def identifier(value: Any) -> str:
    """Returns ``value`` if it can name a run or a process; raises :class:`Unfit` otherwise."""
    if not is_name(value):
        raise Unfit(value, RULE)
    return value


def identifier_or_none(value: Any) -> str:
    """Returns ``value`` if it can name a process, or is empty; raises :class:`Unfit` otherwise."""
    return "" if value == "" else identifier(value)


def island_id(value: Any) -> str:
    """Returns ``value`` if it can name an island, or is empty; raises :class:`Unfit` otherwise."""
    if value in (AGGREGATOR, BROKER):
        raise Unfit(value, f"an id other than {AGGREGATOR} and {BROKER}")
    return identifier_or_none(value)


def address(value: Any) -> str:
    """Returns ``value`` if it is a valid ``sender`` or ``to``; raises :class:`Unfit` otherwise."""
    if type(value) is not str or not _ADDRESS.fullmatch(value):
        raise Unfit(value, "an id, join: with a nonce, standby: or observer: with a name, aggregator or broker")
    return value


def _rule(hint: Any, field: str) -> Rule:
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is bool:
        return Rule(_boolean, _boolean)
    if hint is int:
        check = _integer_from_minus_one if field in _MINUS_ONE_IS_NONE else counter
        return Rule(check, check)
    if hint is bytes:
        return Rule(_record, _record)
    if hint is float:
        return _float(signed=field in _SIGNED)
    if hint is str:
        return _TEXTS.get(field, Rule(_text, _text))
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return _enum(hint)
    if isinstance(hint, type) and is_dataclass(hint):
        nested = Record(hint)
        return Rule(nested.read, nested.write)
    if origin in (Union, UnionType) and len(arguments) == 2 and NoneType in arguments:
        (inner,) = set(arguments) - {NoneType}
        return _optional(_rule(inner, field))
    if origin is tuple and len(arguments) == 2 and arguments[1] is Ellipsis:
        return _tuple(_rule(arguments[0], field), _MOST_ITEMS.get(field, MAX_ITEMS))
    raise TypeError(f"{field}: {hint} has no form on the wire; see the rules in broker/wire/schema.py")


def _boolean(value: Any) -> bool:
    if type(value) is not bool:
        raise Unfit(value, "true or false")
    return value


def _integer_from_minus_one(value: Any) -> int:
    return -1 if type(value) is int and value == -1 else counter(value)


def _float(*, signed: bool) -> Rule:
    expected = "a finite float64" if signed else "a finite float64, 0 or more"

    def read(value: Any) -> float:
        if type(value) is not float or not math.isfinite(value) or (value < 0.0 and not signed):
            raise Unfit(value, expected)
        return value

    def write(value: Any) -> float:
        # Our own code may well say 0 for 0.0 or hold a numpy float64; on the wire there is one form only.
        if isinstance(value, float) or (type(value) is int and abs(value) <= INT_MAX):
            value = float(value)
        return read(value)

    return Rule(read, write)


def _text(value: Any) -> str:
    if type(value) is not str or len(value) > MAX_TEXT or not value.isprintable():
        raise Unfit(value, f"printable text of at most {MAX_TEXT} characters")
    return value


def _record(value: Any) -> bytes:
    if type(value) is not bytes or len(value) > MAX_RECORD_BYTES:
        raise Unfit(value, f"a binary string of at most {MAX_RECORD_BYTES} bytes")
    return value


def _remark(value: Any) -> str:
    if type(value) is not str:
        raise Unfit(value, "text")
    return value if value.isprintable() and len(value) <= MAX_TEXT else _printable(value[:MAX_TEXT])


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else " " for c in text)


def _enum(enum: type[StrEnum]) -> Rule:
    members = {str(member): member for member in enum}
    expected = "one of " + ", ".join(members)

    def read(value: Any) -> StrEnum:
        member = members.get(value) if type(value) is str else None
        if member is None:
            raise Unfit(value, expected)
        return member

    def write(value: Any) -> str:
        if type(value) is not enum:
            raise Unfit(value, expected)
        return value.value

    return Rule(read, write)


def _optional(inner: Rule) -> Rule:
    return Rule(
        lambda value: None if value is None else inner.read(value),
        lambda value: None if value is None else inner.write(value),
    )


def _tuple(item: Rule, longest: int) -> Rule:
    def read(value: Any) -> tuple[Any, ...]:
        return tuple(convert(value, list, item.read))

    def write(value: Any) -> list[Any]:
        return convert(value, tuple, item.write)

    def convert(value: Any, container: type[Sequence[Any]], one: Callable[[Any], Any]) -> list[Any]:
        if type(value) is not container or len(value) > longest:
            raise Unfit(value, f"an array of at most {longest} items")
        converted: list[Any] = []
        try:
            for element in value:
                converted.append(one(element))  # noqa: PERF401 - its length names the one that does not fit
        except Unfit as unfit:
            unfit.path.append(f"[{len(converted)}]")
            raise
        return converted

    return Rule(read, write)


def _refuse_keys(value: dict[Any, Any], names: frozenset[str]) -> NoReturn:
    for missing in sorted(names - value.keys()):
        raise Unfit("missing", "to be there", at=missing)
    unknown = next(key for key in value if key not in names)
    raise Unfit(unknown, "no field but " + ", ".join(sorted(names)))


_TEXTS = {
    "nonce": Rule(identifier, identifier),
    "resumes": Rule(identifier_or_none, identifier_or_none),
    "island_id": Rule(island_id, island_id),
} | {remark: Rule(_text, _remark) for remark in _REMARKS}


# --- relations between the fields of one value -----------------------------------------------------------------


def _check_steps(value: StepRange | Outstanding | Resolution) -> None:
    _check_order(value, "from_step", "to_step")
    if isinstance(value, StepRange) and value.from_tokens > value.to_tokens:
        expected = f"at least from_tokens, {value.from_tokens}"
        raise Unfit(value.to_tokens, expected, reason=Reason.IMPLAUSIBLE, at="to_tokens")


def _check_tensor(tensor: TensorSpec) -> None:
    if tensor.unit_axes > len(tensor.shape):
        raise Unfit(tensor.unit_axes, f"at most the number of dimensions, {len(tensor.shape)}", at="unit_axes")
    if tensor.size > INT_MAX:
        raise Unfit(tensor.size, "at most 2**63 - 1 elements", at="shape")


def _check_order(value: Any, low: str, high: str) -> None:
    if getattr(value, low) >= getattr(value, high):
        expected = f"more than {low}, {getattr(value, low)}"
        raise Unfit(getattr(value, high), expected, reason=Reason.IMPLAUSIBLE, at=high)


def _check_data(data: DataRange | Block) -> None:
    _check_order(data, "from_batch", "to_batch")


def _check_hosts(value: Contribution | Seed) -> None:
    if not 1 <= value.hosts <= MAX_HOSTS:
        raise Unfit(value.hosts, f"from 1 to {MAX_HOSTS}", at="hosts")
    if value.hosts == 1 and value.places:
        raise Unfit(f"{len(value.places)} places", "none, of a single host", at="places")


def _check_part(part: HostPart) -> None:
    if part.hosts > MAX_HOSTS:
        raise Unfit(part.hosts, f"at most {MAX_HOSTS}", at="hosts")
    if not 0 < part.host < part.hosts:
        raise Unfit(part.host, f"from 1 to {part.hosts - 1}, below hosts", at="host")
    if part.from_step >= part.to_step > 0 or part.from_step > part.to_step:
        raise Unfit(part.to_step, f"more than from_step, {part.from_step}", reason=Reason.IMPLAUSIBLE, at="to_step")


def _check_probe(probe: Probe) -> None:
    if probe.answer_buffers > MAX_PROBE_BUFFERS:
        raise Unfit(probe.answer_buffers, f"at most {MAX_PROBE_BUFFERS}", at="answer_buffers")


def _check_base(version: Version) -> None:
    if version.base is not None and version.base >= version.fragment_version:
        raise Unfit(version.base, f"below fragment_version, {version.fragment_version}", at="base")


_RELATIONS: dict[type[Any], Callable[[Any], None]] = {
    StepRange: _check_steps,
    Contribution: _check_hosts,
    Seed: _check_hosts,
    HostPart: _check_part,
    Outstanding: _check_steps,
    Resolution: _check_steps,
    Block: _check_data,
    DataRange: _check_data,
    TensorSpec: _check_tensor,
    Probe: _check_probe,
    Version: _check_base,
}
