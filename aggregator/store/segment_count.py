"""Counts the segments of a tape (:mod:`aggregator.store.segments`) as its lines go by. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class SegmentCount:
    """Notices as the lines of a tape go by where segments are missing."""

    def __init__(self) -> None:
        self._segment = 0

    def skips(self, line: Mapping[str, Any]) -> bool:
        """Takes the next line; returns whether segments are missing before it."""
        before = self._segment
        self._segment = line["segment"] if "segment" in line else max(before, 1)
        return self._segment > before + 1
