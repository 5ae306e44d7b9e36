"""The way from faults of links to the proxy that ``up --link`` places between clients and broker."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping
from pathlib import Path

from broker.errors import Unavailable

#: A region file in which every process has a link without any fault.
PLAIN = str(Path(__file__).with_name("plain_links.toml"))


def there_are_links() -> bool:
    """Says whether this program has the proxy at all."""
    return (
        importlib.util.find_spec("ops.links") is not None and importlib.util.find_spec("ops.links.control") is not None
    )


class LinkFaults:
    """Sets conditions through the control socket in a run directory."""

    def __init__(self, run_dir: Path) -> None:
        self._socket = run_dir / "links.sock"

    def set(self, link: str, condition: Mapping[str, float | bool], *, for_s: float) -> None:
        """Gives a link a condition for a while.

        Raises:
            ConfigError: The condition has a key or a value that there is not.
            Unavailable: The proxy does not answer.
        """
        conditions = importlib.import_module("ops.links.condition")
        control = importlib.import_module("ops.links.control")
        try:
            control.LinkControl(self._socket).set(link, conditions.LinkCondition.of(**condition), for_s=for_s)
        except OSError as err:
            raise Unavailable(f"the links do not answer at {self._socket}: {err}", definite=True) from err
