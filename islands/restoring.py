"""Restores the inner optimizer's state, from a checkpoint or from another island."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from broker.wire.errors import Unavailable
from islands.session import checkpoint, state_parts
from islands.session.checkpoint import Checkpoint
from islands.session.exchange import Exchange
from islands.session.state_parts import Needed

#: While the caller waits: how often to look for signals.
LOOK_EVERY_S = 0.2


def from_checkpoint(path: Path | None, needed: Needed, run_id: str) -> tuple[Checkpoint | None, str]:
    """Returns this island's own checkpoint if it has one that fits, and what there is to say about it."""
    try:
        saved = None if path is None else checkpoint.load(path)
    except Unavailable as err:
        return None, str(err)
    if saved is None:
        return None, "no --state-dir" if path is None else "no checkpoint yet"
    flaw = state_parts.unfit(saved, needed)
    if saved.run_id != run_id:
        flaw = f"it is of run {saved.run_id}" if saved.run_id else "it does not say of which run it is"
    if flaw:
        return None, f"the checkpoint does not serve: {flaw}"
    return saved, f"of step {saved.at.step}, life {saved.incarnation}"


def from_donor(exchange: Exchange, needed: Needed, check: Callable[[], None]) -> tuple[Checkpoint | None, str]:
    """Returns another island's state if one comes that fits, and what there is to say about it; waits for that.

    Args:
        exchange: With the communication thread.
        needed: What must fit.
        check: Raises where the wait is to end.
    """
    exchange.state_needed = needed
    exchange.wake()
    while exchange.state_found is None:
        if exchange.error is not None:
            raise exchange.error
        check()
        exchange.news.wait(LOOK_EVERY_S)
        exchange.news.clear()
    found, exchange.state_found = exchange.state_found, None
    return found.found, found.detail
