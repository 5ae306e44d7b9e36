"""The region file of ``up --link``: conditions of links, and events that change them. Pure.

::

    [link."*"]            # every table whose glob means a client applies to it, the later one over the earlier
    delay_ms = 40

    [link."island-0"]
    jitter_ms = 5
    up_mbit = 100
    down_mbit = 200

    [[event]]
    at_s = 20             # from the beginning of the run
    for_s = 5             # without it: until the end
    link = "island-*"
    partition = true

A client that no table means keeps its direct way to the broker. The keys are those of :mod:`ops.links.condition`.
The way of an aggregator or a broker to Redis is ``aggregator.redis``; only a glob that ends in ``.redis`` means it.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from broker.base import sources
from broker.base.errors import ConfigError
from broker.base.settings import nearest
from ops.links.condition import FAULTLESS, LinkCondition
from ops.links.link import LinkEvent, LinkPlan

_EVENT_KEYS = ("at_s", "for_s", "link")
_TABLES = ("link", "event")
MAX_EVENTS = 10_000
#: What the name of a process's link to Redis ends in.
TO_REDIS = ".redis"
MAX_TIME_S = 1e8


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """A region file, read and checked.

    Attributes:
        tables: Glob and its keys, in the order of the file.
        events: Glob and the event, in the order of the file.
    """

    tables: Sequence[tuple[str, Mapping[str, Any]]]
    events: Sequence[tuple[str, LinkEvent]]

    def plans(self, names: Sequence[str]) -> dict[str, LinkPlan]:
        """Returns the plan of each link that a table means, of those that there may be.

        Raises:
            ConfigError: A glob means none of them, or an event none that a table means.
        """
        bases: dict[str, LinkCondition] = {}
        for glob, keys in self.tables:
            for name in meant(f'[link."{glob}"]', glob, names):
                bases[name] = bases.get(name, FAULTLESS).changed(keys)
        events: dict[str, list[LinkEvent]] = {name: [] for name in bases}
        for glob, event in self.events:
            for name in meant("[[event]] link", glob, list(bases)):
                events[name].append(event)
        return {name: LinkPlan(base=bases[name], events=tuple(events[name])) for name in names if name in bases}


def meant(field: str, glob: str, names: Sequence[str]) -> list[str]:
    """Returns the links that a glob means: to Redis if it ends like their names, else to the brokers.

    Raises:
        ConfigError: None.
    """
    found = [name for name in fnmatch.filter(names, glob) if name.endswith(TO_REDIS) == glob.endswith(TO_REDIS)]
    if not found:
        raise ConfigError(field, glob, f"means no link of this run; {nearest(glob, names)}")
    return found


def parse(text: str, *, source: str) -> Region:
    """Returns the region that TOML describes.

    Args:
        text: The file's content.
        source: Its name, for errors.

    Raises:
        ConfigError: It is no TOML, or something in it cannot be.
    """
    read = sources.parse_toml(text, field="link", source=source)
    for name in read:
        if name not in _TABLES:
            raise ConfigError(name, source, f"is nothing that this file has; {nearest(name, _TABLES)}")
    links, events = read.get("link"), read.get("event", [])
    if not isinstance(links, dict) or not links:
        raise ConfigError("link", source, 'has no links; write [link."island-0"] and below it delay_ms = 40')
    if not isinstance(events, list) or len(events) > MAX_EVENTS:
        raise ConfigError("event", source, f"must be at most {MAX_EVENTS} tables, each below [[event]]")
    return Region(tables=[_table(*each) for each in links.items()], events=[_event(each) for each in events])


def _table(glob: str, keys: Any) -> tuple[str, Mapping[str, Any]]:
    if not isinstance(keys, dict):
        raise ConfigError(
            f"link.{glob}", keys, f'must stand in a table of a link; write [link."island-0"] and {glob} below'
        )
    return glob, _within(f'[link."{glob}"]', keys)


def _within(place: str, keys: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the keys if they make a condition; an error names the place."""
    try:
        LinkCondition().changed(keys)
    except ConfigError as err:
        raise ConfigError(f"{place} {err.field}", err.value, err.cure) from None
    return keys


def _event(read: Any) -> tuple[str, LinkEvent]:
    if not isinstance(read, dict):
        raise ConfigError("event", read, "must be a table; write [[event]] and its keys below")
    place = "[[event]]"
    changes = _within(place, {key: value for key, value in read.items() if key not in _EVENT_KEYS})
    at_s, for_s = (_seconds(f"{place} {key}", read.get(key)) for key in ("at_s", "for_s"))
    glob = read.get("link")
    if at_s is None:
        raise ConfigError(f"{place} at_s", None, "is needed: seconds from the beginning of the run")
    if for_s == 0:
        raise ConfigError(f"{place} for_s", for_s, "must be above 0; leave it out for until the end")
    if not isinstance(glob, str):
        raise ConfigError(f"{place} link", glob, 'is needed: a name or a glob, such as "island-*"')
    if not changes:
        raise ConfigError(place, glob, "changes nothing; give it partition = true, stall = true, or another key")
    return glob, LinkEvent(at_s=at_s, for_s=for_s, changes=changes)


def _seconds(field: str, value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MAX_TIME_S:
        raise ConfigError(field, value, f"must be seconds, from 0 to {MAX_TIME_S:g}")
    return float(value)
