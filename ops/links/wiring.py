"""The wiring of a run: its links, with the two ends of each. Pure.

``up`` writes it as JSON, the links process reads it; a restarted one reads it again, and listens on the same ports.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ops.links.condition import LinkCondition
from ops.links.link import LinkEvent, LinkPlan

#: Address that the proxy listens on.
HOST = "127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Door:
    """A port that the proxy listens on, and where its connections go on to."""

    listen: int
    host: str
    port: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Wire:
    """One link: the doors that its client uses, for control and bulk of each broker, and its plan."""

    doors: tuple[Door, ...]
    plan: LinkPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Wiring:
    """All links of a run.

    Attributes:
        wires: By the name of the client.
        began_s: Monotonic seconds of this machine at which the run began: events count from here.
    """

    wires: Mapping[str, Wire]
    began_s: float = 0.0

    def dump(self) -> str:
        """Returns the wiring as JSON."""
        links = {
            name: {
                "doors": [{"listen": d.listen, "host": d.host, "port": d.port} for d in wire.doors],
                "condition": wire.plan.base.table(),
                "events": [{"at_s": e.at_s, "for_s": e.for_s, "changes": dict(e.changes)} for e in wire.plan.events],
            }
            for name, wire in self.wires.items()
        }
        written = {"began_s": self.began_s, "links": links}
        return json.dumps(written, indent=1) + "\n"


def load(text: str) -> Wiring:
    """Returns the wiring that :meth:`Wiring.dump` wrote."""
    read = json.loads(text)
    return Wiring(wires={name: _wire(each) for name, each in read["links"].items()}, began_s=read["began_s"])


def _wire(read: Mapping[str, Any]) -> Wire:
    plan = LinkPlan(
        base=LinkCondition.of(**read["condition"]), events=tuple(LinkEvent(**each) for each in read["events"])
    )
    return Wire(doors=tuple(Door(**each) for each in read["doors"]), plan=plan)
