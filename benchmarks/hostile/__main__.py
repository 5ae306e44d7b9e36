"""Hostile bytes: for the decoder of the wire, and, with a broker's address, at its two ports.

The decoder gets broken copies of all kinds of valid messages, and noise. Each input follows from the seed and its
number, so a finding is repeated with ``--first NUMBER --inputs 1``. Nine in ten of the broken headers get a checksum of
their own, to reach what is behind that check. Every input must be read or refused with a reason of the protocol,
without another exception; what is read must encode to the same message again. Of every 20th, and of all that were built
to be expensive, the memory is measured: at most 6 MiB, and 32 times the input's own size beyond that.

The strangers at the ports are scanners, TLS, HTTP, RDP, SSH, old and broken ZeroMQ peers, and noise. They must not end
the broker or hold up anybody else; each is hung up or leaves by itself. A stranger says its words one after the other,
waits for an answer in between, and stays for a moment to see whether it is hung up.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
import tracemalloc
from collections import Counter
from dataclasses import dataclass, field, replace

from benchmarks import output
from benchmarks.hostile.messages import Frames, bomb, broken, valid_messages
from benchmarks.hostile.strangers import KINDS, besiege
from benchmarks.output import Column, Printer
from broker.base.errors import ConfigError
from broker.wire.addresses import split_tcp
from broker.wire.frames import Unreadable, decode, encode, peek
from broker.wire.messages import Reason

VISITS = (
    Column(key="kind", title="strangers"),
    *(Column(key=each, title=each, form=",") for each in ("visits", "hung up")),
)
#: What decoding may allocate: this, and so many bytes for each byte of input.
FREE_BYTES, BYTES_PER_BYTE = 6 << 20, 32
#: The memory of one input in so many is measured; one in so many is built to be expensive.
MEASURE_EVERY, BOMB_EVERY = 20, 5_000


@dataclass(slots=True, kw_only=True)
class Findings:
    """What came of decoding.

    Attributes:
        outcomes: ``read``, or the reason of the refusal -> inputs.
        failures: What must not be, with the number of the input.
        peak_ratio: Most memory that was measured, over what is allowed.
        slowest_s: Longest time that one input took.
    """

    outcomes: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    peak_ratio: float = 0.0
    slowest_s: float = 0.0


def fuzz(inputs: int, seed: int, *, first: int = 0) -> Findings:
    """Decodes so many inputs, from number ``first`` on; a failure does not end it."""
    valid, findings, rng = valid_messages(random.Random(seed)), Findings(), random.Random()
    for number in range(first, first + inputs):
        rng.seed(seed * 1_000_000_007 + number)
        is_bomb = number % BOMB_EVERY == 0
        frames = bomb(rng) if is_bomb else broken(valid, rng)
        _try(frames, number, findings, measured=is_bomb or number % MEASURE_EVERY == 0)
    return findings


def _try(frames: Frames, number: int, findings: Findings, *, measured: bool) -> None:
    if measured:
        tracemalloc.start()
    began_s = time.perf_counter()
    envelope = None
    try:
        envelope = decode(frames)
        outcome = "read"
    except Unreadable as err:
        outcome = str(err.reason)
        if err.reason not in set(Reason) or not str(err).isprintable():
            findings.failures.append(f"input {number}: refused with {err!r}")
    except Exception as err:  # noqa: BLE001 - whatever else it is, it is what we look for
        outcome = "crashed"
        findings.failures.append(f"input {number}: {err!r}")
    took_s = time.perf_counter() - began_s
    if measured:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        allowed = FREE_BYTES + BYTES_PER_BYTE * sum(map(len, frames))
        findings.peak_ratio = max(findings.peak_ratio, peak / allowed)
        if peak > allowed:
            findings.failures.append(f"input {number}: {peak} bytes allocated, {allowed} allowed")
    else:
        findings.slowest_s = max(findings.slowest_s, took_s)
    findings.outcomes[outcome] += 1
    if envelope is None:
        peek(frames)  # never raises
    elif decode(encode(replace(envelope))) != envelope:
        findings.failures.append(f"input {number}: read as what does not encode to itself")


# --- the command ------------------------------------------------------------------------------------------------------


def main(argv: list[str] | None = None) -> int:
    """Runs as a command; returns 1 if an input did what none may, or the broker could not be reached."""
    parser = output.parser_of("hostile", __doc__, "tcp://127.0.0.1:7001 --seconds 60")
    parser.add_argument("broker", nargs="?", help="visit this control address and the next port; else the decoder")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--inputs", type=int, default=1_000_000, help="for the decoder (default: 1,000,000)")
    parser.add_argument("--first", type=int, default=0, help="number of the first one, to repeat a finding")
    parser.add_argument("--seconds", type=float, default=60.0, help="of visits (default: 60)")
    parser.add_argument("--at-once", type=int, default=8, help="visits, and as many that hold on (default: 8)")
    args = parser.parse_args(argv)
    return output.guarded(_visits, args, VISITS) if args.broker else output.guarded(_inputs, args)


def _inputs(args: argparse.Namespace) -> int:
    inputs = min(args.inputs, 20_000) if args.quick else args.inputs
    if inputs < 1:
        raise ConfigError("inputs", inputs, "must be at least 1")
    began_s = time.perf_counter()
    found = fuzz(inputs, args.seed, first=args.first)
    facts = {
        "inputs": inputs,
        "failures": len(found.failures),
        "wall_s": round(time.perf_counter() - began_s, 1),
        "slowest_ms": round(1000 * found.slowest_s, 1),
        "peak_of_allowed": round(found.peak_ratio, 3),
        "outcomes": dict(found.outcomes.most_common()),
    }
    print(json.dumps(facts) if args.json else "\n".join(f"{name:16} {value}" for name, value in facts.items()))
    for failure in found.failures[:20]:
        print(failure, file=sys.stderr)
    return 1 if found.failures else 0


def _visits(args: argparse.Namespace, printer: Printer) -> None:
    host, port = split_tcp(args.broker)
    if args.at_once < 1:
        raise ConfigError("at_once", args.at_once, "must be at least 1")
    seconds = min(args.seconds, 2.0) if args.quick else args.seconds
    made, hung_up = asyncio.run(besiege(host, port, seconds=seconds, at_once=args.at_once, seed=args.seed))
    for kind in KINDS:
        printer.add({"kind": kind, "visits": made[kind], "hung up": hung_up[kind]})
    printer.add({"kind": "all", "visits": made.total(), "hung up": hung_up.total()})


if __name__ == "__main__":
    sys.exit(main())
