"""The wiring of a run: all links with both of their ends. Pure.

``up`` writes it as JSON, the links process reads it; a restarted one reads it again, and listens on the same ports.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ops.links.condition import LinkCondition

#: Address that the proxy listens on.
HOST = "127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Door:
    """A port of the proxy, and the target of its connections."""

    listen: int
    host: str
    port: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Wire:
    """One link: the doors that its client uses, for control and bulk of each broker, and its condition."""

    doors: tuple[Door, ...]
    condition: LinkCondition


@dataclass(frozen=True, slots=True, kw_only=True)
class Wiring:
    """All links of a run.

    Attributes:
        wires: By the name of the client.
    """

    wires: Mapping[str, Wire]

    def dump(self) -> str:
        """Returns the wiring as JSON."""
        links = {
            name: {
                "doors": [{"listen": d.listen, "host": d.host, "port": d.port} for d in wire.doors],
                "condition": wire.condition.table(),
            }
            for name, wire in self.wires.items()
        }
        return json.dumps({"links": links}, indent=1) + "\n"


def load(text: str) -> Wiring:
    """Returns the wiring that :meth:`Wiring.dump` wrote."""
    return Wiring(wires={name: _wire(each) for name, each in json.loads(text)["links"].items()})


def _wire(read: Mapping[str, Any]) -> Wire:
    doors = tuple(Door(**each) for each in read["doors"])
    return Wire(doors=doors, condition=LinkCondition.of(**read["condition"]))
