"""Judges a broker's probe: its ports, protocol and release, and the link to it. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from broker.wire.messages import PROTOCOL_VERSION
from ops.findings.finding import Finding, failure, ok, warning
from ops.findings.machine_findings import clock_apart, median

#: A slower link makes a model of a hundred million parameters wait for minutes.
NARROW_BITS_PER_S = 10e6
#: A connection that carries so much of what its buffers let it carry is full.
FILLED = 0.3
LONG_ROUND_TRIP_S = 1.0
#: Parameters whose transfer times in bf16 are given as examples.
EXAMPLE_PARAMETERS = 100_000_000


class PortState(StrEnum):
    """The outcome of a connection to a broker's port."""

    OPEN = "open"
    NO_NAME = "no name"  # its host's name is not known
    UNREACHABLE = "unreachable"  # nobody listens, or there is no route
    SILENT = "silent"  # packets vanish, or what listens says nothing
    STRANGER = "stranger"  # what listens is no broker
    WANTS_KEY = "wants key"
    WANTS_NO_KEY = "wants no key"
    NOT_ALLOWED = "not allowed"
    OTHER_BROKER = "other broker"  # its key is not the one in broker.public


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSeen:
    """The link to a broker; rates in bits per second, 0 if nothing came in time."""

    round_trips_s: tuple[float, ...]
    up_bits_per_s: float = 0.0
    down_bits_per_s: float = 0.0
    clock_offset_s: float | None = None  # the broker's minus ours
    buffer_bytes: int = 0  # that one TCP connection may have under way; 0: not known


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerSeen:
    """The measurements of one broker.

    Attributes:
        address: The address of its control port.
        control: How that received us, with ``bulk`` for the other one.
        why: The system's error for a port that is not open.
        keyed: Whether we came with a key.
        protocol: Version that it speaks; 0: not known.
        release: The release of its package; empty: not known.
        run: The run that it serves; empty: not known.
        asked_run: The run that we asked for; empty: any.
        refused: Why it refused our question, in its words.
        link: None: it could not be measured.
    """

    address: str
    control: PortState
    bulk: PortState
    why: str = ""
    keyed: bool = False
    protocol: int = 0
    release: str = ""
    run: str = ""
    asked_run: str = ""
    refused: str = ""
    link: LinkSeen | None = None


def judge(seen: BrokerSeen, own_release: str) -> list[Finding]:
    """Returns the findings on one broker, in the order of the probes."""
    both = (("control", seen.control), ("bulk", seen.bulk))
    closed = [(name, state) for name, state in both if state is not PortState.OPEN]
    if closed:
        return [_closed(seen, *closed[0])]
    keys = "with this key" if seen.keyed else "without keys"
    found = [ok("broker", f"{seen.address} and its bulk port take connections {keys}")]
    if seen.protocol not in (0, PROTOCOL_VERSION):
        return [*found, _other_protocol(seen, own_release)]
    if seen.link is None:
        cure = "look into the broker's log; a broker that has just started answers within a second"
        return [*found, failure("broker", f"it does not answer{f': {seen.refused}' if seen.refused else ''}", cure)]
    if seen.asked_run and seen.run != seen.asked_run:
        cure = f"say --run {seen.run} to every process, or go to the broker of {seen.asked_run}"
        found.append(failure("broker", f"it serves the run {seen.run}, not {seen.asked_run}", cure))
    found.append(_version(seen, own_release))
    found.append(_round_trip(seen.link))
    found.append(_bandwidth(seen.link))
    if seen.link.clock_offset_s is not None:
        found.append(clock_apart("the broker", seen.link.clock_offset_s, min(seen.link.round_trips_s) / 2))
    return found


def _closed(seen: BrokerSeen, name: str, state: PortState) -> Finding:
    said = f" ({seen.why})" if seen.why else ""
    where = f"the {name} port of {seen.address}"
    match state:
        case PortState.NO_NAME:
            return failure(
                "broker", f"the host of {seen.address} is not known{said}", "check the name, and the name service"
            )
        case PortState.UNREACHABLE:
            cure = "start the broker there, with --host 0.0.0.0 if it is another machine; check address and port"
            if name == "bulk":
                cure = "let both ports through: tensors use the one after that of --broker"
            return failure("broker", f"{where} cannot be reached{said}", cure)
        case PortState.SILENT:
            cure = "let both ports through every firewall on the way: that of --broker, and the next one"
            return failure("broker", f"{where} says nothing{said}", cure)
        case PortState.STRANGER:
            return failure("broker", f"what listens at {where} is no broker{said}", "check host and port")
        case PortState.WANTS_KEY:
            cure = "give this process's secret key with --key; `atoll keys new island NAME` on the hub makes one"
            return failure("keys", f"{where} takes connections with keys only", cure)
        case PortState.WANTS_NO_KEY:
            cure = "start the broker with --key, or leave --key out on a network that you trust"
            return failure("keys", f"{where} takes connections without keys only", cure)
        case PortState.NOT_ALLOWED:
            cure = "bring the .public file to the hub, and there: atoll keys allow FILE.public"
            return failure("keys", f"{where} does not have this key on its allow list", cure)
        case _:
            cure = "copy broker.public from where the broker's keys were made, and put it beside the secret key"
            return failure("keys", f"{where} has another key than the one in broker.public", cure)


def _other_protocol(seen: BrokerSeen, own_release: str) -> Finding:
    text = (
        f"the broker speaks protocol {seen.protocol}, this package ({own_release or 'a checkout'}) {PROTOCOL_VERSION}"
    )
    older = "the broker's host" if seen.protocol < PROTOCOL_VERSION else "this machine"
    return failure("version", text, f"install the newer release on {older}; all processes of a run need the same one")


def _version(seen: BrokerSeen, own_release: str) -> Finding:
    theirs = seen.release or "a checkout, or not installed"
    text = f"protocol {PROTOCOL_VERSION} on both sides; release {own_release or '(checkout)'} here, {theirs} there"
    return ok("version", text)


def _round_trip(link: LinkSeen) -> Finding:
    low, high = min(link.round_trips_s), max(link.round_trips_s)
    middle = median(link.round_trips_s)
    text = f"{_ms(middle)} there and back, {_ms(low)} to {_ms(high)} in {len(link.round_trips_s)} measurements"
    if middle <= LONG_ROUND_TRIP_S:
        return ok("round trip", text)
    return warning("round trip", text, "look for a full queue on the way; versions come that much later, and staler")


def _bandwidth(link: LinkSeen) -> Finding:
    text = f"{_rate(link.up_bits_per_s)} up, {_rate(link.down_bits_per_s)} down"
    low = min(link.up_bits_per_s, link.down_bits_per_s)
    if low <= 0:
        cure = "measure again, or with iperf3: less than 64 KiB came through in the time there was"
        return warning("bandwidth", text, cure)
    bits = 16 * EXAMPLE_PARAMETERS
    text += f"; 100 M parameters as bf16 take {bits / link.up_bits_per_s:.1f} s and {bits / link.down_bits_per_s:.1f} s"
    most = 8 * link.buffer_bytes / min(link.round_trips_s)
    if max(link.up_bits_per_s, link.down_bits_per_s) > FILLED * most > 0:
        text += f"; one TCP connection has at most {_rate(most)} at this round trip: `island --connections 4` has more"
    if low >= NARROW_BITS_PER_S:
        return ok("bandwidth", text)
    cure = "ask `atoll plan --bandwidth` what it carries; --codec int4 and a longer --sync-interval need less"
    return warning("bandwidth", text, cure)


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.1f} ms"


def _rate(bits_per_s: float) -> str:
    if bits_per_s <= 0:
        return "not measured"
    for unit in ("bit/s", "kbit/s", "Mbit/s"):
        if bits_per_s < 1000:
            return f"{bits_per_s:.0f} {unit}"
        bits_per_s /= 1000
    return f"{bits_per_s:.1f} Gbit/s"
