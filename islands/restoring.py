"""Restores the inner optimizer's state: from a checkpoint, another island, or as the speaker did."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from broker.wire.errors import Unavailable
from broker.wire.messages import StateSource
from islands.config import IslandConfig
from islands.session import checkpoint, state_parts
from islands.session.checkpoint import Checkpoint
from islands.session.exchange import Exchange, StateFound
from islands.session.state_parts import Needed

#: While the caller waits: how often to look for signals.
LOOK_EVERY_S = 0.2


def beginning(
    exchange: Exchange, needed: Needed, path: Path | None, config: IslandConfig, check: Callable[[], None]
) -> StateFound:
    """Returns the state to begin with; may wait for another island's, or for the speaker's word.

    Args:
        exchange: With the communication thread.
        needed: What must fit.
        path: Of the checkpoint, if there may be one.
        config: Of the island.
        check: Raises where a wait is to end.
    """
    plans = exchange.plans
    if plans is not None and not plans.speaks:
        return _wait(exchange, needed, check)
    source = StateSource.CHECKPOINT
    saved, detail = from_checkpoint(path, needed, config.run_id)
    if saved is None:
        source = StateSource.FRESH
        if config.donor_wait_s and (needed.state or needed.local):
            # Before the parameters are installed: until then no round waits for this island.
            found = _wait(exchange, needed, check)
            saved, detail = found.found, f"{detail}; {found.detail}"
            source = StateSource.FRESH if saved is None else StateSource.DONOR
    return StateFound(found=saved, detail=detail, source=source)


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


def _wait(exchange: Exchange, needed: Needed, check: Callable[[], None]) -> StateFound:
    """Returns a state if one comes that fits, and what there is to say about it; waits for that."""
    exchange.state_needed = needed
    exchange.wake()
    while exchange.state_found is None:
        if exchange.error is not None:
            raise exchange.error
        check()
        exchange.news.wait(LOOK_EVERY_S)
        exchange.news.clear()
    found, exchange.state_found = exchange.state_found, None
    return found
