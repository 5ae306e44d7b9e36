"""How often what goes wrong again and again is said: often enough to be noticed, too rarely to bury the rest. Pure."""

from __future__ import annotations


def worth_repeating(times: int) -> bool:
    """Whether what has happened so many times is said again: the 1st, 10th, 100th, .. time."""
    return str(times).rstrip("0") == "1"
