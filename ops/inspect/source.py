"""The source of a run's status and events: its Redis, or a broker asked with a key."""

from __future__ import annotations

import argparse
import json
from collections import deque
from pathlib import Path
from typing import Protocol

from aggregator.interface.events import Note
from aggregator.interface.reading_notes import read_note
from broker.base.errors import ConfigError
from broker.observing.client import ObservedRun
from broker.transport.keys import client_keys
from broker.wire.addresses import broker_addresses, check_exposure
from broker.wire.identity import KeyRole
from broker.wire.records import EventNumber, KeptVersion, NumberedEvent, Snapshot

#: What ``--broker`` takes, and what it does.
BROKER_METAVAR, BROKER_HELP = "ADDRESS", "ask this broker, where Redis cannot be reached; such as tcp://hub:7001"


class RunReader(Protocol):
    """A reader of a run: a registry, or a broker's view of it. Every method may raise Unavailable."""

    run_id: str

    async def read(self) -> Snapshot:
        """Returns what is known of islands, fragments and totals now."""

    async def read_events_after(self, after: EventNumber, count: int) -> list[NumberedEvent]:
        """Returns at most ``count`` events after a number, oldest first."""

    async def read_version(self, fragment_id: int, version: int | None) -> KeptVersion:
        """Returns a version of a fragment; None: the newest."""

    async def aclose(self) -> None:
        """Gives up the connection."""


def add_key_flags(parser: argparse.ArgumentParser) -> None:
    """Declares the flags beside ``--broker``."""
    key_help = "an observer's secret key file, with broker.public beside it; `atoll keys new observer NAME` makes it"
    parser.add_argument("--key", metavar="FILE", type=Path, help=key_help)
    insecure_help = "ask a broker of another machine that has no keys"
    parser.add_argument("--insecure", action="store_true", help=insecure_help)


def observed_run(broker: str | None, args: argparse.Namespace) -> ObservedRun | None:
    """Returns the run that ``--broker`` names; None without one.

    Args:
        broker: Its addresses, with commas between them.
        args: With ``run``, ``redis``, ``key``, ``insecure``.

    Raises:
        ConfigError: The address is none, the key is not an observer's, or two places to ask are named.
    """
    if broker is None:
        for name in ("key", "insecure"):
            if getattr(args, name):
                raise ConfigError(
                    name, str(getattr(args, name)), "is for a broker: name it with --broker tcp://HOST:PORT"
                )
        return None
    if args.redis is not None:
        raise ConfigError("broker", broker, "contradicts --redis: ask the one or the other")
    addresses = broker_addresses(broker)
    for address in addresses:
        check_exposure(address, setting="broker", key=args.key, insecure=args.insecure, role=KeyRole.OBSERVER)
    return ObservedRun(addresses, args.run or "", keys=client_keys(args.key, KeyRole.OBSERVER))


#: Who writes events repeats those of which it does not know whether they came; the last ones are compared.
COPIES = 1000


class FollowedEvents:
    """The events of one run, each once, oldest first."""

    def __init__(self) -> None:
        self._last: EventNumber = (0, 0)
        self._copies: deque[str] = deque(maxlen=COPIES)

    async def read(self, reader: RunReader, count: int) -> tuple[list[tuple[float, Note]], bool]:
        """Returns the next events, each as time by Redis' clock and note; and whether there were any.

        Args:
            reader: Whom to ask.
            count: The most to read.

        Raises:
            Unavailable: It does not answer.
        """
        numbered = await reader.read_events_after(self._last, count)
        found = []
        for number, event in numbered:
            self._last = number
            text = json.dumps(event, sort_keys=True)
            if text in self._copies:
                continue
            self._copies.append(text)
            fields = {key: value for key, value in event.items() if key not in ("n", "event")}
            note = read_note(str(event.get("event", "")), fields)
            if note is not None:
                found.append((number[0] / 1000, note))
        return found, bool(numbered)
