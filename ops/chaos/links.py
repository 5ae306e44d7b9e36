"""The way from faults of links to the proxy that ``up --link`` places between clients and broker."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ops.links.condition import LinkCondition
from ops.links.control import SOCKET_NAME, LinkControl

#: A region file in which every process has a link without any fault to the brokers.
PLAIN = str(Path(__file__).with_name("plain_links.toml"))
#: Likewise to the brokers and to Redis.
PLAIN_WITH_REDIS = str(Path(__file__).with_name("plain_links_with_redis.toml"))
#: The proxy answers within milliseconds; nothing else is done while it is asked.
WITHIN_S = 1.0


class LinkFaults:
    """Sets conditions through the control socket in a run directory."""

    def __init__(self, run_dir: Path) -> None:
        self._control = LinkControl(run_dir / SOCKET_NAME, within_s=WITHIN_S)

    def set(self, link: str, condition: Mapping[str, float | bool], *, for_s: float) -> None:
        """Gives a link a condition for a while.

        Raises:
            ConfigError: There is no such link, or the condition has a key or a value that there is not.
            Unavailable: The proxy does not answer.
        """
        self._control.set(link, LinkCondition.of(**condition), for_s=for_s)
