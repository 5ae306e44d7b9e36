"""Versions for the training thread, as they are prepared: at once, or those of a recovery all together.

Communication thread only. What is not finite spreads to every fragment with the next step. So the global parameters
that replace a spoilt state wait for each other, and for a fresh optimizer.
"""

from __future__ import annotations

from collections.abc import Collection

from islands.protocol.fragment import Fragment
from islands.session.exchange import Batch, Exchange, Install


class Offers:
    """What an island's communication thread lets its training thread have."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._recovering = False
        self._held: dict[int, Install] = {}  # of a recovery, until every fragment is there

    def recover(self) -> None:
        """From here on, versions that replace everything are one batch, with a fresh optimizer."""
        self._recovering = True

    def offer(self, install: Install, fragments: Collection[Fragment]) -> None:
        """Lets the training thread have a version, or holds it until its batch is whole.

        Args:
            install: What was prepared.
            fragments: All that the run has, as the core knows them.
        """
        batch = Batch(installs=(install,))
        if self._recovering and install.keep == 0:
            self._held[install.fragment_id] = install
            if len(self._held) < len(fragments):
                return
            batch = Batch(installs=tuple(self._held.values()), fresh_optimizer=True)
            self._held.clear()
            self._recovering = False
        self._exchange.ready.append(batch)
        here = sum(fragment.newest >= 0 for fragment in fragments)
        self._exchange.doing = f"waiting for version 0: {here} of {len(fragments)} fragments are here"
        self._exchange.news.set()
