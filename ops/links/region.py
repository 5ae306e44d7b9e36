"""The region file of ``up --link``: conditions of links. Pure.

::

    [link."*"]            # every table whose glob means a client applies to it, the later one over the earlier
    delay_ms = 40

    [link."island-0"]
    jitter_ms = 5
    up_mbit = 100
    down_mbit = 200

A client that no table means keeps its direct way to the broker. The keys are those of :mod:`ops.links.condition`.
The way of an aggregator or a broker to Redis is ``aggregator.redis``; only a glob that ends in ``.redis`` means it.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from typing import Any

from broker.base import sources
from broker.base.errors import ConfigError
from broker.base.settings import nearest
from ops.links.condition import FAULTLESS, LinkCondition

#: What the name of a process's link to Redis ends in.
TO_REDIS = ".redis"
#: Glob and its keys, in the order of the file.
Tables = Sequence[tuple[str, Mapping[str, Any]]]


def conditions(tables: Tables, names: Sequence[str]) -> dict[str, LinkCondition]:
    """Returns the condition of each link that a table means, of those that there may be.

    Raises:
        ConfigError: A glob means none of them.
    """
    found: dict[str, LinkCondition] = {}
    for glob, keys in tables:
        for name in meant(f'[link."{glob}"]', glob, names):
            found[name] = found.get(name, FAULTLESS).changed(keys)
    return {name: found[name] for name in names if name in found}


def meant(field: str, glob: str, names: Sequence[str]) -> list[str]:
    """Returns the links that a glob matches: links to Redis if it ends like their names, else to brokers.

    Raises:
        ConfigError: None.
    """
    found = [name for name in fnmatch.filter(names, glob) if name.endswith(TO_REDIS) == glob.endswith(TO_REDIS)]
    if not found:
        raise ConfigError(field, glob, f"means no link of this run; {nearest(glob, names)}")
    return found


def parse(text: str, *, source: str) -> Tables:
    """Returns the tables of a file in TOML, checked.

    Args:
        text: The file's content.
        source: Its name, for errors.

    Raises:
        ConfigError: It is no TOML, or something in it cannot be.
    """
    read = sources.parse_toml(text, field="link", source=source)
    for name in read.keys() - {"link"}:
        cure = (
            "is nothing that this file has: write [link.NAME]; what changes links in mid-run is chaos, or LinkControl"
        )
        raise ConfigError(name, source, cure)
    links = read.get("link")
    if not isinstance(links, dict) or not links:
        raise ConfigError("link", source, 'has no links; write [link."island-0"] and below it delay_ms = 40')
    for glob, keys in links.items():
        if not isinstance(keys, dict):
            cure = f'must stand in a table of a link; write [link."island-0"] and {glob} below'
            raise ConfigError(f"link.{glob}", keys, cure)
        try:
            LinkCondition().changed(keys)
        except ConfigError as err:
            raise ConfigError(f'[link."{glob}"] {err.field}', err.value, err.cure) from None
    return list(links.items())
