"""Python's collector of reference cycles, in a daemon with very many objects. Shell."""

from __future__ import annotations

import gc

#: New objects, collections of those, and collections of the survivors, until each next stage collects.
THRESHOLDS = (50_000, 20, 50)


def collect_seldom() -> None:
    """Has the collector look at old objects hardly ever; to be called once, when the modules are loaded.

    It stops everything for as long as it looks at all objects, which takes longer the more islands there are: 0.2 to
    0.8 s with a thousand, several times a minute, in which no heartbeat is answered. Nearly all objects here are in no
    cycle, and are freed without it.
    """
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)
